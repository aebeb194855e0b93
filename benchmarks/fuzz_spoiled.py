"""Changes to a call that an estimator must refuse, or answer with a loss of NaN; and hyper-parameters that are none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.fuzz_given import AGREE, EITHER, NAN, REFUSE, Change, Given, extra

TINY = 5  # values that any integer type holds


class HookError(Exception):
    """What a function of the caller raises; it must come through as it is."""


NOT_FEATURES: tuple[Callable[[Tensor], Any], ...] = (
    lambda z: z.long(),
    lambda z: z > 0,
    lambda z: z.to(torch.complex64),
    lambda z: z.to(torch.float8_e5m2),
    lambda z: z.tolist(),
    lambda z: z.detach().double().resolve_neg().numpy(),
    lambda z: None,
    lambda z: 1.0,
    lambda z: "z",
    lambda z: z[0],
    lambda z: z[None],
    lambda z: z.sum(),
    lambda z: z[:, :0],
    lambda z: z[:-1],
    lambda z: torch.cat([z, z]),
    lambda z: z[:, :-1],
    lambda z: z.to("meta"),
    lambda z: z.to(torch.float64 if z.dtype != torch.float64 else torch.float32),
    lambda z: z.to_sparse(),
)
NOT_POSITIONS: tuple[Callable[[Tensor], Any], ...] = (
    lambda index: index.float(),
    lambda index: index.double(),
    lambda index: index > 0,
    lambda index: index.to(torch.complex64),
    lambda index: index.to(torch.uint16),
    lambda index: index.tolist(),
    lambda index: index.numpy(),
    lambda index: 3,
    lambda index: "index",
    lambda index: index[:-1],
    lambda index: torch.cat([index, index]),
    lambda index: index[:, None],
    lambda index: index[None],
    lambda index: index[0],
    lambda index: index.to("meta"),
    lambda index: index.to_sparse(),
)
NOT_TAU: tuple[Callable[[int], Any], ...] = (
    lambda size: 0.0,
    lambda size: -0.1,
    lambda size: float("nan"),
    lambda size: float("inf"),
    lambda size: True,
    lambda size: "0.1",
    lambda size: 0.1j,
    lambda size: [0.1] * size,
    lambda size: np.full(size, 0.1),
    lambda size: torch.tensor(0.0),
    lambda size: torch.tensor(float("nan")),
    lambda size: torch.full((size,), float("inf")),
    lambda size: torch.full((size, 1), -0.1),
    lambda size: torch.ones(size, dtype=torch.int64),
    lambda size: torch.ones(size, dtype=torch.complex64),
    lambda size: torch.full((size + 1,), 0.1),
    lambda size: torch.full((size, 3), 0.1),
    lambda size: torch.full((1, size, 1), 0.1),
    lambda size: torch.full((size,), 0.1, device="meta"),
    lambda size: torch.full((size,), 0.1).to_sparse(),
)
BAD_VALUES = (float("nan"), float("inf"), float("-inf"))
FAR = (-1, -(1 << 63), (1 << 63) - 1, 1 << 31, 1 << 32)


def bad_features(given: Given) -> str:
    """One side is no matrix of features like the other."""
    name = given.side()
    given.args[name] = given.rng.choice(NOT_FEATURES)(given.args[name])
    return REFUSE


def bad_both(given: Given) -> str:
    """Neither side is a matrix of features of two samples."""
    changes = [*NOT_FEATURES[:14], NOT_FEATURES[16], NOT_FEATURES[18], lambda z: z[:0], lambda z: z[:1]]
    change, before = given.rng.choice(changes), given.size()
    for name in ("z1", "z2"):
        given.args[name] = change(given.args[name])
    if isinstance(given.args["z1"], Tensor) and given.args["z1"].dim() == 2 and given.size() < before:
        given.args["index"] = None if given.args["index"] is None else given.args["index"][: given.size()]
        return REFUSE if given.size() < 2 else EITHER
    return REFUSE


def bad_dimension(given: Given) -> str | None:
    """Features of another dimension than the network's."""
    if not given.network:
        return None
    given.both(lambda z: z.repeat(1, 2))
    return REFUSE


def no_index(given: Given) -> str | None:
    if given.network and given.n is None:
        return None  # names of its own in every call: the memory tells them apart
    given.args["index"] = None
    told = "extra_index" not in given.args or "index2" in given.args  # whose positions those of extra are
    return AGREE if given.n is None and told else REFUSE


def out_of_range(given: Given) -> str | None:
    """A position of no sample."""
    if given.n is None or given.args["index"] is None:
        return None
    name = given.rng.choice([name for name in ("index", "index2") if name in given.args])
    given.args[name] = given.args[name].long()
    given.replace(name, given.rng.randrange(given.size()), given.rng.choice([given.n, given.n + 1, *FAR]))
    return EITHER if name == "index2" and given.directions == 1 else REFUSE


def extra_out_of_range(given: Given) -> str | None:
    """A candidate at a position of no sample."""
    if given.n is None or given.encodes or "index2" in given.args:
        return None
    extra(given)
    given.args["extra"] = torch.ones(2, given.args["z1"].shape[1], dtype=given.args["z1"].dtype)
    given.args["extra_index"] = torch.tensor([0, given.rng.choice([given.n, *FAR])])
    return REFUSE


