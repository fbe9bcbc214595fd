"""Drafters in the formats of other projects, one module per format."""

from .deepspec import config_from_deepspec, load_deepspec
from .formats import detect_format

__all__ = ["config_from_deepspec", "detect_format", "load_deepspec"]
