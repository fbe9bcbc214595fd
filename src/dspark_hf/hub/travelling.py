"""The code that travels with a drafter, so that it loads and drafts where this package is not installed.

Transformers copies the Python files of a repository into one folder and follows `from .sibling import name` alone. So
modules of this package travel flat: each under its own last name, with its relative imports rewritten to siblings.

- Beside the weights: what `AutoModel.from_pretrained(repository, trust_remote_code=True)` needs (`models`).
- In `custom_generate/`: what `target.generate(custom_generate=repository, trust_remote_code=True)` needs, from
  `hub/generate.py` on: decoding too.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from .. import _compat
from ..models import DRAFTER_CLASSES

PACKAGE = Path(__file__).resolve().parents[1]
GENERATE_FOLDER = "custom_generate"

_RELATIVE = re.compile(r"from\s+\.[\w.]*\s+import")


def model_code(model_type: str) -> tuple[dict[str, str], dict[str, str]]:
    """What a drafter of this type needs beside its weights.

    Args:
        model_type: as its config has it.

    Returns:
        Sources by file name, and the `auto_map` of the config.
    """
    drafter_class = DRAFTER_CLASSES[model_type]
    auto_map = {}
    entries = []
    for auto_class, owner in (("AutoConfig", drafter_class.config_class), ("AutoModel", drafter_class)):
        module = owner.__module__.rpartition(".")[2]
        entries.append(PACKAGE / "models" / f"{module}.py")
        auto_map[auto_class] = f"{module}.{owner.__name__}"
    return flatten(entries), auto_map


def generation_code() -> dict[str, str]:
    """What `custom_generate/` holds, contents by file name."""
    requirements = (
        f"transformers>={_compat.MINIMUM_TRANSFORMERS},<{_compat.FIRST_UNSUPPORTED_TRANSFORMERS}\naccelerate\n"
    )
    return {**flatten([PACKAGE / "hub" / "generate.py"]), "requirements.txt": requirements}


def flatten(entries: list[Path]) -> dict[str, str]:
    """Sources of modules and all that they import from this package, by file name, for one folder.

    Args:
        entries: files of this package.

    Raises:
        ValueError: if two modules would have the same name.
    """
    paths: dict[str, Path] = {}
    sources: dict[str, str] = {}
    waiting = list(entries)
    while waiting:
        path = waiting.pop()
        name = _flat_name(path)
        if paths.setdefault(name, path) != path:
            raise ValueError(f"{paths[name]} and {path} cannot travel in one folder: both would be {name}.py.")
        if f"{name}.py" not in sources:
            imported, sources[f"{name}.py"] = _flat_source(path)
            waiting += imported
    return sources


def _flat_name(path: Path) -> str:
    return path.parent.name if path.stem == "__init__" else path.stem


def _flat_source(path: Path) -> tuple[list[Path], str]:
    """The modules that a file imports from this package, and its source with siblings in their place."""
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines(keepends=True)
    imported = []
    for node, modules in _relative_imports(ast.parse(text), path):
        imported += modules
        sibling = _flat_name(modules[0]) if node.module else ""
        line = lines[node.lineno - 1]
        lines[node.lineno - 1] = _RELATIVE.sub(f"from .{sibling} import", line, count=1)
    return imported, _header() + "".join(lines)


def _relative_imports(tree: ast.Module, path: Path) -> Iterator[tuple[ast.ImportFrom, list[Path]]]:
    """Each `from .x import y` with the files that it stands for."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            folder = path.parents[node.level - 1]
            names = [node.module] if node.module else [alias.name for alias in node.names]
            yield node, [_module_file(folder.joinpath(*name.split("."))) for name in names]


def _module_file(path: Path) -> Path:
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def _header() -> str:
    try:
        number = version("dspark-hf")
    except PackageNotFoundError:  # run from a source tree
        number = "from source"
    return f"# Part of dspark-hf ({number}), Apache-2.0: a copy that travels with a drafter.\n"


__all__ = ["GENERATE_FOLDER", "flatten", "generation_code", "model_code"]
