"""Non-contrastive losses in float64: loops over samples, u itself in a dict, gradients by autograd of f'(u) g."""

from __future__ import annotations

import math

import torch


class LossReference:
    """Averages by row, committed by ``step()`` as the mean of a row's proposals; a first visit takes the value."""

    def __init__(self, **hyper):
        self.hyper, self.rows, self.pending, self.total, self.next_total = hyper, {}, [], None, None

    def average(self, old, new):
        """(1 - gamma) old + gamma new."""
        gamma = self.hyper["gamma"]
        return new if old is None else [(1 - gamma) * a + gamma * b for a, b in zip(old, new, strict=True)]

    def propose(self, row, new):
        """Keep the new value of a row until the commit."""
        self.pending.append((int(row), new))
        return new

    def step(self):
        """Commit."""
        for row in {row for row, _ in self.pending}:
            values = [new for other, new in self.pending if other == row]
            self.rows[row] = [sum(x) / len(values) for x in zip(*values, strict=True)]
        self.pending, self.total = [], self.next_total or self.total
        self.next_total = None

    def composed(self, index, inner, f):
        """Return the mean of f(u_i), and a function with its gradient, from inner values (k,) with their graph."""
        value, surrogate = 0.0, 0.0
        for row, g in zip(index.tolist(), inner, strict=True):
            u = torch.tensor(self.propose(row, self.average(self.rows.get(row), g.tolist())), dtype=g.dtype)
            u.requires_grad_()
            objective = f(u)
            (slope,) = torch.autograd.grad(objective, u)
            value, surrogate = value + objective.item() / len(inner), surrogate + (slope * g).sum() / len(inner)
        return value, surrogate

    def everything(self, log_inner, tau):
        """Return tau log of the average of a mean of exponentials, and a function with its gradient."""
        g = torch.stack([x.exp() for x in log_inner]).mean()
        start = self.next_total or self.total
        (v,) = self.next_total = self.average(start, [g.item()])
        return tau * math.log(v), tau * g / v

    def excess(self, scores, labels):
        """Yield each positive i with the surrogate losses l_ij of all j."""
        for i in torch.nonzero(labels)[:, 0].tolist():
            yield i, torch.stack([(self.hyper["margin"] - (scores[i] - s)).clamp(min=0) ** 2 for s in scores])

    def ap(self, scores, labels, index):
        """Average precision: SOAP."""
        pairs = dict(self.excess(scores, labels))
        inner = [torch.stack([(each * labels).mean(), each.mean()]) for each in pairs.values()]
        return self.composed(index[list(pairs)], inner, lambda u: -u[0] / u[1])

    def pauc(self, scores, labels, index):
        """One-way partial AUC: SOPA-s."""
        tau, pairs = self.hyper["tau"], dict(self.excess(scores, labels))
        inner = [(each[labels == 0] / tau).exp().mean()[None] for each in pairs.values()]
        return self.composed(index[list(pairs)], inner, lambda u: tau * u[0].log())

    def two_way(self, scores, labels, index):
        """Two-way partial AUC: SOTA-s."""
        h, pairs = self.hyper, dict(self.excess(scores, labels))
        power, log_inner = h["tau"] / h["tau_positive"], []
        for i, each in pairs.items():
            g = (each[labels == 0] / h["tau"]).exp().mean()
            row = index[i].item()
            (u,) = self.propose(row, self.average(self.rows.get(row), [g.item()]))
            # the value of u^power, with the derivative power u^(power - 1) of g
            log_inner.append(power * (math.log(u) + (g - g.detach()) / u))
        return self.everything(log_inner, h["tau_positive"])

    def cvar(self, scores, labels, index):
        """One-way partial AUC with thresholds: SOPA."""
        h, pairs = self.hyper, dict(self.excess(scores, labels))
        value = 0.0
        for i, each in pairs.items():
            row = index[i].item()
            threshold = torch.tensor(self.rows.get(row, [0.0])[0], dtype=scores.dtype, requires_grad=True)
            term = threshold + (each[labels == 0] - threshold).relu().mean() / h["max_fpr"]
            (slope,) = torch.autograd.grad(term, threshold, retain_graph=True)
            self.propose(row, [threshold.item() - h["lr"] * slope.item()])
            value = value + term / len(pairs)
        return value.item(), value

    def two_way_cvar(self, scores, labels, index):
        """Two-way partial AUC: SOTA; rows are (threshold, u), and the total is the threshold of positives."""
        h, pairs, value, share = self.hyper, dict(self.excess(scores, labels)), 0.0, 1 - self.hyper["min_tpr"]
        top, surrogate, hard = (self.next_total or self.total or [0.0])[0], 0 * scores.sum(), 0
        for i, each in pairs.items():
            row = index[i].item()
            before, u = self.rows.get(row, (0.0, None))
            threshold = torch.tensor(before, dtype=scores.dtype, requires_grad=True)
            g = threshold + (each[labels == 0] - threshold).relu().mean() / h["max_fpr"]
            (slope,) = torch.autograd.grad(g, threshold, retain_graph=True)
            (u,) = self.average(None if u is None else [u], [g.item()])
            active = u > top
            self.propose(row, [before - h["lr"] * active * slope.item(), u])
            value, hard = value + max(0.0, u - top) / share / len(pairs), hard + active / len(pairs)
            surrogate = surrogate + active * g / share / len(pairs)
        self.next_total = [top - h["lr"] * (1 - hard / share)]
        return top + value, surrogate

    def robust(self, losses, index):
        """Robust loss per task."""
        tau = self.hyper["tau"]
        return self.composed(index, [(x / tau).exp()[None] for x in losses], lambda u: tau * u[0].log())

    def robust_total(self, losses, index):
        """Robust loss over all samples."""
        return self.everything([x / self.hyper["tau"] for x in losses], self.hyper["tau"])

    def ndcg(self, scores, relevance, index):
        """NDCG: SONG."""
        value, surrogate, size, count = 0.0, 0.0, scores.shape[1], (relevance > 0).sum().item()
        for s, y, rows in zip(scores, relevance.tolist(), index, strict=True):
            ideal = sum((2**a - 1) / math.log2(k + 2) for k, a in enumerate(sorted(y, reverse=True)))
            for i in (i for i in range(size) if y[i] > 0):
                g = torch.stack([(self.hyper["margin"] - (s[i] - x)).clamp(min=0) ** 2 for x in s]).mean()[None]
                scale = (1 - 2 ** y[i]) / ideal
                one = self.composed(rows[i : i + 1], [g], lambda u, scale=scale: scale / (1 + size * u[0]).log2())
                value, surrogate = value + one[0] / count, surrogate + one[1] / count
        return value, surrogate

    def listwise(self, scores, relevance, index):
        """Listwise cross-entropy."""
        value, surrogate, size, count = 0.0, 0.0, scores.shape[1], (relevance > 0).sum().item()
        for s, y, rows in zip(scores, relevance.tolist(), index, strict=True):
            for i in (i for i in range(size) if y[i] > 0):
                g = (s - s[i]).exp().mean()[None]
                one = self.composed(rows[i : i + 1], [g], lambda u, y=y[i]: y * (size * u[0]).log())
                value, surrogate = value + one[0] / count, surrogate + one[1] / count
        return value, surrogate
