"""Training data: answers of a target to prompts; rows of text, chats or token ids, made into sequences and batches."""

from .backends import Decoding
from .prepare import PrepareReport, prepare_data
from .server import Server
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
    "Decoding",
    "DrafterCollator",
    "PrepareReport",
    "Server",
    "frequent_tokens",
    "generation_prompt",
    "prepare_data",
    "prepare_dataset",
    "template_options",
    "tokenize_row",
]
