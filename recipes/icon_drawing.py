"""Rendering of icons: SVG text to 32 x 32 images, grey or in colour, on all cores.

A separate module, so that the drawing processes need not import torch.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import numpy as np
from PIL import Image
from tqdm import tqdm

SIZE = 32  # pixels per side
IDENTITY = (1.0, 0.0, 0.0, 0.0, 1.0, 0.0)  # resvg's matrices are row-major
WHITE, BLACK = (255, 255, 255, 255), (0, 0, 0, 255)
FAINT = 32  # an icon whose darkest pixel has less ink is also drawn on black
BLANK = 8  # an icon with less ink on both backgrounds is blank
CHUNK = 5000  # icons that a process draws at a time

Mode = Literal["L", "RGB"]  # Pillow's modes for grey and colour


def draw_all(svgs: Sequence[str], progress: bool = True, mode: Mode = "L") -> np.ndarray:
    """Draw icons; return (len(svgs), 32, 32) or, in colour, (len(svgs), 32, 32, 3) uint8, 255 = ink (inverted light).

    The image of an icon that is blank or cannot be read is 0.
    """
    starts = range(0, len(svgs), CHUNK)
    images = np.empty((len(svgs), *_shape(mode)), dtype=np.uint8)
    if len(starts) == 1:
        return _draw_chunk(svgs, mode)
    # separate programs: multiprocessing would import the caller's main module again, and with it torch
    with (
        tqdm(total=len(svgs), desc="drawing icons", unit="icon", disable=not progress) as bar,
        ThreadPoolExecutor(os.cpu_count()) as pool,
    ):
        chunks = pool.map(_draw_elsewhere, [svgs[start : start + CHUNK] for start in starts], [mode] * len(starts))
        for start, chunk in zip(starts, chunks, strict=True):
            images[start : start + len(chunk)] = chunk
            bar.update(len(chunk))
    return images


def _shape(mode: Mode) -> tuple[int, ...]:
    return (SIZE, SIZE, 3) if mode == "RGB" else (SIZE, SIZE)


def _draw_elsewhere(svgs: Sequence[str], mode: Mode) -> np.ndarray:
    """Draw in a separate process."""
    command, root = [sys.executable, "-m", "recipes.icon_drawing", mode], Path(__file__).parent.parent
    done = subprocess.run(command, cwd=root, input=json.dumps(svgs).encode(), stdout=subprocess.PIPE, check=True)
    return np.frombuffer(done.stdout, dtype=np.uint8).reshape(len(svgs), *_shape(mode))


def _draw_chunk(svgs: Sequence[str], mode: Mode) -> np.ndarray:
    return np.array([draw(svg, mode) for svg in svgs], dtype=np.uint8).reshape(len(svgs), *_shape(mode))


def draw(svg: str, mode: Mode = "L") -> np.ndarray:
    """Draw an icon; return (32, 32) or (32, 32, 3) uint8, its darkness on white per channel.

    A white icon is drawn on black, and inverted.
    """
    import resvg

    try:
        tree = resvg.usvg.Tree.from_str(svg, resvg.usvg.Options.default())
    except BaseException as error:  # a panic in Rust is not an Exception
        if type(error).__name__ != "PanicException":
            raise
        return np.zeros(_shape(mode), dtype=np.uint8)
    ink = 255 - _pixels(resvg.render(tree, IDENTITY, bg_color=WHITE), mode)
    if ink.max() < FAINT:
        light = _pixels(resvg.render(tree, IDENTITY, bg_color=BLACK), mode)
        ink = max(ink, light, key=np.max)
    return ink if ink.max() >= BLANK else np.zeros_like(ink)


def _pixels(png: bytes, mode: Mode) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(png)).convert(mode))


if __name__ == "__main__":
    sys.stdout.buffer.write(_draw_chunk(json.load(sys.stdin.buffer), sys.argv[1]).tobytes())
