"""What verifications and drafts cost on this machine: measured once per target, kept in a file, read by schedulers.

A verification of `R` rows runs ids `(R, n)`, where n is one more than the longest proposal; shorter rows are padded.
So its time depends on R, n and the length of the context, and a profile holds it for a grid of them. With a drafter it
also holds what a round takes beside its verification: plainly, and how much longer if it drafts. Times are medians of
real work: the target's own verification step as decoding runs it, and rounds of real decoding.

A profile belongs to what it was measured on: the shape of the model, its dtype, quantisation and kind of attention,
the device, the threads of a processor, the version of torch. `find_profile` gives none that was measured on others.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import platform
import statistics
import tempfile
import weakref
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from huggingface_hub import constants
from numpy.typing import NDArray
from transformers import PreTrainedConfig, PreTrainedModel

from .. import _compat
from ..models import Drafter
from .scheduling import CapacityCurve
from .stats import RoundStats, Stopwatch
from .target import TargetSession

VERSION = 1
DEFAULT_LENGTHS = 8

# Rounds that one timed `generate` call lasts at least. The first is not counted: the drafter reads the prompt in it.
_ROUNDS = 4
_LEAST_SECONDS = 1e-9
# Those of the target's `generation_config` would be taken for the drafter's time; a call's own come on top.
_NO_PROCESSORS = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "repetition_penalty": 1.0}

# Fields of a config that say nothing about the work of a forward pass, or that an identity holds by themselves.
_NO_WORK = {
    "architectures",
    "auto_map",
    "confidence_temperatures",
    "dtype",
    "enable_thinking",
    "generation_prompt_ids",
    "id2label",
    "label2id",
    "name_or_path",
    "_name_or_path",
    "quantization_config",
    "target_name_or_path",
    "torch_dtype",
    "transformers_version",
}
_TOKEN_FIELDS = ("_token_id", "_token_ids", "_token_index")

Floats = NDArray[np.float64]
Table = tuple[tuple[tuple[float, ...], ...], ...]
Progress = Callable[[int, int], None]


# --- profiles ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DraftProfile:
    """What rounds take beside their verification, with one drafter; for the contexts and rows of a `CapacityProfile`.

    Attributes:
        measured_on: what identifies the drafter, see `drafter_identity`.
        counts: drafted tokens per row, increasing from 1: 1 and γ.
        seconds: `(contexts, rows, counts)`, what rounds with drafts take longer than plain ones.
        plain_seconds: `(contexts, rows, 1)`, what plain rounds take; nothing if not measured.
    """

    measured_on: dict[str, Any]
    counts: tuple[int, ...]
    seconds: Table
    plain_seconds: Table | None = None

    def __post_init__(self) -> None:
        _check_axis("counts", self.counts, starts_at_one=True)


@dataclass(frozen=True)
class CapacityProfile:
    """Times of a target on one machine.

    Attributes:
        measured_on: what identifies target and machine, see `target_identity`.
        contexts: tokens in the cache, increasing.
        rows: rows of the batch, increasing.
        lengths: tokens per row that a verification runs, increasing from 1.
        verify_seconds: `(contexts, rows, lengths)`, medians.
        draft: the cost of drafting, where a drafter was there.

    Raises:
        ValueError: if an axis does not increase, a table has another shape, or a time is not positive and finite.
    """

    measured_on: dict[str, Any]
    contexts: tuple[int, ...]
    rows: tuple[int, ...]
    lengths: tuple[int, ...]
    verify_seconds: Table
    draft: DraftProfile | None = None

    def __post_init__(self) -> None:
        _check_axis("contexts", self.contexts)
        _check_axis("rows", self.rows)
        _check_axis("lengths", self.lengths, starts_at_one=True)
        grid = (len(self.contexts), len(self.rows))
        _check_table("verify_seconds", self.verify_seconds, (*grid, len(self.lengths)))
        if self.draft is not None:
            _check_table("draft.seconds", self.draft.seconds, (*grid, len(self.draft.counts)))
            if self.draft.plain_seconds is not None:
                _check_table("draft.plain_seconds", self.draft.plain_seconds, (*grid, 1))

    def curve(self, rows: int, context: int) -> CapacityCurve:
        """Seconds of verifications of `rows` times n tokens, for every measured n.

        Linear between measured rows and contexts. Shorter and longer contexts count as the nearest measured one; more
        rows than measured go on along the last segment, or stay as they are where that falls.

        Args:
            rows: rows of the batch, at least 1.
            context: tokens in the cache.
        """
        seconds = self._at(self._verify_seconds, rows, context)
        return CapacityCurve([rows * length for length in self.lengths], seconds.tolist())

    def draft_seconds(self, rows: int, context: int, count: int) -> float:
        """Seconds that a round takes longer than a plain one if it drafts, less the verification itself.

        Args:
            rows: rows of the batch, at least 1.
            context: tokens in the cache.
            count: drafted tokens per row; 0 costs nothing, and more than were measured cost as much as the most.

        Raises:
            ValueError: if no drafter was measured.
        """
        if self.draft is None:
            raise ValueError(
                "This capacity profile does not know what drafts cost. Measure it with the drafter: "
                "`dspark profile --target ... --drafter ...`."
            )
        if count == 0:
            return 0.0
        return float(np.interp(count, self.draft.counts, self._at(self._draft_seconds, rows, context)))

    def plain_seconds(self, rows: int, context: int) -> float:
        """Seconds of a plain round beside its verification, 0 if they were not measured; arguments as for `curve`."""
        if self.draft is None or self.draft.plain_seconds is None:
            return 0.0
        return float(self._at(np.asarray(self.draft.plain_seconds, np.float64), rows, context)[0])

    @property
    def draft_counts(self) -> tuple[int, ...]:
        """Numbers of drafted tokens that were measured: 1 and the drafter's γ; none without a drafter."""
        return self.draft.counts if self.draft is not None else ()

    def _at(self, table: Floats, rows: int, context: int) -> Floats:
        """`table (contexts, rows, n)` at one context and number of rows: `(n,)`."""
        if rows < 1:
            raise ValueError(f"`rows` is {rows}; a batch has at least 1.")
        by_rows = _interpolate(self.contexts, table, context)
        seconds = _interpolate(self.rows, by_rows, rows)
        if rows <= self.rows[-1] or len(self.rows) == 1:
            return seconds
        slope = np.maximum(by_rows[-1] - by_rows[-2], 0) / (self.rows[-1] - self.rows[-2])
        return seconds + slope * (rows - self.rows[-1])

    @functools.cached_property
    def _verify_seconds(self) -> Floats:
        return np.asarray(self.verify_seconds, np.float64)

    @functools.cached_property
    def _draft_seconds(self) -> Floats:
        return np.asarray(self.draft.seconds if self.draft else (), np.float64)

    @property
    def description(self) -> str:
        """What it was measured on, in one line."""
        on = self.measured_on
        threads = f" ({on['threads']} threads)" if on.get("threads") else ""
        parts = (on.get("model"), on.get("quantization") or on.get("dtype"), on.get("attention"))
        named = ", ".join(str(part) for part in parts if part)
        return f"{named} on {on.get('device_name')}{threads}, torch {on.get('torch')}"

    def to_json(self) -> dict[str, Any]:
        """A dictionary for `json.dumps`."""
        return {"version": VERSION, **dataclasses.asdict(self)}

    @classmethod
    def from_json(cls, data: Any) -> CapacityProfile:
        """The profile that `to_json` wrote.

        Raises:
            ValueError: if it is none, or one of another version of this package.
        """
        if not isinstance(data, dict) or data.get("version") != VERSION:
            version = data.get("version") if isinstance(data, dict) else None
            raise ValueError(f"A capacity profile of version {VERSION} is needed; this has version {version!r}.")
        try:
            draft = data["draft"]
            return cls(
                measured_on=dict(data["measured_on"]),
                contexts=tuple(data["contexts"]),
                rows=tuple(data["rows"]),
                lengths=tuple(data["lengths"]),
                verify_seconds=_nested(data["verify_seconds"]),
                draft=None
                if draft is None
                else DraftProfile(
                    dict(draft["measured_on"]),
                    tuple(draft["counts"]),
                    _nested(draft["seconds"]),
                    None if draft.get("plain_seconds") is None else _nested(draft["plain_seconds"]),
                ),
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"A field of the capacity profile is missing or of another type ({error!r}).") from error

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the profile, in one step, so that no file is left half written.

        Raises:
            OSError: if it cannot be written.
        """
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(self.to_json(), indent=2, allow_nan=False) + "\n"
        handle, new = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".new")
        try:
            with open(handle, "w", encoding="utf-8") as file:
                file.write(text)
            # Readable for others like any new file, not for its owner only.
            umask = os.umask(0)
            os.umask(umask)
            os.chmod(new, 0o666 & ~umask)
            os.replace(new, path)
        except OSError:
            os.unlink(new)
            raise

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> CapacityProfile:
        """Reads what `save` wrote.

        Raises:
            OSError: if the file cannot be read.
            ValueError: if it is damaged or no capacity profile.
        """
        try:
            return cls.from_json(json.loads(Path(path).read_text(encoding="utf-8")))
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"{os.fspath(path)!r} is no capacity profile that can be used: {str(error).rstrip('.')}. Delete it, "
                "and measure again with `dspark profile`."
            ) from error


def _check_axis(name: str, values: Sequence[int], starts_at_one: bool = False) -> None:
    whole = all(isinstance(value, int) and not isinstance(value, bool) for value in values)
    if not (whole and values and values[0] >= 1 and all(a < b for a, b in zip(values, values[1:]))):
        raise ValueError(f"`{name}` is {values!r}; give whole numbers that increase, from at least 1.")
    if starts_at_one and values[0] != 1:
        raise ValueError(f"`{name}` is {values!r}; its first entry must be 1.")


def _check_table(name: str, table: Any, shape: tuple[int, ...]) -> None:
    try:
        array = np.asarray(table, np.float64)
    except (TypeError, ValueError) as error:
        raise ValueError(f"`{name}` is no table of numbers of shape {shape}.") from error
    if array.shape != shape:
        raise ValueError(f"`{name}` has shape {array.shape}; with these axes it must be {shape}.")
    if not (np.isfinite(array).all() and (array > 0).all()):
        raise ValueError(f"`{name}` holds times that are not positive and finite; measure again.")


def _nested(table: Any) -> Table:
    return tuple(tuple(tuple(cells) for cells in lines) for lines in table)


def _interpolate(points: Sequence[int], values: Floats, at: int) -> Floats:
    """`values (points, ...)` between its points, linearly; before the first and after the last as there."""
    at = min(max(at, points[0]), points[-1])
    right = bisect_left(points, at)
    left = max(right - 1, 0)
    share = (at - points[left]) / max(points[right] - points[left], 1)
    between: Floats = values[left] + share * (values[right] - values[left])
    return between


# --- what a profile belongs to -------------------------------------------------------------------------------------


def target_identity(target: PreTrainedModel) -> dict[str, Any]:
    """What the times of a target depend on, as JSON takes it; where two agree, a profile of one serves the other.

    The target's config is read once per model, so that looking a profile up costs no time worth speaking of.
    """
    config, quantization = _read_config(target)
    device = target.device
    return {
        "model": type(target).__name__,
        "config": config,
        "dtype": str(target.dtype).removeprefix("torch."),
        "quantization": quantization,
        "devices": len(set(getattr(target, "hf_device_map", {}).values())) or 1,
        "device": device.type,
        "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else _processor_name(),
        "threads": torch.get_num_threads() if device.type == "cpu" else None,
        "attention": _compat.attention_implementation(target),
        "torch": str(torch.__version__),
    }


def drafter_identity(drafter: Drafter) -> dict[str, Any]:
    """What the times of a drafter depend on, apart from its target and the machine."""
    config, _ = _read_config(drafter)
    return {"config": config, "dtype": str(drafter.dtype).removeprefix("torch."), "device": drafter.device.type}


_CONFIGS: weakref.WeakKeyDictionary[PreTrainedModel, tuple[str, str | None]] = weakref.WeakKeyDictionary()


def _read_config(model: PreTrainedModel) -> tuple[str, str | None]:
    """Hash of the shape of a model, and its quantisation, if any, by name and hash; read once per model."""
    if model not in _CONFIGS:
        quantization = model.config.to_dict().get("quantization_config")
        name = None
        if quantization:
            method = quantization.get("quant_method")
            name = f"{getattr(method, 'value', method)} {_hash(quantization)}"
        _CONFIGS[model] = (_hash(_shape(model.config.get_text_config(decoder=True))), name)
    return _CONFIGS[model]


def _shape(config: PreTrainedConfig) -> dict[str, Any]:
    return {
        name: value
        for name, value in config.to_dict().items()
        if name not in _NO_WORK and not name.endswith(_TOKEN_FIELDS)
    }


def _hash(content: dict[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@functools.cache
def _processor_name() -> str:
    """The processor's model, as Linux or else Python knows it."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


