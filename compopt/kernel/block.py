r"""One matrix of similarities ``S = X Y^T``: sums over the candidates of its anchors, and products with their weights.

Anchors are along the rows, along the columns, or along both axes. The sum of an anchor ``i`` over its candidates ``j``
along the other axis, and the coefficients of the gradient, are

.. math::
    \sum_j e^{(s_{ij} - m_i) / \tau_i}, \qquad
    A_{ij} = f_i\, e^{(s_{ij} - m_i) / \tau_i} + f_j\, e^{(s_{ij} - m_j) / \tau_j}, \qquad
    dL/dX = A\, Y, \quad dL/dY = A^T X

where ``m`` are maxima, or 0 where all exponentials are bounded. Rows are computed in blocks that fit the cache. Nothing
is part of an autograd graph, and the host does not wait for a device.

Memory: two matrices ``(P, Q)`` (one if the exponentials are bounded; three under a policy, which selects different
pairs for the two axes), or blocks of ``chunk_size`` rows that are computed again for the products.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from compopt.functional import Scalar
from compopt.pairs import MASKED, Selection

SMALLEST_EXPONENT, SMALLEST = -46.0, 2e-20  # of exponentials in float32 on a CPU; exp(-46) is below 2e-20
# Rows per block on a CPU: the largest value that was not slower than its neighbours (benchmarks/kernel.py).
CPU_BLOCK_ROWS = 512


class Diagonal(NamedTuple):
    """Entries ``(start + i, column + i)`` of a matrix, for the rows from ``start`` to ``stop``."""

    start: int
    stop: int
    column: int

    def of(self, s: Tensor, part: slice) -> Tensor:
        """Return a view of these entries among the rows ``part``, of which ``s`` has the similarities."""
        low, high = max(self.start, part.start), min(self.stop, part.stop)
        first, count = self.column + low - self.start, max(0, high - low)
        return s[max(0, low - part.start) :][:count, first : first + count].diagonal()


class Exclusions(NamedTuple):
    """Entries of a matrix that are not pairs, because the features are of one sample.

    Attributes:
        own: the entries, if it is known on the host that no others are; otherwise keys are compared.
        keys: function that returns the keys of the rows, ``(P,)`` each, and of the first columns; features with an
            equal key are no pair.
        further: function that returns the mask of the remaining columns for some rows; ``None``: all are pairs.
    """

    own: Sequence[Diagonal] | None
    keys: Callable[[], tuple[Sequence[Tensor], Sequence[Tensor]]] | None = None
    further: Callable[[slice], Tensor] | None = None

    def mask(self, s: Tensor, part: slice) -> Tensor | None:
        """Overwrite entries of the rows ``part`` that are not pairs; return their mask; ``None`` if they are known.

        In the latter case NaN remains: the sums of an anchor whose positive is not finite are not finite either.
        """
        if self.own is None:
            return self._compare(s, part)
        for diagonal in self.own:
            diagonal.of(s, part).clamp_(max=MASKED)
        return None

    def _compare(self, s: Tensor, part: slice) -> Tensor:
        if self.keys is None:
            same = torch.zeros(len(s), 0, dtype=torch.bool, device=s.device)
        else:
            rows, columns = self.keys()
            same = same_sample([key[part] for key in rows], columns)
        if (more := s.shape[1] - same.shape[1]) > 0:
            outside = same.new_zeros(len(same), more) if self.further is None else self.further(part)
            same = torch.cat([same, outside], dim=1)
        s.masked_fill_(same, MASKED)
        return same


class BlockOptions(NamedTuple):
    """Facts that are the same for all matrices of a call.

    Attributes:
        tau: the temperature of all anchors, if their exponentials need no maximum; otherwise ``None``.
        moments: also compute ``sum_j s_ij exp(...)``.
        chunk_size: rows per block, with blocks computed again for the products; ``None`` stores all blocks.
    """

    tau: float | None = None
    moments: bool = False
    chunk_size: int | None = None


class Sums(NamedTuple):
    """Sums of ``exp((s_ij - shift_i) / tau_i)`` over the candidates of some anchors, ``(P,)`` each.

    Attributes:
        total: the sum.
        shift: ``m_i``; ``None``: 0.
        dot: sum of ``s_ij exp(...)``, or ``None``.
        excluded: number of candidates that are not pairs, or ``None`` if it is known.
    """

    total: Tensor
    shift: Tensor | None = None
    dot: Tensor | None = None
    excluded: Tensor | None = None

    def merged(self, more: Sums, scale: Scalar) -> Sums:
        """Add sums of the same anchors over further candidates, relative to a maximum that may have grown."""
        total, dot = self.total, self.dot
        if self.shift is not None and more.shift is not None:
            shrink = (self.shift - more.shift).mul_(scale).exp_()
            total, dot = total * shrink, None if dot is None else dot * shrink
        dot = None if dot is None or more.dot is None else dot + more.dot
        excluded = None if self.excluded is None or more.excluded is None else self.excluded + more.excluded
        return Sums(total + more.total, more.shift, dot, excluded)

    def log_total(self, scale: Scalar) -> Tensor:
        """Return ``log sum_j exp(s_ij / tau_i)``."""
        log_total = self.total.log()
        return log_total if self.shift is None else log_total + self.shift * scale


class ColumnWeights(NamedTuple):
    """Weights ``factor_j exp(s_ij scale_j - level_j)`` of anchors along the columns whose sums are known, ``(Q,)``."""

    scale: Tensor
    level: Tensor
    factor: Tensor


class BlockRows(NamedTuple):
    """Some rows of a matrix: similarities (overwritten if they are not needed again), exponentials and sums by axis."""

    part: slice
    s: Tensor
    rows: Tensor | None = None
    columns: Tensor | None = None
    sums: Sums | None = None
    column_sums: Sums | None = None


class Block:
    """Matrix of similarities with its anchors.

    Args:
        x, y: features along the rows, ``(P, d)``, and along the columns, ``(Q, d)``, no graph.
        form: facts of the call.
        exclusions: entries that are not pairs.
        rows: ``1 / tau`` of the anchors along the rows, a number or ``(P,)``; ``None``: the rows are not anchors.
        columns: the same of the first columns, ``(C,)``, if the rows are all their candidates; ``None``: the columns
            are not anchors, or :meth:`products` receives their weights.
        weighted: :meth:`products` receives weights of anchors along the columns.
        positives: entries of the positives, which become :attr:`minus_positive`.
        selected: policy for the pairs, or ``None``.

    Attributes:
        sums, column_sums: sums of the anchors along the rows, if they are anchors, and along the columns, or ``None``.
        minus_positive: negative similarities of the rows' features to their positives, divided by the temperature of
            ``form`` if there is one, ``(P,)``.
    """

    sums: Sums
    column_sums: Sums | None = None
    minus_positive: Tensor

    def __init__(
        self,
        x: Tensor,
        y: Tensor,
        form: BlockOptions,
        exclusions: Exclusions,
        rows: Scalar | None = None,
        columns: Scalar | None = None,
        weighted: bool = False,
        positives: Sequence[Diagonal] = (),
        selected: Selection | None = None,
    ) -> None:
        self.x, self.y, self.form, self.exclusions, self.selected = x, y, form, exclusions, selected
        self.rows, self.columns, self.positives = rows, columns, positives
        self.recompute = form.chunk_size is not None or rows is None
        self.block_rows = form.chunk_size or (CPU_BLOCK_ROWS if x.device.type == "cpu" else max(1, len(x)))
        starts = range(0, max(1, len(x)), self.block_rows)  # a rank without samples has an empty block
        self._parts = [slice(start, min(start + self.block_rows, len(x))) for start in starts]
        self._whole = len(self._parts) == 1
        # Exponentials may overwrite S unless S is needed again, for the columns, the moments or a policy.
        self._needs_s = form.tau is None and (selected is not None or form.moments or columns is not None or weighted)
        self._buffers: list[Tensor] = []
        self._kept: list[BlockRows] = []
        self._spare: Tensor | None = None
        if rows is not None:
            self._sweep()

    # -- sums ----------------------------------------------------------------------------------------------------

    def _sweep(self) -> None:
        parts: list[Sums] = []
        positive: list[Tensor] = []
        columns: Sums | None = None
        for part in self._parts:
            s = self._similarities(part)
            for diagonal in self.positives:
                positive.append(diagonal.of(s, part).neg())
            same = self.exclusions.mask(s, part)
            if same is not None:  # NaN remains at the positives, see Exclusions.mask()
                for diagonal, value in zip(self.positives, positive[-len(self.positives) :], strict=False):
                    diagonal.of(s, part).add_(value, alpha=0)
            kept = self._exponentiate(s, part, same, columns)
            assert kept.sums is not None
            parts.append(kept.sums)
            more = kept.column_sums
            columns = more if columns is None or more is None else columns.merged(more, self._column_scale)
            if not self.recompute:
                self._kept.append(kept)
        self.sums, self.column_sums = parts[0] if self._whole else _joined(parts), columns
        if positive:
            self.minus_positive = positive[0] if len(positive) == 1 else torch.cat(positive)

    @property
    def positive(self) -> Tensor:
        """Similarities of the rows' features to their positives, ``(P,)``."""
        return self.minus_positive * -(1.0 if self.form.tau is None else self.form.tau)

    def _buffer(self, which: int, part: slice) -> Tensor | None:
        """Return rows of a work matrix: separate ones if blocks are stored, the same ones if they are recomputed.

        ``None`` if there is one block, which the operation allocates.
        """
        if self._whole:
            return None
        while len(self._buffers) <= which:
            height = min(self.block_rows, len(self.x)) if self.recompute else len(self.x)
            self._buffers.append(self.x.new_empty(height, len(self.y)))
        return self._buffers[which][: part.stop - part.start] if self.recompute else self._buffers[which][part]

    def _scratch(self, part: slice) -> Tensor | None:
        """Return work space for a block; all blocks share it, since new pages cost as much time as the arithmetic."""
        if self._whole:
            return None
        if self._spare is None:
            self._spare = self.x.new_empty(min(self.block_rows, len(self.x)), len(self.y))
        return self._spare[: part.stop - part.start]

    def _similarities(self, part: slice) -> Tensor:
        """Return ``s`` of some rows, divided by the temperature if all anchors share it."""
        scale, any_matrix = 1.0 if self.form.tau is None else 1 / self.form.tau, self.y[:1, :1]
        out = None if self._whole else self._buffer(0, part)
        return torch.addmm(any_matrix, self.x[part], self.y.T, beta=0, alpha=scale, out=out)

    def _row_scale(self, part: slice) -> Scalar:
        """``1 / tau`` of some rows, broadcastable to their similarities."""
        assert self.rows is not None
        return self.rows[part, None] if isinstance(self.rows, Tensor) else self.rows

    @property
    def _column_scale(self) -> Scalar:
        """``1 / tau`` of all columns; 1 for those that are not anchors."""
        assert self.columns is not None
        if not isinstance(self.columns, Tensor):
            return self.columns
        more = len(self.y) - len(self.columns)
        return torch.nn.functional.pad(self.columns, (0, more), value=1.0) if more else self.columns

    def _exponentiate(self, s: Tensor, part: slice, same: Tensor | None, before: Sums | None) -> BlockRows:
        """Turn a block of similarities into exponentials for both axes, in place if possible, and their sums.

        ``before`` are sums of the columns over other blocks.
        """
        if self.form.tau is None:
            return self._below_maxima(s, part, same, None if before is None else before.shift)
        e, by_row, by_column = s.exp_(), None, None
        if same is not None:
            by_row, by_column = same.sum(1), same.sum(0)
        columns = None if self.columns is None else Sums(e.sum(0), excluded=by_column)
        return BlockRows(part, s, e, None, Sums(e.sum(1), excluded=by_row), columns)

    def _below_maxima(self, s: Tensor, part: slice, same: Tensor | None, shift: Tensor | None) -> BlockRows:
        """Return exponentials relative to the maximum of each anchor; ``shift``: of the columns over other blocks."""
        if self.selected is not None:
            return self._select(self.selected, s, part, shift)
        by_row, by_column = (None, None) if same is None else (same.sum(1), same.sum(0))
        top, scratch, dot = s.amax(1), None, None
        e = torch.sub(s, top[:, None], out=self._buffer(1 if self._needs_s else 0, part))
        e = exp_(e.mul_(self._row_scale(part)))
        if self.form.moments:
            scratch = self._scratch(part)
            dot = torch.mul(e, s, out=scratch).sum(1)
        rows = Sums(e.sum(1), top, dot, by_row)
        if self.columns is None:
            return BlockRows(part, s, e, None, rows)
        # the maximum of the columns over the blocks so far may have grown; s is overwritten with their exponentials
        top, scale, dot = s.amax(0), self._column_scale, None
        top = top if shift is None else torch.maximum(shift, top)
        if self.form.moments:
            theirs = exp_(torch.sub(s, top, out=scratch).mul_(scale))
            dot = s.mul_(theirs).sum(0)
            theirs = theirs if scratch is None else s.copy_(theirs)
        else:
            theirs = exp_(s.sub_(top).mul_(scale))
        return BlockRows(part, s, e, theirs, rows, Sums(theirs.sum(0), top, dot, by_column))

    def _select(self, selected: Selection, s: Tensor, part: slice, shift: Tensor | None) -> BlockRows:
        """Return exponentials of the pairs that a policy keeps, separate ones for each axis."""
        scale = self._row_scale(part)
        e, rows = self._of_logits(selected.logits(s, part.start, 1, scale), s, scale, 1, None, self._buffer(1, part))
        if self.columns is None:
            return BlockRows(part, s, e, None, rows)
        scale = self._column_scale
        logits = selected.logits(s, part.start, 0, scale)
        theirs, columns = self._of_logits(logits, s, scale, 0, shift, logits)
        return BlockRows(part, s, e, theirs, rows, columns)

    def _of_logits(
        self, logits: Tensor, s: Tensor, scale: Scalar, dim: int, shift: Tensor | None, out: Tensor | None
    ) -> tuple[Tensor, Sums]:
        """Return exponentials of logits and their sums over the axis ``dim``; ``out`` may be ``logits``."""
        excluded = (logits <= MASKED).sum(dim)  # before the exponentials overwrite them
        top = logits.amax(dim) if shift is None else torch.maximum(shift, logits.amax(dim))
        e = exp_(torch.sub(logits, top.unsqueeze(dim), out=out).mul_(scale))
        return e, Sums(e.sum(dim), top, (e * s).sum(dim) if self.form.moments else None, excluded)

    def effective(self) -> Tensor:
        """Return ``(sum w)^2 / sum w^2`` of the anchors along the rows; NaN for those without candidates."""
        weights = [kept.rows for kept in self._kept if kept.rows is not None]
        number = torch.cat([e.sum(1).square() / e.square().sum(1) for e in weights])
        return number if self.sums.shift is None else number.masked_fill(self.sums.shift <= MASKED, torch.nan)

    # -- products ------------------------------------------------------------------------------------------------

    def products(
        self,
        rows: Tensor | None,
        columns: Tensor | ColumnWeights | None,
        pull: Scalar | None,
        of_rows: Tensor,
        of_columns: Tensor | None = None,
        of_further: Tensor | None = None,
        scale: float = 1.0,
    ) -> None:
        """Write ``scale A Y``, and ``scale A^T X`` of the first and of the remaining columns.

        If blocks are recomputed, the results are added, to zeros; ``of_columns`` may be ``of_rows``, to which it is
        added.

        Args:
            rows, columns: ``f_i`` of the anchors, ``(P,)`` and ``(Q,)``; columns may also be :class:`ColumnWeights`.
            pull: subtracted from ``A`` at the positives, a number or ``(P,)``, or ``None``.
            of_rows, of_columns, of_further: results, ``(P, d)``, ``(C, d)`` and ``(Q - C, d)``.
            scale: factor of the results.
        """
        add = 1 if self.recompute else 0
        for kept in self._recomputed() if self.recompute else self._kept:
            part = kept.part
            a = self._combine(kept, rows, columns)
            if pull is not None:
                for diagonal in self.positives:
                    low, high = max(diagonal.start, part.start), min(diagonal.stop, part.stop)
                    diagonal.of(a, part).sub_(pull[low:high] if isinstance(pull, Tensor) else pull)
            torch.addmm(of_rows[part], a, self.y, beta=add, alpha=scale, out=of_rows[part])
            if self.recompute:
                _add_back(a, self.x[part], 1, scale, of_columns, of_further)
        if not self.recompute:
            a = self._buffers[1 if self._needs_s else 0] if self._buffers else a
            add = 1 if of_columns is not None and of_columns.data_ptr() == of_rows.data_ptr() else 0
            _add_back(a, self.x, add, scale, of_columns, of_further)

    def release(self) -> None:
        """Free the work matrices."""
        self._kept.clear()
        self._buffers.clear()
        self._spare = None

    def _recomputed(self) -> Iterator[BlockRows]:
        for part in self._parts:
            s = self._similarities(part)
            self.exclusions.mask(s, part)
            yield BlockRows(part, s) if self.rows is None else self._exponentiate(s, part, None, self.column_sums)

    def _combine(self, kept: BlockRows, rows: Tensor | None, columns: Tensor | ColumnWeights | None) -> Tensor:
        """Scale one block into coefficients ``A_ij``, in place."""
        mine = None if rows is None else rows[kept.part, None]
        if isinstance(columns, ColumnWeights):
            return self._with_column_weights(kept, mine, columns)
        e = kept.rows
        assert e is not None and mine is not None
        if columns is None:
            return e.mul_(mine)
        if kept.columns is not None:
            return e.mul_(mine).addcmul_(kept.columns, self._grown(kept, columns))
        # both axes share the exponentials
        return e.mul_(torch.add(mine, columns, out=None if self._whole else self._scratch(kept.part)))

    def _grown(self, kept: BlockRows, columns: Tensor) -> Tensor:
        """Return factors of the columns for the maxima of a block, which have grown since in other blocks."""
        assert kept.column_sums is not None and self.column_sums is not None
        shift, last = kept.column_sums.shift, self.column_sums.shift
        if shift is None or last is None or last is shift:
            return columns
        return columns * (shift - last).mul_(self._column_scale).exp_()

    def _with_column_weights(self, kept: BlockRows, mine: Tensor | None, columns: ColumnWeights) -> Tensor:
        """Return the coefficients of a block with anchors along the columns whose sums are of other ranks, too."""
        if self.form.tau is not None:
            by_column = (-columns.level).exp_().mul_(columns.factor)
            e = kept.s.exp_() if kept.rows is None else kept.rows
            return e.mul_(by_column if mine is None else mine + by_column)
        s = kept.s
        if self.selected is not None:
            s = self.selected.logits(s, kept.part.start, 0, columns.scale)
        theirs = exp_(s.mul_(columns.scale).sub_(columns.level)).mul_(columns.factor)
        return theirs if mine is None or kept.rows is None else kept.rows.mul_(mine).add_(theirs)


