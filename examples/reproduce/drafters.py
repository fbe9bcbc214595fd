"""The drafters that are compared: what is built, and with which loss it is trained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dspark_hf import DSparkConfig, Eagle3Config, MTPConfig
from dspark_hf.models import DrafterConfig

LABELS = {
    "eagle3": "EAGLE-3",
    "dflash": "DFlash",
    "markov": "DSpark, Markov head",
    "rnn": "DSpark, RNN head",
    "mtp": "MTP-1",
}
"""Families of drafters; the first two words of DSpark's stand for the sequential head."""

BLOCK_FAMILIES = ("dflash", "markov", "rnn")
LAYERS = (1, 2, 5)
BLOCK_SIZES = (3, 7, 11, 15)
DEPTH, BLOCK = 2, 7
"""Layers of the drafters that differ in their block, and the block of those that differ in their layers."""

MARKOV_RANK = 64


@dataclass(frozen=True)
class Recipe:
    """One drafter.

    Attributes:
        family: of `LABELS`.
        layers: its layers, each of the shape of the target's.
        block_size: γ, the tokens that it drafts in a round.
    """

    family: str
    layers: int
    block_size: int

    @property
    def name(self) -> str:
        return f"{self.family}-{self.layers}x{self.block_size}"

    @property
    def label(self) -> str:
        return LABELS[self.family]

    def config(self) -> DrafterConfig:
        shape = {"num_hidden_layers": self.layers, "block_size": self.block_size}
        if self.family == "eagle3":
            return Eagle3Config(**shape)
        if self.family == "mtp":
            return MTPConfig(**shape)
        if self.family == "dflash":
            return DSparkConfig(**shape, markov_rank=0, enable_confidence_head=False)
        head = "vanilla" if self.family == "markov" else "rnn"
        return DSparkConfig(**shape, markov_rank=MARKOV_RANK, markov_head_type=head)

    def loss(self) -> dict[str, Any]:
        """Arguments of training that belong to the method: DFlash learns the tokens only, the others as by default."""
        return {"ce_weight": 1.0, "tv_weight": 0.0} if self.family == "dflash" else {}


EAGLE3, MTP = Recipe("eagle3", 1, BLOCK), Recipe("mtp", 1, 1)


def recipe(family: str, layers: int = DEPTH, block_size: int = BLOCK) -> Recipe:
    """A drafter of blocks."""
    return Recipe(family, layers, block_size)


STUDY: tuple[Recipe, ...] = (
    EAGLE3,
    *(recipe(family, layers=layers) for layers in LAYERS for family in BLOCK_FAMILIES),
    *(recipe(family, block_size=size) for size in BLOCK_SIZES if size != BLOCK for family in BLOCK_FAMILIES),
    MTP,
)
"""Everything that is trained and compared."""

SERVED = recipe("markov")
"""The drafter that is calibrated and served under load."""

CALIBRATED = (SERVED, recipe("rnn"))
TIMED = (*(recipe(family) for family in BLOCK_FAMILIES), recipe("dflash", layers=5), EAGLE3, MTP)
"""Those whose rounds are timed part by part."""
