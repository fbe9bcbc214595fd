"""The target's side of a `generate` call: prefill, verification, rolling its cache back.

Rows accept different numbers of drafted tokens. Their tokens end in the same column of the cache all the same: after
each round a row that kept fewer is moved to the right, as left padding would have put it there from the start. So the
target sees nothing but an ordinary left-padded batch, distances in sliding windows stay true, and columns that no row
needs any more are dropped.

Shape symbols: `batch` rows that still generate, `columns` of the cache, `k` drafted tokens, `m` captured layers, `d`
the hidden size, `vocab`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import pad
from transformers import PreTrainedConfig, PreTrainedModel

from .. import _compat
from .inference import ForwardMode, forward_mode

# Inputs of a target that have one entry per column, in their last dimension, and how they go on after the prompt.
COLUMN_INPUTS = ("attention_mask", "position_ids", "token_type_ids", "mm_token_type_ids")


@dataclass
class TargetOutput:
    """What one forward pass of the target gives.

    Attributes:
        logits: `(batch, n, vocab)`, float32, for the last `n` input positions (1 in the prefill, k + 1 after).
        states: `(batch, inputs, m * d)`, captured states of every input position.
        positions: `(batch, inputs)`, text positions of the inputs, -1 for padding.
        hidden_states: all hidden states, where the user asked for them.
        attentions: attention weights, where the user asked for them.
    """

    logits: torch.Tensor
    states: torch.Tensor
    positions: torch.Tensor
    hidden_states: tuple[torch.Tensor, ...] | None
    attentions: tuple[torch.Tensor, ...] | None


class TargetSession:
    """Runs the target over a batch of growing rows.

    Args:
        target: the target.
        target_layer_ids: layers whose states the drafter needs.
        model_kwargs: what `generate` prepared for the target's forward.
        batch: number of rows.
        joins: whether rows of other sessions may join these later, which asks as much of the target as a batch does.

    Raises:
        ValueError: without a cache, or with one that cannot be rolled back.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        target_layer_ids: list[int],
        model_kwargs: dict[str, Any],
        batch: int = 1,
        joins: bool = False,
    ) -> None:
        self.target = target
        self.target_layer_ids = target_layer_ids
        self.model_kwargs = model_kwargs
        self.batch = batch
        if not model_kwargs.get("use_cache", True):
            raise ValueError(
                "A drafter needs the target's cache, and `use_cache` is false, in the call or in the target's "
                "`generation_config`. Set it to true."
            )
        self.cache = _compat.check_rollback(model_kwargs.get(_compat.CACHE_ARGUMENT), target)
        self.moves_rows = batch > 1 or joins
        if self.moves_rows:
            _compat.check_realignment(self.cache, target)
        self.wants_hidden_states = bool(model_kwargs.get("output_hidden_states"))
        self.wants_attentions = bool(model_kwargs.get("output_attentions"))
        # What is returned as the target gives it must be ordinary tensors.
        returns_states = self.wants_hidden_states or self.wants_attentions
        # Changing frequencies are kept in the target.
        is_kept = returns_states or bool(changing_rope(target.config.get_text_config(decoder=True)))
        self._mode: ForwardMode = torch.no_grad if is_kept else forward_mode(target, self.cache)
        # Columns of the cache, and how many of its first columns are padding in each row.
        self.columns = 0
        self.padding = [0] * batch
        # Inputs of the last verification, and how many columns `model_kwargs` covers.
        self.inputs = 0
        self._known_columns = 0

    @torch.no_grad()
    def prefill(self, input_ids: torch.Tensor) -> TargetOutput:
        """Runs the prompts `(batch, length)`, or what of them is not in the cache yet."""
        whole = self._text_length(input_ids.shape[1])
        inputs = self._uncached(input_ids.shape[1], whole)
        outputs = self._forward(input_ids, self.model_kwargs, inputs, is_first_iteration=True)
        _compat.prepare_cache_for_rollback(self.cache, self.target)
        # A static cache returns the tensor that it counts in.
        self.columns = self._known_columns = int(self.cache.get_seq_length())
        if self.columns != whole:
            raise ValueError(
                f"After a prompt of {whole} tokens, as `attention_mask` or `position_ids` count them, the cache of "
                f"the target {type(self.target).__name__} has {self.columns} entries. Give a mask as long as the "
                "text. Where it is, the target has virtual tokens before the prompt (prompt tuning) or a cache that "
                "cannot tell drafted tokens apart. Call `generate` without `assistant_model`."
            )
        if self.moves_rows:
            _compat.check_realignment(self.cache, self.target)
        mask = self.model_kwargs.get("attention_mask")
        if mask is not None:
            self.padding = (mask.cumsum(dim=1) == 0).sum(dim=1).tolist()
        positions = self._prompt_positions(outputs.hidden_states)
        self.anchor_positions = positions.amax(dim=1) + 1
        return self._pack(outputs, 1, positions)

    def _text_length(self, length: int) -> int:
        """Length of the text so far, of which `input_ids` has `length` tokens.

        A cache that the user passes back comes with the whole text, or with its new tokens only and a mask of the
        whole text.
        """
        if (embeddings := self.model_kwargs.get("inputs_embeds")) is not None:
            return int(embeddings.shape[1])
        mask, position_ids = self.model_kwargs.get("attention_mask"), self.model_kwargs.get("position_ids")
        # `generate` drops a mask of ones, but made positions of the same length from it.
        return next((known.shape[-1] for known in (mask, position_ids) if known is not None), length)

    def _uncached(self, length: int, whole: int) -> int | None:
        """How many of the last tokens to run, `None` for all that `input_ids` of `length` has."""
        cached = int(self.cache.get_seq_length())
        has_whole_text = whole == length or "inputs_embeds" in self.model_kwargs
        return whole - cached if cached and has_whole_text else None

    def _prompt_positions(self, hidden_states: tuple[torch.Tensor | None, ...]) -> torch.Tensor:
        """Text positions `(batch, inputs)` of what the prefill ran, -1 for padding."""
        inputs = next(state.shape[-2] for state in hidden_states if state is not None)
        mask, position_ids = self.model_kwargs.get("attention_mask"), self.model_kwargs.get("position_ids")
        if position_ids is not None and position_ids.dim() == 2:
            positions = position_ids[:, -inputs:]
        elif mask is not None:
            positions = (mask.long().cumsum(dim=1) - 1)[:, -inputs:]
        else:
            positions = torch.arange(self.columns - inputs, self.columns, device=self.target.device)[None]
        positions = positions.expand(self.batch, -1)
        return positions if mask is None else positions.masked_fill(mask[:, -inputs:] == 0, -1)

    @torch.no_grad()
    def verify(self, ids: torch.Tensor) -> TargetOutput:
        """Runs `ids (batch, k + 1)`: each row's anchor and its drafted tokens."""
        inputs = ids.shape[1]
        with _compat.decode_context(self.target):
            outputs = self._forward(ids, extend(self.model_kwargs, inputs - 1), inputs)
        self.columns += inputs
        self.inputs = inputs
        steps = torch.arange(inputs, device=self.anchor_positions.device)
        return self._pack(outputs, inputs, self.anchor_positions[:, None] + steps)

    def commit(self, rows: list[int], rejected: list[int]) -> None:
        """Goes on with some rows, after the prefill or a verification.

        Args:
            rows: at least one row of the batch, in ascending order.
            rejected: for each of `rows`, how many inputs of the last verification do not stay.
        """
        fewest = min(rejected)
        if len(rows) == self.batch and max(rejected) == fewest:
            _compat.crop_cache(self.cache, fewest)
            self.columns -= fewest
            self.model_kwargs = extend(self.model_kwargs, self.columns + 1 - self._known_columns)
        else:
            self._realign(rows, [count - fewest for count in rejected], self.columns - fewest)
        self._known_columns = self.columns + 1
        advances = torch.tensor(rejected, device=self.anchor_positions.device).neg() + self.inputs
        self.anchor_positions = self.anchor_positions[rows] + advances

    def join(self, others: Sequence[TargetSession]) -> None:
        """Takes in the rows of other sessions, after its own; all between a `commit` and a verification."""
        sessions = (self, *others)
        total = max(session.columns for session in sessions)
        _compat.join_caches(self.cache, [session.cache for session in others], total)
        # The anchors' column comes after those of the cache.
        self.model_kwargs = self.model_kwargs | join_columns(sessions, total + 1)
        self.padding = [count + total - session.columns for session in sessions for count in session.padding]
        self.anchor_positions = torch.cat([session.anchor_positions for session in sessions])
        self.columns, self.batch = total, sum(session.batch for session in sessions)
        self._known_columns = total + 1

    def row_states(self, row: int, rejected: int) -> _compat.CacheRow:
        """What the cache holds of one row, less its `rejected` last columns."""
        return _compat.cache_row(self.cache, row, self.padding[row], self.columns - rejected, self.columns)

    def _realign(self, rows: list[int], shifts: list[int], end: int) -> None:
        """Moves each of `rows` to the right by its shift, cuts at column `end`, drops what is padding in all rows."""
        padding = [self.padding[row] + shift for row, shift in zip(rows, shifts, strict=True)]
        start = min(padding)
        device = self.anchor_positions.device
        index = torch.tensor(rows, device=device)
        # The anchors' column comes after those of the cache.
        columns = torch.arange(start, end + 1, device=device) - torch.tensor(shifts, device=device)[:, None]
        _compat.realign_cache(self.cache, index, columns[:, :-1], self.columns)
        inputs = extend(self.model_kwargs, self.columns + 1 - self._known_columns)
        self.model_kwargs = select_columns(select_rows(inputs, index, self.batch), index, columns, self.columns + 1)
        self.padding = [count - start for count in padding]
        self.columns, self.batch = end - start, len(rows)

    def _forward(
        self, ids: torch.Tensor, model_kwargs: dict[str, Any], inputs: int | None, is_first_iteration: bool = False
    ) -> Any:
        prepared = self.target.prepare_inputs_for_generation(
            ids, next_sequence_length=inputs, is_first_iteration=is_first_iteration, **model_kwargs
        )
        if self.moves_rows:
            _compat.check_positions(prepared, self.target)
        if "logits_to_keep" in prepared:
            prepared["logits_to_keep"] = 1 if is_first_iteration else inputs
        if not self.wants_hidden_states:
            prepared |= _compat.capture_kwargs(self.target_layer_ids)
        with self._mode():
            return self.target(**prepared, return_dict=True)

    def _pack(self, outputs: Any, scored: int, positions: torch.Tensor) -> TargetOutput:
        return TargetOutput(
            logits=outputs.logits[:, -scored:].to(torch.float32, copy=True),
            states=_compat.captured_states(outputs.hidden_states, self.target_layer_ids),
            positions=positions,
            hidden_states=outputs.hidden_states if self.wants_hidden_states else None,
            # Kinds of attention that have no weights to show give none.
            attentions=outputs.attentions if self.wants_attentions and _are_tensors(outputs.attentions) else None,
        )


