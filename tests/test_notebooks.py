"""The notebooks: committed as they ran, opened on Colab by their badge, and run once more here."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import nbformat
import pytest

from tests.hub.stand_in import TOKEN, USER, StandInHub

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "examples" / "notebooks"
NAMES = ["generate", "train", "calibrate_and_schedule", "push"]


@pytest.fixture
def runner(monkeypatch, tmp_path):
    """`run` of scripts/run_notebooks.py, for kernels that find the package as this process does."""
    spec = importlib.util.spec_from_file_location("run_notebooks", ROOT / "scripts" / "run_notebooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("PYTHONWARNINGS", "")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(tmp_path)
    return module.run


def printed(notebook) -> str:
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    return "".join(output.get("text", "") for output in outputs)


def test_every_notebook_is_known():
    assert sorted(path.stem for path in FOLDER.glob("*.ipynb")) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_committed_notebook(name):
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    first, second = notebook.cells[:2]
    assert f"/blob/main/examples/notebooks/{name}.ipynb)" in first.source and "colab-badge.svg" in first.source
    assert "%pip install" in second.source
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1)), "run scripts/run_notebooks.py"
    outputs = [output for cell in code for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error"]
    assert str(Path.home()) not in printed(notebook)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_notebook_runs(name, runner, monkeypatch, tmp_path):
    with StandInHub() as hub:
        settings = {"HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1", "HF_HOME": str(tmp_path)}
        for key, value in {**settings, "HF_HUB_OFFLINE": "0" if name == "push" else "1"}.items():
            monkeypatch.setenv(key, value)
        text = printed(runner(FOLDER / f"{name}.ipynb"))
        pushed = list(hub.repositories)
    if name == "push":
        assert pushed == [f"{USER}/my-drafter"]
        assert "mean accepted length" in text
