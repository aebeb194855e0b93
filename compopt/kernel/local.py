r"""Pair-weight kernel: statistics and closed-form gradients of all pairs of a batch in one sweep.

Both directions share one matrix ``S = X Y^T``: its rows are the anchors of direction 1 and its columns those
of direction 2 (bimodal), or its rows are all views (unimodal: ``X = Y = [Z1; Z2]``). With one direction only the rows
are anchors. Further candidates are columns that are not anchors. The sweep computes blocks of rows that fit the cache:

1. :class:`Pairs` computes ``S`` block by block, exponentiates it in place relative to a running maximum per anchor
   and keeps ``log sum_{j in N_i} exp(h_ij / tau_i)``;
2. the normalizers turn those sums into log-normalizers ``alpha``;
3. :meth:`Pairs.gradients` scales the kept blocks into the coefficient matrix ``A`` and multiplies:
   ``dL/dX = A Y``, ``dL/dY = A^T X``.

Memory: two ``P x Q`` matrices (one if every anchor has the same temperature, known on the host; three under a policy
that selects different pairs for the two directions), or blocks of ``chunk_size`` rows that are recomputed in step 3.
Nothing of size ``P x Q`` is kept after the call or saved by autograd. The host is not synchronised.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from compopt.functional import Scalar
from compopt.kernel.blocks import Exponentials, Matrix, exp_, exponentials, positives
from compopt.kernel.pairs import (
    PairOptions,
    PairStatistics,
    Sums,
    is_uniform,
    joined,
    pull_positives,
    scale_of,
)

# Rows per block on the CPU: the largest value that was not slower than its neighbours (benchmarks/kernel.py).
CPU_BLOCK_ROWS = 512


# Slice of matrix rows, its exponentials for the row anchors, and those for the column anchors, if there are any.
Block = tuple[slice, Exponentials, Exponentials | None]


class Pairs(PairStatistics):
    """All pairs of one batch: sums per anchor at construction, gradients once the log-normalizers are known.

    Args:
        z: features of the two modalities or views, ``(2, B, d)``, float32 or float64, no graph.
        tau: one number for all anchors, or a tensor: 0-d, ``(B, 1)`` or ``(B, D)``.
        keys, options: see :class:`~compopt.kernel.pairs.PairStatistics`.
    """

    def __init__(self, z: Tensor, tau: float | Tensor, keys: Sequence[Tensor], options: PairOptions) -> None:
        super().__init__(keys, options)
        extra, unimodal, chunk_size = self.extra, self.unimodal, options.chunk_size
        self.z, self.tau, self.batch = z, tau, z.shape[1]
        if unimodal:
            self.x = self.y = z.view(-1, z.shape[2])
        else:
            self.x, self.y = z.unbind()
        if extra is not None:
            self.y = torch.cat([self.y, extra.features])
        self.shape = (self.x.shape[0], self.y.shape[0])
        self.uniform = is_uniform(tau, options)
        # exp(S) is its own transpose: one product with A + A^T replaces two
        self.symmetric = unimodal and self.uniform and self.shape[0] == self.shape[1]
        self._columns_are_anchors = not unimodal and self.directions == 2
        self.positive = positives(z, self.directions) if options.positive is None else options.positive
        self.recompute = chunk_size is not None
        self.block_rows = chunk_size or (CPU_BLOCK_ROWS if self.x.device.type == "cpu" else self.shape[0])
        # Exponentials may overwrite S unless S is needed again for the columns, the moments, or a policy.
        again = self._columns_are_anchors or self.moments or options.policy is not None
        self._row_buffer = 0 if self.uniform or not again else 1
        self._selected = None if options.policy is None else self._matrix()
        self._buffers: list[Tensor] = []
        self._blocks: list[Block] = []
        self._spare: Tensor | None = None
        self._sweep()

    # -- geometry ----------------------------------------------------------------------------------------------

    def _per_anchor(self, sides: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        """Rearrange quantities of the row anchors, and of the column anchors if there are any, as ``(B, D)`` each."""
        if len(sides) == 1:
            return [values.view(-1, self.batch).T for values in sides[0]]
        # one copy for all quantities, since every copy is a kernel launch on an accelerator
        whole = [values for side in sides for values in side]
        if self.shape[1] > self.batch:  # further candidates are not anchors
            whole = [values[: self.batch] for values in whole]
        stacked = torch.stack(whole)
        return [values.T for values in stacked.view(2, -1, self.batch).unbind(1)]

    def _all(self, rows: slice) -> bool:
        """Return whether the slice contains all matrix rows."""
        return rows.stop - rows.start == self.shape[0]

    def _by_row(self, per_anchor: Tensor, rows: slice) -> Tensor:
        """Rearrange ``(B, D)`` into a column with one value per matrix row."""
        column = per_anchor.T.reshape(-1, 1) if self.unimodal else per_anchor[:, :1]
        return column if self._all(rows) else column[rows]

    def _by_column(self, per_anchor: Tensor, outside: float) -> Tensor:
        """Rearrange ``(B, D)`` into one value per matrix column, ``outside`` for candidates that are not anchors."""
        values = per_anchor.T.reshape(-1) if self.unimodal else per_anchor[:, 1]
        more = self.shape[1] - values.shape[0]
        return pad(values, (0, more), value=outside) if more else values

    def _bounds(self) -> Iterator[slice]:
        for start in range(0, self.shape[0], self.block_rows):
            yield slice(start, min(start + self.block_rows, self.shape[0]))

    def _mask(self, s: Tensor, rows: slice) -> Tensor | None:
        """Overwrite the entries of a block that are not pairs, and return their mask, or ``None`` if ``distinct``."""
        if self.unimodal:
            return self.mask(s, (0, 1), rows, (0, 1), (-1, 0, 1), True)
        return self.mask(s, (0,), rows, (1,), (0,), True)

    def _matrix(self) -> Matrix | None:
        """Return the policy for the matrix, with the features, keys and thresholds of both axes."""
        everyone, by_row, by_column = slice(0, self.batch), None, None
        thresholds = self.options.thresholds(self.z.unbind())
        if thresholds is not None:
            by_row = self._by_row(thresholds, slice(0, self.shape[0]))
            by_column = self._by_column(thresholds, torch.inf) if self._columns_are_anchors else None
        rows, columns = ((0, 1), (0, 1)) if self.unimodal else ((0,), (1,))
        return self.options.matrix((rows, everyone, None), (columns, everyone, slice(None)), (by_row, by_column))

    # -- the sweep ---------------------------------------------------------------------------------------------

    def _buffer(self, which: int, rows: slice) -> Tensor | None:
        """Return rows of a work matrix: separate ones if blocks are stored, the same ones if they are recomputed.

        ``None`` if there is one block, which the operation allocates.
        """
        if self._all(rows):
            return None
        while len(self._buffers) <= which:
            height = min(self.block_rows, self.shape[0]) if self.recompute else self.shape[0]
            self._buffers.append(self.x.new_empty(height, self.shape[1]))
        return self._buffers[which][: rows.stop - rows.start] if self.recompute else self._buffers[which][rows]

    def _scratch(self, rows: slice) -> Tensor | None:
        """Return work space for a block; all blocks share it, since new pages cost as much time as the arithmetic."""
        if self._all(rows):
            return None
        if self._spare is None:
            self._spare = self.x.new_empty(min(self.block_rows, self.shape[0]), self.shape[1])
        return self._spare[: rows.stop - rows.start]

    def _sweep(self) -> None:
        self._scale = scale_of(self.tau, self.x, self.batch, self.directions)
        self._column_scale: Scalar = 1.0
        if self._columns_are_anchors:
            self._column_scale = self._by_column(self._scale, 1.0) if isinstance(self._scale, Tensor) else self._scale
        rows: list[Sums] = []
        columns: Sums | None = None
        known = self.distinct and self.options.policy is None  # the number of negatives
        excluded = None if known else self.x.new_zeros(2, self.shape[1])
        for part in self._bounds():
            s, same = self._similarities(part)
            by_row, by_column = self._exponentiate(s, part, None if columns is None else columns.shift)
            if excluded is not None:
                self._count_excluded(excluded, part, by_row, by_column, same)
            rows.append(Sums.over(by_row, 1, part.start))
            if by_column is not None:
                more = Sums.over(by_column, 0)
                columns = more if columns is None else columns.merged(more, self._column_scale)
            if not self.recompute:
                self._blocks.append((part, by_row, by_column))
        if columns is not None and self.extra is not None:  # further candidates are not anchors
            columns = columns._replace(norms=columns.norms[: self.batch])
        self.sides = [joined(rows)] if columns is None else [joined(rows), columns]
        self._collect(excluded)

    def _count_excluded(
        self, excluded: Tensor, part: slice, rows: Exponentials, columns: Exponentials | None, same: Tensor | None
    ) -> None:
        """Count the candidates of a block that are not negatives, for its rows and for its columns."""
        if same is not None and rows.excluded is None:
            excluded[0, part] = same.sum(1)
            excluded[1] += same.sum(0)
        elif rows.excluded is not None:
            excluded[0, part] = rows.excluded
            excluded[1] += 0.0 if columns is None or columns.excluded is None else columns.excluded

    def _collect(self, excluded: Tensor | None) -> None:
        """Set the ``(B, D)`` attributes from the sums per matrix row and column."""
        met = None
        if excluded is not None:
            by_side = [[excluded[0, : self.shape[0]]], [excluded[1]]]
            (met,) = self._per_anchor(by_side if self._columns_are_anchors else by_side[:1])
        others = self.shape[1] if self.unimodal else self.batch
        candidates = [self.shape[1], *[others] * (self.directions - 1)]
        self._count_negatives(candidates, met, self.positive)
        total, *rest = self._per_anchor([[x for x in (s.total, s.shift, s.dot) if x is not None] for s in self.sides])
        # exp(h_ij / tau_i) is the summed term times exp(offset_i)
        if self.uniform:
            self._offset = self.positive * (-1 / self.tau)
        else:
            self._offset = (rest[0] - self.positive) * self._scale
        self.log_sum = self.real(total.log() + self._offset)
        self.mean_h: Tensor | None = None
        if self.moments:
            self.mean_h = self.real(rest[1] / total - self.positive)

    def _similarities(self, rows: slice) -> tuple[Tensor, Tensor | None]:
        x = self.x if self._all(rows) else self.x[rows]
        if self.uniform:  # fold 1/tau into the narrow matrix
            x = x * (1 / self.tau)
        s = torch.mm(x, self.y.T, out=self._buffer(0, rows))
        return s, self._mask(s, rows)

    def _exponentiate(
        self, s: Tensor, part: slice, column_shift: Tensor | None
    ) -> tuple[Exponentials, Exponentials | None]:
        """Turn a block of similarities into exponentials for both sides, in place if possible."""
        if self.uniform:
            shared = Exponentials(s.exp_(), None, None)
            return shared, shared if self._columns_are_anchors else None
        scale = self._by_row(self._scale, part) if isinstance(self._scale, Tensor) else self._scale
        if self._selected is not None:
            return self._select(self._selected, s, part, scale, column_shift)
        shift = s.amax(1)
        e = exp_(torch.sub(s, shift[:, None], out=self._buffer(self._row_buffer, part)).mul_(scale))
        scratch, dot = None, None
        if self.moments:
            scratch = self._scratch(part)
            dot = torch.mul(e, s, out=scratch).sum(1)
        rows = Exponentials(e, shift, dot)
        if not self._columns_are_anchors:
            return rows, None
        # column anchors: their maximum over the blocks so far may have grown; s is overwritten with their exponentials
        top = s.amax(0)
        top = top if column_shift is None else torch.maximum(column_shift, top)
        if not self.moments:
            return rows, Exponentials(exp_(s.sub_(top).mul_(self._column_scale)), top, None)
        e = exp_(torch.sub(s, top, out=scratch).mul_(self._column_scale))
        dot = s.mul_(e).sum(0)
        return rows, Exponentials(e if scratch is None else s.copy_(e), top, dot)

    def _select(
        self, selected: Matrix, s: Tensor, part: slice, scale: Scalar, column_shift: Tensor | None
    ) -> tuple[Exponentials, Exponentials | None]:
        """Return exponentials of the pairs that a policy keeps, separate ones for each side."""
        moments, columns = s if self.moments else None, None
        logits = selected.logits(s, part.start, 1, scale)
        rows = exponentials(logits, moments, scale, 1, out=self._buffer(1, part))
        if self._columns_are_anchors:
            logits = selected.logits(s, part.start, 0, self._column_scale)
            columns = exponentials(logits, moments, self._column_scale, 0, column_shift, out=logits)
        return rows, columns

    # -- gradients ---------------------------------------------------------------------------------------------

    def gradients(self, alpha: Tensor, coefficient: Scalar, positive_weight: Scalar) -> tuple[Tensor, Tensor | None]:
        coefficient = self.factor(coefficient)
        # factor from the terms of a sum to coefficient_i * w_ij
        factor = (self._offset - alpha).exp_().mul_(coefficient / self.divisor)
        weight = coefficient * positive_weight
        weight = weight.expand_as(factor) if isinstance(weight, Tensor) else weight
        gradient, outside = self._products(factor)
        self.release()  # so that the next steps of the gradient can reuse the memory
        # the gradient of the positives, over all directions; separate from the products, whose precision may be low,
        # since it nearly cancels (after normalisation) if positives are aligned
        pull_positives(gradient, self.z, weight, self.directions)
        return gradient, outside

    def _products(self, factor: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return ``A Y`` and ``A^T X``, by blocks; ``A^T X`` in one product if the blocks are rows of a stored matrix.

        Args:
            factor: factor of each anchor, ``(B, D)``.
        """
        # zeros if products are added, or if some features get none
        added = self.recompute or self.held
        gradient = torch.zeros_like(self.z) if added else torch.empty_like(self.z)
        if self.unimodal:
            of_columns = gradient.view(-1, self.z.shape[2])
            of_rows = of_columns[: self.shape[0]]
        else:
            of_rows, of_columns = gradient.unbind()
        outside = None if self.extra is None else torch.zeros_like(self.extra.features)
        for rows, by_row, by_column in self._recomputed() if self.recompute else iter(self._blocks):
            a = self._combine(rows, by_row, by_column, factor)
            _product(a, self.y, of_rows if self._all(rows) else of_rows[rows], self.recompute)
            if self.recompute and not self.symmetric:
                self._add_columns(a, self.x[rows], True, of_columns, outside)
        if not self.recompute and not self.symmetric:
            a = self._buffers[self._row_buffer] if self._buffers else a
            self._add_columns(a, self.x, self.unimodal, of_columns, outside)
        return gradient, outside

    def _add_columns(self, a: Tensor, x: Tensor, add: bool, of_columns: Tensor, outside: Tensor | None) -> None:
        """Add ``A^T X`` of some matrix rows to the gradients of the candidates and of further candidates."""
        count = len(of_columns)
        if not self.held:
            _product(a.T if outside is None else a[:, :count].T, x, of_columns, add)
        if outside is not None:
            outside.addmm_(a[:, count:].T, x)

    def release(self) -> None:
        self._blocks.clear()
        self._buffers.clear()
        self._spare = None

    def _recomputed(self) -> Iterator[Block]:
        column_shift: Tensor | None = None
        for rows in self._bounds():
            s, _ = self._similarities(rows)
            by_row, by_column = self._exponentiate(s, rows, column_shift)
            column_shift = None if by_column is None else by_column.shift
            yield rows, by_row, by_column

    def _combine(self, part: slice, rows: Exponentials, columns: Exponentials | None, factor: Tensor) -> Tensor:
        """Scale one block into coefficients ``A_ij``, in place."""
        by_row = self._by_row(factor, part)
        if not self._columns_are_anchors and not self.symmetric:
            return rows.exp.mul_(by_row)
        by_column = self._by_column(factor, 0.0)
        if columns is None or columns.shift is None:
            return rows.exp.mul_(torch.add(by_row, by_column, out=self._scratch(part)))
        last = self.sides[1].shift
        if last is not None and last is not columns.shift:  # the maximum has grown since
            by_column = by_column * (columns.shift - last).mul_(self._column_scale).exp_()
        return rows.exp.mul_(by_row).addcmul_(columns.exp, by_column)


def _product(a: Tensor, b: Tensor, out: Tensor, add: bool) -> None:
    """Write ``A B`` to ``out``, or add it with ``add``."""
    if add:
        out.addmm_(a, b)
    else:
        torch.mm(a, b, out=out)
