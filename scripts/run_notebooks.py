#!/usr/bin/env python3
"""Run the notebooks of `examples/notebooks` and keep what they print: `python scripts/run_notebooks.py [NAME ...]`."""

import os
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).resolve().parents[1] / "examples" / "notebooks"


def run(path, timeout=600):
    """The notebook with its outputs; raises `CellExecutionError` where a cell fails."""
    os.environ["PYTHONWARNINGS"] = "ignore:IProgress"  # of bars that only a browser shows
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=timeout, kernel_name="python3", record_timing=False).execute()
    return notebook


def main():
    names = sys.argv[1:] or [path.stem for path in sorted(FOLDER.glob("*.ipynb"))]
    for name in names:
        path = FOLDER / f"{name}.ipynb"
        notebook = run(path)
        for key in set(notebook.metadata) - {"kernelspec", "language_info"}:
            del notebook.metadata[key]
        notebook.metadata["language_info"] = {"name": "python"}
        nbformat.write(notebook, path)
        print(f"{path.name}: done", flush=True)


if __name__ == "__main__":
    main()
