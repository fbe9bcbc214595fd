"""What the reports of all benchmarks have in common."""

from __future__ import annotations

import json
import platform
from pathlib import Path
from typing import Any

import torch
import transformers


def versions() -> dict[str, str]:
    """What a benchmark ran on."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def write_report(report: dict[str, Any], path: Path) -> None:
    """Writes a report, and the folder for it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
