"""Temperatures of DESIGN sections 3.3, 3.4 and 12."""

from __future__ import annotations

import math


def clip(x, low, high):
    """x projected to [low, high]."""
    return min(max(x, low), high)


def moved(ref, m, v, t, gradient):
    """Return (first moment, second moment, direction of the move) after the t-th gradient: momentum or Adam."""
    if ref.optimizer == "momentum":
        m = (1.0 - ref.beta) * m + ref.beta * gradient
        return m, v, m
    b1, b2 = ref.betas
    m = b1 * m + (1.0 - b1) * gradient
    v = b2 * v + (1.0 - b2) * gradient**2
    return m, v, (m / (1.0 - b1**t)) / (math.sqrt(v / (1.0 - b2**t)) + 1e-8)


class FixedReference:
    """One constant per sample group, or one number given at construction (a tensor's value)."""

    has_rows = False
    has_rho = False

    def __init__(self, tau=None):
        self.tau = tau

    def value(self, ref, row, column):
        """tau of one row."""
        return ref.hyper(row, "tau") if self.tau is None else float(self.tau)

    def propose(self, ref, gradients, rows):
        """Return no proposals: the temperature is not learned."""
        return []

    def step(self):
        """Do nothing: no state is pending."""

    discard = step


class DualReference:
    """One tau per row and column, by momentum (iSogCLR Alg. 1) or Adam with per-row visit counts."""

    has_rows = True
    has_rho = True

    def __init__(self, optimizer="momentum", beta=0.9, betas=(0.9, 0.999)):
        self.optimizer = optimizer
        self.beta = beta
        self.betas = betas

    def value(self, ref, row, column):
        """Committed tau; an unseen row has tau_init."""
        if ref.visits(row, column) == 0:
            return ref.hyper(row, "tau_init")
        return ref.rows["tau"][row][column]

    def propose(self, ref, gradients, rows):
        """Proposals for tau and its moments; gradients[(direction, position)] = G."""
        batch = len(rows[0])
        proposals = []
        for i in range(batch):
            for column in range(ref.columns):
                row = rows[column][i]
                gradient = gradients[(column, i)]
                if ref.mode == "unimodal":
                    of_views = [value for (_, position), value in gradients.items() if position == i]
                    gradient = sum(of_views) / len(of_views)
                proposals += self.proposal(ref, row, column, gradient)
        return proposals

    def proposal(self, ref, row, column, gradient):
        """New values of one column of one row."""
        tau, lr = self.value(ref, row, column), ref.hyper(row, "lr")
        bound = ref.hyper(row, "max_grad")
        gradient = clip(gradient, -bound, bound)
        seen = ref.visits(row, column)
        m = ref.rows["m"][row][column] if seen else 0.0
        v = ref.rows["v"][row][column] if seen else 0.0
        m, v, move = moved(self, m, v, seen + 1, gradient)
        tau = clip(tau - lr * move, ref.hyper(row, "tau_min"), ref.hyper(row, "tau_max"))
        return [(row, column, "tau", tau), (row, column, "m", m), (row, column, "v", v)]

    def step(self):
        """Rows are committed by the estimator."""

    discard = step


class GlobalDualReference:
    """One tau for all, updated by the mean of G; later deposits of a window continue the pending copy."""

    has_rows = False
    has_rho = True

    def __init__(
        self, tau_init, optimizer="momentum", beta=0.9, betas=(0.9, 0.999), parametrization="linear", lr_switch=None
    ):
        self.optimizer, self.beta, self.betas = optimizer, beta, betas
        self.log = parametrization == "log"  # theta = log(1/tau) is updated; dF/dtheta = -tau dF/dtau
        self.lr_switch = lr_switch or (0.0, 1.0)
        self.committed = {"tau": tau_init, "m": 0.0, "v": 0.0, "t": 0}
        self.pending = None

    @property
    def tau(self):
        """The committed temperature."""
        return self.committed["tau"]

    def value(self, ref, row, column):
        """The shared tau: in training that of the latest deposit, elsewhere the committed one."""
        return (self.pending if self.pending and ref.train else self.committed)["tau"]

    def propose(self, ref, gradients, rows):
        """Continue the pending copy with one more mean gradient."""
        state = dict(self.pending or self.committed)
        bound, tau, lr = ref.hyper(0, "max_grad"), state["tau"], ref.hyper(0, "lr")
        gradient = sum(gradients.values()) / len(gradients)
        gradient = gradient if bound is None else clip(gradient, -bound, bound)
        gradient *= -tau if self.log else 1.0
        below, factor = self.lr_switch
        lr *= factor if tau <= below else 1.0
        t = state["t"] + 1
        m, v, move = moved(self, state["m"], state["v"], t, gradient)
        tau = math.exp(-(math.log(1 / tau) - lr * move)) if self.log else tau - lr * move
        tau = clip(tau, ref.hyper(0, "tau_min"), ref.hyper(0, "tau_max"))
        self.pending = {"tau": tau, "m": m, "v": v, "t": t}
        return []

    def step(self):
        """Promote the pending copy."""
        if self.pending is not None:
            self.committed, self.pending = self.pending, None

    def discard(self):
        """Discard the pending copy."""
        self.pending = None
