r"""The pair-weight kernel of one rank: its own anchors against the candidates of all ranks.

Rank r holds ``b`` of the ``B`` samples. For its own image rows it computes one block ``S = X_r Y^T`` of ``b``
rows, in which its own anchors run along the rows and everybody's anchors of the other direction along the columns:

.. math:: A_{ij} = c_i\, w_{ij} + c_j\, w_{ji}, \qquad dL/dX_r = A\, Y

and the same with the roles of the modalities exchanged. The second term needs two numbers of each remote anchor, its
temperature and its log-normalizer; statistics of the own anchors are therefore exchanged once (all-gather of a few
floats per sample) between the sweep and the gradients. No collective runs in backward.

Work: ``4 b B d`` multiply-adds per rank in bimodal mode, where one process needs ``3 B B d``. Memory: two ``b x B``
matrices per direction (one with a uniform temperature), or blocks of ``chunk_size`` rows computed twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from compopt.distributed.ranks import Ranks
from compopt.kernel.local import CPU_BLOCK_ROWS
from compopt.kernel.log_sum_exp import Block, Exponentials, OnlineLogSumExp
from compopt.kernel.statistics import MASKED, PairStatistics, is_uniform, same_sample, scale_of


class RowBlock:
    """Own anchors of one direction along the rows, all candidates along the columns.

    Args:
        x: own features, ``(b, d)``.
        y: candidates, ``(Q, d)``.
        scale: ``1 / tau`` of the own anchors, ``(b,)``.
        tau: the uniform temperature, or ``None``.
        diagonals: columns of the own samples of row 0, where samples are distinct.
        keys: ``(own, candidates)`` keys otherwise.
    """

    def __init__(
        self,
        x: Tensor,
        y: Tensor,
        scale: Tensor,
        tau: float | None,
        diagonals: Sequence[int],
        keys: tuple[list[Tensor], list[Tensor]] | None,
        chunk_size: int | None,
        moments: bool,
    ) -> None:
        self.x, self.y, self.tau, self.diagonals, self.keys = x, y, tau, diagonals, keys
        self.sums = OnlineLogSumExp(scale, moments)
        self.excluded = None if keys is None else x.new_zeros(len(x))
        self.moments, self.recompute = moments, chunk_size is not None
        self.block_rows = chunk_size or (CPU_BLOCK_ROWS if x.device.type == "cpu" else max(1, len(x)))
        self._kept: list[tuple[Tensor, Exponentials]] = []
        for start, stop in self._bounds():
            s, rows = self._block(start, stop, count=True)
            self.sums.add_rows(Block(start, stop, rows, None))
            if not self.recompute:
                self._kept.append((s, rows))

    def _bounds(self) -> Iterator[tuple[int, int]]:
        for start in range(0, len(self.x), self.block_rows):
            yield start, min(start + self.block_rows, len(self.x))

    def _block(self, start: int, stop: int, count: bool = False) -> tuple[Tensor, Exponentials]:
        """Similarities of some rows, and their exponentials (the same memory if the temperature is uniform)."""
        x = self.x[start:stop]
        s = (x if self.tau is None else x * (1 / self.tau)) @ self.y.T
        if self.keys is None:
            for column in self.diagonals:
                s.diagonal(column + start).fill_(MASKED)
        else:
            own, candidates = self.keys
            same = same_sample([key[start:stop] for key in own], candidates)
            s.masked_fill_(same, MASKED)
            if count and self.excluded is not None:
                self.excluded[start:stop] = same.sum(1)
        if self.tau is not None:
            return s, Exponentials(s.exp_(), None, None)
        shift = s.amax(1)
        e = (s - shift[:, None]).mul_(self.sums.scale[start:stop, None]).exp_()
        return s, Exponentials(e, shift, torch.linalg.vecdot(e, s) if self.moments else None)

    def gradient(self, own: dict[str, Tensor], columns: dict[str, Tensor]) -> Tensor:
        """``A Y``; ``own`` and ``columns`` hold scale, positive, log_weight and coefficient of both sides' anchors."""
        result = torch.empty_like(self.x)
        for number, (start, stop) in enumerate(self._bounds()):
            s, rows = self._block(start, stop) if self.recompute else self._kept[number]
            mine = {name: value[start:stop] for name, value in own.items()}
            torch.mm(self._combine(s, rows, mine, columns), self.y, out=result[start:stop])
        return result

    def release(self) -> None:
        """Give back the blocks."""
        self._kept.clear()

    def _combine(self, s: Tensor, rows: Exponentials, own: dict[str, Tensor], columns: dict[str, Tensor]) -> Tensor:
        """Coefficients ``A_ij`` of one block, in place."""

        def factor(side: dict[str, Tensor], shift: Tensor | float) -> Tensor:
            return side["coefficient"] * ((shift - side["positive"]) * side["scale"] + side["log_weight"]).exp()

        if self.tau is not None:
            return rows.exp.mul_(factor(own, 0.0)[:, None] + factor(columns, 0.0))
        assert rows.shift is not None
        s.sub_(columns["positive"]).mul_(columns["scale"]).add_(columns["log_weight"]).exp_()
        return rows.exp.mul_(factor(own, rows.shift)[:, None]).add_(s.mul_(columns["coefficient"]))


