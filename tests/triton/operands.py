"""Matrices with every feature of the kernels, in float64 for plain torch and in low precision for Triton."""

from dataclasses import replace

import torch
import torch.nn.functional as F

from compopt.kernel.triton.sweep import Anchors, Operands

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# The interpreter multiplies TF32 in float32.
EXACT = "ieee" if DEVICE.type == "cuda" else "tf32"


def anchors(count, shared, generator, tau):
    """Return anchors with temperatures between two bounds, or one for all."""
    low, high = tau
    scale = 1 / (low + (high - low) * torch.rand(count, dtype=torch.float64, generator=generator))
    return Anchors(torch.full_like(scale, shared) if shared else scale)


def operands(P=70, Q=90, d=20, rows=True, columns=True, keys=2, tau=(0.02, 0.2), seed=0, **options):
    """Return operands in float64; the keys of rows and columns are small integers."""
    generator = torch.Generator().manual_seed(seed)
    x, y = (F.normalize(torch.randn(n, d, dtype=torch.float64, generator=generator), dim=1) for n in (P, Q))
    row_keys, column_keys = (torch.randint(max(P, 7), (keys, n), generator=generator).int() for n in (P, Q))
    shared = options.get("shared")
    sides = [anchors(n, shared, generator, tau) if on else None for n, on in ((P, rows), (Q, columns))]
    return Operands(x, y, row_keys, column_keys, *sides, **options)


def low(o, precision=EXACT):
    """Return the same operands on the device, in the dtypes that the kernels take."""
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32

    def side(given):
        return None if given is None else Anchors(*(v if v is None else v.to(DEVICE, torch.float32) for v in given))

    keys = {name: getattr(o, name).to(DEVICE) for name in ("row_keys", "column_keys")}
    features = {"x": o.x.to(DEVICE, dtype), "y": o.y.to(DEVICE, dtype)}
    return replace(o, rows=side(o.rows), columns=side(o.columns), **keys, **features, precision=precision)


def weighted(o, sums, seed=1):
    """Return the same operands with factors of any sign that turn sums into coefficients of moderate size."""
    sides = []
    for anchors, side in zip((o.rows, o.columns), sums, strict=True):
        if anchors is not None:
            generator = torch.Generator().manual_seed(seed)
            factor = torch.randn(len(side.total), dtype=torch.float64, generator=generator)
            factor = torch.where(side.total > 0, factor / side.total.clamp(min=1e-300), 0)
            anchors = anchors._replace(factor=factor, top=side.top)
        sides.append(anchors)
    return replace(o, rows=sides[0], columns=sides[1])


def relative(actual, expected):
    """Return the relative error in the Frobenius norm."""
    actual, expected = actual.cpu().double(), expected.double()
    return float((actual - expected).norm() / expected.norm())
