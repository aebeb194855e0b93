"""Data sets of 1,000 or 1,500 pairs with fixed inputs, and the perceptrons that encode them.

==========  ==============================================  =====  =====
digits      left and right halves of written digits         1,000    398
glyphs      characters in a random face, and their names    1,500  1,000
docstrings  names and descriptions of Python's functions    1,000    600
icons       one concept in two designs                      1,000  1,000
==========  ==============================================  =====  =====

The columns are training pairs and held-out pairs. Digits and glyphs are pixels, texts counts of hashed parts of three
letters, and icons strengths of edges, which one encoder takes for both sides. No default is chosen with ``HELD_OUT``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.studies.default.tasks import between
from recipes import cache as cached
from recipes import glyphs, icon_sets, icons, text

HELD_OUT = ("docstrings", "icons")
HIDDEN, DIM = 64, 32
BUCKETS, KEPT = 512, 16  # buckets of the parts of texts; pixels per side of glyphs
Sides = tuple[Tensor, ...]


class Towers(nn.Module):
    """One perceptron for each side, or one for both."""

    def __init__(self, *widths: int, shared: bool) -> None:
        super().__init__()
        self.one, self.two = (
            nn.Sequential(nn.Linear(width, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, DIM)) for width in widths
        )
        if shared:
            self.two = self.one

    def forward(self, x1: Tensor, x2: Tensor) -> Sides:
        return self.one(x1), self.two(x2)


class Pairs(NamedTuple):
    """Inputs of both sides of the training pairs and of the held-out pairs; ``shared``: one encoder for both sides."""

    train: Sides
    held_out: Sides
    shared: bool

    @property
    def n(self) -> int:
        return len(self.train[0])

    def model(self) -> Towers:
        return Towers(*(side.shape[1] for side in self.train), shared=self.shared)

    @torch.no_grad()
    def recall(self, model: nn.Module) -> dict[str, float]:
        """Return R@1 among the held-out pairs, in each direction and on average."""
        return {name: round(value, 6) for name, value in between(*model(*self.held_out)).items()}


def digits() -> Sides:
    from sklearn.datasets import load_digits

    images = torch.from_numpy(load_digits().images).float() / 16
    images = images[torch.from_numpy(np.random.RandomState(1).permutation(len(images)))]
    return tuple(half.flatten(1) for half in images.chunk(2, 2))


def named_glyphs() -> Sides:
    data = glyphs.load()
    order = _shuffled(len(data))
    first = np.unique(data.caption[order].numpy(), return_index=True)[1]  # a random face of each character
    at = order[torch.from_numpy(first)][_shuffled(len(first))]
    return _reduced(data.images[at]), _counted([data.names[name] for name in data.caption[at].tolist()])


def docstrings() -> Sides:
    found = text.docstrings()
    once = [*{name: told for told, name in {told: name for name, told in zip(*found, strict=True)}.items()}.items()]
    names, texts = zip(*(once[at] for at in _shuffled(len(once)).tolist()), strict=True)
    return _counted(names), _counted(texts)


def designs() -> Sides:
    """Return two icons of each name that icons of several families have, drawn by two of them."""

    def draw() -> dict[str, np.ndarray]:
        data, found = icons.load(progress=False), dict[int, list[int]]()
        order = _shuffled(len(data))
        for at in order[(data.kind == icons.KINDS.index("interface"))[order]].tolist():
            own = found.setdefault(int(data.caption[at]), [])
            if len(own) < 2 and all(data.family[other] != data.family[at] for other in own):
                own.append(at)
        chosen = torch.tensor([own for own in found.values() if len(own) == 2][: 2 * sum(SIZES["icons"])])
        return {"one": data.images[chosen[:, 0]].numpy(), "two": data.images[chosen[:, 1]].numpy()}

    key = f"{icons.cache_key(icon_sets.DIGEST)} {SIZES['icons']}"
    found = cached.read_or_make(cached.file(None, "visits_icons.npz"), key, ["one", "two"], draw)
    return tuple(_edges(torch.from_numpy(found[side])) for side in ("one", "two"))


def _shuffled(n: int) -> Tensor:
    return torch.randperm(n, generator=torch.Generator().manual_seed(0))


def _reduced(images: Tensor) -> Tensor:
    """Return images ``(N, h, w)`` uint8 as vectors of KEPT x KEPT values."""
    return F.adaptive_avg_pool2d(images[:, None].float() / 255, KEPT).flatten(1)


def _edges(images: Tensor) -> Tensor:
    """Return the strength of edges in four directions and 8 x 8 places, ``(N, 256)``."""
    padded = F.pad(images[:, None].float() / 255, (1, 1, 1, 1))
    across, down = padded[..., 1:-1, 2:] - padded[..., 1:-1, :-2], padded[..., 2:, 1:-1] - padded[..., :-2, 1:-1]
    angles = [math.pi * part / 4 for part in range(4)]
    strength = torch.cat([(math.cos(angle) * across + math.sin(angle) * down).abs() for angle in angles], 1)
    return F.adaptive_avg_pool2d(strength, 8).flatten(1)


def _counted(lines: Sequence[str]) -> Tensor:
    """Return texts as normalised counts of hashed parts of three letters, ``(N, BUCKETS)``."""
    from sklearn.feature_extraction.text import HashingVectorizer

    counts = HashingVectorizer(n_features=BUCKETS, analyzer="char_wb", ngram_range=(3, 3)).transform(lines)
    return torch.from_numpy(counts.toarray()).float()


DATA: dict[str, Callable[[], Sides]] = {
    "digits": digits,
    "glyphs": named_glyphs,
    "docstrings": docstrings,
    "icons": designs,
}
SIZES = {"digits": (1000, 398), "glyphs": (1500, 1000), "docstrings": (1000, 600), "icons": (1000, 1000)}


@cache
def load(name: str, final: bool) -> Pairs:
    """Return the pairs of the final runs, or those of the tuning, which has none of their held-out pairs.

    All pairs of the tuning are others, except for the training pairs of ``digits``, which has too few.
    """
    n, m = SIZES[name]
    begin = 0 if final or name == "digits" else n + m
    held_out = begin + n + (m if final and name == "digits" else 0)
    one, two = ((side[begin:][:n], side[held_out:][:m]) for side in DATA[name]())
    return Pairs((one[0], two[0]), (one[1], two[1]), shared=name == "icons")
