"""The package's imports point one way, `models` travels alone, and one module knows Transformers' private names."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

PACKAGE = "dspark_hf"
SOURCE = Path(__file__).resolve().parents[1] / "src" / PACKAGE

# A part may import from its own tier and those above it in this list; inside a tier there may be no ring.
TIERS = (
    {"_compat"},
    {"models"},
    {"generation", "data", "training", "evaluation", "conversion", "embedded", "hub"},
    {"factory"},
    {"cli"},
)
TIER_OF = {part: number for number, tier in enumerate(TIERS) for part in tier}
APART = {"generation", "training"}
FREE = {"__init__", "__main__"}  # the package's own top modules see everything
ROOT_NAMES = {"__version__"}  # may be taken from the package itself


def violations(source: Path) -> list[str]:
    """Every break of the rules under `source`, each as "file:line: what"."""
    found: list[str] = []
    used_by: dict[str, set[str]] = {}
    for path in sorted(source.rglob("*.py")):
        where = path.relative_to(source)
        part = where.with_suffix("").parts[0]
        tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
        problems: list[tuple[int, str]] = []
        if part not in FREE:
            if part not in TIER_OF:
                problems.append((1, f"`{part}` has no place in TIERS of tests/test_imports.py"))
            for line, other in imported_parts(tree, where):
                problem = direction_problem(part, other)
                if problem:
                    problems.append((line, problem))
                elif other != part:
                    used_by.setdefault(part, set()).add(other)
        if part == "models":
            problems += travel_problems(tree, where)
        if part != "_compat":
            problems += [(line, f"names `{name}`, private to Transformers") for line, name in private_names(tree)]
        found += [f"{where.as_posix()}:{line}: {problem}" for line, problem in sorted(problems)]
    try:
        TopologicalSorter(used_by).prepare()
    except CycleError as error:
        found.append("imports in a ring: " + " -> ".join(error.args[1]))
    return found


def direction_problem(part: str, other: str) -> str | None:
    if other == "":
        return None if part == "cli" else f"`{part}` imports the top of {PACKAGE}, which imports everything"
    if other not in TIER_OF or part not in TIER_OF:
        return None  # reported once, at the part itself
    if {part, other} == APART:
        return f"`{part}` imports `{other}`: neither may import the other"
    if TIER_OF[other] > TIER_OF[part]:
        return f"`{part}` imports `{other}`, which stands above it"
    return None


def imported_parts(tree: ast.Module, where: Path) -> Iterator[tuple[int, str]]:
    """(line, part of the package) for every import of the package; "" stands for its top."""
    for found in imports(tree, where):
        head, *rest = found.module.split(".")
        if head != PACKAGE:
            continue
        if rest:
            yield found.line, rest[0]
        elif not found.names:
            yield found.line, ""
        else:
            for name in found.names - ROOT_NAMES:
                yield found.line, name if name in TIER_OF else ""


class Import(NamedTuple):
    line: int
    level: int  # number of leading dots
    module: str  # in full, dots resolved
    names: set[str]  # what a `from` import takes from it


def imports(tree: ast.Module, where: Path) -> Iterator[Import]:
    """Every import, wherever it stands, import_module("...") included."""
    package = [PACKAGE, *where.parent.parts]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(node.lineno, 0, alias.name, set())
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join(base + ([node.module] if node.module else []))
            yield Import(node.lineno, node.level, module, {alias.name for alias in node.names})
        elif isinstance(node, ast.Call) and called_name(node) in ("import_module", "__import__"):
            name = literal(node.args[0]) if node.args else None
            if name:
                yield Import(node.lineno, 0, name, set())


def travel_problems(tree: ast.Module, where: Path) -> Iterator[tuple[int, str]]:
    """What would break when the files of `models` are copied beside a checkpoint, flat."""
    if len(where.parts) > 2:
        yield 1, "`models` is flat: no sub-packages"
    for found in imports(tree, where):
        if found.level > 1:
            yield found.line, "`models` imports nothing else of the package"
        elif found.level == 1 and found.module.count(".") != 2 and where.name != "__init__.py":
            yield found.line, "`models` takes its siblings only as `from .sibling import name`"
        elif found.level == 0 and found.module.split(".")[0] == PACKAGE:
            yield found.line, f"`models` does not name {PACKAGE}: it would be missing beside a checkpoint"


def private_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, name) for private names that certainly belong to Transformers.

    Certain are: what an import takes from it, attributes of what was imported from it (`GenerationMixin._name`), and
    the same through getattr and its kin. A name that the file also binds in another way is left alone, and so is
    everything reached through `self`, an instance or a call.
    """
    imported: set[str] = set()
    rebound: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            prefix = [] if isinstance(node, ast.Import) else ["." * node.level + (node.module or "")]
            for alias in node.names:
                path = ".".join([*prefix, alias.name]).split(".")
                local = alias.asname or (alias.name if prefix else path[0])
                if path[0] == "transformers":
                    imported.add(local)
                    if any(map(is_private, path)):
                        yield node.lineno, ".".join(path)
                else:
                    rebound.add(local)
        elif isinstance(node, ast.Name):
            if not isinstance(node.ctx, ast.Load):
                rebound.add(node.id)
        elif not isinstance(node, (ast.alias, ast.keyword)):  # parameters, definitions, handlers, match patterns
            rebound.update(getattr(node, field, None) or "" for field in ("arg", "name", "rest"))
    certain = imported - rebound
    for node in ast.walk(tree):
        owner: ast.expr | None = None
        name: str | None = None
        if isinstance(node, ast.Attribute):
            owner, name = node.value, node.attr
        elif isinstance(node, ast.Call) and called_name(node) in ("getattr", "setattr", "delattr", "hasattr"):
            if len(node.args) > 1:
                owner, name = node.args[0], literal(node.args[1])
        if owner and name and is_private(name) and root_of(owner) in certain:
            yield node.lineno, f"{ast.unparse(owner)}.{name}"


