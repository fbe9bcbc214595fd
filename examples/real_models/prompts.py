"""Prompts from one narrow domain that is there without a network: functions of Python's standard library.

A target with a chat template is asked to rewrite a short function with comments, much of which is repetition; a base
model goes on from the first tokens of a longer one. Modules go whole to the training part or to the held-out part.
"""

from __future__ import annotations

import ast
import hashlib
import itertools
import random
import sysconfig
import textwrap
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

QUESTION = "Rewrite this Python code with a comment on every line:\n\n```python\n{function}```"
HELDOUT_SHARE = 0.1
MOST_OF_A_MODULE = 20

# Tests, applications and tables, rather than a library's code.
SKIPPED = {"site-packages", "test", "tests", "idlelib", "lib2to3", "encodings", "pydoc_data", "turtledemo"}


def find_modules() -> Iterator[tuple[str, str]]:
    """Name and source of the standard library's modules."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if not SKIPPED & set(name.parts):
            yield name.as_posix(), path.read_text(encoding="utf-8", errors="replace")


def find_functions(source: str) -> Iterator[str]:
    """Functions and methods of a module, dedented."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of old escapes
        tree = ast.parse(source)
    lines = source.splitlines()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            yield textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno])) + "\n"


def is_held_out(module: str) -> bool:
    """The same for a module in every run."""
    return int(hashlib.sha256(module.encode()).hexdigest(), 16) % 1000 < 1000 * HELDOUT_SHARE


def find_prompts(source: str, tokenizer: PreTrainedTokenizerBase, prompt_tokens: int) -> Iterator[dict[str, Any]]:
    """Prompts from one module, in the form that `dspark_hf.data.prepare_data` reads."""
    # Three lines are hardly a function to talk about.
    functions = [function for function in dict.fromkeys(find_functions(source)) if function.count("\n") > 3]
    for function in functions:
        # Beyond this it is too long for a chat, and long enough to go on from.
        length = len(tokenizer(function[: 16 * prompt_tokens], add_special_tokens=False).input_ids)
        if tokenizer.chat_template and length <= prompt_tokens:
            yield {"messages": [{"role": "user", "content": QUESTION.format(function=function)}]}
        elif not tokenizer.chat_template and length >= 2 * prompt_tokens:
            yield {"text": function}


def make_prompts(
    tokenizer: PreTrainedTokenizerBase, prompt_tokens: int, counts: tuple[int, int], seed: int
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Training and held-out prompts, shuffled.

    Args:
        tokenizer: the target's; with a chat template the prompts are `messages`, else `text`.
        prompt_tokens: most tokens of a function in a chat; of one to go on from, what is given of it.
        counts: most prompts of either part.
        seed: of the choice and the order.
    """
    rng = random.Random(seed)
    modules = list(find_modules())
    rng.shuffle(modules)
    parts: tuple[list[dict[str, Any]], list[dict[str, Any]]] = ([], [])
    for module, source in modules:
        index = int(is_held_out(module))
        room = min(counts[index] - len(parts[index]), MOST_OF_A_MODULE)
        if room > 0:
            found = itertools.islice(find_prompts(source, tokenizer, prompt_tokens), room)
            parts[index].extend({"id": module, **prompt} for prompt in found)
        elif all(len(part) >= count for part, count in zip(parts, counts)):
            break
    for part in parts:
        rng.shuffle(part)
    return parts
