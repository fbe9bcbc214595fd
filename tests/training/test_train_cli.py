from __future__ import annotations

import dataclasses
import inspect
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import typer
from datasets import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from typer.testing import CliRunner

from dspark_hf import AutoDrafter, DSparkDrafter, DSparkTrainingArguments
from dspark_hf.cli.options import Method
from dspark_hf.cli.train import FLAGS, OPTIONS, PASSES_ON, train
from dspark_hf.data.text import ROW_KINDS
from dspark_hf.embedded import DRAFTER, TARGET
from dspark_hf.training.recipe import METHODS, DataArguments, DrafterArguments, RecipeParser

app = typer.Typer()
app.command(context_settings=PASSES_ON)(train)


@pytest.fixture
def data(dataset: Dataset, tmp_path: Path) -> Path:
    path = tmp_path / "train.jsonl"
    dataset.to_json(path)
    return path


def run(*options: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(option) for option in options])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def test_train_and_resume(target_folder: Path, data: Path, dataset: Dataset, tmp_path: Path) -> None:
    output = tmp_path / "drafter"
    options = ["--target", target_folder, "--data", data, "--output", output, "--num-anchors", 4, "--batch-size", 4]
    shape = ["--drafter-layers", 1, "--block-size", 3, "--markov-rank", 4, "--markov-head", "gated"]
    shape += ["--draft-vocab-size", 20]
    code, text = run(
        *options, *shape, "--no-confidence", "--target-layers", "0,2", "--max-steps", 2, "--save-steps", 2
    )
    assert code == 0, text
    drafter = DSparkDrafter.from_pretrained(output)
    config = drafter.config
    assert (config.num_hidden_layers, config.block_size, config.markov_rank) == (1, 3, 4)
    assert (config.markov_head_type, config.target_layer_ids) == ("gated", [0, 2])
    assert drafter.confidence_head is None
    tokens = Counter(token for row in dataset for token, is_trained in zip(*row.values()) if is_trained)
    chosen = drafter.draft_ids.tolist()
    assert len(chosen) == 20 and 2 in chosen, "the end of a sequence, too"
    assert min(tokens[token] for token in chosen if token != 2) >= max(
        tokens[token] for token in {*tokens} - {*chosen}
    )

    code, text = run(*options, "--max-steps", 3)
    assert code == 1
    assert "up to checkpoint-2: set --resume to go on from the last one, or give a fresh folder as --output" in text

    # A resumed run takes the drafter's shape from the checkpoint.
    code, text = run(*options, "--max-steps", 3, "--eval-data", data, "--resume")
    assert code == 0, text
    summary = json.loads((output / "training_summary.json").read_text())
    assert summary["steps"] == 3 and "eval_tau" in summary["metrics"]
    assert DSparkDrafter.from_pretrained(output).draft_ids.tolist() == chosen


@pytest.mark.parametrize(
    "method, shape, expected",
    [
        ("dflash", ["--sample-from-anchor", "false"], ("dspark", 2, 7, 1.0, 0.0)),
        ("eagle3", ["--draft-vocab-size", 20, "--step-loss-decay", 0.9], ("dspark_eagle3", 1, 7, None, None)),
        ("mtp", ["--ce-weight", 0.5], ("dspark_mtp", 1, 1, None, None)),
    ],
)
def test_methods(
    target_folder: Path, data: Path, tmp_path: Path, method: str, shape: list[object], expected: tuple[object, ...]
) -> None:
    """Each with its own shape and loss, with a checkpoint to go on from."""
    output = tmp_path / "drafter"
    options = ["--target", target_folder, "--data", data, "--output", output, "--save-steps", 1, "--use-cpu"]
    code, text = run(*options, "--method", method, *shape, "--max-steps", 1)
    assert code == 0, text
    config = AutoDrafter.from_pretrained(output).config
    summary = json.loads((output / "training_summary.json").read_text())
    weights = (summary["arguments"].get("ce_weight"), summary["arguments"].get("tv_weight"))
    assert (config.model_type, config.num_hidden_layers, config.block_size, *weights) == expected
    assert summary["drafter"] == config.model_type
    if method == "dflash":
        assert (config.markov_rank, config.enable_confidence_head, config.sample_from_anchor) == (0, False, False)
    if method == "eagle3":
        assert config.draft_vocab_size == 20 and summary["arguments"]["step_loss_decay"] == 0.9
    assert ("num_anchors" in summary["arguments"]) == (method == "dflash"), "what has no say is not told"
    code, text = run(*options, "--max-steps", 2, "--resume")
    assert code == 0, text
    assert AutoDrafter.from_pretrained(output).config.to_diff_dict() == config.to_diff_dict()


