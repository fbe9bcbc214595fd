"""Throughput of the embedded pair under load: the hardware-aware scheduler against plain decoding and fixed lengths.

For each load, that many requests are active at any time: when one ends the next one joins. Each policy has an engine
of its own, and keeps what it has learnt, as on a server. In one process the policies take turns of less than a
second, in another order each time, so that all of them meet the same machine; so many turns make a repeat, and luck
does not decide. A first repeat, in which engines fill and schedulers learn, does not count. The costs that schedulers
go by are measured before. Reported are tokens per second (median and range over the repeats), the ratio, repeat by
repeat, to plain decoding and to the best of plain decoding and of every fixed length (geometric means with bootstrap
intervals; which one is best is taken from the other repeats), accepted length (bonus token included), and the drafted
tokens verified per request and round. One more policy drafts with a drafter that is always wrong.

    python benchmarks/concurrency.py --loads 1 2 4 8 16 32 --tokens 64 --repeats 8
"""

from __future__ import annotations

import argparse
import copy
import platform
import random
import statistics
from pathlib import Path
from typing import Any

import torch
from report import versions, write_report
from rich.progress import Progress
from rich.table import Table
from transformers.utils import logging

from dspark_hf import DSparkDrafter
from dspark_hf.embedded import load_embedded_pair, load_prompts
from dspark_hf.evaluation.load import LoadedEngine, LoadFigures, take_turns
from dspark_hf.evaluation.plots import can_plot, plot_load
from dspark_hf.generation.capacity import measure_capacity
from dspark_hf.generation.schedulers import Fixed, Hardware, Plain, Scheduler

RESULTS = Path(__file__).resolve().parent / "results"
DECODING = {"do_sample": True, "temperature": 1.0, "top_k": 0}
PLAIN, AUTO, WRONG = "plain", "hardware-aware", "hardware-aware, drafter always wrong"


class WrongDrafter(DSparkDrafter):
    """Drafts the token after the one that it means, with the confidences of the right one."""

    def draft_step(self, *args: Any) -> Any:
        logits, state = super().draft_step(*args)
        return logits.roll(1, dims=-1), state


def start(
    pair: Any, drafter: DSparkDrafter, scheduler: Scheduler, load: int, args: argparse.Namespace
) -> LoadedEngine:
    """An engine for one policy, with held-out prompts of the three kinds, in the same order for all."""
    target, tokenizer, _ = pair
    found = random.Random(0).sample(load_prompts(), len(load_prompts()))
    return LoadedEngine(
        target,
        drafter,
        scheduler,
        [tokenizer(prompt.text, return_tensors="pt").input_ids for prompt in found],
        load,
        mean_tokens=args.tokens,
        num_draft_tokens=scheduler.length if isinstance(scheduler, Fixed) else None,
        **DECODING,
    )


def measure(args: argparse.Namespace, pair: Any) -> list[dict[str, Any]]:
    """One row per load and policy."""
    target, _, drafter = pair
    wrong = copy.copy(drafter)
    wrong.__class__ = WrongDrafter
    gamma = drafter.config.block_size
    rows = []
    with Progress() as progress:
        bar = progress.add_task("measuring costs", total=len(args.loads) * (1 + args.repeats))
        profile = measure_capacity(
            target, drafter, max_rows=max(args.loads), contexts=(128,), repeats=args.profile_repeats
        )
        for load in args.loads:
            policies: dict[str, Scheduler] = {
                PLAIN: Plain(),
                **{f"length {length}": Fixed(length) for length in range(1, gamma + 1)},
                AUTO: Hardware(profile),
                WRONG: Hardware(profile),
            }
            engines = {
                name: start(pair, wrong if name == WRONG else drafter, scheduler, load, args)
                for name, scheduler in policies.items()
            }
            figures: dict[str, list[LoadFigures]] = {name: [] for name in policies}
            for repeat in range(1 + args.repeats):
                progress.update(bar, description=f"{load} at once")
                turns = take_turns(engines, max(load * args.tokens, args.least), seed=repeat)
                for name in policies if repeat else ():
                    figures[name].append(turns[name])
                progress.advance(bar)
            for engine in engines.values():
                engine.close()
            found = [summary(load, name, figures) for name in policies]
            progress.console.print(table(found))
            rows += found
    return rows


