"""What a training run will need: memory per GPU, disk and hours, predicted from sizes alone.

Parameters, optimizer states and cached states are counted exactly. Activations and hours are rough: they count what is
largest and stand on `GPU`'s assumptions, and no large run has been measured against them.

Symbols: `d` hidden size, `V` vocabulary, `V'` the tokens that the drafter predicts, `r` Markov rank, `m` captured
layers, `γ` block size.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel

from ..models import DrafterConfig, DSparkConfig, Eagle3Config, MTPConfig
from .state_storage import Layout

GIB, GB, TB = 2**30, 1e9, 1e12
BF16, FLOAT32 = 2, 4  # bytes

MARGIN = 3 * GIB
"""CUDA's own memory, communication buffers and fragmentation: a guess."""


@dataclass(frozen=True)
class GPU:
    """What is assumed of one GPU.

    Args:
        tflops: dense bf16 arithmetic at its best, as the maker states it; that of an H100 SXM.
        utilisation: the share of it that such a run reaches: a guess, not measured.
    """

    tflops: float = 989.0
    utilisation: float = 0.35


@dataclass(frozen=True)
class TargetSize:
    """Sizes of a target.

    Args:
        parameters: all weights.
        in_layers: those in its layers, which FSDP spreads.
        active: those that one token is multiplied with: no embeddings, no LM head, chosen experts only.
        num_layers: its layers.
        hidden_size: `d`.
        vocab_size: `V`.
    """

    parameters: int
    in_layers: int
    active: int
    num_layers: int
    hidden_size: int
    vocab_size: int


@dataclass(frozen=True)
class Run:
    """What is trained on what.

    Args:
        gpus: processes, each with a GPU.
        batch_size: sequences per GPU and pass.
        max_length: longest sequence, in tokens.
        num_anchors: most blocks per sequence, of drafters that draft blocks.
        epochs: passes over the data.
        tokens: tokens of the data.
        sequences: sequences of the data.
        loss_memory: MiB for logits.
        gradient_checkpointing: whether layers of the drafter are computed again in the backward pass.
        shards_target: whether the target's layers are spread over the GPUs.
        shards_drafter: whether the drafter's weights, gradients and optimizer are.
        kept_checkpoints: checkpoints that stay on disk.
    """

    gpus: int
    batch_size: int
    max_length: int
    num_anchors: int
    epochs: float
    tokens: float
    sequences: float
    loss_memory: float
    gradient_checkpointing: bool = False
    shards_target: bool = False
    shards_drafter: bool = False
    kept_checkpoints: int = 2


@dataclass(frozen=True)
class Prediction:
    """What a run will need; all but `parameters` and `cached_states` is rough.

    Args:
        parameters: trained, of the drafter.
        target_memory: bytes per GPU for the target's weights.
        drafter_memory: bytes per GPU for the drafter's weights, gradients and optimizer.
        activation_memory: bytes per GPU for states, activations and logits.
        disk: bytes for the target, the checkpoints, the drafter and the tokenised text.
        cached_states: further bytes where the target's states are stored, in bf16.
        hours: of training with states computed on the way.
    """

    parameters: int
    target_memory: float
    drafter_memory: float
    activation_memory: float
    disk: float
    cached_states: float
    hours: float

    @property
    def memory(self) -> float:
        """Bytes per GPU, with a margin."""
        return self.target_memory + self.drafter_memory + self.activation_memory + MARGIN

    def lines(self) -> list[str]:
        """The prediction in words, as recipes carry it."""
        parts = (self.target_memory, self.drafter_memory, self.activation_memory)
        target, drafter, activations = (f"{part / GIB:.1f}" for part in parts)
        return [
            f"memory per GPU: {self.memory / GIB:.0f} GiB (target {target}, drafter {drafter}, activations "
            f"{activations}, margin {MARGIN / GIB:.0f})",
            f"disk: {self.disk / GB:.0f} GB; with cached target states {self.cached_states / TB:.1f} TB more",
            f"time: {self.hours:.0f} hours",
            f"drafter: {self.parameters / 1e6:.0f} million trained parameters",
        ]


