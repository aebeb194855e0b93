r"""The pair-weight kernel: statistics and closed-form gradients of all pairs of a batch in one sweep.

One matrix ``S = X Y^T`` serves both directions: its rows are the anchors of direction 1 and its columns those
of direction 2 (bimodal), or its rows are both views at once (unimodal: ``X = Y = [Z1; Z2]``). With one direction only
its rows are anchors. Further candidates are columns that are no anchors. The sweep goes over blocks of rows that fit
the cache:

1. :class:`Pairs` computes ``S`` block by block, exponentiates it in place against a running maximum per anchor
   and keeps ``log sum_{j in N_i} exp(h_ij / tau_i)``;
2. the estimators turn those sums into log-normalizers ``alpha``;
3. :meth:`Pairs.gradients` scales the kept blocks into the coefficient matrix ``A`` and multiplies:
   ``dL/dX = A Y``, ``dL/dY = A^T X``.

Memory: two ``P x Q`` matrices (one if every anchor has the same temperature, known on the host), or blocks of
``chunk_size`` rows that are computed a second time in step 3. Nothing of size ``P x Q`` outlives the call, and
autograd records none of it. There is no host synchronisation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from compopt.kernel.log_sum_exp import Block, Exponentials, OnlineLogSumExp
from compopt.kernel.statistics import MASKED, Extra, PairStatistics, is_uniform, same_sample, scale_of

# Rows per block on the CPU: the widest that was not slower than its neighbours (benchmarks/kernel.py).
CPU_BLOCK_ROWS = 512


class Pairs(PairStatistics):
    """All pairs of one batch: sums per anchor now, gradients once the log-normalizers are known.

    Args:
        z1, z2: features of the two modalities or views, ``(B, d)``, float32 or float64, no graph.
        tau: one number for all anchors, or a tensor ``(B, 2)``: a column per direction.
        keys: int64 tensors ``(B,)``; two samples equal in any of them are not each other's negatives. The first
            is the data-set index.
        distinct: True if it is known on the host that the first key has no repeats and that it is the only one.
        directions: 1: anchors are ``z1`` alone.
        extra: further candidates of the anchors of direction 1.
        unimodal: both views of the other samples are candidates (otherwise the other modality's features).
        bounded: True if features have norm at most one.
        chunk_size: rows per block, recomputed rather than stored; ``None`` stores all.
        moments: also compute ``mean_h`` (temperature gradients need it).
    """

    def __init__(
        self,
        z1: Tensor,
        z2: Tensor,
        tau: float | Tensor,
        keys: Sequence[Tensor],
        *,
        distinct: bool,
        directions: int = 2,
        extra: Extra | None = None,
        unimodal: bool = False,
        bounded: bool = True,
        chunk_size: int | None = None,
        moments: bool = False,
    ) -> None:
        self.z1, self.z2, self.tau, self.keys = z1, z2, tau, keys
        self.batch, self.unimodal, self.directions, self.extra = z1.shape[0], unimodal, directions, extra
        # view 2 has none of the further candidates
        self.distinct = distinct and (extra is None or (extra.positions is None and not unimodal))
        self.x = torch.cat([z1, z2]) if unimodal else z1
        self._inside = self.x if unimodal else z2
        self.y = self._inside if extra is None else torch.cat([self._inside, extra.features])
        self.moments = moments
        self.uniform = is_uniform(tau, bounded, moments)
        # exp(S) is its own transpose: one product with A + A^T replaces two
        self.symmetric = unimodal and self.uniform and extra is None
        self._columns_are_anchors = not unimodal and directions == 2
        self.recompute = chunk_size is not None
        self.block_rows = chunk_size or (CPU_BLOCK_ROWS if z1.device.type == "cpu" else len(self.x))
        # Rows may overwrite S unless S is needed again, for the columns or for the moments.
        self._row_buffer = 0 if self.uniform or not (self._columns_are_anchors or moments) else 1
        self._buffers: list[Tensor] = []
        self._blocks: list[Block] = []
        self._spare: Tensor | None = None
        self.positive = (z1 * z2).sum(1, keepdim=True).expand(-1, directions)
        self._sweep()

    # -- geometry ----------------------------------------------------------------------------------------------

    def _per_anchor(self, rows: Tensor, columns: Tensor | None) -> Tensor:
        """Arrange values of matrix rows and columns as ``(B, A)``."""
        if self.unimodal:
            return rows.view(2, self.batch).T
        if self.directions == 1 or columns is None:
            return rows[:, None]
        return torch.stack([rows, columns[: self.batch]], dim=1)

    def _row_values(self, per_anchor: Tensor) -> Tensor:
        """``(B, A)`` -> one value per matrix row."""
        return per_anchor.T.reshape(-1) if self.unimodal else per_anchor[:, 0]

    def _column_values(self, per_anchor: Tensor, outside: float) -> Tensor:
        """``(B, A)`` -> one value per matrix column; further candidates are no anchors and have ``outside``."""
        values = self._row_values(per_anchor) if self.unimodal else per_anchor[:, 1]
        return values if self.extra is None else pad(values, (0, len(self.y) - len(values)), value=outside)

    def _bounds(self) -> Iterator[tuple[int, int]]:
        for start in range(0, len(self.x), self.block_rows):
            yield start, min(start + self.block_rows, len(self.x))

    def _mask(self, s: Tensor, start: int, value: float) -> Tensor | None:
        """Overwrite the entries of a block that are not negative pairs; their number per row, if it varies."""
        if self.distinct:
            for offset in (-self.batch, 0, self.batch) if self.unimodal else (0,):
                if -len(s) < offset + start < s.shape[1]:
                    s.diagonal(offset + start).fill_(value)
            return None
        same = self._same(start, start + len(s))
        s.masked_fill_(same, value)
        return same

    def _same(self, start: int, stop: int) -> Tensor:
        keys = [key.repeat(2) if self.unimodal else key for key in self.keys]
        same = same_sample([key[start:stop] for key in keys], keys)
        if self.extra is None:
            return same
        outside = self.extra.same(slice(start, stop))
        if len(outside) < len(same):  # view 2
            outside = pad(outside, (0, 0, 0, len(same) - len(outside)), value=True)
        return torch.cat([same, outside], dim=1)

    # -- the sweep ---------------------------------------------------------------------------------------------

    def _buffer(self, which: int, start: int, stop: int) -> Tensor:
        """Rows of a work matrix: its own rows when blocks are stored, the same few rows when recomputed."""
        while len(self._buffers) <= which:
            rows = min(self.block_rows, len(self.x)) if self.recompute else len(self.x)
            self._buffers.append(self.x.new_empty(rows, len(self.y)))
        return self._buffers[which][: stop - start] if self.recompute else self._buffers[which][start:stop]

    def _scratch(self, rows: int) -> Tensor:
        """One block of work space, the same for all blocks: fresh pages would cost as much as the arithmetic."""
        if self._spare is None:
            self._spare = self.x.new_empty(min(self.block_rows, len(self.x)), len(self.y))
        return self._spare[:rows]

    def _sweep(self) -> None:
        self._scale = scale_of(self.tau, self.x, self.batch, self.directions)
        self._rows = OnlineLogSumExp(self._row_values(self._scale), self.moments)
        self._columns: OnlineLogSumExp | None = None
        if self._columns_are_anchors:
            self._columns = OnlineLogSumExp(self._column_values(self._scale, 1.0), self.moments)
        excluded = self.x.new_zeros(0 if self.distinct else 2, len(self.y))
        for start, stop in self._bounds():
            s, same = self._similarities(start, stop)
            if same is not None:
                excluded[0, start:stop] = same.sum(1)
                excluded[1] += same.sum(0)
            block = self._exponentiate(s, start, stop, None if self._columns is None else self._columns.shift)
            self._rows.add_rows(block)
            if self._columns is not None and block.columns is not None:
                self._columns.add_columns(block.columns)
            if not self.recompute:
                self._blocks.append(block)
        self.sides = [self._rows] if self._columns is None else [self._rows, self._columns]
        self._collect(excluded)

    def _collect(self, excluded: Tensor) -> None:
        """Sums per matrix row and column -> the ``(B, 2)`` attributes."""
        columns = self._columns
        met = None if self.distinct else self._per_anchor(excluded[0, : len(self.x)], excluded[1])
        candidates = (len(self.y), len(self.y) if self.unimodal else self.batch)[: self.directions]
        self._count_negatives(candidates, met, self.x, self.batch)
        log_total = self._per_anchor(self._rows.log_total(), None if columns is None else columns.log_total())
        self.log_sum = self.real(log_total - self.positive * self._scale)
        self.mean_h: Tensor | None = None
        if self._rows.dot is not None:
            by_column = None if columns is None or columns.dot is None else columns.dot / columns.total
            mean_s = self._per_anchor(self._rows.dot / self._rows.total, by_column)
            self.mean_h = self.real(mean_s - self.positive)

    def _similarities(self, start: int, stop: int) -> tuple[Tensor, Tensor | None]:
        s = self._buffer(0, start, stop)
        x = self.x[start:stop]
        if self.uniform:  # fold 1/tau into the narrow matrix
            x = x * (1 / self.tau)
        torch.mm(x, self.y.T, out=s)
        return s, self._mask(s, start, MASKED)

    def _exponentiate(self, s: Tensor, start: int, stop: int, column_shift: Tensor | None) -> Block:
        """Turn a block of similarities into exponentials for both sides, in place where it can."""
        if self.uniform:
            shared = Exponentials(s.exp_(), None, None)
            return Block(start, stop, shared, None if self._columns is None else shared)
        shift = s.amax(1)
        e = torch.sub(s, shift[:, None], out=self._buffer(self._row_buffer, start, stop))
        e.mul_(self._rows.scale[start:stop, None]).exp_()
        rows = Exponentials(e, shift, torch.linalg.vecdot(e, s) if self.moments else None)
        if self._columns is None:
            return Block(start, stop, rows, None)
        top = s.amax(0)
        top = top if column_shift is None else torch.maximum(column_shift, top)
        if not self.moments:
            return Block(start, stop, rows, Exponentials(s.sub_(top).mul_(self._columns.scale).exp_(), top, None))
        e = torch.sub(s, top, out=self._scratch(len(s))).mul_(self._columns.scale).exp_()
        dot = torch.linalg.vecdot(e, s, dim=0)
        return Block(start, stop, rows, Exponentials(s.copy_(e), top, dot))

    # -- gradients ---------------------------------------------------------------------------------------------

    def gradients(
        self, alpha: Tensor, coefficient: Tensor, positive_weight: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        coefficient = self.real(coefficient.expand(self.batch, self.directions))
        # log of the factor that takes exp(s_ij / tau_i) to coefficient_i * w_ij
        log_factor = -(self.positive * self._scale) - alpha - self.log_count
        grad_x, grad_y = torch.empty_like(self.x), torch.zeros_like(self.y)
        for block in self._recomputed() if self.recompute else iter(self._blocks):
            a = self._combine(block, log_factor, coefficient)
            torch.mm(a, self.y, out=grad_x[block.start : block.stop])
            if self.recompute and not self.symmetric:
                grad_y.addmm_(a.T, self.x[block.start : block.stop])
        if not self.recompute and not self.symmetric:  # the blocks are the rows of one matrix: one large product
            torch.mm(self._buffers[self._row_buffer].T, self.x, out=grad_y)
        return self._with_positives(grad_x, grad_y, self.pull(alpha, coefficient, positive_weight))

    def release(self) -> None:
        self._blocks.clear()
        self._buffers.clear()
        self._spare = None

    def _recomputed(self) -> Iterator[Block]:
        column_shift: Tensor | None = None
        for start, stop in self._bounds():
            s, _ = self._similarities(start, stop)
            block = self._exponentiate(s, start, stop, column_shift)
            column_shift = None if block.columns is None else block.columns.shift
            yield block

    def _combine(self, block: Block, log_factor: Tensor, coefficient: Tensor) -> Tensor:
        """Scale one block into coefficients ``A_ij``, in place."""

        def factor(values: Tensor, logs: Tensor, shift: Tensor | None, scale: Tensor) -> Tensor:
            return values * (logs if shift is None else logs + shift * scale).exp()

        own = slice(block.start, block.stop)
        by_row = factor(
            self._row_values(coefficient)[own],
            self._row_values(log_factor)[own],
            block.rows.shift,
            self._rows.scale[own],
        )[:, None]
        if self._columns is None and not self.symmetric:
            return block.rows.exp.mul_(by_row)
        shift = None if block.columns is None else block.columns.shift
        scale = self._rows.scale if self._columns is None else self._columns.scale
        weights, logs = self._column_values(coefficient, 0.0), self._column_values(log_factor, -torch.inf)
        by_column = factor(weights, logs, shift, scale)
        if block.columns is None or block.columns.exp is block.rows.exp:
            return block.rows.exp.mul_(torch.add(by_row, by_column, out=self._scratch(len(by_row))))
        return block.rows.exp.mul_(by_row).add_(block.columns.exp.mul_(by_column))

    def _with_positives(self, grad_x: Tensor, grad_y: Tensor, pull: Tensor) -> tuple[Tensor, ...]:
        """Add the ``-grad s_ii`` terms; in unimodal mode add the two roles of each row first."""
        if self.extra is not None:
            grad_y, outside = grad_y[: len(self._inside)], grad_y[len(self._inside) :]
            return *self._inside_with_positives(grad_x, grad_y, pull), outside
        return self._inside_with_positives(grad_x, grad_y, pull)

    def _inside_with_positives(self, grad_x: Tensor, grad_y: Tensor, pull: Tensor) -> tuple[Tensor, Tensor]:
        if self.unimodal:
            grad_x.add_(grad_y)
            grad_x, grad_y = grad_x[: self.batch], grad_x[self.batch :]
        return grad_x.addcmul_(pull, self.z2, value=-1), grad_y.addcmul_(pull, self.z1, value=-1)