def _are_tensors(values: Any) -> bool:
    return bool(values) and all(isinstance(value, torch.Tensor) for value in values)


def changing_rope(config: PreTrainedConfig) -> list[tuple[str, int]]:
    """Kinds of rotary embeddings that change with the text's length, and after how many tokens they do."""
    parameters = getattr(config, "rope_parameters", None) or {}
    groups = [parameters, *(group for group in parameters.values() if isinstance(group, dict))]
    kinds = [group for group in groups if group.get("rope_type") in ("dynamic", "longrope")]
    names = ("original_max_position_embeddings", "max_position_embeddings")
    limits = [value for name in names if (value := getattr(config, name, None))]
    return [
        (group["rope_type"], int(min([*limits, group.get("original_max_position_embeddings") or limits[-1]])))
        for group in kinds
    ]


def extend(model_kwargs: dict[str, Any], count: int) -> dict[str, Any]:
    """`model_kwargs` for `count` further text tokens: positions go on, masks are ones, token types are text."""
    if count == 0:
        return model_kwargs
    model_kwargs = dict(model_kwargs)
    if (positions := model_kwargs.get("position_ids")) is not None:
        steps = torch.arange(1, count + 1, dtype=positions.dtype, device=positions.device)
        model_kwargs["position_ids"] = torch.cat([positions, positions[..., -1:] + steps], dim=-1)
    if (mask := model_kwargs.get("attention_mask")) is not None:
        model_kwargs["attention_mask"] = torch.cat([mask, mask.new_ones(mask.shape[0], count)], dim=1)
    for name, value in (("token_type_ids", None), ("mm_token_type_ids", 0)):
        if (types := model_kwargs.get(name)) is not None:
            last = types[:, -1:].expand(-1, count) if value is None else types.new_full((types.shape[0], count), value)
            model_kwargs[name] = torch.cat([types, last], dim=1)
    return model_kwargs


