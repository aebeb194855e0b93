"""Row of scores per sample beside any loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from compopt import checks
from compopt.checks.values import Range
from compopt.distributed.ranks import Ranks
from compopt.estimator.call import Call, Setting
from compopt.estimator.component import Component
from compopt.estimator.groups import GroupSpec, as_groups
from compopt.kernel.pairs import same_sample
from compopt.stores.layout import Column

RANK_ROWS = 512  # anchors whose similarities are held at a time


class ScoreKeeper(Component):
    r"""Row per sample beside any loss: how well its positive stands out. No gradient uses it.

    With ``x_i`` any of the three observations below, at the ``c``-th visit of the sample's row:

    .. math::
        r = \max(\rho, 1 / c), \qquad
        m_i \leftarrow m_i + r\,(x_i - m_i), \qquad
        v_i \leftarrow (1 - r)\,\bigl(v_i + r\,(x_i - m_i)^2\bigr)

    so that the first ``1 / rate`` visits are averaged equally and later ones fade exponentially.

    Args:
        n: number of samples, or a list of sample groups.
        rate: :math:`\rho`, in (0, 1], the weight of the newest visit in the long run.
        rank: also observe the rank of the positive, for two more matrix products of the features (four in unimodal
            mode). Without it :func:`~compopt.curation.suspects` must be told the share of wrong pairs.

    Hyper-parameters, which may differ between sample groups: ``rate``.

    State, per sample and direction (48 bytes with two): ``log_g`` and ``log_g_var``, of :math:`\log \hat g_i` in nats
    at the temperature of the call; ``similarity`` and ``similarity_var``, of :math:`s_{ii}`; ``rank``, the mean share
    of the batch's negatives that are more similar to the anchor than its positive is. In unimodal mode the mean over
    all pairs of views (for ``rank``: of each view and the next). ``extra`` candidates count in ``log_g`` only. Under a
    :class:`~compopt.PairPolicy` ``log_g`` is of the candidates that it leaves, ``similarity`` is the expectation where
    the positive is one, and ``rank`` is of all candidates whose keys differ. With ``momentum_features=`` candidates and
    positives are those of the momentum copy.

    Communicates, with several ranks: one all-gather of 1 float per anchor, with ``rank=True``; nothing otherwise.

    Raises:
        ValueError: ``rate`` outside (0, 1]; ``n`` < 1.
        TypeError: ``n`` is neither an integer nor a list of sample groups.

    Example:
        >>> import torch, compopt
        >>> keeper = compopt.ScoreKeeper(n=100)
        >>> est = compopt.DCLEstimator(scores=keeper)
        >>> z1, z2 = torch.randn(2, 8, 4, requires_grad=True).unbind()
        >>> est(z1, z2, torch.arange(8)).backward()
        >>> est.step()
        >>> est.read(torch.tensor([0, 50]))["count"].tolist()
        [1, 0]
    """

    role = "scores"

    def __init__(self, n: GroupSpec, rate: float = 0.2, rank: bool = True) -> None:
        checks.flag("rank", rank)
        self.rank = rank
        self._ranks: Ranks | None = None
        super().__init__(as_groups(n), {"rate": rate})

    def check(self, group: Mapping[str, Any]) -> None:
        checks.unit_interval("rate", group["rate"], "; it is the weight of the newest visit")

    def columns(self, directions: int, dtype: torch.dtype) -> list[Column]:
        moments = ["log_g", "log_g_var", "similarity", "similarity_var"]
        ranks = [Column("rank", directions, dtype, values=Range(least=0, most=1))] if self.rank else []
        return [*(Column(name, directions, dtype) for name in moments), *ranks]

    def joined(self, groups: Any, setting: Setting) -> None:
        super().joined(groups, setting)
        self._ranks = setting.ranks

    def proposals(self, call: Call) -> dict[str, Tensor]:
        """Return new values of the columns for the samples of a call, ``(B, D)`` each."""
        pairs, rows, first = call.pairs, call.rows, call.unseen("log_g")
        log_ghat = pairs.of_other_view(pairs.log_ghat) if call.unimodal else pairs.log_ghat
        visits = torch.where(first, 0, call.count) + 1
        rate = torch.clamp(1 / visits.to(log_ghat.dtype), min=_floor(call.hyper("rate"), log_ghat))
        new: dict[str, Tensor] = {}
        for name, value in (("log_g", log_ghat), ("similarity", pairs.positive)):
            seen = value.mean(1, keepdim=True) if call.unimodal else value
            change = torch.where(first, 0, seen - rows[name])
            new[name] = torch.where(first, seen, rows[name] + rate * change)
            new[f"{name}_var"] = torch.where(first, 0, (1 - rate) * (rows[f"{name}_var"] + rate * change.square()))
        if self.rank:
            assert self._ranks is not None
            seen = positive_ranks(call, self._ranks)
            new["rank"] = torch.where(first, seen, rows["rank"] + rate * (seen - rows["rank"]))
        return new


def _floor(rate: float | Tensor, like: Tensor) -> Tensor:
    return rate.to(like.dtype) if isinstance(rate, Tensor) else like.new_full((), rate)


def positive_ranks(call: Call, ranks: Ranks) -> Tensor:
    """Return the share of negatives that are more similar to an anchor than its positive, ``(B, D)``.

    Every rank compares its own anchors with the features of all. Anchors without negatives have 0.
    """
    batch, z = call.batch, call.batch.features
    k = batch.momentum or z  # what the anchors are compared with
    keys = list(batch.keys.values())
    sides = list(zip(z, k[1:] + k[:1], strict=True))
    columns = []
    for anchors, others in sides[: len(z) if call.unimodal else call.pairs.directions]:
        candidates = k if call.unimodal else (others,)
        which = next(number for number, other in enumerate(candidates) if other is others)
        columns.append(_share_above(anchors[batch.own], candidates, which, keys, batch.own))
    own = torch.stack(columns, dim=1)
    (everyone,) = ranks.gather([own], batch.sizes)
    return everyone.mean(1, keepdim=True) if call.unimodal else everyone


def _share_above(
    anchors: Tensor, candidates: Sequence[Tensor], which: int, keys: Sequence[Tensor], own: slice
) -> Tensor:
    """Return the share of negatives above the positive, ``(b,)``, in blocks of anchors; a tie counts as half.

    Args:
        anchors: of this rank, ``(b, d)``.
        candidates: of all ranks, ``(B, d)`` each; those number ``which`` hold the positives.
        keys: of all samples, ``(B,)`` each.
        own: which samples are this rank's.
    """
    shares = []
    for start in range(0, len(anchors), RANK_ROWS):
        at = slice(start, start + RANK_ROWS)
        negatives = ~same_sample([key[own][at] for key in keys], keys)
        similarities = [anchors[at] @ z.T for z in candidates]
        # of the same product as its rivals, so that equal features tie
        positive = similarities[which].diagonal(own.start + start)[:, None]
        half = positive.new_full((), 0.5)
        above = sum((torch.heaviside(s - positive, half) * negatives).sum(1) for s in similarities)
        count = len(candidates) * negatives.sum(1)
        shares.append(above / count.clamp(min=1))
    return torch.cat(shares) if shares else anchors.new_zeros(0)
