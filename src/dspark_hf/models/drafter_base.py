"""What every drafter shares: the target's embeddings and LM head, strict loading, statistics of its last use."""

from __future__ import annotations

import json
import os
import re
import weakref
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
from accelerate.utils import align_module_device
from safetensors import SafetensorError
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache

from .backbone import BackboneLayer
from .configuration_base import DrafterConfig
from .vocabulary import HeadRows, check_tables, make_tables


class Drafter(PreTrainedModel):
    """Base of all drafters.

    A drafter predicts in the target's vocabulary from the target's hidden states, so by default it keeps no
    embeddings and no LM head of its own: `bind_target` lends it the target's, and `generate` and the trainer do this
    for the user. A drafter with `config.share_target_embeddings = False` holds copies in `embed_tokens` and `lm_head`.

    With `config.draft_vocab_size` it predicts only so many of the target's tokens, its draft vocabulary, and the LM
    head is reduced to these: to rows of the target's, which are not saved, or to an `lm_head` of that size.

    Attributes:
        d2t: `(draft_vocab,)`, draft index i stands for the target's token `i + d2t[i]`; `None` without a draft
            vocabulary of its own.
        t2d: `(vocab,)`, boolean, true for tokens of the draft vocabulary; `None` like `d2t`.
        last_stats: statistics of the last `generate` call that this drafter served, `None` before the first.
        record_confidence: whether these statistics hold the confidence logits of each round, for calibration.
        confidence_head: predicts each drafted token's survival; `None` for drafters without one.
        is_recurrent: whether it drafts token by token (`RecurrentDrafter`), not a block at once (`DSparkDrafter`).
    """

    config_class = DrafterConfig
    config: DrafterConfig
    base_model_prefix = ""
    main_input_name = "input_ids"
    _supports_sdpa = True
    _supports_attention_backend = True
    confidence_head: nn.Module | None
    d2t: torch.Tensor | None
    t2d: torch.Tensor | None
    is_recurrent = False
    pusher: ClassVar[Callable[..., Any] | None] = None
    """Pushes whole repositories; whoever imports `dspark_hf` has one, a file beside a checkpoint has none."""

    def __init__(self, config: DrafterConfig) -> None:
        missing = config.missing_fields()
        if missing:
            raise ValueError(
                f"The drafter's config leaves {missing} unset. Build a drafter with `get_drafter(target, config)`, "
                "which takes them from the target, or set them."
            )
        super().__init__(config)
        self.last_stats: Any = None
        self.record_confidence = False
        self._target_modules: tuple[weakref.ref[nn.Module], weakref.ref[nn.Module]] | None = None
        self.embed_tokens: nn.Module | None = None
        self.lm_head: nn.Module | None = None
        self._head_rows = HeadRows()
        # The first tokens, until `set_draft_tokens` or a checkpoint says which.
        size = config.draft_vocab_size
        self.register_buffer("d2t", None if size is None else torch.zeros(size, dtype=torch.long))
        self.register_buffer("t2d", None if size is None else torch.arange(config.vocab_size) < size)
        if not config.share_target_embeddings:
            self._make_own_embeddings()

    def __getattr__(self, name: str) -> Any:
        # The first thing that Transformers asks of an assistant where nobody has told it of drafters.
        if name == "generation_config":
            raise AttributeError(
                "A drafter has no `generation_config` and cannot draft by itself. `import dspark_hf` makes "
                "`generate(assistant_model=drafter)` work; without that package call "
                "`generate(custom_generate=REPOSITORY_OF_THE_DRAFTER, trust_remote_code=True)`."
            )
        return super().__getattr__(name)

    # --- embeddings and LM head ------------------------------------------------------------------------------

    def bind_target(self, target: PreTrainedModel) -> None:
        """Lends this drafter the embeddings and LM head of `target`, after checking that the two fit.

        Only weak references are kept: the target is neither saved, moved nor trained with the drafter.

        Raises:
            ValueError: if hidden size, vocabulary, number of layers or the layers to capture do not fit the target.
        """
        self.check_target(target)
        self._target_modules = (
            weakref.ref(target.get_input_embeddings()),
            weakref.ref(target.get_output_embeddings()),
        )

    def check_target(self, target: PreTrainedModel) -> None:
        """Raises `ValueError` where this drafter cannot draft for `target`."""
        text_config = target.config.get_text_config(decoder=True)
        num_layers = text_config.num_hidden_layers
        if max(self.config.target_layer_ids) >= num_layers:
            raise ValueError(
                f"The drafter's `target_layer_ids` {self.config.target_layer_ids} name a layer that the target "
                f"{_name(target)} of {num_layers} layers does not have; layers are numbered 0 to {num_layers - 1}."
            )
        facts = {
            "hidden_size": (text_config.hidden_size, "a hidden size of {}"),
            "vocab_size": (text_config.vocab_size, "a vocabulary of {}"),
            "num_target_layers": (num_layers, "{} layers"),
        }
        for name, (theirs, has) in facts.items():
            ours = getattr(self.config, name)
            if ours is not None and ours != theirs:
                raise ValueError(
                    f"The drafter's `{name}` is {ours} but the target {_name(target)} has {has.format(theirs)}: this "
                    "drafter was made for another target. Load the drafter that belongs to this target, or build one "
                    "with `get_drafter(target)`."
                )
        if target.get_input_embeddings() is None or target.get_output_embeddings() is None:
            raise ValueError(f"The target {_name(target)} has no embeddings or no LM head that a drafter could use.")

    def __getstate__(self) -> dict[str, Any]:
        # The target is not pickled with its drafter: a copy in another process binds its own.
        state = self.__dict__.copy()
        state.pop("_compiled_call_impl", None)
        return {**state, "_target_modules": None}

    def _make_own_embeddings(self) -> None:
        self.embed_tokens = nn.Embedding(self.config.vocab_size, self.config.hidden_size)
        if self.lm_head is None:
            self._make_own_head()

    def _make_own_head(self) -> None:
        self.lm_head = nn.Linear(self.config.hidden_size, self.config.predicted_vocab_size, bias=False)

    def _shared_module(self, index: int) -> nn.Module:
        module = self._target_modules[index]() if self._target_modules is not None else None
        if module is None:
            raise ValueError(
                "This drafter uses its target's embeddings and LM head and is bound to no target. Call "
                "`drafter.bind_target(target)` and keep the target alive, or pass the drafter to "
                "`target.generate(..., assistant_model=drafter)`, which binds it."
            )
        return module

    @property
    def target_modules(self) -> list[nn.Module]:
        """The bound target's embeddings and LM head, where the drafter uses them; else nothing."""
        references = self._target_modules or ()
        return [module for reference in references if (module := reference()) is not None]

    def get_input_embeddings(self) -> nn.Module | None:
        """The drafter's own embeddings, `None` where it shares the target's."""
        return self.embed_tokens

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replaces the drafter's own embeddings."""
        self.embed_tokens = value

    def get_output_embeddings(self) -> nn.Module | None:
        """The drafter's own LM head, `None` where it shares the target's."""
        return self.lm_head

    def set_output_embeddings(self, value: nn.Module) -> None:
        """Replaces the drafter's own LM head."""
        self.lm_head = value

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Scaled token embeddings: `(batch, n)` ids to `(batch, n, d)`, on the drafter's device and dtype."""
        table: Any = self.embed_tokens if self.embed_tokens is not None else self._shared_module(0)
        with align_module_device(table):  # brings in weights that Accelerate keeps elsewhere
            # Looked up by weight: a target's module may scale its output, which is `embedding_scale` here.
            embeddings = nn.functional.embedding(input_ids.to(table.weight.device), table.weight)
        if self.config.embedding_scale != 1.0:
            embeddings = embeddings * torch.tensor(self.config.embedding_scale, dtype=embeddings.dtype)
        return embeddings.to(device=self.device, dtype=self.dtype)

    @property
    def has_own_head(self) -> bool:
        """Whether `lm_head` is trained with the drafter, and no copy of the target's."""
        return self.lm_head is not None and not getattr(self.config, "share_target_head", True)

    def project(self, hidden: torch.Tensor) -> torch.Tensor:
        """Base logits `U`, soft-capped: `hidden (..., d)`, after the final norm, to `(..., draft_vocab)`."""
        if self.lm_head is not None:
            return self._logits(self.lm_head, hidden)
        return self._shared_logits(hidden)

    def _shared_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """`(..., draft_vocab)` by the target's LM head."""
        rows = self._shared_rows()
        if rows is not None:
            return self._logits(rows, hidden)
        logits = self._logits(self._shared_module(1), hidden)
        return logits if self.d2t is None else logits[..., self.draft_ids]

    def _shared_rows(self) -> nn.Module | None:
        return None if self.d2t is None else self._head_rows.of(self._shared_module(1), self.d2t)

    @property
    def spares_head(self) -> bool:
        """Whether logits over the draft vocabulary take less than the target's whole LM head."""
        return self._shared_rows() is not None

    def target_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The target's logits: its last states `(..., d)`, after the final norm, to `(..., vocab)`, soft-capped."""
        is_copy = self.lm_head is not None and self.d2t is None and not self.has_own_head
        return self._logits(self.lm_head if is_copy else self._shared_module(1), hidden)

    def target_draft_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The target's logits of the draft vocabulary alone, `(..., draft_vocab)`."""
        return self.target_logits(hidden) if self.d2t is None else self._shared_logits(hidden)

    def _logits(self, head: Any, hidden: torch.Tensor) -> torch.Tensor:
        return head_logits(head, hidden, self.config.final_logit_softcapping)

    @torch.no_grad()
    def copy_target_embeddings(self) -> None:
        """Takes copies of the bound target's embeddings and LM head, so that the drafter is complete on its own.

        `save_pretrained` then writes them too. Does nothing where the drafter already has its own; an LM head that it
        has already stays.

        Raises:
            ValueError: if the drafter is bound to no target, the target's LM head has a bias, or there are no weights
                to copy because they are quantised or offloaded.
        """
        if not self.config.share_target_embeddings:
            return
        state = self.target_weights()
        device, dtype = self.device, self.dtype
        self._make_own_embeddings()
        for name, weight in state.items():
            module: Any = getattr(self, name.removesuffix(".weight"))
            module.to(device=device, dtype=dtype).load_state_dict({"weight": weight})
            module.requires_grad_(False)
        self.config.share_target_embeddings = False

    def target_weights(self) -> dict[str, torch.Tensor]:
        """What this drafter shares with its bound target, by the names that its own copies would have.

        `embed_tokens.weight (vocab, d)`, and `lm_head.weight (draft_vocab, d)` where it has no head of its own.

        Raises:
            ValueError: as `copy_target_embeddings`.
        """
        weights = {"embed_tokens.weight": self._plain_weight(0)}
        if self.lm_head is not None:
            return weights
        if getattr(self._shared_module(1), "bias", None) is not None:
            raise ValueError(
                "The target's LM head has a bias, which a drafter's own LM head has not: leave the drafter bound to "
                "its target instead of copying the target's embeddings."
            )
        head = self._plain_weight(1)
        weights["lm_head.weight"] = head if self.d2t is None else head[self.draft_ids.to(head.device)]
        return weights

    def _plain_weight(self, index: int) -> torch.Tensor:
        """Weights of the target's embeddings or LM head, `(vocab, d)`; raises `ValueError` for quantised ones."""
        weight: Any = getattr(self._shared_module(index), "weight", None)
        shape = (self.config.vocab_size, self.config.hidden_size)
        plain = isinstance(weight, torch.Tensor) and weight.is_floating_point() and weight.dtype.itemsize > 1
        if not plain or weight.is_meta or weight.shape != shape:
            raise ValueError(
                f"The target's {('embeddings', 'LM head')[index]} cannot be copied: the weights are quantised, packed "
                "or offloaded. Leave the drafter bound to its target, or copy from the target loaded without "
                "quantisation."
            )
        return weight

    def push_to_hub(self, repo_id: str, **options: Any) -> Any:
        """Pushes config, weights, model card and code to the Hub; see `dspark_hf.hub.push_drafter` for `options`.

        Where only the code beside a checkpoint is there, this is `PreTrainedModel.push_to_hub`.
        """
        pusher = type(self).pusher
        return super().push_to_hub(repo_id, **options) if pusher is None else pusher(self, repo_id, **options)

    # --- use while generating --------------------------------------------------------------------------------

    def make_cache(self) -> Cache:
        """An empty cache for the context's keys and values, one entry per accepted position."""
        return DynamicCache()

    @property
    def is_calibrated(self) -> bool:
        """Whether its confidences are probabilities that can be relied on."""
        return False

    # --- draft vocabulary ------------------------------------------------------------------------------------

    def set_draft_tokens(self, token_ids: Iterable[int]) -> None:
        """Makes the target's tokens `token_ids` the draft vocabulary, in rising order whatever theirs.

        For a new drafter: the heads of a trained one belong to the tokens that it was trained with.

        Raises:
            ValueError: if there are not `config.draft_vocab_size` different ones, or some are no tokens.
        """
        d2t, t2d = make_tables(token_ids, self.config.draft_vocab_size, self.config.vocab_size)
        self.d2t, self.t2d = d2t.to(self.device), t2d.to(self.device)

    @property
    def draft_ids(self) -> torch.Tensor:
        """The target's tokens `(draft_vocab,)` by draft index."""
        if self.d2t is None:
            return torch.arange(self.config.vocab_size, device=self.device)
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def over_vocabulary(self, logits: torch.Tensor) -> torch.Tensor:
        """`(..., draft_vocab)` to `(..., vocab)`: -inf for tokens that are not in the draft vocabulary."""
        if self.d2t is None:
            return logits
        everything = logits.new_full((*logits.shape[:-1], self.config.vocab_size), -torch.inf)
        return everything.index_copy(-1, self.draft_ids.to(logits.device), logits)

    # --- weights ---------------------------------------------------------------------------------------------

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, BackboneLayer) and module.layer_scalar is not None:
            nn.init.ones_(module.layer_scalar)

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str | os.PathLike[str] | None, *model_args: Any, **kwargs: Any
    ) -> Any:
        """Loads a drafter as `PreTrainedModel.from_pretrained` does, but refuses an incomplete checkpoint.

        Raises:
            OSError: if weights are missing, of another shape, unreadable, pickled or outside the checkpoint, or the
                tables of a draft vocabulary contradict each other. A drafter with fresh random weights would still
                give the target's text, only slower, and nobody would notice.
            TypeError: if a field of the config has a value of another type.
            ValueError: if the config is that of another model, or describes no drafter.
        """
        wants_info = kwargs.pop("output_loading_info", False)
        # Converted weights come without a path, and their config knows where they are from.
        name = pretrained_model_name_or_path or getattr(kwargs.get("config"), "name_or_path", None)
        # Tensors of another shape are reported below by name, which Transformers' own error does not do.
        kwargs["ignore_mismatched_sizes"] = True
        kwargs["use_safetensors"] = True  # pickled weights can run code
        _check_index(pretrained_model_name_or_path, kwargs)
        try:
            model, info = super().from_pretrained(
                pretrained_model_name_or_path, *model_args, output_loading_info=True, **kwargs
            )
        except SafetensorError as error:
            raise OSError(
                f"The weights of the drafter {name!s} cannot be read ({error}): a file is "
                "truncated or damaged. Download or save the checkpoint again."
            ) from error
        wrong = [*sorted(info["missing_keys"]), *sorted(str(key) for key in info.get("mismatched_keys", ()))]
        if wrong:
            raise OSError(
                f"The drafter {name!s} is incomplete: {len(wrong)} tensors that its config "
                f"asks for are missing or of another shape, among them {wrong[:5]}. Check that config.json and the "
                "weights belong together."
            )
        if model.d2t is not None:
            check_tables(model.d2t, model.t2d, str(name))
        model.eval()
        return (model, info) if wants_info else model


