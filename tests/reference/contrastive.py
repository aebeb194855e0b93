"""The estimator contract and the pair-weight gradient, by loops and plain autograd."""

from __future__ import annotations

import math
from collections import defaultdict

import torch

from tests.reference.mcmc import choose
from tests.reference.pairs import anchors as find_anchors


class Reference:
    """A normalizer with a temperature; `groups` are dicts with "n" and the hyper-parameters of those rows."""

    def __init__(self, groups, normalizer, temperature, mode="bimodal", multiply_tau=True, normalize=True):
        self.groups = [dict(g) for g in groups]
        self.normalizer, self.temperature = normalizer, temperature
        self.mode, self.multiply_tau, self.normalize = mode, multiply_tau, normalize
        self.columns = 2 if mode == "bimodal" else 1
        self.rows = {key: defaultdict(dict) for key in ("u", "tau", "m", "v", "count", "chain")}
        self.pending = []  # proposals (row, column, key, value)
        self.steps = self.window = 0
        self.policy = None  # tests.reference.policy.PolicyReference

    # hyper-parameters and counts ------------------------------------------------------------------

    def hyper(self, row, key):
        """The hyper-parameter of the group that holds this row."""
        for group in self.groups:
            if row < group["n"]:
                return group[key]
            row -= group["n"]
        raise IndexError(row)

    def visits(self, row, column):
        """Return how many commits this column of this row has seen."""
        return self.rows["count"][row].get(column, 0)

    # forward --------------------------------------------------------------------------------------

    def forward(
        self,
        z1,
        z2,
        index,
        index2=None,
        labels=None,
        train=True,
        encode=None,
        extra=None,
        extra_index=None,
        guide=None,
        within=None,
    ):
        """Return (loss, g1, g2) as float64 tensors, and the gradient of extra if given; deposit proposals when train.

        `encode` gives unit features (modality 1, modality 2) of a sample with their graph; their gradients go to .grad.
        """
        z = leaves = [z.detach().double().clone().requires_grad_() for z in (z1, z2)]
        extra = None if extra is None else extra.detach().double().clone().requires_grad_()
        given = (index, index2, labels, extra_index)
        index, index2, labels, extra_index = (None if x is None else [int(v) for v in x] for x in given)
        rows = [index, index if index2 is None else index2]
        found = find_anchors(z, index, self.mode, self.normalize, index2, labels, extra, extra_index)
        self.within = within if within is None or isinstance(within, tuple) else (within,)
        if self.policy is not None:
            self.policy.apply(found, guide, self.within, self.normalize)
        column = [a.direction if self.columns == 2 else 0 for a in found]
        row = [rows[c][a.position] for a, c in zip(found, column, strict=True)]
        self.train = train
        taus = [self.temperature.value(self, r, c) for r, c in zip(row, column, strict=True)]
        rhos = [self.hyper(r, "rho") if self.temperature.has_rho else 0.0 for r in row]
        self.features, self.keys, self.encode = z, (index, index2, labels), encode
        alphas, proposals = self.normalizer.alphas(self, found, taus, rows)

        surrogate, value, gradients, self.weights = 0.0, 0.0, {}, []
        sampled = self.normalizer.weights(self, found) if hasattr(self.normalizer, "weights") else None
        for number, (a, tau, rho, alpha) in enumerate(zip(found, taus, rhos, alphas, strict=True)):
            shared = hasattr(self.normalizer, "weight_alpha")  # with candidates outside the batch
            log_norm = self.normalizer.weight_alpha(number) if shared else alpha
            w = [math.exp(h / tau + b - log_norm) / len(a.h) for h, b in zip(a.h, a.log_weights, strict=True)]
            scale = 1.0 if self.multiply_tau else 1.0 / tau
            if sampled is not None:
                batch_weights = w
                w, beyond = sampled[number]
                pull = self.normalizer.pull(a, tau) if hasattr(self.normalizer, "pull") else 1
                surrogate = surrogate - scale * a.positive * (pull - sum(w))
                for share, sample in beyond:
                    surrogate = surrogate + scale * share * self.encoded_similarity(a, sample)
            elif self.outer_positive:
                surrogate = surrogate - scale * a.positive * (1 - sum(w))
            for w_ij, s_ij in zip(w, a.negatives, strict=True):
                surrogate = surrogate + scale * w_ij * (s_ij - a.positive)
            value += tau * (alpha + rho) if self.multiply_tau else alpha
            if sampled is not None and not (sum(w) or beyond):
                w = batch_weights  # a temperature without a visit learns from the batch
            linear = [w_ij * h_ij for w_ij, h_ij in zip(w, a.h, strict=True)]
            if shared:
                linear.append(self.normalizer.outside_wh(number))
            if sampled is not None:
                linear += [share * (self.encoded_score(a, sample) - a.positive.item()) for share, sample in beyond]
                linear += [(sum(w) - pull) * a.positive.item()] if hasattr(self.normalizer, "pull") else []
            of_tau = self.temperature_gradient(a, w, sum(linear), tau, alpha, rho)
            gradients[(a.direction, a.position)] = of_tau
            self.weights.append(w)
        if hasattr(self.normalizer, "surrogate"):
            slopes = list(taus) if self.multiply_tau else [1.0] * len(found)
            surrogate = surrogate + self.normalizer.surrogate(self, found, taus, slopes)
        total = len(found)
        self.alphas, self.taus = alphas, taus
        self.tau_grad = (sum(gradients.values()) - (sum(rhos) if self.multiply_tau else 0.0)) / total
        (surrogate / total).backward()
        of_leaves = [torch.zeros_like(z) if z.grad is None else z.grad for z in leaves]
        if train:
            self.window += 1
            self.pending += proposals + self.temperature.propose(self, gradients, rows)
            self.pending += [(r, c, "visit", 1) for r, c in set(zip(row, column, strict=True))]
        value = torch.tensor(value / total, dtype=torch.float64)
        if extra is None:
            return value, *of_leaves
        return value, *of_leaves, torch.zeros_like(extra) if extra.grad is None else extra.grad

    @property
    def outer_positive(self):
        """Return whether the positive is part of the outer function, and not of the inner one: SogCLR."""
        return getattr(self.normalizer, "outer_positive", False)

    def encoded_similarity(self, a, sample):
        """Similarity of an anchor to a sample outside the batch."""
        z = self.features[a.view][a.position]
        candidate = self.encode(sample)[a.partner]
        return torch.dot(z / z.norm() if self.normalize else z, candidate)

    def encoded_score(self, a, sample):
        """Return this similarity as a float."""
        return self.encoded_similarity(a, sample).item()

    def temperature_gradient(self, a, w, sum_wh, tau, alpha, rho):
        """Return G by autograd: in the objective of one anchor w is constant, and alpha too unless it has a graph."""
        t = torch.tensor(tau, dtype=torch.float64, requires_grad=True)
        if self.outer_positive:  # -s_ii + t log u(s): the inner function has s_ij where it otherwise has h_ij
            s_ii = a.positive.item()
            linear = (sum_wh + sum(w) * s_ii) / t
            if self.multiply_tau:
                objective = t * (alpha + s_ii / tau + rho) + tau * linear
            else:
                objective = linear - s_ii / t
            return float(torch.autograd.grad(objective, t)[0])
        linear = sum_wh / t
        objective = t * (alpha + rho) + tau * linear if self.multiply_tau else linear
        if self.multiply_tau and hasattr(self.normalizer, "slack"):
            objective = objective + t * self.normalizer.slack(a, w, alpha)
        if getattr(self.normalizer, "through_alpha", False):
            objective = objective + self.normalizer.through_tau(a, t, tau if self.multiply_tau else 1.0, alpha)
        return float(torch.autograd.grad(objective, t)[0])

    # commit ---------------------------------------------------------------------------------------

    def step(self):
        """Commit the mean of a row's proposals (of u: the log-mean-exp of log u) and increment its count."""
        values = defaultdict(list)
        for row, column, key, value in self.pending:
            values[(row, column, key)].append(value)
        visited = {}  # in this commit
        for (row, column, key), proposed in values.items():
            if key == "visit":
                visited[(row, column)] = 1
                self.rows["count"][row][column] = self.visits(row, column) + 1
            elif key == "chain":
                self.rows[key][row][column] = choose(
                    row, self.visits(row, column) - visited.get((row, column), 0), proposed
                )
            else:
                self.rows[key][row][column] = sum(proposed) / len(proposed)
        self.steps += bool(self.pending)
        self.pending, self.window = [], 0
        self.temperature.step()
        if hasattr(self.normalizer, "step"):
            self.normalizer.step()

    def discard(self):
        """Discard the proposals."""
        self.pending, self.window = [], 0
        self.temperature.discard()
        if hasattr(self.normalizer, "discard"):
            self.normalizer.discard()

    def read(self, row):
        """Return committed values of one seen row under the library's column names, as lists of length D."""
        names = {}
        if self.normalizer.has_rows:
            names |= self.normalizer.read(self, row)
        if self.temperature.has_rows:
            names["tau"] = [self.rows["tau"][row][c] for c in range(self.columns)]
            names["tau_exp_avg"] = [self.rows["m"][row][c] for c in range(self.columns)]
            if self.temperature.optimizer == "adam":
                names["tau_exp_avg_sq"] = [self.rows["v"][row][c] for c in range(self.columns)]
        return names
