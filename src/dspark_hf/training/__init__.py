"""Training of drafters."""

from .anchors import Anchors, Blocks, block_attention_mask, make_blocks, sample_anchors
from .arguments import DSparkTrainingArguments
from .blockwise import blockwise_loss
from .losses import DSparkLoss, LossWeights, dspark_loss
from .run import cache_target_states, choose_draft_tokens, find_checkpoint, last_checkpoint, load_target, train_drafter
from .state_cache import StateCache, fill_state_cache, open_state_cache
from .target_states import TargetStates, compute_target_states
from .trainer import DSparkTrainer

__all__ = [
    "Anchors",
    "Blocks",
    "DSparkLoss",
    "DSparkTrainer",
    "DSparkTrainingArguments",
    "LossWeights",
    "StateCache",
    "TargetStates",
    "block_attention_mask",
    "blockwise_loss",
    "cache_target_states",
    "choose_draft_tokens",
    "compute_target_states",
    "dspark_loss",
    "fill_state_cache",
    "find_checkpoint",
    "last_checkpoint",
    "load_target",
    "make_blocks",
    "open_state_cache",
    "sample_anchors",
    "train_drafter",
]
