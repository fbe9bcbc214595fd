"""`prepare_data`: what the target says, in the form in which it is trained on; what is kept aside; going on again."""

from __future__ import annotations

import json
import multiprocessing
import random
import sys
import time

import pytest
import torch
from datasets import Dataset

from dspark_hf.data import Decoding, Server, prepare_data, prepare_dataset

from ..cli.test_commands import make_drafter, make_target, make_tokenizer
from ..tiny import VOCAB_SIZE
from .stand_in import StandIn

# w5 stands for the user, w6 for the assistant. The last answer stays as it was, earlier ones lose what is before w9.
KEEPING = """{% for m in messages %}{{ 'w6' if m.role == 'assistant' else 'w5' }} {{ m.content }} </s> {% endfor %}\
{% if add_generation_prompt %}w6{% if enable_thinking %} w7{% endif %}{% endif %}"""
DROPPING = KEEPING.replace("{{ m.content }}", "{{ m.content if loop.last else m.content.split('w11')[-1] }}")

CHAT = [
    {"role": "user", "content": "w20 w21"},
    {"role": "assistant", "content": "w300"},
    {"role": "user", "content": "w22"},
    {"role": "assistant", "content": "w301"},
]
ROWS = [
    {"id": "chat", "messages": CHAT},
    {"id": "open", "messages": CHAT[:3]},
    {"prompt": "w23"},
    {"turns": ["w24", "w25"]},
    {"text": "w30 w31 w32 w33 w34 w35"},
]
GREEDY = Decoding(max_new_tokens=6, temperature=0.0)


def tokenizer_with(template=KEEPING):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


@pytest.fixture(scope="module")
def target():
    return make_target()


def table(rows):
    """A dataset with all columns that a row has, not only the first row's."""
    names = dict.fromkeys(name for row in rows for name in row)
    return Dataset.from_list([{name: row.get(name) for name in names} for row in rows])


