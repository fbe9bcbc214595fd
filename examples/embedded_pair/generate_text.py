"""Lets the embedded target write the text that its drafter is trained on.

Each row starts with a few tokens cut from the training part of the text and goes on with what the target samples, most
rows at temperature 1 and some greedily, since the drafter has to serve both. Rows are `{"input_ids"}` in
`<work_dir>/drafter_train.jsonl`, and a few more, from held-out files, in `<work_dir>/drafter_eval.jsonl`. Batches are
seeded one by one, so a run that was interrupted goes on where it stopped.

    python examples/embedded_pair/generate_text.py --work_dir build/embedded_pair
"""

import json
import logging
import random
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, HfArgumentParser

logger = logging.getLogger(__name__)


@dataclass
class GenerationArguments:
    """How much text is generated, and how."""

    work_dir: str = field(
        default="build/embedded_pair", metadata={"help": "Folder of the prepared text and the trained target."}
    )
    train_batches: int = field(default=90, metadata={"help": "Batches of training rows."})
    eval_batches: int = field(default=2, metadata={"help": "Batches of evaluation rows."})
    batch_size: int = field(default=64, metadata={"help": "Rows in a batch."})
    sequence_length: int = field(default=288, metadata={"help": "Tokens in a row, the prompt included."})
    shortest_prompt: int = field(default=8, metadata={"help": "Fewest prompt tokens."})
    longest_prompt: int = field(default=64, metadata={"help": "Most prompt tokens."})
    greedy_share: float = field(default=0.25, metadata={"help": "Share of batches that are decoded greedily."})
    seed: int = field(default=0, metadata={"help": "Seed of prompts and samples."})

    def __post_init__(self) -> None:
        if not 1 <= self.shortest_prompt <= self.longest_prompt < self.sequence_length:
            raise ValueError(
                f"shortest_prompt, longest_prompt and sequence_length are {self.shortest_prompt}, "
                f"{self.longest_prompt} and {self.sequence_length}; they must rise, from at least 1."
            )
        if not 0 <= self.greedy_share <= 1:
            raise ValueError(f"greedy_share is {self.greedy_share}; choose a value from 0 to 1.")


def load_documents(path: Path) -> dict[str, list[str]]:
    """Texts of one part by kind."""
    if not path.is_file():
        raise ValueError(f"There is no {path}; run prepare_text.py first.")
    documents: dict[str, list[str]] = {}
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            documents.setdefault(row["kind"], []).append(row["text"])
    return documents


def cut_prompt(tokenizer: Any, documents: dict[str, list[str]], rng: random.Random, length: int) -> list[int]:
    """Exactly `length` tokens from the start of a line of a document, kinds evenly."""
    while True:
        text = rng.choice(documents[rng.choice(sorted(documents))])
        start = rng.randrange(len(text))
        start = text.rfind("\n", 0, start) + 1
        ids = tokenizer(text[start : start + 16 * length]).input_ids[:length]
        if len(ids) == length:
            return ids


def generate_part(
    target: Any, tokenizer: Any, documents: dict[str, list[str]], path: Path, batches: int, args: GenerationArguments
) -> None:
    """Writes `batches` batches of rows to `path`, after those that it has."""
    done = len(path.read_text(encoding="utf-8").splitlines()) // args.batch_size if path.exists() else 0
    with path.open("r+" if path.exists() else "w", encoding="utf-8") as file:
        lines = file.readlines() if done else []
        # A batch that was cut off in the middle is written again.
        file.seek(0)
        file.truncate()
        file.writelines(lines[: done * args.batch_size])
        start = time.monotonic()
        for batch in range(done, batches):
            rng = random.Random(f"{args.seed}-{path.name}-{batch}")
            torch.manual_seed(rng.randrange(2**31))
            length = rng.randint(args.shortest_prompt, args.longest_prompt)
            prompts = [cut_prompt(tokenizer, documents, rng, length) for _ in range(args.batch_size)]
            greedy = rng.random() < args.greedy_share
            output = target.generate(
                input_ids=torch.tensor(prompts),
                max_length=args.sequence_length,
                do_sample=not greedy,
                eos_token_id=None,
                **({} if greedy else {"temperature": 1.0, "top_k": 0}),
            )
            file.writelines(json.dumps({"input_ids": row}) + "\n" for row in output.tolist())
            file.flush()
            if (batch + 1) % 10 == 0:
                logger.info("%s: %d of %d batches, %.0f s", path.name, batch + 1, batches, time.monotonic() - start)


def main() -> None:
    (args,) = HfArgumentParser(GenerationArguments).parse_args_into_dataclasses()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    work_dir = Path(args.work_dir)
    target = AutoModelForCausalLM.from_pretrained(work_dir / "target").eval()
    tokenizer = AutoTokenizer.from_pretrained(work_dir / "target")
    for part, name, batches in (
        ("heldout", "drafter_eval", args.eval_batches),
        ("train", "drafter_train", args.train_batches),
    ):
        documents = load_documents(work_dir / f"{part}.jsonl")
        generate_part(target, tokenizer, documents, work_dir / f"{name}.jsonl", batches, args)


if __name__ == "__main__":
    main()
