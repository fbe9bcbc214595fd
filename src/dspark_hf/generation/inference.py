"""Forward passes under `torch.inference_mode`, where nothing but the time can show it.

Inference mode spares each operation the bookkeeping of autograd, on a small model on a CPU a tenth of its time. Its
tensors must not be changed in place or differentiated outside of it, so it is used only where none of them reaches
anyone: for models made of modules of torch, Transformers and PEFT as they are, without hooks, which may keep what they
see, and with caches and weights of the plain kinds. What a session gives out is copied to ordinary tensors.
"""

from __future__ import annotations

from torch import inference_mode, nn, no_grad
from torch.nn.modules import module as torch_module
from transformers.cache_utils import Cache

from .. import _compat

ForwardMode = type[inference_mode] | type[no_grad]

# Packages whose modules keep nothing of a forward pass.
_KNOWN = ("torch.", "transformers.", "peft.", "dspark_hf.")
_ATTENTION = (None, "eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention")


def forward_mode(model: nn.Module, cache: Cache) -> ForwardMode:
    """What to run forward passes of `model` with `cache` under: `inference_mode` where it is safe, else `no_grad`."""
    is_plain = (
        _compat.is_plain_cache(cache)
        and getattr(getattr(model, "config", None), "_attn_implementation", None) in _ATTENTION
        and all(type(parameter) is nn.Parameter for parameter in model.parameters())
        and not torch_module._global_forward_hooks
        and not torch_module._global_forward_pre_hooks
        and not any(is_altered(module) for module in model.modules())
    )
    return inference_mode if is_plain else no_grad


def is_altered(module: nn.Module) -> bool:
    """Whether a module has hooks of others, or a forward method that is not its package's own.

    Compilers and offloading give an instance its own; others patch the class, wrap the module or derive from it.
    """
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    return (
        "forward" in vars(module)
        or getattr(module, "_compiled_call_impl", None) is not None
        or not type(module).__module__.startswith(_KNOWN)
        or not str(getattr(type(module).forward, "__module__", "")).startswith(_KNOWN)
        or any(not _compat.is_own_hook(hook) for hook in hooks)
    )


__all__ = ["ForwardMode", "forward_mode", "is_altered"]
