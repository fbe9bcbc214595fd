"""Collects the text that the embedded target model is trained on.

Three kinds of text, about 10 MB each, all from sources with permissive licences:

- `code`: the source of the Python standard library that runs this script;
- `prose`: the reStructuredText manuals of Django and SQLAlchemy, from their source distributions;
- `structured`: the JSON service descriptions of botocore, indented, without their documentation strings.

Every file goes whole to the training part or to the held-out part, by a hash of its name, so that a rerun gives the
same split. Writes `train.jsonl` and `heldout.jsonl` (`{"kind", "source", "text"}` a line) and `sources.json`.

    python examples/embedded_pair/prepare_text.py --work_dir build/embedded_pair
"""

import gzip
import hashlib
import json
import logging
import platform
import re
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from transformers import HfArgumentParser

logger = logging.getLogger(__name__)

KINDS = ("code", "prose", "structured")

# Parts of the standard library that are tests, applications of their own, or tables rather than code.
SKIPPED_STDLIB_FOLDERS = {"site-packages", "test", "tests", "idlelib", "lib2to3", "encodings", "pydoc_data"}
SKIPPED_STDLIB_FILES = ("_sysconfigdata", "entities.py")

# Longest rendering of one service description, so that the largest services do not dominate the kind.
STRUCTURED_CHARS_PER_FILE = 32_000


@dataclass(frozen=True)
class Package:
    """A pinned distribution whose files are read from its archive; it is never installed or imported."""

    kind: str
    name: str
    version: str
    licence: str
    sdist: bool


PACKAGES = (
    Package(kind="prose", name="Django", version="5.2.8", licence="BSD-3-Clause", sdist=True),
    Package(kind="prose", name="SQLAlchemy", version="2.0.44", licence="MIT", sdist=True),
    Package(kind="structured", name="botocore", version="1.40.70", licence="Apache-2.0", sdist=False),
)


@dataclass
class PrepareArguments:
    """Where the text goes and how it is split."""

    work_dir: str = field(
        default="build/embedded_pair", metadata={"help": "Folder for the downloads and for the files written."}
    )
    heldout_fraction: float = field(
        default=0.03, metadata={"help": "Share of the source files that is held out of training."}
    )
    max_megabytes_per_kind: float = field(
        default=10.0, metadata={"help": "Upper limit for the training text of each kind, in megabytes."}
    )
    max_file_kilobytes: int = field(
        default=400, metadata={"help": "Source files above this size are left out: most of them are tables."}
    )

    def __post_init__(self) -> None:
        if not 0.0 < self.heldout_fraction < 0.5:
            raise ValueError(
                f"heldout_fraction is {self.heldout_fraction}; choose a value between 0 and 0.5, such as 0.03."
            )
        if self.max_megabytes_per_kind <= 0:
            raise ValueError(
                f"max_megabytes_per_kind is {self.max_megabytes_per_kind}; choose a positive value, such as 10."
            )
        if self.max_file_kilobytes <= 0:
            raise ValueError(f"max_file_kilobytes is {self.max_file_kilobytes}; choose a positive value, such as 400.")


@dataclass(frozen=True)
class Document:
    """One source file. Files with the same `group` are kept on the same side of the split."""

    kind: str
    source: str
    group: str
    text: str

    @property
    def rank(self) -> float:
        """Position in [0, 1) from a hash of the kind and group: decides the split and the order of the limit."""
        digest = hashlib.sha256(f"{self.kind}/{self.group}".encode()).digest()
        return int.from_bytes(digest[:8], "big") / 2**64


def fetch(package: Package, downloads: Path) -> Path:
    """Returns the archive of a package, downloading it with pip unless it is already there."""
    pattern = f"{package.name.lower()}-{package.version}*"
    if not any(downloads.glob(pattern)):
        logger.info("Downloading %s %s", package.name, package.version)
        downloads.mkdir(parents=True, exist_ok=True)
        form = ["--no-binary" if package.sdist else "--only-binary", package.name]
        requirement = f"{package.name}=={package.version}"
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", *form, "-d", str(downloads)]
        subprocess.run([*command, requirement], check=True)
    found = sorted(downloads.glob(pattern))
    if not found:
        raise FileNotFoundError(
            f"pip downloaded no file that matches {pattern!r} into {downloads}; download the archive by hand."
        )
    return found[0]


def read_standard_library() -> Iterator[Document]:
    """Yields the `.py` files of the running interpreter's standard library."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if SKIPPED_STDLIB_FOLDERS.intersection(name.parts) or name.name.startswith(SKIPPED_STDLIB_FILES):
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        yield Document(kind="code", source=f"python/{name.as_posix()}", group=name.as_posix(), text=text)


def read_manuals(package: Package, archive: Path) -> Iterator[Document]:
    """Yields the reStructuredText files of a source distribution's documentation folder."""
    with tarfile.open(archive) as tar:
        for member in tar:
            name = PurePosixPath(*PurePosixPath(member.name).parts[1:])
            if not member.isfile() or name.suffix not in {".txt", ".rst"} or name.parts[0] not in {"docs", "doc"}:
                continue
            content = tar.extractfile(member)
            if content is not None:
                source = f"{package.name.lower()}/{name}"
                yield Document(
                    kind="prose", source=source, group=source, text=content.read().decode("utf-8", errors="replace")
                )


