"""`dspark`, `dspark generate` and `dspark demo`: what they print, and how they fail."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

import dspark_hf
from dspark_hf import DSparkConfig, embedded, get_drafter
from dspark_hf.cli import app
from dspark_hf.cli.demo import KINDS

from ..tiny import VOCAB_SIZE, tiny_target

PROMPT = "w10 w20 w30 w40 w50"


def make_tokenizer() -> PreTrainedTokenizerFast:
    words = ["<pad>", "<s>", "</s>", "<unk>", *(f"w{index}" for index in range(4, VOCAB_SIZE))]
    inner = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", eos_token="</s>", pad_token="<pad>")


def make_target(**overrides):
    target = tiny_target("qwen3", num_hidden_layers=2, **overrides)
    target.generation_config.eos_token_id = None
    return target


def make_drafter(target):
    torch.manual_seed(0)
    return get_drafter(target, DSparkConfig(block_size=3, num_hidden_layers=1, markov_rank=4, mask_token_id=0))


def save_pair(root):
    """The target, saved in `root` with its tokenizer and a drafter."""
    target = make_target()
    target.save_pretrained(root / "target")
    make_tokenizer().save_pretrained(root / "target")
    make_drafter(target).save_pretrained(root / "drafter")
    return target


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A saved pair, and a target and a drafter that do not belong to it."""
    root = tmp_path_factory.mktemp("pair")
    target, other = make_target(), make_target(hidden_size=32)
    for name, model in {"target": target, "other_target": other}.items():
        model.save_pretrained(root / name)
        make_tokenizer().save_pretrained(root / name)
    for name in ("bare_target", "damaged_target"):
        target.save_pretrained(root / name)
    (root / "damaged_target" / "tokenizer.json").write_text("{", encoding="utf-8")
    make_drafter(target).save_pretrained(root / "drafter")
    make_drafter(other).save_pretrained(root / "other_drafter")
    return root


def run(*arguments, columns=400):
    """Wide, so that nothing is folded."""
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": str(columns)})


def generate(folders, *arguments, prompt=PROMPT, target="target", drafter="drafter"):
    pair = ["--target", folders / target, "--drafter", folders / drafter]
    return run("generate", prompt, *pair, "--device", "cpu", "--repeats", 1, "--max-new-tokens", 12, *arguments)


def plain_text(folders, **options):
    """What plain `generate` gives for the prompt."""
    tokenizer = make_tokenizer()
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    torch.manual_seed(0)
    output = make_target().generate(ids, max_new_tokens=12, **options)
    return tokenizer.decode(output[0, ids.shape[1] :])


def test_version():
    result = run("--version")
    assert result.exit_code == 0
    assert result.output == f"dspark-hf {dspark_hf.__version__}\n"


@pytest.mark.parametrize("arguments", [["--help"], []])
def test_help(arguments):
    result = run(*arguments)
    assert result.exit_code == 0 if arguments else result.exit_code in (0, 2)
    for command in ("calibrate", "demo", "generate", "train"):
        assert command in result.output


@pytest.mark.parametrize("command", ["calibrate", "demo", "generate", "train"])
def test_help_of_commands(command):
    result = run(command, "--help")
    assert result.exit_code == 0
    assert f"dspark {command}" in result.output.replace("root ", "dspark ")


def test_greedy(folders):
    result = generate(folders)
    assert result.exit_code == 0, result.output
    expected = plain_text(folders, do_sample=False)
    assert f"{PROMPT}{expected}" in result.output or f"{PROMPT} {expected}" in result.output
    assert "plain generate gives the same text, token for token" in result.output
    assert result.output.count("accepted length") == result.output.count("bonus token included") == 1
    assert "x plain generate" in result.output
    assert "12 tokens in" in result.output


def test_sampled(folders):
    options = {"temperature": 1.2, "top_k": 50, "top_p": 0.95}
    flags = [part for name, value in options.items() for part in (f"--{name.replace('_', '-')}", value)]
    result = generate(folders, *flags)
    assert result.exit_code == 0, result.output
    assert "another sample of the same distribution" in result.output
    assert plain_text(folders, do_sample=True, **options) in result.output
    assert "token for token" not in result.output
    assert result.output.count(" w") > 20
    assert generate(folders, *flags, "--seed", 1).output != result.output


def test_draft_options(folders):
    result = generate(folders, "--draft-tokens", 2, "--threshold", 0.0)
    assert result.exit_code == 0, result.output
    rounds = int(result.output.split("tokens in ")[1].split(" rounds")[0])
    assert int(result.output.split("drafted ")[-1].split(",")[0]) <= 2 * rounds
    # Nothing is verified: every token is the target's own.
    result = generate(folders, "--threshold", 1.0)
    assert result.exit_code == 0, result.output
    assert "12 tokens in 11 rounds" in result.output
    assert "verified 0, kept 0" in result.output


