"""A frozen target whose layers lie spread over all processes.

Accelerate wraps the drafter only, so the target's place is its own affair: whole on the device of each process, in
pieces over the devices of one process (`device_map`), or, here, in pieces over the devices of all processes.
"""

from __future__ import annotations

import os

from accelerate import PartialState
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import PreTrainedModel, TrainingArguments

from .losses import world_size


def shard_layers(target: PreTrainedModel) -> PreTrainedModel:
    """Spreads the layers of `target` over all processes, in place (FSDP 2).

    Each process keeps its share of every layer, on its own device, and gathers a layer while that is computed. What
    stands outside the layers, such as embeddings and LM head, stays whole: the drafter uses it on its own. From here
    on all processes must run the target equally often, as they do in training.

    Args:
        target: the same one in each process, best on the CPU: layers are moved one by one.

    Raises:
        ValueError: if there is one process only, or no layers are known that could be spread.
    """
    if world_size() == 1:
        raise ValueError(
            "`target_device_map` is 'fsdp', which needs several processes: start with `accelerate launch` or "
            "`torchrun`, or use 'auto' to spread the target over the devices of one process."
        )
    layers = _layers(target)
    if not layers or getattr(target, "is_quantized", False):
        reason = "is quantised" if layers else "names no layers that can be moved as a whole"
        raise ValueError(
            f"`target_device_map` is 'fsdp', but the target {type(target).__name__} {reason}; leave it out, or use "
            "'auto' in one process."
        )
    mesh = init_device_mesh(PartialState().device.type, (world_size(),))
    for layer in layers:
        # Said explicitly: each layer is a root of its own here, and roots would otherwise stay gathered.
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    return target


def check_wrapping(training_args: TrainingArguments) -> None:
    """Raises `ValueError` where FSDP or DeepSpeed would take the drafter's weights away too early.

    Its heads are applied after its forward, so what that has gathered must still be there: FSDP 2 without resharding
    after the forward and ZeRO up to stage 2 do this.
    """
    deepspeed = training_args.deepspeed_plugin
    if deepspeed is not None and deepspeed.zero_stage == 3:
        raise ValueError(
            "ZeRO-3 cannot train a drafter, whose heads are applied after its forward; use ZeRO-2, or FSDP 2 with "
            "`fsdp_reshard_after_forward: false`."
        )
    options = training_args.fsdp_plugin_args
    if options is None and os.environ.get("ACCELERATE_USE_FSDP", "false") == "true":
        version, reshards = (os.environ.get(f"FSDP_{name}") for name in ("VERSION", "RESHARD_AFTER_FORWARD"))
        options = {"fsdp_version": int(version or 1), "reshard_after_forward": reshards != "false"}
    if options is not None and (options["fsdp_version"] != 2 or options.get("reshard_after_forward", True)):
        raise ValueError(
            "FSDP can train a drafter, whose heads are applied after its forward, only with `fsdp_version: 2` and "
            "`fsdp_reshard_after_forward: false`; see examples/accelerate/fsdp.yaml."
        )


def _layers(target: PreTrainedModel) -> list[nn.Module]:
    """The outermost modules that the target's class does not want split, without the embeddings."""
    names = set(target._no_split_modules or ())
    embeddings = target.get_input_embeddings()
    found: list[nn.Module] = []
    for module in target.modules():
        inside = set(module.modules())
        if type(module).__name__ in names and embeddings not in inside:
            if not any(module in outer.modules() for outer in found):
                found.append(module)
    return found


__all__ = ["check_wrapping", "shard_layers"]
