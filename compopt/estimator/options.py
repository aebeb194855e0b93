"""Signatures of constructors that forward options to their base class, and of methods that share arguments."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypedDict, TypeVar, cast

import torch

from compopt.distributed.ranks import ProcessGroup
from compopt.stores import Offload


class PlacementOptions(TypedDict, total=False):
    """Keywords of :class:`~compopt.Estimator` for the placement and the dtype of an object's rows."""

    process_group: ProcessGroup | None
    offload: Offload | None
    offload_dir: str | os.PathLike[str] | None
    shard: bool
    dtype: torch.dtype


Init = TypeVar("Init", bound=Callable[..., None])
F = TypeVar("F", bound=Callable[..., Any])
E = TypeVar("E")
P = ParamSpec("P")
R = TypeVar("R")


def takes_options(base: type | tuple[type, ...], kind: Any) -> Callable[[Init], Init]:
    """Add the options and their defaults to the signature of an ``__init__``, and refuse any other keyword.

    ``help()``, tab completion and ``inspect.signature`` then show the options although the code has ``**options``.

    Args:
        base: class, or classes, of which the constructors define the defaults.
        kind: type of ``**options``, a ``TypedDict`` of keywords of these constructors.
    """

    def decorate(init: Init) -> Init:
        bases = base if isinstance(base, tuple) else (base,)
        defaults = {name: p for each in bases for name, p in inspect.signature(each).parameters.items()}
        own = [p for p in inspect.signature(init).parameters.values() if p.kind is not p.VAR_KEYWORD]
        shown = [p.replace(kind=p.KEYWORD_ONLY) for name, p in defaults.items() if name in kind.__annotations__]
        signature = inspect.Signature([*own, *shown])

        @functools.wraps(init)
        def checked(self: Any, *args: Any, **kwargs: Any) -> None:
            for name in kwargs:
                if name not in signature.parameters:
                    raise TypeError(
                        f"{type(self).__name__}() got an unexpected keyword argument {name!r}; it takes "
                        f"{', '.join(list(signature.parameters)[1:])}"
                    )
            init(self, *args, **kwargs)

        return cast(Init, _with_signature(checked, signature))

    return decorate


def with_arguments_of(
    call: Callable[Concatenate[E, P], Any],
) -> Callable[[Callable[[E, dict[str, Any]], R]], Callable[Concatenate[E, P], R]]:
    """Give a method the named arguments of ``call``, and pass it the bound ones as a dict by name."""
    signature = inspect.signature(call)
    named = [each for each in signature.parameters.values() if each.kind is not each.VAR_POSITIONAL]
    signature = signature.replace(parameters=named)

    def decorate(method: Callable[[E, dict[str, Any]], R]) -> Callable[Concatenate[E, P], R]:
        @functools.wraps(method)
        def called(self: E, *args: P.args, **kwargs: P.kwargs) -> R:
            try:
                _, *given = signature.bind(self, *args, **kwargs).arguments.items()
            except TypeError as error:
                raise TypeError(f"{type(self).__name__}.{method.__name__}(): {error}") from None
            return method(self, dict(given))

        returns = inspect.signature(method).return_annotation
        return _with_signature(called, signature.replace(return_annotation=returns))

    return decorate


def _with_signature(function: F, signature: inspect.Signature) -> F:
    """Set the signature that ``help()`` and ``inspect.signature`` show, and return the function."""
    cast(Any, function).__signature__ = signature
    return function
