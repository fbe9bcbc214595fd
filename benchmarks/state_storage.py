"""A drafter of the embedded target trained on target states from a cache, against states computed for each batch.

The target writes the text, from the held-out prompts. Then one drafter is trained per storage, always with the same
seed, hence from the same weights, in the same order, at the same anchors; only the states that it reads differ.
`online, other seed` shows how far apart two trainings are anyway. Reported are bytes per token, losses, the accepted
length that is expected on text held out (`tau`, from states computed online in all), and the largest difference of a
logged loss from that of `online`.

    OMP_NUM_THREADS=1 python benchmarks/state_storage.py --steps 150
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from report import versions, write_report
from rich.console import Console
from rich.table import Table
from transformers import PrinterCallback, set_seed

from dspark_hf import DSparkConfig, DSparkTrainingArguments, get_drafter
from dspark_hf.embedded import load_embedded_pair, load_prompts
from dspark_hf.training import DSparkTrainer, cache_target_states
from dspark_hf.training.state_storage import STORAGES

RESULTS = Path(__file__).resolve().parent / "results"
OTHER_SEED = "online, other seed"


def write_text(args: argparse.Namespace, pair: Any) -> Dataset:
    """Rows `input_ids` that the target wrote after the prompts, the first tokens of which are not trained on."""
    target, tokenizer, _ = pair
    torch.manual_seed(0)
    prompts = [tokenizer(prompt.text).input_ids[:16] for prompt in load_prompts()]
    rows = []
    while len(rows) < args.rows:
        ids = torch.tensor([prompt for prompt in prompts if len(prompt) == 16][:48])
        output = target.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            top_k=0,
            max_new_tokens=args.length - 16,
            eos_token_id=None,
        )
        rows += [{"input_ids": row, "loss_mask": [0] * 16 + [1] * (len(row) - 16)} for row in output.tolist()]
    return Dataset.from_list(rows[: args.rows])


def train(variant: str, args: argparse.Namespace, pair: Any, rows: Dataset, folder: Path) -> dict[str, Any]:
    """Trains a drafter from the states of `variant`."""
    target, tokenizer, _ = pair
    is_online = variant not in STORAGES
    training = DSparkTrainingArguments(
        output_dir=str(folder),
        max_steps=args.steps,
        per_device_train_batch_size=8,
        num_anchors=args.anchors,
        learning_rate=2e-3,
        logging_steps=10,
        save_strategy="no",
        seed=args.seed + (variant == OTHER_SEED),
        use_cpu=True,
        disable_tqdm=True,
        report_to="none",
        states_cache=None if is_online else str(folder / "states"),
        states_storage=None if is_online else variant,
    )
    train_rows, eval_rows = rows.select(range(args.held_out, len(rows))), rows.select(range(args.held_out))
    set_seed(training.seed)
    config = DSparkConfig(num_hidden_layers=1, markov_rank=64)
    drafter = get_drafter(target, config, tokenizer=tokenizer)
    row: dict[str, Any] = {"variant": variant, "bytes_per_token": 0.0, "fill_seconds": 0.0}
    if not is_online:
        start = time.process_time()
        cache = cache_target_states(target, train_rows, drafter.config.target_layer_ids, training)
        row["fill_seconds"] = time.process_time() - start
        row["bytes_per_token"] = cache.bytes / cache.manifest.source.tokens
    trainer = DSparkTrainer(drafter, target, training, train_rows, eval_rows)
    trainer.remove_callback(PrinterCallback)
    start = time.process_time()
    trainer.train()
    row["train_seconds"] = time.process_time() - start
    metrics = trainer.evaluate()
    row["losses"] = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return {**row, "eval_loss": metrics["eval_loss"], "eval_tau": metrics["eval_tau"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=256, help="sequences, those held out among them")
    parser.add_argument("--held-out", type=int, default=32)
    parser.add_argument("--length", type=int, default=128, help="tokens of a sequence")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--anchors", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--note", default="", help="kept in the report, such as what else the machine was doing")
    parser.add_argument("--output", type=Path, default=RESULTS / "state_storage.json")
    args = parser.parse_args()
    if not 0 < args.held_out < args.rows:
        parser.error(f"--held-out is {args.held_out}; it must be from 1 to {args.rows - 1}, one less than --rows.")
    if min(args.steps, args.anchors) < 1 or args.length < 24:
        parser.error("--steps and --anchors must be at least 1, --length at least 24.")
    pair = load_embedded_pair()
    rows, results = write_text(args, pair), []
    for number, variant in enumerate(["online", OTHER_SEED, *STORAGES]):
        with tempfile.TemporaryDirectory() as folder:
            results.append(train(variant, args, pair, rows, Path(folder)))
        print(f"{number + 1}: {variant}, eval_loss {results[-1]['eval_loss']:.5f}", flush=True)
    for row in results:
        pairs = zip(row["losses"], results[0]["losses"], strict=True)
        row["largest_loss_difference"] = max(abs(ours - theirs) for ours, theirs in pairs)
    report = {
        "versions": versions(),
        "machine": {"cpus": os.cpu_count(), "threads": torch.get_num_threads(), "note": args.note},
        "settings": {name: getattr(args, name) for name in ("rows", "held_out", "length", "steps", "anchors", "seed")},
        "rows": results,
    }
    write_report(report, args.output)
    show(results)


def show(rows: list[dict[str, Any]]) -> None:
    table = Table(title="a drafter trained from target states; seconds are processor time")
    for column in ("states", "bytes per token", "last loss", "largest difference", "eval loss", "tau", "seconds"):
        table.add_column(column, justify="left" if column == "states" else "right")
    for row in rows:
        table.add_row(
            row["variant"],
            f"{row['bytes_per_token']:.0f}",
            f"{row['losses'][-1]:.5f}",
            f"{row['largest_loss_difference']:.1e}",
            f"{row['eval_loss']:.5f}",
            f"{row['eval_tau']:.4f}",
            f"{row['fill_seconds'] + row['train_seconds']:.1f}",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
