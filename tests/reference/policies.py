"""Losses of papers that are policies of pairs, transcribed in float64; autograd gives their gradients.

``s`` is the matrix of similarities of anchors and candidates, with the positives on its diagonal; ``own`` are the
similarities of anchors to their positives, ``others`` those to their negatives, :func:`split` of a matrix.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def cosines(a: Tensor, b: Tensor) -> Tensor:
    """All similarities of the rows of two matrices."""
    return torch.nn.functional.normalize(a, dim=1) @ torch.nn.functional.normalize(b, dim=1).T


def split(s: Tensor) -> tuple[Tensor, Tensor]:
    """The diagonal, and the other entries of each row."""
    n = len(s)
    return s.diagonal(), s[~torch.eye(n, s.shape[1], dtype=torch.bool)].view(n, -1)


def of_views(z1: Tensor, z2: Tensor) -> tuple[Tensor, Tensor]:
    """``own`` and ``others`` of both views as anchors, whose negatives are both views of the other samples."""
    s, n = cosines(torch.cat([z1, z2]), torch.cat([z1, z2])), len(z1)
    mask = torch.eye(n, dtype=torch.bool).repeat(2, 2)
    return torch.cat([s.diagonal(n), s.diagonal(-n)]), s[~mask].view(2 * n, -1)


def debiased(own: Tensor, others: Tensor, tau: float, prior: float) -> Tensor:
    """Chuang et al., 2020, eq. 8 with M = 1, as in the authors' code (main.py, criterion)."""
    pos, neg, count = torch.exp(own / tau), torch.exp(others / tau).sum(1), others.shape[1]
    ng = (-prior * count * pos + neg) / (1 - prior)
    ng = torch.clamp(ng, min=count * math.e ** (-1 / tau))
    return (-torch.log(pos / (pos + ng))).mean()


def hard(own: Tensor, others: Tensor, tau: float, prior: float, beta: float) -> Tensor:
    """Robinson et al., 2021, as in the authors' code: estimator "hard", with the gradient through the weights."""
    pos, neg, count = torch.exp(own / tau), torch.exp(others / tau), others.shape[1]
    imp = (beta * neg.log()).exp()
    reweighted = (imp * neg).sum(1) / imp.mean(1)
    ng = (-prior * count * pos + reweighted) / (1 - prior)
    ng = torch.clamp(ng, min=count * math.e ** (-1 / tau))
    return (-torch.log(pos / (pos + ng))).mean()


def hardness_weighted(own: Tensor, others: Tensor, tau: float, alpha: float) -> Tensor:
    """Lan et al. (LLaVE), 2025, eq. 5: negatives' logits grow by alpha stop(s)."""
    logits = others / tau + alpha * others.detach()
    return -(own / tau - torch.cat([own[:, None] / tau, logits], 1).logsumexp(1)).mean()


def false_negatives_masked(s: Tensor, seen: Tensor, tau: float, margin: float, more: Tensor | None = None) -> Tensor:
    """Solatorio (GISTEmbed), 2024, and Qwen3 Embedding, 2025, eq. 1: similarities above the positive's are left out.

    ``more``: further similarities and those that are compared with the limit, ``(2, B, M)``.
    """
    limit = seen.diagonal()[:, None] + margin
    found = (seen > limit) & ~torch.eye(len(s), dtype=torch.bool)
    columns = [s.masked_fill(found, -torch.inf)]
    if more is not None:
        columns.append(more[0].masked_fill(more[1] > limit, -torch.inf))
    scores = torch.cat(columns, dim=1) / tau
    return torch.nn.functional.cross_entropy(scores, torch.arange(len(s)))


def improved(z1: Tensor, z2: Tensor, tau: float) -> Tensor:
    """Li et al. (GTE), 2023, eq. 4: queries, documents and both ways between them in one denominator."""
    qd, qq, dd = cosines(z1, z2) / tau, cosines(z1, z1) / tau, cosines(z2, z2) / tau
    itself = torch.eye(len(z1), dtype=torch.bool)
    every = [qd, qq.masked_fill(itself, -torch.inf), qd.T, dd.masked_fill(itself, -torch.inf)]
    return (torch.cat(every, 1).logsumexp(1) - qd.diagonal()).mean()


def both_ways(s: Tensor, tau: float) -> Tensor:
    """Cross-entropy of rows and of columns (CLIP; Jina embeddings 2, 2023, the second stage's eq.)."""
    target = torch.arange(len(s))
    return sum(torch.nn.functional.cross_entropy(x / tau, target) for x in (s, s.T)) / 2


