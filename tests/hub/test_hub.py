"""Pushing to a stand-in for the Hub and loading from it, by the real client in fresh processes."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from safetensors.torch import load

from dspark_hf import AutoDrafter, DSparkConfig, Eagle3Config, MTPConfig, get_drafter
from dspark_hf.embedded import DRAFTER, TARGET
from dspark_hf.hub import CardRecipe, save_repository
from dspark_hf.hub.card import MARK
from tests.hub.stand_in import TOKEN, Repository, StandInHub
from tests.tiny import tiny_target

SOURCE = Path(__file__).resolve().parents[2] / "src"
LOAD_TARGET = f"""
from transformers import AutoModelForCausalLM, AutoTokenizer
target = AutoModelForCausalLM.from_pretrained({str(TARGET)!r})
tokenizer = AutoTokenizer.from_pretrained({str(TARGET)!r})
inputs = tokenizer("class Queue:", return_tensors="pt")
plain = target.generate(**inputs, max_new_tokens=24, do_sample=False)
"""


def run(
    hub: StandInHub,
    home: Path,
    code: str,
    *arguments: str,
    prelude: str = "",
    installed: bool = True,
    check: bool = True,
    **env: str,
) -> str:
    """What a fresh process prints; with `installed=False` one that cannot import `dspark_hf`."""
    settings = {
        **os.environ,
        "HF_ENDPOINT": hub.url,
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HOME": str(home),
        "HF_TOKEN": TOKEN,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(SOURCE),
    }
    settings = {name: value for name, value in (settings | env).items() if value}
    if not installed:
        prelude = f"import sys\nsys.modules['dspark_hf'] = None\n{prelude}"  # an import then fails
    command = [sys.executable, "-c", prelude + textwrap.dedent(code), *arguments]
    options = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True, "timeout": 300, "check": False}
    done = subprocess.run(command, env=settings, **options)
    if check:
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout
    assert done.returncode != 0, done.stdout
    return done.stdout + done.stderr


def push(hub: StandInHub, home: Path, *arguments: str, check: bool = True, **env: str) -> str:
    return run(hub, home, "from dspark_hf.cli import main; main()", "push", *arguments, check=check, **env)


@pytest.fixture(scope="module")
def hub():
    with StandInHub() as server:
        yield server


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A cache of the Hub."""
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def pushed(hub, home):
    """The embedded drafter in `org/drafter`, pushed in Python."""
    code = f"""
        from dspark_hf import AutoDrafter
        from dspark_hf.hub import CardRecipe
        drafter = AutoDrafter.from_pretrained({str(DRAFTER)!r})
        recipe = CardRecipe(license="apache-2.0", language="en")
        commit = drafter.push_to_hub("org/drafter", evidence={str(DRAFTER)!r}, recipe=recipe, tags=["tiny"])
        print(commit.oid)
    """
    return run(hub, home, code).split()[-1]


# --- pushing ---------------------------------------------------------------------------------------------------------


def test_what_is_pushed(hub, pushed):
    files = hub.repositories["org/drafter"].files()
    assert {"README.md", "config.json", "model.safetensors", "training_summary.json", "modeling_dspark.py"} <= set(
        files
    )
    assert {"custom_generate/generate.py", "custom_generate/requirements.txt"} <= set(files)
    assert len(hub.repositories["org/drafter"].commits) == 2  # the empty one and one more
    theirs = load(files["model.safetensors"])
    ours = load((DRAFTER / "model.safetensors").read_bytes())
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[name], ours[name]) for name in ours)
    card = files["README.md"].decode()
    assert 'custom_generate="org/drafter"' in card
    assert "license: apache-2.0" in card and "- tiny" in card and "org/drafter" in card
    assert json.loads(files["config.json"])["auto_map"]["AutoModel"] == "modeling_dspark.DSparkDrafter"


