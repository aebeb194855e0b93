"""Checks of the arguments of a call: features, temperatures, data-set indices.

Values are checked on the host only, since reading them from a device would wait for it. Bad values on a device become a
flag or NaN there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor

from compopt import checks

E = TypeVar("E")
P = ParamSpec("P")
R = TypeVar("R")
_FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
INDEX_REMEDY = (
    "pass positions in the data set of n samples, from 0 on. Those of a part (Subset, random_split, train_test_split) "
    "are positions in the whole: give its n, or number the part by itself, compopt.data.Indexed(part)"
)
EXTRA_REMEDY = (
    "for candidates that are not the positive of any sample (such as -1) also pass index2=index; positions are then "
    "not compared with n"
)
SMALL = 512  # largest number of integers for which Python's functions are faster than NumPy's
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def three_by_position(call: Callable[Concatenate[E, P], R]) -> Callable[Concatenate[E, P], R]:
    """Refuse a call with more positional arguments, usually an unpacked output of a model, and name the remedy."""

    @functools.wraps(call)
    def checked(self: E, *args: P.args, **given: P.kwargs) -> R:
        if len(args) > 3:
            raise TypeError(
                f"a call has up to three arguments by position, z1, z2 and index, got {len(args)}{remedy_for(args[0])}"
            )
        return call(self, *args, **given)

    return checked


def check_strided(name: str, value: Tensor) -> None:
    """Refuse sparse and nested layouts."""
    if value.layout != torch.strided or value.is_nested:
        layout = "nested" if value.is_nested else value.layout
        raise TypeError(f"{name} must be a dense tensor, got layout {layout}; pass {name}.to_dense()")


def check_vector(name: str, value: Any, batch: int | None, of: str = "a batch of {} samples") -> Tensor:
    """Return a 1-D integer tensor with ``batch`` entries (``None``: any number) as int64; ``of`` is for messages."""
    if not isinstance(value, Tensor):
        wanted = "integers" if batch is None else f"{batch} integers"
        raise TypeError(f"{name} must be a tensor of {wanted}, got {type(value).__name__}{_numbered(name, value)}")
    check_strided(name, value)
    if value.dtype not in INTEGERS:
        names = _are_names(name)
        kind = "any integers, equal ones for equal samples" if names else "data-set positions"
        scale = " (a scale that the model returns as a third output? pass z1, z2, index)" if value.dim() == 0 else ""
        raise TypeError(f"{name} must hold integers ({kind}), got {value.dtype}{scale}")
    if value.dim() != 1:
        wanted = "B" if batch is None else str(batch)
        raise ValueError(f"{name} must have shape ({wanted},), got {tuple(value.shape)}; one entry per sample")
    if batch is not None and value.shape[0] != batch:
        raise ValueError(f"{name} has {len(value)} entries for {of.format(batch)}; pass one for each")
    if value.is_meta:
        raise ValueError(f"{name} is on the meta device and holds no values; pass it on the CPU")
    return value if value.dtype == torch.int64 else value.to(torch.int64)


def _are_names(name: str) -> bool:
    return name == "labels" or name.startswith("within")


def _numbered(name: str, value: Any) -> str:
    """Return the remedy for a list, an array or a range in place of a tensor of integers."""
    if not isinstance(value, list | tuple | range | np.ndarray):
        return ""
    if not any(isinstance(entry, str | bytes) for entry in value):
        return f"; pass torch.as_tensor({name})"
    if _are_names(name):
        return " of strings; number the distinct ones once, number = compopt.data.key_index(sorted(set(strings)))"
    return (
        " of strings; wrap the data set in compopt.data.Indexed, which adds positions to its batches, or number all "
        "samples once, number = compopt.data.key_index(strings)"
    )


def remedy_for(value: Any) -> str:
    """Return the remedy for the output of a model, or a name in it, in place of features."""
    if isinstance(value, str):
        return ", a name in the output of a model, which * unpacks to its names; pass output.image_embeds, for example"
    if hasattr(value, "pooler_output"):
        return "; pass its .pooler_output"
    return f"; pass entries of it, which has {', '.join(map(str, value))}" if isinstance(value, Mapping) else ""


class Survey(NamedTuple):
    """Minimum and maximum of integers on the host, and whether all differ."""

    low: int
    high: int
    distinct: bool


def survey(value: Tensor) -> Survey | None:
    """Compute the facts that all checks of integers use, on the host; ``None`` on a device, to avoid waiting for it."""
    count = value.shape[0]
    if value.device.type != "cpu" or count == 0:
        return None
    if count <= SMALL:
        values = value.tolist()
        return Survey(min(values), max(values), len(set(values)) == count)
    ordered = np.sort(value.numpy())
    return Survey(int(ordered[0]), int(ordered[-1]), not bool((ordered[1:] == ordered[:-1]).any()))


def check_range(
    name: str, value: Tensor, n: int | None, known: Survey | None = None, remedy: str = INDEX_REMEDY
) -> Tensor | None:
    """Raise IndexError for an entry outside ``0 .. n - 1`` on the host; on a device, return a 0-d flag instead."""
    if n is None or value.shape[0] == 0:
        return None
    known = known or survey(value)
    if known is None:
        return ((value < 0) | (value >= n)).any()
    if known.low < 0 or known.high >= n:
        wrong = known.high if known.high >= n else known.low
        raise IndexError(f"{name} {wrong} is outside n={n}; {remedy}")
    return None


def check_pool(candidates: Any, scores: Tensor) -> Tensor:
    """Return the distinct positions of the candidates (columns) of ``scores`` ``(B, M)``, as ``(M,)`` int64."""
    if scores.shape[1] == 0:
        raise ValueError("scores have no columns; a pool needs at least one candidate")
    names = check_vector("candidates", candidates, scores.shape[1], "scores of {} candidates")
    known = survey(names)
    if known is not None and (known.low < 0 or not known.distinct):
        raise ValueError("candidates must be positions >= 0 that occur once each; merge or drop the others")
    return names


def check_floats(name: str, value: Any, shape: str, axes: int = 2) -> Tensor:
    """Return a dense floating-point tensor with ``axes`` axes and with values; ``shape`` is for messages."""
    if not isinstance(value, Tensor) or value.dtype not in _FLOATS:
        found = value.dtype if isinstance(value, Tensor) else f"{type(value).__name__}{remedy_for(value)}"
        raise TypeError(f"{name} must be a floating-point tensor, got {found}")
    check_strided(name, value)
    if value.dim() != axes:
        raise ValueError(f"{name} must have shape {shape}, got {tuple(value.shape)}")
    if value.is_meta:
        raise ValueError(f"{name} is on the meta device and holds no values; pass it on another, such as cpu")
    return value


def check_values(name: str, value: Any, shape: str, axes: int) -> Tensor:
    """Return the result of :func:`check_floats`, detached and at least float32."""
    value = check_floats(name, value, shape, axes).detach()
    return value.to(torch.promote_types(value.dtype, torch.float32))


def check_features(z1: Any, z2: Any, least: int = 2) -> None:
    """Check that features are two floating-point matrices ``(B, d)`` of one shape, dtype and device, B >= ``least``."""
    check_floats("z1", z1, "(B, d)"), check_floats("z2", z2, "(B, d)")
    if z1.shape != z2.shape or z1.shape[1] == 0:
        raise ValueError(
            f"z1 and z2 must have the same shape (B, d), got {tuple(z1.shape)} and {tuple(z2.shape)}; "
            f"row i of both belongs to the same sample"
        )
    _check_alike("z2", z2, z1)
    if z1.shape[0] < least:
        raise ValueError(
            f"z1 has {len(z1)} rows; a batch must have at least two distinct samples to have negatives: if it is the "
            f"last of an epoch, give its DataLoader drop_last=True"
        )


def check_dim(dim: int, features: Tensor) -> None:
    """Refuse features of another dimension than that of a normalizer's state."""
    if features.shape[-1] != dim:
        raise ValueError(f"dim is {dim}, the features have {features.shape[-1]} dimensions; build it with theirs")