def test_chat(folders):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}w7 {{ m.content }} w8{% endfor %}"
    tokenizer.save_pretrained(folders / "target")
    try:
        for flags, shows in ([], True), (["--chat"], True), (["--no-chat"], False), (["--thinking"], True):
            result = generate(folders, *flags)
            assert result.exit_code == 0, result.output
            assert (f"w7 {PROMPT} w8" in result.output) is shows
        assert "and --no-chat leaves it out" in generate(folders, "--no-chat", "--thinking").stderr
        tokenizer.chat_template = "{{ raise_exception('no systems') }}"
        tokenizer.save_pretrained(folders / "target")
        assert "chat template fails on PROMPT (no systems); use --no-chat" in generate(folders).stderr
    finally:
        make_tokenizer().save_pretrained(folders / "target")
        (folders / "target" / "chat_template.jinja").unlink(missing_ok=True)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"target": "absent"}, "absent'; --target takes a folder"),
        ({"drafter": "absent"}, "absent'; --drafter takes a folder"),
        ({"drafter": "target/config.json"}, "config.json' is a file; --drafter takes a folder"),
        ({"drafter": "target"}, "is a qwen3 language model, not a drafter"),
        ({"target": "drafter"}, "is a drafter, not a target; --target takes the language model"),
        ({"drafter": "other_drafter"}, "`hidden_size` is 32"),
        ({"target": "other_target"}, "hidden size of 32"),
        ({"prompt": ""}, "PROMPT is empty"),
        ({"prompt": "  "}, "PROMPT has no token"),
        ({"flags": ["--dtype", "float8"]}, "--dtype is 'float8'"),
        ({"flags": ["--temperature", "-1"]}, "--temperature is -1.0"),
        ({"flags": ["--temperature", "nan"]}, "--temperature is nan"),
        ({"flags": ["--seed", "-1"]}, "--seed is -1"),
        ({"flags": ["--max-new-tokens", "0"]}, "--max-new-tokens is 0"),
        ({"flags": ["--repeats", "0"]}, "--repeats is 0"),
        ({"flags": ["--draft-tokens", "4"]}, "allows 1 to 3"),
        ({"flags": ["--draft-tokens", "0"]}, "allows 1 to 3"),
        ({"flags": ["--threshold", "1.5"]}, "--threshold is 1.5; it is a probability"),
        ({"flags": ["--top-p", "1.5", "--temperature", "1"]}, "--top-p is 1.5"),
        ({"flags": ["--top-p", "0", "--temperature", "1"]}, "--top-p is 0.0"),
        ({"flags": ["--top-k", "-1", "--temperature", "1"]}, "--top-k is -1"),
        ({"flags": ["--chat"]}, "no chat template"),
        ({"flags": ["--thinking"]}, "--thinking is for a chat template, and the target's tokenizer has none"),
        ({"flags": ["--no-thinking"]}, "--no-thinking is for a chat template"),
        ({"target": "bare_target"}, "bare_target' has no tokenizer that can be loaded. Take that of the model"),
        ({"target": "damaged_target"}, "Transformers says: "),
        ({"flags": ["--device", "nowhere"]}, "--device is 'nowhere'"),
        ({"flags": ["--device", "cuda:999"]}, "--device is 'cuda:999'"),
        ({"flags": ["--device", "meta"]}, "--device is 'meta'"),
    ],
    ids=str,
)
def test_user_errors(folders, changes, says):
    changes = dict(changes)
    result = generate(folders, *changes.pop("flags", []), **changes)
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit)
    lines = [line for line in result.stderr.splitlines() if line.startswith("Error: ")]
    assert len(lines) == 1, result.stderr
    assert result.stderr.rstrip().endswith(lines[0]), f"more than one line: {result.stderr}"
    assert says in lines[0]
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    "arguments", [["generate"], ["generate", PROMPT], ["generate", PROMPT, "--temperature", "hot"], ["nonsense"]]
)
def test_usage_errors(arguments):
    result = run(*arguments)
    assert result.exit_code == 2
    assert "Usage:" in result.stderr
    assert "Traceback" not in result.output


# --- demo ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def tiny_pair(monkeypatch):
    """A tiny pair in the place of the embedded one."""
    target = make_target()
    prompts = [embedded.Prompt(f"{kind}-1", kind, f"{kind}.txt", PROMPT) for kind in KINDS]
    monkeypatch.setattr(embedded, "load_embedded_pair", lambda: (target, make_tokenizer(), make_drafter(target)))
    monkeypatch.setattr(embedded, "load_prompts", lambda: prompts)


def assert_demo(output: str) -> None:
    for kind in KINDS:
        assert f"{kind}: " in output
    assert output.count("gives the same text, token for token") == len(KINDS)
    assert "accepted length counts the bonus token" in output
    for decoding in ("greedy", "temperature 1"):
        assert f"{decoding}: mean speed" in output
        assert output.count(decoding) >= len(KINDS) + 1


def test_demo(tiny_pair):
    result = run("demo", "--max-new-tokens", 6, "--repeats", 1)
    assert result.exit_code == 0, result.output
    assert_demo(result.output)
    assert "6 new tokens, one run" in result.output


@pytest.mark.parametrize("flags", [["--max-new-tokens", "0"], ["--repeats", "0"]])
def test_demo_user_errors(tiny_pair, flags):
    result = run("demo", *flags)
    assert result.exit_code == 1
    assert result.stderr.startswith("Error: ")
    assert f"{flags[0]} is 0" in result.stderr.replace("`repeats`", "--repeats")


def test_demo_without_its_data(monkeypatch, tmp_path):
    monkeypatch.setattr(embedded, "TARGET", tmp_path / "absent")
    result = run("demo")
    assert result.exit_code == 1
    assert result.stderr.startswith("Error: The embedded pair is missing")


def test_prompts_are_read_in_order(monkeypatch, tmp_path):
    prompts = [embedded.Prompt(str(index), "prose", "a.txt", "naïve\ntext") for index in range(3)]
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(dataclasses.asdict(prompt)) + "\n" for prompt in prompts), encoding="utf-8")
    monkeypatch.setattr(embedded, "PROMPTS", path)
    assert embedded.load_prompts() == prompts


@pytest.mark.slow
def test_demo_with_the_embedded_pair():
    result = run("demo", "--max-new-tokens", 24, "--repeats", 1)
    assert result.exit_code == 0, result.output
    assert_demo(result.output)
