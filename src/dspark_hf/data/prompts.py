"""Prompts: rows that are to be answered, whatever answers they have."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from .text import BadRow, _encode, _string

ASKING = ("system", "developer", "user")
"""Roles whose messages are kept. Those of tools are answers to calls, which would be other ones."""


@dataclass(frozen=True)
class Prompt:
    """What is to be answered: a chat or a text.

    Attributes:
        turns: of a chat, the messages before each answer.
        input_ids: of a text, the tokens to go on from.
    """

    turns: list[list[dict[str, str]]] = field(default_factory=list)
    input_ids: list[int] = field(default_factory=list)


def read_prompt(row: dict[str, Any], tokenizer: PreTrainedTokenizerBase, prompt_tokens: int) -> Prompt:
    """The prompt of a row that has one of the columns `messages`, `turns`, `prompt` or `text`.

    Without a chat template `prompt` is text to go on from, all of it.

    Args:
        row: without unset columns.
        tokenizer: the target's.
        prompt_tokens: how many tokens of `text` to go on from.

    Raises:
        BadRow: if there is none, or it cannot be answered.
    """
    column = next((name for name in ("messages", "turns", "prompt", "text") if name in row), None)
    if column is None:
        raise BadRow("none of the columns `messages`, `turns`, `prompt` and `text`")
    if column == "text" or (column == "prompt" and not tokenizer.chat_template):
        input_ids = _encode(tokenizer, _string(row, column))
        if not input_ids:
            raise BadRow(f"empty `{column}`")
        return Prompt(input_ids=input_ids[:prompt_tokens] if column == "text" else input_ids)
    if not tokenizer.chat_template:
        raise BadRow(f"`{column}` needs a chat template and the tokenizer has none")
    if column == "messages":
        return Prompt(turns=_split(row["messages"]))
    texts = [row["prompt"]] if column == "prompt" else row["turns"]
    if not isinstance(texts, list) or not texts:
        raise BadRow("`turns` is not a list of texts, at least one")
    return Prompt(turns=[[_message({"role": "user", "content": text})] for text in texts])


def _split(messages: Any) -> list[list[dict[str, str]]]:
    """A chat, cut where the assistant answers; what it said there is dropped."""
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise BadRow("`messages` is not a list of objects")
    turns, asked = [], []
    for message in messages:
        if message.get("role") != "assistant":
            asked.append(_message(message))
        elif asked and asked[-1]["role"] == "user":
            turns.append(asked)
            asked = []
        else:
            raise BadRow("a message of the assistant that does not follow one of the user")
    if asked and asked[-1]["role"] == "user":
        turns.append(asked)
    if not turns:
        raise BadRow("no message of the user")
    return turns


def _message(message: dict[str, Any]) -> dict[str, str]:
    role = message.get("role")
    if role not in ASKING:
        raise BadRow("a message that is neither the system's, the user's nor the assistant's")
    content = _string(message, "content")
    if role == "user" and not content.strip():
        raise BadRow("an empty message of the user")
    return {"role": role, "content": content}


__all__ = ["Prompt", "read_prompt"]