def test_names_of_methods() -> None:
    assert [each.value for each in Method] == list(METHODS), "those of the command are those of the library"
    with pytest.raises(ValueError, match="`method` is 'eagle4'; choose one of dspark, dflash, eagle3, mtp"):
        DrafterArguments("target", method="eagle4").drafter_config()


@pytest.mark.parametrize(
    "options, message",
    [
        (["--data", "nowhere.jsonl"], "--data is 'nowhere.jsonl', and there is no such file"),
        (["--target-layers", "1;2"], "--target-layers is '1;2'"),
        (["--resume"], "no checkpoint to resume from"),
        (["--num-anchors", 0], "--num-anchors is 0; it must be at least 1"),
        (["--batch-size", 0], "--batch-size is 0; it must be at least 1"),
        (["--learning-rate", -1], "--learning-rate is -1.0; it must be a positive number"),
        (["--seed", -1], "--seed is -1; it must be from 0"),
        (["--logging-steps", 0], "--logging-steps is 0.0; it must be a positive number"),
        (["--drafter-layers", 0], "--drafter-layers is 0; it must be at least 1"),
        (["--method", "eagle3", "--markov-rank", 8], "--markov-rank is 8, which is not for --method 'eagle3'; leave"),
        (["--method", "dflash", "--markov-rank", 8], "--markov-rank is 8, which is not for --method 'dflash'; leave"),
        (["--method", "mtp", "--target-layers", "0,1"], "an MTP module reads one layer, the target's last"),
        (["--step-loss-decay", 2], "`step_loss_decay` is 2.0; it must be above 0 and at most 1"),
        (["--target-layers", 9], "--target-layers is [9], out of range"),
        (["--data", "."], "--data is '.', which is a folder; give a JSON Lines file"),
        (["--output", __file__], "is a file; give a folder"),
        (["--output", ""], "--output is empty; give a folder"),
        (["--output", f"{__file__}/drafter"], f"and '{__file__}' is a file; give a folder"),
        (["--no-thinking"], "--thinking/--no-thinking is for a chat template, and the tokenizer has none"),
        (["--draft-vocab-size", 200], "--draft-vocab-size is 200; it must be from 1 (the ends of a sequence) to 101"),
        (["--epoch", 3], "There is no option `epoch`, named in the command line. Did you mean `epochs`"),
        (["--weight-decay", "much"], "`weight_decay`: invalid float value: 'much'"),
        (["--adam-beta1=0.9", "rest"], "The command line has 'rest' where an option should be"),
        (["--target-device-map", "fsdp"], "--target-device-map is 'fsdp', which needs several processes"),
        (["--target-device-map", "nowhere"], "'auto', 'balanced'"),
        (["--recipe", "./nope.yaml"], "There is no recipe './nope.yaml'"),
        (["--target", "./nope"], "There is no folder './nope'; --target takes"),
        (["--warm-start", "./nope"], "There is no folder './nope'; --warm-start takes"),
    ],
)
def test_user_errors_are_one_line(
    target_folder: Path, data: Path, tmp_path: Path, options: list[object], message: str
) -> None:
    code, text = run("--target", target_folder, "--data", data, "--output", tmp_path / "drafter", *options)
    assert code == 1
    assert message in " ".join(text.split()) and "Traceback" not in text


def test_defaults_are_those_of_the_library() -> None:
    """The command shows defaults; what counts is the library's, where nothing is given."""
    shown = {name: option.default for name, option in inspect.signature(train).parameters.items()}
    for part in (DrafterArguments, DataArguments, DSparkTrainingArguments):
        for field in dataclasses.fields(part):
            flag = FLAGS.get(field.name, f"--{field.name.replace('_', '-')}")
            name = flag.split("/")[0].removeprefix("--").replace("-", "_")
            if name in shown and field.name not in ("logging_steps", "output_dir", "target", "data_file"):
                default = getattr(shown[name], "value", shown[name])
                assert default == (None if field.default is dataclasses.MISSING else field.default), name
    assert set(OPTIONS) <= set(shown), "every flag is one of the command"