def test_interrupted_upload(home, tmp_path):
    with StandInHub(breaks=10**6) as hub:
        # The client waits between its tries; without a rest the test need not.
        code = f"""
            import time
            time.sleep = lambda seconds: None
            from dspark_hf import AutoDrafter
            AutoDrafter.from_pretrained({str(DRAFTER)!r}).push_to_hub("org/broken")
        """
        output = run(hub, tmp_path, code, check=False)
        assert "OSError: The upload to 'org/broken' broke off" in output
        assert "push again to go on" in output
        assert list(hub.repositories["org/broken"].files()) == [".gitattributes"]
        hub.breaks = 0
        push(hub, tmp_path, str(DRAFTER), "org/broken")
        assert "model.safetensors" in hub.repositories["org/broken"].files()
        push(hub, tmp_path, str(DRAFTER), "org/broken", "--revision", "next", "--message", "Again")
        assert hub.uploads == 1  # what is there is not sent again
        assert "model.safetensors" in hub.repositories["org/broken"].files("next")


def test_card_on_the_hub_stays(hub, home, tmp_path):
    hub.repositories["org/mine"] = Repository()
    hub.repositories["org/mine"].commit("main", {"README.md": b"---\nlicense: mit\n---\n# Mine\n"})
    push(hub, tmp_path, str(DRAFTER), "org/mine")
    files = hub.repositories["org/mine"].files()
    assert files["README.md"].endswith(b"# Mine\n")
    assert "model.safetensors" in files


def test_pull_request(hub, tmp_path):
    hub.repositories["org/other"] = Repository()
    assert "/discussions/1" in push(hub, tmp_path, str(DRAFTER), "org/other", "--create-pr")
    assert "model.safetensors" not in hub.repositories["org/other"].files()


BAD_PUSHES = [
    ((str(DRAFTER), "org/new"), "", "Nothing was committed"),
    ((str(DRAFTER), "foreign/new"), TOKEN, "don't have the rights"),
    ((str(DRAFTER), "a/b/c"), TOKEN, "REPO_ID is 'a/b/c', which is no name of a repository"),
    ((str(DRAFTER), ""), TOKEN, "REPO_ID is '', which is no name of a repository"),
    ((str(TARGET), "org/new"), TOKEN, "not a drafter"),
    ((str(DRAFTER), "org/new", "--card", "none.yaml"), TOKEN, "--card is 'none.yaml', and there is no such file"),
    (("nowhere/here", "org/new"), TOKEN, "There is no folder 'nowhere/here', and it cannot be read from the Hub"),
]


def test_errors_of_pushing(hub, tmp_path):
    code = f"""
        import json, os
        from typer.testing import CliRunner
        from dspark_hf.cli import app
        for arguments, token, _ in {BAD_PUSHES!r}:
            os.environ["HF_TOKEN"] = token
            result = CliRunner().invoke(app, ["push", *arguments])
            print(json.dumps([result.exit_code, " ".join(result.stderr.split())]))
    """
    results = [json.loads(line) for line in run(hub, tmp_path, code).splitlines()]
    for (_, _, message), (status, output) in zip(BAD_PUSHES, results, strict=True):
        assert status == 1 and "Error:" in output and message in output, (message, output)
    assert "org/new" not in hub.repositories and "foreign/new" not in hub.repositories


