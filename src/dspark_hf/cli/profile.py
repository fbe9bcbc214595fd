"""`dspark profile`: what verifications and drafts cost on this machine, for the scheduler."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .errors import user_errors
from .options import Device
from .pair import check_card_folders, check_decoding, load_pair

if TYPE_CHECKING:
    from rich.table import Table

    from ..generation.capacity import CapacityProfile

FIGURE_FORMATS = (".pdf", ".png", ".svg")


def profile(
    target: Annotated[str, typer.Option(help="The target: a Hub repository or a local folder.")],
    drafter: Annotated[
        str | None, typer.Option(help="Its drafter, whose cost scheduling needs: a Hub repository or a local folder.")
    ] = None,
    max_rows: Annotated[int, typer.Option(help="Most rows of a batch; measured are 1, 2, 4, ... and this.")] = 8,
    lengths: Annotated[
        int | None, typer.Option(help="Most tokens per row of a verification. (default: all that the drafter needs)")
    ] = None,
    context: Annotated[
        list[int] | None, typer.Option(help="Length of the text before; may be given several times. (default: 128)")
    ] = None,
    repeats: Annotated[int, typer.Option(help="Timed runs of each; figures are medians.")] = 9,
    device: Device = None,
    dtype: Annotated[str, typer.Option(help="`auto`, `float32`, `bfloat16` or `float16`.")] = "auto",
    output: Annotated[
        str | None, typer.Option(help="File to save to, in place of the cache in which `generate` looks.")
    ] = None,
    figure: Annotated[str | None, typer.Option(help="File for a figure; needs matplotlib.")] = None,
    card: Annotated[
        bool, typer.Option("--card", help="Put the times into the drafter's folder and its model card, too.")
    ] = False,
) -> None:
    """Measure how long verifications take on this machine and, with --drafter, what drafts cost.

    What is measured is saved, and `generate` then schedules drafts by it wherever the same target runs on the same
    device in the same dtype, on as many threads. Run it while nothing else keeps the machine busy.
    """
    from rich.console import Console

    from ..generation.capacity import check_measurement, measure_capacity, save_profile
    from ..hub.card import EVIDENCE, write_card

    contexts = context or [128]
    with user_errors(max_rows="--max-rows", lengths="--lengths", contexts="--context", repeats="--repeats"):
        check_decoding(max_new_tokens=1, temperature=0, top_k=0, top_p=1, dtype=dtype, seed=0, repeats=repeats)
        check_measurement(max_rows=max_rows, lengths=lengths, contexts=contexts, repeats=repeats, warmup=0)
        _check_files(output, figure)
        if card:
            if drafter is None:
                raise ValueError("--card needs --drafter, into whose folder the times go.")
            check_card_folders([drafter])
        model, _, helper = load_pair(target, drafter, device, dtype)
        measured = _with_progress(
            measure_capacity, model, helper, max_rows=max_rows, lengths=lengths, contexts=contexts, repeats=repeats
        )
        if output is None:
            place = save_profile(measured, model)
        else:
            place = Path(output)
            measured.save(place)
        if card and drafter is not None:
            measured.save(Path(drafter) / EVIDENCE["capacity"])
            write_card(drafter)
        if figure is not None:
            from ..evaluation.plots import plot_capacity

            plot_capacity(measured, figure)
    console = Console()
    console.print(measured.description, highlight=False)
    for length in measured.contexts:
        console.print(_table(measured, length))
    if helper is None:
        console.print("Scheduling needs to know what drafts cost as well: give --drafter.", highlight=False)
    typer.echo(f"The profile is in {place}.")


def _check_files(output: str | None, figure: str | None) -> None:
    """Said before anything is loaded."""
    from ..evaluation.plots import can_plot

    for flag, path in (("--output", output), ("--figure", figure)):
        if path is not None and Path(path).is_dir():
            raise ValueError(f"{flag} is {path!r}, which is a folder; give a file.")
    if figure is None:
        return
    if Path(figure).suffix.lower() not in FIGURE_FORMATS:
        raise ValueError(f"--figure is {figure!r}; its ending must be one of {', '.join(FIGURE_FORMATS)}.")
    if not Path(figure).parent.is_dir():
        raise ValueError(f"--figure is {figure!r}, in a folder that does not exist; make it first.")
    if not can_plot():
        raise ValueError('--figure needs matplotlib: pip install "dspark-hf[plots]".')


def _with_progress(measure: Any, *arguments: Any, **options: Any) -> CapacityProfile:
    from rich.progress import Progress

    with Progress() as bar:
        task = bar.add_task("measuring", total=None)
        measured: CapacityProfile = measure(
            *arguments, **options, progress=lambda done, total: bar.update(task, completed=done, total=total)
        )
    return measured


def _table(measured: CapacityProfile, context: int) -> Table:
    """A line per number of rows, a column per length; below each time, verifications per second."""
    from rich import box
    from rich.table import Table

    title = f"context {context}: milliseconds by tokens per row, verifications a second"
    table = Table(title=title, box=box.SIMPLE, show_lines=True, pad_edge=False, collapse_padding=True)
    counts = measured.draft.counts if measured.draft else ()
    for column in ("rows", *map(str, measured.lengths), *(f"draft {count}" for count in counts)):
        table.add_column(column, justify="right", no_wrap=True)
    for rows in measured.rows:
        seconds = measured.curve(rows, context).seconds
        verified = [f"{_short(1000 * time)}\n{1 / time:.0f}/s" for time in seconds]
        drafted = [f"+{_short(1000 * measured.draft_seconds(rows, context, count))}" for count in counts]
        table.add_row(str(rows), *verified, *drafted)
    return table


def _short(value: float) -> str:
    """Three digits, more where there are more before the point."""
    return f"{value:.{max(0, 3 - len(str(int(value))))}f}"


__all__ = ["profile"]
