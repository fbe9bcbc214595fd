"""Training of drafters."""

from .anchors import Anchors, Blocks, block_attention_mask, make_blocks, sample_anchors
from .arguments import DSparkTrainingArguments
from .losses import DSparkLoss, LossWeights, dspark_loss
from .run import choose_draft_tokens, find_checkpoint, load_target, train_drafter
from .target_states import TargetStates, compute_target_states
from .trainer import DSparkTrainer, blockwise_loss

__all__ = [
    "Anchors",
    "Blocks",
    "DSparkLoss",
    "DSparkTrainer",
    "DSparkTrainingArguments",
    "LossWeights",
    "TargetStates",
    "block_attention_mask",
    "blockwise_loss",
    "choose_draft_tokens",
    "compute_target_states",
    "dspark_loss",
    "find_checkpoint",
    "load_target",
    "make_blocks",
    "sample_anchors",
    "train_drafter",
]
