"""NeuCLIP (Wei, Lin and Yang, eq. 10 to 12, Algorithm 1): per direction, m prototypes W predict every alpha_i.

A restart takes the newest m features, of several batches. tau is constant (fastclip.py has a learned one); rho = 0.
"""

import math

import torch
from torch.nn.functional import normalize


class NeuCLIP:
    def __init__(self, dim, prototypes, tau=0.07, lr=1.0, updates=10, restart_every=500, dtype=torch.float32):
        self.tau, self.lr, self.updates, self.restart_every = tau, lr, updates, restart_every
        zeros = torch.zeros(2, prototypes, dim, dtype=dtype)
        # a second call before step() continues the network of the first
        self.state = self.next = {"W": zeros, "sums": zeros, "queue": zeros, "seen": 0, "restart": -1, "t": 0}

    def __call__(self, z1, z2, index):
        z = torch.stack([normalize(z1), normalize(z2)])
        network = self.next = self.pushed(z.detach().flip(0), **self.next)  # continues the last call of a window
        for _ in range(self.updates):  # lines 6 to 8, AdaGrad
            W = network["W"].clone().requires_grad_()
            (gradient,) = torch.autograd.grad(self.objective(z.detach(), index, W[:, : network["seen"]])[0], W)
            network["sums"] = network["sums"] + gradient**2
            network["W"] = W.detach() - self.lr * gradient / (network["sums"].sqrt() + 1e-10)
        objective, alpha = self.objective(z, index, network["W"][:, : network["seen"]], most=math.log(30))  # line 11
        return self.tau * alpha.mean() + (objective - objective.detach()) / 2

    def objective(self, z, index, W, most=math.inf):
        """Return eq. 12, summed over the directions, and all alpha_i; log g_i - alpha_i is at most ``most``."""
        negative, total, alphas = index[:, None] != index, 0.0, []
        log_size = negative.sum(1, dtype=z.dtype).log()
        for d in (0, 1):
            s = z[d] @ z[1 - d].T / self.tau
            positive = s.diagonal()[:, None]
            log_g = (s - positive).masked_fill(~negative, -torch.inf).logsumexp(1) - log_size
            alpha = (z[d] @ normalize(W[d]).T / self.tau - positive).logsumexp(1) - math.log(len(W[d]))  # eq. 10, 11
            alpha = alpha + (log_g - alpha - most).clamp(min=0).detach()
            total = total + self.tau * ((log_g - alpha).exp() + alpha).mean()
            alphas.append(alpha.detach())
        return total, torch.stack(alphas)

    def pushed(self, new, W, sums, queue, seen, restart, t):
        """Return the state with the features of a batch, at most m, in the queue; restart W if due (line 4)."""
        m, now = W.shape[1], seen + new.shape[1]
        queue = queue.index_copy(1, torch.arange(seen, now) % m, new)
        W = torch.cat([W[:, :seen], queue[:, seen:]], 1)  # until the queue is full, each feature is a new prototype
        if t // self.restart_every != restart // self.restart_every or seen < m <= now:
            W, restart = queue, t
        return {"W": W, "sums": sums, "queue": queue, "seen": now, "restart": restart, "t": t}

    def step(self):  # commit after the optimizer's step
        self.state = self.next = {**self.next, "t": self.state["t"] + 1}

    def state_dict(self):
        return dict(self.state)

    def load_state_dict(self, state):
        self.state = self.next = dict(state)
