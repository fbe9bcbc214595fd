"""Drafter models. Modules here import each other with one dot only, so that they can travel with a checkpoint."""

from .configuration_base import DrafterConfig
from .configuration_dspark import DSparkConfig
from .configuration_eagle3 import Eagle3Config
from .configuration_mtp import MTPConfig
from .drafter_base import Drafter, without_adapters
from .modeling_dspark import DSparkDrafter, DSparkOutput
from .modeling_eagle3 import Eagle3Drafter
from .modeling_mtp import MTPDrafter
from .recurrent import RecurrentDrafter, RecurrentOutput

DRAFTER_CLASSES: dict[str, type[Drafter]] = {
    drafter_class.config_class.model_type: drafter_class
    for drafter_class in (DSparkDrafter, Eagle3Drafter, MTPDrafter)
}
"""Kinds of drafters by the `model_type` of their configuration."""

__all__ = [
    "DRAFTER_CLASSES",
    "DSparkConfig",
    "DSparkDrafter",
    "DSparkOutput",
    "Drafter",
    "DrafterConfig",
    "Eagle3Config",
    "Eagle3Drafter",
    "MTPConfig",
    "MTPDrafter",
    "RecurrentDrafter",
    "RecurrentOutput",
    "without_adapters",
]
