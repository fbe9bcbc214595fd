"""DSpark speculative decoding for Hugging Face Transformers.

Importing this package registers drafters with `AutoConfig` and `AutoModel` and makes
`target.generate(**inputs, assistant_model=drafter)` work; `uninstall()` undoes the latter.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from . import _compat

_compat.check_transformers_version()

from transformers import AutoConfig, AutoModel  # noqa: E402

from .factory import AutoDrafter, get_drafter  # noqa: E402
from .generation import (  # noqa: E402
    GenerationStats,
    RoundStats,
    SpeculativeEngine,
    custom_generate,
    install,
    uninstall,
)
from .models import Drafter, DSparkConfig, DSparkDrafter, DSparkOutput  # noqa: E402

if TYPE_CHECKING:
    from .training import DSparkTrainer, DSparkTrainingArguments, train_drafter

__version__ = "0.1.0"

AutoConfig.register(DSparkConfig.model_type, DSparkConfig, exist_ok=True)
AutoModel.register(DSparkConfig, DSparkDrafter, exist_ok=True)
install()

# Imported when first used: they bring `Trainer` and `datasets`, which generation does not need.
_LAZY = dict.fromkeys(("DSparkTrainer", "DSparkTrainingArguments", "train_drafter"), "training")


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_LAZY[name]}", __name__), name)


__all__ = [
    "AutoDrafter",
    "DSparkConfig",
    "DSparkDrafter",
    "DSparkOutput",
    "DSparkTrainer",
    "DSparkTrainingArguments",
    "Drafter",
    "GenerationStats",
    "RoundStats",
    "SpeculativeEngine",
    "custom_generate",
    "get_drafter",
    "install",
    "train_drafter",
    "uninstall",
]
