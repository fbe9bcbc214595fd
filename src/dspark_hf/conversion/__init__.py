"""Drafters in the formats of other projects, one module per format, and writing them (`export.py`)."""

from __future__ import annotations

from collections.abc import Callable

from ..models import Drafter
from .deepspec import config_from_deepspec, config_to_deepspec, load_deepspec
from .dflash import config_from_dflash, config_to_dflash, load_dflash
from .eagle3 import config_from_eagle3, config_to_eagle3, load_eagle3
from .export import EXPORT_FORMATS, Export, export_drafter
from .formats import DEEPSPEC, DFLASH, EAGLE3, SPECFORGE, SPECULATORS, detect_format
from .specforge import config_from_specforge, load_specforge
from .speculators import config_from_speculators, config_to_speculators, load_speculators

LOADERS: dict[str, Callable[..., Drafter]] = {
    DEEPSPEC: load_deepspec,
    DFLASH: load_dflash,
    EAGLE3: load_eagle3,
    SPECFORGE: load_specforge,
    SPECULATORS: load_speculators,
}
"""What loads a drafter of another format, given its path, its `config.json` and arguments of `from_pretrained`."""

__all__ = [
    "EXPORT_FORMATS",
    "LOADERS",
    "Export",
    "config_from_deepspec",
    "config_from_dflash",
    "config_from_eagle3",
    "config_from_specforge",
    "config_from_speculators",
    "config_to_deepspec",
    "config_to_dflash",
    "config_to_eagle3",
    "config_to_speculators",
    "detect_format",
    "export_drafter",
    "load_deepspec",
    "load_dflash",
    "load_eagle3",
    "load_specforge",
    "load_speculators",
]
