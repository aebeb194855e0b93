"""Data set from a folder of images: 32 x 32 in colour, with the names of its sub-folders as labels."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError

from recipes import cache as cached
from recipes.cache import Unavailable
from recipes.tasks import ImageViews, Labelled, Views

SIZE = 32  # pixels per side
FORMAT = 1  # increase when the reading or the file's layout changes


def load(folder: Path, cache: str | os.PathLike[str] | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (N, 3, 32, 32) uint8 images in the order of their paths, and (N,) labels: positions of sub-folders.

    Images are cropped to squares. The result is cached until a file's name, size or time changes.
    """
    paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in Image.registered_extensions())
    paths = [path for path in paths if path.parent != folder]
    if len({_label(path, folder) for path in paths}) < 2:
        raise Unavailable(f"{folder} needs images in two sub-folders at least, whose names are the labels")
    told = [(str(path.relative_to(folder)), path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
    key = hashlib.sha256(repr((FORMAT, SIZE, told)).encode()).hexdigest()
    file = cached.file(cache, f"folder-{hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]}.npz")
    arrays = cached.read_or_make(file, key, ("images", "labels"), lambda: _read(paths, folder))
    return torch.from_numpy(arrays["images"]).movedim(3, 1).contiguous(), torch.from_numpy(arrays["labels"])


def _label(path: Path, folder: Path) -> str:
    return path.relative_to(folder).parts[0]


def _read(paths: list[Path], folder: Path) -> dict[str, np.ndarray]:
    images = np.stack([_image(path) for path in paths])
    labels = np.unique([_label(path, folder) for path in paths], return_inverse=True)[1]
    return {"images": images, "labels": labels.astype(np.int64)}


def _image(path: Path) -> np.ndarray:
    try:
        with Image.open(path) as image:
            return np.asarray(ImageOps.fit(image.convert("RGB"), (SIZE, SIZE)))
    except (UnidentifiedImageError, OSError) as error:
        raise Unavailable(f"{path} cannot be read ({error}); remove or repair it") from error


def folder_views(
    folder: Path,
    cache: str | os.PathLike[str] | None = None,
    split_seed: int = 0,
    views: Views | None = None,
    device: torch.device | str = "cpu",
) -> ImageViews:
    """Return views of a folder's images; the probes predict the labels of a random tenth, which is held out."""
    images, labels = load(folder, cache)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(split_seed))
    held_out, train = (part.sort().values for part in order.tensor_split([max(1, len(order) // 10)]))
    bank, queries = (Labelled(images[part], labels[part]) for part in (train, held_out))
    about = f"folder {folder.name}, split {split_seed}, n = {len(train)}"
    return ImageViews(images[train], bank, queries, about, views, device)