def _check_index(path: str | os.PathLike[str] | None, options: dict[str, Any]) -> None:
    """Checks where a local checkpoint says that its weights are; of the Hub's the client does."""
    if path is None or not os.path.isdir(path):
        return
    folder = os.path.join(path, options.get("subfolder") or "")
    for name in os.listdir(folder) if os.path.isdir(folder) else ():
        if name.endswith(".safetensors.index.json"):
            try:
                with open(os.path.join(folder, name), encoding="utf-8") as file:
                    shards = json.load(file)["weight_map"].values()
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                raise OSError(f"{os.path.join(folder, name)} is no index of weights ({error!r}).") from error
            check_shard_names(shards, path)


def check_shard_names(names: Iterable[Any], path: str | os.PathLike[str]) -> None:
    """Raises `OSError` where the index of the checkpoint `path` names files elsewhere."""
    for name in names:
        if not isinstance(name, str) or not _SHARD_NAME.fullmatch(name):
            raise OSError(
                f"The drafter {path!s} says that weights are in {name!r}, which is no name of a file beside its "
                "config.json. Do not trust this checkpoint."
            )


_SHARD_NAME = re.compile(r"[\w-][\w.-]*")


def head_logits(head: Any, hidden: torch.Tensor, cap: float | None) -> torch.Tensor:
    """Logits of an LM head, soft-capped by `cap` if there is one, on the device of `hidden`."""
    weight: Any = getattr(head, "weight", hidden)
    device = hidden.device if weight.is_meta else weight.device
    dtype = weight.dtype if weight.is_floating_point() else hidden.dtype
    logits = head(hidden.to(device=device, dtype=dtype)).to(hidden.device)
    return logits if cap is None else torch.tanh(logits / cap) * cap


def without_adapters(model: Any) -> Any:
    """The model inside a `peft.PeftModel`, whose layers have the adapters built in; any other model as it is."""
    get_base_model = getattr(model, "get_base_model", None)
    return model if get_base_model is None else get_base_model()


def _name(target: PreTrainedModel) -> str:
    """How error messages call a target."""
    return repr(target.config.name_or_path or type(target).__name__)


__all__ = ["Drafter", "check_shard_names", "head_logits", "without_adapters"]
