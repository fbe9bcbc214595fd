"""What the long example runs share: stages, each of which is done once, and a ledger of how long they took."""

from __future__ import annotations

import json
import logging
import math
import os
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

logger = logging.getLogger(__name__)


def write_whole(path: Path, text: str) -> None:
    """A kill leaves the old file or the new one."""
    new = path.with_name(path.name + ".new")
    new.write_text(text, encoding="utf-8")
    os.replace(new, path)


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def read_rows(path: Path) -> list[dict[str, Any]]:
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    write_whole(path, "".join(json.dumps(row) + "\n" for row in rows))


class Ledger:
    """How long each stage has taken over all runs, whether it is done, and what it noted; kept in a file.

    Args:
        path: the file.
        settings: what everything is made with.

    Raises:
        ValueError: if what is there was made otherwise.
    """

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self.path = path
        found = read_json(path) if path.is_file() else {}
        self.content: dict[str, Any] = {"settings": settings, "stages": {}} | found
        changes = [
            f"`{name}` was {self.content['settings'].get(name)!r} and is {value!r}"
            for name, value in settings.items()
            if self.content["settings"].get(name) != value
        ]
        if changes:
            raise ValueError(
                f"`work_dir` is {str(path.parent)!r}, which was made otherwise: {', '.join(changes)}. Give another "
                "folder, or run it as before."
            )

    def start(self, stage: str) -> None:
        """The clock of `stage` runs from here, on from what earlier runs took."""
        self.facts: dict[str, Any] = self.content["stages"].setdefault(stage, {"seconds": 0.0, "done": False})
        self._zero = time.monotonic() - self.facts["seconds"]

    @property
    def seconds(self) -> float:
        """What the stage has taken."""
        return time.monotonic() - self._zero

    def save(self, **facts: Any) -> None:
        """Notes the time, and `facts`."""
        self.facts.update(facts, seconds=round(self.seconds, 1))
        write_whole(self.path, json.dumps(self.content, indent=2) + "\n")


def run_stages(ledger: Ledger, stages: Mapping[str, Callable[[], dict[str, Any]]]) -> None:
    """Runs those stages that are not done, in their order, and keeps the facts that they return."""
    for stage, work in stages.items():
        ledger.start(stage)
        if not ledger.facts["done"]:
            ledger.save(**work(), done=True)
        logger.info("%s: %s", stage, ledger.facts)


class ClockCallback(TrainerCallback):
    """Times steps, notes their times in the ledger, and ends training when it is late.

    Args:
        ledger: of the stage that trains.
        limit: seconds of the stage; as long as it takes if unset.
    """

    def __init__(self, ledger: Ledger, limit: float = math.inf) -> None:
        self.ledger, self.limit = ledger, limit
        self.step_seconds: list[float] = []
        self.steps = 0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._start = time.monotonic()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.step_seconds.append(time.monotonic() - self._start)
        self.steps = state.global_step
        self.ledger.save(mean_step_seconds=statistics.fmean(self.step_seconds))
        if self.ledger.seconds > self.limit:
            control.should_training_stop = control.should_save = True