# --- loading ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_nothing_need_be_installed(hub, home, pushed):
    """`AutoModel` and `custom_generate` by the code in the repository alone; then once more from the cache."""
    code = """
        import torch
        from transformers import AutoModel, TextStreamer
        drafter = AutoModel.from_pretrained("org/drafter", trust_remote_code=True)
        assert type(drafter).__module__.startswith("transformers_modules."), type(drafter)
        options = {"custom_generate": "org/drafter", "trust_remote_code": True, "max_new_tokens": 24}
        drafted = target.generate(**inputs, **options, do_sample=False)
        assert torch.equal(plain, drafted)
        streamed = target.generate(**inputs, **options, do_sample=False, streamer=TextStreamer(tokenizer))
        assert torch.equal(plain, streamed)
        prompts = ["import os", "class Queue:\\n    def"]
        batch = tokenizer(prompts, padding=True, padding_side="left", return_tensors="pt")
        together = target.generate(**batch, **options, do_sample=False, dspark_num_draft_tokens=3)
        assert torch.equal(together, target.generate(**batch, max_new_tokens=24, do_sample=False))
        full = target.generate(**inputs, **options, do_sample=True, return_dict_in_generate=True, output_scores=True)
        assert len(full.scores) == full.sequences.shape[1] - inputs.input_ids.shape[1]
        try:
            target.generate(**inputs, assistant_model=drafter, max_new_tokens=4)
        except AttributeError as error:
            assert "custom_generate=" in str(error), error
        else:
            raise SystemExit("generate took a drafter that it does not know")
        try:
            target.generate(**inputs, custom_generate="org/drafter", assistant_model=drafter, trust_remote_code=True)
        except ValueError as error:
            assert "`assistant_model`" in str(error), error
        else:
            raise SystemExit("assistant_model was passed over")
        print("done")
    """
    assert run(hub, home, code, prelude=LOAD_TARGET, installed=False).endswith("done\n")
    before = len(hub.requests)
    assert run(hub, home, code, prelude=LOAD_TARGET, installed=False, HF_HUB_OFFLINE="1").endswith("done\n")
    assert len(hub.requests) == before


def test_code_is_not_run_without_trust(hub, home, pushed, tmp_path):
    code = "from transformers import AutoModel; AutoModel.from_pretrained('org/drafter')"
    output = run(hub, tmp_path, code, installed=False, check=False)
    assert "trust_remote_code=True" in output
    code = "target.generate(**inputs, custom_generate='org/drafter')"
    output = run(hub, tmp_path, code, prelude=LOAD_TARGET, installed=False, check=False)
    assert "trust_remote_code=True" in output


@pytest.mark.slow
def test_loading_with_the_package(hub, home, pushed, tmp_path):
    """Revision, subfolder, dtype, device map, cache; the package's classes, whatever code lies there."""
    repository = hub.repositories["org/drafter"]
    first = repository.branches["main"]
    config = json.loads(repository.files()["config.json"])
    hostile = {"modeling_dspark.py": b"raise SystemExit('ran')"}
    weights = repository.files()["model.safetensors"]
    inside = {"inside/config.json": repository.files()["config.json"], "inside/model.safetensors": weights}
    later = json.dumps({**config, "enable_thinking": True}).encode()
    repository.commit("main", {"config.json": later, **hostile, **inside})
    code = f"""
        import torch
        from transformers import AutoModel
        import dspark_hf
        from dspark_hf import AutoDrafter, DSparkDrafter
        for cls in (AutoDrafter, AutoModel):
            drafter = cls.from_pretrained("org/drafter")
            assert type(drafter) is DSparkDrafter and drafter.config.enable_thinking is True
            assert cls.from_pretrained("org/drafter", revision="{first}").config.enable_thinking is None
            assert cls.from_pretrained("org/drafter", subfolder="inside").config.enable_thinking is None
            loaded = cls.from_pretrained("org/drafter", dtype=torch.bfloat16, device_map="cpu")
            assert loaded.dtype == torch.bfloat16
            cached = cls.from_pretrained("org/drafter", local_files_only=True)
        assert type(AutoModel.from_pretrained("org/drafter", trust_remote_code=True)) is DSparkDrafter
        drafted = target.generate(**inputs, assistant_model=drafter, max_new_tokens=24, do_sample=False)
        assert torch.equal(plain, drafted) and drafter.last_stats.mean_accepted_length > 1.5
        options = {{"custom_generate": "org/drafter", "revision": "{first}", "trust_remote_code": True}}
        assert torch.equal(plain, target.generate(**inputs, **options, max_new_tokens=24, do_sample=False))
        print("done")
    """
    try:
        assert run(hub, home, code, prelude=LOAD_TARGET).endswith("done\n")
    finally:
        repository.branches["main"] = first


