"""Speculative decoding: draft, verify, commit, until the text ends.

`speculative_decode` has the signature of a Transformers decoding method, so that `generate` prepares everything as it
does for plain decoding. Its output is the target's own: token for token when greedy, in distribution when sampled.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch.nn.functional import pad
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
)
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation.streamers import BaseStreamer
from transformers.utils import logging

from .. import _compat
from ..models import Drafter
from .drafting import NoDrafts, Proposal, draft_session
from .processing import RowProcessors, ScoreProcessors, check_processors
from .record import Record
from .rows import Rows, TextRows
from .schedulers import Scheduler, resolve_scheduler
from .scheduling import static_threshold, survival, top_k
from .settings import DecodingSettings, resolve_settings
from .stats import GenerationStats, RoundStats, Stopwatch
from .target import TargetOutput, TargetSession, changing_rope
from .verification import Verdict, verify_greedy, verify_sampled

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
    drafter: Drafter,
    streamer: BaseStreamer | None = None,
    options: Mapping[str, Any] | None = None,
    **model_kwargs: Any,
) -> torch.Tensor | GenerateDecoderOnlyOutput:
    """Generates with `target`, drafting with `drafter`.

    Args:
        target: the model whose text this is.
        input_ids: `(batch, length)` prompts, padded on the left.
        logits_processor: processors that `generate` prepared.
        stopping_criteria: criteria that `generate` prepared; asked after every token.
        generation_config: the call's merged generation config.
        drafter: a drafter made for `target`.
        streamer: receives the new tokens, one column of the batch at a time.
        options: values of `GENERATION_OPTIONS` that go before those of `generation_config`.
        model_kwargs: what `generate` prepared for the target's forward.

    Returns:
        `(batch, length + new)` token ids, or the dictionary that `return_dict_in_generate` asks for.

    Raises:
        ValueError: for a drafter of another target, or options under which the output would not be the target's.
    """
    check_call(target, input_ids, logits_processor, generation_config, model_kwargs)
    check_prompt(drafter, model_kwargs)
    drafter.bind_target(target)
    warn_on_other_template(input_ids, drafter)
    settings = resolve_settings(drafter, generation_config, options)
    scheduler = resolve_scheduler(settings.scheduler, target, drafter, settings.is_limited)
    batch = input_ids.shape[0]
    session = TargetSession(target, drafter.config.target_layer_ids, model_kwargs, batch)
    record = Record(generation_config, batch, _compat.attention_windows(session.cache, target))
    rows = Rows(input_ids, generation_config, stopping_criteria, streamer, record.scores_up_to)
    loop = DecodingLoop(session, drafter, rows, RowProcessors(logits_processor, rows), settings, scheduler, record)
    drafter.last_stats = loop.stats
    try:
        loop.run(input_ids)
    finally:
        # The cache may be the user's.
        _compat.make_ordinary(session.cache)
    if streamer is not None:
        streamer.end()
    warn_on_collapse(loop.stats, drafter)
    return _result(loop, rows)


def check_call(
    target: PreTrainedModel,
    input_ids: torch.Tensor,
    processors: LogitsProcessorList,
    generation_config: GenerationConfig,
    model_kwargs: dict[str, Any],
    joins: bool = False,
) -> None:
    """Raises `ValueError` for a call that cannot be drafted for, alone or, with `joins`, in a batch of other calls.

    The other arguments are those of `speculative_decode`.
    """
    if target.config.is_encoder_decoder:
        raise ValueError(f"{type(target).__name__} is an encoder-decoder model; drafters serve decoder-only targets.")
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
    check_rope(target, input_ids, generation_config, model_kwargs, joins)


def check_prompt(drafter: Drafter, model_kwargs: dict[str, Any]) -> None:
    """Raises `ValueError` for a prompt that `drafter` cannot read."""
    if drafter.is_recurrent and model_kwargs.get("inputs_embeds") is not None:
        raise ValueError(
            f"The prompt is given as `inputs_embeds`, and a {type(drafter).__name__} reads the ids of its tokens. "
            "Give `input_ids`, draft with a `DSparkDrafter`, or call `generate` without `assistant_model`."
        )


def check_rope(
    target: PreTrainedModel,
    input_ids: torch.Tensor,
    generation_config: GenerationConfig,
    model_kwargs: dict[str, Any],
    joins: bool = False,
) -> None:
    """Raises `ValueError` where the target's rotary frequencies would change during the text.

    `dynamic` and `longrope` choose them by the last position of a pass, once a text is longer than in training: a pass
    over several tokens would turn the earlier ones otherwise than plain decoding, which gives each its own pass.
    """
    embeddings = model_kwargs.get("inputs_embeds")
    # `generate` has taken the length of embeddings off the limit.
    given = embeddings.shape[1] if embeddings is not None and input_ids.shape[1] == 0 else 0
    length, longest = input_ids.shape[1] + given, (generation_config.max_length or math.inf) + given
    for kind, limit in changing_rope(target.config.get_text_config(decoder=True)):
        stays = kind == "longrope" and length > limit and input_ids.shape[0] == 1 and not joins
        if longest > limit and not stays:
            raise ValueError(
                f"The target {type(target).__name__} has `{kind}` rotary embeddings, whose frequencies change after "
                f"{limit} tokens, and this text may have {longest}: drafts across that would not be lossless. Set "
                f"`max_new_tokens` to at most {max(0, limit - length)}, or call `generate` without `assistant_model`."
            )


def check_beams(generation_config: GenerationConfig) -> None:
    """Raises `ValueError` for beam search."""
    if (generation_config.num_beams or 1) > 1:
        raise ValueError(
            f"`num_beams` is {generation_config.num_beams}; beam search cannot be drafted. Set it to 1, or leave out "
            "`assistant_model`."
        )


def warn_on_other_template(input_ids: torch.Tensor, drafter: Drafter) -> None:
    """Says once that a prompt does not end as the chats did that the drafter was trained on."""
    expected = drafter.config.generation_prompt_ids
    if not expected or input_ids.shape[1] == 0:
        return
    if (input_ids[:, -len(expected) :].tolist()) != [list(expected)] * input_ids.shape[0]:
        mode = drafter.config.enable_thinking
        argument = "" if mode is None else f", enable_thinking={mode}"
        logger.warning_once(
            "The prompt does not end as the chats did that this drafter was trained on: the chat template or its "
            "thinking mode is another. The text is right, but fewer drafted tokens may be kept. Prompts like those "
            f"of the training come from `tokenizer.apply_chat_template(..., add_generation_prompt=True{argument})`."
        )


def warn_on_collapse(stats: GenerationStats, drafter: Drafter) -> None:
    """Says once that hardly any drafted token was kept."""
    drafting = [entry for entry in stats.rounds if entry.verified > 0]
    if len(drafting) < COLLAPSE_ROUNDS:
        return
    length = sum(entry.emitted for entry in drafting) / sum(entry.rows for entry in drafting)
    if length < COLLAPSED_LENGTH:
        logger.warning_once(
            f"The drafter's mean accepted length is {length:.2f} over {len(drafting)} rounds: the text is right, but "
            "drafting is wasted. The drafter may belong to another target or chat template "
            f"(it was made for {drafter.config.target_name_or_path!r})."
        )


class DecodingLoop:
    """Drafts, verifies and commits, round after round, over a batch of rows.

    Args:
        session: the target over these rows.
        drafter: a drafter bound to the target; `None` for plain decoding.
        rows: the text of the rows.
        processors: their logits processors.
        settings: what the call chose.
        scheduler: says when to draft and how much to verify.
        record: collects what is returned beside the text.

    Attributes:
        active: rows that still generate, in the order of the batch.
        stats: statistics so far.
    """

    def __init__(
        self,
        session: TargetSession,
        drafter: Drafter | None,
        rows: TextRows,
        processors: ScoreProcessors,
        settings: DecodingSettings,
        scheduler: Scheduler,
        record: Record,
    ) -> None:
        self.session, self.rows, self.processors, self.record = session, rows, processors, record
        self.settings, self.scheduler = settings, scheduler
        self.device = rows.device
        self.keeps_confidences = drafter is not None and drafter.record_confidence
        # Elsewhere the host would have to wait for the device at every token.
        self.may_stop_drafts = rows.device.type == "cpu" and not (self.keeps_confidences or settings.is_limited)
        wants_confidences = settings.is_limited or scheduler.needs_confidences or self.keeps_confidences
        self.drafts = (
            NoDrafts(self.device, settings.do_sample)
            if drafter is None
            else draft_session(drafter, processors, settings.do_sample, wants_confidences)
        )
        self.active: list[int] = []
        self.stats = GenerationStats(batch=rows.batch)
        self.clock = Stopwatch(self.device)

    def run(self, input_ids: torch.Tensor) -> None:
        """Prefill of the prompts `(batch, length)`, then rounds until every row has ended."""
        start = self.clock.now()
        self.prefill(input_ids)
        while self.active:
            self.round()
        self.stats.total_seconds = self.clock.seconds(start, self.clock.now())

    def prefill(self, input_ids: torch.Tensor) -> None:
        """The prompts' forward pass, whose tokens are the target's own and the first anchors."""
        start = self.clock.now()
        self.active = self.rows.active
        output = self.session.prefill(input_ids)
        self.prompt_columns = self.session.columns
        self.stats.prefill_seconds += self.clock.seconds(start, self.clock.now())
        self.processors.begin_certain()
        raw, scores = self._process(output, [[] for _ in self.active])
        verdict = self._judge(self.drafts.nothing(len(self.active)), [0] * len(self.active), scores)
        self.record.add_prompt(output, raw, scores)
        self.rows.append(self.active, verdict.next_ids[:, None].tolist())
        # The last ids are those that were run; embeddings have none.
        inputs = output.states.shape[1]
        ids = input_ids[:, -inputs:]
        self.drafts.add_context(output.states, output.positions, pad(ids, (inputs - ids.shape[1], 0)))
        self._go_on([0] * len(self.active))

    def round(self) -> None:
        """Drafts, verifies and commits once."""
        marks = [self.clock.now()]
        active = self.active
        before = [self.rows.lengths[row] for row in active]
        anchors = self.session.anchor_positions.tolist()
        draft, proposed, drafts = self._propose(max(anchors))
        lengths = [len(tokens) for tokens in drafts]
        proposal = draft.first(max(lengths))
        marks.append(self.clock.now())
        inputs = torch.cat([self.rows.last_ids(active)[:, None], proposal.ids.to(self.device)], dim=1)
        output = self.session.verify(inputs)
        marks.append(self.clock.now())
        self.processors.begin()
        raw, scores = self._process(output, drafts)
        verdict = self._judge(proposal, lengths, scores)
        accepted, next_ids = torch.stack([verdict.accepted, verdict.next_ids]).tolist()
        tokens = [
            [*row_draft[:count], token] for row_draft, count, token in zip(drafts, accepted, next_ids, strict=True)
        ]
        self.record.add(active, output, raw, scores, [len(new) for new in tokens])
        emitted = self.rows.append(active, tokens)
        self.processors.commit(active, before)
        self._add_context(output, inputs, emitted)
        self._go_on([output.states.shape[1] - count for count in emitted])
        self.scheduler.record(active, max(anchors), draft.ids.shape[1], lengths, accepted, sum(emitted))
        marks.append(self.clock.now())
        self.stats.add(
            RoundStats(
                rows=len(active),
                drafted=draft.ids.numel(),
                proposed=sum(proposed),
                verified=sum(lengths),
                accepted=sum(map(min, accepted, emitted)),
                emitted=sum(emitted),
                draft_seconds=self.clock.seconds(marks[0], marks[1]),
                verify_seconds=self.clock.seconds(marks[1], marks[2]),
                seconds=self.clock.seconds(marks[0], marks[3]),
                anchors=tuple(anchors),
                emitted_by_row=tuple(emitted),
                verified_by_row=tuple(lengths),
                survived_by_row=tuple(accepted),
                confidence_logits=self._confidence_to_record(draft),
            )
        )

    def _confidence_to_record(self, draft: Proposal) -> list[list[float]] | None:
        if draft.confidence_logits is None or not self.keeps_confidences:
            return None
        logits: list[list[float]] = draft.confidence_logits.tolist()
        return logits

    def _propose(self, context: int) -> tuple[Proposal, list[int], list[list[int]]]:
        """The draft, its tokens per row that are confident enough, and those of them to verify."""
        # The target's own token takes the last place that the length limit leaves.
        has_room = any(self.rows.room(row) > 1 for row in self.active)
        if not has_room or not self.scheduler.wants_draft(self.active, context):
            nothing = [0] * len(self.active)
            return self.drafts.nothing(len(self.active)), nothing, [[] for _ in self.active]
        draft = self.drafts.draft(
            self.active,
            self.rows.last_ids(self.active),
            self.settings.num_draft_tokens,
            self.scheduler.goes_on(self.active, context) if self.may_stop_drafts else None,
        )
        proposed = self._confident_lengths(draft)
        tokens = draft.ids.tolist()
        limits = [
            self.rows.length_to_verify(drafted[:count], row)
            for row, drafted, count in zip(self.active, tokens, proposed, strict=True)
        ]
        lengths = self.scheduler.lengths(self.active, context, draft.confidences, limits)
        if self.settings.verify_budget is not None:
            lengths = top_k(survival(draft.confidences, lengths), self.settings.verify_budget).tolist()
        return draft, proposed, [drafted[:length] for drafted, length in zip(tokens, lengths, strict=True)]

    def _confident_lengths(self, draft: Proposal) -> list[int]:
        """For each row, the tokens of its draft before the first whose confidence is below the threshold."""
        batch, drafted = draft.ids.shape
        if self.settings.confidence_threshold == 0:
            return [drafted] * batch
        lengths: list[int] = static_threshold(draft.confidences, self.settings.confidence_threshold).tolist()
        return lengths

    def _process(self, output: TargetOutput, drafts: list[list[int]]) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Raw logits, if they are asked for, and processed scores `(batch, n, vocab)`."""
        scores = output.logits.to(self.device)
        raw = scores.clone() if self.record.wants_logits else None
        return raw, self.processors.process(self.active, drafts, 0, scores)

    def _judge(self, proposal: Proposal, lengths: list[int], scores: torch.Tensor) -> Verdict:
        """Verifies the first `lengths` tokens of each row of the proposal."""
        ids = proposal.ids.to(self.device)
        counts = torch.tensor(lengths, device=self.device)
        if proposal.probs is None:
            return verify_greedy(ids, scores, counts)
        target_probs = torch.softmax(scores, dim=-1)
        return verify_sampled(ids, proposal.probs.to(self.device), target_probs, lengths=counts)

    def _add_context(self, output: TargetOutput, inputs: torch.Tensor, emitted: list[int]) -> None:
        """Gives the drafter the states of what each row keeps of the verified tokens."""
        longest = max(emitted)
        positions = output.positions[:, :longest]
        if min(emitted) < longest:
            counts = torch.tensor(emitted, device=positions.device)
            positions = positions.masked_fill(torch.arange(longest, device=positions.device) >= counts[:, None], -1)
        self.drafts.add_context(output.states[:, :longest], positions, inputs[:, :longest])

    def _go_on(self, rejected: list[int]) -> None:
        """Rolls the caches back and lets rows that have ended leave the batch."""
        staying = [index for index, row in enumerate(self.active) if not self.rows.ended[row]]
        if self.record.active and self.rows.batch > 1:
            for index in set(range(len(self.active))).difference(staying):
                self.record.caches[self.active[index]] = self.session.row_states(index, rejected[index])
        if staying:
            self.session.commit(staying, [rejected[index] for index in staying])
            if len(staying) < len(self.active):
                self.drafts.keep(staying)
        elif self.rows.batch == 1:
            self.session.commit([0], rejected)
        self.active = [self.active[index] for index in staying]