def write_recipe(path: Path, **values: Any) -> Path:
    path.write_text("".join(f"{name}: {value}\n" for name, value in values.items()), encoding="utf-8")
    return path


SMALL = {"num_hidden_layers": 1, "block_size": 3, "markov_rank": 4, "num_anchors": 4, "max_steps": 1}


def test_recipe(target_folder: Path, data: Path, tmp_path: Path) -> None:
    """The command line goes before the recipe, and either can name what the command has no flag for."""
    output = tmp_path / "drafter"
    recipe = write_recipe(
        tmp_path / "recipe.yaml",
        **SMALL,
        target=target_folder,
        data_file=data,
        target_layer_ids="[0, 2]",
        enable_confidence_head="no",
        learning_rate="2e-3",
        weight_decay="0.1",
        save_strategy="no",
        optim="sgd",
        seed="",
    )
    code, text = run(
        "--recipe", recipe, "--output", output, "--markov-rank", 6, "--adam_beta1", 0.8, "--bf16", "--use-cpu"
    )
    assert code == 0, text
    config = DSparkDrafter.from_pretrained(output).config
    assert (config.num_hidden_layers, config.block_size, config.markov_rank) == (1, 3, 6)
    assert (config.target_layer_ids, config.enable_confidence_head) == ([0, 2], False)
    arguments = json.loads((output / "training_summary.json").read_text())["arguments"]
    assert (arguments["learning_rate"], arguments["weight_decay"], arguments["seed"]) == (2e-3, 0.1, 42)
    assert arguments["bf16"] is True and arguments["max_steps"] == 1
    assert not list(output.glob("checkpoint-*"))


@pytest.mark.parametrize(
    "recipe, message",
    [
        ("max_step: 3", "There is no option `max_step`, named in the recipe '{path}'. Did you mean `max_steps` or"),
        ("max_steps: ten", "`max_steps`: invalid int value: 'ten' (in the recipe '{path}')"),
        ("max_steps: [1, 2]", "`max_steps` is ['1', '2'] in the recipe '{path}'; it takes one value"),
        ("bf16: maybe", "`bf16`: Truthy value expected"),
        ("bf16: maybe", "(in the recipe '{path}')"),
        ("", "The recipe '{path}' is empty"),
        ("target:", "--target is not given; it is needed, as an option or in the recipe"),
        ("- target", "is no mapping of options to values"),
        ("target: [", "is not YAML"),
    ],
)
def test_recipe_errors_are_one_line(tmp_path: Path, recipe: str, message: str) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(recipe)
    code, text = run("--recipe", path)
    assert code == 1
    assert message.format(path=path) in " ".join(text.split()) and "Traceback" not in text


def test_drafter_of_another_target_is_named(
    target_with_tokenizer: tuple[Path, PreTrainedTokenizerFast], tmp_path: Path
) -> None:
    folder, _ = target_with_tokenizer
    data = tmp_path / "data.jsonl"
    data.write_text('{"text": "a"}\n')
    where = ("--target", folder, "--data", data, "--output", tmp_path / "out")
    code, text = run(*where, "--warm-start", DRAFTER)
    assert code == 1
    assert f"--warm-start is {str(DRAFTER)!r}, whose drafter does not fit the target" in " ".join(text.split())
    assert "--target-layers" not in text


def test_shape_of_a_warm_start_stays_and_is_named(tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps({"input_ids": list(range(3, 40))}) + "\n")
    where = ("--target", TARGET, "--data", data, "--output", tmp_path / "out", "--max-steps", 1, "--num-anchors", 2)
    code, text = run(*where, "--warm-start", DRAFTER, "--markov-rank", 7, "--drafter-layers", 2)
    assert code == 0, text
    config = AutoDrafter.from_pretrained(tmp_path / "out").config
    rank, layers = config.markov_rank, config.num_hidden_layers
    assert rank != 7 and layers == 2
    assert f"! --markov-rank is 7; the drafter to go on from has {rank}, which stays." in text
    assert "--drafter-layers" not in text


