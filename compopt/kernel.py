r"""The pair-weight kernel: statistics and closed-form gradients of all pairs of a batch in one sweep.

One matrix ``S = X Y^T`` serves both directions: its rows are the anchors of direction 1 and its columns those
of direction 2 (bimodal), or its rows are both views at once (unimodal: ``X = Y = [Z1; Z2]``). The sweep goes
over strips of rows that fit the cache:

1. :class:`Pairs` computes ``S`` strip by strip, exponentiates it in place against a running maximum per anchor
   and keeps ``log sum_{j in N_i} exp(h_ij / tau_i)``;
2. the estimators turn those sums into log-normalizers ``alpha``;
3. :meth:`Pairs.gradients` scales the kept strips into the coefficient matrix ``A`` and multiplies:
   ``dL/dX = A Y``, ``dL/dY = A^T X``.

Memory: two ``P x Q`` matrices (one if every anchor has the same temperature, known on the host), or strips of
``chunk_size`` rows that are computed a second time in step 3. Nothing of size ``P x Q`` outlives the call, and
autograd records none of it. There is no host synchronisation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# Stands for "not a pair" in S. Finite, so that 0 * MASKED is 0 and not NaN; far below any similarity / tau.
MASKED = -1e30
# Above this 1/tau, exp(s/tau) of a unit-norm pair nears the range of float32 and a maximum must be subtracted.
MAX_UNSHIFTED_SCALE = 40.0
# Rows per strip on the CPU: the widest that was not slower than its neighbours (benchmarks/kernel.py).
CPU_STRIP_ROWS = 512
# Anchors over which the effective number of negatives is measured.
SPREAD_ROWS = 128


@dataclass
class Strip:
    """Rows ``start`` to ``stop`` of the exponentiated similarities.

    ``by_row[i, j] = exp((s_ij - row_shift_i) / tau_i)``; ``by_column`` likewise with the column's temperature
    and shift, ``None`` where it is the same matrix (uniform temperature) or unused (unimodal).
    """

    start: int
    stop: int
    by_row: Tensor
    row_shift: Tensor | None
    by_column: Tensor | None = None
    column_shift: Tensor | None = None


class Pairs:
    """All pairs of one batch: sums per anchor now, gradients once the log-normalizers are known.

    Args:
        z1, z2: features of the two modalities or views, ``(B, d)``, float32 or float64, no graph.
        tau: one number for all anchors, or a tensor ``(B, 2)``: a column per direction.
        keys: int64 tensors ``(B,)``; two samples equal in any of them are not each other's negatives. The first
            is the data-set index.
        distinct: True if it is known on the host that the first key has no repeats and that it is the only one.
        unimodal: both views of the other samples are candidates (otherwise the other modality's features).
        bounded: True if features have norm at most one.
        chunk_size: rows per strip, recomputed rather than stored; ``None`` stores all.
        moments: also compute ``mean_h`` (temperature gradients need it).

    Attributes (all ``(B, 2)``, a column per direction):
        positive: ``s_ii``.
        count: ``|N_i|`` as float; 0 where an anchor has no negatives.
        log_count: ``log |N_i|`` (of 1 where there are none).
        log_sum: ``log sum_{j in N_i} exp(h_ij / tau_i)``; 0 where there are none.
        mean_h: mean of ``h_ij`` under the batch softmax, or ``None``.
        effective: effective number of negatives ``(sum w)^2 / sum w^2``, over the first 128 anchors, 0-d.
    """

    def __init__(
        self,
        z1: Tensor,
        z2: Tensor,
        tau: float | Tensor,
        keys: Sequence[Tensor],
        *,
        distinct: bool,
        unimodal: bool = False,
        bounded: bool = True,
        chunk_size: int | None = None,
        moments: bool = False,
    ) -> None:
        self.z1, self.z2, self.tau, self.keys = z1, z2, tau, keys
        self.batch, self.unimodal, self.distinct = z1.shape[0], unimodal, distinct
        self.x = torch.cat([z1, z2]) if unimodal else z1
        self.y = self.x if unimodal else z2
        self.moments = moments
        self.uniform = isinstance(tau, float) and bounded and 1 / tau <= MAX_UNSHIFTED_SCALE and not moments
        self.two_sided = not unimodal  # columns are anchors too
        # exp(S) is its own transpose: one product with A + A^T replaces two
        self.symmetric = unimodal and self.uniform
        self.recompute = chunk_size is not None
        self.strip_rows = chunk_size or (CPU_STRIP_ROWS if z1.device.type == "cpu" else len(self.x))
        # Rows may overwrite S unless S is needed again, for the columns or for the moments.
        self._row_buffer = 0 if self.uniform or (unimodal and not moments) else 1
        self._buffers: list[Tensor] = []
        self._strips: list[Strip] = []
        self.positive = (z1 * z2).sum(1, keepdim=True).expand(-1, 2)
        self._sweep()

    # -- geometry ----------------------------------------------------------------------------------------------

    def _per_anchor(self, rows: Tensor, columns: Tensor | None) -> Tensor:
        """Arrange values of matrix rows and columns as ``(B, 2)``."""
        if self.unimodal:
            return rows.view(2, self.batch).T
        assert columns is not None
        return torch.stack([rows, columns], dim=1)

    def _row_values(self, per_anchor: Tensor) -> Tensor:
        """``(B, 2)`` -> one value per matrix row."""
        return per_anchor.T.reshape(-1) if self.unimodal else per_anchor[:, 0]

    def _column_values(self, per_anchor: Tensor) -> Tensor:
        """``(B, 2)`` -> one value per matrix column."""
        return self._row_values(per_anchor) if self.unimodal else per_anchor[:, 1]

    def _bounds(self) -> Iterator[tuple[int, int]]:
        for start in range(0, len(self.x), self.strip_rows):
            yield start, min(start + self.strip_rows, len(self.x))

    def _scales(self) -> tuple[Tensor, Tensor]:
        """1/tau per matrix row and per matrix column."""
        if isinstance(self.tau, float):
            scale = self.x.new_full((self.batch, 2), 1 / self.tau)
        else:
            scale = self.tau.to(self.x.dtype).expand(self.batch, 2).reciprocal()
        return self._row_values(scale), self._column_values(scale)

    def _mask(self, s: Tensor, start: int, value: float) -> Tensor | None:
        """Overwrite the entries of a strip that are not negative pairs; their number per row, if it varies."""
        if self.distinct:
            for offset in (-self.batch, 0, self.batch) if self.unimodal else (0,):
                if -len(s) < offset + start < s.shape[1]:
                    s.diagonal(offset + start).fill_(value)
            return None
        same = self._same(start, start + len(s))
        s.masked_fill_(same, value)
        return same

    def _same(self, start: int, stop: int) -> Tensor:
        same: Tensor | None = None
        for key in self.keys:
            key = key.repeat(2) if self.unimodal else key
            equal = key[start:stop, None] == key[None, :]
            same = equal if same is None else same.logical_or_(equal)
        assert same is not None
        return same

    # -- the sweep ---------------------------------------------------------------------------------------------

    def _buffer(self, which: int, start: int, stop: int) -> Tensor:
        """Rows of a work matrix: its own rows when strips are stored, the same few rows when recomputed."""
        while len(self._buffers) <= which:
            rows = min(self.strip_rows, len(self.x)) if self.recompute else len(self.x)
            self._buffers.append(self.x.new_empty(rows, len(self.y)))
        return self._buffers[which][: stop - start] if self.recompute else self._buffers[which][start:stop]

    def _sweep(self) -> None:
        rows, columns = len(self.x), len(self.y)
        self._row_scale, self._column_scale = self._scales()
        row_sum, column_sum = self.x.new_empty(rows), self.x.new_zeros(columns)
        row_shift = None if self.uniform else self.x.new_empty(rows)
        row_dot = self.x.new_zeros(rows) if self.moments else None
        column_dot = self.x.new_zeros(columns) if self.moments else None
        row_excluded, column_excluded = self.x.new_empty(rows), self.x.new_zeros(columns)
        column_shift: Tensor | None = None
        for start, stop in self._bounds():
            s, same = self._similarities(start, stop)
            if same is not None:
                torch.sum(same, 1, dtype=self.x.dtype, out=row_excluded[start:stop])
                column_excluded += same.sum(0)
            strip, dots = self._exponentiate(s, start, stop, column_shift)
            torch.sum(strip.by_row, 1, out=row_sum[start:stop])
            if row_shift is not None and strip.row_shift is not None:
                row_shift[start:stop] = strip.row_shift
            if self.two_sided:
                if strip.column_shift is not None and column_shift is not None:
                    shrink = ((column_shift - strip.column_shift) * self._column_scale).exp_()
                    column_sum *= shrink
                    if column_dot is not None:
                        column_dot *= shrink
                column_sum += (strip.by_row if strip.by_column is None else strip.by_column).sum(0)
                column_shift = strip.column_shift
            if row_dot is not None and column_dot is not None:
                row_dot[start:stop] = dots[0]
                if dots[1] is not None:
                    column_dot += dots[1]
            if start == 0:
                self.effective = self._effective(strip.by_row, row_sum)
            if not self.recompute:
                self._strips.append(strip)
        self._collect_counts(row_excluded, column_excluded)
        self._collect_sums(row_sum, column_sum, row_shift, column_shift)
        self.mean_h: Tensor | None = None
        if row_dot is not None and column_dot is not None:
            dot = self._per_anchor(row_dot / row_sum, column_dot / column_sum)
            self.mean_h = torch.where(self.count > 0, dot - self.positive, 0)

    def _similarities(self, start: int, stop: int) -> tuple[Tensor, Tensor | None]:
        s = self._buffer(0, start, stop)
        x = self.x[start:stop]
        if self.uniform:  # fold 1/tau into the narrow matrix
            x = x * (1 / self.tau)
        torch.mm(x, self.y.T, out=s)
        return s, self._mask(s, start, MASKED)

    def _exponentiate(
        self, s: Tensor, start: int, stop: int, column_shift: Tensor | None
    ) -> tuple[Strip, tuple[Tensor | None, Tensor | None]]:
        """Turn a strip of similarities into exponentials, in place where it can; the sums of ``s exp(...)``."""
        if self.uniform:
            return Strip(start, stop, s.exp_(), None), (None, None)
        shift = s.amax(1)
        by_row = self._buffer(self._row_buffer, start, stop)
        torch.sub(s, shift[:, None], out=by_row)
        by_row.mul_(self._row_scale[start:stop, None]).exp_()
        row_dot = torch.linalg.vecdot(by_row, s) if self.moments else None
        if not self.two_sided:
            return Strip(start, stop, by_row, shift), (row_dot, None)
        top = s.amax(0)
        top = top if column_shift is None else torch.maximum(column_shift, top)
        if not self.moments:
            by_column = s.sub_(top).mul_(self._column_scale).exp_()
            return Strip(start, stop, by_row, shift, by_column, top), (None, None)
        by_column = (s - top).mul_(self._column_scale).exp_()
        column_dot = torch.linalg.vecdot(by_column, s, dim=0)
        return Strip(start, stop, by_row, shift, s.copy_(by_column), top), (row_dot, column_dot)

    def _collect_counts(self, row_excluded: Tensor, column_excluded: Tensor) -> None:
        candidates = len(self.y)
        if self.distinct:
            count = float(candidates - (2 if self.unimodal else 1))
            self.count = self.x.new_full((), count).expand(self.batch, 2)
        else:
            self.count = candidates - self._per_anchor(row_excluded, column_excluded)
        self.log_count = self.count.clamp(min=1).log()

    def _collect_sums(
        self, row_sum: Tensor, column_sum: Tensor, row_shift: Tensor | None, column_shift: Tensor | None
    ) -> None:
        scale = self._per_anchor(self._row_scale, self._column_scale)
        log_sum = self._per_anchor(row_sum, column_sum).log()
        if row_shift is not None:
            log_sum = log_sum + self._per_anchor(row_shift, column_shift) * scale
        log_sum = log_sum - self.positive * scale
        self.log_sum = log_sum if self.distinct else torch.where(self.count > 0, log_sum, 0)

    def _effective(self, by_row: Tensor, row_sum: Tensor) -> Tensor:
        e = by_row[:SPREAD_ROWS]
        p = e / row_sum[: len(e), None]
        return p.square_().sum(1).reciprocal_().nanmean()

    # -- gradients ---------------------------------------------------------------------------------------------

    @property
    def log_ghat(self) -> Tensor:
        """``log ghat_i``, the batch estimate of the inner function, ``(B, 2)``."""
        return self.log_sum - self.log_count

    def gradients(self, alpha: Tensor, coefficient: Tensor) -> tuple[Tensor, Tensor]:
        r"""``sum over directions, anchors i, negatives j of coefficient_i w_ij grad h_ij``, weights constant.

        Consumes the kept strips: call it once.

        Args:
            alpha: log-normalizers, ``(B, 2)``.
            coefficient: factor of each anchor, broadcastable to ``(B, 2)``.

        Returns:
            Gradients with respect to ``z1`` and ``z2``, ``(B, d)`` each.
        """
        coefficient = torch.where(self.count > 0, coefficient, 0)
        scale = self._per_anchor(self._row_scale, self._column_scale)
        # log of the factor that takes exp(s_ij / tau_i) to coefficient_i * w_ij
        log_factor = -(self.positive * scale) - alpha - self.log_count
        grad_x, grad_y = torch.empty_like(self.x), torch.zeros_like(self.y)
        for strip in self._recomputed() if self.recompute else iter(self._strips):
            a = self._combine(strip, log_factor, coefficient)
            torch.mm(a, self.y, out=grad_x[strip.start : strip.stop])
            if self.recompute and not self.symmetric:
                grad_y.addmm_(a.T, self.x[strip.start : strip.stop])
        if not self.recompute and not self.symmetric:  # the strips are the rows of one matrix: one large product
            torch.mm(self._buffers[self._row_buffer].T, self.x, out=grad_y)
        return self._with_positives(grad_x, grad_y, alpha, coefficient)

    def _recomputed(self) -> Iterator[Strip]:
        column_shift: Tensor | None = None
        for start, stop in self._bounds():
            s, _ = self._similarities(start, stop)
            strip, _ = self._exponentiate(s, start, stop, column_shift)
            column_shift = strip.column_shift
            yield strip

    def _combine(self, strip: Strip, log_factor: Tensor, coefficient: Tensor) -> Tensor:
        """Scale one strip into coefficients ``A_ij``, in place."""
        rows = slice(strip.start, strip.stop)
        row_log = self._row_values(log_factor)[rows]
        if strip.row_shift is not None:
            row_log = row_log + strip.row_shift * self._row_scale[rows]
        by_row = (self._row_values(coefficient)[rows] * row_log.exp())[:, None]
        if not self.two_sided and not self.symmetric:
            return strip.by_row.mul_(by_row)
        column_log = self._column_values(log_factor)
        if strip.column_shift is not None:
            column_log = column_log + strip.column_shift * self._column_scale
        by_column = self._column_values(coefficient) * column_log.exp()
        if strip.by_column is None:
            return strip.by_row.mul_(by_row + by_column)
        return strip.by_row.mul_(by_row).add_(strip.by_column.mul_(by_column))

    def sum_weights(self, alpha: Tensor) -> Tensor:
        """``sum_j w_ij``, ``(B, 2)``."""
        return torch.where(self.count > 0, (self.log_ghat - alpha).exp(), 0)

    def _with_positives(
        self, grad_x: Tensor, grad_y: Tensor, alpha: Tensor, coefficient: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Add the ``-grad s_ii`` terms; in unimodal mode add the two roles of each row first."""
        if self.unimodal:
            grad_x, grad_y = grad_x.add_(grad_y).split(self.batch)
        pull = (coefficient * self.sum_weights(alpha)).sum(1, keepdim=True)
        return grad_x.sub_(pull * self.z2), grad_y.sub_(pull * self.z1)

