"""Training data: rows of text, chats or token ids, made into sequences and batches."""

from .text import (
    BadRow,
    DataReport,
    DrafterCollator,
    frequent_tokens,
    generation_prompt,
    prepare_dataset,
    template_options,
    tokenize_row,
)

__all__ = [
    "BadRow",
    "DataReport",
    "DrafterCollator",
    "frequent_tokens",
    "generation_prompt",
    "prepare_dataset",
    "template_options",
    "tokenize_row",
]