def test_parser_of_the_example_script(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path / "recipe.yaml", target="here", data_file="rows.jsonl", markov_rank=9, use_cpu=True)
    argv = ["--recipe", str(recipe), "--output_dir", str(tmp_path)]
    argv += ["--markov-rank", "8", "--target_layer_ids", "1", "3"]
    drafter_args, data_args, training_args = RecipeParser().parse(argv)
    assert (drafter_args.target, drafter_args.markov_rank, data_args.data_file) == ("here", 8, "rows.jsonl")
    assert drafter_args.drafter_config().target_layer_ids == [1, 3]
    assert training_args.num_anchors == 512
    with pytest.raises(ValueError, match="`output_dir` is not given"):
        RecipeParser().parse(argv[:2])


@pytest.fixture
def target_with_tokenizer(
    target: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> tuple[Path, PreTrainedTokenizerFast]:
    folder = tmp_path / "target"
    target.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder, tokenizer


BAD_LINES = [
    b"",
    b"{broken",
    b'"text"',
    b'{"text": ""}',
    b'{"text": "caf\xe9"}',  # Latin-1
    b'{"text": "\\ud800"}',
    b'{"messages": []}',
    b'{"messages": [{"role": "user", "content": "hello"}]}',
    b'{"messages": [{"role": "assistant", "content": "\\ud800"}]}',
    b'{"input_ids": [5, 500]}',
    b'{"prompt": "hello"}',
]


def test_bad_data_is_counted_and_named(
    target_with_tokenizer: tuple[Path, PreTrainedTokenizerFast], tmp_path: Path
) -> None:
    """All of it before the first step; the rest is trained on."""
    data, output = tmp_path / "rows.jsonl", tmp_path / "drafter"
    good = b'{"messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "how are you"}]}'
    long = json.dumps({"input_ids": list(range(3, 100)) * 2}).encode()  # longer than the target's context of 128
    data.write_bytes(b"\n".join([good, *BAD_LINES, long, good]))
    options = [part for name, value in SMALL.items() for part in (f"--{name}", value)]
    code, text = run("--target", target_with_tokenizer[0], "--data", data, "--output", output, *options)
    assert code == 0, text
    report = json.loads((output / "training_summary.json").read_text())["data"]
    assert (report["rows"], report["examples"], report["cut"]) == (13, 3, 1)
    assert report["skipped"] == {
        "line is not JSON": 1,
        "line is not a JSON object": 1,
        "empty row": 1,
        "line is not UTF-8": 1,
        "`text` is not valid Unicode": 1,
        "no message of the assistant in `messages`": 2,
        "`messages` is not valid Unicode": 1,
        "token ids outside the target's vocabulary of 101": 1,
        f"none of the columns {ROW_KINDS}": 1,
    }
    assert report["first_skipped"]["line is not UTF-8"] == "line 6"
    assert report["tokens"] < 128 + 2 * 20


def test_empty_data_is_refused_before_the_target_is_loaded(tmp_path: Path) -> None:
    data = tmp_path / "empty.jsonl"
    data.write_text("\n \n")
    code, text = run("--target", "./nope", "--data", data, "--output", tmp_path / "drafter")
    assert code == 1 and "empty.jsonl', which has no rows: the file is empty" in text


def test_tokenizer_of_another_model_is_refused(
    target_with_tokenizer: tuple[Path, PreTrainedTokenizerFast], data: Path, tmp_path: Path
) -> None:
    folder, tokenizer = target_with_tokenizer
    vocabulary = json.loads(tokenizer.backend_tokenizer.to_str())
    vocabulary["model"]["vocab"] |= {f"word{number}": number for number in range(len(tokenizer), 150)}
    backend = type(tokenizer.backend_tokenizer).from_str(json.dumps(vocabulary))
    other = PreTrainedTokenizerFast(tokenizer_object=backend)
    other.save_pretrained(folder)
    code, text = run("--target", folder, "--data", data, "--output", tmp_path / "drafter")
    assert code == 1
    assert "The tokenizer has 150 tokens and the target only 101: it belongs to another model" in text
