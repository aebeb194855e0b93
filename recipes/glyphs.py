"""Glyphs: an image-text data set that needs no download.

matplotlib includes the DejaVu (12 faces) and STIX (4 faces) fonts.  Every character that a face contains and that has
a Unicode name is rendered as a 32 x 32 grey image and paired with its name: about 54,000 pairs and 7,300 distinct
captions that occur 1 to 16 times each, a natural long tail.  Rendering takes seconds; the result is cached in one file.
"""

from __future__ import annotations

import hashlib
import os
import unicodedata
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import matplotlib
import numpy as np
import torch
from matplotlib.ft2font import FT2Font
from PIL import Image, ImageDraw, ImageFont, features
from torch import Tensor

from recipes import cache as cached

SIZE = 32  # pixels per side
FONT_SIZE = 24  # ascent + descent of DejaVu at this size fill 28 of the 32 rows
BASELINE = 24  # row of the common baseline, so that '.' and '\N{MIDDLE DOT}' differ
FORMAT = 1  # increase when the rendering or the file's layout changes

FACES = (
    *(f"DejaVuSans{style}" for style in ("", "-Bold", "-Oblique", "-BoldOblique")),
    *(f"DejaVuSansMono{style}" for style in ("", "-Bold", "-Oblique", "-BoldOblique")),
    *(f"DejaVuSerif{style}" for style in ("", "-Bold", "-Italic", "-BoldItalic")),
    *(f"STIXGeneral{style}" for style in ("", "Bol", "Italic", "BolIta")),
)

# First words of names that denote a script (or a family of signs): the labels of the probes.
SCRIPTS = (
    *("LATIN", "GREEK", "CYRILLIC", "MATHEMATICAL", "ARABIC", "CANADIAN", "BRAILLE", "GEORGIAN", "ARMENIAN"),
    *("HEBREW", "LAO", "TIFINAGH", "NKO", "LISU", "OGHAM", "BOX", "DOMINO", "HEXAGRAM", "TETRAGRAM", "PLAYING"),
)


@dataclass(frozen=True)
class Glyphs:
    """All pairs, ordered by face and code point; pair i shows character ``codepoint[i]`` in ``face[i]``."""

    images: Tensor  # (N, 32, 32) uint8, 255 = ink
    codepoint: Tensor  # (N,) int64
    face: Tensor  # (N,) int64, position in FACES

    def __len__(self) -> int:
        return len(self.images)

    @cached_property
    def names(self) -> list[str]:
        """Return the distinct captions, ordered by code point."""
        return [unicodedata.name(chr(code)) for code in torch.unique(self.codepoint).tolist()]

    @cached_property
    def caption(self) -> Tensor:
        """Return the caption of each pair as a position in :attr:`names`, (N,) int64."""
        return torch.unique(self.codepoint, return_inverse=True)[1]

    @cached_property
    def script(self) -> Tensor:
        """Return the script of each caption as a position in SCRIPTS or -1, (len(names),) int64."""
        label = {script: position for position, script in enumerate(SCRIPTS)}
        return torch.tensor([label.get(name.split()[0], -1) for name in self.names])


@dataclass(frozen=True)
class Split:
    """Positions of the training pairs and of the held-out pairs.

    The data-set index of a training pair, which is passed to estimators, is its position in :attr:`train`.
    """

    train: Tensor  # (n,) int64, ascending
    held_out: Tensor  # (m,) int64, ascending


def split_pairs(data: Glyphs, seed: int = 0, fraction: float = 0.05) -> Split:
    """Hold out a random ``fraction`` of the pairs; most of their captions occur in training with other faces."""
    return _split(torch.arange(len(data)), len(data), seed, fraction)


def split_characters(data: Glyphs, seed: int = 0, fraction: float = 0.1) -> Split:
    """Hold out a random ``fraction`` of the characters, each with all its faces."""
    return _split(data.caption, len(data.names), seed, fraction)


def _split(unit: Tensor, units: int, seed: int, fraction: float) -> Split:
    """Hold out the pairs whose ``unit`` is among a random ``fraction`` of all units."""
    if not 0 < fraction < 1:
        raise ValueError(f"fraction must lie between 0 and 1, got {fraction}")
    order = torch.randperm(units, generator=torch.Generator().manual_seed(seed))
    held_out = torch.zeros(units, dtype=torch.bool)
    held_out[order[: max(1, round(fraction * units))]] = True
    mask = held_out[unit]
    return Split(train=(~mask).nonzero().flatten(), held_out=mask.nonzero().flatten())


def load(cache: str | os.PathLike[str] | None = None) -> Glyphs:
    """Return the data set, from the cache file if it matches the installed fonts and libraries, else newly rendered."""
    path, names = cached.file(cache, "glyphs.npz"), ("images", "codepoint", "face")
    arrays = cached.read_or_make(path, cache_key(), names, render)
    return Glyphs(**{name: torch.from_numpy(array) for name, array in arrays.items()})


def cache_key() -> str:
    """Return a digest of everything that the pixels and names depend on: fonts, libraries, parameters."""
    digest = hashlib.sha256()
    versions = (matplotlib.__version__, features.version("pil"), features.version("freetype2"))
    digest.update(repr((FORMAT, SIZE, FONT_SIZE, BASELINE, FACES, unicodedata.unidata_version, versions)).encode())
    for face in FACES:
        digest.update(_font_file(face).read_bytes())
    return digest.hexdigest()


def render() -> dict[str, np.ndarray]:
    """Render every pair, in the order of FACES and code points; blank glyphs (spaces, selectors) are left out."""
    images, codepoints, faces = [], [], []
    for position, face in enumerate(FACES):
        fonts = [ImageFont.truetype(_font_file(face), size, layout_engine=ImageFont.Layout.BASIC) for size in _sizes()]
        for code in _named_characters(face):
            image = _draw(chr(code), fonts)
            if image.any():
                images.append(image)
                codepoints.append(code)
                faces.append(position)
    return {
        "images": np.stack(images),
        "codepoint": np.array(codepoints, dtype=np.int64),
        "face": np.array(faces, dtype=np.int64),
    }


def _sizes() -> range:
    """Return font sizes, the largest first; a wide ligature is drawn in the first size that fits."""
    return range(FONT_SIZE, 3, -4)


def _font_file(face: str) -> Path:
    return Path(matplotlib.get_data_path()) / "fonts" / "ttf" / f"{face}.ttf"


def _named_characters(face: str) -> list[int]:
    """Return the code points in the face's character map that have a Unicode name (private use has none)."""
    codes = FT2Font(str(_font_file(face))).get_charmap()
    return sorted(code for code in codes if unicodedata.name(chr(code), ""))


def _draw(character: str, fonts: list[ImageFont.FreeTypeFont]) -> np.ndarray:
    """Draw a character, (32, 32) uint8: horizontally centred, on the baseline, smaller only if it does not fit."""
    for font in fonts:
        left, top, right, bottom = font.getbbox(character, anchor="ls")
        if right - left <= SIZE and bottom - top <= SIZE:
            break
    baseline = min(max(BASELINE, -top), SIZE - bottom)
    image = Image.new("L", (SIZE, SIZE))
    place = ((SIZE - left - right) // 2, baseline)
    ImageDraw.Draw(image).text(place, character, font=font, fill=255, anchor="ls")
    return np.asarray(image)