def target_size(model: PreTrainedModel) -> TargetSize:
    """Sizes of a target, which may be on the meta device, without any weights.

    Of a layer's experts `num_experts_per_tok` of `num_experts` count as active.
    """
    text = model.config.get_text_config(decoder=True)
    experts = next((n for name in _EXPERTS if (n := getattr(text, name, None))), 1)
    chosen = next((n for name in _CHOSEN if (n := getattr(text, name, None))), experts)
    lookups = {id(p) for module in model.modules() if isinstance(module, nn.Embedding) for p in module.parameters()}
    lookups |= {id(p) for p in model.get_output_embeddings().parameters()}
    in_layers, active = 0, 0.0
    for name, parameter in model.named_parameters():
        if id(parameter) in lookups or any(part in name for part in ("vision", "audio")):
            continue
        in_layers += parameter.numel()
        active += parameter.numel() * (chosen / experts if ".experts." in name else 1)
    return TargetSize(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        in_layers=in_layers,
        active=round(active),
        num_layers=text.num_hidden_layers,
        hidden_size=text.hidden_size,
        vocab_size=text.vocab_size,
    )


_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_CHOSEN = ("num_experts_per_tok", "top_k_experts", "moe_topk")


# --- the drafter -------------------------------------------------------------------------------------------------


def layer_parameters(config: DrafterConfig) -> int:
    """Weights of one layer: attention `w (q + 2 k) + d q`, MLP `3 d u`, norms of `d` and of a head.

    `q` and `k` are the widths of queries and keys, `u` that of the MLP, `w` that of what is projected, `d` but for
    EAGLE-3; where values are keys there is one `k` less.
    """
    d, head_dim = config.hidden_size, config.head_dim
    is_eagle3 = isinstance(config, Eagle3Config)
    query, key = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
    projected = query + (1 if config.attention_k_eq_v else 2) * key
    attention = (2 * d if is_eagle3 else d) * projected + d * query
    biases = projected + d if config.attention_bias else 0
    norms = d * ((4 if config.sandwich_norms else 2) + is_eagle3) + 2 * head_dim * getattr(config, "head_norms", True)
    return attention + biases + 3 * d * config.intermediate_size + norms


def head_parameters(config: DSparkConfig) -> int:
    """Weights of the heads: `r (V + V')` and gate or recurrence of the sequential one, `d + r + 1` of confidence."""
    d, r = config.hidden_size, config.markov_rank
    gates = {"vanilla": 0, "gated": (d + r + 1) * r, "rnn": (2 * r + d + 1) * 3 * r}
    sequential = r * (config.vocab_size + config.predicted_vocab_size) + gates[config.markov_head_type] if r else 0
    features = d + (r if config.confidence_head_with_markov else 0) + 1
    return sequential + (features if config.enable_confidence_head else 0)


def drafter_parameters(config: DrafterConfig) -> int:
    """Trained weights of a drafter that shares its target's embeddings.

    The layers; of a drafter of blocks `m d²`, two norms and the heads; of EAGLE-3 `m d²`, a norm and `V' d` where the
    LM head is its own; of MTP `2 d²` and three norms.
    """
    return config.num_hidden_layers * layer_parameters(config) + _around_layers(config)


def _around_layers(config: DrafterConfig) -> int:
    d = config.hidden_size
    fused = len(config.target_layer_ids) * d * d
    if isinstance(config, DSparkConfig):
        return fused + 2 * d + head_parameters(config)
    if isinstance(config, Eagle3Config):
        return fused + d + (0 if config.share_target_head else d * config.predicted_vocab_size)
    if isinstance(config, MTPConfig):
        return 2 * d * d + 3 * d
    raise ValueError(f"`drafter` is a {type(config).__name__}, for which nothing can be predicted.")


