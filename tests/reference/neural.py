"""The network of NeuCLIP (DESIGN 3.5, NeuCLIP eq. 5 to 12, Algorithm 1) by plain autograd and torch.optim."""

from __future__ import annotations

import copy
import math

import torch


def unit(x):
    """Return rows divided by their lengths."""
    return x / x.norm(dim=-1, keepdim=True)


def equation_12(z1, z2, tau, weights, eps=0.0, rho=0.0):
    """Return the objective of NeuCLIP's eq. 12 on distinct samples, as one graph of features and temperatures.

    No anchor's weights sum to more than 30.
    ``weights`` (D, m, d) are constants: one network per direction, or one for both views; ``tau`` is 0-d or (B, 2).
    """
    z, shared = [unit(z1), unit(z2)], len(weights) == 1
    positive, total = (z[0] * z[1]).sum(1), 0.0
    for own, other, w, t in zip(z, z[::-1], weights.expand(2, -1, -1), tau.expand(len(z1), 2).T, strict=True):
        candidates = torch.cat([own, other]) if shared else other
        negative = 1 - torch.eye(len(own), dtype=own.dtype).repeat(1, 2 if shared else 1)
        sums = [torch.exp((own @ side.T - positive[:, None]) / t[:, None]) for side in (candidates, unit(w))]
        g = (negative * sums[0]).sum(1) / negative.sum(1)
        alpha = torch.log(eps + sums[1].mean(1))
        least = torch.log(eps + g) - math.log(30)  # a constant for the gradient
        alpha = alpha + (torch.maximum(alpha, least) - alpha).detach()
        total = total + (t * (torch.exp(-alpha) * (eps + g) + alpha + rho - 1)).mean() / 2
    return total


