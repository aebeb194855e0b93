"""Estimators by name, and their options as flags, derived from the signatures of the presets."""

from __future__ import annotations

import argparse
import contextlib
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from compopt import presets
from compopt.contrastive import ContrastiveEstimator
from compopt.presets import recommended
from compopt.schedules import GAMMA_DECAY, GAMMA_MIN

MODEL = "model"  # value of --tau: the model's own temperature
PROG = "compopt.integrations.open_clip"
USAGE = f"python -m {PROG} --estimator NAME [options] -- <flags of open_clip>"
# Parameters of a preset that are determined by the data, the model and the launcher.
DECIDED = {"n", "batch_size", "mode", "version", "process_group", "sample_groups"}
DTYPES = {"float32": torch.float32, "float64": torch.float64}


@dataclass(frozen=True)
class Method:
    """Preset that can be selected by a name."""

    preset: Callable[..., ContrastiveEstimator]
    fixed: Mapping[str, Any] = field(default_factory=dict)  # arguments implied by the name
    defaults: Mapping[str, Any] = field(default_factory=dict)  # defaults of flags that differ from those of the preset
    decays: bool = False  # gamma follows a cosine schedule over the run

    @property
    def parameters(self) -> Mapping[str, inspect.Parameter]:
        return inspect.signature(self.preset).parameters

    @property
    def has_rows(self) -> bool:
        """True if ``n`` is required: the preset stores rows for every sample."""
        return "n" in self.parameters and self.parameters["n"].default is inspect.Parameter.empty


METHODS = {
    "clip": Method(presets.InfoNCEEstimator, {"multiply_tau": False}, {"tau": MODEL}),
    "dcl": Method(presets.DCLEstimator),
    "emc2": Method(presets.EMC2Estimator),
    "infonce": Method(presets.InfoNCEEstimator),
    "isogclr": Method(presets.ISogCLREstimator),
    "memory": Method(presets.MemoryEstimator),
    "neuclip": Method(presets.NeuCLIPEstimator),
    "recommended": Method(recommended),
    "sogclr": Method(presets.SogCLREstimator),
}
for _version in ("v0", "v1", "v2", "v3"):
    _fixed = {"version": _version, "gamma": 1.0}
    METHODS[f"fastclip-{_version}"] = Method(presets.FastCLIPEstimator, _fixed, decays=True)


@dataclass(frozen=True)
class Flags:
    """Flags of a run that concern the estimator."""

    name: str
    given: dict[str, Any]  # arguments of the preset
    index: str | None  # source of the rows: a file, keys:N, positions
    gamma_min: float = GAMMA_MIN  # final value of a decaying gamma
    gamma_decay: float = GAMMA_DECAY  # share of the run after which gamma_min is reached

    @property
    def method(self) -> Method:
        return METHODS[self.name]

    @property
    def tau_of_model(self) -> bool:
        """True if the temperature is 1 / ``logit_scale`` of the model."""
        return self.given.get("tau", self.method.defaults.get("tau")) == MODEL

    @property
    def wants_rows(self) -> bool:
        """True if the samples of this run need an index."""
        return self.method.has_rows or self.index is not None

    def build(self, n: int | None, dim: int | None, samples: int | None, batch_size: int) -> ContrastiveEstimator:
        """Build the estimator for ``n`` rows (``None``: no index) and a global batch of ``batch_size``."""
        parameters = self.method.parameters
        values = {**self.method.fixed, **self.given}
        if values.get("tau") == MODEL:
            del values["tau"]
        if "batch_size" in parameters:  # `recommended` chooses by n and batch_size, and stores no rows
            values |= {"n": samples if n is None else n, "batch_size": batch_size}
        elif n is not None and "n" in parameters:
            values["n"] = n
        if "dim" in parameters and values.setdefault("dim", dim) is None:
            raise ValueError(f"--dim: the size of this model's features is not known; {self.name} needs it")
        est = self.method.preset(**values)
        if list(est.parameters()):
            raise ValueError(
                "--learn-tau: open_clip's optimizer learns what is in the model, and its scale is there already: use "
                "--tau model instead"
            )
        if self.tau_of_model and est.temperature.learns:
            raise ValueError(f"--tau model: {self.name} with these options learns temperatures of its own; give a tau")
        return est


