"""Started by `test_distributed.py`, in one process and in two: `distributed_script.py target_folder output_folder`."""

from __future__ import annotations

import os
import sys

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM

from dspark_hf import DSparkConfig, get_drafter
from dspark_hf.training import DSparkTrainingArguments, train_drafter


def main() -> None:
    target_folder, output = sys.argv[1:]
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    torch.set_num_threads(1)
    torch.manual_seed(0)
    target = AutoModelForCausalLM.from_pretrained(target_folder)
    drafter = get_drafter(target, DSparkConfig(num_hidden_layers=1, markov_rank=8, block_size=4))
    rows = []
    for index in range(16):
        # Unequal weights on the two sides: a mean of the processes' means would be another loss.
        length = 20 + index % 7
        ids = torch.randint(0, drafter.config.vocab_size, (length,)).tolist()
        rows.append({"input_ids": ids, "loss_mask": [0] * (index % 5 * 3) + [1] * (length - index % 5 * 3)})
    args = DSparkTrainingArguments(
        output_dir=output,
        max_steps=2,
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
    )
    train_drafter(target, Dataset.from_list(rows), drafter, args, eval_data=Dataset.from_list(rows[:8]))


if __name__ == "__main__":
    main()
