"""Icons: 343,000 image-text pairs from a package registry.

The npm package ``@iconify/json`` contains the icons of 243 sets, each with a name and a licence.  They are drawn as
32 x 32 grey images and paired with the words of their names: "calendar" occurs hundreds of times, half of the
106,000 captions once.  The download has 104 MB, and drawing takes some minutes; the result is cached in one file.

Sets with a common design share artwork, so whole families of sets are held out.

Sets in colour (emoji, flags, logos and some of the interface) can also be drawn in colour.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock
from torch import Tensor

from recipes import cache as cached
from recipes import icon_drawing, icon_sets
from recipes.cache import Unavailable
from recipes.icon_sets import KINDS

FORMAT = 1  # increase when the selection of icons, the drawing or the file's layout changes
COLUMNS = ("images", "caption", "family", "kind", "licence")
TEXTS = ("names", "families", "licences", "sources", "aliases")

TEST = ("ph", "carbon", "teenyicons", "pixelarticons", "iconpark", "game-icons")
VALIDATION = ("hugeicons", "f7", "tdesign", "healthicons")
COLOURED_TEST = ("twemoji", "iconpark", "token", "devicon", "flagpack")
COLOURED_VALIDATION = ("openmoji", "flat-color-icons", "logos", "flag", "material-icon-theme")


@dataclass(frozen=True)
class Icons:
    """All pairs, set by set; pair i shows icon ``sources[i]``."""

    images: Tensor  # (N, 32, 32) uint8, 255 = ink; in colour (N, 3, 32, 32), 255 = light
    caption: Tensor  # (N,) int64, position in names
    family: Tensor  # (N,) int64, position in families
    kind: Tensor  # (N,) int64, position in KINDS
    licence: Tensor  # (N,) int64, position in licences
    names: list[str]  # distinct captions, sorted
    families: list[str]  # designs, sorted
    licences: list[str]  # SPDX identifiers, sorted
    sources: list[str]  # (N,) set:name in the package
    aliases: list[str]  # (N,) captions of the icon's other names, joined by tabs; mostly ""

    def __len__(self) -> int:
        return len(self.images)


@dataclass(frozen=True)
class Split:
    """Positions of pairs, ascending; the data-set index of a training pair is its position in :attr:`train`."""

    train: Tensor  # interface icons of all other families
    validation: Tensor  # icons of VALIDATION
    test: Tensor  # icons of TEST
    domain: Tensor  # emoji and flags: another domain


def split_families(data: Icons) -> Split:
    """Hold out families; logos, whose names are not guessable, are in no part."""
    interface = data.kind == KINDS.index("interface")
    test, validation = (of_families(data, part) for part in (TEST, VALIDATION))
    other = (data.kind == KINDS.index("emoji")) | (data.kind == KINDS.index("flags"))
    masks = (interface & ~test & ~validation, interface & validation, interface & test, other)
    return Split(*(mask.nonzero().flatten() for mask in masks))


def of_families(data: Icons, families: Sequence[str]) -> Tensor:
    """Return a mask of the icons of these families, (N,) bool."""
    return torch.tensor([family in families for family in data.families])[data.family]


def common_captions(data: Icons, pairs: Tensor, count: int) -> Tensor:
    """Return the captions of most families among ``pairs``, ties by number of pairs, (<= count,) int64."""
    both = torch.stack([data.caption[pairs], data.family[pairs]]).unique(dim=1)
    families = torch.bincount(both[0], minlength=len(data.names))
    times = torch.bincount(data.caption[pairs], minlength=len(data.names))
    order = (families * (len(data) + 1) + times).argsort(descending=True, stable=True)[:count]
    return order[times[order] > 0]


def load(
    cache: str | os.PathLike[str] | None = None,
    file: str | os.PathLike[str] | None = None,
    progress: bool = True,
    coloured: bool = False,
) -> Icons:
    """Return the data set, from the cache file if it matches the package and the libraries, else newly built.

    Concurrent processes wait for the first one. ``coloured``: only sets in colour, as colour images.
    """
    path = cached.file(cache, "coloured_icons.npz" if coloured else "icons.npz")
    packed = None if file is None else Path(file)
    key = cache_key(icon_sets.DIGEST if packed is None else icon_sets.digest(packed))
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{path}.lock"):
        arrays = cached.read(path, key, COLUMNS + TEXTS)
        if arrays is None:
            with icon_sets.package(packed) as found:
                arrays = build(found, progress, coloured)
            cached.write(path, key, arrays)
            print(f"wrote {path} ({path.stat().st_size / 1e6:.0f} MB)")
    columns = {name: torch.from_numpy(arrays[name]) for name in COLUMNS}
    if coloured:
        columns["images"] = 255 - columns["images"].movedim(3, 1).contiguous()
    return Icons(**columns, **{name: _lines(arrays[name]) for name in TEXTS})


def cache_key(package: str) -> str:
    """Return a digest of everything that the pairs depend on: digest of the package, renderer, parameters."""
    try:
        renderer = importlib.metadata.version("resvg")
    except importlib.metadata.PackageNotFoundError:
        raise Unavailable('the icons are drawn with resvg: pip install -c constraints.txt -e ".[icons]"') from None
    pixels = (icon_drawing.SIZE, icon_drawing.FAINT, icon_drawing.BLANK, renderer)
    names = (icon_sets.STYLES, icon_sets.FAMILIES, icon_sets.FLAGS, icon_sets.EMOJI, icon_sets.LOGOS)
    return hashlib.sha256(repr((FORMAT, package, icon_sets.LARGEST, pixels, names)).encode()).hexdigest()


def build(packed: Path, progress: bool = True, coloured: bool = False) -> dict[str, np.ndarray]:
    """Draw every icon, leave out blank icons and near duplicates, and print their numbers."""
    left_out: Counter[str] = Counter()
    icons = list(icon_sets.icons(packed, left_out, coloured))
    images = icon_drawing.draw_all([icon.svg for icon in icons], progress, "RGB" if coloured else "L")
    shown = images.reshape(len(images), -1).any(axis=1)
    left_out["empty"] = int((~shown).sum())
    kept = _distinct(images, [icon.caption for icon in icons], shown)
    left_out["near duplicates"] = int(shown.sum()) - len(kept)
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in left_out.items() if count)
    print(f"{len(kept):,} icons; left out: {reasons or 'none'}")
    if not len(kept):
        raise Unavailable(f"{packed} has no icon to show; {icon_sets.REMEDY}")
    icons = [icons[row] for row in kept]
    names, caption = _positions([icon.caption for icon in icons])
    families, family = _positions([icon.family for icon in icons])
    licences, licence = _positions([icon.licence for icon in icons])
    kind = np.array([KINDS.index(icon.kind) for icon in icons])
    texts = (names, families, licences, [icon.name for icon in icons], ["\t".join(icon.aliases) for icon in icons])
    columns = (images[kept], caption, family, kind, licence)
    return dict(zip(COLUMNS, columns, strict=True)) | {n: _bytes(t) for n, t in zip(TEXTS, texts, strict=True)}


def _distinct(images: np.ndarray, captions: Sequence[str], shown: np.ndarray) -> np.ndarray:
    """Return the rows of distinct icons, by caption and 8 x 8 pixels in 8 levels, the first of each."""
    seen, kept = set(), []
    for row in shown.nonzero()[0]:
        small = images[row].reshape(8, 4, 8, 4, -1).mean(axis=(1, 3)).astype(np.uint8) >> 5
        look = (captions[row], small.tobytes())
        if look not in seen:
            seen.add(look)
            kept.append(row)
    return np.array(kept, dtype=np.int64)


def _positions(texts: Sequence[str]) -> tuple[list[str], np.ndarray]:
    """Return the distinct texts, sorted, and the position of each text among them."""
    distinct = sorted(set(texts))
    place = {text: position for position, text in enumerate(distinct)}
    return distinct, np.array([place[text] for text in texts], dtype=np.int64)


def _bytes(texts: Sequence[str]) -> np.ndarray:
    return np.frombuffer("".join(f"{text}\n" for text in texts).encode(), dtype=np.uint8)


def _lines(array: np.ndarray) -> list[str]:
    return array.tobytes().decode().split("\n")[:-1]


# -- arguments -----------------------------------------------------------------------------------------------------


def add_data(group: Any, choices: Sequence[str]) -> None:
    """Add the arguments that select a data set, and the source of the one that needs a download."""
    group.add_argument("--data", choices=choices, default=choices[0], help="data set; icons are fetched with npm once")
    group.add_argument(
        "--icons", type=Path, metavar="FILE", help="the icons' package, packed with npm; default: npm fetches it"
    )


def data_or_exit(
    root: argparse.ArgumentParser, load: Callable[[argparse.Namespace], Any], args: argparse.Namespace
) -> Any:
    """Load the data set of ``--data``; exit with a one-line message if data are missing."""
    for name, data in (("icons", "icons"), ("held_out", "icons"), ("labels", "icons"), ("folder", "folder")):
        if getattr(args, name, None) is not None and args.data != data:
            root.error(f"--{name.replace('_', '-')} belongs to --data {data}, got --data {args.data}")
    try:
        return load(args)
    except (Unavailable, ValueError) as error:
        root.error(str(error))