# --- files of measured profiles ------------------------------------------------------------------------------------


def profile_path(target: PreTrainedModel) -> Path:
    """Where the profile of `target` on this machine is kept, in the folder that `DSPARK_CACHE` names if it is set."""
    return _path(target_identity(target))


def _path(identity: dict[str, Any]) -> Path:
    folder = os.environ.get("DSPARK_CACHE") or os.path.join(constants.HF_HOME, "dspark", "capacity")
    return Path(folder) / f"{_hash(identity)}.json"


def save_profile(profile: CapacityProfile, target: PreTrainedModel) -> Path:
    """Keeps a profile where `find_profile` looks for it, in place of one from before.

    Raises:
        OSError: if it cannot be written.
        ValueError: if it was measured on something else.
    """
    identity = target_identity(target)
    other = [name for name, value in identity.items() if profile.measured_on.get(name) != value]
    if other:
        raise ValueError(
            f"`profile` was measured on {profile.description}, which differs from `target` in {other}. Measure again "
            "with `measure_capacity(target)`."
        )
    path = _path(identity)
    profile.save(path)
    return path


def find_profile(target: PreTrainedModel, drafter: Drafter | None = None) -> CapacityProfile | None:
    """The saved profile that was measured on what `target` is and where it is now, if there is one.

    Its draft part is there only if it belongs to `drafter`. Files are read again only where they have changed, and
    the same object comes back as long as they have not.

    Raises:
        OSError, ValueError: if there is one that cannot be read or is damaged.
    """
    identity = target_identity(target)
    path = _path(identity)
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    profile, without_draft = _read(path, (status.st_mtime_ns, status.st_ino))
    if profile.measured_on != identity:
        return None
    draft = profile.draft
    belongs = draft is not None and drafter is not None and draft.measured_on == drafter_identity(drafter)
    return profile if belongs else without_draft


