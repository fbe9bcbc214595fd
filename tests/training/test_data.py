from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from transformers import PreTrainedTokenizerFast

from dspark_hf.data import (
    BadRow,
    DrafterCollator,
    frequent_tokens,
    generation_prompt,
    prepare_dataset,
    tokenize_row,
)

from .conftest import MARKED_TEMPLATE, VOCAB_SIZE

CHAT = [
    {"role": "user", "content": "hello there"},
    {"role": "assistant", "content": "how are you"},
    {"role": "user", "content": "fine"},
    {"role": "assistant", "content": "thanks"},
]


def trained(tokenizer: PreTrainedTokenizerFast, row: dict[str, Any]) -> tuple[str, str]:
    """All of a row's text, and what of it is trained on."""
    ids, mask = tokenize_row(row, tokenizer)
    return tokenizer.decode(ids), tokenizer.decode([token for token, value in zip(ids, mask) if value])


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def test_text_and_ids(tokenizer: PreTrainedTokenizerFast) -> None:
    assert trained(tokenizer, {"text": "hello there"}) == ("hello there", "hello there")
    assert tokenize_row({"input_ids": [4, 5, 6]}, None) == ([4, 5, 6], [1, 1, 1])
    assert tokenize_row({"input_ids": [4, 5], "loss_mask": [0, True]}, None) == ([4, 5], [0, 1])


def test_loss_on_the_response_and_its_end(tokenizer: PreTrainedTokenizerFast) -> None:
    row = {"prompt": "hello there", "response": "how are you"}
    assert trained(tokenizer, row) == ("hello there how are you </s>", "how are you </s>")


def test_template_without_marks(tokenizer: PreTrainedTokenizerFast) -> None:
    text, loss = trained(tokenizer, {"messages": CHAT})
    assert text == "<s> user hello there </s> <s> assistant how are you </s> <s> user fine </s> <s> assistant " + (
        "<think> </think> thanks </s>"
    )
    # The template renders the first answer otherwise than the target would have given it.
    assert loss == "<think> </think> thanks </s>"


