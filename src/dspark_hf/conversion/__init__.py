"""Drafters in the formats of other projects, one module per format."""

from .deepspec import config_from_deepspec, load_deepspec
from .dflash import config_from_dflash, load_dflash
from .eagle3 import config_from_eagle3, load_eagle3
from .formats import detect_format

__all__ = [
    "config_from_deepspec",
    "config_from_dflash",
    "config_from_eagle3",
    "detect_format",
    "load_deepspec",
    "load_dflash",
    "load_eagle3",
]
