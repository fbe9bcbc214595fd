"""What a static confidence threshold does on the embedded pair, for each kind of prompt.

For each threshold, held-out prompts are decoded at temperature 1 with proposals cut at their first token whose
confidence is below it. Reported are tokens per round (accepted length, bonus token included), the share of verified
drafted tokens that were kept, and how many were verified per round.

    python benchmarks/thresholds.py --prompts-per-kind 10
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from report import versions, write_report
from rich.console import Console
from rich.progress import track
from rich.table import Table

from dspark_hf.embedded import load_embedded_pair, load_prompts
from dspark_hf.evaluation.plots import can_plot, plot_thresholds

RESULTS = Path(__file__).resolve().parent / "results"
KINDS = ("code", "prose", "structured")
DECODING: dict[str, Any] = {"do_sample": True, "temperature": 1.0, "top_k": 0}


def measure(kind: str, threshold: float, prompts_per_kind: int, new_tokens: int, pair: Any) -> dict[str, Any]:
    """Figures of one kind of prompt under one threshold."""
    target, tokenizer, drafter = pair
    torch.manual_seed(0)
    rounds = []
    for prompt in [prompt for prompt in load_prompts() if prompt.kind == kind][:prompts_per_kind]:
        target.generate(
            **tokenizer(prompt.text, return_tensors="pt"),
            assistant_model=drafter,
            max_new_tokens=new_tokens,
            dspark_confidence_threshold=threshold,
            dspark_scheduler="none",
            **DECODING,
        )
        rounds += drafter.last_stats.rounds
    verified = sum(entry.verified for entry in rounds)
    return {
        "kind": kind,
        "threshold": threshold,
        "accepted_length": sum(entry.emitted for entry in rounds) / len(rounds),
        "acceptance_rate": sum(entry.accepted for entry in rounds) / verified if verified else None,
        "verified_per_round": verified / len(rounds),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--thresholds", type=float, nargs="+", default=[0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9]
    )
    parser.add_argument("--prompts-per-kind", type=int, default=10)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--output", type=Path, default=RESULTS / "thresholds.json")
    args = parser.parse_args()
    for name in ("prompts_per_kind", "new_tokens"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is {getattr(args, name)}; it must be at least 1.")
    if not all(0 <= threshold <= 1 for threshold in args.thresholds):
        parser.error(f"--thresholds is {args.thresholds}; each is a probability, from 0 to 1.")
    pair = load_embedded_pair()
    points = [(kind, threshold) for kind in KINDS for threshold in args.thresholds]
    rows = [
        measure(kind, threshold, args.prompts_per_kind, args.new_tokens, pair)
        for kind, threshold in track(points, description="decoding")
    ]
    report = {
        "versions": versions(),
        "settings": {**DECODING, "new_tokens": args.new_tokens, "prompts_per_kind": args.prompts_per_kind},
        "rows": rows,
    }
    write_report(report, args.output)
    if can_plot():
        plot_thresholds(rows, args.output.with_suffix(".png"))
    show(rows)


def show(rows: list[dict[str, Any]]) -> None:
    table = Table(title="static threshold, temperature 1")
    for column in ("kind", "threshold", "tokens per round", "kept of verified", "verified per round"):
        table.add_column(column, justify="left" if column == "kind" else "right")
    for row in rows:
        table.add_row(
            row["kind"],
            f"{row['threshold']:.2f}",
            f"{row['accepted_length']:.2f}",
            "" if row["acceptance_rate"] is None else f"{row['acceptance_rate']:.0%}",
            f"{row['verified_per_round']:.2f}",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
