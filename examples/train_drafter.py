"""Trains a drafter for a target, as a recipe or the command line says.

    python examples/train_drafter.py --recipe examples/recipes/qwen3_0.6b.yaml --data_file train.jsonl \
        --output_dir drafter --num_train_epochs 1

All options of `DSparkTrainingArguments` can be given, in the recipe (YAML) or here, where they go before it.
`--method` says which kind of drafter: `dspark`, `dflash`, `eagle3` or `mtp`. A row of the data has `messages`,
`prompt` and `response`, `text`, or `input_ids`. Best are answers that the target itself gave: the drafter learns to
guess what this target says. Several GPUs: see `examples/accelerate`.
"""

from __future__ import annotations

from transformers import set_seed

from dspark_hf import AutoDrafter, get_drafter, train_drafter
from dspark_hf.training import choose_draft_tokens, find_checkpoint, load_target
from dspark_hf.training.recipe import RecipeParser


def main() -> None:
    drafter_args, data_args, training_args = RecipeParser().parse()
    set_seed(training_args.seed)
    data = {"split_long": data_args.split_long, "num_proc": data_args.num_proc}

    target, tokenizer = load_target(
        drafter_args.target, device_map=drafter_args.target_device_map or training_args.device
    )
    checkpoint = find_checkpoint(training_args.output_dir, drafter_args.resume)
    if checkpoint or drafter_args.warm_start:
        drafter = AutoDrafter.from_pretrained(checkpoint or drafter_args.warm_start)
    else:
        draft_tokens = None
        if drafter_args.draft_vocab_size is not None:
            draft_tokens = choose_draft_tokens(
                target, data_args.data_file, drafter_args.draft_vocab_size, training_args, tokenizer=tokenizer, **data
            )
        config = drafter_args.drafter_config()
        drafter = get_drafter(target, config, tokenizer=tokenizer, draft_tokens=draft_tokens)
    train_drafter(
        target,
        data_args.data_file,
        drafter,
        training_args,
        tokenizer=tokenizer,
        eval_data=data_args.eval_file,
        resume=checkpoint or False,
        **data,
    )


if __name__ == "__main__":
    main()
