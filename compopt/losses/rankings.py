"""Ranking losses: NDCG and listwise cross-entropy."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from typing_extensions import Unpack

from compopt import checks
from compopt.batch import Batch
from compopt.checks.context import outside_of_graphs
from compopt.checks.inputs import check_vector
from compopt.estimator.base import Estimator
from compopt.estimator.groups import GroupSpec, Hyper
from compopt.estimator.options import PlacementOptions, takes_options
from compopt.kernel.features import working_dtype
from compopt.losses.base import CHECKS, CompositionalLoss, check_same_shape, check_scores, log_mean_exp
from compopt.losses.compositional import Domain


def _grades(relevance: Tensor) -> Tensor:
    """Return the checked relevance of items on the CPU, where relevant items are selected."""
    grades = relevance.cpu()
    bad = ~(grades >= 0) | (grades == torch.inf)
    if bool(bad.any()):
        raise ValueError(f"relevance must be finite and at least 0 (not relevant), got {grades[bad][0].item()!r}")
    return grades


class ListLoss(CompositionalLoss):
    """Base class of ranking losses, which compare each relevant item of a query with the items of the same query."""

    @outside_of_graphs
    def __call__(self, scores: Tensor, relevance: Tensor, index: Tensor, items: Tensor | None = None) -> Tensor:
        """Return the loss.

        Args:
            scores: scores of the items of each query, with their graph, ``(Q, L)``.
            relevance: relevance ``y`` of the items, ``(Q, L)``; 0: not relevant.
            index: number of each relevant pair, ``(Q, L)`` integers; ignored for items that are not relevant.
            items: ``N_q``, total number of items of each query, ``(Q,)``; ``None``: number in the batch, ``L``.

        Raises:
            TypeError, ValueError, IndexError: wrong types or shapes, or a number outside ``0 .. n - 1``.
        """
        with self._guard():
            check_scores("scores", scores, 2)
            relevance, index = (check_same_shape(k, v, scores) for k, v in (("relevance", relevance), ("index", index)))
            dtype = working_dtype(scores.dtype, self.dtype)
            relevance = relevance.to(scores.device, dtype)
            query, item = torch.nonzero(_grades(relevance) > 0, as_tuple=True)
            pair = check_vector("index", index[query.to(index.device), item.to(index.device)], len(query))
            if items is None:
                every = torch.full((len(scores),), scores.shape[1])
            else:
                every = check_same_shape("items", items, scores[:, 0])
            if every.device.type == "cpu" and not bool(((every >= 1) & every.isfinite()).all()):
                raise ValueError(
                    f"items must be at least 1 and finite, the number that each query ranks, got {every.tolist()!r}"
                )
            at = query.to(scores.device), item.to(scores.device)
            values = {"items": every.to(scores.device, dtype)[at[0]], **self.gains(relevance, at)}
            hyper = Hyper(self._groups, pair.to(scores.device)[:, None], dtype)
            scores = scores.to(dtype)  # differences in half precision would be inexact or overflow
            excess = scores[at[0]] - scores[at][:, None]
            # a surrogate may be finite at an infinite score
            own = self.compare(excess, hyper).where(excess.isfinite().all(1, keepdim=True), torch.nan)
        return self._compose(pair, [own], values)

    def compare(self, excess: Tensor, hyper: Hyper) -> Tensor:
        """Return inner values, or their logarithms, ``(P, 1)``, from ``s_j - s_i``, ``(P, L)``."""
        raise NotImplementedError

    def gains(self, relevance: Tensor, at: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        """Return values per relevant item for the outer function, ``(P,)`` each, from ``relevance`` ``(Q, L)``."""
        return {"gain": relevance[at]}

    def inner(self, given: Sequence[Tensor], batch: Batch, hyper: Hyper) -> Tensor:
        return given[0].clone()


class NDCGLoss(ListLoss):
    r"""Normalised discounted cumulative gain of rankings, by SONG.

    Example:
        >>> import torch, compopt
        >>> loss = compopt.losses.NDCGLoss(n=10)
        >>> scores = torch.tensor([[0.1, 0.4, 0.2]], requires_grad=True)  # one query, three items
        >>> loss(scores, torch.tensor([[2, 0, 1]]), torch.tensor([[0, -1, 1]])).backward()
        >>> scores.grad[0].argmin().item()  # the most relevant item rises most
        0

    .. math::
        F = \frac{1}{|S|} \sum_{(q, i) \in S} \frac{1}{Z_q} \frac{1 - 2^{y_{qi}}}{\log_2 (1 + N_q\, g_{qi})}, \qquad
        g_{qi} = E_{j \in S_q} \max(0, \text{margin} - (s_{qi} - s_{qj}))^2

    ``S`` is the set of pairs of a query and a relevant item, ``N_q g_qi`` is a surrogate of the rank of the item, and
    ``Z_q`` is the ideal DCG of the items in the batch. The variant for the top K (K-SONG) is not implemented: it
    selects pairs by a threshold that is learned per query, and therefore needs rows of queries in addition.

    Args:
        n: number of pairs of a query and a relevant item, or a list of sample groups.
        gamma: in (0, 1]; weight of the newest value.
        margin: > 0.
        process_group, offload, offload_dir, shard, dtype: see :class:`CompositionalLoss`.

    State, per pair: ``u``, and the number of visits.

    Communicates, errors: as :class:`CompositionalLoss` and its call.

    References:
        Qiu et al., Large-scale Stochastic Optimization of NDCG Surrogates for Deep Learning with Provable Convergence,
        ICML 2022 (SONG).
    """

    domain: Domain = "linear"
    checked_by = CHECKS | {"margin": checks.positive}  # an item's own pair keeps the logarithm above 0

    @takes_options(Estimator, PlacementOptions)
    def __init__(
        self, n: GroupSpec, gamma: float = 0.9, margin: float = 1.0, **placement: Unpack[PlacementOptions]
    ) -> None:
        super().__init__(n, {"gamma": gamma, "margin": margin}, **placement)

    def compare(self, excess: Tensor, hyper: Hyper) -> Tensor:
        return (hyper("margin") + excess).relu().square().mean(1, keepdim=True)

    def gains(self, relevance: Tensor, at: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        gain = torch.exp2(relevance) - 1
        discount = torch.arange(2, relevance.shape[1] + 2, dtype=gain.dtype, device=gain.device).log2()
        ideal = (gain.sort(1, descending=True).values / discount).sum(1)
        wrong = relevance[(relevance > 0).any(1) & ~((ideal > 0) & ideal.isfinite())]
        if len(wrong):
            raise ValueError(
                f"relevance must be grades whose gains 2^y - 1 are above 0 and finite in {gain.dtype}, got "
                f"{wrong.max().item():.6g}; pass log2(1 + y) in place of a count y"
            )
        return {"gain": gain[at] / ideal[at[0]]}

    def outer(self, u: Tensor, batch: Batch, hyper: Hyper) -> Tensor:
        return -batch.values["gain"] / (1 + batch.values["items"] * u[:, 0]).log2()


class ListwiseLoss(ListLoss):
    r"""Listwise cross-entropy of rankings: a softmax over the items of each query.

    Example:
        >>> import torch, compopt
        >>> loss = compopt.losses.ListwiseLoss(n=10)
        >>> scores = torch.tensor([[0.1, 0.4, 0.2]], requires_grad=True)
        >>> value = loss(scores, torch.tensor([[0, 1, 0]]), torch.tensor([[-1, 0, -1]]))
        >>> round(value.item(), 4) == round(-scores.log_softmax(1)[0, 1].item(), 4)
        True

    .. math::
        F = \frac{1}{|S|} \sum_{(q, i) \in S} y_{qi} \log \left( N_q\, g_{qi} \right), \qquad
        g_{qi} = E_{j \in S_q}\, e^{s_{qj} - s_{qi}}

    Args:
        n: number of pairs of a query and a relevant item, or a list of sample groups.
        gamma: in (0, 1]; weight of the newest value.
        process_group, offload, offload_dir, shard, dtype: see :class:`CompositionalLoss`.

    State, per pair: ``log_u`` in nats, and the number of visits.

    Communicates, errors: as :class:`CompositionalLoss` and its call.

    References:
        Cao et al., Learning to Rank, ICML 2007 (ListNet); Qiu et al., ICML 2022, whose estimator this is.
    """

    @takes_options(Estimator, PlacementOptions)
    def __init__(self, n: GroupSpec, gamma: float = 0.9, **placement: Unpack[PlacementOptions]) -> None:
        super().__init__(n, {"gamma": gamma}, **placement)

    def compare(self, excess: Tensor, hyper: Hyper) -> Tensor:
        return log_mean_exp(excess, 1)

    def outer(self, u: Tensor, batch: Batch, hyper: Hyper) -> Tensor:
        return batch.values["gain"] * (batch.values["items"].log() + u[:, 0])