@dataclass(frozen=True)
class Rows:
    """What goes through a drafter's layers for one sequence.

    Args:
        computed: rows.
        compared: those of them whose distributions are compared with the target's.
        keys: columns of their attention mask.
        cached: keys and values that are kept for the backward pass, beside those of the context.
        context: positions whose keys and values are made of the target's states alone.
    """

    computed: float
    compared: float
    keys: float
    cached: float
    context: float


def rows(config: DrafterConfig, length: float, num_anchors: float) -> Rows:
    """Rows of a sequence of `length`.

    A drafter of blocks computes γ for each anchor (one more where the anchor's is dropped). A recurrent one computes
    each position γ times, and step s attends to s sequences of keys, most of which the mask hides.
    """
    steps = config.block_size
    if isinstance(config, DSparkConfig):
        computed = num_anchors * config.block_width
        return Rows(computed, num_anchors * steps, length + computed, computed, length)
    computed = length * steps
    return Rows(computed, computed, length * (steps + 1) / 2, computed * (steps + 1) / 2, 0)


# --- a run -------------------------------------------------------------------------------------------------------


def predict(target: TargetSize, drafter: DrafterConfig, run: Run, gpu: GPU | None = None) -> Prediction:
    """What a run will need."""
    parameters = drafter_parameters(drafter)
    return Prediction(
        parameters=parameters,
        target_memory=BF16 * (target.parameters - target.in_layers * (1 - 1 / run.gpus) * run.shards_target),
        drafter_memory=drafter_memory(parameters, run),
        activation_memory=activation_memory(drafter, run),
        disk=disk(target, parameters, run),
        cached_states=cached_states(drafter, run),
        hours=hours(target, drafter, run, gpu or GPU()),
    )


def drafter_memory(parameters: int, run: Run) -> float:
    """Bytes per weight: 4 float32, 4 its gradient, 8 AdamW's two moments, 2 its copy in bf16, 4 DDP's buckets.

    Spread over the GPUs the first 16 are divided by their number, and the gradient that is being made takes 4.
    """
    lasting = (4 + optimizer_bytes() + FLOAT32) * parameters
    buckets = FLOAT32 if run.gpus > 1 else 0
    return lasting / (run.gpus if run.shards_drafter else 1) + (BF16 + buckets) * parameters


def optimizer_bytes() -> int:
    """AdamW's bytes for each trained weight: two moments in float32."""
    return 2 * FLOAT32


def activation_memory(drafter: DrafterConfig, run: Run) -> float:
    """Rough: what is alive at once in the backward pass of the longest sequences, per GPU.

    A drafter's layers are as wide as the target's. Of the target one layer's activations and the `m + 1` states that
    are kept. Of the drafter, per token of a block and layer: the float32 stream twice, and in bf16 three states of
    `d`, queries and their attention, gate, up and product of the MLP; per token of context: keys and values of each
    layer, `m` states and the fused one; the mask of queries and keys. Checkpointing keeps one layer's and the streams.
    Of the logits `loss_memory`, and float32 gradients of the sequential head's tables. `rows` says of how many tokens.
    """
    each = rows(drafter, run.max_length, run.num_anchors)
    context, block = run.batch_size * run.max_length, run.batch_size * each.computed
    keys = drafter.num_key_value_heads * drafter.head_dim
    queries = drafter.num_attention_heads * drafter.head_dim
    d, captured = drafter.hidden_size, len(drafter.target_layer_ids)
    states = context * BF16 * (captured + 1) * d
    of_target = context * BF16 * (4 * d + 2 * queries + 3 * drafter.intermediate_size)
    per_layer = block * (2 * FLOAT32 * d + BF16 * (3 * d + 2 * queries + 3 * drafter.intermediate_size))
    per_layer += 2 * BF16 * keys * run.batch_size * (each.context + each.cached)
    kept_layers: float = drafter.num_hidden_layers
    streams = 0.0
    if run.gradient_checkpointing:
        streams = block * FLOAT32 * d * drafter.num_hidden_layers
        kept_layers = 1
    mask = block * each.keys
    fused = context * BF16 * 2 * d
    rank = drafter.markov_rank if isinstance(drafter, DSparkConfig) else 0
    logits = run.loss_memory * 2**20 + FLOAT32 * rank * drafter.predicted_vocab_size
    hidden = 3 * block * FLOAT32 * d
    drafting = kept_layers * per_layer + streams + fused + BF16 * mask + logits + hidden
    return states + max(of_target, drafting)


