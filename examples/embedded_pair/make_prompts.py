"""Cuts the held-out prompts on which the embedded pair is measured.

Every prompt comes from a file that was held out of training and begins at the start of that file or of one of its
lines, by turns; it is as long as `min_tokens` to `max_tokens` of the target's tokens. A file gives a second prompt
only after every file of its kind has given one. Writes `heldout_prompts.jsonl`
(`{"id", "kind", "source", "text"}` a line).

    python examples/embedded_pair/make_prompts.py --work_dir build/embedded_pair
"""

import json
import logging
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from transformers import AutoTokenizer, HfArgumentParser, PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

KINDS = ("code", "prose", "structured")

# Enough text for a prompt and a continuation, at any number of tokens a prompt may have.
MIN_CHARS_PER_TOKEN_LEFT = 12


@dataclass
class PromptArguments:
    """How many prompts, how long, and where they come from."""

    work_dir: str = field(
        default="build/embedded_pair", metadata={"help": "Folder with heldout.jsonl and the target's tokenizer."}
    )
    output_file: str = field(
        default="src/dspark_hf/embedded/heldout_prompts.jsonl", metadata={"help": "File to write the prompts to."}
    )
    prompts_per_kind: int = field(default=40, metadata={"help": "Prompts of each kind of text."})
    min_tokens: int = field(default=48, metadata={"help": "Fewest tokens in a prompt."})
    max_tokens: int = field(default=64, metadata={"help": "Most tokens in a prompt."})
    seed: int = field(default=42, metadata={"help": "Seed of the choice of lines and lengths."})

    def __post_init__(self) -> None:
        if self.prompts_per_kind < 1:
            raise ValueError(f"prompts_per_kind is {self.prompts_per_kind}; choose a positive number, such as 40.")
        if not 1 <= self.min_tokens <= self.max_tokens:
            raise ValueError(
                f"min_tokens is {self.min_tokens}; choose a value from 1 to max_tokens ({self.max_tokens})."
            )


def read_heldout(path: Path) -> list[dict[str, str]]:
    """Reads the held-out documents."""
    if not path.is_file():
        raise ValueError(f"work_dir is {str(path.parent)!r}, which has no {path.name}; run prepare_text.py first.")
    with path.open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def line_starts(text: str, chars_left: int) -> list[int]:
    """Returns where the lines begin that have letters and at least `chars_left` characters from there on."""
    starts: list[int] = []
    position = 0
    for line in text.splitlines(keepends=True):
        if any(character.isalpha() for character in line) and len(text) - position >= chars_left:
            starts.append(position)
        position += len(line)
    return starts


def cut(text: str, tokens: int, tokenizer: PreTrainedTokenizerBase) -> str:
    """Returns the start of a text that is `tokens` tokens long, or fewer where the last would split a character."""
    ids = tokenizer(text, add_special_tokens=False)["input_ids"][:tokens]
    while ids and not text.startswith(tokenizer.decode(ids)):
        ids.pop()
    return tokenizer.decode(ids)


def make_prompts(
    documents: list[dict[str, str]], kind: str, tokenizer: PreTrainedTokenizerBase, args: PromptArguments
) -> Iterator[dict[str, str]]:
    """Yields the prompts of one kind."""
    generator = random.Random(f"{args.seed}/{kind}")
    chars_left = args.max_tokens * MIN_CHARS_PER_TOKEN_LEFT
    files = [
        (document, starts)
        for document in documents
        if document["kind"] == kind and (starts := line_starts(document["text"], chars_left))
    ]
    if not files:
        raise ValueError(f"The held-out text has no file of the kind {kind!r} that is long enough for a prompt.")
    generator.shuffle(files)

    seen: set[str] = set()
    attempts = 20 * args.prompts_per_kind
    for attempt in range(attempts):
        document, starts = files[attempt % len(files)]
        start = generator.choice(starts) if attempt % 2 else 0
        window = document["text"][start : start + chars_left]
        prompt = cut(window, generator.randint(args.min_tokens, args.max_tokens), tokenizer)
        if prompt in seen or not prompt.strip():
            continue
        seen.add(prompt)
        yield {"id": f"{kind}-{len(seen):02d}", "kind": kind, "source": document["source"], "text": prompt}
        if len(seen) == args.prompts_per_kind:
            return
    raise ValueError(
        f"prompts_per_kind is {args.prompts_per_kind}, but the held-out text of the kind {kind!r} gave only "
        f"{len(seen)} different prompts; choose a smaller number."
    )


def main(args: PromptArguments) -> None:
    """Cuts and writes the prompts of every kind."""
    work_dir = Path(args.work_dir)
    documents = read_heldout(work_dir / "heldout.jsonl")
    tokenizer_dir = work_dir / "tokenizer"
    if not tokenizer_dir.is_dir():
        raise ValueError(f"work_dir is {args.work_dir!r}, which has no tokenizer; run train_target.py first.")
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir)

    prompts = [prompt for kind in KINDS for prompt in make_prompts(documents, kind, tokenizer, args)]
    output_file = Path(args.output_file)
    output_file.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(prompt, ensure_ascii=False) + "\n" for prompt in prompts]
    output_file.write_text("".join(lines), encoding="utf-8")
    logger.info("Wrote %d prompts from %d files", len(prompts), len({prompt["source"] for prompt in prompts}))


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    (arguments,) = HfArgumentParser(PromptArguments).parse_args_into_dataclasses()
    main(arguments)