def write(path, rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def lines(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def by_key(path):
    found = {}
    for line in lines(path):
        found.setdefault((line["source"], line["sample"]), []).append(line)
    return found


def trained(row):
    return [token for token, value in zip(row["input_ids"], row["loss_mask"], strict=True) if value]


def serve(target, server, prompts, output, template=KEEPING, **options):
    """The answers of a stand-in, which needs nothing of the target but its config."""
    where = Server(server.url, "tiny", concurrency=4, timeout=5.0, backoff=0.001)
    return prepare_data(target, prompts, output, tokenizer=tokenizer_with(template), server=where, **options)


# --- this process ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafted", [False, True])
def test_rows_of_every_form(target, tmp_path, drafted):
    """What `generate` says, with and without a drafter, and what training takes."""
    tokenizer, output = tokenizer_with(), tmp_path / "made" / "train.jsonl"
    drafter = make_drafter(target) if drafted else None
    report = prepare_data(
        *(target, table(ROWS), output),
        **dict(tokenizer=tokenizer, drafter=drafter, max_batch=3, decoding=GREEDY, prompt_tokens=4),
    )
    assert (report.rows, report.failed, report.tokens) == (5, {}, 5 * 6)
    found = by_key(output)
    # Nothing ends these answers, so each is cut, and a chat ends with one that is.
    prompts = {1: "w5 w20 w21 </s> w6", 2: "w5 w20 w21 </s> w6", 3: "w5 w23 </s> w6", 4: "w5 w24 </s> w6"}
    for source, text in {**prompts, 5: "w30 w31 w32 w33"}.items():
        (row,) = found[source, 0]
        prompt = tokenizer(text, return_tensors="pt")
        expected = target.generate(**prompt, max_new_tokens=6, do_sample=False)[0].tolist()
        assert row["input_ids"] == expected
        assert row["loss_mask"] == [0] * (len(expected) - 6) + [1] * 6
        assert row["finish_reason"] == "length"
        assert row["id"] == ROWS[source - 1].get("id")
    (chat,) = found[1, 0]
    assert [message["role"] for message in chat["messages"]] == ["user", "assistant"]
    assert chat["messages"][-1]["content"] == tokenizer.decode(trained(chat), skip_special_tokens=True)
    dataset, trained_on = prepare_dataset(str(output), tokenizer, max_length=64, vocab_size=VOCAB_SIZE)
    assert (len(dataset), trained_on.skipped, trained_on.trained_tokens) == (5, {}, 30)


def test_an_end_is_kept_and_the_context_holds(target, tmp_path):
    """Answers that the target ends go on with the next turn; a context that is full ends a chat."""
    target = make_target(max_position_embeddings=24)
    target.generation_config.eos_token_id = list(range(2, VOCAB_SIZE, 2))
    rows = [{"turns": [f"w{20 + index}"] * 9} for index in range(6)] + [{"prompt": " ".join(["w50"] * 30)}]
    report = prepare_data(
        *(target, table(rows), tmp_path / "out.jsonl"),
        **dict(tokenizer=tokenizer_with(), decoding=Decoding(max_new_tokens=8), max_batch=4),
    )
    assert report.failed.pop("a prompt that fills the target's context of 24 tokens") == 1
    found = by_key(tmp_path / "out.jsonl")
    assert len(found) == report.rows == 6 - sum(report.failed.values())
    for parts in found.values():
        assert [part["part"] for part in parts] == list(range(1, len(parts) + 1))
        assert {part["parts"] for part in parts} == {len(parts)}
        assert all(len(part["input_ids"]) <= 24 for part in parts)
        for part in parts:
            assert part["finish_reason"] == ("stop" if part["input_ids"][-1] % 2 == 0 else "length")
    assert any(len(part["messages"]) > 2 for parts in found.values() for part in parts)


def test_a_row_decoded_alone_depends_on_its_seed_only(target, tmp_path):
    options = dict(tokenizer=tokenizer_with(), max_batch=1, decoding=Decoding(max_new_tokens=5), samples=2)
    prepare_data(target, table(ROWS), tmp_path / "whole.jsonl", **options)
    whole = (tmp_path / "whole.jsonl").read_bytes()
    assert len({tuple(trained(row)) for row in lines(tmp_path / "whole.jsonl")}) == 10
    # Go on from the first three rows.
    (tmp_path / "whole.jsonl").write_bytes(b"".join(whole.splitlines(keepends=True)[:3]))
    torch.manual_seed(7)
    report = prepare_data(target, table(ROWS), tmp_path / "whole.jsonl", **options)
    assert (report.rows, report.already_done) == (7, 3)
    assert (tmp_path / "whole.jsonl").read_bytes() == whole


# --- a server --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gives_ids", [True, False])
def test_server(target, tmp_path, gives_ids):
    output = tmp_path / "out.jsonl"
    with StandIn(gives_ids) as server:
        decoding = Decoding(max_new_tokens=9, top_p=0.9)
        options = dict(decoding=decoding, samples=2, prompt_tokens=3, enable_thinking=True)
        report = serve(target, server, table(ROWS), output, **options)
    assert (report.rows, report.failed) == (10, {})
    assert len({body["seed"] for _, body in server.requests}) == len(server.requests) == 2 * (2 + 2 + 1 + 2 + 1)
    paths = [path for path, _ in server.requests]
    assert (paths.count("/v1/chat/completions"), paths.count("/v1/completions")) == (14, 2)
    for path, body in server.requests:
        asked = [body[name] for name in ("model", "max_tokens", "temperature", "top_p", "top_k")]
        assert asked == ["tiny", 9, 1.0, 0.9, -1]
        assert body.get("chat_template_kwargs") == ({"enable_thinking": True} if "chat" in path else None)
    found, tokenizer = by_key(output), tokenizer_with()
    for sample in range(2):
        text = found[5, sample][0]
        assert text["input_ids"][:3] == [30, 31, 32] and text["input_ids"][4:] == [11, 12, 2]
        assert text["loss_mask"] == [0, 0, 0, 1, 1, 1, 1]
        # Thinking is not in earlier turns of this template: an answer after w7 begins a sequence of its own.
        first, second = found[1, sample]
        assert [message["role"] for message in second["messages"]] == ["user", "assistant"] * 2
        assert "w300" not in json.dumps(second) and trained(first)[1:] == trained(second)[1:] == [11, 12, 2]
        answer = first["messages"][1]["content"]
        assert tokenizer.decode(second["input_ids"][:-4]) == f"w5 w20 w21 </s> w6 {answer} </s> w5 w22 </s> w6 w7"
        assert first["enable_thinking"] is True and first["finish_reason"] == "stop"


def test_turns_share_a_sequence_where_the_template_keeps_them(target, tmp_path):
    with StandIn() as server:
        for template, count in ((KEEPING, 1), (DROPPING, 2)):
            output = tmp_path / f"{count}.jsonl"
            serve(target, server, table(ROWS[:1]), output, template)
            parts = lines(output)
            assert len(parts) == count
            # Each answer is trained on once, with its end.
            assert [token for part in parts for token in trained(part)].count(2) == 2
            assert sum(len(trained(part)) for part in parts) == 2 * 4


def test_what_a_server_cuts_has_no_end(target, tmp_path):
    with StandIn(gives_ids=False) as server:
        server.finish_reason = "length"
        serve(target, server, table(ROWS), tmp_path / "out.jsonl")
    rows = lines(tmp_path / "out.jsonl")
    assert [len(row["messages"]) for row in rows if "messages" in row] == [2] * 4
    assert all(trained(row)[1:] == [11, 12] and row["finish_reason"] == "length" for row in rows)


def test_faults_are_tried_again_and_refusals_are_not(target, tmp_path):
    output = tmp_path / "out.jsonl"
    with StandIn(faults=("500", "429", "drop", "break", "503"), refuses="w23") as server:
        report = serve(target, server, table(ROWS), output)
        assert report.failed == {"the server answers with status 400": 1}
        assert report.first_failed == {"the server answers with status 400": "row 3"}
        assert set(server.tries.values()) == {6}
        assert sorted(by_key(output)) == [(1, 0), (2, 0), (4, 0), (5, 0)]
        (failure,) = lines(tmp_path / "out.jsonl.failed.jsonl")
        assert (failure["source"], failure["place"]) == (3, "row 3") and "I refuse." in failure["detail"]
        # What has failed stays so until it is asked for.
        asked = len(server.requests)
        report = serve(target, server, table(ROWS), output)
        assert (report.rows, report.already_done, report.already_failed) == (0, 4, 1)
        assert len(server.requests) == asked
        server.refuses = ""
        report = serve(target, server, table(ROWS), output, retry_failed=True)
        assert (report.rows, report.already_done, report.failed) == (1, 4, {})
    assert sorted(by_key(output)) == [(number, 0) for number in range(1, 6)]
    assert not (tmp_path / "out.jsonl.failed.jsonl").exists()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"choices": []}, "the server's answer is not as in OpenAI's API"),
        ({"choices": [{"finish_reason": "stop", "text": 3}]}, "the server's answer is not as in OpenAI's API"),
        ({"choices": [{"finish_reason": "abort", "text": "w5"}]}, "the server ends the answer with `abort`"),
        ({"choices": [{"finish_reason": "length", "text": ""}]}, "an empty answer"),
        (
            {"choices": [{"finish_reason": "stop", "message": {"content": "w5", "reasoning_content": "w7"}}]},
            "the server takes thoughts out of the answer; start it without a reasoning parser",
        ),
    ],
)
def test_odd_answers(target, tmp_path, monkeypatch, change, reason):
    monkeypatch.setattr(StandIn, "answer", lambda *_: change)
    with StandIn() as server:
        report = serve(target, server, table(ROWS[4:]), tmp_path / "out.jsonl")
    assert report.failed == {reason: 1}


