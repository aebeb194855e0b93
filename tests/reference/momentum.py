"""DCL with keys of a momentum copy and a queue of them, one anchor at a time; autograd gives all gradients."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F


class MomentumReference:
    """Slots hold the keys of a sample and its ``k1, k2`` minus the means of their batches, oldest first."""

    def __init__(self, kind, length, tau):
        self.kind, self.length, self.tau = kind, length, tau
        self.slots, self.pending = [], []
        self.weights = {}  # of the last call, by direction and position

    def loss(
        self, z, k, index, tau=None, index2=None, labels=None, within=None, extra=None, extra_index=None, policy=None
    ):
        """Return the mean over anchors of ``tau log mean exp(h / tau + b)``; ``k`` has no graph, ``extra`` may."""
        z, k = [F.normalize(side) for side in z], [F.normalize(side.detach()) for side in k]
        extra = [] if extra is None else list(F.normalize(extra))
        means = [side.mean(0) for side in k]
        if self.kind == "unimodal":
            means = [(means[0] + means[1]) / 2] * 2
        tau = torch.as_tensor(self.tau if tau is None else tau, dtype=torch.float64)
        tau = (tau if tau.dim() == 2 else tau.reshape(-1, 1)).expand(len(z[0]), 2)
        keys = [
            [None if key is None else int(key[i]) for key in (index, index2, labels, within)] for i in range(len(z[0]))
        ]
        values, past = [], (self.slots + self.pending)[-self.length :]
        for view in range(1 if self.kind == "forward" else 2):
            for i, own in enumerate(z[view]):
                positive = torch.dot(own, k[1 - view][i])
                sides = (0, 1) if self.kind == "unimodal" else (1 - view,)
                inside = [k[side][j] for j in range(len(keys)) if _apart(keys[i], keys[j]) for side in sides]
                if view == 0:
                    mine = int((index if index2 is None else index2)[i])
                    inside += [e for at, e in enumerate(extra) if extra_index is None or int(extra_index[at]) != mine]
                outside = [
                    slot[side] + means[side] for other, *slot in past if _apart(keys[i], other) for side in sides
                ]
                values.append(self._anchor(view, i, own, positive, inside, outside, tau[i, view], policy))
        new = [(keys[i], *(side[i] - mean for side, mean in zip(k, means, strict=True))) for i in range(len(keys))]
        self.pending = [*self.pending, *new]
        return torch.stack(values).mean()

    def _anchor(self, view, i, own, positive, inside, outside, tau, policy):
        """Return the objective of one anchor, which is 0 without candidates in the batch and in the queue."""
        s = torch.stack([torch.dot(own, candidate) for candidate in [*inside, *outside, own]])[:-1]
        margin, beta = policy or (None, 0.0)
        kept = torch.ones_like(s, dtype=torch.bool) if margin is None else s <= positive + margin
        if not kept.any():
            return positive * 0
        logits = ((s - positive) / tau + beta * s.detach())[kept]
        self.weights[view, i] = logits.detach().softmax(0)
        return tau * (logits.logsumexp(0) - math.log(len(logits)))

    def step(self):
        """Add the slots of the calls since the last step."""
        self.slots, self.pending = [*self.slots, *self.pending][-self.length :], []


def _apart(own, other):
    """Return True if two samples differ in all keys that they have, and share the key of ``within``."""
    different = all(a is None or b is None or a != b for a, b in zip(own[:3], other[:3], strict=True))
    return different and own[3] == other[3]
