"""Drafter models. Modules here import each other with one dot only, so that they can travel with a checkpoint."""

from .configuration_dspark import DSparkConfig
from .drafter_base import Drafter, without_adapters
from .modeling_dspark import DSparkDrafter, DSparkOutput

__all__ = ["DSparkConfig", "DSparkDrafter", "DSparkOutput", "Drafter", "without_adapters"]
