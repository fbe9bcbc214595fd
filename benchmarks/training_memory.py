"""Peak memory and time of the loss in a training step: logits in chunks against all logits at once.

Both compute the same loss of the same blocks, forward and backward: cross entropy, distance to the target's
distribution, confidence. `chunked` is what the trainer does; `full` is written out here with nothing but autograd, and
holds the logits of all positions. Each measurement has a process of its own; the two take turns. Reported are the peak
of the resident memory over what the process held before (weights and hidden states), wall and processor time, and how
far the gradients are from each other, as norms and entry by entry. With 152,000 tokens float32 rounds the sums behind
either by some 1e-5: against float64, gradients of the logits were off by 0.8e-5 to 2.3e-5 in chunks, by twice that in
full.

    OMP_NUM_THREADS=1 python benchmarks/training_memory.py --repeats 2
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import torch
from report import versions, write_report
from rich.console import Console
from rich.table import Table
from transformers import Qwen3Config, Qwen3ForCausalLM

from dspark_hf import DSparkConfig, DSparkDrafter, get_drafter
from dspark_hf.training.losses import (
    LOSS_MEMORY,
    Comparison,
    LossWeights,
    compare_blocks,
    dspark_loss,
    slot_weights,
    slots_within,
)

RESULTS = Path(__file__).resolve().parent / "results"
VARIANTS = ("chunked", "full")
MIB = 2**20


def make_pair(args: argparse.Namespace) -> tuple[Qwen3ForCausalLM, DSparkDrafter]:
    """A target, which only lends its LM head, and a drafter whose sequential head is not zero."""
    config = Qwen3Config(
        vocab_size=args.vocab_size,
        hidden_size=args.hidden_size,
        intermediate_size=args.hidden_size,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        tie_word_embeddings=True,
        initializer_range=0.1,
    )
    target = Qwen3ForCausalLM(config).requires_grad_(False)
    drafter = get_drafter(target, DSparkConfig(num_hidden_layers=1, block_size=args.block_size, markov_rank=args.rank))
    torch.nn.init.normal_(drafter.markov_head.markov_w2.weight, std=0.1)
    return target, drafter


def compare_full(
    drafter: DSparkDrafter,
    hidden: torch.Tensor,
    previous_ids: torch.Tensor,
    target_hidden: torch.Tensor,
    labels: torch.Tensor,
    eval_mask: torch.Tensor,
    weights: LossWeights,
) -> Comparison:
    """What `compare_blocks` gives, from the logits of all positions."""
    logits = drafter.sequential_logits(drafter.project(hidden), hidden, previous_ids)
    draft = torch.log_softmax(logits.float(), dim=-1)
    ce = -draft.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    with torch.no_grad():
        target = torch.softmax(drafter.target_logits(target_hidden).float(), dim=-1)
    distance = (draft.exp() - target).abs().sum(dim=-1)
    loss = (slot_weights(eval_mask, weights.decay) * (weights.ce * ce + weights.tv * distance)).sum()
    return Comparison(loss, ce.detach(), distance.detach())


def measure(args: argparse.Namespace) -> dict[str, float]:
    """One step of `args.measure` in this process; its gradients go to `args.gradients`."""
    torch.manual_seed(0)
    _target, drafter = make_pair(args)
    shape = (args.anchors, args.block_size)
    hidden = torch.randn(*shape, args.hidden_size, requires_grad=True)
    target_hidden = torch.randn(*shape, args.hidden_size)
    previous_ids, labels = torch.randint(args.vocab_size, (2, *shape))
    eval_mask, weights = torch.ones(shape, dtype=torch.bool), LossWeights()
    inputs = (drafter, hidden, previous_ids, target_hidden, labels, eval_mask, weights)
    before, start, cpu_start = psutil.Process().memory_info().rss, time.perf_counter(), time.process_time()
    if args.measure == "full":
        compared = compare_full(*inputs)
    else:
        compared = compare_blocks(*inputs, chunk_size=slots_within(args.loss_memory, args.vocab_size))
    confidences = drafter.confidence_logits(hidden, drafter.embed_previous(previous_ids))
    result = dspark_loss(compared, confidences, eval_mask, weights)
    result.loss.backward()
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    named = {"hidden": hidden, **dict(drafter.named_parameters())}
    torch.save({name: each.grad for name, each in named.items() if each.grad is not None}, args.gradients)
    return {
        "peak_mib": (peak - before) / MIB,
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "loss": result.loss.item(),
    }


def measure_apart(variant: str, gradients: Path) -> dict[str, float]:
    """`measure` in a fresh process, with the options of this one."""
    command = [sys.executable, __file__, *sys.argv[1:], "--measure", variant, "--gradients", str(gradients)]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def gradient_errors(actual: Path, expected: Path) -> dict[str, dict[str, float]]:
    """Of each tensor in two files of gradients, how far they are apart.

    `norm` and `largest` are norm and largest entry of the difference, relative to the gradient's own; `absolute` is
    its largest entry as it is.
    """
    ours, theirs = (torch.load(path, mmap=True) for path in (actual, expected))
    if ours.keys() != theirs.keys():
        raise RuntimeError(f"One has gradients for {sorted(ours)}, the other for {sorted(theirs)}.")
    errors = {}
    for name, gradient in theirs.items():
        difference = ours[name] - gradient
        errors[name] = {
            "norm": (difference.norm() / gradient.norm()).item(),
            "largest": (difference.abs().max() / gradient.abs().max()).item(),
            "absolute": difference.abs().max().item(),
        }
    return errors


def measure_all(repeats: int) -> dict[str, Any]:
    """Rows of both variants, and what tells one from the other."""
    runs: dict[str, list[dict[str, float]]] = {variant: [] for variant in VARIANTS}
    with tempfile.TemporaryDirectory() as folder:
        files = {variant: Path(folder) / f"{variant}.pt" for variant in VARIANTS}
        for _ in range(repeats):
            for variant in VARIANTS:
                runs[variant].append(measure_apart(variant, files[variant]))
        errors = gradient_errors(files["chunked"], files["full"])
    rows = []
    for variant, results in runs.items():
        row: dict[str, Any] = {"variant": variant, "loss": results[0]["loss"]}
        row["peak_mib"] = max(result["peak_mib"] for result in results)
        for name in ("seconds", "cpu_seconds"):
            row[name] = [result[name] for result in results]
            row[f"{name}_median"] = statistics.median(row[name])
        rows.append(row)
    chunked, full = rows
    ratios = {name: chunked[name] / full[name] for name in ("peak_mib", "seconds_median", "cpu_seconds_median")}
    return {"rows": rows, "chunked_to_full": ratios, "gradient_errors": errors}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--anchors", type=int, default=128)
    parser.add_argument("--block-size", type=int, default=7)
    parser.add_argument("--hidden-size", type=int, default=1024)
    parser.add_argument("--vocab-size", type=int, default=151_936)
    parser.add_argument("--rank", type=int, default=256, help="of the sequential head")
    parser.add_argument("--loss-memory", type=float, default=LOSS_MEMORY, help="MiB, as in the training arguments")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--note", default="", help="kept in the report, such as what else the machine was doing")
    parser.add_argument("--output", type=Path, default=RESULTS / "training_memory.json")
    parser.add_argument("--measure", choices=VARIANTS, help=argparse.SUPPRESS)
    parser.add_argument("--gradients", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    for name in ("anchors", "block_size", "hidden_size", "vocab_size", "rank", "repeats"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is {getattr(args, name)}; it must be at least 1.")
    if args.measure is not None:
        print(json.dumps(measure(args)))
        return
    report = {
        "versions": versions(),
        "machine": {
            "cpus": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "load_average": os.getloadavg()[0],
            "note": args.note,
        },
        "settings": {
            name: getattr(args, name)
            for name in ("anchors", "block_size", "hidden_size", "vocab_size", "rank", "loss_memory", "repeats")
        },
        **measure_all(args.repeats),
    }
    write_report(report, args.output)
    show(report)


def show(report: dict[str, Any]) -> None:
    ratios = report["chunked_to_full"]
    errors = report["gradient_errors"].values()
    relative, absolute = (max(each[name] for each in errors) for name in ("norm", "absolute"))
    table = Table(
        title=f"loss of a training step; gradients differ by {relative:.1e}, no entry by more than {absolute:.1e}"
    )
    for column in ("logits", "peak MiB", "seconds", "processor seconds"):
        table.add_column(column, justify="left" if column == "logits" else "right")
    for row in report["rows"]:
        table.add_row(
            row["variant"],
            f"{row['peak_mib']:.0f}",
            f"{row['seconds_median']:.1f}",
            f"{row['cpu_seconds_median']:.1f}",
        )
    table.add_row("ratio", *(f"{ratios[name]:.2f}" for name in ("peak_mib", "seconds_median", "cpu_seconds_median")))
    Console().print(table)


if __name__ == "__main__":
    main()