def join_columns(sessions: tuple[TargetSession, ...], total: int) -> dict[str, torch.Tensor]:
    """Inputs with one entry per column, of the rows of all `sessions`: `(rows, total)`, padded on the left."""
    joined = {}
    for name in COLUMN_INPUTS:
        given = [session.model_kwargs.get(name) for session in sessions]
        if name != "attention_mask" and all(values is None for values in given):
            continue
        parts = []
        for session, values in zip(sessions, given, strict=True):
            if values is None:
                # No mask is one of ones, no token types are those of text.
                shape = (session.batch, session.columns + 1)
                device = session.anchor_positions.device
                values = torch.full(shape, int(name == "attention_mask"), device=device)
            # One row of positions may stand for all, and multimodal positions have a dimension before the rows.
            values = values.expand(*values.shape[:-2], session.batch, -1)
            parts.append(pad(values, (total - values.shape[-1], 0)))
        joined[name] = torch.cat(parts, dim=-2)
    return joined


def select_rows(model_kwargs: dict[str, Any], rows: torch.Tensor, batch: int) -> dict[str, Any]:
    """`model_kwargs` with `rows` of those inputs that have one row per prompt but none of `COLUMN_INPUTS`."""
    return {
        name: value[rows.to(value.device)]
        if isinstance(value, torch.Tensor) and value.shape[:1] == (batch,) and name not in COLUMN_INPUTS
        else value
        for name, value in model_kwargs.items()
    }


def select_columns(
    model_kwargs: dict[str, Any], rows: torch.Tensor, columns: torch.Tensor, total: int
) -> dict[str, Any]:
    """`model_kwargs` with column j of new row i taken from column `columns[i, j]` of the old row `rows[i]`.

    Negative columns are padding. Inputs that have one entry per column may cover only the last of the `total` columns.
    """
    selected = dict(model_kwargs)
    if selected.get("attention_mask") is None:
        selected["attention_mask"] = torch.ones(int(rows.max()) + 1, total, dtype=torch.long, device=columns.device)
    for name in COLUMN_INPUTS:
        if (values := selected.get(name)) is None:
            continue
        index = (columns - (total - values.shape[-1])).clamp(min=0).to(values.device)
        # One row of positions may stand for all, and multimodal positions have a dimension before the rows.
        taken = values.index_select(-2, rows.to(values.device)) if values.shape[-2] > 1 else values
        taken = taken.expand(*values.shape[:-2], len(index), -1)
        selected[name] = taken.gather(-1, index.expand(*values.shape[:-2], -1, -1))
    mask = selected["attention_mask"]
    selected["attention_mask"] = mask.masked_fill(columns.to(mask.device) < 0, 0)
    return selected
