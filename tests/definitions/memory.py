"""The memory of compopt.recommended (no paper): DCL with a queue of past features, corrected for drift and balanced.

The positive counts as one of K candidates. Queues: Wang et al., CVPR 2020; drift: Ajanthan et al., 2023.
"""

import torch
from torch.nn.functional import normalize


class Memory:
    def __init__(self, dim, length=128, tau=0.07, candidates=1000, dtype=torch.float32):
        self.tau, self.length, self.candidates = tau, length, candidates
        self.state = {"index": torch.zeros(0, dtype=torch.int64), "queue": torch.zeros(2, 0, dim, dtype=dtype)}
        self.fresh = dict(self.state)  # of the calls since the last step

    def __call__(self, z1, z2, index):
        z = torch.stack([normalize(z1), normalize(z2)])
        mean = z.detach().mean(1, keepdim=True)
        others = ~torch.isin(self.fresh["index"], index)  # a sample that is evaluated again replaces itself
        self.fresh = {"index": self.fresh["index"][others], "queue": self.fresh["queue"][:, others]}
        past, queue = self.newest(self.state, self.fresh).values()
        queue = queue + mean  # stored without the mean of their batch: they move with the encoders
        unlike, unlike_past = index[:, None] != index, index[:, None] != past
        count = (unlike.sum(1) + unlike_past.sum(1)).to(z.dtype)
        log_positive = (count / self.candidates).log().clamp(max=0)
        values = []
        for own, other, old in ((z[0], z[1], queue[1]), (z[1], z[0], queue[0])):
            h = own @ other.T - (own * other).sum(1, keepdim=True)
            h_past = own @ old.T - (own * other.detach()).sum(1, keepdim=True)  # moves the anchor, not its positive
            terms = [h.masked_fill(~unlike, -torch.inf), h_past.masked_fill(~unlike_past, -torch.inf)]
            logits = torch.cat([*terms, self.tau * log_positive[:, None]], 1) / self.tau
            values.append(self.tau * (logits.logsumexp(1) - count.log()))
        self.fresh = self.newest(self.fresh, {"index": index, "queue": z.detach() - mean})
        return torch.stack(values).mean()

    def newest(self, old, new):
        """Return two queues as one, without the oldest entries above its length."""
        queue = torch.cat([old["queue"], new["queue"]], 1)[:, -self.length :]
        return {"index": torch.cat([old["index"], new["index"]])[-self.length :], "queue": queue}

    def step(self):
        """Commit after the optimizer's step."""
        self.state = self.newest(self.state, self.fresh)
        self.fresh = {"index": self.fresh["index"][:0], "queue": self.fresh["queue"][:, :0]}

    def state_dict(self):
        return dict(self.state)

    def load_state_dict(self, state):
        self.state = dict(state)
