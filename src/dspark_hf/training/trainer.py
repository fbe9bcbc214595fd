"""A `Trainer` for drafters."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, Trainer
from transformers.trainer_utils import EvalLoopOutput

from ..data import DrafterCollator
from ..models import DSparkDrafter, without_adapters
from .anchors import Anchors, block_attention_mask, evaluation_mask, make_blocks, sample_anchors
from .arguments import DSparkTrainingArguments
from .losses import (
    EPSILON,
    DSparkLoss,
    LossWeights,
    Sums,
    compare_blocks,
    dspark_loss,
    slot_weights,
    slots_within,
    sum_over_processes,
    world_size,
)
from .state_cache import INDEX, IndexedCollator, StateCache, open_state_cache
from .target_states import TargetStates, check_last_state, compute_target_states, place_target

logger = logging.getLogger(__name__)

Batch = dict[str, torch.Tensor]

# Metrics keep the names of the reference; logs shorten this one.
LOGGED_NAMES = {"tau_probabilistic": "tau"}


class RunningMetrics:
    """Metrics as sums over batches, kept on the device, reduced over processes when they are read."""

    def __init__(self) -> None:
        self._sums: Sums = {}

    def add(self, sums: Sums) -> None:
        """Adds one batch."""
        for name, (num, den) in sums.items():
            if name in self._sums:
                num, den = num + self._sums[name][0], den + self._sums[name][1]
            self._sums[name] = (num, den)

    def pop(self) -> dict[str, float]:
        """Means since the last call, over all processes; every process must call it."""
        if not self._sums:
            return {}
        names = list(self._sums)
        table = torch.stack([torch.stack(self._sums[name]).double() for name in names])
        self._sums = {}
        nums, dens = sum_over_processes(table).cpu().unbind(dim=1)
        means = (nums / dens.clamp(min=EPSILON)).tolist()
        # A slot that no block reached has no acceptance rate.
        kept = [(name, mean) for name, mean, den in zip(names, means, dens.tolist(), strict=True) if den > 0]
        return {LOGGED_NAMES.get(name, name): mean for name, mean in kept}


class DSparkTrainer(Trainer):
    """Trains a drafter against a frozen target.

    The target's states are computed for each batch as it comes or, with `args.states_cache`, read from there; those of
    evaluation data are always computed. The target belongs to the trainer only: it is neither saved nor trained nor
    part of the model. Beside the loss the log has its terms (`ce_loss`, `l1_loss`,
    `confidence_loss`), the accepted length that is expected of a round with its bonus token (`tau`), acceptance by
    slot (`accept_rate@0`, ...) and how well the confidence fits it, each averaged since the last log; `evaluate` gives
    the same with the prefix `eval_`.

    Anchors depend on `args.seed`, the step and the row, so a run that is resumed draws those of an unbroken one. In
    evaluation they depend on the row only.

    Args:
        model: the drafter, or a `peft.PeftModel` around it. Its own embeddings and LM head, if it has them, stay as
            they are.
        target: the model that it will draft for.
        args: training arguments.
        train_dataset: rows with `input_ids` and `loss_mask`, from `dspark_hf.data.prepare_dataset`.
        eval_dataset: the same, or a dictionary of them.
        processing_class: the target's tokenizer, saved next to the drafter.
        data_collator: by default pads on the right.
        kwargs: further arguments of `Trainer`.

    Attributes:
        state_cache: the target's states over `train_dataset`, where `args.states_cache` names them.

    Raises:
        OSError: if there is no cache of target states where there should be, or it is incomplete.
        ValueError: if the drafter does not fit the target, training cannot read the target's logits, or the cache is
            one of another target, other layers or other data.
    """

    args: DSparkTrainingArguments

    def __init__(
        self,
        model: DSparkDrafter,
        target: PreTrainedModel,
        args: DSparkTrainingArguments,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        data_collator: Callable[[list[dict[str, Any]]], Batch] | None = None,
        **kwargs: Any,
    ) -> None:
        if not isinstance(args, DSparkTrainingArguments):
            raise ValueError(f"`args` is a {type(args).__name__}; pass `DSparkTrainingArguments`.")
        if args.n_gpu > 1:
            logger.warning("One of %d GPUs is used; start with `accelerate launch` or `torchrun` for all.", args.n_gpu)
            args._n_gpu = 1
        model.bind_target(target)
        check_last_state(target, model)
        for own in (model.get_input_embeddings(), model.get_output_embeddings()):
            if own is not None:
                own.requires_grad_(False)
        self.target = target.requires_grad_(False).eval()
        self._train_metrics, self._eval_metrics = RunningMetrics(), RunningMetrics()
        data_collator = data_collator or DrafterCollator()
        self.state_cache: StateCache | None = None
        if args.states_cache is not None and train_dataset is not None:
            self.state_cache = open_state_cache(
                args.states_cache, target, model.config.target_layer_ids, train_dataset, args.states_storage
            )
            train_dataset, data_collator = self.state_cache.number(train_dataset), IndexedCollator(data_collator)
        super().__init__(
            model=model,
            args=args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            data_collator=data_collator,
            **kwargs,
        )
        # The loss is already normalised over all batches of a step, see `get_batch_samples`.
        self.model_accepts_loss_kwargs = True
        place_target(self.target, args.device)

    # --- one step --------------------------------------------------------------------------------------------

    def get_batch_samples(
        self, epoch_iterator: Iterator[Batch], num_batches: int, device: torch.device
    ) -> tuple[list[Batch], torch.Tensor | int | None]:
        """The batches of one optimiser step with their anchors, and the sum of their slots' weights."""
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        total = torch.zeros((), device=device)
        for batch in batches:
            anchors = self._sample_anchors(batch, self.state.global_step)
            batch["anchor_positions"], batch["anchor_keep"] = anchors.positions, anchors.keep
            eval_mask = evaluation_mask(anchors, _padded_mask(batch), self._drafter.config.block_size)
            total += slot_weights(eval_mask, self.args.loss_decay).sum().to(device)
        return batches, sum_over_processes(total)

    def _sample_anchors(self, batch: Batch, step: int) -> Anchors:
        return sample_anchors(
            batch["input_ids"],
            batch["attention_mask"],
            batch["loss_mask"],
            num_anchors=self.args.num_anchors,
            seed=self.args.seed,
            step=step,
        )

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Batch,
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """See the base class; `num_items_in_batch` is the sum of weights that `get_batch_samples` gives."""
        result = self._batch_loss(model, inputs, num_items_in_batch, world_size())
        if model.training:
            self._train_metrics.add(result.sums)
        return (result.loss, result.metrics) if return_outputs else result.loss

    def _batch_loss(
        self, model: nn.Module, batch: Batch, total_weight: torch.Tensor | int | None, processes: int
    ) -> DSparkLoss:
        if "anchor_positions" in batch:
            anchors = Anchors(batch["anchor_positions"], batch["anchor_keep"])
        else:
            anchors = self._sample_anchors(batch, self.state.global_step)
        config: Any = self._drafter.config
        # Autocast would reach `model.forward` alone, and the heads are applied outside.
        with self.accelerator.autocast():
            states = self._target_states(batch)
            return blockwise_loss(
                model,
                self._drafter,
                batch["input_ids"],
                _padded_mask(batch),
                anchors,
                states,
                LossWeights(
                    ce=self.args.ce_weight,
                    tv=self.args.tv_weight,
                    confidence=self.args.confidence_weight,
                    decay=self.args.loss_decay,
                ),
                chunk_size=slots_within(self.args.loss_memory, config.vocab_size),
                total_weight=None if total_weight is None else torch.as_tensor(total_weight),
                processes=processes,
            )

    def _target_states(self, batch: Batch) -> TargetStates:
        """Read where the cache has them, else computed."""
        input_ids = batch["input_ids"]
        if self.state_cache is not None and INDEX in batch:
            return self.state_cache.read(batch[INDEX].tolist(), input_ids.shape[1], input_ids.device)
        layers: Any = self._drafter.config.target_layer_ids
        return compute_target_states(self.target, layers, input_ids, batch["attention_mask"])

    @property
    def _drafter(self) -> DSparkDrafter:
        drafter: DSparkDrafter = without_adapters(self.accelerator.unwrap_model(self.model))
        return drafter

    # --- evaluation and logs ---------------------------------------------------------------------------------

    def prediction_step(
        self,
        model: nn.Module,
        inputs: Batch,
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[torch.Tensor, None, None]:
        """Loss of one batch; metrics are added up on the side and nothing else is gathered."""
        inputs = self._prepare_inputs(inputs)
        anchors = self._sample_anchors(inputs, step=0)
        inputs["anchor_positions"], inputs["anchor_keep"] = anchors.positions, anchors.keep
        eval_mask = evaluation_mask(anchors, _padded_mask(inputs), self._drafter.config.block_size)
        with torch.no_grad():
            # Processes may have different numbers of batches: nothing is reduced before the end.
            result = self._batch_loss(model, inputs, slot_weights(eval_mask, self.args.loss_decay).sum(), processes=1)
        self._eval_metrics.add(result.sums)
        return result.loss.detach(), None, None

    def evaluation_loop(self, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any) -> EvalLoopOutput:
        """See the base class; the loss is the mean over all slots, not the mean of the batches' means."""
        self._eval_metrics = RunningMetrics()
        output = super().evaluation_loop(*args, metric_key_prefix=metric_key_prefix, **kwargs)
        metrics = self._eval_metrics.pop()
        output.metrics.update({f"{metric_key_prefix}_{name}": value for name, value in metrics.items()})
        return output

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """See the base class; training logs get the metrics since the last one."""
        if "loss" in logs:
            logs = {**self._train_metrics.pop(), **logs}
        super().log(logs, start_time)


def blockwise_loss(
    model: nn.Module,
    drafter: DSparkDrafter,
    input_ids: torch.Tensor,
    loss_mask: torch.Tensor,
    anchors: Anchors,
    states: TargetStates,
    weights: LossWeights,
    chunk_size: int | None = None,
    total_weight: torch.Tensor | None = None,
    processes: int | None = None,
) -> DSparkLoss:
    """Drafts the blocks at `anchors` and scores them against the target.

    Args:
        model: `drafter`, or its wrapper in distributed training, whose forward must be the one that is called.
        drafter: bound to the target.
        input_ids: `(batch, seq)`.
        loss_mask: `(batch, seq)`, 0 at padding.
        anchors: where the blocks start.
        states: the target's over `input_ids`.
        weights: weights of the loss.
        chunk_size: see `compare_blocks`.
        total_weight: see `dspark_loss`.
        processes: see `dspark_loss`.
    """
    config: Any = drafter.config  # of a built drafter, so no field is unset
    blocks = make_blocks(input_ids, loss_mask, anchors, config.block_size, config.mask_token_id)
    masks = {
        layer_type: block_attention_mask(
            anchors,
            input_ids.shape[1],
            config.block_size,
            config.sliding_window if layer_type == "sliding_attention" else None,
        )
        for layer_type in set(config.layer_types)
    }
    hidden = model(
        input_ids=blocks.input_ids,
        target_states=states.context,
        position_ids=blocks.position_ids,
        attention_mask=masks,
        compute_logits=False,
    ).last_hidden_state
    # One dummy stays where there is nothing else: every process must reach every parameter.
    keep = anchors.keep if bool(anchors.keep.any()) else torch.ones_like(anchors.keep)
    hidden = hidden.unflatten(1, (-1, config.block_size))[keep]
    rows = torch.arange(len(input_ids), device=input_ids.device)[:, None, None]
    target_hidden = states.last[rows, blocks.slots][keep]
    previous_ids, labels, eval_mask = blocks.previous_ids[keep], blocks.labels[keep], blocks.eval_mask[keep]
    compared = compare_blocks(
        drafter, hidden, previous_ids, target_hidden, labels, eval_mask, weights, chunk_size=chunk_size
    )
    return dspark_loss(
        compared,
        drafter.confidence_logits(hidden, drafter.embed_previous(previous_ids)),
        eval_mask,
        weights,
        total_weight=total_weight,
        processes=processes,
    )


def _padded_mask(batch: Batch) -> torch.Tensor:
    """Loss mask `(batch, seq)`, 0 at padding."""
    return batch["loss_mask"].bool() & batch["attention_mask"].bool()


__all__ = ["DSparkTrainer", "RunningMetrics", "blockwise_loss"]