def test_server_that_goes_away(target, tmp_path):
    """No row is to blame; with another server the rest is answered."""
    rows = table([{"prompt": f"w{20 + index}"} for index in range(40)])
    with StandIn(delay=0.01) as server:

        def stop(done, total):
            if done == 10:
                server.close()

        with pytest.raises(OSError, match=r"No server answers at 'http://127.*the same command then goes on"):
            serve(target, server, rows, tmp_path / "out.jsonl", progress=stop)
    with StandIn() as server:
        report = serve(target, server, rows, tmp_path / "out.jsonl")
    assert 10 <= report.already_done < 40 and report.already_failed == 0
    assert sorted(by_key(tmp_path / "out.jsonl")) == [(number, 0) for number in range(1, 41)]


def test_server_that_will_not_do(target, tmp_path, monkeypatch):
    def ask(server, **options):
        where = Server(server.url, **options, retries=0)
        rows = table(ROWS)
        return prepare_data(target, rows, tmp_path / "out.jsonl", tokenizer=tokenizer_with(), server=where)

    with StandIn(key="secret") as server:
        with pytest.raises(PermissionError, match="refuses the key"):
            ask(server, model="tiny")
        with pytest.raises(ValueError, match="does not serve 'large'; .* as `model`: 'tiny'"):
            ask(server, model="large", api_key="secret")
        monkeypatch.setenv("OPENAI_API_KEY", "secret")
        assert ask(server, model="tiny").rows == 5


