"""`dspark profile`: what it measures, where it saves it, and how it fails."""

from __future__ import annotations

import importlib.util
import json

import pytest

from dspark_hf import AutoDrafter
from dspark_hf.evaluation.plots import can_plot
from dspark_hf.generation.capacity import CapacityProfile, find_profile, target_identity

from .test_commands import make_drafter, make_target, run, save_pair

GAMMA = 3


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A saved pair, and a drafter of another target."""
    root = tmp_path_factory.mktemp("pair")
    save_pair(root)
    make_drafter(make_target(hidden_size=32)).save_pretrained(root / "other_drafter")
    return root


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A cache folder that does not exist yet."""
    monkeypatch.setenv("DSPARK_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def profile(folders, *flags, drafter=None, target="target", columns=400):
    pair = ["--target", folders / target, *(["--drafter", folders / drafter] if drafter else [])]
    options = ["--max-rows", 1, "--context", 16, "--repeats", 2, "--device", "cpu"]
    return run("profile", *pair, *options, *flags, columns=columns)


def test_with_a_drafter(folders, cache, tmp_path):
    figure = ("--figure", tmp_path / "capacity.png") if can_plot() else ()
    result = profile(folders, "--context", 24, *figure, drafter="drafter")
    assert result.exit_code == 0, result.output
    found = find_profile(make_target(), AutoDrafter.from_pretrained(folders / "drafter"))
    assert (found.contexts, found.rows, found.lengths) == ((16, 24), (1,), tuple(range(1, GAMMA + 2)))
    assert found.draft.counts == (1, GAMMA)
    (path,) = cache.iterdir()
    for words in ("context 16", "context 24", "draft 3", f"The profile is in {path}.", found.description):
        assert words in result.output
    assert "give --drafter" not in result.output
    # Numbers of the first line of the first table.
    line = next(line for line in result.output.splitlines() if line.split()[:1] == ["1"]).split()
    assert [float(cell) for cell in line[1:5]] == pytest.approx(
        [1000 * seconds for seconds in found.verify_seconds[0][0]], abs=0.5
    )
    if can_plot():
        assert (tmp_path / "capacity.png").read_bytes().startswith(b"\x89PNG")


def test_without_a_drafter_to_a_file(folders, cache, tmp_path):
    output = tmp_path / "new" / "profile.json"
    result = profile(folders, "--output", output, "--lengths", 2, columns=80)
    assert result.exit_code == 0, result.output
    assert "Scheduling needs to know what drafts cost as well: give --drafter." in result.output
    saved = CapacityProfile.load(output)
    assert saved.lengths == (1, 2)
    assert saved.draft is None
    assert json.loads(output.read_text(encoding="utf-8"))["measured_on"] == target_identity(make_target())
    assert not cache.exists()


def test_default_context(folders, tmp_path):
    output = tmp_path / "profile.json"
    flags = ["--lengths", 1, "--max-rows", 1, "--repeats", 1, "--device", "cpu", "--output", output]
    result = run("profile", "--target", folders / "target", *flags)
    assert result.exit_code == 0, result.output
    assert CapacityProfile.load(output).contexts == (128,)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--max-rows", 0], "--max-rows is 0"),
        (["--lengths", 0], "--lengths is 0"),
        (["--context", 0], "--context is [16, 0]"),
        (["--repeats", 0], "--repeats is 0"),
        (["--dtype", "float8"], "--dtype is 'float8'"),
        (["--output", "."], "--output is '.', which is a folder"),
        (["--figure", "."], "--figure is '.', which is a folder"),
        (["--figure", "capacity.txt"], "its ending must be one of .pdf, .png, .svg"),
        (["--figure", "absent/capacity.png"], "in a folder that does not exist"),
    ],
    ids=str,
)
def test_said_before_anything_is_loaded(folders, flags, says):
    assert_one_line(profile(folders, *flags, target="absent"), says)


def test_figure_without_matplotlib(folders, tmp_path, monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "matplotlib" else find_spec(name, *rest)
    )
    assert_one_line(profile(folders, "--figure", tmp_path / "capacity.png", target="absent"), "needs matplotlib")


@pytest.mark.parametrize(
    ("flags", "models", "says"),
    [
        (["--context", 510], {}, "--context has 510"),
        (["--device", "nowhere"], {}, "--device is 'nowhere'"),
        ([], {"target": "absent"}, "absent'; --target takes a folder"),
        ([], {"drafter": "absent"}, "absent'; --drafter takes a folder"),
        ([], {"target": "drafter"}, "is a drafter, not a target"),
        ([], {"drafter": "other_drafter"}, "`hidden_size` is 32"),
    ],
    ids=str,
)
def test_wrong_models(folders, cache, flags, models, says):
    assert_one_line(profile(folders, *flags, **models), says)
    assert not cache.exists()


def assert_one_line(result, says):
    assert result.exit_code == 1, result.output
    lines = [line for line in result.stderr.splitlines() if line.startswith("Error: ")]
    assert len(lines) == 1, result.stderr
    assert says in lines[0]
    assert "Traceback" not in result.output