def summary(load: int, policy: str, figures: dict[str, list[LoadFigures]]) -> dict[str, Any]:
    """Medians, ranges and intervals over the repeats; ratios are taken within each repeat."""
    rates = {name: [entry.tokens_per_second for entry in entries] for name, entries in figures.items()}
    rivals = best_rivals(rates)
    to_best = [
        mine / rates[best][repeat] for repeat, (mine, best) in enumerate(zip(rates[policy], rivals, strict=True))
    ]
    to_plain = [mine / other for mine, other in zip(rates[policy], rates[PLAIN], strict=True)]
    return {
        "load": load,
        "policy": policy,
        "tokens_per_second": statistics.median(rates[policy]),
        "tokens_per_second_range": [min(rates[policy]), max(rates[policy])],
        "best_other": statistics.mode(rivals),
        "to_best_other": mean_ratio(to_best),
        "to_best_other_interval": interval(to_best),
        "to_plain": mean_ratio(to_plain),
        "to_plain_interval": interval(to_plain),
        **{
            name: statistics.median(getattr(entry, name) for entry in figures[policy])
            for name in ("accepted_length", "budget")
        },
    }


def best_rivals(rates: dict[str, list[float]]) -> list[str]:
    """For each repeat, which of plain decoding and the fixed lengths was best in all the other repeats.

    The best of the repeat itself, or of all, would be the luckiest of many, and look better than it is.
    """
    others = {name: rate for name, rate in rates.items() if name not in (AUTO, WRONG)}
    repeats = len(rates[PLAIN])
    return [
        max(others, key=lambda name: statistics.fmean(_without(others[name], repeat))) for repeat in range(repeats)
    ]


def _without(rates: list[float], repeat: int) -> list[float]:
    return rates[:repeat] + rates[repeat + 1 :] if len(rates) > 1 else rates


def mean_ratio(ratios: list[float]) -> float:
    """Geometric mean."""
    return statistics.geometric_mean(ratios)


def interval(ratios: list[float], draws: int = 10_000) -> list[float]:
    """95% bootstrap interval of the geometric mean over the repeats."""
    rng = random.Random(0)
    means = sorted(mean_ratio(rng.choices(ratios, k=len(ratios))) for _ in range(draws))
    return [means[int(0.025 * draws)], means[int(0.975 * draws)]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loads", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--tokens", type=int, default=64, help="tokens per request, on average")
    parser.add_argument("--least", type=int, default=1024, help="least tokens of a policy and repeat")
    parser.add_argument("--repeats", type=int, default=8, help="repeats that count")
    parser.add_argument("--profile-repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--output", type=Path, default=RESULTS / "concurrency.json")
    args = parser.parse_args()
    for name in ("tokens", "least", "repeats", "profile_repeats", "threads"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is {getattr(args, name)}; it must be at least 1.")
    if min(args.loads) < 1:
        parser.error(f"--loads is {args.loads}; each must be at least 1.")
    torch.set_num_threads(args.threads)
    logging.set_verbosity_error()
    rows = measure(args, load_embedded_pair())
    report = {
        "machine": {"cpu": platform.machine(), "threads": args.threads},
        "versions": versions(),
        "settings": {
            **DECODING,
            "tokens": args.tokens,
            "least": args.least,
            "repeats": args.repeats,
            "dtype": "float32",
        },
        "rows": rows,
    }
    write_report(report, args.output)
    if can_plot():
        plot_load(rows, args.output.with_suffix(".png"))


def table(rows: list[dict[str, Any]]) -> Table:
    """The policies at one load."""
    table = Table(title=f"{rows[0]['load']} requests at once, temperature 1")
    for column in ("policy", "tokens/s", "to plain", "to best", "95%", "accepted", "verified"):
        table.add_column(column, justify="left" if column == "policy" else "right", no_wrap=column != "policy")
    for row in rows:
        low, high = row["to_best_other_interval"]
        table.add_row(
            row["policy"],
            f"{row['tokens_per_second']:.0f}",
            f"{row['to_plain']:.2f}",
            f"{row['to_best_other']:.3f}",
            f"{low:.3f}-{high:.3f}",
            f"{row['accepted_length']:.2f}",
            f"{row['budget']:.2f}",
        )
    return table


if __name__ == "__main__":
    main()