def parse_flags(arguments: Sequence[str]) -> Flags:
    """Return options from the flags before ``--``; exit with a message as ``argparse`` does."""
    parser = argparse.ArgumentParser(
        prog=PROG, usage=USAGE, allow_abbrev=False, description="open_clip with another estimator.", add_help=False
    )
    parser.add_argument(
        "--estimator",
        choices=sorted(METHODS),
        required=not {"-h", "--help"} & set(arguments),
        help="with its name, --help lists more",
    )
    name = parser.parse_known_args(arguments)[0].estimator
    parser.add_argument("--help", "-h", action="help", help="show this and exit")
    parser.add_argument("--index", help="rows: a ShardIndex (.json), identifiers (.npy), keys:N, or positions")
    if name is not None:
        method = METHODS[name]
        for key, parameter in method.parameters.items():
            if key not in DECIDED | method.fixed.keys():
                _add_flag(parser, parameter, method.defaults.get(key, parameter.default))
        if method.decays:
            value, share = "value that gamma falls to (%(default)s)", "share of the run in which it falls (%(default)s)"
            parser.add_argument("--gamma-min", type=float, default=GAMMA_MIN, help=value)
            parser.add_argument("--gamma-decay", type=float, default=GAMMA_DECAY, help=share)
    known, unknown = parser.parse_known_args(arguments)
    if unknown:
        flags = " ".join(option for action in parser._actions for option in action.option_strings[:1])
        parser.error(f"{' '.join(unknown)}: not known here. {name} takes {flags}; open_clip's own flags come after --")
    values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in vars(known).items()}
    own = {key: values.pop(key) for key in ("index", "gamma_min", "gamma_decay") if key in values}
    return Flags(values.pop("estimator"), values, **own)


def _add_flag(parser: argparse.ArgumentParser, parameter: inspect.Parameter, default: Any) -> None:
    """Add one parameter as a flag; parameters that are functions are omitted."""
    annotation, required = str(parameter.annotation), default is inspect.Parameter.empty
    flag = "--" + parameter.name.replace("_", "-")
    options: dict[str, Any] = {"default": argparse.SUPPRESS, "help": None if required else f"({default})"}
    if annotation == "bool":
        parser.add_argument(flag, action=argparse.BooleanOptionalAction, **options)
    elif isinstance(default, tuple):
        parser.add_argument(flag, type=float, nargs=len(default), **options)
    elif required or not callable(default):
        kinds = [kind.strip() for kind in annotation.split("|")]
        words = [*DTYPES] if isinstance(default, torch.dtype) else re.findall(r"""["'](\w+)["']""", annotation)
        words += [MODEL] if parameter.name == "tau" else []
        shown = [kind for kind in kinds if kind in ("bool", "int", "float", "str")] + words
        parser.add_argument(flag, type=_converter(kinds, words, shown), metavar="|".join(shown), **options)


def _converter(kinds: Sequence[str], words: Sequence[str], shown: Sequence[str]) -> Callable[[str], Any]:
    """Return a converter of an argument to one of some words, or to the first type that can parse it."""
    # the words of a named Literal are unknown here: pass any word, and let the preset raise for wrong ones
    names = {kind for kind in kinds if kind.isidentifier() and kind[0].isupper()} - {"None", "Tensor"}
    any_word = bool(names) or "str" in kinds
    constants: dict[str, Any] = {word: DTYPES.get(word, word) for word in words}
    constants |= {"none": None} if "None" in kinds else {}
    constants |= {"true": True, "false": False} if "bool" in kinds else {}

    def convert(word: str) -> Any:
        if word in constants:
            return constants[word]
        for kind in (int, float):
            if kind.__name__ in kinds:
                with contextlib.suppress(ValueError):
                    return kind(word)
        if any_word:
            return word
        raise argparse.ArgumentTypeError(f"{word!r} is no {' or '.join(shown)}")

    return convert
