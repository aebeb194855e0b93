"""Losses of papers that are policies of pairs, transcribed in float64; autograd gives their gradients.

``s`` is the matrix of similarities of anchors and candidates, with the positives on its diagonal; ``own`` are the
similarities of anchors to their positives, ``others`` those to their negatives, :func:`split` of a matrix.
"""

from __future__ import annotations

import torch
from torch import Tensor


def cosines(a: Tensor, b: Tensor) -> Tensor:
    """All similarities of the rows of two matrices."""
    return torch.nn.functional.normalize(a, dim=1) @ torch.nn.functional.normalize(b, dim=1).T


def split(s: Tensor) -> tuple[Tensor, Tensor]:
    """The diagonal, and the other entries of each row."""
    n = len(s)
    return s.diagonal(), s[~torch.eye(n, s.shape[1], dtype=torch.bool)].view(n, -1)


def hardness_weighted(own: Tensor, others: Tensor, tau: float, alpha: float) -> Tensor:
    """Lan et al. (LLaVE), 2025, eq. 5: negatives' logits grow by alpha stop(s)."""
    logits = others / tau + alpha * others.detach()
    return -(own / tau - torch.cat([own[:, None] / tau, logits], 1).logsumexp(1)).mean()


def false_negatives_masked(s: Tensor, seen: Tensor, tau: float, margin: float) -> Tensor:
    """Solatorio (GISTEmbed), 2024: candidates above the positive's similarity, as the guide sees them, are left out."""
    found = (seen > seen.diagonal()[:, None] + margin) & ~torch.eye(len(s), dtype=torch.bool)
    scores = s.masked_fill(found, -torch.inf) / tau
    return torch.nn.functional.cross_entropy(scores, torch.arange(len(s)))


def both_ways(s: Tensor, tau: float) -> Tensor:
    """Cross-entropy of rows and of columns (CLIP; Jina embeddings 2, 2023, the second stage's eq.)."""
    target = torch.arange(len(s))
    return sum(torch.nn.functional.cross_entropy(x / tau, target) for x in (s, s.T)) / 2


def mined_below_share(s: Tensor, mined: Tensor, seen: Tensor, seen_mined: Tensor, tau: float, share: float) -> Tensor:
    """Moreira et al. (NV-Retriever), 2024, TopK-PercPos: no candidate above a share of the positive's score remains."""
    limit = share * seen.diagonal()[:, None]
    found = (seen > limit) & ~torch.eye(len(s), dtype=torch.bool)
    logits = torch.cat([s.masked_fill(found, -torch.inf), mined.masked_fill(seen_mined > limit, -torch.inf)], 1)
    return torch.nn.functional.cross_entropy(logits / tau, torch.arange(len(s)))


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
