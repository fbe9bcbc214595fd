"""From a row to training rows: its prompt, the target's answers to it, and their tokens."""

from __future__ import annotations

import hashlib
import threading
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from .backends import Answer, Backend, Question, RowFailed
from .prompts import read_prompt
from .text import BadRow, _encode, _is_trainable, _parse


class Key(NamedTuple):
    """Names an answered row: the number of its source, from 1, and of the sample, from 0."""

    source: int
    sample: int

    def seed(self, seed: int, turn: int = 0) -> int:
        """A seed of its own for each answer."""
        text = f"{seed} {self.source} {self.sample} {turn}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") >> 1


@dataclass
class Answerer:
    """Has rows answered; called from several threads.

    Args:
        backend: who answers.
        tokenizer: the target's.
        max_new_tokens: most tokens of an answer.
        context: most tokens that the target takes, if there is a limit.
        prompt_tokens: how many tokens of a `text` to go on from.
        template_options: given to the chat template.
        seed: from which each answer's is made.
    """

    backend: Backend
    tokenizer: PreTrainedTokenizerBase
    max_new_tokens: int
    context: int | None
    prompt_tokens: int
    template_options: dict[str, Any]
    seed: int
    # A tokenizer is not made for several threads.
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    def __call__(self, key: Key, row: dict[str, Any]) -> list[dict[str, Any]]:
        """The training rows that a row gives: several where its turns do not fit into one sequence.

        Raises:
            BadRow: if the row cannot be answered.
            RowFailed: if it was not.
            BackendGone: if no row can be answered any more.
        """
        row = _parse(row)
        with self._lock:
            prompt = read_prompt(row, self.tokenizer, self.prompt_tokens)
        parts = self._chat(key, prompt.turns) if prompt.turns else [self._text(key, prompt.input_ids)]
        parts = [part for part in parts if _is_trainable(part["loss_mask"])]
        if not parts:
            raise RowFailed("an empty answer")
        same = {"id": row.get("id"), "enable_thinking": self.template_options.get("enable_thinking")}
        return [
            {**key._asdict(), "part": number, "parts": len(parts), **same, **part}
            for number, part in enumerate(parts, start=1)
        ]

    def _text(self, key: Key, input_ids: list[int]) -> dict[str, Any]:
        answer = self.backend(Question(input_ids, self._room(input_ids), key.seed(self.seed)))
        tokens = self._tokens(answer, is_chat=False)
        text, reason = self._decode(input_ids + tokens), answer.finish_reason
        return {"text": text, "finish_reason": reason, **_sequence(input_ids, tokens, [])}

    def _chat(self, key: Key, turns: list[list[dict[str, str]]]) -> list[dict[str, Any]]:
        """Answers turn by turn, until one is cut or the context is full.

        A turn goes on in the sequence of those before it where the template renders these as they were generated, and
        begins a new one where it does not (thinking is dropped, say): so each answer is trained on in the context
        that it was given in.
        """
        messages: list[dict[str, str]] = []
        parts: list[dict[str, Any]] = []
        for turn, asked in enumerate(turns):
            messages = messages + asked
            prompt_ids = self._render(messages)
            try:
                room = self._room(prompt_ids)
            except BadRow:
                if parts:
                    break
                raise
            answer = self.backend(
                Question(prompt_ids, room, key.seed(self.seed, turn), messages, self.template_options)
            )
            tokens = self._tokens(answer, is_chat=True)
            text = self._decode(tokens) if answer.text is None else answer.text
            messages = [*messages, {"role": "assistant", "content": text}]
            prompt_ids, loss_mask = answer.prompt_ids or prompt_ids, []
            if parts and _starts_with(prompt_ids, parts[-1]["input_ids"]):
                loss_mask = parts.pop()["loss_mask"]
            sequence = _sequence(prompt_ids, tokens, loss_mask)
            parts.append({"messages": messages, "finish_reason": answer.finish_reason, **sequence})
            if answer.finish_reason == "length":
                break
        return parts

    def _room(self, prompt_ids: list[int]) -> int:
        """How many tokens an answer may have."""
        if self.context is None:
            return self.max_new_tokens
        if len(prompt_ids) >= self.context:
            raise BadRow(f"a prompt that fills the target's context of {self.context} tokens")
        return min(self.max_new_tokens, self.context - len(prompt_ids))

    def _render(self, messages: list[dict[str, str]]) -> list[int]:
        with self._lock:
            try:
                text = self.tokenizer.apply_chat_template(
                    messages, tokenize=False, add_generation_prompt=True, **self.template_options
                )
            except Exception as error:  # whatever a template's code raises
                raise RowFailed("the chat template fails", f"{type(error).__name__}: {error}") from error
            return _encode(self.tokenizer, text, add_special_tokens=False)

    def _decode(self, tokens: list[int]) -> str:
        with self._lock:
            return str(self.tokenizer.decode(tokens, skip_special_tokens=True))

    def _tokens(self, answer: Answer, is_chat: bool) -> list[int]:
        """The tokens of an answer, made from its text, with an end, where that is all there is."""
        if answer.input_ids is not None:
            return answer.input_ids
        with self._lock:
            tokens = _encode(self.tokenizer, answer.text or "", add_special_tokens=False)
            return tokens + (self._end(is_chat) if answer.finish_reason == "stop" else [])

    def _end(self, is_chat: bool) -> list[int]:
        """The token that ends an answer: in a chat the first that the template puts behind it."""
        if is_chat:
            messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
            text = self.tokenizer.apply_chat_template(messages, tokenize=False, **self.template_options)
            behind = _encode(self.tokenizer, text.rpartition("!")[2].strip(), add_special_tokens=False)
            if behind:
                return behind[:1]
        return [] if self.tokenizer.eos_token_id is None else [self.tokenizer.eos_token_id]


def _starts_with(tokens: list[int], start: list[int]) -> bool:
    return tokens[: len(start)] == start


def _sequence(prompt_ids: list[int], answer: list[int], loss_mask: list[int]) -> dict[str, list[int]]:
    """A prompt and its answer, of which the first tokens have a mask already."""
    rest = [0] * (len(prompt_ids) - len(loss_mask)) + [1] * len(answer)
    return {"input_ids": prompt_ids + answer, "loss_mask": loss_mask + rest}


__all__ = ["Answerer", "Key"]
