"""The four objects alone, in float64 and plain loops, written from the equations of their operations."""

from __future__ import annotations

import copy
import math

import torch

from tests.reference.mcmc import choose, split, word
from tests.reference.temperatures import clip


class Rows:
    """Committed rows, the number of visits, and what waits for step(); hyper(i) are those of row i's group."""

    def __init__(self, groups):
        self.groups, self.rows, self.count, self.deposits, self.t, self.pending = groups, {}, {}, [], 0, 0

    def hyper(self, i):
        """The group of a row."""
        for group in self.groups:
            if i < group["n"]:
                return group
            i -= group["n"]
        raise IndexError(i)

    def deposit(self, proposals):
        """(row, values) of one call."""
        self.deposits += proposals
        self.pending += 1

    def step(self):
        """One value per row; a row with a proposal that is not finite stays as it is."""
        for row in {row for row, _ in self.deposits}:
            values = [value for where, value in self.deposits if where == row]
            if all(math.isfinite(x) for value in values for x in value):
                self.rows[row] = self.merged(row, values)
                self.count[row] = self.count.get(row, 0) + 1
        self.t += self.pending > 0
        self.discard()

    def merged(self, row, values):
        """The mean of each value."""
        return tuple(sum(column) / len(column) for column in zip(*values, strict=True))

    def discard(self):
        """Forget."""
        self.deposits, self.pending = [], 0


class AloneAverage(Rows):
    """u <- (1 - gamma) u + gamma (eps + g); a first visit takes eps + g. Rows keep log u."""

    def update(self, log_g, index):
        """log u of each sample."""
        proposals = []
        for value, i in zip(log_g.tolist(), index.tolist(), strict=True):
            h = self.hyper(i)
            g = h["eps"] + math.exp(value) if math.isfinite(value) else value
            u = g if i not in self.rows else (1 - h["gamma"]) * math.exp(self.rows[i][0]) + h["gamma"] * g
            proposals.append((i, (math.log(u) if math.isfinite(u) else u,)))
        self.deposit(proposals)
        return [value[0] for _, value in proposals]

    def merged(self, row, values):
        """The mean of u."""
        return (math.log(sum(math.exp(log_u) for (log_u,) in values) / len(values)),)


def dual_step(h, optimizer, tau, m, v, gradient, visits):
    """One step of projected momentum or Adam: (tau, m, v)."""
    gradient = clip(gradient, -h["max_grad"], h["max_grad"])
    if optimizer == "momentum":
        m = (1 - h["beta"]) * m + h["beta"] * gradient
        move = m
    else:
        b1, b2 = h["betas"]
        m, v = b1 * m + (1 - b1) * gradient, b2 * v + (1 - b2) * gradient**2
        move = m / (1 - b1**visits) / (math.sqrt(v / (1 - b2**visits)) + 1e-8)
    return clip(tau - h["lr"] * move, h["tau_min"], h["tau_max"]), m, v


class AloneDual(Rows):
    """A temperature per row."""

    def __init__(self, groups, optimizer):
        super().__init__(groups)
        self.optimizer = optimizer

    def value(self, index):
        """Committed temperatures."""
        return [self.rows.get(i, (self.hyper(i)["tau_init"],))[0] for i in index.tolist()]

    def update(self, gradient, index):
        """The proposed temperatures."""
        proposals = []
        for g, i in zip(gradient.tolist(), index.tolist(), strict=True):
            tau, m, v = self.rows.get(i, (self.hyper(i)["tau_init"], 0.0, 0.0))
            found = dual_step(self.hyper(i), self.optimizer, tau, m, v, g, self.count.get(i, 0) + 1)
            proposals.append((i, found if math.isfinite(g) else (math.nan,) * 3))
        self.deposit(proposals)
        return [value[0] for _, value in proposals]


class AloneGlobalDual:
    """One temperature that follows the mean; calls before a step continue each other."""

    def __init__(self, groups, optimizer):
        self.h, self.optimizer, self.next = groups[0], optimizer, None
        self.state = (groups[0]["tau_init"], 0.0, 0.0, 0)

    def update(self, gradient):
        """The proposed temperature."""
        tau, m, v, updates = self.next or self.state
        mean = sum(gradient.tolist()) / len(gradient)
        if not math.isfinite(mean):
            self.next = self.next or self.state
            return math.nan
        self.next = (*dual_step(self.h, self.optimizer, tau, m, v, mean, updates + 1), updates + 1)
        return self.next[0]

    def step(self):
        """Commit."""
        self.state, self.next = self.next or self.state, None

    def discard(self):
        """Forget."""
        self.next = None


