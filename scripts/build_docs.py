#!/usr/bin/env python3
"""Render the docstrings as HTML: `python scripts/build_docs.py [FOLDER]`, by default to build/docs."""

import sys
import warnings
from pathlib import Path

import pdoc

import dspark_hf

MODULES = [
    "dspark_hf",
    "dspark_hf.conversion",
    "dspark_hf.data",
    "dspark_hf.embedded",
    "dspark_hf.evaluation",
    "dspark_hf.evaluation.harness",
    "dspark_hf.evaluation.plots",
    "dspark_hf.evaluation.tasks",
    "dspark_hf.factory",
    "dspark_hf.generation",
    "dspark_hf.generation.capacity",
    "dspark_hf.generation.schedulers",
    "dspark_hf.generation.scheduling",
    "dspark_hf.hub",
    "dspark_hf.models",
    "dspark_hf.training",
]
"""What users import, in the order of the index."""


def main():
    folder = Path(sys.argv[1] if sys.argv[1:] else "build/docs")
    for name in dspark_hf.__all__:
        vars(dspark_hf)[name] = getattr(dspark_hf, name)  # those that come when first used, too
    warnings.filterwarnings("error", message="Found .* does not resolve")
    warnings.filterwarnings("ignore", message="Error parsing type annotation")  # of what Transformers' classes inherit
    pdoc.render.configure(docformat="google", footer_text=f"dspark-hf {dspark_hf.__version__}", search=True)
    pdoc.pdoc(*MODULES, output_directory=folder)
    print(f"The documentation is in {folder}: open {folder / 'index.html'}.")


if __name__ == "__main__":
    main()
