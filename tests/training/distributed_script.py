"""Started by `test_distributed.py` in two processes: `distributed_script.py target_folder output_folder`.

Two train once with the target whole in each process (`whole`) and once with its layers spread over both (`sharded`),
then an EAGLE-3 drafter (`eagle3`), and compare the gradients of drafters in pieces, as FSDP makes them, with those of
whole ones.
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from datasets import Dataset
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import PreTrainedModel

from dspark_hf import DSparkConfig, Eagle3Config, get_drafter
from dspark_hf.models import Drafter
from dspark_hf.training import DSparkTrainingArguments, compute_target_states, load_target, train_drafter
from dspark_hf.training.trainer import OBJECTIVES


def make_rows(vocab_size: int) -> list[dict[str, list[int]]]:
    """Rows of unequal length and weight: a mean of the processes' means would be another loss."""
    rows = []
    for index in range(48):
        length, unread = 12 + index * 7 % 29, index % 5 * 2
        ids = torch.randint(0, vocab_size, (length,)).tolist()
        rows.append({"input_ids": ids, "loss_mask": [0] * unread + [1] * (length - unread)})
    return rows


def make_drafter(target: PreTrainedModel, kind: str = "vanilla") -> Drafter:
    """A drafter of blocks with such a sequential head, or an `eagle3` one with an LM head of its own."""
    torch.manual_seed(0)
    if kind == "eagle3":
        return get_drafter(target, Eagle3Config(block_size=4, share_target_head=False))
    config = DSparkConfig(num_hidden_layers=1, markov_rank=8, block_size=4, markov_head_type=kind)
    return get_drafter(target, config)


def train(
    target_folder: str, output: Path, processes: int, device_map: str | None = None, kind: str = "vanilla"
) -> None:
    args = DSparkTrainingArguments(
        output_dir=str(output),
        max_steps=6,
        per_device_train_batch_size=4 // processes,
        gradient_accumulation_steps=2,
        num_anchors=5,
        logging_steps=1,
        learning_rate=0.1,
        lr_scheduler_type="constant",
        warmup_steps=0,
        optim="sgd",
        save_strategy="no",
        use_cpu=True,
        loss_memory=0.02,  # 10 slots
        ddp_backend="gloo" if processes > 1 else None,
        disable_tqdm=True,
    )
    target, _ = load_target(target_folder, device_map=device_map)
    drafter = make_drafter(target, kind)
    rows = make_rows(drafter.config.vocab_size)
    train_drafter(target, Dataset.from_list(rows), drafter, args, eval_data=Dataset.from_list(rows[:8]))
    kept = sum(p.to_local().numel() if device_map else p.numel() for p in target.model.layers.parameters())
    whole = sum(p.numel() for p in target.model.layers.parameters())
    assert (kept < 0.6 * whole) == (device_map == "fsdp"), "between batches a process holds its share only"


def compare_gradients(target: PreTrainedModel) -> None:
    """Gradients of a drafter in pieces, each process with rows of its own, equal the mean of a whole one's."""
    torch.manual_seed(1 + dist.get_rank())
    ids = torch.randint(0, 100, (2, 20))
    mask = torch.ones_like(ids)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    args = DSparkTrainingArguments(output_dir="unused", num_anchors=5, use_cpu=True)

    def backward(drafter: Drafter) -> None:
        objective = next(kind for drafters, kind in OBJECTIVES.items() if isinstance(drafter, drafters))(drafter, args)
        batch = {"input_ids": ids, "attention_mask": mask, "loss_mask": mask}
        objective.draw(batch, step=0)
        states = compute_target_states(target, drafter.config.target_layer_ids, ids, mask)
        objective.loss(drafter, batch, states, total_weight=torch.tensor(100.0)).loss.backward()

    for kind in ("vanilla", "rnn", "eagle3"):
        drafter = make_drafter(target, kind).train()
        whole = copy.deepcopy(drafter)
        whole.bind_target(target)
        for layer in drafter.layers:
            fully_shard(layer, mesh=mesh, reshard_after_forward=False)
        fully_shard(drafter, mesh=mesh, reshard_after_forward=False)
        backward(drafter)
        backward(whole)
        for (name, part), parameter in zip(drafter.named_parameters(), whole.parameters(), strict=True):
            dist.all_reduce(parameter.grad)
            expected = parameter.grad / dist.get_world_size()
            torch.testing.assert_close(part.grad.full_tensor(), expected, atol=1e-6, rtol=1e-5, msg=f"{kind} {name}")


def main() -> None:
    target_folder, output = sys.argv[1], Path(sys.argv[2])
    torch.set_num_threads(1)
    train(target_folder, output / "whole", processes=2)
    train(target_folder, output / "eagle3", processes=2, kind="eagle3")
    train(target_folder, output / "sharded", processes=2, device_map="fsdp")
    compare_gradients(load_target(target_folder)[0])


if __name__ == "__main__":
    main()
