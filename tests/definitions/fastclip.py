"""FastCLIP v3 (Wei et al., 2024; NeuCLIP, eq. 1, 3, 4, Algorithm 2): u_i per sample, a falling gamma, one learned tau.

tau takes steps of Adam on log tau, at a third of the rate while tau <= 0.03, as in the authors' code.
"""

import math

import torch
from torch.nn.functional import normalize


class FastCLIP:
    def __init__(self, n, tau, rho, lr, decay_steps, gamma_min=0.2, eps=1e-14, dtype=torch.float32):
        self.rho, self.lr, self.decay_steps, self.gamma_min, self.eps = rho, lr, decay_steps, gamma_min, eps
        self.state = {"log_u": torch.zeros(n, 2, dtype=dtype), "count": torch.zeros(n, dtype=torch.int32)}
        self.state["t"] = torch.zeros(())
        self.state["dual"] = torch.tensor([math.log(tau), 0, 0, 0], dtype=torch.float64)  # log tau, Adam's m, v, steps
        self.pending, self.dual = [], self.state["dual"]  # a second call before step() continues the dual of the first

    def __call__(self, z1, z2, index):
        z1, z2, tau = normalize(z1), normalize(z2), self.dual[0].exp().item()
        progress = min(1.0, self.state["t"].item() / self.decay_steps)
        gamma = self.gamma_min + (1 - self.gamma_min) * (1 + math.cos(math.pi * progress)) / 2
        negative = index[:, None] != index  # a repeated sample is no negative of itself
        size = negative.sum(1, dtype=z1.dtype)
        values, gradients, new = [], [], []
        for d, s in enumerate((z1 @ z2.T, z2 @ z1.T)):
            h = s - s.diagonal()[:, None]
            logits = (h / tau).masked_fill(~negative, -torch.inf)
            log_g = torch.log(self.eps + logits.detach().exp().sum(1) / size)
            old = self.state["log_u"][index, d] + torch.tensor(1 - gamma, dtype=torch.float64).log().item()
            alpha = torch.logaddexp(old, log_g + math.log(gamma))  # eq. 3
            alpha = torch.where(self.state["count"][index] == 0, log_g, alpha)
            w = (logits.detach() - alpha[:, None]).exp() / size[:, None]
            pull = (w * h).sum(1)  # its gradient is eq. 4
            values.append(tau * (alpha + self.rho) + pull - pull.detach())  # eq. 1
            gradients.append(alpha + self.rho - pull.detach() / tau)
            new.append(alpha)
        self.pending.append((index, torch.stack(new, 1)))
        g, (x, m, v, k) = tau * torch.cat(gradients).double().mean(), self.dual  # g: derivative by log tau
        m, v, k = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2, k + 1
        x = x - self.lr / (3 if tau <= 0.03 else 1) * m / (1 - 0.9**k) / ((v / (1 - 0.999**k)).sqrt() + 1e-8)
        self.dual = torch.stack([x.clamp(math.log(0.01), math.log(1.0)), m, v, k])
        return torch.stack(values).mean()

    def step(self):
        """Commit after the optimizer's step; a sample that occurred several times gets the mean of its values of u."""
        index, log_u = (torch.cat(values) for values in zip(*self.pending, strict=True))
        for i in index.unique():
            new = log_u[index == i]
            self.state["log_u"][i] = new.logsumexp(0) - math.log(len(new))
            self.state["count"][i] += 1
        self.pending, self.state["dual"], self.state["t"] = [], self.dual, self.state["t"] + 1

    def state_dict(self):
        return {name: value.clone() for name, value in self.state.items()}

    def load_state_dict(self, state):
        self.state = {name: value.clone() for name, value in state.items()}
        self.dual = self.state["dual"]