class AloneNetwork:
    """Prototypes W descend mean_i tau_i (exp(-alpha_i) (eps + g_i) + alpha_i) by autograd and torch.optim.Adagrad."""

    def __init__(self, dim, m, lr, updates, restart_every, eps, seed):
        drawn = torch.randn(m, dim, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        self.m, self.lr, self.updates, self.every, self.eps, self.t = m, lr, updates, restart_every, eps, 0
        first = [row / row.norm() for row in drawn]
        self.state = {"W": torch.stack(first), "queue": first, "place": 0, "filled": 0, "restart": None, "sums": None}
        self.next = None

    def alpha(self, W, anchors, tau):
        """log(eps + mean_j exp(cos(e_i, W_j) / tau_i))."""
        found = []
        for e, t in zip(anchors, tau, strict=True):
            total = sum(torch.exp(torch.dot(e, w) / (e.norm() * w.norm()) / t) for w in W)
            found.append(torch.log(self.eps + total / self.m))
        return torch.stack(found)

    def predict(self, anchors, tau):
        """By the committed network."""
        return self.alpha(self.state["W"], anchors, tau)

    def update(self, anchors, log_g, tau, candidates=None):
        """Queue, restart, steps of AdaGrad; alpha of the network after them."""
        s = copy.copy(self.next or self.state)
        if candidates is not None:
            s["queue"] = list(s["queue"])
            if len(candidates) >= self.m:
                candidates, s["place"] = candidates[-self.m :], 0
            for feature in candidates:
                s["queue"][s["place"]] = feature / feature.norm()
                s["place"] = (s["place"] + 1) % self.m
            full_now = s["filled"] < self.m <= s["filled"] + len(candidates)
            s["filled"] += len(candidates)
            due = self.every is not None and (s["restart"] is None or self.t // self.every > s["restart"] // self.every)
            if due or full_now:
                s["W"], s["restart"] = torch.stack(s["queue"]), self.t
        W = s["W"].clone().requires_grad_()
        optimizer = torch.optim.Adagrad([W], lr=self.lr)
        if s["sums"] is not None:
            optimizer.load_state_dict(copy.deepcopy(s["sums"]))
        for _ in range(self.updates):
            optimizer.zero_grad()
            alpha = self.alpha(W, anchors, tau)
            loss = (tau * (torch.exp(-alpha) * (self.eps + log_g.exp()) + alpha)).mean()
            loss.backward()
            optimizer.step()
        s["W"] = W.detach()
        if self.updates:
            s["sums"] = copy.deepcopy(optimizer.state_dict())
        self.next = s
        return self.alpha(s["W"], anchors, tau)

    def step(self):
        """Commit."""
        if self.next is not None:
            self.state, self.next, self.t = self.next, None, self.t + 1

    def discard(self):
        """Forget."""
        self.next = None


class AloneChains(Rows):
    """A Metropolis-Hastings chain per row, over pools that each call brings; rows keep (candidate, score)."""

    def __init__(self, groups, proposals="pool", seed=0):
        super().__init__(groups)
        self.proposals, self.seed = proposals, seed

    def sample(self, scores, index, candidates):
        """Shares of the visits after burn-in, per chain and candidate."""
        names, found, proposals = candidates.tolist(), [], []
        for position, (own, row) in enumerate(zip(scores.tolist(), index.tolist(), strict=True)):
            weights, proposal = self.walk(own, row, position, names)
            found.append(weights)
            proposals.append((row, proposal))
        self.deposit(proposals)
        return found

    def walk(self, scores, row, position, names):
        """Weights, and where the chain is now with its score."""
        m, place, current = len(names), "nowhere", -math.inf
        if row in self.rows:
            sample, current = self.rows[row]
            place = names.index(sample) if sample in names else "outside"
            if place != "outside":
                current = scores[place]
                place = "nowhere" if current == -math.inf else place
        spare = 1 if place == "outside" and self.proposals == "pool" else 0
        burn_in = self.hyper(row)["burn_in"]
        burn_in = min(m - 1, int(burn_in * m * (1 + 1e-6)) if burn_in < 1 else burn_in)
        visits, stored = [0] * m, self.rows.get(row)
        for r in range(m):
            number, u = split(word(self.seed, self.t, self.pending, 0, position, r), m + spare)
            number = r if self.proposals == "sweep" else number
            score = scores[number] if number < m else stored[1]
            if score > -math.inf and (place == "nowhere" or u < math.exp(min(0.0, score - current))):
                place, current = (number if number < m else "outside"), score
            if r >= burn_in and place not in ("outside", "nowhere"):
                visits[place] += 1
        if any(math.isnan(s) or s == math.inf for s in scores):
            return [math.nan] * m, (0, math.nan)
        weights = [v / max(1, sum(visits)) for v in visits]
        if place == "nowhere":
            return weights, (0, -math.inf)
        return weights, stored if place == "outside" else (names[place], current)

    def merged(self, row, values):
        """One of them."""
        return choose(row, self.count.get(row, 0), values) if len(values) > 1 else values[0]
