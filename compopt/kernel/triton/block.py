r"""Matrix of similarities of plain pairs in tiles, by the kernels in Triton.

The forward pass is one product ``S = X Y^T`` whose tiles stay in registers: each tile is masked, exponentiated for the
anchors of both axes and summed, and only the sums are written. The gradients recompute ``S`` in waves of rows, write
the coefficients ``A`` of a wave to one buffer, and multiply: ``A Y`` and ``A^T X``. These are four products, with
memory ``O(wave x Q)``; ``chunk_size`` is the number of rows of a wave.

Each tile subtracts its own maxima from the exponents, since with the constant 1 ``exp((s_ij - 1) / tau_i)`` underflows
in float32 for ``tau`` below 0.02. With a temperature that all anchors share and that is not too small, one exponential
without a maximum is used for both axes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from compopt.functional import Scalar
from compopt.kernel.block import Block, ColumnWeights, Sums
from compopt.kernel.triton import sweep
from compopt.kernel.triton.choice import Backend, Precision, precision_of, reason_for_torch
from compopt.kernel.triton.sweep import Anchors, AnchorSums, Operands, ranked
from compopt.pairs import MASKED


class TritonBlock(Block):
    """Matrix of similarities in tiles; see :class:`~compopt.kernel.block.Block`, without a policy.

    The positives are computed in the precision of the features, also where that of the products is lower.
    """

    @property
    def _precision(self) -> Precision:
        return "tf32" if self.form.tau is None else precision_of(self.form.tau)

    def _operands(self) -> Operands:
        """Return the operands of the kernels, without anchors."""
        assert self.exclusions.keys is not None
        rows, columns = self.exclusions.keys()
        count, keys = len(rows[0]), ranked(torch.stack([torch.cat(pair) for pair in zip(rows, columns, strict=True)]))
        low = torch.bfloat16 if self._precision == "bf16" else self.x.dtype
        x, y, tau = self.x.to(low).contiguous(), self.y.to(low).contiguous(), self.form.tau
        own, others = keys[:, :count].clone(), keys[:, count:].clone()  # at aligned addresses
        return Operands(
            x,
            y,
            own,
            others,
            shared=None if tau is None else 1 / tau,
            moments=self.form.moments,
            counted=self.exclusions.own is None,
            precision=self._precision,
            wave=self.form.chunk_size,
        )

    def _anchors(self, scale: Scalar, count: int, factor: Tensor | None = None, top: Tensor | None = None) -> Anchors:
        full = scale.contiguous() if isinstance(scale, Tensor) else self.x.new_full((count,), scale)
        return Anchors(full, None if factor is None else factor.contiguous(), top)

    def _sweep(self) -> None:
        x, y = self.x, self.y
        assert self.rows is not None
        rows = self._anchors(self.rows, len(x))
        columns = None if self.columns is None else self._anchors(self.columns, len(y))
        found = sweep.sums(replace(self._operands(), rows=rows, columns=columns))
        assert found[0] is not None
        self._tops = [None if side is None else side.top for side in found]
        self.sums = _as_sums(found[0], rows.scale, len(y))
        if found[1] is not None and columns is not None:
            self.column_sums = _as_sums(found[1], columns.scale, len(x))
        ends = [
            torch.linalg.vecdot(x[d.start : d.stop], y[d.column : d.column + d.stop - d.start]) for d in self.positives
        ]
        self.minus_positive = torch.cat(ends) * -(1.0 if self.form.tau is None else 1 / self.form.tau)
        for side in (self.sums, self.column_sums):  # NaN for a positive that is not finite, as in Block
            if side is not None:
                side.total.add_(self.minus_positive, alpha=0)

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
        if not len(self.x):  # a rank without samples
            return
        o = self._operands()
        if rows is not None and self.rows is not None:
            o = replace(o, rows=self._anchors(self.rows, len(self.x), rows, self._tops[0]))
        if isinstance(columns, ColumnWeights):
            if self.form.tau is None:
                given = self._anchors(columns.scale, len(self.y), columns.factor, columns.level)
            else:
                given = self._anchors(columns.scale, len(self.y), columns.factor * (-columns.level).exp())
            o = replace(o, columns=given)
        elif columns is not None:  # without anchors of their own, those of the rows
            of_anchors, top = (self.rows, self._tops[0]) if self.columns is None else (self.columns, self._tops[1])
            assert of_anchors is not None
            o = replace(o, columns=self._anchors(of_anchors, len(self.y), columns, top))
        found, back = sweep.products(o, transposed=of_columns is not None)
        of_rows.copy_(found)
        if of_columns is not None:
            shared = of_columns.data_ptr() == of_rows.data_ptr()
            of_columns.copy_(back + found if shared else back)
        pull = 0.0 if pull is None else pull
        for d in self.positives:
            at, other = slice(d.start, d.stop), slice(d.column, d.column + d.stop - d.start)
            weight = pull[at, None] if isinstance(pull, Tensor) else pull
            of_rows[at] -= weight * self.y[other]
            if of_columns is not None:
                of_columns[other] -= weight * self.x[at]
        if scale != 1.0:
            of_rows *= scale
            if of_columns is not None and of_columns.data_ptr() != of_rows.data_ptr():
                of_columns *= scale


def block_of(backend: Backend, z: Tensor, unsupported: Mapping[str, object]) -> type[Block]:
    """Return the class of the matrices of a call, in plain torch or in Triton.

    ``unsupported`` contains the arguments of the call that the kernels do not support, by name.
    """
    argument = next((name for name, value in unsupported.items() if value is not None), None)
    return TritonBlock if reason_for_torch(backend, z, argument) is None else Block


def _as_sums(side: AnchorSums, scale: Tensor, candidates: int) -> Sums:
    """Convert sums of the kernels: relative to a maximum of ``s_ij``."""
    shift = None if side.top is None else torch.where(side.total == 0, MASKED, side.top / scale)
    return Sums(side.total, shift, side.dot, None if side.number is None else candidates - side.number)
