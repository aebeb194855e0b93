"""Augmentations of image batches: a random shift, and kornia's operations with the strength of SimCLR."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from recipes.models import pixels

Name = Literal["shift", "crop", "flip", "jitter", "grey", "blur"]
NAMES: tuple[Name, ...] = get_args(Name)
COLOURS = ("jitter", "grey")  # these need three channels
SHIFT = 2  # pixels
AREA = (0.2, 1.0)  # range of the area share that crops keep


class Augmentation:
    """Draw augmented versions of images.

    The random draws are a function of the generator that is passed to a call, so that a resumed run repeats them.

    Args:
        names: operations, applied in this order: ``"shift"`` by up to two pixels over an empty border, and kornia's
            random resized ``"crop"``, horizontal ``"flip"``, colour ``"jitter"``, ``"grey"`` and ``"blur"``. ``()``
            returns images unchanged.
        channels: channels of the images.
        size: pixels per side.

    Raises:
        ValueError: a colour operation for grey images, or kornia is missing.
    """

    def __init__(self, names: Sequence[Name], channels: int, size: int = 32) -> None:
        if channels != 3 and (refused := [name for name in names if name in COLOURS]):
            raise ValueError(f"augment={refused[0]!r} needs images in colour; these have {channels} channel")
        self.names = tuple(sorted(names, key=NAMES.index))
        self._kornia = _kornia([name for name in self.names if name != "shift"], size)

    def __call__(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """Augment images (B, H, W) or (B, C, H, W), uint8; kornia's operations give floats between 0 and 1."""
        if "shift" in self.names:
            images = _shift(images, generator)
        if self._kornia is None:
            return images
        with torch.random.fork_rng(devices=[]):  # kornia uses torch's default CPU generator
            torch.default_generator.manual_seed(int(torch.randint(2**62, (), generator=generator)))
            return self._kornia(pixels(images))


def _kornia(names: Sequence[Name], size: int) -> Callable[[Tensor], Tensor] | None:
    if not names:
        return None
    if find_spec("kornia") is None:
        raise ValueError(f'augment={names[0]!r} needs kornia: pip install -c constraints.txt -e ".[recipes]"')
    import kornia.augmentation as K

    # SimCLR, appendix A, with its strength for 32 x 32 images (appendix B.9)
    built: dict[str, Callable[[], Any]] = {
        "crop": lambda: K.RandomResizedCrop((size, size), scale=AREA),
        "flip": lambda: K.RandomHorizontalFlip(p=0.5),
        "jitter": lambda: K.ColorJitter(0.4, 0.4, 0.4, 0.1, p=0.8),
        "grey": lambda: K.RandomGrayscale(p=0.2),
        "blur": lambda: K.RandomGaussianBlur((3, 3), (0.1, 2.0), p=0.5),
    }
    return K.AugmentationSequential(*(built[name]() for name in names))


def _shift(images: Tensor, generator: torch.Generator) -> Tensor:
    offsets = torch.randint(0, 2 * SHIFT + 1, (2, len(images)), generator=generator)
    return shifted(images, offsets.to(images.device), SHIFT)


def shifted(images: Tensor, offsets: Tensor, shift: int) -> Tensor:
    """Shift each image (B, ..., H, W) by its own offsets (2, B), each 0 .. 2 * shift, over an empty border."""
    height, width = images.shape[-2:]
    padded = F.pad(images, (shift, shift, shift, shift)).movedim((-2, -1), (1, 2))
    rows = offsets[0, :, None] + torch.arange(height, device=images.device)
    columns = offsets[1, :, None] + torch.arange(width, device=images.device)
    sample = torch.arange(len(images), device=images.device)
    return padded[sample[:, None, None], rows[:, :, None], columns[:, None, :]].movedim((1, 2), (-2, -1))