def disk(target: TargetSize, parameters: int, run: Run) -> float:
    """Bytes: the target in bf16, checkpoints of 12 per weight (one more while the oldest is replaced), the drafter,
    and 5 per token of text (an id and its mask).
    """
    checkpoint = (FLOAT32 + optimizer_bytes()) * parameters
    return BF16 * target.parameters + (run.kept_checkpoints + 1) * checkpoint + FLOAT32 * parameters + 5 * run.tokens


def cached_states(drafter: DrafterConfig, run: Run) -> float:
    """Bytes of the target's `m + 1` states of all tokens in bf16, with what reduced vocabularies need beside."""
    has_own_vocabulary = drafter.draft_vocab_size is not None
    layout = Layout("bf16", len(drafter.target_layer_ids) + 1, drafter.hidden_size, normalisers=has_own_vocabulary)
    return layout.bytes_of(round(run.tokens), round(run.sequences))


def hours(target: TargetSize, drafter: DrafterConfig, run: Run, gpu: GPU) -> float:
    """Rough: arithmetic of all passes over what the GPUs do at the assumed utilisation.

    A multiplication by a weight takes 2 operations per token forward and 4 backward. Per token of text: the target's
    active weights forward, the drafter's fusion and its keys and values forward and backward. Per token of a block:
    the drafter's layers and heads forward and backward; the LM head forward for the target, forward and half the
    backward (it is frozen) for the drafter; with a reduced vocabulary both take its rows alone, and the target's whole
    head runs once for each position that is used. A recurrent drafter has no keys and values of context. Attention
    adds `4 × width × keys` forward and twice that backward.
    """
    length = run.tokens / run.sequences
    each = rows(drafter, length, min(run.num_anchors, length))  # no more anchors than tokens
    d, queries = drafter.hidden_size, drafter.num_attention_heads * drafter.head_dim
    keys = drafter.num_key_value_heads * drafter.head_dim
    per_token = 2 * target.active + 4 * target.num_layers * queries * length / 2
    per_row: float = 6 * drafter.num_hidden_layers * layer_parameters(drafter)
    if isinstance(drafter, MTPConfig):
        per_row += 6 * 2 * d * d
    else:
        per_token += 6 * len(drafter.target_layer_ids) * d * d
    per_token += 6 * drafter.num_hidden_layers * 2 * keys * d * each.context / length
    # Blocks are masked so that they see half of the context on average; of a recurrent drafter all is computed.
    seen = each.keys if not each.context else length / 2 + drafter.block_size
    per_row += drafter.num_hidden_layers * 12 * queries * seen
    per_slot = 6 * d * drafter.predicted_vocab_size
    normalised = 0.0
    if drafter.draft_vocab_size is not None:
        normalised = min(length, each.compared) * 2 * d * target.vocab_size
    if isinstance(drafter, DSparkConfig):
        per_slot += 6 * drafter.markov_rank * drafter.predicted_vocab_size
    operations = length * per_token + each.computed * per_row + each.compared * per_slot + normalised
    return run.epochs * run.sequences * operations / (run.gpus * gpu.tflops * 1e12 * gpu.utilisation) / 3600


__all__ = [
    "GPU",
    "Prediction",
    "Rows",
    "Run",
    "TargetSize",
    "cached_states",
    "drafter_parameters",
    "head_parameters",
    "layer_parameters",
    "optimizer_bytes",
    "predict",
    "rows",
    "target_size",
]
