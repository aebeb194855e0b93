"""Data sets with small encoders and recall on held-out samples.

=======  ==============================================  ==========================================
glyphs   characters in 16 faces, and their names         R@1 in both directions, other faces
icons    icons, and the words of their names             zero-shot among 500 names, other families
words    the words of a WordNet synset, its definition   R@1 in both directions, 1,024 other synsets at a time
faces    a character in two faces (one modality)         R@1 between faces, other characters among all
few      1,024 of the glyphs                             as glyphs
digits   left and right halves of 1,285 written digits   R@1 in both directions, 256 other digits
packages short and long descriptions of Debian packages  as words
emoji    one emoji in two designs (one modality)         nearest image in another design, other emoji
=======  ==============================================  ==========================================

Held-out samples are divided into two halves: settings are chosen on ``validation``, results are those of ``test``.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recipes import glyphs, icons, text
from recipes.icon_task import IconNames
from recipes.methods import BIMODAL, UNIMODAL
from recipes.models import ImageTower, TextTower, Tokenizer
from recipes.tasks import GlyphFaces, ImageViews, Labelled, NamedImages, in_chunks, limited

PARTS = ("validation", "test")
SAMPLES = 65_536  # training samples seen in a run, for every batch size
PAIRS = 32_768  # training pairs of glyphs, icons and words
DIM, WIDTH = 64, 16  # dimension of the features, and width of the first convolution
TONES = {"tone", "light", "medium", "dark"}  # words in the names of emoji that differ from others in the skin tone
POOL = 1024  # held-out words among which each query searches


class Task(Protocol):
    """Data set with encoders and a score."""

    n: int
    mode: str
    group: Tensor

    def model(self) -> nn.Module:
        """Return new encoders, a module from :meth:`inputs` to ``z1, z2``."""

    def inputs(self, index: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return both sides of a batch."""

    def training_features(self, model: nn.Module) -> tuple[Tensor, Tensor]:
        """Return ``z1, z2`` of all training samples."""

    def score(self, model: nn.Module) -> dict[str, float]:
        """Return measures on held-out samples; settings are chosen by ``recall``."""


class Towers(nn.Module):
    """Image encoder and text encoder, or one of them for both sides."""

    def __init__(self, tokenizer: Tokenizer | None = None, images: bool = True) -> None:
        super().__init__()
        self.image = ImageTower(DIM, WIDTH) if images else None
        self.text = TextTower(len(tokenizer), tokenizer.length, DIM) if tokenizer else None

    def forward(self, one: Tensor, two: Tensor) -> tuple[Tensor, Tensor]:
        if self.image and self.text:
            return self.image(one), self.text(two)
        first, second = (self.image or self.text)(torch.cat([one, two])).split([len(one), len(two)])
        return first, second


class Glyphs(NamedImages):
    """Glyphs and their names, with half of the held-out pairs; most of these names also occur in training."""

    def __init__(self, part: str, limit: int = PAIRS) -> None:
        data = glyphs.load()
        split = glyphs.split_pairs(data)
        held_out = split.held_out[torch.randperm(len(split.held_out), generator=torch.Generator().manual_seed(0))]
        half = held_out.chunk(2)[PARTS.index(part)].sort().values
        train = limited(split.train, limit, 0)
        super().__init__(data.images, data.caption, data.names, train, half, Tokenizer(data.names))

    def model(self) -> nn.Module:
        return Towers(self.tokenizer)

    def score(self, model: nn.Module) -> dict[str, float]:
        found = self.retrieve(model)
        return both(found.image_to_text, found.text_to_image)


class Icons(IconNames):
    """Icons and their names; held-out families are classified among 500 names."""

    def __init__(self, part: str, limit: int = PAIRS) -> None:
        super().__init__(icons.load(progress=False), part, limit=limit)

    def model(self) -> nn.Module:
        return Towers(self.tokenizer)

    def score(self, model: nn.Module) -> dict[str, float]:
        measured = self.evaluate(model)
        return {"recall": measured["zero_shot"], "retrieval": measured["r1_mean"]}


