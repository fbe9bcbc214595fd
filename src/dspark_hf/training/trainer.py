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
from ..models import Drafter, DSparkDrafter, Eagle3Drafter, MTPDrafter, without_adapters
from .arguments import DSparkTrainingArguments
from .blockwise import BlockObjective
from .losses import EPSILON, DSparkLoss, Sums, sum_over_processes, world_size
from .objective import Batch, Objective
from .recurrent import Eagle3Objective, MTPObjective
from .state_cache import INDEX, IndexedCollator, StateCache, open_state_cache
from .target_states import TargetStates, check_last_state, compute_target_states, place_target

logger = logging.getLogger(__name__)

OBJECTIVES: dict[type[Drafter], type[Objective]] = {
    DSparkDrafter: BlockObjective,
    Eagle3Drafter: Eagle3Objective,
    MTPDrafter: MTPObjective,
}
"""What each kind of drafter is trained on."""

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
    """Trains a drafter of any kind against a frozen target, each with the loss of its method (`OBJECTIVES`).

    The target's states are computed for each batch as it comes or, with `args.states_cache`, read from there; those of
    evaluation data are always computed. The target belongs to the trainer only: it is neither saved nor trained nor
    part of the model. Beside the loss the log has those of its terms that the method has (`ce_loss`, which is the soft
    cross entropy for EAGLE-3, `l1_loss`, `confidence_loss`), the accepted length that is expected of a round with its
    bonus token (`tau`), acceptance by slot (`accept_rate@0`, ...) and how well the confidence fits it, each averaged
    since the last log; `evaluate` gives the same with the prefix `eval_`.

    Anchors, where the method has them, depend on `args.seed`, the step and the row, so a run that is resumed draws
    those of an unbroken one. In evaluation they depend on the row only.

    Args:
        model: the drafter, or a `peft.PeftModel` around it. Its copies of the target's embeddings and LM head, if it
            has them, stay as they are.
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
        model: Drafter,
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
        drafter = without_adapters(model)
        if args.gradient_checkpointing and not drafter.supports_gradient_checkpointing:
            raise ValueError(
                f"`gradient_checkpointing` is True, which a {type(drafter).__name__} does not support: what is "
                "computed again would be in its cache twice. Leave it False."
            )
        model.bind_target(target)
        check_last_state(target, model.config.target_layer_ids, model.target_logits)
        for copied in (drafter.embed_tokens, None if drafter.has_own_head else drafter.lm_head):
            if copied is not None:
                copied.requires_grad_(False)
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
        """The batches of one optimiser step with what is drawn for them, and the sum of their slots' weights."""
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        total = torch.zeros((), device=device)
        for batch in batches:
            self.objective.draw(batch, self.state.global_step)
            total += self.objective.total_weight(batch).to(device)
        return batches, sum_over_processes(total)

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
        self.objective.draw(batch, self.state.global_step)
        # Autocast would reach `model.forward` alone, and the heads are applied outside.
        with self.accelerator.autocast():
            objective = self.objective
            return objective.loss(
                model,
                batch,
                objective.with_normaliser(self._target_states(batch), batch),
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
    def _drafter(self) -> Drafter:
        drafter: Drafter = without_adapters(self.accelerator.unwrap_model(self.model))
        return drafter

    @property
    def objective(self) -> Objective:
        """What the drafter is trained on."""
        drafter = self._drafter
        return next(kind for drafters, kind in OBJECTIVES.items() if isinstance(drafter, drafters))(drafter, self.args)

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
        self.objective.draw(inputs, step=0)
        with torch.no_grad():
            # Processes may have different numbers of batches: nothing is reduced before the end.
            result = self._batch_loss(model, inputs, self.objective.total_weight(inputs), processes=1)
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


__all__ = ["OBJECTIVES", "DSparkTrainer", "RunningMetrics"]
