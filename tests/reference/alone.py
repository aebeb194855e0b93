"""References of the four objects on their own, in float64 and plain loops: those of estimators, without pairs."""

from __future__ import annotations

import copy
import math

import torch

from tests.reference.contrastive import Reference
from tests.reference.mcmc import MCMCReference, split, word
from tests.reference.neural import NeuralReference, unit
from tests.reference.normalizers import BatchReference, MovingAverageReference
from tests.reference.temperatures import DualReference, FixedReference, GlobalDualReference


class Alone(Reference):
    """The contract for one object with one column; a row with a non-finite proposal is not changed."""

    def __init__(self, groups, normalizer=None, temperature=None):
        super().__init__(groups, normalizer or BatchReference(), temperature or FixedReference(), mode="unimodal")

    def deposit(self, proposals):
        """Deposit the (row, 0, key, value) of one call, each of which visits its row."""
        self.pending += [*proposals, *((row, 0, "visit", 1) for row, *_ in proposals)]
        self.window += 1

    def step(self):
        """Commit all rows except those with bad proposals."""

        def finite(value):
            return all(math.isfinite(x) for x in (value if isinstance(value, tuple) else (value,)))

        bad = {row for row, _, _, value in self.pending if not finite(value)}
        self.pending = [proposal for proposal in self.pending if proposal[0] not in bad]
        super().step()


class AloneAverage(Alone):
    """u <- (1 - gamma) u + gamma (eps + g); a first visit takes eps + g."""

    def __init__(self, groups):
        super().__init__(groups, MovingAverageReference())

    def update(self, log_g, index):
        """Deposit and return the updated log u of each sample."""
        new = []
        for value, row in zip(log_g.tolist(), index.tolist(), strict=True):
            g = self.hyper(row, "eps") + math.exp(value)
            new.append((row, 0, "u", self.normalizer.updated(self, row, 0, g)))
        self.deposit(new)
        return [math.log(u) for *_, u in new]


class AloneDual(Alone):
    """A temperature per row."""

    def __init__(self, groups, optimizer):
        super().__init__(groups, temperature=DualReference(optimizer, groups[0]["beta"], groups[0]["betas"]))

    def value(self, index):
        """Committed temperatures."""
        return [self.temperature.value(self, row, 0) for row in index.tolist()]

    def update(self, gradient, index):
        """Deposit and return the proposed temperatures."""
        new = []
        for g, row in zip(gradient.tolist(), index.tolist(), strict=True):
            new.append(self.temperature.proposal(self, row, 0, g if math.isfinite(g) else math.nan))
        self.deposit([proposal for three in new for proposal in three])
        return [three[0][-1] for three in new]


class AloneGlobalDual(Alone):
    """One temperature that is updated by the mean gradient; each call before a step continues the previous one."""

    def __init__(self, h, optimizer):
        temperature = GlobalDualReference(h["tau_init"], optimizer, h["beta"], h["betas"])
        super().__init__([{"n": 1, **h}], temperature=temperature)

    def update(self, gradient):
        """Return the proposed temperature."""
        if not gradient.isfinite().all():
            return math.nan
        self.temperature.propose(self, dict(enumerate(gradient.tolist())), None)
        return self.temperature.pending["tau"]


class AloneNetwork(NeuralReference):
    """One network with random initial prototypes, which restarts when a call has candidates."""

    def __init__(self, dim, m, lr, updates, restart_every, eps, seed):
        super().__init__(dim, m, lr, updates, restart_every, eps)
        drawn = unit(torch.randn(m, dim, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)))
        self.nets, self.t = {**self.fresh(), "weights": [drawn], "slots": dict(enumerate(drawn))}, 0
        self.nets.update(filled=0, restart=None)

    def values(self, net, anchors, tau):
        """log(eps + mean_j exp(cos(e_i, W_j) / tau_i))."""
        return torch.stack([self.alpha(net, net["weights"], e, 0.0, t) for e, t in zip(anchors, tau, strict=True)])

    def predict(self, anchors, tau):
        """Return the values of the committed network."""
        return self.values(self.nets, anchors, tau)

    def update(self, anchors, log_g, tau, candidates=None):
        """Fill the queue, restart, take AdaGrad steps; return alpha of the network after them."""
        net = copy.deepcopy(self.pending or self.nets)
        if candidates is not None:
            self.enqueue(net, unit(candidates))
        self.train(net, [(e, 0.0, t, g) for e, t, g in zip(anchors, tau, log_g.exp(), strict=True)])
        self.pending = net
        return self.values(net, anchors, tau)

    def enqueue(self, net, features):
        """Fill the queue; restart at multiples of restart_every, and when the queue is first full."""
        full = net["filled"] < self.m <= net["filled"] + len(features)
        net["filled"] += len(features)
        if len(features) >= self.m:
            features, net["next"] = features[-self.m :], 0
        for feature in features:
            net["slots"][net["next"]] = feature
            net["next"] = (net["next"] + 1) % self.m
        every, last = self.restart_every, net["restart"]
        if full or (every is not None and (last is None or self.t // every > last // every)):
            net["weights"], net["restart"] = [torch.stack([net["slots"][slot] for slot in range(self.m)])], self.t

    def step(self):
        """Commit."""
        self.t += self.pending is not None
        super().step()


class AloneChains(Alone):
    """A Metropolis-Hastings chain per row, over pools that each call provides; rows keep (candidate, score)."""

    def __init__(self, groups, proposals="pool", seed=0):
        super().__init__(groups, MCMCReference())
        self.proposals, self.seed = proposals, seed

    def sample(self, scores, index, candidates):
        """Return the shares of the visits after burn-in, per chain and candidate."""
        names, found, proposals = candidates.tolist(), [], []
        for position, (own, row) in enumerate(zip(scores.tolist(), index.tolist(), strict=True)):
            weights, proposal = self.walk(own, row, position, names)
            found.append(weights)
            proposals.append((row, 0, "chain", proposal))
        self.deposit(proposals)
        return found

    def walk(self, scores, row, position, names):
        """Return the weights, and the chain's new sample with its score."""
        m, place, current = len(names), "nowhere", -math.inf
        stored = self.rows["chain"][row].get(0)
        if stored is not None:
            sample, current = stored
            place = names.index(sample) if sample in names else "outside"
            if place != "outside":
                current = scores[place]
                place = "nowhere" if current == -math.inf else place
        spare = 1 if place == "outside" and self.proposals == "pool" else 0
        burn_in = self.hyper(row, "burn_in")
        burn_in = min(m - 1, int(burn_in * m * (1 + 1e-6)) if burn_in < 1 else burn_in)
        visits = [0] * m
        for r in range(m):
            number, u = split(word(self.seed, self.steps, self.window, 0, position, r), m + spare)
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
