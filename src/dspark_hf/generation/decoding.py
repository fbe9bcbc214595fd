"""Speculative decoding: draft, verify, commit, until the text ends.

`speculative_decode` has the signature of a Transformers decoding method, so that `generate` prepares everything as it
does for plain decoding. Its output is the target's own: token for token when greedy, in distribution when sampled.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    LogitsProcessorList,
    MaxLengthCriteria,
    PreTrainedModel,
    StoppingCriteriaList,
)
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation.streamers import BaseStreamer
from transformers.utils import logging

from .. import _compat
from ..models import DSparkDrafter
from .drafting import DraftSession, Proposal, length_up_to_end
from .settings import check_processors, resolve_settings
from .stats import GenerationStats, RoundStats, Stopwatch
from .target import TargetOutput, TargetSession
from .verification import Verdict, sample, verify_greedy, verify_sampled

logger = logging.get_logger(__name__)

# An accepted length this low over this many rounds is what a drafter of another target or convention gives.
COLLAPSED_LENGTH = 1.15
COLLAPSE_ROUNDS = 64


@torch.no_grad()
def speculative_decode(
    target: PreTrainedModel,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    *,
    drafter: DSparkDrafter,
    streamer: BaseStreamer | None = None,
    dspark_num_draft_tokens: int | None = None,
    dspark_confidence_threshold: float | None = None,
    **model_kwargs: Any,
) -> torch.Tensor | GenerateDecoderOnlyOutput:
    """Generates with `target`, drafting with `drafter`.

    Args:
        target: the model whose text this is.
        input_ids: `(1, length)` prompt.
        logits_processor: processors that `generate` prepared.
        stopping_criteria: criteria that `generate` prepared; asked after every token.
        generation_config: the call's merged generation config.
        drafter: a drafter made for `target`.
        streamer: receives each new token as soon as it is verified.
        dspark_num_draft_tokens: most tokens drafted in a round, 1 to γ.
        dspark_confidence_threshold: see `DecodingSettings`.
        model_kwargs: what `generate` prepared for the target's forward.

    Returns:
        `(1, length + new)` token ids, or the dictionary that `return_dict_in_generate` asks for.

    Raises:
        ValueError: for a drafter of another target, more than one row, or options under which the output would not be
            the target's.
    """
    _check_call(target, input_ids, logits_processor, generation_config, model_kwargs)
    drafter.bind_target(target)
    settings = resolve_settings(drafter, generation_config, dspark_num_draft_tokens, dspark_confidence_threshold)
    session = TargetSession(target, drafter.config.target_layer_ids, model_kwargs)
    loop = _Loop(
        session=session,
        drafts=DraftSession(drafter, logits_processor, settings),
        processors=logits_processor,
        criteria=stopping_criteria,
        config=generation_config,
        streamer=streamer,
        record=_Record(generation_config, _compat.attention_windows(session.cache, target)),
        sequence_ids=input_ids,
    )
    drafter.last_stats = loop.stats
    loop.run()
    _warn_on_collapse(loop.stats, drafter)
    return loop.result()


def _check_call(
    target: PreTrainedModel,
    input_ids: torch.Tensor,
    processors: LogitsProcessorList,
    generation_config: GenerationConfig,
    model_kwargs: dict[str, Any],
) -> None:
    if target.config.is_encoder_decoder:
        raise ValueError(f"{type(target).__name__} is an encoder-decoder model; drafters serve decoder-only targets.")
    if input_ids.shape[0] != 1:
        raise ValueError(
            f"`input_ids` has {input_ids.shape[0]} rows; `generate` with a drafter takes one prompt at a time. Call "
            "it once per prompt, or leave out `assistant_model` for the batch."
        )
    if input_ids.shape[1] == 0 and "inputs_embeds" not in model_kwargs:
        raise ValueError("The prompt is empty: `input_ids` has no token. Give at least one, such as the BOS token.")
    check_beams(generation_config)
    if generation_config.prefill_chunk_size is not None:
        raise ValueError(
            "`prefill_chunk_size` is not supported with a drafter, which needs the whole prompt's states."
        )
    if generation_config.assistant_ensemble_weight is not None:
        raise ValueError("`assistant_ensemble_weight` mixes the drafter into the output; a drafter is lossless only.")
    check_processors(processors)


def check_beams(generation_config: GenerationConfig) -> None:
    """Raises `ValueError` for beam search."""
    if (generation_config.num_beams or 1) > 1:
        raise ValueError(
            f"`num_beams` is {generation_config.num_beams}; beam search cannot be drafted. Set it to 1, or leave out "
            "`assistant_model`."
        )


def _warn_on_collapse(stats: GenerationStats, drafter: DSparkDrafter) -> None:
    drafting = [entry for entry in stats.rounds if entry.verified > 0]
    if len(drafting) < COLLAPSE_ROUNDS:
        return
    length = sum(entry.emitted for entry in drafting) / len(drafting)
    if length < COLLAPSED_LENGTH:
        logger.warning_once(
            f"The drafter's mean accepted length is {length:.2f} over {len(drafting)} rounds: the text is right, but "
            "drafting is wasted. The drafter may belong to another target or chat template "
            f"(it was made for {drafter.config.target_name_or_path!r})."
        )


@dataclass
class _Record:
    """What `return_dict_in_generate` returns beside the sequence, one entry per new token."""

    config: GenerationConfig
    windows: list[int | None]
    scores: list[torch.Tensor] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)
    attentions: list[tuple[torch.Tensor, ...]] = field(default_factory=list)
    hidden_states: list[tuple[torch.Tensor, ...]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.active = bool(self.config.return_dict_in_generate)
        self.wants_logits = self.active and bool(self.config.output_logits)
        self.wants_scores = self.active and bool(self.config.output_scores)

    def add(self, output: TargetOutput, raw: torch.Tensor | None, scores: torch.Tensor, emitted: int) -> None:
        """Records `emitted` tokens that one forward pass with `scores (1, n, vocab)` gave."""
        if not self.active:
            return
        if self.wants_scores:
            self.scores += [scores[:, index] for index in range(emitted)]
        if self.wants_logits and raw is not None:
            self.logits += [raw[:, index] for index in range(emitted)]
        prefill = not self.hidden_states if output.hidden_states is not None else not self.attentions
        if output.hidden_states is not None:
            self.hidden_states += _per_token(output.hidden_states, emitted, prefill)
        if output.attentions is not None:
            self.attentions += _attention_per_token(output.attentions, emitted, prefill, self.windows)


def _per_token(states: tuple[torch.Tensor, ...], emitted: int, prefill: bool) -> list[tuple[torch.Tensor, ...]]:
    """Hidden states as plain decoding returns them: the whole prompt first, then one position per token."""
    if prefill:
        return [states]
    return [tuple(state[:, index : index + 1] for state in states) for index in range(emitted)]


def _attention_per_token(
    weights: tuple[torch.Tensor, ...], emitted: int, prefill: bool, windows: list[int | None]
) -> list[tuple[torch.Tensor, ...]]:
    """Attention weights as plain decoding returns them.

    Each token has neither the keys drafted after it nor, in a layer with a sliding window, those before the window,
    which the first drafted tokens could still see.
    """
    if prefill:
        return [weights]
    tokens = []
    for index in range(emitted):
        layers = []
        for layer, window in zip(weights, windows, strict=True):
            end = layer.shape[3] - (layer.shape[2] - 1 - index)
            layers.append(layer[:, :, index : index + 1, max(0, end - window) if window else 0 : end])
        tokens.append(tuple(layers))
    return tokens


@dataclass
class _Loop:
    """State of one decoding loop."""

    session: TargetSession
    drafts: DraftSession
    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    config: GenerationConfig
    streamer: BaseStreamer | None
    record: _Record
    sequence_ids: torch.Tensor
    stats: GenerationStats = field(default_factory=GenerationStats)
    finished: bool = False

    def __post_init__(self) -> None:
        self.clock = Stopwatch(self.sequence_ids.device)
        self.eos_ids = _compat.eos_token_ids(self.config)
        # Length and end of sequence can be told for a whole round at once; anything else is asked token by token.
        self.simple_ends = all(type(entry) in (MaxLengthCriteria, EosTokenCriteria) for entry in self.criteria)

    def run(self) -> None:
        """Prefill, then rounds until the text ends."""
        start = self.clock.now()
        self._first_token(start)
        while not self.finished:
            self._round()
        self.stats.total_seconds = self.clock.seconds(start, self.clock.now())
        if self.streamer is not None:
            self.streamer.end()

    def _first_token(self, start: Any) -> None:
        """The prompt's forward pass, whose token is the target's own and the first anchor."""
        output = self.session.prefill(self.sequence_ids)
        self.stats.prefill_seconds = self.clock.seconds(start, self.clock.now())
        raw, scores = self._process(output, self.sequence_ids)
        next_ids = self._pick(scores[:, -1])
        self._emit(output, raw, scores, next_ids[:, None])
        states, positions = self.session.without_padding(output.states)
        self.session.commit(emitted=1)
        self.drafts.add_context(states, positions)

    def _round(self) -> None:
        """Drafts, verifies and commits once."""
        marks = [self.clock.now()]
        draft = self._propose()
        drafted = draft.ids.shape[1] if draft is not None else 0
        proposed = self.drafts.confident_length(draft) if draft is not None else 0
        proposal = self._to_verify(draft, proposed) if draft is not None else None
        marks.append(self.clock.now())
        draft_ids = proposal.ids.to(self.sequence_ids.device) if proposal is not None else self.sequence_ids[:, :0]
        output = self.session.verify(self.sequence_ids, draft_ids)
        marks.append(self.clock.now())
        verified = draft_ids.shape[1]
        raw, scores = self._process(output, torch.cat([self.sequence_ids, draft_ids], dim=1))
        verdict = self._judge(proposal, draft_ids, scores)
        accepted = int(verdict.accepted.item())
        new_ids = torch.cat([draft_ids[:, :accepted], verdict.next_ids[:, None]], dim=1)
        emitted = self._emit(output, raw, scores, new_ids)
        self.session.commit(emitted, verified)
        self.drafts.add_context(output.states[:, :emitted], self.session.positions(emitted + 1)[:, :-1])
        self.stats.rounds.append(
            RoundStats(
                drafted=drafted,
                proposed=proposed,
                verified=verified,
                accepted=min(accepted, emitted),
                emitted=emitted,
                draft_seconds=self.clock.seconds(marks[0], marks[1]),
                verify_seconds=self.clock.seconds(marks[1], marks[2]),
            )
        )

    def _propose(self) -> Proposal | None:
        """What is drafted this round; `None` where the length limit leaves room for the target's token only."""
        if self._room() <= 0:
            return None
        return self.drafts.draft(self.sequence_ids, self.drafts.settings.num_draft_tokens)

    def _room(self) -> int:
        """Drafted tokens that the length limit has room for, beside the token that is the target's own."""
        return self.config.max_length - self.sequence_ids.shape[1] - 1

    def _to_verify(self, draft: Proposal, proposed: int) -> Proposal:
        """The part of the first `proposed` drafted tokens that could still be kept."""
        length = min(proposed, self._room())
        return draft.cut(length_up_to_end(draft.ids[:, :length], self.eos_ids))

    def _process(self, output: TargetOutput, ids: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Raw logits, if they are asked for, and processed scores `(1, n, vocab)` of the last `n` ids."""
        scores = output.logits.to(ids.device)
        raw = scores.clone() if self.record.wants_logits else None
        if len(self.processors) == 0:
            return raw, scores
        count = scores.shape[1]
        processed = [
            self.processors(ids[:, : ids.shape[1] - count + 1 + index], scores[:, index]) for index in range(count)
        ]
        return raw, torch.stack(processed, dim=1)

    def _pick(self, scores: torch.Tensor) -> torch.Tensor:
        """The target's own next token: scores `(1, vocab)` to `(1,)`."""
        return sample(torch.softmax(scores, dim=-1)) if self.drafts.settings.do_sample else scores.argmax(dim=-1)

    def _judge(self, proposal: Proposal | None, draft_ids: torch.Tensor, scores: torch.Tensor) -> Verdict:
        if proposal is None or draft_ids.shape[1] == 0:
            return Verdict(accepted=scores.new_zeros(1, dtype=torch.long), next_ids=self._pick(scores[:, -1]))
        if proposal.probs is None:
            return verify_greedy(draft_ids, scores)
        return verify_sampled(draft_ids, proposal.probs.to(scores.device), torch.softmax(scores, dim=-1))

    def _emit(
        self, output: TargetOutput, raw: torch.Tensor | None, scores: torch.Tensor, new_ids: torch.Tensor
    ) -> int:
        """Adds `new_ids (1, n)` up to where the text ends; returns how many were added."""
        length = self.sequence_ids.shape[1]
        candidate = torch.cat([self.sequence_ids, new_ids], dim=1)
        emitted, self.finished = self._ends(candidate, length, scores)
        self.sequence_ids = candidate[:, : length + emitted]
        self.record.add(output, raw, scores, emitted)
        if self.streamer is not None:
            for token in self.sequence_ids[:, length:].cpu().unbind(dim=1):
                self.streamer.put(token)
        return emitted

    def _ends(self, candidate: torch.Tensor, length: int, scores: torch.Tensor) -> tuple[int, bool]:
        """How many tokens after `length` to keep of `candidate (1, length + n)`, and whether the text ends there."""
        count = candidate.shape[1] - length
        if self.simple_ends:
            at_limit = candidate.shape[1] >= self.config.max_length
            if self.eos_ids is None:
                return count, at_limit
            ends = torch.isin(candidate[0, length:], self.eos_ids.to(candidate.device)).tolist()
            return (ends.index(True) + 1, True) if True in ends else (count, at_limit)
        recorded = tuple(self.record.scores) if self.record.wants_scores else None
        for index in range(1, count + 1):
            seen = None if recorded is None else (*recorded, *scores[:, :index].unbind(dim=1))
            if bool(self.criteria(candidate[:, : length + index], seen).all()):
                return index, True
        return count, False

    def result(self) -> torch.Tensor | GenerateDecoderOnlyOutput:
        """What `generate` returns."""
        if not self.record.active:
            return self.sequence_ids
        return _compat.decoder_only_output(
            self.session.cache,
            sequences=self.sequence_ids,
            scores=tuple(self.record.scores) if self.record.wants_scores else None,
            logits=tuple(self.record.logits) if self.record.wants_logits else None,
            attentions=tuple(self.record.attentions) or None,
            hidden_states=tuple(self.record.hidden_states) or None,
        )
