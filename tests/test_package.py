"""The package as it is published: source archive, wheel, and an environment that has nothing else of ours."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PROBE = """
import json, sys, dspark_hf
from importlib.metadata import version
from importlib.resources import files
from dspark_hf.embedded import load_embedded_pair
target, tokenizer, drafter = load_embedded_pair()
inputs = tokenizer("class Queue:", return_tensors="pt")
options = {"max_new_tokens": 8, "do_sample": False}
plain = target.generate(**inputs, **options)
drafted = target.generate(**inputs, assistant_model=drafter, **options)
print(json.dumps({
    "file": dspark_hf.__file__,
    "version": version("dspark-hf"),
    "typed": files("dspark_hf").joinpath("py.typed").is_file(),
    "same": drafted.tolist() == plain.tolist(),
    "rounds": drafter.last_stats.num_rounds,
}))
"""

pytestmark = pytest.mark.slow


def run(*command: str | Path, **environment: str) -> str:
    """Output of a command that sees neither this checkout nor the settings of this run."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, env={**own, **environment}, cwd=ROOT.anchor
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Source archive, and the wheel that is built from it."""
    pytest.importorskip("build", reason="build is not installed")
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT)
    (source,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return source, wheel


@pytest.fixture(scope="module")
def environment(archives: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Programs of a new environment, with the wheel, and with this one's packages but ours."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False)
    programs = folder / ("Scripts" if os.name == "nt" else "bin")
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
    # A line of a .pth file is a place to look for modules; .pth files in that place (our checkout's) are not read.
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    install = ("install", "--no-deps", "--no-index", "--quiet", "--disable-pip-version-check", archives[1])
    run(sys.executable, "-m", "pip", "--python", programs / "python", *install)
    return programs


def test_everything_of_the_package_is_in_the_wheel(archives: tuple[Path, Path]) -> None:
    source, wheel = archives
    files = {
        path.relative_to(ROOT / "src").as_posix()
        for path in (ROOT / "src" / "dspark_hf").rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    with zipfile.ZipFile(wheel) as content:
        names = set(content.namelist())
    assert files <= names
    assert {Path(name).parts[0].split("-")[0] for name in names} == {"dspark_hf"}
    assert any(name.endswith("licenses/NOTICE") for name in names)
    with tarfile.open(source) as content:
        inside = {name.partition("/")[2] for name in content.getnames()}
    assert {f"src/{name}" for name in files} | {"README.md", "LICENSE", "NOTICE", "pyproject.toml"} <= inside


def test_the_wheel_works_alone(environment: Path) -> None:
    found = json.loads(run(environment / "python", "-c", PROBE, HF_HUB_OFFLINE="1").splitlines()[-1])
    assert Path(found["file"]).is_relative_to(environment.parent), "not the checkout"
    assert found["typed"] and found["same"]
    assert 0 < found["rounds"] <= 8
    text = run(environment / "dspark", "--help")
    assert all(command in text for command in ("generate", "train", "calibrate", "eval", "convert"))