class GatheredPairs(PairStatistics):
    """Statistics of all anchors of the global batch, gradients of this rank's own features.

    Args:
        own: this rank's ``z1, z2``, ``(b, d)``, no graph.
        everyone: all ranks' ``z1, z2``, ``(B, d)``, in the order of the ranks.
        tau: one number, or a tensor broadcastable to ``(B, 2)``.
        keys: of the global batch, ``(B,)`` each, see :class:`~compopt.kernel.statistics.PairStatistics`.
        ranks: who exchanges the statistics.
        sizes: ``b`` of every rank.
        distinct, unimodal, bounded, chunk_size, moments: see :class:`~compopt.kernel.local.Pairs`.

    Communicates: one all-gather of 4 to 8 floats per sample.
    """

    def __init__(
        self,
        own: tuple[Tensor, Tensor],
        everyone: tuple[Tensor, Tensor],
        tau: float | Tensor,
        keys: Sequence[Tensor],
        ranks: Ranks,
        sizes: Sequence[int],
        *,
        distinct: bool,
        unimodal: bool = False,
        bounded: bool = True,
        chunk_size: int | None = None,
        moments: bool = False,
    ) -> None:
        self.keys, self.distinct, self.unimodal = keys, distinct, unimodal
        self._z, self._batch = own, len(everyone[0])
        first = sum(sizes[: ranks.rank])
        self._own = slice(first, first + len(own[0]))
        self._scale = scale_of(tau, own[0], self._batch)
        uniform = tau if isinstance(tau, float) and is_uniform(tau, bounded, moments) else None
        candidates = torch.cat(everyone) if unimodal else None
        self._row_blocks = []
        for direction, x in enumerate(own):
            y = everyone[1 - direction] if candidates is None else candidates
            pairs_of_keys = None if distinct else ([key[self._own] for key in keys], [self._spread(k) for k in keys])
            diagonals = (first, first + self._batch) if unimodal else (first,)
            scale = self._scale[self._own, direction]
            block = RowBlock(x, y, scale, uniform, diagonals, pairs_of_keys, chunk_size, moments)
            self._row_blocks.append(block)
        self.sides = [block.sums for block in self._row_blocks]
        self._exchange(ranks, sizes)

    def _spread(self, per_sample: Tensor) -> Tensor:
        """One value per sample -> one per candidate."""
        return per_sample.repeat(2) if self.unimodal else per_sample

    def _exchange(self, ranks: Ranks, sizes: Sequence[int]) -> None:
        """Statistics of the own anchors -> those of all."""
        positive = torch.linalg.vecdot(*self._z).unsqueeze(1)
        own = [positive, torch.stack([block.sums.log_total() for block in self._row_blocks], dim=1)]
        if self._row_blocks[0].moments:
            own.append(
                torch.stack([b.sums.dot / b.sums.total for b in self._row_blocks if b.sums.dot is not None], dim=1)
            )
        if not self.distinct:
            own.append(torch.stack([p.excluded for p in self._row_blocks if p.excluded is not None], dim=1))
        everyone = ranks.gather(own, sizes)
        self.positive = everyone[0].expand(-1, 2)
        excluded = None if self.distinct else everyone[-1]
        self._count_negatives(len(self._row_blocks[0].y), excluded, positive, self._batch)
        self.log_sum = self.real(everyone[1] - self.positive * self._scale)
        self.mean_h = self.real(everyone[2] - self.positive) if self._row_blocks[0].moments else None

    def release(self) -> None:
        for block in self._row_blocks:
            block.release()

    def gradients(
        self, alpha: Tensor, coefficient: Tensor, positive_weight: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        coefficient = self.real(coefficient.expand(self._batch, 2))
        values = {
            "scale": self._scale,
            "positive": self.positive,
            "log_weight": -alpha - self.log_count,
            "coefficient": coefficient,
        }
        pull = self.pull(alpha, coefficient, positive_weight)[self._own]
        gradients = []
        for direction, block in enumerate(self._row_blocks):
            own = {name: value[self._own, direction] for name, value in values.items()}
            columns = {
                name: value.T.reshape(-1) if self.unimodal else value[:, 1 - direction]
                for name, value in values.items()
            }
            gradient = block.gradient(own, columns)
            gradients.append(gradient.addcmul_(pull, self._z[1 - direction], value=-1))
        return gradients[0], gradients[1]
