"""SogCLR for two modalities (Yuan et al., ICML 2022, eq. 9 and 10, Algorithm 1): a moving average u_i per sample.

Eq. 10 divides by the previous u_i; all public code, and this file, divides by the updated one. log u_i is stored.
"""

import math

import torch
from torch.nn.functional import normalize


class SogCLR:
    def __init__(self, n, gamma=0.9, tau=0.07, dtype=torch.float32):
        self.gamma, self.tau, self.pending = gamma, tau, []
        self.state = {"log_u": torch.zeros(n, 2, dtype=dtype), "count": torch.zeros(n, dtype=torch.int32)}

    def __call__(self, z1, z2, index):
        s = normalize(z1) @ normalize(z2).T
        negative = index[:, None] != index  # a repeated sample is no negative of itself
        logits = (s / self.tau).masked_fill(~negative, -torch.inf)
        log_sum = torch.stack([logits.logsumexp(1), logits.logsumexp(0)], 1)  # both directions
        log_g = log_sum - negative.sum(1, keepdim=True, dtype=s.dtype).log()
        old, first = self.state["log_u"][index], self.state["count"][index, None] == 0
        log_u = torch.logaddexp(old + math.log(1 - self.gamma), log_g.detach() + math.log(self.gamma))  # eq. 9
        log_u = torch.where(first, log_g.detach(), log_u)
        self.pending.append((index, log_u))
        ratio = (log_g - log_u).exp()  # g_i / u_i, u_i constant: tau times its gradient is sum_j w_ij grad s_ij, eq. 10
        return (self.tau * (log_u + ratio - ratio.detach()) - s.diagonal()[:, None]).mean()

    def step(self):
        """Commit after the optimizer's step; a sample that occurred several times gets the mean of its values of u."""
        if self.pending:
            index, log_u = (torch.cat(values) for values in zip(*self.pending, strict=True))
            for i in index.unique():
                new = log_u[index == i]
                self.state["log_u"][i] = new.logsumexp(0) - math.log(len(new))
                self.state["count"][i] += 1
        self.pending = []

    def state_dict(self):
        return {name: value.clone() for name, value in self.state.items()}

    def load_state_dict(self, state):
        self.state = {name: value.clone() for name, value in state.items()}
