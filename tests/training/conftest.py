"""A tiny target with text of its own, and a tokenizer for tests of rows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

VOCAB_SIZE = 101
WORDS = ["hello", "there", "how", "are", "you", "fine", "thanks", "user", "assistant", "system", "<think>", "</think>"]

# As chat templates do that know no generation marks; drops thinking from earlier turns, as Qwen3's does.
CHAT_TEMPLATE = """{%- for m in messages %}<s> {{ m.role }}
{% if m.role == 'assistant' and loop.last %}<think> </think> {% endif %}{{ m.content }} </s>
{% endfor %}{% if add_generation_prompt %}<s> assistant
{% if enable_thinking is defined and not enable_thinking %}<think> </think> {% endif %}{% endif %}"""

MARKED_TEMPLATE = """{%- for m in messages %}<s> {{ m.role }} {% if m.role == 'assistant' %}{% generation %}\
{{ m.content }} </s>{% endgeneration %}{% else %}{{ m.content }} </s>{% endif %}{% endfor %}"""


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def target() -> PreTrainedModel:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=128,
        initializer_range=0.2,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=None,
    )
    return Qwen3ForCausalLM(config).eval()


@pytest.fixture(scope="session")
def rows(target: PreTrainedModel) -> list[dict[str, list[int]]]:
    """Greedy text of the target, of different lengths, the first two tokens not trained on."""
    torch.manual_seed(1)
    prompts = torch.randint(3, VOCAB_SIZE, (16, 2))
    ids = target.generate(prompts, min_new_tokens=30, max_new_tokens=30, do_sample=False)
    lengths = [32 - index % 5 for index in range(len(ids))]
    return [
        {"input_ids": row[:length].tolist(), "loss_mask": [0] * 2 + [1] * (length - 2)}
        for row, length in zip(ids, lengths)
    ]


@pytest.fixture(scope="session")
def dataset(rows: list[dict[str, list[int]]]) -> Dataset:
    return Dataset.from_list(rows)


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {word: index for index, word in enumerate(["<unk>", "<s>", "</s>", "<mask>", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        mask_token="<mask>",
        chat_template=CHAT_TEMPLATE,
    )


@pytest.fixture(scope="session")
def target_folder(target: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    target.save_pretrained(folder)
    return folder