def bad_positions(given: Given) -> str | None:
    """Something else where positions or labels belong."""
    name = given.rng.choice(["index", "index", "index2", "labels", "group"])
    if name == "index2" and not given.bimodal:
        return None
    value = given.integers(TINY) if given.args.get(name) is None else given.args[name]
    given.args[name] = given.rng.choice(NOT_POSITIONS)(value)
    return REFUSE


def bad_extra(given: Given) -> str:
    """Further candidates that are none, or positions of nothing."""
    z = given.args["z1"]
    given.args["extra"] = given.rng.choice([*NOT_FEATURES[:6], *NOT_FEATURES[7:13], *NOT_FEATURES[15:]])(z)
    if given.rng.random() < 0.3:
        given.args["extra"] = given.rng.choice([None, z])
        given.args["extra_index"] = given.rng.choice(NOT_POSITIONS)(given.integers(TINY))
    return REFUSE


def bad_tau(given: Given) -> str:
    """A temperature that is none."""
    given.args["tau"] = given.rng.choice(NOT_TAU)(given.size())
    return REFUSE


def extreme_tau(given: Given) -> str:
    """A positive temperature beyond all reason."""
    value = given.rng.choice([1e-300, 1e-30, 1e-8, 1e-4, 1e8, 1e30, 1e300])
    given.args["tau"] = given.rng.choice([value, torch.tensor(value, dtype=torch.float64)])
    return REFUSE if given.learns else EITHER


def one_sample(given: Given) -> str | None:
    """The same sample all over the batch."""
    name = given.rng.choice(["index", "labels"])
    if name == "labels" and "group" in given.args:
        return None
    given.args[name] = torch.full((given.size(),), given.rng.randrange(TINY))
    return REFUSE


def two_names(given: Given) -> str:
    """Labels by both of their names."""
    given.args["labels"] = given.args["group"] = given.integers(TINY)
    return REFUSE


def index_of_views(given: Given) -> str | None:
    """A second index where there is no second modality."""
    if given.bimodal:
        return None
    given.args["index2"] = given.integers(TINY)
    return REFUSE


def bad_encode(given: Given) -> str:
    """A function that raises, or returns something else; chains may never ask."""
    z = given.args["z1"]
    given.args["encode"] = given.rng.choice(
        [
            raising,
            lambda positions: None,
            lambda positions: "features",
            lambda positions: z[:0],
            lambda positions: (z.long(), z.long()),
            lambda positions: (torch.ones(len(positions), z.shape[1], dtype=z.dtype), None),
            lambda positions: [torch.full((len(positions), z.shape[1]), float("nan"), dtype=z.dtype)] * 2,
            lambda positions: [torch.ones(len(positions), z.shape[1], dtype=torch.int64)] * 2,
            lambda positions: [torch.ones(len(positions), z.shape[1], device="meta")] * 2,
            7,
        ]
    )
    return EITHER if given.encodes and "index2" not in given.args and given.args["encode"] != 7 else REFUSE


def raising(*args: Any) -> None:
    """A hook of the caller that fails."""
    raise HookError


def not_finite(given: Given) -> str:
    """A value that is no number."""
    name = given.rng.choice([name for name in ("z1", "z2", "extra") if len(given.args.get(name, ()))])
    given.replace(name, given.rng.randrange(given.args[name].numel()), given.rng.choice(BAD_VALUES))
    return NAN


def too_large(given: Given) -> str | None:
    """A finite row whose norm is not."""
    z = given.args["z1"]
    if z.dtype == torch.float16:
        return None
    name = given.side()
    size = 1e200 if z.dtype == torch.float64 else 1e30
    given.replace(name, given.rng.randrange(given.args[name].numel()), size)
    return NAN


def zeros(given: Given) -> str:
    """A row without a direction."""
    name, row = given.side(), given.rng.randrange(given.size())
    given.args[name] = given.args[name].clone()
    given.args[name][row] *= given.rng.choice([0.0, 1e-30, 1e-45])
    return EITHER


def inference_tensor(given: Given) -> str:
    """A tensor that autograd may not save."""
    with torch.inference_mode():
        name = given.side()
        given.args[name] = given.args[name].clone()
    return EITHER


SPOILED: tuple[Change, ...] = (
    bad_features,
    bad_both,
    bad_dimension,
    no_index,
    out_of_range,
    extra_out_of_range,
    bad_positions,
    bad_extra,
    bad_tau,
    extreme_tau,
    one_sample,
    two_names,
    index_of_views,
    bad_encode,
    not_finite,
    too_large,
    zeros,
    inference_tensor,
)


# -- hyper-parameters ------------------------------------------------------------------------------------------------

REFUSED_VALUES = (
    float("nan"),
    "x",
    b"x",
    {},
    object(),
    torch.ones(3),
    torch.tensor(float("nan")),
    torch.ones((), device="meta"),
    torch.ones(1, 1),
    np.ones(3),
    1j,
    [1.0, 2.0, 3.0],
    lambda: 0,
)
EXTREME_VALUES = (float("inf"), float("-inf"), -1, 0, 1e300, -1e300, 1 << 70, None, True, torch.tensor(2), (1, 2))