def _add_back(
    a: Tensor, x: Tensor, add: int, scale: float, of_columns: Tensor | None, of_further: Tensor | None
) -> None:
    """Write, or add with ``add=1``, ``A^T X`` of some matrix rows for the first columns and the remaining ones."""
    if of_further is not None:
        count = a.shape[1] - len(of_further)
        torch.addmm(of_further, a[:, count:].T, x, beta=add, alpha=scale, out=of_further)
        a = a[:, :count]
    if of_columns is not None:
        torch.addmm(of_columns, a.T, x, beta=add, alpha=scale, out=of_columns)


def _joined(parts: Sequence[Sums]) -> Sums:
    """Concatenate sums of different anchors."""
    total, *rest = (None if values[0] is None else torch.cat(values) for values in zip(*parts, strict=True))
    assert total is not None
    return Sums(total, *rest)


def exp_(x: Tensor) -> Tensor:
    """Exponentiate in place; in float32 on a CPU, set results of at most :data:`SMALLEST` to zero.

    On a CPU an exponential that underflows, also one of :data:`MASKED`, takes up to 90 times as long as another one,
    and products with subnormal numbers are as slow. The arguments are logarithms of terms relative to the largest of
    their sum, or of pair weights, which add up to about 1: terms this small are below the rounding of their sum.
    """
    if x.device.type != "cpu" or x.dtype != torch.float32:
        return x.exp_()
    return torch.threshold_(x.clamp_(min=SMALLEST_EXPONENT).exp_(), SMALLEST, 0.0)


def same_sample(rows: Sequence[Tensor], columns: Sequence[Tensor]) -> Tensor:
    """Return a mask that is True where any key of a row equals that of a column, which are then not a pair."""
    same = rows[0][:, None] == columns[0][None, :]
    for row, column in zip(rows[1:], columns[1:], strict=True):
        same.logical_or_(row[:, None] == column[None, :])
    return same
