"""Forward passes under `torch.inference_mode`, where nothing but the time can show it.

Inference mode spares each operation the bookkeeping of autograd, on a small model on a CPU a tenth of its time. Its
tensors must not be changed in place or differentiated outside of it, so it is used only where none of them reaches
anyone: not with hooks of the user, which may keep what they see; not with caches, weights or forward methods of other
kinds, which may keep tensors for a later call. What a session gives out is copied to ordinary tensors.
"""

from __future__ import annotations

from torch import inference_mode, nn, no_grad
from transformers.cache_utils import Cache

from .. import _compat

ForwardMode = type[inference_mode] | type[no_grad]


def forward_mode(model: nn.Module, cache: Cache) -> ForwardMode:
    """What to run forward passes of `model` with `cache` under: `inference_mode` where it is safe, else `no_grad`."""
    is_plain = (
        _compat.is_plain_cache(cache)
        and all(type(parameter) is nn.Parameter for parameter in model.parameters())
        and not any(_is_altered(module) for module in model.modules())
    )
    return inference_mode if is_plain else no_grad


def _is_altered(module: nn.Module) -> bool:
    """Whether a module has hooks of others, or a forward method of its own, as compilers and offloading give it."""
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    return (
        "forward" in vars(module)
        or getattr(module, "_compiled_call_impl", None) is not None
        or any(not _compat.is_own_hook(hook) for hook in hooks)
    )


__all__ = ["ForwardMode", "forward_mode"]
