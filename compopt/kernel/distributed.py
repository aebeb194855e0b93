r"""Pair-weight kernel of one rank: its own anchors against the candidates of all ranks.

Rank r has ``b`` of the ``B`` samples. For its own features of the first modality it computes one block ``S = X_r Y^T``
of ``b`` rows, with its own anchors along the rows and all ranks' anchors of the other direction along the columns:

.. math:: A_{ij} = c_i\, w_{ij} + c_j\, w_{ji}, \qquad dL/dX_r = A\, Y

and the same with the modalities exchanged. The second term needs two numbers of each remote anchor, its temperature and
its log-normalizer. Statistics of each rank's anchors are therefore exchanged once (all-gather of a few floats per
sample) between the sweep and the gradients. No collective runs in the backward pass.

Work: ``4 b B d`` multiply-adds per rank in bimodal mode, and ``3 B B d`` in a single process. Memory: two ``b x B``
matrices per direction (one with a uniform temperature), or blocks of ``chunk_size`` rows computed twice.

Features that are only candidates (the second modality with one direction, further candidates) form a block without
anchors along the rows, which is computed with the gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import pad

from compopt.distributed.ranks import Ranks
from compopt.functional import Scalar
from compopt.kernel.blocks import MASKED, Exponentials, Extra, Matrix, exp_, exponentials, positives
from compopt.kernel.local import CPU_BLOCK_ROWS
from compopt.kernel.pairs import (
    PairOptions,
    PairStatistics,
    Sums,
    is_uniform,
    joined,
    pull_positives,
    scale_of,
)


class RowBlock:
    """Block with features of this rank along the rows, and candidates or anchors of all ranks along the columns.

    Args:
        x: this rank's features, ``(b, d)``.
        y: features along the columns, ``(Q, d)``.
        scale: ``1 / tau`` of the anchors along the rows, ``(b,)``; ``None``: the rows are only candidates, and nothing
            is summed.
        tau: the uniform temperature, or ``None``.
        options: options with ``chunk_size`` and ``moments``.
        mask: function that overwrites the entries of a block (similarities, slice of rows) that are not pairs, and
            returns their mask, or ``None`` if it is known.
        selected: the policy for this block, or ``None``.
        counted: count the candidates that are not negatives.
    """

    def __init__(
        self,
        x: Tensor,
        y: Tensor,
        scale: Tensor | None,
        tau: float | None,
        options: PairOptions,
        mask: Callable[[Tensor, slice], Tensor | None],
        selected: Matrix | None = None,
        counted: bool = False,
    ) -> None:
        self.x, self.y, self.tau, self._mask, self._selected = x, y, tau, mask, selected
        self.excluded = x.new_zeros(len(x)) if counted else None
        self.moments, self.recompute = options.moments, options.chunk_size is not None or scale is None
        self.block_rows = options.chunk_size or (CPU_BLOCK_ROWS if x.device.type == "cpu" else max(1, len(x)))
        self._kept: list[tuple[Tensor, Exponentials]] = []
        self.sums = None if scale is None else self._sweep(scale)

    def _sweep(self, scale: Tensor) -> Sums:
        parts = []
        for part in self._bounds():
            s, same = self._similarities(part)
            rows = self._exponentials(s, scale[part], part.start)
            excluded = same.sum(1) if same is not None and rows.excluded is None else rows.excluded
            if self.excluded is not None and excluded is not None:
                self.excluded[part] = excluded
            parts.append(Sums.over(rows, 1, part.start))
            if not self.recompute:
                self._kept.append((s, rows))
        return joined(parts)

    def _bounds(self) -> Iterator[slice]:
        for start in range(0, max(1, len(self.x)), self.block_rows):  # a rank without samples has an empty block
            yield slice(start, min(start + self.block_rows, len(self.x)))

    def _similarities(self, part: slice) -> tuple[Tensor, Tensor | None]:
        """Return ``s`` of some rows, divided by the temperature if it is uniform, and its mask."""
        x = self.x[part]
        s = (x if self.tau is None else x * (1 / self.tau)) @ self.y.T
        return s, self._mask(s, part)

    def _exponentials(self, s: Tensor, scale: Tensor, start: int) -> Exponentials:
        """Return exponentials for the anchors along the rows, in the memory of ``s`` if the temperature is uniform."""
        if self.tau is not None:
            return Exponentials(s.exp_(), None, None)
        if self._selected is not None:
            logits = self._selected.logits(s, start, 1, scale[:, None])
            return exponentials(logits, s if self.moments else None, scale[:, None], 1)
        shift = s.amax(1)
        e = exp_((s - shift[:, None]).mul_(scale[:, None]))
        return Exponentials(e, shift, torch.linalg.vecdot(e, s) if self.moments else None)

    def gradient(self, own: dict[str, Tensor], columns: dict[str, Tensor] | None) -> Tensor:
        """Return ``A Y``.

        Args:
            own, columns: scale, positive, alpha, log_count and coefficient of the anchors along the rows and along the
                columns; ``own`` is ignored if the rows are not anchors, and ``columns`` is ``None`` if the columns are
                not.
        """
        result = torch.empty_like(self.x)
        for number, part in enumerate(self._bounds()):
            mine = {name: value[part] for name, value in own.items()}
            if self.recompute:
                s, _ = self._similarities(part)
                rows = None if self.sums is None else self._exponentials(s, mine["scale"], part.start)
            else:
                s, rows = self._kept[number]
            torch.mm(self._combine(s, rows, mine, columns, part.start), self.y, out=result[part])
        return result

    def release(self) -> None:
        """Free the blocks."""
        self._kept.clear()

    def _combine(
        self,
        s: Tensor,
        rows: Exponentials | None,
        own: dict[str, Tensor],
        columns: dict[str, Tensor] | None,
        start: int,
    ) -> Tensor:
        """Compute the coefficients ``A_ij`` of one block, in place."""
        if self.tau is not None:
            by_column = 0.0 if columns is None else weight_factor(columns, 0.0)
            if rows is None:
                return s.exp_().mul_(by_column)
            return rows.exp.mul_(weight_factor(own, 0.0)[:, None] + by_column)
        if columns is not None:
            if self._selected is not None:
                s = self._selected.logits(s, start, 0, columns["scale"])
            s.sub_(columns["positive"]).mul_(columns["scale"]).sub_(columns["alpha"]).sub_(columns["log_count"])
            exp_(s).mul_(columns["coefficient"])
        if rows is None:
            return s
        assert rows.shift is not None
        rows.exp.mul_(weight_factor(own, rows.shift)[:, None])
        return rows.exp if columns is None else rows.exp.add_(s)


def weight_factor(side: dict[str, Tensor], shift: Tensor | float) -> Tensor:
    """Return the factor from ``exp((s_ij - shift_i) / tau_i)`` to ``coefficient_i * w_ij``."""
    offset = (shift - side["positive"]) * side["scale"]
    return (offset - side["alpha"]).sub_(side["log_count"]).exp_().mul_(side["coefficient"])


class GatheredPairs(PairStatistics):
    """Statistics of all anchors of the global batch, gradients of this rank's own features.

    Args:
        own: this rank's ``z1, z2``, ``(2, b, d)``, no graph.
        everyone: features of all ranks, ``(B, d)`` each, in the order of the ranks.
        tau: one number, or a tensor broadcastable to ``(B, D)``.
        keys, options: see :class:`~compopt.kernel.pairs.PairStatistics`; keys are those of the global batch.
        ranks: the ranks that exchange the statistics.
        sizes: ``b`` of every rank.

    Communicates: one all-gather of ``1 + D`` to ``1 + 3 D`` floats per sample, for ``D`` directions of anchors.
    """

    def __init__(
        self,
        own: Tensor,
        everyone: Sequence[Tensor],
        tau: float | Tensor,
        keys: Sequence[Tensor],
        options: PairOptions,
        ranks: Ranks,
        sizes: Sequence[int],
    ) -> None:
        super().__init__(keys, options)
        self._z, self._everyone, self._batch = own, everyone, len(everyone[0])
        self._first = sum(sizes[: ranks.rank])
        self._own = slice(self._first, self._first + len(own[0]))
        scale = scale_of(tau, own, self._batch, self.directions)
        self._scale = scale if isinstance(scale, Tensor) else own.new_full((self._batch, self.directions), scale)
        self._uniform = tau if isinstance(tau, float) and is_uniform(tau, options) else None
        self._everything = torch.cat(tuple(everyone)) if self.unimodal else None
        self._thresholds = options.thresholds(everyone)
        self._counted = not self.distinct or options.policy is not None  # whether non-negatives must be counted
        self._row_blocks = [self._block_of(direction) for direction in range(2)]
        self._anchors = self._row_blocks[: self.directions]
        self.sides = [block.sums for block in self._anchors if block.sums is not None]
        self._exchange(ranks, sizes)

    # -- geometry ----------------------------------------------------------------------------------------------

    def _candidates(self, direction: int) -> Tensor:
        """Return the features along the columns of a block."""
        y = self._everyone[1 - direction] if self._everything is None else self._everything
        if direction == 0 and self.extra is not None:
            y = torch.cat([y, self.extra.everyone])  # candidates of direction 1 only
        return y

    def _block_of(self, direction: int) -> RowBlock:
        """Return the block of this rank's features of one modality or view, which are anchors if it has a direction."""
        x, y = self._z[direction], self._candidates(direction)
        scale = self._scale[self._own, direction] if direction < self.directions else None
        mask, selected = partial(self._mask, direction), self._matrix(direction, len(y))
        return RowBlock(x, y, scale, self._uniform, self.options, mask, selected, self._counted)

    def _mask(self, direction: int, s: Tensor, part: slice) -> Tensor | None:
        """Overwrite entries of a block that are not pairs, and return their mask, or ``None`` if ``distinct``."""
        rows = slice(self._first + part.start, self._first + part.stop)
        shifts = self._others(direction) if self.unimodal else (0,)
        return self.mask(s, (direction,), rows, self._others(direction), shifts, direction == 0)

    def _others(self, direction: int) -> Sequence[int]:
        """Return the modalities or views of the candidates of a direction."""
        return (0, 1) if self.unimodal else (1 - direction,)

    def _matrix(self, direction: int, width: int) -> Matrix | None:
        """Return the policy for the block of a direction, with the keys and thresholds of both axes."""
        mine, theirs = None, None
        if self._thresholds is not None:
            mine = self._thresholds[self._own, direction, None] if direction < self.directions else None
            theirs = self._column_values({"threshold": self._thresholds}, direction, width)
        columns = (self._others(direction), slice(0, self._batch), slice(None) if direction == 0 else None)
        thresholds = (mine, None if theirs is None else theirs["threshold"])
        return self.options.matrix(((direction,), self._own, None), columns, thresholds)

    # -- statistics --------------------------------------------------------------------------------------------

    def _exchange(self, ranks: Ranks, sizes: Sequence[int]) -> None:
        """Gather the statistics of each rank's anchors on all ranks."""
        positive = positives(self._z, 1)
        if self.options.positive is not None:
            positive = self.options.positive[self._own]
        scales = self._scale[self._own].unbind(1)
        log_total = [sums.log_total(scale) for sums, scale in zip(self.sides, scales, strict=True)]
        own = [positive, torch.stack(log_total, dim=1)]
        if self.moments:
            own.append(torch.stack([sums.dot / sums.total for sums in self.sides if sums.dot is not None], dim=1))
        if self._counted:
            own.append(torch.stack([p.excluded for p in self._anchors if p.excluded is not None], dim=1))
        everyone = ranks.gather(own, sizes)
        self.positive = everyone[0].expand(-1, self.directions)
        by_anchor, *rest = everyone[1:]
        excluded = rest[-1] if self._counted else None
        self._count_negatives([len(block.y) for block in self._anchors], excluded, self.positive)
        self.log_sum = self.real(by_anchor - self.positive * self._scale)
        self.mean_h = self.real(rest[0] - self.positive) if self.moments else None

    def release(self) -> None:
        for block in self._row_blocks:
            block.release()

    # -- gradients ---------------------------------------------------------------------------------------------

    def gradients(self, alpha: Tensor, coefficient: Scalar, positive_weight: Scalar) -> tuple[Tensor, Tensor | None]:
        values = {
            "scale": self._scale,
            "positive": self.positive,
            "alpha": alpha.expand_as(self.positive),
            "log_count": self._spread_out(self.log_count),
            "coefficient": self._spread_out(self.factor(coefficient)),
        }
        # both features of a positive pair are on this rank, so that its gradient needs no other rank
        pull = (values["coefficient"] * positive_weight)[self._own]
        own = [{name: value[self._own, number] for name, value in values.items()} for number in range(self.directions)]
        gradients = []
        for direction, block in enumerate(self._row_blocks):
            if self.held and direction >= self.directions:
                gradients.append(torch.zeros_like(block.x))
                continue
            anchors = own[direction] if direction < self.directions else {}
            gradients.append(block.gradient(anchors, self._column_values(values, direction, len(block.y))))
            block.release()
        stacked = torch.stack(gradients)
        pull_positives(stacked, self._z, pull, self.directions)
        outside: Tensor | None = None
        if self.extra is not None:
            outside = self._extra_gradient(self.extra, {name: value[:, 0] for name, value in values.items()})
        return stacked, outside

    def _spread_out(self, value: Scalar) -> Tensor:
        """Expand a number or a tensor to ``(B, D)``."""
        value = value if isinstance(value, Tensor) else self.positive.new_full((), value)
        return value.expand_as(self.positive)

    def _column_values(self, values: dict[str, Tensor], direction: int, width: int) -> dict[str, Tensor] | None:
        """Return values of the anchors along the columns of a block, padded so that other candidates have weight 0."""
        if self.unimodal:
            columns = {name: value.T.reshape(-1) for name, value in values.items()}
        elif 1 - direction < self.directions:
            columns = {name: value[:, 1 - direction] for name, value in values.items()}
        else:
            return None
        more = width - len(next(iter(columns.values())))
        outside = {"scale": 1.0, "positive": 0.0, "alpha": torch.inf, "log_count": 0.0, "coefficient": 0.0}
        outside["threshold"] = torch.inf
        return (
            {name: pad(value, (0, more), value=outside[name]) for name, value in columns.items()} if more else columns
        )

    def _extra_gradient(self, extra: Extra, anchors: dict[str, Tensor]) -> Tensor:
        """Return the gradient of this rank's further candidates, from the anchors of direction 1 of all ranks."""

        def mask(s: Tensor, rows: slice) -> None:
            if extra.positions is not None:
                own = slice(extra.own.start + rows.start, extra.own.start + rows.stop)
                s.masked_fill_(extra.same(slice(None), own).T, MASKED)

        thresholds = None if self._thresholds is None else self._thresholds[:, 0]
        axes = ((), slice(0, 0), extra.own), ((0,), slice(0, self._batch), None)
        selected = self.options.matrix(*axes, (None, thresholds))
        block = RowBlock(extra.features, self._everyone[0], None, self._uniform, self.options, mask, selected)
        return block.gradient({}, anchors)