# --- bad rows --------------------------------------------------------------------------------------------------------

BAD = {
    "nonsense": "line is not JSON",
    "[1]": "line is not a JSON object",
    '{"id": 1}': "none of the columns `messages`, `turns`, `prompt` and `text`",
    '{"messages": []}': "no message of the user",
    '{"messages": "w5"}': "`messages` is not a list of objects",
    '{"messages": [{"role": "system", "content": "w5"}]}': "no message of the user",
    '{"messages": [{"role": "assistant", "content": "w5"}]}': "a message of the assistant that does not follow one of "
    "the user",
    '{"messages": [{"role": "tool", "content": "w5"}]}': "a message that is neither the system's, the user's nor the "
    "assistant's",
    '{"messages": [{"role": "user", "content": 3}]}': "`content` is not a string",
    '{"prompt": " "}': "an empty message of the user",
    '{"prompt": ["w5"]}': "`content` is not a string",
    '{"turns": []}': "`turns` is not a list of texts, at least one",
    '{"text": ""}': "empty `text`",
    '{"text": 3}': "`text` is not a string",
    '{"text": "\\ud800"}': "`text` is not valid Unicode",
    '{"prompt": "w99"}': "the chat template fails",
}


def test_bad_rows_are_kept_aside(target, tmp_path):
    template = "{% if 'w99' in messages[0].content %}{{ raise_exception('no') }}{% endif %}" + KEEPING
    rows = [*BAD, "", {"prompt": "w20", "id": "\ud800"}]
    with StandIn() as server:
        report = serve(target, server, write(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl", template)
    assert report.rows == 1 and list(by_key(tmp_path / "out.jsonl")) == [(len(rows), 0)]
    failures = sorted(lines(tmp_path / "out.jsonl.failed.jsonl"), key=lambda failure: failure["source"])
    assert [failure["reason"] for failure in failures] == list(BAD.values())
    assert [failure["place"] for failure in failures] == [f"line {number}" for number in range(1, len(BAD) + 1)]
    assert sum(report.failed.values()) == len(BAD)


def test_without_a_chat_template(target, tmp_path):
    tokenizer, rows = make_tokenizer(), table(ROWS)
    report = prepare_data(target, rows, tmp_path / "out.jsonl", tokenizer=tokenizer, decoding=GREEDY)
    assert sorted(by_key(tmp_path / "out.jsonl")) == [(3, 0), (5, 0)]
    assert report.failed == {
        "`messages` needs a chat template and the tokenizer has none": 2,
        "`turns` needs a chat template and the tokenizer has none": 1,
    }


# --- going on --------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform == "win32", reason="forks")
def test_killed_at_any_point(target, tmp_path):
    """Ten times: nothing is lost and nothing is there twice."""
    count, output = 300, tmp_path / "out.jsonl"
    rows = table([{"messages": CHAT} if index % 3 else {"text": ""} for index in range(count)])
    context, dice = multiprocessing.get_context("fork"), random.Random(0)
    with StandIn(delay=0.02) as server:
        for _ in range(10):
            process = context.Process(target=serve, args=(target, server, rows, output, DROPPING))
            process.start()
            asked, limit = len(server.requests), dice.randint(1, 25)
            while process.is_alive() and len(server.requests) < asked + limit:
                time.sleep(0.001)
            time.sleep(dice.random() * 0.02)
            assert process.is_alive(), "the rows do not last"
            process.kill()
            process.join()
        server.delay = 0.0
        report = serve(target, server, rows, output, DROPPING)
    assert 0 < report.already_done < 200
    found = by_key(output)
    assert sorted(found) == [(number, 0) for number in range(1, count + 1) if (number - 1) % 3]
    assert all([row["part"] for row in parts] == [1, 2] for parts in found.values())
    failures = [failure["source"] for failure in lines(tmp_path / "out.jsonl.failed.jsonl")]
    assert sorted(failures) == list(range(1, count + 1, 3))


@pytest.mark.parametrize("cut", [1, 40, -1, "part"])
def test_torn_row_is_written_again(target, tmp_path, cut):
    output, rows = tmp_path / "out.jsonl", table(ROWS[:1] * 3)
    with StandIn() as server:
        serve(target, server, rows, output, DROPPING)
        whole = output.read_bytes().splitlines(keepends=True)
        assert len(whole) == 6
        # The last row lacks its second line, or has a piece of it.
        output.write_bytes(b"".join(whole[:5]) + (b"" if cut == "part" else whole[5][:cut]))
        report = serve(target, server, rows, output, DROPPING)
    assert (report.rows, report.already_done) == (1, 2)
    assert sorted(output.read_bytes().splitlines(keepends=True)) == sorted(whole)


def test_rows_made_otherwise_are_refused(target, tmp_path):
    output, rows = tmp_path / "out.jsonl", table(ROWS)
    with StandIn() as server:
        serve(target, server, rows, output)
        before = output.read_bytes()
        for options, says in (
            ({"seed": 1}, "`seed` was 0 and is 1. Give another file"),
            ({"decoding": Decoding(temperature=0.5)}, "`decoding` was"),
            ({"enable_thinking": False}, "`enable_thinking` was None and is False"),
            ({"template": DROPPING}, "`chat_template` was"),
            ({"prompt_tokens": 5}, "`prompt_tokens` was 64 and is 5"),
        ):
            with pytest.raises(ValueError, match=f"whose rows were made otherwise: {says}"):
                serve(target, server, rows, output, **options)
        with pytest.raises(ValueError, match="`prompts` was"):
            serve(target, server, rows.select(range(3)), output)
        with pytest.raises(ValueError, match="`config` was"):
            serve(make_target(rms_norm_eps=1e-3), server, rows, output)
        # More samples of the same are fine.
        assert serve(target, server, rows, output, samples=2).already_done == 5
        assert output.read_bytes().startswith(before)
        (tmp_path / "out.jsonl.manifest.json").unlink()
        with pytest.raises(ValueError, match="no manifest out.jsonl.manifest.json that can be read"):
            serve(target, server, rows, output)
    write(tmp_path / "other.jsonl", ["{}"])
    with pytest.raises(ValueError, match="no manifest"):
        prepare_data(target, rows, tmp_path / "other.jsonl", tokenizer=tokenizer_with())
    assert (tmp_path / "other.jsonl").read_text() == "{}\n"


def test_damaged_line_is_named(target, tmp_path):
    output, rows = tmp_path / "out.jsonl", table(ROWS)
    with StandIn() as server:
        serve(target, server, rows, output)
        content = output.read_bytes()
        output.write_bytes(b"{}\n" + content)
        with pytest.raises(ValueError, match=r"Line 1 of .*out.jsonl' is not as it was written"):
            serve(target, server, rows, output)
    assert output.read_bytes() == b"{}\n" + content


# --- arguments -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"samples": 0}, "`samples` is 0; it must be at least 1"),
        ({"prompt_tokens": 0}, "`prompt_tokens` is 0"),
        ({"samples": 2, "decoding": GREEDY}, "at `temperature` 0 all would be the same"),
        ({"tokenizer": None}, "`tokenizer` is missing"),
        ({"max_batch": 0}, "`max_batch` is 0"),
        ({"enable_thinking": True}, "the tokenizer has none; leave it out"),
    ],
)
def test_arguments_out_of_range(target, tmp_path, options, says):
    options = {"tokenizer": make_tokenizer(), **options}
    with pytest.raises(ValueError, match=says):
        prepare_data(target, table(ROWS), tmp_path / "out.jsonl", **options)


@pytest.mark.parametrize(
    ("kind", "options", "says"),
    [
        (Decoding, {"max_new_tokens": 0}, "`max_new_tokens` is 0"),
        (Decoding, {"temperature": -1.0}, "`temperature` is -1.0"),
        (Decoding, {"top_p": 0.0}, "`top_p` is 0.0"),
        (Decoding, {"top_k": -1}, "`top_k` is -1"),
        (Server, {"base_url": "localhost:8000"}, "give one such as http://localhost:8000/v1"),
        (Server, {"base_url": "http://x", "concurrency": 0}, "`concurrency` is 0"),
        (Server, {"base_url": "http://x", "timeout": 0}, "`timeout` is 0"),
        (Server, {"base_url": "http://x", "retries": -1}, "`retries` is -1"),
    ],
)
def test_options_out_of_range(kind, options, says):
    with pytest.raises(ValueError, match=says):
        kind(**options)
