"""Everything that a training run can be told, from a YAML file (a recipe), the command line, or both.

A recipe is a command line in a file: its keys are the options' names, checked and converted in the same way, and what
the command line says goes before it.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NoReturn

import yaml
from transformers import HfArgumentParser

from ..models import DrafterConfig, DSparkConfig, Eagle3Config, MTPConfig
from .arguments import DSparkTrainingArguments
from .sharding import check_wrapping


@dataclass(frozen=True)
class Method:
    """A way of drafting that can be trained.

    Args:
        config_class: the configuration of its drafters.
        shape: fields of it that make the method.
        training: defaults of `DSparkTrainingArguments` that the method replaces.
    """

    config_class: type[DrafterConfig]
    shape: Mapping[str, Any] = field(default_factory=dict)
    training: Mapping[str, Any] = field(default_factory=dict)


METHODS = {
    "dspark": Method(DSparkConfig),
    "dflash": Method(
        DSparkConfig,
        shape={"markov_rank": 0, "enable_confidence_head": False},
        training={"ce_weight": 1.0, "tv_weight": 0.0},
    ),
    "eagle3": Method(Eagle3Config),
    "mtp": Method(MTPConfig),
}
"""Methods by name."""


@dataclass
class DrafterArguments:
    """Which target, and what drafter for it; what is unset is as the method's configuration has it."""

    target: str = field(metadata={"help": "Model to draft for: a Hub repository or a local folder."})
    target_device_map: str | None = field(
        default=None,
        metadata={
            "help": "Where the target's weights go: `fsdp` spreads its layers over all processes, `auto` over the "
            "devices of one process; whole on the device of each process if unset."
        },
    )
    method: str = field(default="dspark", metadata={"help": "Kind of drafter: `dspark`, `dflash`, `eagle3` or `mtp`."})
    warm_start: str | None = field(
        default=None, metadata={"help": "Trained drafter to go on from; its shape replaces the options for it."}
    )
    resume: bool = field(default=False, metadata={"help": "Go on from the last checkpoint in the output folder."})
    num_hidden_layers: int | None = field(
        default=None, metadata={"help": "Layers of the drafter; 2 if unset, 1 for `eagle3` and `mtp`."}
    )
    block_size: int | None = field(
        default=None, metadata={"help": "Tokens drafted in one round; 7 if unset, 1 for `mtp`."}
    )
    sample_from_anchor: bool | None = field(
        default=None,
        metadata={
            "help": "Whether the anchor's slot predicts, as in DSpark; true if unset, false as in z-lab's DFlash."
        },
    )
    markov_rank: int | None = field(
        default=None, metadata={"help": "Rank of the sequential head of `dspark`, 0 for none; 256 if unset."}
    )
    markov_head_type: str | None = field(
        default=None, metadata={"help": "`vanilla`, `gated` or `rnn`; `vanilla` if unset."}
    )
    enable_confidence_head: bool | None = field(
        default=None, metadata={"help": "Whether the drafter predicts if its tokens survive; `dspark` does if unset."}
    )
    target_layer_ids: list[int] | None = field(
        default=None, metadata={"help": "Target layers to read; -1 is the embedding output; spread if unset."}
    )
    draft_vocab_size: int | None = field(
        default=None, metadata={"help": "Predict only so many tokens, the most frequent of the data; all if unset."}
    )
    mask_token_id: int | None = field(
        default=None, metadata={"help": "Token for undecided slots, one that text never contains; found if unset."}
    )

    def drafter_config(self) -> DrafterConfig:
        """What `get_drafter` is to build.

        Raises:
            TypeError: if an option is of another type than its field.
            ValueError: if there is no such method, an option is out of its range, or it is not for this method.
        """
        if self.method not in METHODS:
            raise ValueError(f"`method` is {self.method!r}; choose one of {', '.join(METHODS)}.")
        method = METHODS[self.method]
        known = set().union(*(each.config_class.drafter_fields() for each in METHODS.values()))
        names = [each.name for each in fields(self) if each.name in known]
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        for name, value in given.items():
            if name not in method.config_class.drafter_fields() or method.shape.get(name, value) != value:
                raise ValueError(f"`{name}` is {value!r}, which is not for `method` {self.method!r}; leave it out.")
        return method.config_class(**{**given, **method.shape})


@dataclass
class DataArguments:
    """Which data."""

    data_file: str = field(
        metadata={
            "help": "Training rows, a JSON Lines file. Each row has `messages`, `prompt` and `response`, `text`, or "
            "`input_ids` with an optional `loss_mask`."
        }
    )
    eval_file: str | None = field(default=None, metadata={"help": "Held-out rows of the same form."})
    split_long: bool = field(
        default=False, metadata={"help": "Cut long rows into several sequences instead of dropping their ends."}
    )
    num_proc: int | None = field(default=None, metadata={"help": "Processes to tokenise with."})


UNSET = ("", "~", "null")
"""How YAML writes that a key has no value."""

NEEDED = ("target", "data_file", "output_dir")
"""Options without which there is nothing to train, or nowhere to put it."""

Arguments = tuple[DrafterArguments, DataArguments, DSparkTrainingArguments]