def test_private_repository(hub, tmp_path):
    push(hub, tmp_path, str(DRAFTER), "org/secret", "--private")
    assert hub.repositories["org/secret"].private
    code = "from dspark_hf import AutoDrafter; print(type(AutoDrafter.from_pretrained('org/secret')).__name__)"
    output = run(hub, tmp_path / "stranger", code, check=False, HF_TOKEN="")
    assert "OSError: There is no folder 'org/secret', and it cannot be read from the Hub" in output
    assert "token" in output.splitlines()[-1] or "token" in output[-600:]
    assert run(hub, tmp_path / "owner", code).endswith("DSparkDrafter\n")


# --- hostile repositories --------------------------------------------------------------------------------------------


def config_with(**changes) -> bytes:
    return json.dumps({**json.loads((DRAFTER / "config.json").read_text(encoding="utf-8")), **changes}).encode()


class Evil:
    """Makes a file when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


def index(names: dict[str, str]) -> bytes:
    return json.dumps({"metadata": {}, "weight_map": names}).encode()


@pytest.mark.slow
def test_hostile_repositories(hub, tmp_path):
    (tmp_path / "outside.safetensors").write_bytes((DRAFTER / "model.safetensors").read_bytes())
    names = list(load((DRAFTER / "model.safetensors").read_bytes()))
    mark = tmp_path / "ran"
    evil = pickle.dumps(Evil(str(mark)))
    repositories = {
        "evil/pickle": {"config.json": config_with(), "pytorch_model.bin": evil},
        "evil/disguised": {"config.json": config_with(), "model.safetensors": evil},
        "evil/upwards": {
            "config.json": config_with(),
            "model.safetensors.index.json": index(dict.fromkeys(names, "../../outside.safetensors")),
            "../../outside.safetensors": b"",
        },
        "evil/absolute": {
            "config.json": config_with(),
            "model.safetensors.index.json": index(dict.fromkeys(names, str(tmp_path / "outside.safetensors"))),
        },
        "evil/code": {
            "config.json": config_with(auto_map={"AutoModel": "evil.Evil", "AutoConfig": "evil.Evil"}),
            "evil.py": f"open({str(mark)!r}, 'w')".encode(),
            "model.safetensors": (DRAFTER / "model.safetensors").read_bytes(),
        },
        "evil/reference": {
            "config.json": config_with(auto_map={"AutoModel": "../../../evil.Evil"}),
            "model.safetensors": (DRAFTER / "model.safetensors").read_bytes(),
        },
    }
    for name, files in repositories.items():
        hub.repositories[name] = Repository()
        hub.repositories[name].commit("main", files)
    code = f"""
        from transformers import AutoModel
        from dspark_hf import AutoDrafter
        for name in {list(repositories)!r}:
            for cls in (AutoDrafter, AutoModel):
                try:
                    print(name, type(cls.from_pretrained(name)).__module__)
                except (OSError, ValueError) as error:
                    print(name, "refused")
    """
    found = run(hub, tmp_path / "home", code).splitlines()
    assert found == [
        *["evil/pickle refused"] * 2,
        *["evil/disguised refused"] * 2,
        *["evil/upwards refused"] * 2,
        *["evil/absolute refused"] * 2,
        *["evil/code dspark_hf.models.modeling_dspark"] * 2,
        *["evil/reference dspark_hf.models.modeling_dspark"] * 2,
    ]
    assert not mark.exists()
    written = [path for path in tmp_path.rglob("*outside*") if path != tmp_path / "outside.safetensors"]
    assert not written


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/passwd", "a/b.safetensors", "..\\x", "", 3])
def test_weights_outside_a_folder(tmp_path, name):
    folder = tmp_path / "drafter"
    folder.mkdir()
    (folder / "config.json").write_bytes(config_with())
    (folder / "model.safetensors.index.json").write_bytes(index({"norm.weight": name}))
    with pytest.raises(OSError, match="no name of a file beside"):
        AutoDrafter.from_pretrained(folder)


# --- folders ---------------------------------------------------------------------------------------------------------


def test_repository_in_a_folder(tmp_path):
    target = tiny_target("qwen3")
    drafter = get_drafter(target)
    drafter.config.target_name_or_path = "/home/somebody/target"
    evidence = tmp_path / "evidence"
    evidence.mkdir()
    summary = {"target": str(tmp_path), "parameters": 1, "steps": 2, "data": {"examples": 1, "tokens": 2, "chats": 1}}
    summary |= {"arguments": {"learning_rate": 0.1}, "metrics": {}}
    (evidence / "training_summary.json").write_text(json.dumps(summary), encoding="utf-8")
    place = tmp_path / "repository"
    save_repository(drafter, place, evidence=evidence, recipe=CardRecipe(base_model="org/target"), repo_id="org/d")
    assert AutoDrafter.from_pretrained(place).config.target_name_or_path == "org/target"
    everything = "".join(path.read_text(encoding="utf-8") for path in place.glob("*.[jm][sd]*"))
    assert str(tmp_path) not in everything and "somebody" not in everything  # folders are nobody's business
    assert MARK in (place / "README.md").read_text(encoding="utf-8")
    without = tmp_path / "without"
    save_repository(drafter, without, code=False)
    assert not list(without.rglob("*.py"))
    assert "auto_map" not in json.loads((without / "config.json").read_text(encoding="utf-8"))
    with pytest.raises(ValueError, match="which is not empty"):
        save_repository(drafter, place)
    with pytest.raises(ValueError, match="`evidence` is 'nowhere'"):
        save_repository(drafter, tmp_path / "new", evidence="nowhere")
    with pytest.raises(TypeError, match="`drafter` is a Qwen3ForCausalLM"):
        save_repository(target, tmp_path / "new")


CONFIGS = {"dspark": DSparkConfig(), "eagle3": Eagle3Config(), "mtp": MTPConfig(block_size=2)}


@pytest.mark.slow
def test_every_kind_travels(tmp_path):
    """Drafters of each kind, by the code in their folders."""
    target = tiny_target("gemma3")
    target.save_pretrained(tmp_path / "target")
    for name, config in CONFIGS.items():
        save_repository(get_drafter(target, config), tmp_path / name)
    code = f"""
        import sys
        from pathlib import Path
        import torch
        from transformers import AutoModel, AutoModelForCausalLM
        folder = Path(sys.argv[1])
        target = AutoModelForCausalLM.from_pretrained(folder / "target")
        ids = torch.arange(3, 60)[None]
        plain = target.generate(ids, max_new_tokens=24, do_sample=False)
        for name in {list(CONFIGS)!r}:
            drafter = AutoModel.from_pretrained(folder / name, trust_remote_code=True)
            assert type(drafter).__module__.startswith("transformers_modules."), type(drafter)
            options = {{"custom_generate": str(folder / name), "trust_remote_code": True}}
            assert torch.equal(plain, target.generate(ids, max_new_tokens=24, do_sample=False, **options)), name
        print("done")
    """
    with StandInHub() as hub:
        assert run(hub, tmp_path, code, str(tmp_path), installed=False).endswith("done\n")
        assert not hub.requests


def test_repository_in_a_folder_by_command(tmp_path):
    with StandInHub() as hub:
        push(hub, tmp_path, str(DRAFTER), "org/drafter", "--folder", str(tmp_path / "made"), "--no-code")
        assert not hub.requests
    assert (tmp_path / "made" / "README.md").is_file()
    assert not (tmp_path / "made" / "custom_generate").exists()
