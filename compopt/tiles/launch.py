"""Launches of the kernels of :mod:`compopt.tiles.language`, with the shape of their tiles."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from compopt.tiles.operands import Anchors, AnchorSums, Operands, Weights


class Tile(NamedTuple):
    """Shape of a tile, and how its product is pipelined."""

    BM: int
    BN: int
    BK: int
    warps: int
    stages: int


# One tile for each precision and kernel, so that sums are added in the same order in every run. The wide ones are of
# kernels that compile for every target without spilled registers, the narrow ones of the others (benchmarks/fused.py).
WIDE = {"bf16": Tile(128, 128, 64, 8, 3), "tf32": Tile(128, 128, 32, 8, 3)}
NARROW = {"bf16": Tile(128, 64, 64, 8, 3), "tf32": Tile(128, 64, 32, 8, 3)}
SMALL = {"tf32x3": Tile(64, 64, 32, 4, 2), "ieee": Tile(32, 32, 32, 4, 2)}
GROUP = 8  # rows of tiles that share columns in the cache


def tile_of(precision: str, maxima: bool, policy: bool) -> Tile:
    """Return the tile of a kernel.

    Args:
        precision: of the product.
        maxima: it finds the maximum of each anchor.
        policy: it knows thresholds or strengths.
    """
    return {**(NARROW if maxima or policy else WIDE), **SMALL}[precision]


def constants(o: Operands, tile: Tile, rows: bool, columns: bool) -> dict[str, Any]:
    """Return what both kernels know when they are compiled; ``rows``, ``columns``: where anchors are."""
    return {
        "ROWS": rows,
        "COLUMNS": columns,
        "KEYS": len(o.row_keys) - o.within,
        "WITHIN": o.within,
        "SHIFTED": o.shared is None,
        "THRESHOLD": _has_threshold(o),
        "SPARED": o.spared,
        "HARD": any(o.strengths),
        "EVEN": o.x.shape[1] % tile.BK == 0,
        "PRECISION": "ieee" if o.precision == "bf16" else o.precision,
        "UPCAST": o.precision == "bf16" and not o.x.is_cuda,
        **{"BM": tile.BM, "BN": tile.BN, "BK": tile.BK, "GROUP": GROUP},
    }


def _has_threshold(o: Operands) -> bool:
    return any(anchors is not None and anchors.threshold is not None for anchors in (o.rows, o.columns))


def _has_policy(o: Operands) -> bool:
    return _has_threshold(o) or any(o.strengths)


def planes(o: Operands) -> int:
    """Return how many sums the first kernel writes for each anchor and tile."""
    return 2 + (o.shared is None) + o.moments + o.counted


def sums(o: Operands, wave: slice) -> tuple[AnchorSums | None, AnchorSums | None]:
    """Return sums of the anchors along the rows of a wave, and of those along the columns over these rows, by tile."""
    from compopt.tiles import language

    tile = tile_of(o.precision or "ieee", maxima=o.shared is None, policy=_has_policy(o))
    rows, columns = wave.stop - wave.start, len(o.y)
    down, across = -(-rows // tile.BM), -(-columns // tile.BN)
    by_row = o.x.new_empty(planes(o) * (o.rows is not None), across, rows, dtype=torch.float32)
    by_column = o.x.new_empty(planes(o) * (o.columns is not None), down, columns, dtype=torch.float32)
    flags = constants(o, tile, o.rows is not None, o.columns is not None)
    with torch.cuda.device_of(o.x):
        language.sums[(down * across,)](
            *(*_features(o, wave), by_row, by_column),
            *(*_sizes(o, wave), across * rows, down * columns, *_numbers(o)),
            **{**flags, "MOMENTS": o.moments, "COUNTED": o.counted},
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
    return _read(o, by_row), _read(o, by_column)


def coefficients(o: Operands, wave: slice, rows: Weights | None, columns: Weights | None, out: Tensor) -> None:
    """Write ``A_ij`` of a wave, ``(wave, Q)``."""
    from compopt.tiles import language

    tile, count = tile_of(o.precision or "ieee", maxima=False, policy=_has_policy(o)), wave.stop - wave.start
    nothing = o.x.new_empty(0, dtype=torch.float32)
    row, column = (nothing if w is None else w.factor for w in (rows, columns))
    row_top, column_top = (nothing if w is None or w.top is None else w.top for w in (rows, columns))
    weights = [row[wave], column, row_top[wave], column_top]
    with torch.cuda.device_of(o.x):
        language.coefficients[(-(-count // tile.BM) * -(-len(o.y) // tile.BN),)](
            *(*_features(o, wave), *weights, out, *_sizes(o, wave), out.stride(0), *_numbers(o)),
            **constants(o, tile, rows is not None, columns is not None),
            num_warps=tile.warps,
            num_stages=tile.stages,
        )


def _features(o: Operands, wave: slice) -> list[Tensor]:
    """Features, keys, scales and thresholds; of the rows those of the wave. Without an entry: not read."""
    nothing = o.x.new_empty(0, dtype=torch.float32)
    row, column = (anchors or Anchors(nothing) for anchors in (o.rows, o.columns))
    return [
        *(o.x[wave], o.y, o.row_keys[:, wave], o.column_keys),
        *(row.scale[wave], column.scale),
        nothing if row.threshold is None else row.threshold[wave],
        nothing if column.threshold is None else column.threshold,
    ]


def _sizes(o: Operands, wave: slice) -> list[int]:
    strides = [o.row_keys.stride(0), o.column_keys.stride(0)]
    return [wave.stop - wave.start, len(o.y), o.x.shape[1], o.inside, *strides]


def _numbers(o: Operands) -> list[float]:
    return [0.0 if o.shared is None else o.shared, *o.strengths]


def _read(o: Operands, written: Tensor) -> AnchorSums | None:
    """Name the planes, ``(tiles, anchors)`` each."""
    if not len(written):
        return None
    total, squares, *rest = written
    top, dot, number = (rest.pop(0) if there else None for there in (o.shared is None, o.moments, o.counted))
    return AnchorSums(total, squares, top, dot, number)
