"""Icons as pixels: SVG text to 32 x 32 grey images, on all cores.

Kept apart from the rest, so that the processes that draw need not import torch.
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

import numpy as np
from PIL import Image
from tqdm import tqdm

SIZE = 32  # pixels per side
IDENTITY = (1.0, 0.0, 0.0, 0.0, 1.0, 0.0)  # resvg's matrices are row-major
WHITE, BLACK = (255, 255, 255, 255), (0, 0, 0, 255)
FAINT = 32  # an icon whose darkest pixel has less ink is tried on black
BLANK = 8  # and one that has less on either shows nothing
CHUNK = 5000  # icons that a process draws at a time


def draw_all(svgs: Sequence[str], progress: bool = True) -> np.ndarray:
    """(len(svgs), 32, 32) uint8, 255 = ink; all 0 where an icon shows nothing or cannot be read."""
    starts = range(0, len(svgs), CHUNK)
    images = np.empty((len(svgs), SIZE, SIZE), dtype=np.uint8)
    if len(starts) == 1:
        return _draw_chunk(svgs)
    # Programs of their own, where multiprocessing would import the caller's main module again: no torch, no __main__.
    with (
        tqdm(total=len(svgs), desc="drawing icons", unit="icon", disable=not progress) as bar,
        ThreadPoolExecutor(os.cpu_count()) as pool,
    ):
        chunks = pool.map(_draw_elsewhere, [svgs[start : start + CHUNK] for start in starts])
        for start, chunk in zip(starts, chunks, strict=True):
            images[start : start + len(chunk)] = chunk
            bar.update(len(chunk))
    return images


def _draw_elsewhere(svgs: Sequence[str]) -> np.ndarray:
    """Draw in a process of its own."""
    command, root = [sys.executable, "-m", "recipes.icon_drawing"], Path(__file__).parent.parent
    done = subprocess.run(command, cwd=root, input=json.dumps(svgs).encode(), stdout=subprocess.PIPE, check=True)
    return np.frombuffer(done.stdout, dtype=np.uint8).reshape(len(svgs), SIZE, SIZE)


def _draw_chunk(svgs: Sequence[str]) -> np.ndarray:
    return np.array([draw(svg) for svg in svgs], dtype=np.uint8).reshape(len(svgs), SIZE, SIZE)


def draw(svg: str) -> np.ndarray:
    """(32, 32) uint8: how dark the icon is on white; one that is white itself is drawn on black, and inverted."""
    import resvg

    try:
        tree = resvg.usvg.Tree.from_str(svg, resvg.usvg.Options.default())
    except BaseException as error:  # Rust's panic is no Exception
        if type(error).__name__ != "PanicException":
            raise
        return np.zeros((SIZE, SIZE), dtype=np.uint8)
    ink = 255 - _grey(resvg.render(tree, IDENTITY, bg_color=WHITE))
    if ink.max() < FAINT:
        light = _grey(resvg.render(tree, IDENTITY, bg_color=BLACK))
        ink = max(ink, light, key=np.max)
    return ink if ink.max() >= BLANK else np.zeros_like(ink)


def _grey(png: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(png)).convert("L"))


if __name__ == "__main__":
    sys.stdout.buffer.write(_draw_chunk(json.load(sys.stdin.buffer)).tobytes())
