"""Feature gradients to compare: the inputs all losses see, and how far two gradients are apart."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

N, TAU, GAMMA = 512, 0.1, 0.5  # samples of the data set, and what losses are built with


def features(batch: int, dim: int, visit: int) -> tuple[Tensor, Tensor, Tensor]:
    """z1, z2 and the index of the whole batch; visits differ a little, as training makes them differ."""
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(2, batch, dim, generator=generator, dtype=torch.float64)
    drift = torch.randn(2, batch, dim, generator=generator.manual_seed(visit + 1), dtype=torch.float64)
    z1, z2 = F.normalize(base + 0.3 * drift, dim=2).float()
    return z1, z2, torch.randperm(N, generator=generator.manual_seed(0))[:batch]


def relative(found: np.ndarray, wanted: np.ndarray) -> float:
    """Norm of the difference, divided by the norm of ``wanted``."""
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


def rescaled(found: np.ndarray, wanted: np.ndarray) -> tuple[float, float]:
    """The factor on ``found`` that brings it nearest, and the relative error that is left, which Adam would notice."""
    factor = float((found * wanted).sum() / np.square(found).sum())
    return factor, relative(factor * found, wanted)
