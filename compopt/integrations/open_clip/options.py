"""Estimators by name, and their options as flags, read from the signatures of the presets."""

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

MODEL = "model"  # value of --tau: the model's own temperature
PROG = "compopt.integrations.open_clip"
USAGE = f"python -m {PROG} --estimator NAME [options] -- <flags of open_clip>"
# Parameters of a preset that the data, the model and the launcher decide.
DECIDED = {"n", "batch_size", "mode", "version", "process_group", "sample_groups"}
DTYPES = {"float32": torch.float32, "float64": torch.float64}


@dataclass(frozen=True)
class Method:
    """A preset under a name."""

    preset: Callable[..., ContrastiveEstimator]
    fixed: Mapping[str, Any] = field(default_factory=dict)  # arguments that the name stands for
    defaults: Mapping[str, Any] = field(default_factory=dict)  # values of flags that differ from the preset's
    decays: bool = False  # gamma falls along a cosine, since the length of the run is known here

    @property
    def parameters(self) -> Mapping[str, inspect.Parameter]:
        return inspect.signature(self.preset).parameters

    @property
    def has_rows(self) -> bool:
        """True where ``n`` is required: rows are kept for every sample, and are no option."""
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
    "residual": Method(presets.ResidualEstimator),
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
    index: str | None  # where rows come from: a file, keys:N, positions
    gamma_min: float = 0.2  # end of a decaying gamma
    gamma_decay: float = 0.5  # share of the run after which it is reached

    @property
    def method(self) -> Method:
        return METHODS[self.name]

    @property
    def tau_of_model(self) -> bool:
        """True where the temperature is 1 / the model's ``logit_scale``."""
        return self.given.get("tau", self.method.defaults.get("tau")) == MODEL

    @property
    def wants_rows(self) -> bool:
        """True where the samples of this run need an index."""
        return self.method.has_rows or self.index is not None

    def build(self, n: int | None, dim: int | None, samples: int | None, batch_size: int) -> ContrastiveEstimator:
        """Build the estimator for ``n`` rows, if samples have an index, and calls of ``batch_size`` on all ranks."""
        parameters = self.method.parameters
        values = {**self.method.fixed, **self.given}
        if values.get("tau") == MODEL:
            del values["tau"]
        if "batch_size" in parameters:  # `recommended` chooses by both, and keeps no rows
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
    """Return options from the flags before ``--``; exits with a message as ``argparse`` does."""
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
            parser.add_argument("--gamma-min", type=float, default=0.2, help="value that gamma falls to (0.2)")
            share = "share of the run in which it falls (0.5)"
            parser.add_argument("--gamma-decay", type=float, default=0.5, help=share)
    known, unknown = parser.parse_known_args(arguments)
    if unknown:
        flags = " ".join(option for action in parser._actions for option in action.option_strings[:1])
        parser.error(f"{' '.join(unknown)}: not known here. {name} takes {flags}; open_clip's own flags come after --")
    values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in vars(known).items()}
    own = {key: values.pop(key) for key in ("index", "gamma_min", "gamma_decay") if key in values}
    return Flags(values.pop("estimator"), values, **own)


def _add_flag(parser: argparse.ArgumentParser, parameter: inspect.Parameter, default: Any) -> None:
    """Add one parameter as a flag; a function is left out, since no word can spell it."""
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
    """Return a converter to one of some words, or to the first of some types that a word spells."""
    # the name of a Literal does not tell its words: any word is passed on, and the preset refuses wrong ones
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
