"""Code that travels: flat, complete, and of this package's names free."""

from __future__ import annotations

import ast
import re

import pytest

from dspark_hf.hub import travelling
from dspark_hf.models import DRAFTER_CLASSES

# How Transformers finds what a file needs.
FOLLOWED = re.compile(r"^\s*from\s+\.(\S+)\s+import", re.MULTILINE)


def reached(sources: dict[str, str], entry: str) -> set[str]:
    """What Transformers copies when it is asked for `entry`."""
    found, waiting = set(), [entry]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += [f"{module}.py" for module in FOLLOWED.findall(sources[name])]
    return found


@pytest.mark.parametrize("model_type", DRAFTER_CLASSES)
def test_model_code_is_complete(model_type):
    sources, auto_map = travelling.model_code(model_type)
    entries = {auto_class: reference.split(".") for auto_class, reference in auto_map.items()}
    assert set(entries) == {"AutoConfig", "AutoModel"}
    for module, name in entries.values():
        assert f"class {name}(" in sources[f"{module}.py"]
    assert set().union(*(reached(sources, f"{module}.py") for module, _ in entries.values())) == set(sources)


def test_generation_code_is_complete():
    files = travelling.generation_code()
    sources = {name: text for name, text in files.items() if name.endswith(".py")}
    assert set(files) - set(sources) == {"requirements.txt"}
    assert reached(sources, "generate.py") == set(sources)
    assert {"decoding.py", "_compat.py", "modeling_mtp.py"} <= set(sources)


@pytest.mark.parametrize("sources", [travelling.generation_code(), travelling.model_code("dspark")[0]])
def test_sources_stand_alone(sources):
    for name, text in sources.items():
        if not name.endswith(".py"):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and node.level:
                assert node.level == 1, name
                modules = [node.module] if node.module else [alias.name for alias in node.names]
                assert all(f"{module}.py" in sources for module in modules), (name, modules)
            elif isinstance(node, ast.ImportFrom | ast.Import):
                roots = [node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
                assert not any(root.split(".")[0] == "dspark_hf" for root in roots), name


def test_two_modules_of_one_name_are_refused(tmp_path, monkeypatch):
    for folder, text in (("one", "from ..two.same import x\n"), ("two", "x = 1\n")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "same.py").write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match="both would be same.py"):
        travelling.flatten([tmp_path / "one" / "same.py"])