def check_negatives(negatives: Any, like: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Return further candidates ``(M, d)``, which must match ``like``, and their positions, ``(M,)`` int64."""
    if negatives is None:
        return None, None
    z, positions = split_negatives(negatives)
    check_floats("negatives", z, f"(M, {like.shape[1]})")
    if z.shape[1] != like.shape[1]:
        raise ValueError(f"negatives must have shape (M, {like.shape[1]}) as z1 and z2, got {tuple(z.shape)}")
    _check_alike("negatives", z, like)
    return z, None if positions is None else check_vector("negatives[1]", positions, len(z), "{} candidates")


def split_negatives(negatives: Any) -> tuple[Any, Any]:
    """Return the features of ``negatives=``, a tensor or a pair, and their positions or ``None``."""
    if not isinstance(negatives, tuple | list):
        return negatives, None
    if len(negatives) != 2:
        raise ValueError(
            f"negatives must be features (M, d), or these and their positions, got {len(negatives)} of them"
        )
    return negatives[0], negatives[1]


def check_momentum(features: Any, like: Tensor) -> list[Tensor]:
    """Return a momentum encoder's features of both modalities or views, ``(B, d)`` each, which must match ``like``."""
    wanted = "a pair, the copy's features of the samples of z1 and of z2"
    checked = _check_matrices("keys", features, [len(like)] * 2, wanted, like.shape[1])
    for number, z in enumerate(checked):
        if z.device != like.device:
            raise ValueError(f"keys[{number}] must be on the device of z1, got {z.device} and {like.device}")
    return checked


def check_guide(guide: Any, batch: int, more: int | None) -> list[Tensor]:
    """Return the guide's features: two of ``(B, g)``, and ``(M, g)`` for ``more`` further candidates."""
    sizes = [batch] * 2 + ([] if more is None else [more])
    also = "" if more is None else ", and of negatives (or PairPolicy(spare_negatives=True))"
    wanted = f"{len(sizes)} tensors of features, of z1 and of z2{also}"
    return _check_matrices("guide", guide, sizes, wanted)


def _check_matrices(name: str, given: Any, sizes: list[int], wanted: str, width: int | None = None) -> list[Tensor]:
    """Return floating-point matrices with ``sizes`` rows and ``width`` columns (``None``: the same number in all)."""
    if not isinstance(given, tuple | list) or len(given) != len(sizes):
        raise ValueError(f"{name} must be {wanted}, got {_count(given)}")
    for number, (z, size) in enumerate(zip(given, sizes, strict=True)):
        check_floats(f"{name}[{number}]", z, f"({size}, {'g' if width is None else width})")
        if z.shape != (size, given[0].shape[1] if width is None else width) or z.shape[1] == 0:
            shape = f"shape ({size}, g), one g for all" if width is None else f"the shape of z1, ({size}, {width})"
            raise ValueError(f"{name}[{number}] must have {shape}, got {tuple(z.shape)}")
    return list(given)


def check_within(within: Any, batch: int, more: int | None) -> list[Tensor]:
    """Return the keys of the batch, ``(B,)`` int64, and those of ``more`` further candidates, ``(M,)``."""
    keys = list(within) if isinstance(within, tuple | list) else [within]
    if len(keys) != (1 if more is None else 2):
        pair = "a pair of tensors of keys, (B,) and those of negatives (M,)"
        wanted = "one tensor of keys (B,)" if more is None else pair
        raise ValueError(f"within must be {wanted}, got {_count(within)}")
    sizes = {"within": batch} if more is None else {"within[0]": batch, "within[1]": more}
    return [check_vector(name, key, size, "{} of them") for (name, size), key in zip(sizes.items(), keys, strict=True)]


def _count(value: Any) -> str:
    return f"{len(value)} of them" if isinstance(value, tuple | list) else type(value).__name__


def _check_alike(name: str, z: Tensor, z1: Tensor) -> None:
    if z.dtype != z1.dtype:
        raise TypeError(
            f"{name} must have the dtype of z1, got {z.dtype} and {z1.dtype}; pass z1.float(), {name}.float()"
        )
    if z.device != z1.device:
        raise ValueError(f"{name} must be on the device of z1, got {z.device} and {z1.device}")


def check_tau(tau: Any, batch: int, directions: int = 2) -> float | Tensor:
    """Return a positive number or a checked tensor: 0-d, ``(B, 1)`` (also for ``(B,)``) or ``(B, D)``."""
    if not isinstance(tau, Tensor):
        checks.positive("tau", tau)
        return float(tau)
    check_strided("tau", tau)
    if not tau.is_floating_point():
        raise TypeError(f"tau must be a floating-point tensor, got {tau.dtype}")
    if tuple(tau.shape) not in ((), (batch,), (batch, 1), (batch, directions)):
        raise ValueError(f"tau must be 0-d, ({batch},) or ({batch}, {directions}), got shape {tuple(tau.shape)}")
    if tau.is_meta:
        raise ValueError("tau is on the meta device and holds no value; make it with device='cpu' or give a number")
    if tau.device.type == "cpu":
        wrong = tau.detach()[~((tau > 0) & tau.isfinite())].flatten()
        if len(wrong):
            raise ValueError(f"tau must be greater than 0 and finite, got {wrong[0].item()!r}")
    return tau[:, None] if tau.dim() == 1 else tau
