"""`dspark prepare`: training data in the target's own words."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .errors import user_errors
from .options import Device, Thinking, check_file
from .pair import check_decoding, load_pair

if TYPE_CHECKING:
    from ..data import PrepareReport

FLAGS = {
    "api_key": "--api-key",
    "base_url": "--base-url",
    "concurrency": "--concurrency",
    "enable_thinking": "--thinking/--no-thinking",
    "max_batch": "--max-batch",
    "max_new_tokens": "--max-new-tokens",
    "model": "--served-model",
    "output": "--output",
    "prompt_tokens": "--prompt-tokens",
    "samples": "--samples",
    "target": "--target",
    "temperature": "--temperature",
    "timeout": "--timeout",
    "top_k": "--top-k",
    "top_p": "--top-p",
}
"""Flags by the library's names for them."""


def prepare(
    target: Annotated[
        str,
        typer.Option(
            help="Model to draft for: a Hub repository or a local folder. With --base-url only its tokenizer and "
            "config are loaded."
        ),
    ],
    output: Annotated[str, typer.Option(help="JSON Lines file for --data of `dspark train`; a broken run goes on.")],
    prompts: Annotated[
        str | None,
        typer.Option(
            help="Prompts, a JSON Lines file. Each row has `messages`, whose answers are replaced, `turns`, `prompt`, "
            "or `text`, gone on from as it is."
        ),
    ] = None,
    dataset: Annotated[
        str | None, typer.Option(help="In place of --prompts: a dataset of the Hub, or a folder, with such columns.")
    ] = None,
    subset: Annotated[str | None, typer.Option(help="Subset of --dataset, where it has several.")] = None,
    split: Annotated[str, typer.Option(help="Split of --dataset.")] = "train",
    drafter: Annotated[
        str | None, typer.Option(help="A drafter for the target, for speed: a Hub repository or a local folder.")
    ] = None,
    max_batch: Annotated[int, typer.Option(help="Rows decoded at once.")] = 8,
    base_url: Annotated[
        str | None,
        typer.Option(help="Let a server decode (vLLM, SGLang): its API's address, such as http://localhost:8000/v1."),
    ] = None,
    served_model: Annotated[
        str | None, typer.Option(help="Name under which the server has the target. (default: --target)")
    ] = None,
    api_key: Annotated[str | None, typer.Option(help="The server's key. (default: OPENAI_API_KEY)")] = None,
    concurrency: Annotated[int, typer.Option(help="Requests to the server at once.")] = 32,
    timeout: Annotated[float, typer.Option(help="Seconds until a request to the server is sent again.")] = 600.0,
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens of an answer.")] = 512,
    temperature: Annotated[float, typer.Option(help="0 for greedy decoding; sampled above.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Sample from the k likeliest tokens; 0 for all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Sample from the likeliest tokens with this total probability.")] = 1.0,
    samples: Annotated[int, typer.Option(help="Answers to each prompt.")] = 1,
    prompt_tokens: Annotated[int, typer.Option(help="Tokens of a `text` to go on from.")] = 64,
    thinking: Thinking = None,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Try rows again that failed in an earlier run.")
    ] = False,
    device: Device = None,
    dtype: Annotated[str, typer.Option(help="`auto`, `float32`, `bfloat16` or `float16`.")] = "auto",
    seed: Annotated[int, typer.Option(help="Seed of sampling.")] = 0,
) -> None:
    """Prepare training data: let the target answer prompts.

    A drafter learns best from what its target says itself. Answers are written to --output as they come; run the same
    command again to go on after a break. Rows that cannot be answered are in <output>.failed.jsonl, with the reason.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from ..data import Decoding, Server, prepare_data

    with user_errors(**FLAGS):
        check_decoding(max_new_tokens=1, temperature=0, top_k=0, top_p=1, dtype=dtype, seed=seed)
        decoding = Decoding(max_new_tokens, temperature, top_p, top_k)
        if base_url is None and (served_model or api_key):
            raise ValueError("--served-model and --api-key are for a server; give --base-url, too.")
        if base_url is not None and drafter is not None:
            raise ValueError("--drafter is for decoding here; leave it out with --base-url.")
        server = (
            None
            if base_url is None
            else Server(base_url, served_model, api_key, concurrency=concurrency, timeout=timeout)
        )
        rows = _read(prompts, dataset, subset, split)
        model, tokenizer, helper = target, None, None
        if server is None:
            model, tokenizer, helper = load_pair(target, drafter, device, dtype)
        columns = (TextColumn("answering"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns) as bar:
            task = bar.add_task("", total=None)
            report = prepare_data(
                model,
                rows,
                output,
                tokenizer=tokenizer,
                drafter=helper,
                max_batch=max_batch,
                server=server,
                decoding=decoding,
                samples=samples,
                prompt_tokens=prompt_tokens,
                enable_thinking=thinking,
                seed=seed,
                retry_failed=retry_failed,
                progress=lambda done, total: bar.update(task, completed=done, total=total),
            )
    typer.echo(_summary(report, output))
    if not report.rows + report.already_done:
        typer.echo("Error: No row could be answered.", err=True)
        raise typer.Exit(1)
    typer.echo(f"The data is in {os.fspath(Path(output))}.")


def _read(prompts: str | None, dataset: str | None, subset: str | None, split: str) -> Any:
    """A path, which is looked at before the target is loaded, or a dataset."""
    if (prompts is None) == (dataset is None):
        raise ValueError("Give either --prompts, a JSON Lines file, or --dataset.")
    if prompts is not None:
        check_file("--prompts", prompts)
        return prompts
    from datasets import load_dataset

    return load_dataset(dataset, subset, split=split)


def _summary(report: PrepareReport, output: str) -> str:
    """What became of the rows, a line for each reason of failures."""
    failed = sum(report.failed.values())
    lines = [
        f"{report.rows} rows written, {report.already_done + report.already_failed} skipped (of earlier runs: "
        f"{report.already_done} written, {report.already_failed} failed), {failed} failed",
        f"{report.tokens} tokens in {report.seconds:.1f} s, {report.tokens / report.seconds:.1f} tokens/s",
    ]
    for reason, count in sorted(report.failed.items(), key=lambda item: -item[1]):
        lines.append(f"  {count} × {reason} (first: {report.first_failed[reason]})")
    if failed + report.already_failed:
        lines.append(f"Failed rows are in {output}.failed.jsonl; --retry-failed tries them again.")
    return "\n".join(lines)


__all__ = ["prepare"]
