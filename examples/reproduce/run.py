"""The DSpark paper's comparison in miniature: all methods on one small target, with equal training.

    python examples/reproduce/run.py              # about two hours on two cores
    python examples/reproduce/run.py --smoke      # all stages in minutes, to see that they work

Stages follow one another, and each leaves what it made in the work directory:

1. `text`: text of three kinds (`examples/embedded_pair/prepare_text.py`), unless the folder has it;
2. `answers`: what the target goes on with (`train.jsonl`), most of it sampled, some of it greedy;
3. `states-...`: the target's states over that, for each kind of drafter;
4. `train-...`: a drafter each, all with the same rows in the same order, and as many steps; `step_times`: how long a
   step of each takes;
5. `comparison`, `draft_lengths`, `eagle3_lengths`: accepted length and speed on held-out prompts;
6. `calibrate`, `load`: DSpark and MTP-1 on the engine, with 1 to 32 requests at once;
7. `report`: tables and figures, in the results directory.

The same command goes on where a run was broken off, whenever that was. `progress.json` says what each stage took.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import platform
import random
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
import transformers
from drafters import BLOCK, DRAFT_LENGTHS, Entry, comparison, draft_lengths, under_load
from summary import write_summary
from transformers import HfArgumentParser, PreTrainedModel, PreTrainedTokenizerBase, set_seed

from dspark_hf import AutoDrafter, Drafter, DSparkTrainingArguments, get_drafter, train_drafter
from dspark_hf.embedded import TARGET
from dspark_hf.evaluation import collect_observations, fit_temperatures
from dspark_hf.evaluation.harness import EvaluationSettings, evaluate_drafters
from dspark_hf.evaluation.load import LoadedEngine, LoadFigures, take_turns
from dspark_hf.evaluation.tasks import load_tasks
from dspark_hf.generation.capacity import measure_capacity
from dspark_hf.generation.schedulers import Fixed, Hardware, Plain, Scheduler
from dspark_hf.training import cache_target_states, last_checkpoint, load_target

sys.path.append(str(Path(__file__).resolve().parents[1]))
from embedded_pair.generate_text import GenerationArguments, cut_prompt, generate_part, load_documents
from embedded_pair.prepare_text import PrepareArguments
from embedded_pair.prepare_text import main as prepare_text
from stages import ClockCallback, Ledger, read_json, run_stages, write_whole

RESULTS = Path(__file__).resolve().parent / "results"
TIMED_STEPS = 9
SAMPLED = {"do_sample": True, "temperature": 1.0, "top_k": 0}
SMOKE = {
    "batches": 1,
    "steps": 4,
    "questions": 1,
    "new_tokens": 16,
    "calibration_prompts": 2,
    "loads": [1, 2],
    "load_tokens": 8,
    "load_total": 16,
    "repeats": 1,
}


@dataclass
class StudyArguments:
    """How much of everything; the defaults take about two hours on two cores."""

    work_dir: str | None = field(
        default=None, metadata={"help": "Folder for everything that is made; build/reproduce if unset."}
    )
    results_dir: str | None = field(
        default=None,
        metadata={"help": "Folder for tables and figures; beside this script, or for --smoke in the work folder."},
    )
    text_dir: str | None = field(
        default=None, metadata={"help": "Folder of prepare_text.py; text/ in the work folder if unset."}
    )
    target: str = field(default=str(TARGET), metadata={"help": "Folder of the target; the embedded one if unset."})
    smoke: bool = field(default=False, metadata={"help": "Run all stages in minutes, to see that they work."})
    batches: int = field(default=40, metadata={"help": "Batches of 64 rows that the target writes."})
    row_tokens: int = field(default=288, metadata={"help": "Tokens of a row, of which the first few are a prompt."})
    steps: int = field(default=320, metadata={"help": "Training steps of a drafter, which read each row once."})
    batch_size: int = field(default=8, metadata={"help": "Rows in a step."})
    num_anchors: int = field(default=64, metadata={"help": "Blocks drafted in each row, by drafters of blocks."})
    learning_rate: float = field(default=2e-3, metadata={"help": "Peak learning rate."})
    questions: int = field(default=10, metadata={"help": "Held-out prompts of each of the three kinds."})
    new_tokens: int = field(default=128, metadata={"help": "Tokens of an answer."})
    calibration_prompts: int = field(default=60, metadata={"help": "Prompts that confidences are calibrated on."})
    loads: list[int] = field(default_factory=lambda: [1, 2, 4, 8, 16, 32], metadata={"help": "Requests at once."})
    load_tokens: int = field(default=64, metadata={"help": "Tokens of a request, on average."})
    load_total: int = field(default=1024, metadata={"help": "Least tokens of a repeat under load."})
    repeats: int = field(default=5, metadata={"help": "Repeats under each load."})
    seed: int = field(default=0, metadata={"help": "Seed of text, weights, order and samples."})

    def __post_init__(self) -> None:
        if self.smoke:
            for name, value in SMOKE.items():
                setattr(self, name, value)
        for name, value in dataclasses.asdict(self).items():
            values = value if isinstance(value, list) else [value]
            if name not in ("seed", "smoke") and any(isinstance(one, int | float) and one <= 0 for one in values):
                raise ValueError(f"`{name}` is {value}; give a positive number.")
        if not Path(self.target, "config.json").is_file():
            raise ValueError(f"`target` is {self.target!r}; give the folder of a model.")
        self.work_dir = self.work_dir or str(Path("build", "reproduce-smoke" if self.smoke else "reproduce"))
        if self.results_dir is None:
            self.results_dir = str(Path(self.work_dir, "results") if self.smoke else RESULTS)
        self.text_dir = self.text_dir or str(Path(self.work_dir, "text"))


class Study:
    """One run; stages are its methods.

    Args:
        args: how much of everything.
    """

    def __init__(self, args: StudyArguments) -> None:
        self.args = args
        self.folder = Path(str(args.work_dir))
        self.folder.mkdir(parents=True, exist_ok=True)
        places = ("work_dir", "results_dir", "text_dir")
        settings = {name: value for name, value in dataclasses.asdict(args).items() if name not in places}
        self.ledger = Ledger(self.folder / "progress.json", settings)
        self.entries = comparison() | draft_lengths() | under_load()

    def run(self) -> None:
        """All stages that are not done; tables and figures are made anew each time."""
        stages: dict[str, Callable[[], dict[str, Any]]] = {"text": self.write_text, "answers": self.write_answers}
        for kind in dict.fromkeys(entry.kind for entry in self.entries.values()):
            stages[f"states-{kind}"] = partial(self.cache_states, kind)
        for name in self.entries:
            stages[f"train-{name}"] = partial(self.train, name)
        stages |= {
            "step_times": self.time_steps,
            "comparison": self.compare,
            "draft_lengths": self.compare_draft_lengths,
            "eagle3_lengths": self.compare_eagle3_lengths,
            "calibrate": self.calibrate,
            "load": self.measure_loads,
        }
        run_stages(self.ledger, stages)
        reports = {name: read_json(self.folder / f"{name}.json") for name in (*_REPORTS, "load")}
        write_summary(reports, self.facts(), Path(str(self.args.results_dir)))

    def facts(self) -> dict[str, Any]:
        """What the figures were made with."""
        return {
            "machine": {"cpu": platform.machine(), "threads": torch.get_num_threads()},
            "versions": {
                "python": platform.python_version(),
                "torch": str(torch.__version__),
                "transformers": transformers.__version__,
            },
            **self.ledger.content,
        }

    @cached_property
    def pair(self) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        """The target and its tokenizer."""
        target, tokenizer = load_target(self.args.target)
        if tokenizer is None:
            raise ValueError(f"`target` is {self.args.target!r}, which has no tokenizer; save it there.")
        return target.eval(), tokenizer

    # --- data ----------------------------------------------------------------------------------------------------

    def write_text(self) -> dict[str, Any]:
        prepare_text(PrepareArguments(work_dir=str(self.args.text_dir)))
        return {}

    def documents(self, part: str) -> dict[str, list[str]]:
        """Texts by kind."""
        return load_documents(Path(str(self.args.text_dir)) / f"{part}.jsonl")

    def write_answers(self) -> dict[str, Any]:
        args, (target, tokenizer) = self.args, self.pair
        options = GenerationArguments(sequence_length=args.row_tokens, seed=args.seed)
        generate_part(target, tokenizer, self.documents("train"), self.folder / "train.jsonl", args.batches, options)
        return {"rows": args.batches * options.batch_size, "tokens_per_row": args.row_tokens}

    # --- training ------------------------------------------------------------------------------------------------

    def training_args(self, entry: Entry, output: Path, steps: int | None = None) -> DSparkTrainingArguments:
        """Those of a drafter, for `steps` or as long as it is trained."""
        args = self.args
        steps = steps or args.steps * entry.passes
        return DSparkTrainingArguments(
            output_dir=str(output),
            states_cache=str(self.folder / "states" / entry.kind),
            states_storage="bf16",
            per_device_train_batch_size=args.batch_size,
            num_anchors=args.num_anchors,
            learning_rate=args.learning_rate,
            max_length=args.row_tokens,
            max_steps=steps,
            save_steps=max(1, args.steps // 4),
            save_total_limit=1,
            logging_steps=max(1, args.steps // 20),
            disable_tqdm=True,
            dataloader_pin_memory=False,
            use_cpu=True,
            report_to="none",
            seed=args.seed,
            **entry.loss,
        )

    def new_drafter(self, entry: Entry) -> Drafter:
        target, tokenizer = self.pair
        set_seed(self.args.seed)
        return get_drafter(target, entry.config, tokenizer=tokenizer)

    def cache_states(self, kind: str) -> dict[str, Any]:
        """The target reads each row once for all drafters of a kind."""
        entry = next(entry for entry in self.entries.values() if entry.kind == kind)
        layers: Any = self.new_drafter(entry).config.target_layer_ids
        target, _ = self.pair
        args = self.training_args(entry, self.folder / "unused")
        return {"bytes": cache_target_states(target, str(self.folder / "train.jsonl"), layers, args).bytes}

    def train(self, name: str) -> dict[str, Any]:
        entry, output = self.entries[name], self.folder / "drafters" / name
        target, tokenizer = self.pair
        checkpoint = last_checkpoint(output)
        if checkpoint is None:  # what a kill left before the first whole checkpoint
            shutil.rmtree(output, ignore_errors=True)
        clock = ClockCallback(self.ledger)
        drafter = train_drafter(
            target,
            str(self.folder / "train.jsonl"),
            AutoDrafter.from_pretrained(checkpoint) if checkpoint else self.new_drafter(entry),
            self.training_args(entry, output),
            tokenizer=tokenizer,
            resume=checkpoint or False,
            callbacks=[clock],
        )
        return {"parameters": sum(parameter.numel() for parameter in drafter.parameters())}

    def time_steps(self) -> dict[str, Any]:
        """A few more steps of each drafter: training may have gone on beside other work, this should not."""
        target, tokenizer = self.pair
        seconds = {}
        for name, entry in comparison().items():
            clock = ClockCallback(self.ledger)
            with tempfile.TemporaryDirectory(dir=self.folder) as output:
                args = self.training_args(entry, Path(output), steps=min(TIMED_STEPS, self.args.steps))
                rows = str(self.folder / "train.jsonl")
                train_drafter(target, rows, self.new_drafter(entry), args, tokenizer=tokenizer, callbacks=[clock])
            seconds[name] = statistics.median(clock.step_seconds)
        return {"median_step_seconds": seconds}

    # --- measuring -----------------------------------------------------------------------------------------------

    def drafter(self, name: str) -> Any:
        return AutoDrafter.from_pretrained(self.folder / "drafters" / name).eval()

    def evaluate(self, stage: str, drafters: dict[str, Any], **settings: Any) -> dict[str, Any]:
        args, (target, tokenizer) = self.args, self.pair
        evaluate_drafters(
            target,
            drafters,
            tokenizer,
            load_tasks(["embedded"], limit=args.questions),
            self.folder / f"{stage}.json",
            EvaluationSettings(max_new_tokens=args.new_tokens, seed=args.seed, **settings),
            progress=lambda done, total: self.ledger.save(done_questions=done, all_questions=total),
        )
        return {}

    def compare(self) -> dict[str, Any]:
        return self.evaluate("comparison", {name: self.drafter(name) for name in comparison()})

    def compare_draft_lengths(self) -> dict[str, Any]:
        return self.evaluate("draft_lengths", {name: self.drafter(name) for name in draft_lengths()}, confidence=False)

    def compare_eagle3_lengths(self) -> dict[str, Any]:
        """The drafter of the comparison again, allowed longer and shorter drafts."""
        drafter = self.drafter("eagle3")
        drafter.config.block_size = max(DRAFT_LENGTHS)
        lengths = tuple(length for length in DRAFT_LENGTHS if length != BLOCK)
        return self.evaluate("eagle3_lengths", {"eagle3": drafter}, num_draft_tokens=lengths)

    def calibrate(self) -> dict[str, Any]:
        """Confidences of the drafter that runs under load, on prompts from held-out files, cut elsewhere."""
        args, (target, tokenizer) = self.args, self.pair
        rng, documents = random.Random(args.seed), self.documents("heldout")
        prompts = [torch.tensor([cut_prompt(tokenizer, documents, rng, 56)]) for _ in range(args.calibration_prompts)]
        drafter = self.drafter(list(under_load())[-1])
        torch.manual_seed(args.seed)
        seen = collect_observations(
            target, drafter, prompts, max_new_tokens=args.new_tokens, pad_token_id=0, eos_token_id=None, **SAMPLED
        )
        return {"temperatures": fit_temperatures(seen)}

    def measure_loads(self) -> dict[str, Any]:
        """Plain decoding, MTP-1 and DSpark under its scheduler, which take turns."""
        args, (target, tokenizer) = self.args, self.pair
        mtp, dspark = (self.drafter(name) for name in under_load())
        dspark.config.confidence_temperatures = self.ledger.content["stages"]["calibrate"]["temperatures"]
        profile = measure_capacity(target, dspark, max_rows=max(args.loads))
        questions = [question.turns[0] for task in load_tasks(["embedded"]) for question in task.questions]
        random.Random(args.seed).shuffle(questions)
        prompts = [tokenizer(text, return_tensors="pt").input_ids for text in questions]
        rows = []
        for load in args.loads:
            policies: dict[str, tuple[Any, Scheduler]] = {
                "plain": (dspark, Plain()),
                "MTP-1": (mtp, Fixed(1)),
                "DSpark": (dspark, Hardware(profile)),
            }
            engines = {
                name: LoadedEngine(target, drafter, scheduler, prompts, load, mean_tokens=args.load_tokens, **SAMPLED)
                for name, (drafter, scheduler) in policies.items()
            }
            found: dict[str, list[LoadFigures]] = {name: [] for name in policies}
            total = max(args.load_total, load * args.load_tokens)
            for repeat in range(1 + args.repeats):
                turns = take_turns(engines, total, seed=args.seed + repeat)
                for name in policies if repeat else ():  # in the first, engines fill and the scheduler learns
                    found[name].append(turns[name])
            for engine in engines.values():
                engine.close()
            rows += [{"load": load, "policy": name, **_median(figures)} for name, figures in found.items()]
        write_whole(self.folder / "load.json", json.dumps({"rows": rows}, indent=2) + "\n")
        return {}


_REPORTS = ("comparison", "draft_lengths", "eagle3_lengths")


def _median(figures: list[LoadFigures]) -> dict[str, Any]:
    """Over the repeats."""
    rates = [entry.tokens_per_second for entry in figures]
    return {
        "tokens_per_second": statistics.median(rates),
        "tokens_per_second_range": [min(rates), max(rates)],
        "accepted_length": statistics.median(entry.accepted_length for entry in figures),
        "budget": statistics.median(entry.budget for entry in figures),
    }


def main() -> None:
    (args,) = HfArgumentParser(StudyArguments).parse_args_into_dataclasses()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    Study(args).run()


if __name__ == "__main__":
    main()
