"""`dspark calibrate`: temperatures for a drafter's confidences, from real decoding."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .errors import user_errors
from .options import Device, Thinking
from .pair import check_decoding, check_template, decoding_options, encode, load_pair

if TYPE_CHECKING:
    from rich.table import Table

    from ..evaluation.calibration import PositionReport

REPORT_FILE, FIGURE_FILE = "calibration.json", "reliability.png"


def calibrate(
    target: Annotated[str, typer.Option(help="The target: a Hub repository or a local folder.")],
    drafter: Annotated[str, typer.Option(help="Its drafter: a Hub repository or a local folder.")],
    prompts: Annotated[
        str,
        typer.Option(
            help="Prompts that neither model was trained on, a JSON Lines file. Each row has `text`, gone on from as "
            "it is, or `prompt` or `turns` (the first of them counts), for which the chat template is used."
        ),
    ],
    output: Annotated[
        str, typer.Option(help="New folder for the calibrated drafter, or --drafter itself to calibrate it in place.")
    ],
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens to generate for each prompt.")] = 128,
    samples: Annotated[int, typer.Option(help="Texts to sample for each prompt.")] = 1,
    temperature: Annotated[
        float, typer.Option(help="Temperature that the drafter will be used at; 0 for greedy decoding.")
    ] = 1.0,
    top_k: Annotated[int, typer.Option(help="Sample from the k likeliest tokens; 0 for all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Sample from the likeliest tokens with this total probability.")] = 1.0,
    fit_share: Annotated[
        float, typer.Option(help="Share of the prompts to fit to; the scores are those of the others.")
    ] = 0.5,
    bins: Annotated[int, typer.Option(help="Bins of the calibration error.")] = 20,
    chat: Annotated[
        bool | None,
        typer.Option(help="Whether to use the chat template. (default: for `prompt` and `turns`, where there is one)"),
    ] = None,
    thinking: Thinking = None,
    device: Device = None,
    dtype: Annotated[str, typer.Option(help="`auto`, `float32`, `bfloat16` or `float16`.")] = "auto",
    seed: Annotated[int, typer.Option(help="Seed of sampling, and of the split of the prompts.")] = 0,
) -> None:
    """Calibrate the confidence head of a drafter.

    Text is generated from the prompts of one part, and one temperature per drafted position is fitted to what its
    confidences said and what survived (Sequential Temperature Scaling). The other part judges the result. Written to
    --output are the drafter with its temperatures, calibration.json, its model card and, with matplotlib,
    reliability.png.
    """
    import torch
    from rich.console import Console
    from rich.progress import Progress

    from ..evaluation import calibration
    from ..evaluation.plots import can_plot, plot_reliability
    from ..hub import write_card

    with user_errors(max_new_tokens="--max-new-tokens"):
        check_decoding(max_new_tokens, temperature, top_k, top_p, dtype, seed)
        _check(fit_share, bins, samples, temperature)
        _check_output(output, drafter)
        fitted, heldout = split_prompts(read_prompts(prompts), fit_share, seed)
        model, tokenizer, helper = load_pair(target, drafter, device, dtype)
        calibration.check_confidence_head(helper)
        check_template(tokenizer, chat, thinking)
        options = decoding_options(max_new_tokens, temperature, top_k, top_p) | {"num_return_sequences": samples}
        ids = [encode_prompt(tokenizer, prompt, chat, thinking).to(model.device) for prompt in (*fitted, *heldout)]
        torch.manual_seed(seed)
        parts = []
        for description, part in (
            ("generating to fit to", ids[: len(fitted)]),
            ("generating to judge by", ids[len(fitted) :]),
        ):
            with Progress() as progress:
                shown = progress.track(part, description=description)
                parts.append(calibration.collect_observations(model, helper, shown, **options))
        temperatures = calibration.fit_temperatures(parts[0], bins)
        before = calibration.report(parts[1], None, bins)
        after = calibration.report(parts[1], temperatures, bins)
        _save_drafter(drafter, output, temperatures)
        summary = {
            "target": target,
            "drafter": drafter,
            "prompts": prompts,
            "fitted_prompts": len(fitted),
            "heldout_prompts": len(heldout),
            "fitted_rounds": len(parts[0].logits),
            "heldout_rounds": len(parts[1].logits),
            "decoding": options,
            "seed": seed,
            "bins": bins,
            "temperatures": temperatures,
            "mean_ece": {
                part: {
                    "before": calibration.mean_over_positions(before, part),
                    "after": calibration.mean_over_positions(after, part),
                    "chance": calibration.mean_over_positions(after, part, "chance_ece"),
                }
                for part in ("prefix", "token")
            },
            "before": [dataclasses.asdict(entry) for entry in before],
            "after": [dataclasses.asdict(entry) for entry in after],
        }
        _write_json(Path(output) / REPORT_FILE, summary)
        if can_plot():
            plot_reliability(parts[1], temperatures, Path(output) / FIGURE_FILE, bins)
        write_card(output)
    console = Console()
    console.print(_token_table(before, after, temperatures))
    console.print(_prefix_table(before, after))
    _print_summary(console, summary)
    if not can_plot():
        console.print(f'No {FIGURE_FILE}: it needs matplotlib, pip install "dspark-hf[plots]".', markup=False)
    typer.echo(f"The calibrated drafter is in {os.fspath(Path(output))}.")


# --- input ---------------------------------------------------------------------------------------------------------


def _check(fit_share: float, bins: int, samples: int, temperature: float) -> None:
    if not 0 < fit_share < 1:
        raise ValueError(f"--fit-share is {fit_share}; give a share between 0 and 1, so that both parts have prompts.")
    if bins < 1:
        raise ValueError(f"--bins is {bins}; it must be at least 1.")
    if samples < 1:
        raise ValueError(f"--samples is {samples}; it must be at least 1.")
    if samples > 1 and temperature == 0:
        raise ValueError(f"--samples is {samples}, but at --temperature 0 all would be the same; leave it out.")


def _check_output(output: str, drafter: str) -> None:
    """Said before anything is loaded: what is in a folder is never written over."""
    from ..conversion.loading import check_output

    check_output(output, "--output")
    path = Path(output)
    if _is_same(output, drafter):
        if not _is_own_format(path):
            raise ValueError(
                f"--output is the drafter's own folder {output!r}, which is in another format than this package's; "
                "give a new folder."
            )
    elif path.is_dir() and any(path.iterdir()):
        raise ValueError(
            f"--output is {output!r}, which is not empty; give a new folder, or the drafter's own to calibrate it in "
            "place."
        )


def _is_same(output: str, drafter: str) -> bool:
    return Path(drafter).is_dir() and Path(output).resolve() == Path(drafter).resolve()


def _is_own_format(folder: Path) -> bool:
    """Whether a drafter's `config.json` is this package's; one that cannot be read is refused when it is loaded."""
    from ..conversion.formats import DSPARK, detect_format, read_json

    try:
        return detect_format(read_json(folder / "config.json")) == DSPARK
    except OSError:
        return True


@dataclasses.dataclass(frozen=True)
class Prompt:
    """Text of a prompt, and whether it is what a user says rather than text to go on from."""

    text: str
    is_turn: bool


def read_prompts(path: str) -> list[Prompt]:
    """The prompts of a JSON Lines file without repetitions, at least two.

    Raises:
        OSError, ValueError: if there is no such file, or a row is no prompt.
    """
    from ..evaluation.tasks import read_questions

    if not Path(path).is_file():
        kind = "a folder" if Path(path).is_dir() else "no file that exists"
        raise ValueError(f"--prompts is {path!r}, which is {kind}; give a JSON Lines file.")
    # Each once: a prompt in both parts would be fitted to and judged by.
    found = list(dict.fromkeys(Prompt(entry.turns[0], not entry.is_text) for entry in read_questions(path)))
    if len(found) < 2:
        raise ValueError(
            f"--prompts is {path!r}, with {len(found)} different prompts; give at least 2, best 50 or more."
        )
    return found


def split_prompts(prompts: list[Prompt], fit_share: float, seed: int) -> tuple[list[Prompt], list[Prompt]]:
    """A random part to fit to and the rest, neither empty."""
    shuffled = random.Random(seed).sample(prompts, len(prompts))
    count = min(max(round(fit_share * len(prompts)), 1), len(prompts) - 1)
    return shuffled[:count], shuffled[count:]


def encode_prompt(tokenizer: Any, prompt: Prompt, chat: bool | None, thinking: bool | None) -> Any:
    """Ids `(1, length)` of a prompt."""
    if chat is None and not prompt.is_turn:
        chat = False
    ids = encode(tokenizer, prompt.text, chat, None if chat is False else thinking)
    if not ids.numel():
        raise ValueError(f"The prompt {prompt.text!r:.60} has no token for the target's tokenizer; leave it out.")
    return ids


# --- output --------------------------------------------------------------------------------------------------------


def _save_drafter(drafter: str, output: str, temperatures: list[float]) -> None:
    """Puts the drafter into `output`, in the precision that it is stored in, and the temperatures into its config."""
    from ..conversion.formats import read_json
    from ..factory import AutoDrafter

    folder = Path(output)
    if not _is_same(output, drafter):
        folder.mkdir(parents=True, exist_ok=True)
        if Path(drafter).is_dir() and _is_own_format(Path(drafter)):
            for path in filter(Path.is_file, Path(drafter).iterdir()):
                shutil.copy2(path, folder)
        else:
            AutoDrafter.from_pretrained(drafter).save_pretrained(folder)
    config = read_json(folder / "config.json")
    _write_json(folder / "config.json", {**config, "confidence_temperatures": temperatures})


def _write_json(path: Path, content: dict[str, Any]) -> None:
    """Replaces the file in one step, so that none is left half written."""
    text = json.dumps(content, indent=2, sort_keys=path.name == "config.json", allow_nan=False) + "\n"
    new = path.with_name(path.name + ".new")
    new.write_text(text, encoding="utf-8")
    os.replace(new, path)


def _token_table(
    before: Sequence[PositionReport], after: Sequence[PositionReport], temperatures: list[float]
) -> Table:
    """Scores of the confidence of each token."""
    table = _table(
        "each drafted token, where all before it survived",
        ("position", "temperature", "rounds", "survive", *_both("ECE"), *_both("Brier"), "AUROC"),
    )
    for old, new, temperature in zip(before, after, temperatures, strict=True):
        a, b = old.token, new.token
        if a is None or b is None:
            table.add_row(str(old.position), f"{temperature:.2f}")
            continue
        scores = (f"{a.ece:.1%}", f"{b.ece:.1%}", f"{a.brier:.3f}", f"{b.brier:.3f}", _area(a.auroc))
        table.add_row(str(old.position), f"{temperature:.2f}", str(a.cases), f"{a.share:.0%}", *scores)
    return table


def _prefix_table(before: Sequence[PositionReport], after: Sequence[PositionReport]) -> Table:
    """Scores of the products of confidences."""
    table = _table(
        "product of confidences, against survival of the whole prefix",
        ("prefix", "rounds", "survive", *_both("ECE"), "ECE by\nchance", *_both("Brier"), *_both("AUROC")),
    )
    for old, new in zip(before, after, strict=True):
        a, b = old.prefix, new.prefix
        if a is None or b is None:
            table.add_row(str(old.position))
            continue
        errors = (f"{a.ece:.1%}", f"{b.ece:.1%}", f"{b.chance_ece:.1%}")
        scores = (f"{a.brier:.3f}", f"{b.brier:.3f}", _area(a.auroc), _area(b.auroc))
        table.add_row(str(old.position), str(a.cases), f"{a.share:.0%}", *errors, *scores)
    return table


def _both(score: str) -> tuple[str, str]:
    """Headers of a score without the temperatures and with them."""
    return f"{score}\nbefore", f"{score}\nafter"


def _table(title: str, columns: Sequence[str]) -> Table:
    """Narrow enough for 80 columns."""
    from rich import box
    from rich.table import Table

    table = Table(title=title, box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _area(value: float | None) -> str:
    return "" if value is None or math.isnan(value) else f"{value:.3f}"


def _print_summary(console: Any, summary: dict[str, Any]) -> None:
    error = summary["mean_ece"]["prefix"]
    console.print(
        f"mean ECE of prefixes {error['before']:.1%}, calibrated {error['after']:.1%}, over "
        f"{summary['heldout_rounds']} rounds from {summary['heldout_prompts']} prompts that were not fitted to; "
        f"confidences without fault would show {error['chance']:.1%} by chance",
        highlight=False,
    )
    if error["after"] > error["before"]:
        console.print(
            "[yellow]![/yellow] calibration made it no better: confidences were right before, or there are too few "
            "rounds to tell"
        )


__all__ = ["Prompt", "calibrate", "encode_prompt", "read_prompts", "split_prompts"]
