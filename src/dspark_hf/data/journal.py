"""A record of rows that outlives a kill: JSON Lines files that only grow, and what they were made with."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from filelock import FileLock, Timeout

from .answers import Key

SYNC_EVERY = 64
"""Writes after which a file is on disk whatever happens to the machine; a killed process loses none."""


class Journal:
    """Finished rows in `<output>`, failed ones in `<output>.failed.jsonl`, the recipe in `<output>.manifest.json`.

    Args:
        output: the file, or, with a `suffix`, the one that it goes beside.
        manifest: what the rows are made with.
        retry_failed: whether to forget what has failed before.
        suffix: added to the name of the file of finished rows.

    Attributes:
        done: rows that are finished.
        failed: rows that have failed.

    Raises:
        OSError: if a file cannot be read or written.
        ValueError: if the files that are there were made otherwise, or by something else.
    """

    def __init__(self, output: Path, manifest: dict[str, Any], retry_failed: bool = False, suffix: str = "") -> None:
        if output.is_dir():
            raise IsADirectoryError(f"`output` is {str(output)!r}, which is a folder; give a JSON Lines file.")
        output.parent.mkdir(parents=True, exist_ok=True)
        self._lock = FileLock(_beside(output, ".lock"), blocking=False)
        try:
            self._lock.acquire()
        except Timeout as error:
            raise OSError(
                f"`output` is {str(output)!r}, which another run is writing; wait for it, or give another file."
            ) from error
        try:
            self._open(output, _beside(output, suffix), manifest, retry_failed)
        except BaseException:
            self._lock.release()
            raise

    def _open(self, output: Path, rows: Path, manifest: dict[str, Any], retry_failed: bool) -> None:
        failures = _beside(output, ".failed.jsonl")
        _check_manifest(output, manifest, started=any(map(_has_content, (rows, failures))))
        if retry_failed:
            failures.unlink(missing_ok=True)
        self._rows, self._failures = _File(rows), _File(failures)
        self.done, self.failed = self._rows.keys, self._failures.keys - self._rows.keys

    def rows(self) -> Iterator[dict[str, Any]]:
        """The lines of all finished rows, those of earlier runs included, in the order in which they were written."""
        return self._rows.read()

    def add(self, parts: list[dict[str, Any]]) -> None:
        """Writes the lines of a finished row."""
        self._rows.append(parts)

    def fail(self, failure: dict[str, Any]) -> None:
        """Writes the line of a failed row."""
        self._failures.append([failure])

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._rows.close()
        self._failures.close(keep=False)
        self._lock.release()


class _File:
    """A file of rows, each of one line or several, written in one go.

    What a kill left of a row at the end is cut off.

    Attributes:
        keys: of the rows that are in it.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.keys: set[Key] = set()
        self._writes = 0
        self._path = path
        self._file = open(path, "a+b")  # noqa: SIM115
        self._file.truncate(self._read(path))

    def _read(self, path: Path) -> int:
        """Fills `keys` and returns the length of all whole rows."""
        self._file.seek(0)
        position = end = 0
        for number, line in enumerate(self._file, start=1):
            if not line.endswith(b"\n"):
                break
            position += len(line)
            try:
                row = json.loads(line)
                key = Key(row["source"], row["sample"])
                is_last = row.get("part") == row.get("parts")
            except (LookupError, TypeError, ValueError) as error:
                self._file.close()
                raise ValueError(
                    f"Line {number} of {str(path)!r} is not as it was written; mend or remove it, or give another "
                    "file as `output`."
                ) from error
            if is_last:
                self.keys.add(key)
                end = position
        return end

    def read(self) -> Iterator[dict[str, Any]]:
        """All rows, line by line."""
        self._file.seek(0)
        return map(json.loads, self._file)

    def append(self, rows: Iterable[dict[str, Any]]) -> None:
        # An `id` may be anything, half of a surrogate pair or a date.
        self._file.write(b"".join(json.dumps(row, default=str).encode() + b"\n" for row in rows))
        self._file.flush()
        self._writes += 1
        if self._writes % SYNC_EVERY == 0:
            os.fsync(self._file.fileno())

    def close(self, keep: bool = True) -> None:
        """Ends writing; without `keep` a file in which nothing is goes."""
        os.fsync(self._file.fileno())
        self._file.close()
        if not keep and not _has_content(self._path):
            self._path.unlink()


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Writes a file so that under its name there is all of it or nothing, in a folder that is made if need be.

    Raises:
        OSError: if it cannot be written.
        ValueError: if a number is not finite.
    """
    text = json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    new = _beside(path, ".new")
    new.write_text(text, encoding="utf-8")
    os.replace(new, path)


def _beside(output: Path, suffix: str) -> Path:
    return output.with_name(output.name + suffix)


def _has_content(path: Path) -> bool:
    return path.exists() and path.stat().st_size > 0


def _check_manifest(output: Path, manifest: dict[str, Any], started: bool) -> None:
    """Writes the manifest of a new file, and compares with that of a file that is there."""
    path = _beside(output, ".manifest.json")
    if not started:
        write_json(path, manifest)
        return
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"`output` is {str(output)!r}, which has rows but no manifest {path.name} that can be read, so it cannot "
            "be gone on with; give another file."
        ) from error
    other = [name for name in {**manifest, **found} if found.get(name) != manifest.get(name)]
    if other:
        changes = ", ".join(f"`{name}` was {found.get(name)!r} and is {manifest.get(name)!r}" for name in other)
        raise ValueError(
            f"`output` is {str(output)!r}, whose rows were made otherwise: {changes}. Give another file, or run it as "
            "before."
        )


__all__ = ["Journal", "write_json"]
