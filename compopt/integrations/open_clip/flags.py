"""Options of an estimator as flags, read from the signature of its preset."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from compopt.integrations.open_clip.options import METHODS, MODEL, Method, Options

PROG = "compopt.integrations.open_clip"
USAGE = f"python -m {PROG} --estimator NAME [options] -- <flags of open_clip>"
# Of a preset's parameters: what the data, the model and the launcher decide.
DECIDED = {"n", "batch_size", "mode", "version", "process_group", "sample_groups"}
DTYPES = {"float32": torch.float32, "float64": torch.float64}


def split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Flags before and after the first ``--``."""
    at = arguments.index("--") if "--" in arguments else len(arguments)
    return list(arguments[:at]), list(arguments[at + 1 :])


def parse(arguments: Sequence[str]) -> Options:
    """Options from the flags before ``--``; exits with a message as ``argparse`` does."""
    first = argparse.ArgumentParser(prog=PROG, usage=USAGE, add_help=False, allow_abbrev=False)
    first.add_argument("--estimator", choices=sorted(METHODS), required=bool(set(arguments) - {"-h", "--help"}))
    name = first.parse_known_args(arguments)[0].estimator
    parser = _parser(name)
    known, unknown = parser.parse_known_args(arguments)
    if unknown:
        flags = " ".join(option for action in parser._actions for option in action.option_strings[:1])
        parser.error(f"{' '.join(unknown)}: not known here. {name} takes {flags}; open_clip's own flags come after --")
    values = vars(known)
    own = {key: values.pop(key) for key in ("index", "gamma_min", "gamma_decay") if key in values}
    values.pop("estimator")
    return Options(name, values, **own)


def _parser(name: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=PROG, usage=USAGE, allow_abbrev=False, description="open_clip with another estimator."
    )
    parser.add_argument("--estimator", choices=sorted(METHODS), required=True, help="with its name, --help lists more")
    parser.add_argument("--index", help="rows: a ShardIndex (.json), identifiers (.npy), keys:N, or positions")
    if name is None:
        return parser
    method = METHODS[name]
    for key, parameter in method.parameters.items():
        if key not in DECIDED | method.fixed.keys():
            _add(parser, parameter, method)
    if method.decays:
        parser.add_argument("--gamma-min", type=float, default=0.2, help="value that gamma falls to (0.2)")
        parser.add_argument("--gamma-decay", type=float, default=0.5, help="share of the run in which it falls (0.5)")
    return parser


def _add(parser: argparse.ArgumentParser, parameter: inspect.Parameter, method: Method) -> None:
    """One parameter as a flag; those that no word can spell are left out."""
    kinds = [kind.strip() for kind in str(parameter.annotation).split("|")]
    flag = "--" + parameter.name.replace("_", "-")
    default = method.defaults.get(parameter.name, parameter.default)
    options: dict[str, Any] = {"default": argparse.SUPPRESS}
    if default is not inspect.Parameter.empty:
        options["help"] = f"({default})"
    if kinds == ["bool"]:
        parser.add_argument(flag, action=argparse.BooleanOptionalAction, **options)
    elif kinds == ["torch.dtype"]:
        parser.add_argument(flag, type=_one_of(DTYPES), metavar="|".join(DTYPES), **options)
    elif kinds == ["tuple[float, float]"]:
        parser.add_argument(flag, type=float, nargs=2, action=_Pair, **options)
    elif {"int", "float", "str"} & set(kinds):
        words = [MODEL] if parameter.name == "tau" else []
        metavar = "|".join([kind for kind in kinds if kind.islower() and "." not in kind] + words)
        parser.add_argument(flag, type=_word(kinds, words), metavar=metavar, **options)


class _Pair(argparse.Action):
    def __call__(self, parser: Any, namespace: Any, values: Any, option: Any = None) -> None:
        setattr(namespace, self.dest, tuple(values))


def _one_of(table: Mapping[str, Any]) -> Callable[[str], Any]:
    def convert(word: str) -> Any:
        if word not in table:
            raise argparse.ArgumentTypeError(f"{word!r} is none of {', '.join(table)}")
        return table[word]

    return convert


def _word(kinds: Sequence[str], words: Sequence[str]) -> Callable[[str], Any]:
    """A converter to the first of some types that a word spells."""

    def convert(word: str) -> Any:
        if word in words:
            return word
        if "None" in kinds and word == "none":
            return None
        if "bool" in kinds and word in ("true", "false"):
            return word == "true"
        for kind in (int, float):
            if kind.__name__ in kinds:
                try:
                    return kind(word)
                except ValueError:
                    continue
        if "str" in kinds:
            return word
        raise argparse.ArgumentTypeError(f"{word!r} is no {' or '.join([*kinds, *words])}")

    return convert