class RecipeParser(HfArgumentParser):
    """Reads the options of a training run.

    `--recipe FILE` takes them from a YAML file; what else is on the command line goes before it.

    Raises:
        OSError: if the recipe cannot be read.
        ValueError: if it is no mapping of options to values, or an option is unknown, missing or of a wrong type.
    """

    def __init__(self) -> None:
        super().__init__((DrafterArguments, DataArguments, DSparkTrainingArguments), allow_abbrev=False)
        self.add_argument("--recipe", metavar="FILE", help="YAML file with these options by their names.")
        for action in self._actions:
            action.required = False  # what is missing is said in the same words for the command line and a recipe

    @property
    def names(self) -> list[str]:
        """Names of all options, as a recipe has them."""
        return [action.dest for action in self._actions if action.dest not in ("help", "recipe")]

    def parse(self, argv: Sequence[str] | None = None) -> Arguments:
        """The options on a command line, by default that of this process, and in its recipe."""
        first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        first.add_argument("--recipe")
        found, rest = first.parse_known_args(argv)
        return self.parse_values({} if found.recipe is None else self.read(found.recipe), rest)

    def read(self, path: str | os.PathLike[str]) -> dict[str, Any]:
        """The options in a recipe; one without a value counts as left out."""
        if not Path(path).is_file():
            raise FileNotFoundError(f"There is no recipe {os.fspath(path)!r}.")
        try:
            # All words stay strings, as on a command line: YAML takes `no` for false and `6e-4` for a word.
            recipe = yaml.load(Path(path).read_text(encoding="utf-8"), Loader=yaml.BaseLoader)
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise ValueError(f"The recipe {os.fspath(path)!r} is not YAML: {error}") from error
        if not isinstance(recipe, dict):
            what = "empty" if recipe is None else "no mapping of options to values"
            raise ValueError(f"The recipe {os.fspath(path)!r} is {what}; give a line for each option (`bf16: true`).")
        self.check_names(recipe, f"the recipe {os.fspath(path)!r}")
        lists = {action.dest for action in self._actions if action.nargs == "+"}
        for name, value in recipe.items():
            if isinstance(value, list) and name not in lists:
                raise ValueError(f"`{name}` is {value} in the recipe {os.fspath(path)!r}; it takes one value.")
        found = {name: value for name, value in recipe.items() if value not in UNSET}
        try:
            self.parse_known_args(self._as_arguments(found))
        except ValueError as error:
            raise ValueError(f"{error} (in the recipe {os.fspath(path)!r})") from error
        return found

    def _as_arguments(self, values: Mapping[str, Any]) -> list[str]:
        """Options by name as the words of a command line."""
        switches = {action.dest for action in self._actions if action.nargs == "?" and action.const is True}
        return [part for name, value in values.items() for part in _as_arguments(name, value, name in switches)]

    def check_names(self, names: Iterable[str], place: str, also: Iterable[str] = ()) -> None:
        """Raises `ValueError` for options that do not exist, with those of similar names, `also` among them."""
        known = {*self.names, *also}
        for name in names:
            if name not in known:
                close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
                hint = f" Did you mean {' or '.join(f'`{each}`' for each in close)}?" if close else ""
                raise ValueError(f"There is no option `{name}`, named in {place}.{hint}")

    def parse_values(
        self, values: Mapping[str, Any], argv: Sequence[str] = (), flags: Iterable[str] = ()
    ) -> Arguments:
        """Options as values by name, and further ones as a command line, which go before them.

        `flags` are options that the command line has beside these, to be named where one is misspelt.
        """
        arguments = [*self._as_arguments(values), *argv]
        found, unknown = self.parse_known_args(arguments)
        self.check_names((_option_name(word) for word in unknown if word.startswith("--")), "the command line", flags)
        if unknown:
            raise ValueError(f"The command line has {unknown[0]!r} where an option should be.")
        for name in NEEDED:
            if getattr(found, name) is None:
                raise ValueError(f"`{name}` is not given; it is needed, as an option or in the recipe.")
        if found.method in METHODS:  # which other ones there are is said when a drafter is to be made
            defaults = METHODS[found.method].training.items()
            arguments = [*(part for name, value in defaults for part in _as_arguments(name, value, False)), *arguments]
        drafter, data, training, _ = self.parse_args_into_dataclasses(arguments, look_for_args_file=False)
        check_wrapping(training)
        return drafter, data, training

    def error(self, message: str) -> NoReturn:
        """See the base class, which would print a hundred options."""
        raise ValueError(re.sub(r"^argument --(\w+)\S*:", r"`\1`:", message))


def _option_name(word: str) -> str:
    """`--weight-decay=0.1` to `weight_decay`."""
    return word.removeprefix("--").split("=")[0].replace("-", "_")


def _as_arguments(name: str, value: Any, is_switch: bool) -> list[str]:
    """One entry of a recipe as words of a command line; a switch can stand alone."""
    if isinstance(value, (list, tuple)):
        return [f"--{name}", *map(str, value)]
    if is_switch and str(value).lower() == "true":
        return [f"--{name}"]
    return [f"--{name}={json.dumps(value) if isinstance(value, dict) else value}"]


__all__ = ["METHODS", "DataArguments", "DrafterArguments", "Method", "RecipeParser"]