_Version = tuple[int, int]
_READ: dict[Path, tuple[_Version, CapacityProfile, CapacityProfile]] = {}


def _read(path: Path, version: _Version) -> tuple[CapacityProfile, CapacityProfile]:
    """The profile of a file, with and without its draft part.

    Args:
        path: the file.
        version: its last change and its inode, which a file that replaces it has not, whatever the clock says.
    """
    if path not in _READ or _READ[path][0] != version:
        profile = CapacityProfile.load(path)
        _READ[path] = (version, profile, dataclasses.replace(profile, draft=None))
    return _READ[path][1:]


# --- measuring -----------------------------------------------------------------------------------------------------


def measure_capacity(
    target: PreTrainedModel,
    drafter: Drafter | None = None,
    *,
    max_rows: int = 8,
    lengths: int | None = None,
    contexts: Sequence[int] = (128,),
    repeats: int = 9,
    warmup: int = 3,
    progress: Progress | None = None,
) -> CapacityProfile:
    """Measures verifications by `target` and, with a drafter, the cost of drafting.

    Nothing else should run on the machine meanwhile. The random state and the target's mode are left as they were.

    Args:
        target: the target, on the device and in the dtype that it will be used in.
        drafter: its drafter, likewise.
        max_rows: most rows of a batch; measured are 1, 2, 4, ... and this.
        lengths: most tokens per row that a verification runs; all from 1 on are measured. One more than the drafter's
            γ if unset, 8 without a drafter.
        contexts: lengths of the prompts before the verification.
        repeats: timed runs of each, of which the median is taken.
        warmup: runs of each before these.
        progress: called as `progress(done, total)` after each step, one for each context and number of rows.

    Raises:
        ValueError: if a number is out of range, a context does not fit into the target's positions, or the target
            cannot verify drafts or is not the drafter's.
    """
    if lengths is None:
        lengths = DEFAULT_LENGTHS if drafter is None else drafter.config.block_size + 1
    check_measurement(max_rows=max_rows, lengths=lengths, contexts=contexts, repeats=repeats, warmup=warmup)
    contexts, rows = tuple(sorted(set(contexts))), _row_counts(max_rows)
    counts: tuple[int, ...] = ()
    layers = [target.config.get_text_config(decoder=True).num_hidden_layers - 1]
    if drafter is not None:
        drafter.check_target(target)
        counts, layers = tuple(sorted({1, drafter.config.block_size})), drafter.config.target_layer_ids
    _check_room(target, contexts[-1], max(lengths, *map(_new_tokens, counts)) if counts else lengths)
    vocabulary = _ordinary_ids(target)
    verified: list[list[float]] = []
    rounds: list[list[float]] = []
    cells = [(context, count) for context in contexts for count in rows]
    with _undisturbed(target):
        for done, (context, count) in enumerate(cells, start=1):
            ids = _random_ids(vocabulary, count, context + lengths).to(target.device)
            verified.append(_verify_seconds(target, layers, ids, lengths, repeats, warmup))
            if drafter is not None:
                rounds.append(_round_seconds(target, drafter, ids[:, :context], counts, repeats, warmup))
            if progress is not None:
                progress(done, len(cells))
    return CapacityProfile(
        measured_on=target_identity(target),
        contexts=contexts,
        rows=rows,
        lengths=tuple(range(1, lengths + 1)),
        verify_seconds=_by_context(verified, len(rows)),
        draft=None
        if drafter is None
        else DraftProfile(
            drafter_identity(drafter),
            counts,
            _by_context([drafting for _, *drafting in rounds], len(rows)),
            _by_context([[plain] for plain, *_ in rounds], len(rows)),
        ),
    )