def without_documentation(value: Any) -> Any:
    """Drops the `documentation` strings (HTML prose) of a service description, at every depth."""
    if isinstance(value, dict):
        return {
            key: without_documentation(item)
            for key, item in value.items()
            if not (key == "documentation" and isinstance(item, str))
        }
    if isinstance(value, list):
        return [without_documentation(item) for item in value]
    return value


def render_service(description: dict[str, Any], max_chars: int) -> str:
    """Renders a service description as indented JSON with an even sample of its operations and its shapes.

    Large services are thinned, entry by entry, so that the text stays below about `max_chars` and is still valid JSON.
    """
    text = json.dumps(description, indent=2, ensure_ascii=False)
    if len(text) <= max_chars:
        return text
    step = -(-len(text) // max_chars)
    thinned = {
        key: dict(list(value.items())[::step]) if isinstance(value, dict) and len(value) > step else value
        for key, value in description.items()
        if key != "metadata"
    }
    return json.dumps({"metadata": description.get("metadata", {}), **thinned}, indent=2, ensure_ascii=False)


def read_service_descriptions(package: Package, archive: Path) -> Iterator[Document]:
    """Yields the newest description of every service, with its paginators, waiters and examples."""
    name_pattern = re.compile(
        r"botocore/data/(?P<service>[^/]+)/(?P<version>[^/]+)/"
        r"(?P<file>service-2|paginators-1|waiters-2|examples-1)\.json(?P<gz>\.gz)?"
    )
    newest: dict[tuple[str, str], re.Match[str]] = {}
    with zipfile.ZipFile(archive) as wheel:
        for name in sorted(wheel.namelist()):  # API versions are dates: the last one in the order is the newest
            if match := name_pattern.fullmatch(name):
                newest[match["service"], match["file"]] = match
        for (service, file), match in sorted(newest.items()):
            content = wheel.read(match.string)
            description = json.loads(gzip.decompress(content) if match["gz"] else content)
            text = render_service(without_documentation(description), STRUCTURED_CHARS_PER_FILE)
            if len(text) < 100:  # an empty list of paginators
                continue
            source = f"{package.name}/{service}/{file}.json"
            yield Document(kind="structured", source=source, group=service, text=text + "\n")


def read_package(package: Package, archive: Path) -> Iterator[Document]:
    """Yields the documents of one package."""
    reader = read_manuals if package.kind == "prose" else read_service_descriptions
    return reader(package, archive)


def split(documents: list[Document], args: PrepareArguments) -> tuple[list[Document], list[Document]]:
    """Splits the documents of one kind into a training part, cut at the size limit, and a held-out part."""
    train: list[Document] = []
    heldout: list[Document] = []
    budget = args.max_megabytes_per_kind * 1e6
    for document in sorted(documents, key=lambda item: (item.rank, item.source)):
        size = len(document.text.encode())
        if not document.text.strip() or size > args.max_file_kilobytes * 1000:
            continue
        if document.rank < args.heldout_fraction:
            heldout.append(document)
        elif size <= budget:
            train.append(document)
            budget -= size
    return train, heldout


def write_jsonl(path: Path, documents: list[Document]) -> None:
    """Writes documents as JSON lines, whole or not at all."""
    partial = path.with_suffix(".partial")
    with partial.open("w", encoding="utf-8") as file:
        for document in documents:
            record = {"kind": document.kind, "source": document.source, "text": document.text}
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
    partial.replace(path)


def main(args: PrepareArguments) -> None:
    """Collects, splits and writes the text."""
    work_dir = Path(args.work_dir)
    outputs = [work_dir / name for name in ("train.jsonl", "heldout.jsonl", "sources.json")]
    if all(path.exists() for path in outputs):
        logger.info("The text is already in %s; delete its files to collect it again.", work_dir)
        return
    work_dir.mkdir(parents=True, exist_ok=True)

    documents = list(read_standard_library())
    for package in PACKAGES:
        documents.extend(read_package(package, fetch(package, work_dir / "downloads")))

    train: list[Document] = []
    heldout: list[Document] = []
    sizes: dict[str, dict[str, float]] = {}
    for kind in KINDS:
        parts = split([document for document in documents if document.kind == kind], args)
        sizes[kind] = {}
        for part, part_documents in zip(("train", "heldout"), parts, strict=True):
            size = sum(len(document.text.encode()) for document in part_documents)
            sizes[kind] |= {f"{part}_files": len(part_documents), f"{part}_megabytes": round(size / 1e6, 2)}
        train.extend(parts[0])
        heldout.extend(parts[1])
        logger.info("%s: %s", kind, sizes[kind])

    python = Package("code", "Python standard library", platform.python_version(), "PSF-2.0", sdist=False)
    packages = [{key: value for key, value in asdict(item).items() if key != "sdist"} for item in (python, *PACKAGES)]
    write_jsonl(outputs[0], train)
    write_jsonl(outputs[1], heldout)
    outputs[2].write_text(json.dumps({"packages": packages, "sizes": sizes}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    (arguments,) = HfArgumentParser(PrepareArguments).parse_args_into_dataclasses()
    main(arguments)
