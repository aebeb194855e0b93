"""InfoNCE (van den Oord et al., 2018), the loss of SimCLR and CLIP, up to the constant tau log |N_i|.

The division of the sum by |N_i|, the number of negatives, makes the value comparable with that of other methods.
"""

import torch
from torch.nn.functional import normalize


def info_nce(z1, z2, index, tau=0.07):
    """Return the mean over samples and directions of tau log((1 + sum_j exp(h_ij / tau)) / |N_i|)."""
    z1, z2 = normalize(z1), normalize(z2)
    negative = index[:, None] != index  # a repeated sample is no negative of itself
    count = negative.sum(1, dtype=z1.dtype)
    alpha = []
    for s in (z1 @ z2.T, z2 @ z1.T):
        h = (s - s.diagonal()[:, None]).masked_fill(~negative, -torch.inf)
        positive = torch.zeros(len(s), 1, dtype=s.dtype)  # h_ii
        alpha.append(torch.cat([positive, h / tau], 1).logsumexp(1) - count.log())
    return tau * torch.stack(alpha).mean()