class NeuralReference:
    """One network per direction (bimodal) or one for both views; weights learn by autograd on the batch."""

    has_rows = False

    def __init__(
        self,
        dim,
        prototypes,
        lr=1.0,
        updates=10,
        restart_every=500,
        eps=0.0,
        optimizer=torch.optim.Adagrad,
        through_alpha=False,
    ):
        self.dim, self.m, self.lr, self.updates, self.restart_every = dim, prototypes, lr, updates, restart_every
        self.eps, self.make, self.through_alpha = eps, optimizer, through_alpha
        self.nets = None
        self.pending = None

    # one network ----------------------------------------------------------------------------------

    def fresh(self):
        """Weights, slots, and the optimizer's state_dict."""
        return {"weights": [torch.zeros(self.m, self.dim).double()], "slots": {}, "next": 0, "optimizer": None}

    def log_partition(self, weights, e, tau, slots):
        """log mean_j exp(cos(e, W_j) / tau)."""
        terms = [torch.dot(unit(e), unit(weights[0][j])) / tau for j in sorted(slots)]
        return torch.logsumexp(torch.stack(terms), dim=0) - math.log(len(terms))

    def alpha(self, net, weights, e, positive, tau):
        """log(eps + partition / exp(s_ii / tau))."""
        log_g = self.log_partition(weights, e, tau, net["slots"]) - positive / tau
        return torch.log(self.eps + torch.exp(log_g)) if self.eps else log_g

    def push(self, net, features, names, t, first):
        """Add new features to the queue, in the slots of their samples since the last commit; restart or fill."""
        before, known = len(net["slots"]), set(net["slots"])
        if first:
            net["owners"] = {}
        if len(features) >= self.m:
            features, names, net["next"], net["owners"] = features[-self.m :], names[-self.m :], 0, {}
        kept = {}  # slot by position in the batch
        for number, name in enumerate(names):
            for slot, owner in net["owners"].items():
                if owner == name and slot not in kept.values() and number not in kept:
                    kept[number] = slot
        filled = {}
        for number, (feature, name) in enumerate(zip(features, names, strict=True)):
            while number not in kept and net["next"] in kept.values():
                net["next"] = (net["next"] + 1) % self.m
            slot = kept.get(number, net["next"])
            if number not in kept:
                net["next"] = (net["next"] + 1) % self.m
            filled[slot] = feature
            net["owners"].pop(slot, None)
            net["owners"][slot] = name
        net["slots"].update(filled)
        due = self.restart_every is not None and t % self.restart_every == 0 and first
        if due or (before < self.m and len(net["slots"]) == self.m):
            weights = net["weights"][0].clone()
            for slot, feature in net["slots"].items():
                weights[slot] = feature
            net["weights"] = [weights]
        elif before < self.m:
            weights = net["weights"][0].clone()
            for slot in set(filled) - known:
                weights[slot] = filled[slot]
            net["weights"] = [weights]

    def train(self, net, batch):
        """Take T_u steps on the mean objective of the batch: entries (e, positive, tau, ghat)."""
        weights = [w.clone().requires_grad_() for w in net["weights"]]
        optimizer = self.make(weights, lr=self.lr)
        if net["optimizer"] is not None:
            optimizer.load_state_dict(net["optimizer"])
        for _ in range(self.updates):
            optimizer.zero_grad()
            loss = 0.0
            for e, positive, tau, ghat in batch:
                if ghat is None:
                    continue
                alpha = self.alpha(net, weights, e, positive, tau)
                loss = loss + tau * (torch.exp(-alpha) * (self.eps + ghat) + alpha)
            (loss / len(batch)).backward()
            optimizer.step()
        net["weights"] = [w.detach() for w in weights]
        if self.updates:
            net["optimizer"] = copy.deepcopy(optimizer.state_dict())

    # the interface of a normalizer ----------------------------------------------------------------

    def alphas(self, ref, anchors, taus, rows):
        """Fill the queue, restart and train; return alpha of the trained network."""
        self.features = ref.features
        z = [unit(z.detach()) for z in ref.features]
        count = 2 if ref.mode == "bimodal" else 1
        if self.nets is None:
            self.nets = [self.fresh() for _ in range(count)]
        nets = copy.deepcopy(self.pending if ref.train and self.pending is not None else self.nets)
        first = not (ref.train and self.pending is not None)
        others = [torch.cat(z)] if ref.mode == "unimodal" else [z[1], z[0]][:count]
        index, index2, _ = ref.keys  # calls of one window may differ in index2, whose default is the index
        names = list(zip(index, index if index2 is None or ref.mode == "forward" else index2, strict=True))
        for net, features in zip(nets, others, strict=True):
            self.push(net, features, names * (len(features) // len(names)), ref.steps, first)
        batches = [[] for _ in nets]
        for a, tau in zip(anchors, taus, strict=True):
            ghat = sum(a.terms(tau)) / len(a.h) if a.h else None
            batches[a.direction % count].append((z[a.view][a.position], a.positive.item(), tau, ghat))
        for net, batch in zip(nets, batches, strict=True):
            self.train(net, batch)
        if ref.train:
            self.pending = nets
        self.used = nets
        alphas = self.predictions(nets, anchors, taus, z)
        for k, (a, tau) in enumerate(zip(anchors, taus, strict=True)):
            if a.h:  # no anchor's weights sum to more than 30
                alphas[k] = max(alphas[k], math.log(self.eps + sum(a.terms(tau)) / len(a.h)) - math.log(30))
        self.alpha_of = {(a.direction, a.position): alpha for a, alpha in zip(anchors, alphas, strict=True)}
        return alphas, []

    def predictions(self, nets, anchors, taus, z):
        """Return alpha of every anchor by these networks."""
        return [
            float(
                self.alpha(
                    nets[a.direction % len(nets)],
                    nets[a.direction % len(nets)]["weights"],
                    z[a.view][a.position],
                    a.positive.item(),
                    tau,
                )
            )
            for a, tau in zip(anchors, taus, strict=True)
        ]

    def slack(self, anchor, w, alpha):
        """exp(-alpha)(eps + ghat) - 1, on top of G."""
        return sum(w) + self.eps * math.exp(-alpha) - 1.0

    def through_tau(self, anchor, t, slope, alpha):
        """Return the term of one anchor through which alpha depends on its temperature t; its factor is constant."""
        net = self.used[anchor.direction % len(self.used)]
        ghat = sum(anchor.terms(t.item())) / len(anchor.h)
        e = unit(self.features[anchor.view][anchor.position].detach())
        predicted = self.alpha(net, net["weights"], e, anchor.positive.item(), t)
        return slope * (1.0 - math.exp(-alpha) * (self.eps + ghat)) * predicted

    def surrogate(self, ref, anchors, taus, slopes):
        """Return the features' term through alpha: sum of slope (exp(-alpha)(eps + ghat) + alpha), ghat constant."""
        total = 0.0
        if not self.through_alpha:
            return total
        for a, tau, slope in zip(anchors, taus, slopes, strict=True):
            net = self.used[a.direction % len(self.used)]
            e = unit(ref.features[a.view][a.position])
            alpha = self.alpha(net, net["weights"], e, a.positive, tau)
            alpha = alpha + (self.alpha_of[(a.direction, a.position)] - alpha.detach())  # bounded
            ghat = sum(a.terms(tau)) / len(a.h)
            total = total + slope * (torch.exp(-alpha) * (self.eps + ghat) + alpha)
        return total

    def step(self):
        """Commit."""
        if self.pending is not None:
            self.nets = self.pending
        self.pending = None

    def discard(self):
        """Discard the pending networks."""
        self.pending = None