class Words:
    """Words and definitions, or other pairs of texts, with one encoder for both sides."""

    mode = BIMODAL

    def __init__(
        self, part: str, folder: Path | None = None, limit: int = PAIRS, pairs: text.TextPairs | None = None
    ) -> None:
        pairs = pairs or text.load(folder, held_out=4096, limit=limit)
        sides = [[plain(line) for line in side] for side in (pairs.queries, pairs.documents)]
        self.tokenizer = Tokenizer([side[i] for side in sides for i in pairs.train], min_count=3, length=24)
        train, held_out = torch.from_numpy(pairs.train), torch.from_numpy(getattr(pairs, part))
        self.queries, self.answers = (self.tokenizer([side[i] for i in train]) for side in sides)
        self.held_out = [self.tokenizer([side[i] for i in held_out]) for side in sides]
        self.n, self.group = len(train), torch.arange(len(train))

    def model(self) -> nn.Module:
        return Towers(self.tokenizer, images=False)

    def inputs(self, index: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        return self.queries[index], self.answers[index]

    def training_features(self, model: nn.Module) -> tuple[Tensor, Tensor]:
        return in_chunks(model.text, self.queries), in_chunks(model.text, self.answers)

    def score(self, model: nn.Module) -> dict[str, float]:
        one, two = (in_chunks(model.text, side).split(POOL) for side in self.held_out)
        scores = [between(*sides) for sides in zip(one, two, strict=True)]
        return {name: mean(score[name] for score in scores) for name in scores[0]}


def packages(folder: Path) -> text.TextPairs:
    """Return short descriptions and first paragraphs of long ones of Debian packages, from the file Translation-en."""
    found: dict[str, str] = {}  # paragraph -> short description; related packages repeat their first paragraph
    for entry in (folder / "Translation-en").read_text(encoding="utf-8").split("\n\n"):
        short, _, long = entry.partition("Description-en: ")[2].partition("\n")
        paragraph = " ".join(long.split("\n .\n")[0].split())
        if len(paragraph.split()) >= 5:
            found.setdefault(paragraph, short)
    return text.split([*found.values()], [*found], held_out=4096)


def plain(line: str) -> str:
    """Reduce a text to lower-case letters, digits and spaces."""
    return re.sub("[^a-z0-9]+", " ", line.lower()).strip()


class Faces(GlyphFaces):
    """Two faces of a character; for held-out characters, retrieval between the first face and the last."""

    mode = UNIMODAL

    def __init__(self, part: str) -> None:
        data = glyphs.load()
        super().__init__(data)
        split = glyphs.split_characters(data)
        order = split.held_out[data.caption[split.held_out].argsort(stable=True)]
        count = data.caption[order].unique_consecutive(return_counts=True)[1]
        end = count.cumsum(0)
        chosen = (count > 1).nonzero().flatten()[PARTS.index(part) :: 2]
        self.views = data.images[order[(end - count)[chosen]]], data.images[order[end[chosen] - 1]]
        self.others = [self.images[self.first], self.images[self.first + self.count - 1]]  # of training characters

    def model(self) -> nn.Module:
        return Towers()

    def training_features(self, model: nn.Module) -> tuple[Tensor, Tensor]:
        return in_chunks(model.image, self.images[self.first]), in_chunks(model.image, self.images[self.first + 1])

    def score(self, model: nn.Module) -> dict[str, float]:
        return between(*(in_chunks(model.image, side) for side in (*self.views, *self.others)))


def between(one: Tensor, two: Tensor, *others: Tensor) -> dict[str, float]:
    """Return R@1 between matching rows, in both directions, with ``others`` as further candidates of each side."""
    found = []
    for queries, gallery in ((one, torch.cat([two, *others[1:]])), (two, torch.cat([one, *others[:1]]))):
        nearest = (F.normalize(queries) @ F.normalize(gallery).T).argmax(1)
        found.append(nearest.eq(torch.arange(len(queries))).float().mean().item())
    return both(*found)


def both(forward: float, backward: float) -> dict[str, float]:
    return {"recall": (forward + backward) / 2, "forward": forward, "backward": backward}


class Emoji(Faces):
    """Emoji without skin tones, each in several designs, of which two are the views of a sample.

    Designs are families of icons that draw the emoji. The measure is the share of held-out images whose nearest image
    in another family is the same emoji.
    """

    def __init__(self, part: str) -> None:
        data = icons.load(progress=False)
        toned = torch.tensor([not TONES.isdisjoint(name.split()) for name in data.names])
        at = ((data.kind == icons.KINDS.index("emoji")) & ~toned[data.caption]).nonzero().flatten()
        at = at[(data.caption[at] * len(data.families) + data.family[at]).argsort(stable=True)]
        pairs = torch.stack([data.caption[at], data.family[at]], 1)
        at = at[torch.cat([torch.ones(1, dtype=torch.bool), (pairs[1:] != pairs[:-1]).any(1)])]  # one image per design
        emoji, where, count = data.caption[at].unique(return_inverse=True, return_counts=True)
        order = (count > 1).nonzero().flatten()
        order = order[torch.randperm(len(order), generator=torch.Generator().manual_seed(0))]
        fifth = len(order) // 5
        *held_out, train = order.split([fifth, fifth, len(order) - 2 * fifth])
        ours, theirs = (at[torch.isin(where, part)] for part in (train, held_out[PARTS.index(part)]))
        self.count = count[train.sort().values]
        self.first = self.count.cumsum(0) - self.count
        shown = Labelled(data.images[theirs], data.caption[theirs])
        ImageViews.__init__(self, data.images[ours], shown, shown, f"emoji, n = {len(train)}")  # not of glyphs
        self.n, self.family = len(train), data.family[theirs]

    def score(self, model: nn.Module) -> dict[str, float]:
        features = F.normalize(in_chunks(model.image, self.queries.images))
        elsewhere = self.family[:, None] != self.family
        nearest = (features @ features.T).masked_fill(~elsewhere, -torch.inf).argmax(1)
        return {"recall": (self.queries.labels[nearest] == self.queries.labels).float().mean().item()}


class Digits:
    """Left and right halves of scikit-learn's handwritten digits, 8 x 4 pixels each."""

    mode = BIMODAL

    def __init__(self, part: str) -> None:
        from sklearn.datasets import load_digits

        images = torch.from_numpy(load_digits().images).float() / 16
        images = images[torch.randperm(len(images), generator=torch.Generator().manual_seed(0))]
        *held_out, train = images.split([256, 256, len(images) - 512])
        self.train = [half.contiguous() for half in train.chunk(2, 2)]
        self.held_out = [half.contiguous() for half in held_out[PARTS.index(part)].chunk(2, 2)]
        self.n, self.group = len(train), torch.arange(len(train))

    def model(self) -> nn.Module:
        return Halves()

    def inputs(self, index: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        return self.train[0][index], self.train[1][index]

    def training_features(self, model: nn.Module) -> tuple[Tensor, Tensor]:
        return model(*self.train)

    def score(self, model: nn.Module) -> dict[str, float]:
        with torch.no_grad():
            return between(*model(*self.held_out))


class Halves(nn.Module):
    """One perceptron for each half."""

    def __init__(self, hidden: int = 128) -> None:
        super().__init__()
        self.left, self.right = (
            nn.Sequential(
                nn.Flatten(),
                *(nn.Linear(32, hidden), nn.BatchNorm1d(hidden), nn.ReLU()),
                *(nn.Linear(hidden, hidden), nn.BatchNorm1d(hidden), nn.ReLU()),
                nn.Linear(hidden, DIM),
            )
            for _ in range(2)
        )

    def forward(self, one: Tensor, two: Tensor) -> tuple[Tensor, Tensor]:
        return self.left(one), self.right(two)


TASKS: dict[str, Callable[..., Task]] = {
    "glyphs": Glyphs,
    "icons": Icons,
    "words": Words,
    "faces": Faces,
    "few": lambda part: Glyphs(part, limit=1024),
    "digits": Digits,
    "packages": lambda part, folder: Words(part, pairs=packages(folder)),
    "emoji": Emoji,
}
READ_FOLDER = ("words", "packages")  # data sets that are read from a folder of the user


def load(name: str, part: str, folder: Path | None) -> Task:
    """Return a data set with one half of its held-out samples; ``folder`` has the files of words and packages."""
    return TASKS[name](part, *([folder] if name in READ_FOLDER else []))
