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
from .models import (  # noqa: E402
    DRAFTER_CLASSES,
    Drafter,
    DSparkConfig,
    DSparkDrafter,
    DSparkOutput,
    Eagle3Config,
    Eagle3Drafter,
    MTPConfig,
    MTPDrafter,
)

if TYPE_CHECKING:
    from .training import DSparkTrainer, DSparkTrainingArguments, train_drafter

__version__ = "0.1.0"

for _model_type, _drafter_class in DRAFTER_CLASSES.items():
    AutoConfig.register(_model_type, _drafter_class.config_class, exist_ok=True)
    AutoModel.register(_drafter_class.config_class, _drafter_class, exist_ok=True)
install()


def _push(drafter: Drafter, repo_id: str, **options: Any) -> Any:
    return import_module(".hub", __name__).push_drafter(drafter, repo_id, **options)


Drafter.pusher = _push

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
    "Eagle3Config",
    "Eagle3Drafter",
    "GenerationStats",
    "MTPConfig",
    "MTPDrafter",
    "RoundStats",
    "SpeculativeEngine",
    "custom_generate",
    "get_drafter",
    "install",
    "train_drafter",
    "uninstall",
]
