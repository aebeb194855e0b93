"""EMC2 (Yau et al., ICML 2024, eq. 9 to 11, Algorithm 1): a Markov chain per sample and direction draws the negatives.

Proposals are uniform over the batch's negatives and the sample of the chain. All random numbers are arguments.
"""

import math

import torch
from torch.nn.functional import normalize


class EMC2:
    def __init__(self, n, tau=0.2, burn_in=0.5, dtype=torch.float32):
        self.tau, self.burn_in, self.pending = tau, burn_in, {}
        self.state = {"chain": torch.zeros(n, 2).long(), "score": torch.zeros(n, 2, dtype=dtype)}
        self.state["count"] = torch.zeros(n, dtype=torch.int32)

    def __call__(self, z1, z2, index, choose, accept):
        """Return the loss; the uniform numbers, ``(2, B, B)``, choose and accept the proposals of each chain."""
        z1, z2, values = normalize(z1), normalize(z2), []
        negative = index[:, None] != index  # a repeated sample is no negative of itself
        for d, s in enumerate((z1 @ z2.T, z2 @ z1.T)):
            w = torch.zeros_like(s)
            for i, row in enumerate(index.tolist()):
                pool = [(index[j].item(), s[i, j].item(), j) for j in negative[i].nonzero()[:, 0].tolist()]
                visits, last = self.walk(row, d, pool, choose[d, i].tolist(), accept[d, i].tolist())
                self.pending.setdefault((row, d), []).append(last)
                w[i] = torch.tensor(visits).long().bincount(minlength=len(s)).to(s) / max(1, len(visits))
            pull = (w * s).sum(1) - s.diagonal()  # its gradient is eq. 11
            h = (s - s.diagonal()[:, None]).detach().masked_fill(~negative, -torch.inf)
            log_g = (h / self.tau).logsumexp(1) - negative.sum(1, dtype=s.dtype).log()  # a value to look at
            values.append(self.tau * log_g + pull - pull.detach())
        return torch.stack(values).mean()

    def walk(self, row, d, pool, choose, accept):
        """Return the batch positions that a chain visits after burn-in, others dropped; its last sample and score."""
        proposals, current, visits = len(pool), (None, -math.inf, None), []  # a new chain accepts its first proposal
        if self.state["count"][row]:
            sample, score = self.state["chain"][row, d].item(), self.state["score"][row, d].item()
            current = next((state for state in pool if state[0] == sample), (sample, score, None))
            pool = pool + [current] * (current[2] is None)  # outside of the batch it has the score of its last visit
        for r in range(proposals):
            proposed = pool[int(choose[r] * len(pool))]
            if accept[r] < math.exp(min(0.0, (proposed[1] - current[1]) / self.tau)):  # eq. 9
                current = proposed
            visits.append(current[2])
        return [j for j in visits[int(min(self.burn_in * proposals, proposals - 1)) :] if j is not None], current[:2]

    def step(self, pick):
        """Commit; of several states of a chain one is kept, by the uniform numbers ``pick``, ``(n,)``."""
        for (row, d), states in self.pending.items():
            self.state["chain"][row, d], self.state["score"][row, d] = sorted(states)[int(pick[row] * len(states))]
        self.state["count"][[row for row, d in self.pending if d == 0]] += 1
        self.pending = {}

    def state_dict(self):
        return {name: value.clone() for name, value in self.state.items()}

    def load_state_dict(self, state):
        self.state = {name: value.clone() for name, value in state.items()}