def check_measurement(
    *, max_rows: int, lengths: int | None, contexts: Sequence[int], repeats: int, warmup: int
) -> None:
    """Raises `ValueError` for an argument of `measure_capacity` that is out of range for every target."""
    for name, value, least in (("max_rows", max_rows, 1), ("repeats", repeats, 1), ("warmup", warmup, 0)):
        if value < least:
            raise ValueError(f"`{name}` is {value}; it must be at least {least}.")
    if lengths is not None and lengths < 1:
        raise ValueError(f"`lengths` is {lengths}; it must be at least 1.")
    if not contexts or min(contexts) < 1:
        raise ValueError(f"`contexts` is {list(contexts)}; give at least one length of a prompt, of at least 1 token.")


def _row_counts(max_rows: int) -> tuple[int, ...]:
    """1, 2, 4, ... up to `max_rows`, and that itself."""
    return tuple(sorted({max_rows, *(1 << power for power in range(max_rows.bit_length()))}))


def _check_room(target: PreTrainedModel, context: int, new_tokens: int) -> None:
    limit = getattr(target.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if limit is not None and context + new_tokens > limit:
        raise ValueError(
            f"`contexts` has {context}, after which {new_tokens} more tokens are measured, and the target has "
            f"`max_position_embeddings` = {limit}. Give contexts of at most {max(limit - new_tokens, 0)}."
        )


def _by_context(cells: list[list[float]], rows: int) -> Table:
    """One list per context and number of rows to `(contexts, rows, n)`."""
    return _nested(cells[start : start + rows] for start in range(0, len(cells), rows))


@contextlib.contextmanager
def _undisturbed(target: PreTrainedModel) -> Iterator[None]:
    """Evaluation mode and a seed, both put back afterwards."""
    was_training = target.training
    with torch.random.fork_rng(devices=[target.device] if target.device.type == "cuda" else []):
        torch.manual_seed(0)
        target.eval()
        try:
            yield
        finally:
            target.train(was_training)


def _ordinary_ids(target: PreTrainedModel) -> torch.Tensor:
    """All ids but those with a meaning of their own: ends of text, padding, places of images."""
    special: set[int] = set()
    for config in (target.config, target.config.get_text_config(decoder=True), target.generation_config):
        for name, value in config.to_dict().items():
            if name.endswith(_TOKEN_FIELDS) and value is not None:
                special.update(value if isinstance(value, list) else [value])
    size = target.config.get_text_config(decoder=True).vocab_size
    return torch.tensor([token for token in range(size) if token not in special])


def _random_ids(vocabulary: torch.Tensor, rows: int, length: int) -> torch.Tensor:
    """`(rows, length)`, the same each time."""
    generator = torch.Generator().manual_seed(0)
    return vocabulary[torch.randint(len(vocabulary), (rows, length), generator=generator)]


def _verify_seconds(
    target: PreTrainedModel, layers: list[int], ids: torch.Tensor, lengths: int, repeats: int, warmup: int
) -> list[float]:
    """Median seconds of verifications of 1 to `lengths` tokens in every row.

    Args:
        target: the target.
        layers: layers whose states a drafter needs.
        ids: `(rows, context + lengths)`, the prompts and what comes after them.
        lengths: most tokens per row.
        repeats: timed runs of each.
        warmup: runs of each before these.
    """
    prompts, following = ids[:, :-lengths], ids[:, -lengths:]
    everyone = list(range(len(ids)))
    clock = Stopwatch(ids.device)
    seconds: list[list[float]] = [[] for _ in range(lengths)]

    def measure(
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **model_kwargs: Any,
    ) -> torch.Tensor:
        session = TargetSession(model, layers, model_kwargs, len(everyone))
        session.prefill(input_ids)
        session.commit(everyone, [0] * len(everyone))
        # One of each length after the other, so that a machine that slows down does so for all of them.
        for _ in range(warmup + repeats):
            for length in range(1, lengths + 1):
                start = clock.now()
                session.verify(following[:, :length])
                seconds[length - 1].append(clock.seconds(start, clock.now()))
                session.commit(everyone, [length] * len(everyone))
        return input_ids

    _generate(target, prompts, custom_generate=measure, max_new_tokens=lengths + 1)
    return [statistics.median(times[warmup:]) for times in seconds]


def _round_seconds(
    target: PreTrainedModel,
    drafter: Drafter,
    prompts: torch.Tensor,
    counts: tuple[int, ...],
    repeats: int,
    warmup: int,
) -> list[float]:
    """Median seconds of plain rounds, then what rounds which draft `counts` tokens take longer, without verifications.

    Args:
        target: the target.
        drafter: its drafter.
        prompts: `(rows, context)`.
        counts: drafted tokens per row.
        repeats: least number of timed rounds of each.
        warmup: rounds of each before these.
    """
    prompts = _as_trained(prompts, drafter)
    seconds: dict[int, list[float]] = {count: [] for count in (0, *counts)}
    while min(map(len, seconds.values())) < warmup + repeats:
        for count, times in seconds.items():
            times += _seconds_without_verifying(target, drafter, prompts, count)
    plain, *drafting = (statistics.median(times[warmup:]) for times in seconds.values())
    return [max(plain, _LEAST_SECONDS), *(max(time - plain, _LEAST_SECONDS) for time in drafting)]


def _as_trained(prompts: torch.Tensor, drafter: Drafter) -> torch.Tensor:
    """`prompts (rows, context)` that end as chats did in the drafter's training, else decoding warns about them."""
    ending = prompts.new_tensor(drafter.config.generation_prompt_ids or [])[: prompts.shape[1]]
    return torch.cat([prompts[:, len(ending) :], ending.expand(len(prompts), -1)], dim=1)


def _seconds_without_verifying(
    target: PreTrainedModel, drafter: Drafter, prompts: torch.Tensor, count: int
) -> list[float]:
    """Seconds of the rounds of one call in which every row drafted `count` tokens, less those of the verification."""
    from .schedulers import Plain  # which look profiles up in this module

    options: dict[str, Any] = {"dspark_scheduler": Plain()}
    if count:
        options = {"dspark_scheduler": "none", "dspark_num_draft_tokens": count}
    options |= {"assistant_model": drafter, "do_sample": True, "max_new_tokens": _new_tokens(count), **_NO_PROCESSORS}
    _generate(target, prompts, **options)
    rounds: list[RoundStats] = drafter.last_stats.rounds
    return [
        entry.seconds - entry.verify_seconds
        for entry in rounds[1:]
        if (entry.rows, entry.drafted) == (len(prompts), len(prompts) * count)
    ]


def _new_tokens(count: int) -> int:
    """Tokens of a call that lasts at least `_ROUNDS` rounds, all drafts kept, and the one before them."""
    return 1 + _ROUNDS * (count + 1)


def _generate(target: PreTrainedModel, prompts: torch.Tensor, **options: Any) -> None:
    """`generate` after prompts `(rows, context)` that goes on to the end of its length."""
    target.generate(
        input_ids=prompts, attention_mask=torch.ones_like(prompts), use_cache=True, eos_token_id=None, **options
    )


__all__ = [
    "CapacityProfile",
    "DraftProfile",
    "check_measurement",
    "drafter_identity",
    "find_profile",
    "measure_capacity",
    "profile_path",
    "save_profile",
    "target_identity",
]
