"""Accepted length and speed of the embedded pair on held-out prompts of three kinds.

Plain `generate` and `generate` with the drafter take turns, prompt by prompt, in one process. A speed is tokens per
second with the drafter over those of plain `generate` in the same repeat, all prompts of a kind together; the median
and the range over the repeats are reported. Accepted length is tokens per round, the bonus token included. Small
models loop when they decode greedily, and loops are easy to draft: the share of repeated 8-grams stands beside each
figure, and sampling at temperature 1 is the headline.

A batch of prompts of all kinds, padded on the left, is measured in the same way against plain batched `generate`.
Whole drafts are verified; for another `--scheduler`, what the machine takes is measured first, as by `dspark profile`.

    python benchmarks/embedded_pair.py --prompts-per-kind 5 --repeats 5 --batch-size 8
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from report import versions, write_report
from rich.console import Console
from rich.progress import track
from rich.table import Table

from dspark_hf.embedded import load_embedded_pair, load_prompts
from dspark_hf.evaluation import Comparison, compare, repeated_share
from dspark_hf.generation.capacity import measure_capacity, save_profile
from dspark_hf.generation.schedulers import SCHEDULERS

RESULTS = Path(__file__).resolve().parent / "results"
KINDS = ("code", "prose", "structured")
DECODINGS: dict[str, dict[str, Any]] = {
    "temperature 1": {"do_sample": True, "temperature": 1.0, "top_k": 0},
    "greedy": {"do_sample": False},
}


def scheduling(args: argparse.Namespace, pair: Any) -> dict[str, Any]:
    """Options of `generate`; what the machine takes is measured and kept where `generate` looks for it."""
    if args.scheduler != "none":
        target, _, drafter = pair
        os.environ["DSPARK_CACHE"] = tempfile.mkdtemp()
        save_profile(measure_capacity(target, drafter, max_rows=args.batch_size, contexts=(64, 192)), target)
    return {"dspark_scheduler": args.scheduler}


def measure(
    kind: str, decoding: str, args: argparse.Namespace, scheduler: dict[str, Any], pair: Any
) -> dict[str, Any]:
    """Figures of one kind of prompt under one way of decoding."""
    target, tokenizer, drafter = pair
    options = {"max_new_tokens": args.new_tokens, **DECODINGS[decoding]}
    prompts = [prompt for prompt in load_prompts() if prompt.kind == kind][: args.prompts_per_kind]
    comparisons = []
    for prompt in track(prompts, description=f"{kind}, {decoding}"):
        prompt_ids = tokenizer(prompt.text, return_tensors="pt").input_ids
        compare(target, drafter, prompt_ids, max_new_tokens=8, do_sample=False)  # warm-up
        comparisons.append(
            compare(target, drafter, prompt_ids, repeats=args.repeats, draft_options=scheduler, **options)
        )
    return figures(kind, decoding, comparisons)


def measure_batch(decoding: str, args: argparse.Namespace, scheduler: dict[str, Any], pair: Any) -> dict[str, Any]:
    """Figures of one batch, its prompts taken from the three kinds in turn."""
    target, tokenizer, drafter = pair
    kinds = [[prompt for prompt in load_prompts() if prompt.kind == kind] for kind in KINDS]
    prompts = [kinds[index % len(kinds)][index // len(kinds)] for index in range(args.batch_size)]
    inputs = tokenizer([prompt.text for prompt in prompts], padding=True, padding_side="left", return_tensors="pt")
    options = {"attention_mask": inputs.attention_mask, **DECODINGS[decoding]}
    compare(target, drafter, inputs.input_ids, max_new_tokens=8, **options)  # warm-up
    options["max_new_tokens"] = args.new_tokens
    batch = compare(target, drafter, inputs.input_ids, repeats=args.repeats, draft_options=scheduler, **options)
    return figures(f"batch of {args.batch_size}", decoding, [batch])


def figures(kind: str, decoding: str, comparisons: list[Comparison]) -> dict[str, Any]:
    """Summary of several comparisons with the same number of repeats."""
    ratios = []
    for repeat in range(len(comparisons[0].plain_seconds)):
        plain = sum(c.plain_tokens[repeat] for c in comparisons) / sum(c.plain_seconds[repeat] for c in comparisons)
        draft = sum(c.draft_tokens[repeat] for c in comparisons) / sum(c.draft_seconds[repeat] for c in comparisons)
        ratios.append(draft / plain)
    rounds = [entry for c in comparisons for stats in c.stats for entry in stats.rounds]
    rows = [(plain, draft) for c in comparisons for plain, draft in zip(c.plain_ids, c.draft_ids, strict=True)]
    return {
        "kind": kind,
        "decoding": decoding,
        "prompts": len(rows),
        "accepted_length": sum(entry.emitted for entry in rounds) / sum(entry.rows for entry in rounds),
        "speedup_median": statistics.median(ratios),
        "speedup_range": [min(ratios), max(ratios)],
        "draft_seconds_per_round": statistics.median(entry.draft_seconds for entry in rounds),
        "verify_seconds_per_round": statistics.median(entry.verify_seconds for entry in rounds),
        "repeated_8grams": statistics.fmean(repeated_share(draft.tolist()) for _, draft in rows),
        "repeated_8grams_plain": statistics.fmean(repeated_share(plain.tolist()) for plain, _ in rows),
        "identical_to_plain": sum(p.tolist() == d.tolist() for p, d in rows) if decoding == "greedy" else None,
    }


def summarise(rows: list[dict[str, Any]], decoding: str) -> dict[str, float]:
    """Means over the three kinds."""
    mine = [row for row in rows if row["decoding"] == decoding and row["kind"] in KINDS]
    names = ("accepted_length", "speedup_median", "repeated_8grams")
    return {name: statistics.fmean(row[name] for row in mine) for name in names}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts-per-kind", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--scheduler", choices=["none", *SCHEDULERS], default="none")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--output", type=Path, default=RESULTS / "embedded_pair.json")
    args = parser.parse_args()
    for name in ("prompts_per_kind", "repeats", "new_tokens", "batch_size", "threads"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is {getattr(args, name)}; it must be at least 1.")
    torch.set_num_threads(args.threads)
    pair = load_embedded_pair()
    scheduler = scheduling(args, pair)
    rows = [measure(kind, decoding, args, scheduler, pair) for decoding in DECODINGS for kind in KINDS]
    rows += [measure_batch(decoding, args, scheduler, pair) for decoding in DECODINGS]
    report = {
        "machine": {"cpu": platform.machine(), "threads": args.threads},
        "versions": versions(),
        "settings": {
            "new_tokens": args.new_tokens,
            "repeats": args.repeats,
            "scheduler": args.scheduler,
            "dtype": "float32",
        },
        "rows": rows,
        "means": {decoding: summarise(rows, decoding) for decoding in DECODINGS},
    }
    write_report(report, args.output)
    show(report)


def show(report: dict[str, Any]) -> None:
    table = Table(title="embedded pair, held-out prompts; speed is a multiple of plain generate's")
    for column in (
        "decoding",
        "kind",
        "accepted length",
        "speed",
        "range",
        "draft ms",
        "verify ms",
        "repeated 8-grams",
    ):
        table.add_column(column, justify="left" if column in ("decoding", "kind") else "right")
    for row in report["rows"]:
        low, high = row["speedup_range"]
        table.add_row(
            row["decoding"],
            row["kind"],
            f"{row['accepted_length']:.2f}",
            f"{row['speedup_median']:.2f}x",
            f"{low:.2f}-{high:.2f}",
            f"{row['draft_seconds_per_round'] * 1000:.2f}",
            f"{row['verify_seconds_per_round'] * 1000:.2f}",
            f"{row['repeated_8grams']:.0%}",
        )
    for decoding, means in report["means"].items():
        table.add_section()
        table.add_row(
            decoding,
            "mean",
            f"{means['accepted_length']:.2f}",
            f"{means['speedup_median']:.2f}x",
            "",
            "",
            "",
            f"{means['repeated_8grams']:.0%}",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
