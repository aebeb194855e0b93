"""iSogCLR for two modalities (Qiu et al., ICML 2023, eq. 11 to 14, Algorithm 2): u_i and a temperature per sample.

Eq. 13 and 14 use the previous u_i; the authors' code, and this file, use the updated one. The 1/n of eq. 13 is in lr.
"""

import math

import torch
from torch.nn.functional import normalize


class ISogCLR:
    def __init__(self, n, gamma, rho, lr, beta, tau_init, tau_min, tau_max, max_grad, dtype=torch.float32):
        self.gamma, self.rho, self.lr, self.beta, self.max_grad = gamma, rho, lr, beta, max_grad
        self.tau_min, self.tau_max, self.pending = tau_min, tau_max, []
        zeros = torch.zeros(n, 2, dtype=dtype)  # one column per direction
        self.state = {"log_u": zeros, "tau": zeros + tau_init, "m": zeros.clone(), "count": torch.zeros(n).int()}

    def __call__(self, z1, z2, index):
        z1, z2 = normalize(z1), normalize(z2)
        negative = index[:, None] != index  # a repeated sample is no negative of itself
        size = negative.sum(1, dtype=z1.dtype)
        log_u, tau, m, count = (self.state[name][index] for name in ("log_u", "tau", "m", "count"))
        new, values = [], []
        for d, s in enumerate((z1 @ z2.T, z2 @ z1.T)):
            h = s - s.diagonal()[:, None]
            logits = (h / tau[:, d, None]).masked_fill(~negative, -torch.inf)
            log_g = logits.logsumexp(1) - size.log()  # eq. 11
            average = torch.logaddexp(log_u[:, d] + math.log(1 - self.gamma), log_g + math.log(self.gamma))  # eq. 12
            alpha = torch.where(count == 0, log_g, average).detach()
            w = (logits - alpha[:, None]).exp().detach() / size[:, None]
            mean_h = (w * h.detach()).sum(1)  # sum_j w_ij h_ij
            gradient = (alpha + self.rho - mean_h / tau[:, d]).clamp(-self.max_grad, self.max_grad)  # eq. 13
            momentum = (1 - self.beta) * m[:, d] + self.beta * gradient
            moved = (tau[:, d] - self.lr * momentum).clamp(self.tau_min, self.tau_max)
            new.append(torch.stack([alpha, moved, momentum], 1))
            pull = (w * h).sum(1)  # its gradient is eq. 14
            values.append(tau[:, d] * (alpha + self.rho) + pull - pull.detach())
        self.pending.append((index, torch.stack(new, 2)))
        return torch.stack(values).mean()

    def step(self):
        """Commit after the optimizer's step; a sample that occurred several times gets the means of its values."""
        if self.pending:
            index, new = (torch.cat(values) for values in zip(*self.pending, strict=True))
            for i in index.unique():
                log_u, tau, m = new[index == i].unbind(1)
                self.state["log_u"][i] = log_u.logsumexp(0) - math.log(len(log_u))
                self.state["tau"][i], self.state["m"][i] = tau.mean(0), m.mean(0)
                self.state["count"][i] += 1
        self.pending = []

    def state_dict(self):
        return {name: value.clone() for name, value in self.state.items()}

    def load_state_dict(self, state):
        self.state = {name: value.clone() for name, value in state.items()}
