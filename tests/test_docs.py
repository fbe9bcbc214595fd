"""The documentation builds and has all that is public."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.slow
def test_documentation(tmp_path):
    script = ROOT / "scripts" / "build_docs.py"
    environment = {"PYTHONPATH": str(ROOT / "src"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "Warn" not in done.stderr, done.stderr[-2000:]
    pages = {
        path.relative_to(tmp_path).with_suffix("").as_posix().replace("/", ".") for path in tmp_path.rglob("*.html")
    }
    for name in sorted(pages - {"index"}):
        page = (tmp_path / f"{name.replace('.', '/')}.html").read_text(encoding="utf-8")
        for public in importlib.import_module(name).__all__:
            assert f'id="{public}"' in page or f">{public}<" in page, (name, public)
    assert {"dspark_hf", "dspark_hf.hub", "dspark_hf.training", "dspark_hf.generation.capacity"} <= pages
