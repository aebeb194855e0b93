"""A wave of rows in plain torch: what :mod:`compopt.tiles.language` computes in tiles, in any dtype on any device."""

from __future__ import annotations

import torch
from torch import Tensor

from compopt.tiles.operands import NO_PAIR, Anchors, AnchorSums, Operands, Weights


def sums(o: Operands, wave: slice) -> tuple[AnchorSums | None, AnchorSums | None]:
    """Return sums of the anchors along the rows of a wave, and of those along the columns over these rows.

    Both have one part, ``(1, P)``.
    """
    s = o.x[wave] @ o.y.T
    apart = _apart(o, wave)
    rows = None if o.rows is None else _side_sums(o, s, apart, o.rows.part(wave), 1)
    columns = None if o.columns is None else _side_sums(o, s, apart, o.columns, 0)
    return rows, columns


def coefficients(o: Operands, wave: slice, rows: Weights | None, columns: Weights | None, out: Tensor) -> None:
    """Write ``A_ij`` of a wave, the sum of what the anchors of both axes give to a pair, ``(wave, Q)``."""
    s = o.x[wave] @ o.y.T
    apart = _apart(o, wave)
    out.zero_()
    for anchors, weights, dim in ((o.rows, rows, 1), (o.columns, columns, 0)):
        if anchors is None or weights is None:
            continue
        if dim == 1:
            anchors, weights = anchors.part(wave), weights.part(wave)
        z, skipped = _exponents(o, s, apart, anchors, dim)
        if weights.top is not None:
            z.sub_(weights.top.unsqueeze(dim))
        out += z.exp_().mul_(weights.factor.unsqueeze(dim)).masked_fill_(skipped, 0)


def _apart(o: Operands, wave: slice) -> Tensor:
    """True where a row and a column are no pair, ``(wave, Q)``."""
    rows, count = o.row_keys[:, wave], len(o.row_keys) - o.within
    apart = (rows[:count, :, None] == o.column_keys[:count, None, :]).any(0)
    return apart | (rows[-1, :, None] != o.column_keys[-1]) if o.within else apart


def _exponents(o: Operands, s: Tensor, apart: Tensor, anchors: Anchors, dim: int) -> tuple[Tensor, Tensor]:
    """Return ``s_ij (1 / tau_i + beta_j)``, and where there is no pair; ``dim`` is the axis of the candidates."""
    further = torch.arange(s.shape[dim], device=s.device) >= o.inside if dim == 1 else s.new_zeros(len(s)).bool()
    if anchors.threshold is not None:
        found = s > anchors.threshold.unsqueeze(dim)
        apart = apart | (found & ~further.unsqueeze(1 - dim) if o.spared else found)
    scale = anchors.scale.unsqueeze(dim)
    if any(o.strengths):
        beta = torch.where(further, o.strengths[1], o.strengths[0]).to(s.dtype)
        scale = scale + beta.unsqueeze(1 - dim)
    return s * scale, apart


def _side_sums(o: Operands, s: Tensor, apart: Tensor, anchors: Anchors, dim: int) -> AnchorSums:
    z, apart = _exponents(o, s, apart, anchors, dim)
    z.masked_fill_(apart, NO_PAIR)
    top = None if o.shared is not None else z.amax(dim)
    e = (z if top is None else z.sub_(top.unsqueeze(dim))).exp_().masked_fill_(apart, 0)
    dot = (e * s).masked_fill_(apart, 0).sum(dim)[None] if o.moments else None  # s may be NaN where there is no pair
    number = (~apart).sum(dim, dtype=s.dtype)[None] if o.counted else None
    return AnchorSums(e.sum(dim)[None], e.square().sum(dim)[None], None if top is None else top[None], dot, number)
