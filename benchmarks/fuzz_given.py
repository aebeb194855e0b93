"""A call of an estimator, and changes to it that an estimator takes.

Each function changes a :class:`Given` and says what must come of it, or ``None`` where it does not apply.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

AGREE, REFUSE, NAN, EITHER = "agree", "refuse", "nan", "either"


@dataclass
class Given:
    """One call: its arguments, and what is known of the estimator.

    Attributes:
        rng: where changes draw from.
        args: by name, as they are handed over.
        n: rows, or ``None``.
        bimodal: both modalities have names of their own.
        directions: how many have anchors.
        learns: the temperature is the estimator's own matter.
        network: the features' dimension is fixed.
        encodes: chains may ask for features.
        context: ``"train"``, ``"eval"``, ``"no_grad"``, ``"inference"``, ``"autocast"``, ``"errors"``
            (warnings are), or ``"gradients"`` (by ``feature_gradients``).
    """

    rng: random.Random
    args: dict[str, Any]
    n: int | None
    bimodal: bool
    directions: int
    learns: bool
    network: bool
    encodes: bool
    context: str = "train"
    table: Tensor | None = field(default=None)

    def size(self) -> int:
        """Samples of the batch."""
        return len(self.args["z1"])

    def side(self) -> str:
        """One of the features."""
        return self.rng.choice(["z1", "z2"])

    def both(self, change: Callable[[Tensor], Tensor]) -> None:
        """Change both features, and what must be like them."""
        for name in ("z1", "z2", "extra"):
            if name in self.args:
                self.args[name] = change(self.args[name])

    def integers(self, high: int, count: int | None = None) -> Tensor:
        """Random positions."""
        many = range(self.size() if count is None else count)
        return torch.tensor([self.rng.randrange(high) for _ in many], dtype=torch.int64)

    def replace(self, name: str, position: int, value: Any) -> None:
        """Another value in one place."""
        changed = self.args[name].clone()
        changed[divmod(position, changed.shape[1]) if changed.dim() == 2 else position] = value
        self.args[name] = changed


Change = Callable[[Given], "str | None"]


# -- what an estimator takes ---------------------------------------------------------------------------------------


def transposed(given: Given) -> str:
    given.both(lambda z: z.t().contiguous().t())
    return AGREE


def sliced(given: Given) -> str:
    """Every second column of a wider tensor."""
    given.both(lambda z: z.repeat_interleave(2, dim=1)[:, ::2])
    return AGREE


def negated_view(given: Given) -> str:
    given.both(lambda z: torch._neg_view(-z))
    return AGREE


def expanded(given: Given) -> str | None:
    """One row for all samples of one side, with a stride of 0."""
    if given.network:
        return None  # gradients of its prototypes are rounding alone, and AdaGrad makes steps of them
    name = given.side()
    given.args[name] = given.args[name][:1].expand(given.size(), -1)
    return AGREE


def one_tensor(given: Given) -> str | None:
    """Both sides in the same memory."""
    if given.network:
        return None
    given.args["z2"] = given.args["z1"]
    return AGREE


def scaled(given: Given) -> str:
    factor = given.rng.choice([1e-3, 1e3])
    given.both(lambda z: z * factor)
    return AGREE


def other_index_dtype(given: Given) -> str:
    dtype = given.rng.choice([torch.int32, torch.int16, torch.int8, torch.uint8])
    given.args["index"] = given.args["index"].to(dtype)
    return AGREE


def strided_index(given: Given) -> str:
    given.args["index"] = given.args["index"].repeat_interleave(3)[::3]
    return AGREE


def repeated(given: Given) -> str | None:
    """A sample that is in the batch twice."""
    if given.size() < 3 or len(set(given.args["index"].tolist())) < 3:
        return None
    given.replace("index", 0, given.args["index"][1])
    return AGREE


def second_index(given: Given) -> str | None:
    if not given.bimodal:
        return None
    given.args["index2"] = torch.randperm(given.n or 20, generator=seeded(given))[: given.size()]
    return REFUSE if "encode" in given.args else AGREE


def labels(given: Given) -> str:
    """Two samples of one class."""
    names = list(range(given.size()))
    names[0] = names[-1] if given.size() > 2 else names[0]
    given.args[given.rng.choice(["labels", "group"])] = torch.tensor(names) - given.rng.randrange(3)
    return AGREE


def extra(given: Given) -> str:
    """Further candidates, perhaps none, perhaps with positions."""
    z, count = given.args["z1"], given.rng.randrange(4)
    given.args["extra"] = torch.randn(count, z.shape[1], generator=seeded(given), dtype=torch.float64).to(z.dtype)
    if given.rng.random() < 0.5 and given.args["index"] is not None:
        given.args["extra_index"] = given.integers(given.n or 20, count)
    return REFUSE if given.encodes else AGREE


def tau(given: Given) -> str:
    """A temperature of every shape."""
    shape = given.rng.choice([None, (), (given.size(),), (given.size(), 1), (given.size(), given.directions)])
    value: Any = given.rng.uniform(0.1, 0.6)
    if shape is not None:
        spread = torch.rand(shape, generator=seeded(given), dtype=torch.float64) * 0.5 + 0.1
        value = spread.to(given.rng.choice([torch.float64, torch.float32, torch.float16]))
    given.args["tau"] = value
    return REFUSE if given.learns else AGREE


def encode(given: Given) -> str:
    """Features of samples outside the batch."""
    if not given.encodes or "index2" in given.args:
        given.args["encode"] = lambda positions: None
        return REFUSE
    z = given.args["z1"]
    given.table = torch.randn(2, given.n or 1, z.shape[1], generator=seeded(given), dtype=torch.float64).to(z.dtype)
    pair = given.table
    if given.bimodal:
        given.args["encode"] = lambda positions: (pair[0][positions], pair[1][positions])
    else:
        given.args["encode"] = lambda positions: pair[0][positions]
    return AGREE


def elsewhere(given: Given) -> str:
    """Another mode of the estimator or of torch."""
    given.context = given.rng.choice(["eval", "no_grad", "inference", "autocast", "errors", "gradients"])
    return AGREE


def seeded(given: Given) -> torch.Generator:
    """Draws of torch that follow the trial's."""
    return torch.Generator().manual_seed(given.rng.randrange(1 << 30))


TAKEN: tuple[Change, ...] = (
    transposed,
    sliced,
    negated_view,
    expanded,
    one_tensor,
    scaled,
    other_index_dtype,
    strided_index,
    repeated,
    second_index,
    labels,
    extra,
    tau,
    encode,
    elsewhere,
)
