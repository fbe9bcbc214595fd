"""`dspark eval`: drafters of one target side by side."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from typer.core import TyperCommand

from .errors import user_errors
from .options import Device, Thinking
from .pair import check_card_folders, check_decoding, check_template, load_models

if TYPE_CHECKING:
    from rich.table import Table

LISTS = ("--tasks", "--temperatures", "--batch-sizes", "--num-draft-tokens", "--thresholds", "--schedulers")
"""Options that take several values."""

FLAGS = {
    "batch_sizes": "--batch-sizes",
    "chat": "--chat/--no-chat",
    "drafters": "--drafter",
    "limit": "--limit",
    "max_new_tokens": "--max-new-tokens",
    "num_draft_tokens": "--num-draft-tokens",
    "output": "--output",
    "prompts": "--prompts",
    "schedulers": "--schedulers",
    "target": "--target",
    "tasks": "--tasks",
    "temperatures": "--temperatures",
    "thresholds": "--thresholds",
    "top_k": "--top-k",
    "top_p": "--top-p",
    "turns": "--turns",
}
"""Flags by the library's names for them."""

Number = TypeVar("Number", int, float)


class ListsCommand(TyperCommand):
    """A command whose options of several values take them separated by spaces, too: `--temperatures 0 1`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        joined: list[str] = []
        in_list = False
        for arg in args:
            if arg.startswith("-"):
                in_list = arg.split("=")[0] in LISTS
                joined.append(arg)
            elif in_list and (not joined[-1].startswith("-") or "=" in joined[-1]):
                joined[-1] += f",{arg}"
            else:
                joined.append(arg)
        return super().parse_args(ctx, joined)


def evaluate(
    target: Annotated[str, typer.Option(help="The target: a Hub repository or a local folder.")],
    drafter: Annotated[
        list[str], typer.Option(help="Its drafter: a Hub repository or a local folder; give it again for each other.")
    ],
    output: Annotated[str, typer.Option(help="JSON file for the report; a broken run goes on.")],
    tasks: Annotated[
        str,
        typer.Option(
            help="gsm8k, math500, aime25, mbpp, humaneval, livecodebench, mt-bench, alpaca, arena-hard; embedded (the "
            "held-out prompts of the embedded pair); or JSON Lines files. (default: all files of --prompts)"
        ),
    ] = "",
    prompts: Annotated[
        str | None,
        typer.Option(
            help="Folder with <task>.jsonl for each task, or the file of the only one; rows have `turns`, `prompt` or "
            "`text`. (default: the Hub)"
        ),
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Most questions of a task. (default: all)")] = None,
    turns: Annotated[int | None, typer.Option(help="Most turns of a question. (default: all)")] = None,
    temperatures: Annotated[str, typer.Option(help="0 for greedy decoding; sampled above.")] = "0,1",
    batch_sizes: Annotated[str, typer.Option(help="Questions answered at once.")] = "1",
    num_draft_tokens: Annotated[
        str, typer.Option(help="Most tokens drafted in a round. (default: whole blocks)")
    ] = "",
    thresholds: Annotated[str, typer.Option(help="Confidences below which a proposal is cut; 0 never cuts.")] = "0",
    schedulers: Annotated[
        str, typer.Option(help="What decides how much is verified: none, auto, hardware, early_stop, asynchronous.")
    ] = "none",
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens of an answer.")] = 512,
    top_k: Annotated[int, typer.Option(help="Sample from the k likeliest tokens; 0 for all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Sample from the likeliest tokens with this total probability.")] = 1.0,
    chat: Annotated[
        bool | None,
        typer.Option(help="Whether to use the chat template. (default: for `prompt` and `turns`, where there is one)"),
    ] = None,
    thinking: Thinking = None,
    confidence: Annotated[
        bool, typer.Option(help="Whether to judge confidences, too, in further runs that are not timed.")
    ] = True,
    card: Annotated[
        bool, typer.Option("--card", help="Put each drafter's figures into its folder and its model card.")
    ] = False,
    device: Device = None,
    dtype: Annotated[str, typer.Option(help="`auto`, `float32`, `bfloat16` or `float16`.")] = "auto",
    seed: Annotated[int, typer.Option(help="Seed of sampling.")] = 0,
) -> None:
    """Compare drafters with plain generate, and with each other, on the same questions.

    Every combination of the options that take several values is measured, plain and drafted decoding in turns. Values
    are separated by commas or spaces. Finished batches are kept beside --output; run the same command again to go on
    after a break. Figures, which need matplotlib, are written beside it, too.
    """
    from rich.console import Console

    from ..evaluation.harness import EvaluationSettings, evaluate_drafters
    from ..evaluation.plots import can_plot, plot_evaluation
    from ..evaluation.tasks import load_tasks

    console = Console()
    with user_errors(**FLAGS):
        check_decoding(max_new_tokens, 0, top_k, top_p, dtype, seed)
        settings = EvaluationSettings(
            temperatures=_numbers("--temperatures", temperatures, float),
            batch_sizes=_numbers("--batch-sizes", batch_sizes, int),
            num_draft_tokens=_numbers("--num-draft-tokens", num_draft_tokens, int),
            thresholds=_numbers("--thresholds", thresholds, float),
            schedulers=tuple(_parts(schedulers)),
            max_new_tokens=max_new_tokens,
            top_k=top_k,
            top_p=top_p,
            chat=chat,
            enable_thinking=thinking,
            confidence=confidence,
            seed=seed,
        )
        labels = name_drafters(drafter)
        if card:
            check_card_folders(drafter)
        chosen = load_tasks(_parts(tasks), prompts, limit, turns)
        model, tokenizer, helpers = load_models(target, drafter, device, dtype)
        check_template(tokenizer, chat, thinking)
        report = _with_progress(
            evaluate_drafters, model, dict(zip(labels, helpers, strict=True)), tokenizer, chosen, output, settings
        )
        figures = plot_evaluation(report, output) if can_plot() else []
        if card:
            _fill_cards(report, dict(zip(labels, drafter, strict=True)))
    for table in figures_tables(report):
        console.print(table)
    if report["confidence"]:
        console.print(confidence_table(report))
    for line in remarks(report):
        console.print(line, highlight=False)
    typer.echo(f"The report is in {os.fspath(output)}.")
    if figures:
        typer.echo(f"Figures: {', '.join(map(str, figures))}.")
    else:
        typer.echo('No figures: they need matplotlib, pip install "dspark-hf[plots]".')


# --- input -----------------------------------------------------------------------------------------------------------


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _numbers(option: str, text: str, kind: Callable[[str], Number]) -> tuple[Number, ...]:
    try:
        return tuple(map(kind, _parts(text)))
    except ValueError as error:
        what = "whole numbers" if kind is int else "numbers"
        raise ValueError(f"{option} is {text!r}; give {what} separated by commas or spaces.") from error


def name_drafters(paths: Sequence[str]) -> list[str]:
    """Short names for the drafters: the ends of their paths, as long as they must be to differ.

    Raises:
        ValueError: if one is there twice.
    """
    parts = [PurePath(os.path.normpath(path)).parts for path in paths]
    if len(set(parts)) < len(parts):
        raise ValueError("--drafter has one drafter several times; give each once.")
    for count in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-count:]) for part in parts]
        if len(set(names)) == len(names):
            break
    return names


def _fill_cards(report: Mapping[str, Any], folders: Mapping[str, str]) -> None:
    from ..hub import keep_evaluation, write_card

    for name, folder in folders.items():
        keep_evaluation(folder, report, name)
        write_card(folder)


def _with_progress(work: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    with Progress(TextColumn("answering"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()) as bar:
        task = bar.add_task("", total=None)
        return work(*arguments, lambda done, total: bar.update(task, completed=done, total=total))


# --- output ----------------------------------------------------------------------------------------------------------

_COLUMNS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "drafter": ("drafter", str),
    "temperature": ("T", lambda value: f"{value:g}"),
    "batch_size": ("batch", str),
    "num_draft_tokens": ("drafts\nup to", str),
    "threshold": ("cut\nbelow", lambda value: f"{value:g}"),
    "scheduler": ("scheduler", str),
}
"""Headers of what tells rows apart."""


def figures_tables(report: Mapping[str, Any]) -> list[Table]:
    """A table per task with a line per row of the report; of what tells rows apart, only what differs."""
    rows = report["rows"]
    names = [name for name in _COLUMNS if name == "temperature" or len({row[name] for row in rows}) > 1]
    return [_figures_table(task, [row for row in rows if row["task"] == task], names) for task in report["tasks"]]


def _figures_table(task: str, rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> Table:
    table = _table(task)
    for name in names:
        # Only names of drafters are long.
        width = min(8, max(len(row["drafter"]) for row in rows)) if name == "drafter" else None
        table.add_column(_COLUMNS[name][0], justify="right", no_wrap=width is None, overflow="fold", min_width=width)
    has_greedy = any(row["identical_to_plain"] is not None for row in rows)
    for header in ("accepted\nlength", "predicted", "kept", "tok/s", "speed", *(["same\ntext"] if has_greedy else [])):
        table.add_column(header, justify="right", no_wrap=True)
    for row in rows:
        same = "" if row["identical_to_plain"] is None else f"{row['identical_to_plain']}/{row['answers']}"
        table.add_row(
            *(_COLUMNS[name][1](row[name]) for name in names),
            _with_interval(row, "accepted_length"),
            _two(row["predicted_accepted_length"]),
            "" if row["acceptance_rate"] is None else f"{row['acceptance_rate']:.0%}",
            f"{row['tokens_per_second']:.1f}",
            _with_interval(row, "speedup"),
            *([same] if has_greedy else []),
        )
    return table


def confidence_table(report: Mapping[str, Any]) -> Table:
    """Calibration of the confidences, means over the positions."""
    table = _table("how well confidences fit: means over positions")
    for name in ("task", "drafter"):
        table.add_column(name)
    for header in ("T", "ECE", "AUROC", "ECE\nprefix", "AUROC\nprefix"):
        table.add_column(header, justify="right")
    for entry in report["confidence"]:
        scores = []
        for part in ("token", "prefix"):
            ece, area = entry["mean_ece"][part], entry["mean_auroc"][part]
            scores += ["" if ece is None else f"{ece:.1%}", "" if area is None else f"{area:.3f}"]
        table.add_row(entry["task"], entry["drafter"], f"{entry['temperature']:g}", *scores)
    return table


def remarks(report: Mapping[str, Any]) -> list[str]:
    """What a reader of the tables should know besides."""
    lines = [
        "accepted length: tokens per pass of the target, bonus token included; predicted: from acceptance by position",
        "kept: share of the verified drafted tokens; speed: times plain generate's; same text: as plain generate's",
        f"below figures: {report['interval_level']:.0%} intervals over questions, of speeds over batches of questions",
    ]
    differing = [row for row in report["rows"] if row["identical_to_plain"] not in (None, row["answers"])]
    if differing:
        lines.append(
            "greedy texts differ from plain generate's: in less than float32, or between two nearly equal logits, the "
            "order of arithmetic can decide"
        )
    left_out = {task: count for task, count in report["left_out"].items() if count}
    for task, count in left_out.items():
        lines.append(f"{task}: {count} answers, over all settings, had no room in the target's context")
    return lines


def _table(title: str) -> Table:
    from rich import box
    from rich.table import Table

    return Table(title=title, box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))


def _two(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _with_interval(row: Mapping[str, Any], name: str) -> str:
    ends = row[f"{name}_interval"]
    return _two(row[name]) + (f"\n{ends[0]:.2f}–{ends[1]:.2f}" if ends else "")


__all__ = ["ListsCommand", "confidence_table", "evaluate", "figures_tables", "name_drafters", "remarks"]
