"""How a drafter comes into `generate`, and that nothing else in `generate` changes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import GenerationConfig, GenerationMixin
from transformers.generation.streamers import BaseStreamer

import dspark_hf
from dspark_hf import DSparkConfig, _compat, get_drafter
from dspark_hf.generation.settings import GENERATION_OPTIONS

from ..parity.fixtures import load_drafter, load_target, load_tensors
from ..tiny import tiny_prompt, tiny_target

CASE = "qwen3-dspark-vanilla"
NEW_TOKENS = 24


@pytest.fixture(autouse=True)
def installed():
    yield
    dspark_hf.install()


@pytest.fixture(scope="module")
def target():
    model = load_target(CASE)
    model.generation_config.eos_token_id = None
    return model


@pytest.fixture
def drafter():
    return load_drafter(CASE)


@pytest.fixture(scope="module")
def prompt():
    return load_tensors(CASE)["input_ids"]


def generate(target, prompt, **options):
    return target.generate(input_ids=prompt, **{"max_new_tokens": NEW_TOKENS, "do_sample": False} | options)


def wrapped_methods():
    return {name: getattr(GenerationMixin, name) for name in _compat.WRAPPED_METHODS}


def test_install_and_uninstall():
    wrapped = wrapped_methods()
    originals = {name: method._dspark_original for name, method in wrapped.items()}
    assert not any(hasattr(method, "_dspark_original") for method in originals.values())
    assert all(method.__module__ == GenerationMixin.__module__ for method in originals.values())
    dspark_hf.install()
    assert wrapped_methods() == wrapped
    for _ in range(2):
        dspark_hf.uninstall()
        assert wrapped_methods() == originals
        assert not any(hasattr(GenerationConfig, name) for name in GENERATION_OPTIONS)
    for _ in range(2):
        dspark_hf.install()
        again = wrapped_methods()
        assert {name: method._dspark_original for name, method in again.items()} == originals
        assert all(getattr(GenerationConfig, name) is None for name in GENERATION_OPTIONS)


def test_wrappers_look_like_the_originals():
    for name, method in wrapped_methods().items():
        assert method.__name__ == name
        assert method.__doc__ == method._dspark_original.__doc__


def test_uninstalled_generate_refuses_our_options(target, prompt, drafter):
    expected = generate(target, prompt)
    dspark_hf.uninstall()
    assert generate(target, prompt).tolist() == expected.tolist()
    with pytest.raises(ValueError, match="dspark_num_draft_tokens"):
        generate(target, prompt, dspark_num_draft_tokens=2)
    dspark_hf.install()
    assert generate(target, prompt, assistant_model=drafter, dspark_num_draft_tokens=2).tolist() == expected.tolist()
    assert {entry.drafted for entry in drafter.last_stats.rounds} <= {0, 2}


@pytest.mark.parametrize("sampled", [False, True])
def test_other_assistants_are_left_alone(sampled, monkeypatch):
    """A small model as assistant gives the same, draft for draft, with this package and without."""
    model = tiny_target("qwen3")
    model.generation_config.eos_token_id = None
    assistant = tiny_target("qwen3", num_hidden_layers=2)
    assistant.generation_config.eos_token_id = None
    ids = tiny_prompt(10)
    calls = []
    forward = type(model).forward

    def counted(self, input_ids=None, **kwargs):
        calls.append((self is assistant, input_ids.shape[1]))
        return forward(self, input_ids=input_ids, **kwargs)

    monkeypatch.setattr(type(model), "forward", counted)
    outcomes = []
    for uninstall in (False, True):
        if uninstall:
            dspark_hf.uninstall()
        calls.clear()
        torch.manual_seed(0)
        output = generate(model, ids, assistant_model=assistant, do_sample=sampled)
        outcomes.append((output.tolist(), list(calls)))
    assert outcomes[0] == outcomes[1]
    assert any(is_assistant for is_assistant, _ in calls)
    assert any(length > 1 and not is_assistant for is_assistant, length in calls[1:])


@pytest.mark.parametrize("with_drafter", [False, True])
def test_prompt_lookup_is_left_alone(target, prompt, drafter, with_drafter):
    options = {"assistant_model": drafter} if with_drafter else {}
    output = generate(target, prompt, prompt_lookup_num_tokens=3, **options)
    assert output.tolist() == generate(target, prompt).tolist()
    assert drafter.last_stats is None


def test_drafter_comes_before_speculation_type(target, prompt, drafter):
    output = generate(target, prompt, assistant_model=drafter, speculation_type="dflash")
    assert output.tolist() == generate(target, prompt).tolist()
    assert drafter.last_stats.mean_accepted_length > 3


class Recorder(BaseStreamer):
    """Keeps what it is given, in order."""

    def __init__(self):
        self.events = []

    def put(self, value):
        self.events.append(value.tolist())

    def end(self):
        self.events.append("end")


@pytest.mark.parametrize("uninstalled", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dspark_num_draft_tokens": 3},
        {"dspark_confidence_threshold": 0.7},
        {"dspark_num_draft_tokens": 5, "dspark_confidence_threshold": 0.5, "do_sample": True, "top_k": 20},
        {"repetition_penalty": 1.3, "return_dict_in_generate": True, "output_scores": True},
    ],
)
def test_custom_generate(target, prompt, drafter, options, uninstalled):
    """The same tokens in the same rounds on both routes, also with nothing installed."""
    outcomes = []
    for route in ("assistant_model", "custom_generate"):
        if route == "custom_generate" and uninstalled:
            dspark_hf.uninstall()
        helper = drafter if route == "assistant_model" else dspark_hf.custom_generate(drafter)
        recorder = Recorder()
        stream = {"streamer" if route == "assistant_model" else "dspark_streamer": recorder}
        torch.manual_seed(0)
        output = generate(target, prompt, **{route: helper}, **stream, **options)
        rounds = [(entry.drafted, entry.proposed, entry.accepted) for entry in drafter.last_stats.rounds]
        if options.get("return_dict_in_generate"):
            rounds.append(torch.stack(output.scores).tolist())
            output = output.sequences
        # `generate` itself shows a streamer the prompt, which it cannot do for one it does not know.
        events = recorder.events[1:] if route == "assistant_model" else recorder.events
        assert events == [*([token] for token in output[0, prompt.shape[1] :].tolist()), "end"]
        outcomes.append((output.tolist(), rounds))
    assert outcomes[0] == outcomes[1]
    assert len(outcomes[0][1]) < NEW_TOKENS - 1


def test_options_in_a_generation_config_for_custom_generate(target, prompt, drafter):
    config = GenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=False, dspark_num_draft_tokens=2)
    dspark_hf.uninstall()
    target.generate(input_ids=prompt, custom_generate=dspark_hf.custom_generate(drafter), generation_config=config)
    assert {entry.drafted for entry in drafter.last_stats.rounds} <= {0, 2}


@pytest.mark.parametrize("given", ["org/drafter", Path("some/folder")])
def test_assistant_must_be_loaded(target, prompt, given):
    with pytest.raises(TypeError, match=f"`assistant_model` is '{given}'; give a loaded model"):
        generate(target, prompt, assistant_model=given)


@pytest.mark.parametrize("given", [5, ["drafter"], DSparkConfig(), torch.nn.Linear(2, 2)])
def test_assistant_must_be_a_model(target, prompt, given):
    with pytest.raises(TypeError, match=f"`assistant_model` is .*, of type {type(given).__name__}; give a loaded"):
        generate(target, prompt, assistant_model=given)


@pytest.mark.parametrize("given", [None, "drafter", DSparkConfig()])
def test_custom_generate_wants_a_drafter(given):
    with pytest.raises(TypeError, match=f"is a {type(given).__name__}; give a drafter, such as a"):
        dspark_hf.custom_generate(given)


def test_custom_generate_refuses_a_target():
    with pytest.raises(TypeError, match="Qwen3ForCausalLM"):
        dspark_hf.custom_generate(tiny_target("qwen3"))


FRESH_PROCESS = """
import sys
import torch
import dspark_hf
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
config, drafter = AutoConfig.from_pretrained(sys.argv[2]), AutoModel.from_pretrained(sys.argv[2])
assert type(config) is dspark_hf.DSparkConfig and type(drafter) is dspark_hf.DSparkDrafter
target = AutoModelForCausalLM.from_pretrained(sys.argv[1])
ids = torch.arange(5, 15)[None]
options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
output = target.generate(input_ids=ids, assistant_model=drafter, **options)
assert output.tolist() == target.generate(input_ids=ids, **options).tolist()
assert drafter.last_stats.rounds
print("served")
"""


def test_fresh_process(tmp_path):
    model = tiny_target("qwen3", num_hidden_layers=2)
    model.save_pretrained(tmp_path / "target")
    helper = get_drafter(model, DSparkConfig(block_size=3, num_hidden_layers=1, markov_rank=4))
    helper.save_pretrained(tmp_path / "drafter")
    command = [sys.executable, "-c", FRESH_PROCESS, str(tmp_path / "target"), str(tmp_path / "drafter")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["served"]