def test_template_with_marks(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = MARKED_TEMPLATE
    assert trained(tokenizer, {"messages": CHAT})[1] == "how are you </s> thanks </s>"


def test_thinking_mode_shows_in_the_generation_prompt(tokenizer: PreTrainedTokenizerFast) -> None:
    prompts = {None: "<s> assistant", True: "<s> assistant", False: "<s> assistant <think> </think>"}
    for thinking, text in prompts.items():
        assert tokenizer.decode(generation_prompt(tokenizer, thinking)) == text
    # Without thinking its marks are part of the prompt, not of what is trained on.
    loss_masks = [tokenize_row({"messages": CHAT}, tokenizer, {"enable_thinking": mode})[1] for mode in (True, False)]
    assert sum(loss_masks[0]) - sum(loss_masks[1]) == 2
    tokenizer.chat_template = None
    assert generation_prompt(tokenizer) == []


BAD_ROWS = [
    ({"text": 5}, "`text` is not a string"),
    ({"text": "\ud800"}, "`text` is not valid Unicode"),
    ({"prompt": "hello", "response": ["how"]}, "`response` is not a string"),
    ({"response": "how"}, "`prompt` is not a string"),
    ({"prompt": "hello", "response": ""}, "empty `response`"),
    ({"messages": "hello"}, "not a list of objects"),
    ({"messages": [{"content": "hello"}]}, "without a `role`"),
    ({"messages": CHAT[:1]}, "no message of the assistant"),
    ({"messages": [{"role": "assistant", "content": {}.keys}]}, "chat template fails"),
    ({"input_ids": ["4", "5"]}, "not a list of integers"),
    ({"input_ids": [4, 5], "loss_mask": [1]}, "differ in length"),
    ({"input_ids": [4, 5], "loss_mask": [1, 2]}, "0 and 1"),
    ({"code": "hello"}, "none of the columns"),
]


@pytest.mark.parametrize("row, reason", BAD_ROWS)
def test_bad_row(tokenizer: PreTrainedTokenizerFast, row: dict[str, Any], reason: str) -> None:
    if "fails" in reason:
        tokenizer.chat_template = "{{ raise_exception('no') }}"
    with pytest.raises(BadRow, match=reason):
        tokenize_row(row, tokenizer)


def test_bad_rows_are_counted_and_left_out(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, caplog: pytest.LogCaptureFixture
) -> None:
    good = [{"text": "hello there how are"}, {"input_ids": [4, 5, 6]}, {"messages": CHAT}]
    bad = ["{broken", "[1]", {"text": ""}, {"text": "hello"}, {"text": 5}, {"input_ids": [4, VOCAB_SIZE]}]
    path = write(tmp_path / "rows.jsonl", [*good, *bad, ""])
    with caplog.at_level(logging.WARNING):
        dataset, report = prepare_dataset(path, tokenizer, max_length=32, vocab_size=VOCAB_SIZE)
    assert (len(dataset), report.rows, report.examples) == (3, 9, 3)
    assert dataset.column_names == ["input_ids", "loss_mask"]
    assert report.skipped == {
        "line is not JSON": 1,
        "line is not a JSON object": 1,
        "empty row": 1,
        "no two successive tokens to train on within 32 tokens": 1,
        "`text` is not a string": 1,
        f"token ids outside the target's vocabulary of {VOCAB_SIZE}": 1,
    }
    assert report.first_skipped[f"token ids outside the target's vocabulary of {VOCAB_SIZE}"] == (
        f"line 9, token id {VOCAB_SIZE}"
    )
    assert "Left out 6 of 9 rows: 1 × line is not JSON (first: line 4), 1 × line is not a JSON object" in caplog.text


def test_the_first_bad_row_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    good = {"input_ids": [4, 5]}
    # Blank lines count, a mark of the byte order does not matter, and digits and nesting can be too much for Python.
    path = write(tmp_path / "rows.jsonl", [good, "", "{broken", good, "9" * 5000, "[" * 100_000])
    path.write_text(path.read_text(), encoding="utf-8-sig")
    with caplog.at_level(logging.WARNING):
        dataset, report = prepare_dataset(path, max_length=8, vocab_size=9)
    assert len(dataset) == 2
    assert (report.skipped, report.first_skipped) == ({"line is not JSON": 3}, {"line is not JSON": "line 3"})
    assert "3 × line is not JSON (first: line 3)" in caplog.text
    data = Dataset.from_list([{"input_ids": [1, 2, 3, 4, 5]}, {"input_ids": []}])
    _, report = prepare_dataset(data, max_length=2, vocab_size=9, split_long=True)
    assert report.first_skipped == {"empty row": "row 2"}


def test_wrong_encoding_is_named(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes('{"text": "hello there"}\n{"text": "hello caf\xe9"}\n'.encode("latin-1"))
    dataset, report = prepare_dataset(path, tokenizer, max_length=8, vocab_size=VOCAB_SIZE)
    assert len(dataset) == 1 and report.first_skipped == {"line is not UTF-8": "line 2"}
    for encoding in ("utf-16", "utf-16-le"):
        path.write_text('{"text": "hello there"}\n', encoding=encoding)
        with pytest.raises(ValueError, match="is UTF-16; save it as UTF-8|2 × line is not JSON"):
            prepare_dataset(path, tokenizer, max_length=8, vocab_size=VOCAB_SIZE)


def test_tokenizer_with_more_tokens_than_the_target(tokenizer: PreTrainedTokenizerFast) -> None:
    """Added tokens do not count: Gemma 3's text models have a tokenizer with one that they have no place for."""
    data = Dataset.from_list([{"text": "hello there"}, {"text": "hello <image>"}])
    own = len(tokenizer)
    tokenizer.add_tokens("<image>")
    dataset, report = prepare_dataset(data, tokenizer, max_length=8, vocab_size=own)
    assert len(dataset) == 1 and report.skipped == {f"token ids outside the target's vocabulary of {own}": 1}
    with pytest.raises(ValueError, match=f"The tokenizer has {own} tokens and the target only {own - 1}"):
        prepare_dataset(data, tokenizer, max_length=8, vocab_size=own - 1)


def test_failures_that_are_not_the_templates_are_passed_on(tokenizer: PreTrainedTokenizerFast) -> None:
    def missing(*args: Any, **kwargs: Any) -> None:
        raise ImportError("jinja2 is missing")

    tokenizer.apply_chat_template = missing
    with pytest.raises(ImportError):
        tokenize_row({"messages": CHAT}, tokenizer)


def test_changed_file_is_read_again(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", [{"input_ids": [4, 5]}])
    assert len(prepare_dataset(path, max_length=8, vocab_size=9)[0]) == 1
    write(path, [{"input_ids": [4, 5]}, {"input_ids": [4, 6]}])
    assert len(prepare_dataset(path, max_length=8, vocab_size=9)[0]) == 2


def test_nothing_left_names_the_reasons(tmp_path: Path) -> None:
    data = Dataset.from_list([{"text": "hello there"}])
    with pytest.raises(ValueError, match="None of the 1 rows.*`text` needs a tokenizer"):
        prepare_dataset(data, max_length=8, vocab_size=9)
    with pytest.raises(ValueError, match="`data` has no rows"):
        prepare_dataset(write(tmp_path / "empty.jsonl", []), max_length=8, vocab_size=9)
    with pytest.raises(FileNotFoundError, match="missing.jsonl"):
        prepare_dataset(tmp_path / "missing.jsonl", max_length=8, vocab_size=9)
    with pytest.raises(IsADirectoryError, match="is a folder; give a JSON Lines file"):
        prepare_dataset(tmp_path, max_length=8, vocab_size=9)


def test_long_rows_are_cut_or_split(caplog: pytest.LogCaptureFixture) -> None:
    data = Dataset.from_list([{"input_ids": list(range(9)), "loss_mask": [0, 0, 0, 0, 1, 1, 1, 1, 1]}])
    with pytest.raises(ValueError, match="within 4 tokens"):
        prepare_dataset(data, max_length=4, vocab_size=9)
    with caplog.at_level(logging.WARNING):
        assert prepare_dataset(data, max_length=6, vocab_size=9)[1].cut == 1
    assert "Cut the ends of 1 of 1 rows, longer than 6 tokens" in caplog.text
    split, report = prepare_dataset(data, max_length=4, vocab_size=9, split_long=True)
    # The first window has nothing to train on, the last is a single token.
    assert split["input_ids"][:] == [[4, 5, 6, 7]]
    assert (report.rows, report.tokens, report.trained_tokens, report.cut) == (1, 4, 4, 0)


def test_collator_pads_on_the_right() -> None:
    batch = DrafterCollator(pad_token_id=7)(
        [{"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1]}, {"input_ids": [4], "loss_mask": [1]}]
    )
    assert batch["input_ids"].tolist() == [[1, 2, 3], [4, 7, 7]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert batch["loss_mask"].tolist() == [[0, 1, 1], [1, 0, 0]]


def test_frequent_tokens_are_those_trained_on() -> None:
    rows = {"input_ids": [[8, 8, 8, 1, 1, 2], [2, 2, 5]], "loss_mask": [[0, 0, 0, 1, 1, 1], [1, 1, 1]]}
    dataset = Dataset.from_dict(rows)
    assert frequent_tokens(dataset, 1, vocab_size=9) == [2]
    assert frequent_tokens(dataset, 3, vocab_size=9) == [1, 2, 5]
    assert frequent_tokens(dataset, 3, vocab_size=9, always=[7]) == [1, 2, 7], "the rarest makes room"
    assert frequent_tokens(dataset, 5, vocab_size=9) == [0, 1, 2, 3, 5], "the lowest fill up"
    for count, always in ((0, []), (10, []), (1, [7, 8])):
        with pytest.raises(ValueError, match=f"`draft_vocab_size` is {count}; it must be from {max(1, len(always))}"):
            frequent_tokens(dataset, count, vocab_size=9, always=always)