def _result(loop: DecodingLoop, rows: Rows) -> torch.Tensor | GenerateDecoderOnlyOutput:
    """What `generate` returns."""
    sequences = rows.sequences()
    record = loop.record
    lengths = [length - rows.prompt_length for length in rows.lengths]
    has_cache = _restore_cache(loop, lengths)
    if not record.active:
        return sequences
    return _compat.decoder_only_output(
        loop.session.cache if has_cache else None,
        sequences=sequences,
        scores=record.columns(record.scores, lengths) if record.wants_scores else None,
        logits=record.columns(record.logits, lengths) if record.wants_logits else None,
        attentions=record.attention_weights(lengths),
        hidden_states=record.hidden_states(lengths),
    )


def _restore_cache(loop: DecodingLoop, lengths: list[int]) -> bool:
    """Puts rows that have left the batch back into the target's cache, where plain decoding has them.

    Where the cache cannot hold them it is emptied, and the answer is false: it may be the user's, who would take what
    the last rows left there for the whole batch. So it is where only ids are returned, as nothing was kept of rows
    that left, and where rows ended at different columns: plain decoding has fed the last token and padding to those
    that ended before the others.
    """
    if len(lengths) == 1:
        return True
    if len(loop.record.caches) < len(lengths) or len(set(lengths)) > 1:
        loop.session.cache.reset()
        return False
    # The last token is not fed.
    rows = [loop.record.caches[row] for row in range(len(lengths))]
    _compat.fill_cache(loop.session.cache, rows, loop.prompt_columns + lengths[0] - 1)
    return True
