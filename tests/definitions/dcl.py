"""Decoupled contrastive learning (Yeh et al., ECCV 2022, eq. 5): InfoNCE without the positive in the denominator."""

import torch
from torch.nn.functional import normalize


def dcl(z1, z2, index, tau=0.07):
    """Return the mean over samples and directions of -s_ii + tau log mean_j exp(s_ij / tau)."""
    z1, z2 = normalize(z1), normalize(z2)
    negative = index[:, None] != index  # a repeated sample is no negative of itself
    count = negative.sum(1, dtype=z1.dtype)
    values = []
    for s in (z1 @ z2.T, z2 @ z1.T):
        log_sum = (s / tau).masked_fill(~negative, -torch.inf).logsumexp(1)
        values.append(tau * (log_sum - count.log()) - s.diagonal())
    return torch.stack(values).mean()