def own_hard_negatives(s: Tensor, mined: Tensor, tau: float, alpha: float) -> Tensor:
    """sentence-transformers' ``hardness_mode="hard_negatives"``: the logit of a query's own one grows by alpha stop(s).

    ``mined``: similarities to all hard negatives, ``(B, B)``, a query's own one on the diagonal. The weight is that of
    EmbeddingGemma (Schechter Vera et al., 2025), which leaves out the hard negatives of other queries.
    """
    logits = torch.cat([s / tau, mined / tau + alpha * torch.diag(mined.diagonal().detach())], 1)
    return torch.nn.functional.cross_entropy(logits, torch.arange(len(s)))


def mined_below_share(s: Tensor, mined: Tensor, seen: Tensor, seen_mined: Tensor, tau: float, share: float) -> Tensor:
    """Moreira et al. (NV-Retriever), 2024, TopK-PercPos: no candidate above a share of the positive's score remains."""
    limit = share * seen.diagonal()[:, None]
    found = (seen > limit) & ~torch.eye(len(s), dtype=torch.bool)
    logits = torch.cat([s.masked_fill(found, -torch.inf), mined.masked_fill(seen_mined > limit, -torch.inf)], 1)
    return torch.nn.functional.cross_entropy(logits / tau, torch.arange(len(s)))


def weighted_decoupled(z1: Tensor, z2: Tensor, tau: float, sigma: float) -> Tensor:
    """Yeh et al., 2022, eq. 6, as lightly's DCLWLoss: negative von Mises-Fisher weights of the positives."""
    own, others = of_views(z1, z2)
    weight = 2 - len(z1) * (own[: len(z1)].detach() / sigma).softmax(0)
    return (others.div(tau).logsumexp(1) - weight.repeat(2) * own / tau).mean()


def nt_xent(features: Tensor, labels: Tensor, tau: float) -> Tensor:
    """NTXentLoss of pytorch-metric-learning: each pair of one label against the anchor's features of other labels."""
    s = cosines(features, features) / tau
    same, itself = labels[:, None] == labels, torch.eye(len(s), dtype=torch.bool)
    negative = s.masked_fill(same, -torch.inf).logsumexp(1, keepdim=True)
    return (torch.logaddexp(s, negative) - s)[same & ~itself].mean()


def supervised(features: Tensor, labels: Tensor, tau: float) -> Tensor:
    """Khosla et al. (SupCon), 2020, eq. 2: the sum over positives outside of the logarithm; all rows are anchors."""
    s = cosines(features, features) / tau
    itself = torch.eye(len(s), dtype=torch.bool)
    log_prob = s - s.masked_fill(itself, -torch.inf).logsumexp(1, keepdim=True)
    positive = (labels[:, None] == labels) & ~itself
    return -((log_prob * positive).sum(1) / positive.sum(1)).mean()


def supervised_inside(features: Tensor, labels: Tensor, tau: float) -> Tensor:
    """Khosla et al. (SupCon), 2020, eq. 3: the mean over positives inside of the logarithm."""
    s = cosines(features, features) / tau
    itself = torch.eye(len(s), dtype=torch.bool)
    log_prob = s - s.masked_fill(itself, -torch.inf).logsumexp(1, keepdim=True)
    positive = (labels[:, None] == labels) & ~itself
    return -(log_prob.masked_fill(~positive, -torch.inf).logsumexp(1) - positive.sum(1).double().log()).mean()


def soft_targets(s: Tensor, weights: Tensor, tau: float) -> Tensor:
    """Cross-entropy of candidates against soft targets, whose rows sum to one."""
    return torch.nn.functional.cross_entropy(s / tau, weights)


def expected(
    anchors: Tensor,
    candidates: Tensor,
    weights: Tensor,
    tau: float,
    extra: Tensor | None = None,
    barred: Tensor | None = None,
) -> Tensor:
    """Cross-entropy of each anchor against weights of its candidates, ``(P,)``; further candidates have the weight 0.

    Args:
        anchors: unit features, ``(P, d)``.
        candidates: the same, ``(Q, d)``.
        weights: ``(P, Q)``, of any sum per anchor; NaN where there is no pair.
        extra: further candidates, ``(M, d)``.
        barred: mask of further candidates that are excluded for an anchor, ``(P, M)``.
    """
    none = weights.isnan()
    s, t = (anchors @ candidates.T / tau).masked_fill(none, -torch.inf), weights.masked_fill(none, 0)
    t = t / t.sum(1, keepdim=True)
    every = [s]
    if extra is not None:
        every.append((anchors @ extra.T / tau).masked_fill(barred, -torch.inf))
    return torch.cat(every, 1).logsumexp(1) - (t * s.masked_fill(none, 0)).sum(1)