def literal(node: ast.expr) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def called_name(node: ast.Call) -> str:
    function = node.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def root_of(node: ast.expr) -> str | None:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def test_package_keeps_the_rules():
    assert (SOURCE / "__init__.py").is_file()
    assert violations(SOURCE) == []


def plant(root: Path, files: dict[str, str]) -> list[str]:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return violations(root)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("models/a.py", "from .._compat import x", "nothing else of the package"),
        ("models/a.py", "from ..generation import x", "which stands above it"),
        ("models/a.py", "from . import b", "siblings only"),
        ("models/a.py", "from .b.c import d", "siblings only"),
        ("models/a.py", "import dspark_hf.models.b", "does not name dspark_hf"),
        ("models/a.py", "def f():\n    from dspark_hf._compat import x", "models/a.py:2: `models` does not name"),
        ("models/__init__.py", "from .._compat import x", "nothing else of the package"),
        ("models/sub/a.py", "", "no sub-packages"),
        ("_compat.py", "from .models import x", "which stands above it"),
        ("generation/a.py", "from ..training.b import c", "neither may import the other"),
        ("training/a.py", "from .. import generation", "neither may import the other"),
        ("training/sub/a.py", "from ...generation import b", "neither may import the other"),
        ("training/a.py", "from importlib import import_module\nimport_module('dspark_hf.generation')", "a.py:2:"),
        ("evaluation/a.py", "import dspark_hf.factory", "which stands above it"),
        ("factory.py", "from .cli import main", "which stands above it"),
        ("hub/a.py", "from dspark_hf import get_drafter", "imports the top of dspark_hf"),
        ("conversion/a.py", "import dspark_hf", "imports the top of dspark_hf"),
        ("helpers.py", "", "`helpers` has no place"),
        ("hub/a.py", "from transformers.utils import _hidden", "private to Transformers"),
        ("hub/a.py", "from transformers._hidden import name", "private to Transformers"),
        ("hub/a.py", "import transformers as t\nt.generation.Mixin._draft", "`t.generation.Mixin._draft`"),
        ("models/a.py", "from transformers import Mixin as M\nold = M._draft", "a.py:2: names `M._draft`"),
        ("generation/a.py", "from transformers import Mixin\nsetattr(Mixin, '_draft', 1)", "names `Mixin._draft`"),
    ],
)
def test_planted_violation_is_found(tmp_path, name, text, message):
    found = plant(tmp_path, {name: text})
    assert any(message in line for line in found), found
    assert all(line.startswith(name) for line in found), found


def test_ring_between_peers_is_found(tmp_path):
    found = plant(tmp_path, {"data/a.py": "from ..training import b", "training/b.py": "from ..data import a"})
    assert len(found) == 1
    assert found[0].startswith("imports in a ring: ")


def test_what_is_allowed_passes(tmp_path):
    files = {
        "__init__.py": "from ._compat import check\nfrom .cli import main\n__version__ = '1'",
        "_compat.py": "from transformers import GenerationMixin\nkeep = GenerationMixin._assisted_decoding",
        "models/__init__.py": "from . import a\nfrom .b import B",
        "models/a.py": """
import transformers
from transformers import PreTrainedModel
from .b import B

class Model(PreTrainedModel):
    _tied_weights_keys = ["head"]

    def _init_weights(self, module):
        super()._init_weights(module)
        self.config._attn_implementation = "eager"
        Model._own, B._own, transformers.__version__

def f(transformers):
    return transformers._anything
""",
        "models/b.py": "from transformers import Config\nclass B: ...\nConfig.from_pretrained('x')._private",
        "generation/a.py": "from .._compat import check\nfrom ..models import B\nfrom .b import c",
        "training/a.py": "from ..data.prompts import p\nfrom .. import __version__",
        "evaluation/a.py": "from ..generation import a\nfrom ..models.b import B",
        "hub/a.py": "from ..conversion import x\nfrom ..evaluation.a import y",
        "factory.py": "from .models import a",
        "cli/__init__.py": "from dspark_hf import __version__, get_drafter\nfrom ..hub import a\nimport dspark_hf",
    }
    assert plant(tmp_path, files) == []
