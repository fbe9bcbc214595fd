"""The drafters of the study: what each one is, and the loss that it is trained with."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from dspark_hf import DSparkConfig, Eagle3Config, MTPConfig
from dspark_hf.models.configuration_base import DrafterConfig

BLOCK = 7
DRAFT_LENGTHS = (3, 7, 11, 15)
LAYERS = (1, 2, 5)
LONG = 3

SHAPE = {"intermediate_size": 704}
"""As wide as the embedded drafter's."""

# DFlash has a loss of its own; see the arguments.
CROSS_ENTROPY = {"ce_weight": 1.0, "tv_weight": 0.0}


@dataclass(frozen=True)
class Entry:
    """A drafter of the study.

    Attributes:
        kind: drafters of one kind read the same states of the target.
        config: what `get_drafter` builds.
        loss: arguments of training that are the method's own.
        passes: how often it is trained with the steps that the others have once.
    """

    kind: str
    config: DrafterConfig
    loss: dict[str, Any] = field(default_factory=dict)
    passes: int = 1


def dflash(layers: int, block: int = BLOCK, loss: dict[str, Any] | None = None) -> Entry:
    """A parallel backbone alone."""
    config = DSparkConfig(
        num_hidden_layers=layers, block_size=block, markov_rank=0, enable_confidence_head=False, **SHAPE
    )
    return Entry("blocks", config, CROSS_ENTROPY if loss is None else loss)


def dspark(head: str, layers: int, block: int = BLOCK) -> Entry:
    """The same backbone with a sequential and a confidence head."""
    config = DSparkConfig(num_hidden_layers=layers, block_size=block, markov_rank=64, markov_head_type=head, **SHAPE)
    return Entry("blocks", config)


def comparison() -> dict[str, Entry]:
    """The methods side by side, all with blocks of seven but MTP-1."""
    heads = {"markov": "vanilla", "rnn": "rnn"}
    return {
        "eagle3": Entry("eagle3", Eagle3Config(block_size=BLOCK, **SHAPE)),
        **{f"dflash-{layers}": dflash(layers) for layers in LAYERS},
        **{f"{name}-{layers}": dspark(head, layers) for name, head in heads.items() for layers in LAYERS},
        "mtp-1": Entry("mtp", MTPConfig(block_size=1, **SHAPE)),
        # Tells what the loss does from what the head does.
        "dflash-2-tv": dflash(2, loss={}),
        # A step of EAGLE-3 takes about three times as long, so even these have less than its time.
        "dflash-2-long": replace(dflash(2), passes=LONG),
        "markov-2-long": replace(dspark("vanilla", 2), passes=LONG),
    }


def draft_lengths() -> dict[str, Entry]:
    """Drafters of other blocks; EAGLE-3 drafts any number with the weights that it has."""
    others = [length for length in DRAFT_LENGTHS if length != BLOCK]
    return {
        **{f"dflash-2-of-{length}": dflash(2, length) for length in others},
        **{f"markov-2-of-{length}": dspark("vanilla", 2, length) for length in others},
    }


def under_load() -> dict[str, Entry]:
    """MTP-1 and DSpark for the engine, both trained for longer."""
    return {
        "mtp-1-long": Entry("mtp", MTPConfig(block_size=1, **SHAPE), passes=LONG),
        "markov-2-long": comparison()["markov-2-long"],
    }


__all__ = ["BLOCK", "DRAFT_LENGTHS", "LAYERS", "Entry", "comparison", "draft_lengths", "under_load"]
