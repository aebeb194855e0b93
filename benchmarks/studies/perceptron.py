"""Ablations of NeuCLIP's Tables 14 to 16: another objective of the network, and a perceptron instead of prototypes."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import torch
from torch import Tensor
from torch.nn.functional import normalize

import compopt
from compopt import functional as F
from compopt.estimator.call import Call, Estimate, Setting
from compopt.estimator.groups import SampleGroups
from compopt.normalizers.queue import empty_ring, push
from recipes.methods import DIM, METHODS


class AblationNormalizer(compopt.Normalizer):
    """Network that predicts log-normalizers, trained by autograd; bimodal, one process, one call per step.

    Args:
        dim: of the features.
        width: prototypes, or hidden units of the perceptron, ``l_i = 1/tau_i (b + sum_k v_k relu(<w_k, e_i> + c_k))``.
        lr, updates: of AdaGrad; steps per batch.
        restart_every: calls between restarts of prototypes.
        objective: ``"unified"`` as the library's, or ``"separate"``: ``1/(2B) sum_i (alpha_i - log ghat_i)^2``.
        architecture: ``"prototype"`` or ``"mlp"``.
    """

    def __init__(
        self,
        dim: int,
        width: int,
        lr: float,
        updates: int,
        restart_every: int | None,
        objective: str,
        architecture: str,
    ) -> None:
        super().__init__(None, {})
        self.dim, self.width, self.lr, self.updates, self.restart_every = dim, width, lr, updates, restart_every
        self.objective, self.architecture, self.calls = objective, architecture, 0

    def check(self, group: object) -> None:
        """It has no hyper-parameters that groups could change."""

    def joined(self, groups: SampleGroups, setting: Setting) -> None:
        super().joined(groups, setting)
        self.part = setting.ranks.part(self.width)
        self.ring = empty_ring(2, self.width, self.dim, self.part, torch.float32)
        self.weights = [torch.zeros(2, self.width, self.dim)]
        if self.architecture == "mlp":
            generator = torch.Generator().manual_seed(0)
            bounds = {(2, self.width, self.dim): self.dim, (2, 1, self.width): self.dim, (2, self.width, 1): self.width}
            bounds[(2, 1, 1)] = self.width
            self.weights = [
                ((2 * torch.rand(shape, dtype=torch.float64, generator=generator) - 1) / bound**0.5).float()
                for shape, bound in bounds.items()
            ]
        self.optimizer = torch.optim.Adagrad([w.requires_grad_() for w in self.weights], lr=self.lr)

    def predict(self, z: Tensor, positive: Tensor, tau: float | Tensor) -> Tensor:
        """Log-normalizers ``(B, 2)`` of the anchors ``z`` ``(2, B, d)``, whose positives are ``(B, 2)``."""
        if self.architecture == "mlp":
            w, c, v, b = self.weights
            return ((((z @ w.mT + c).relu() @ v + b)[..., 0]).T - positive) / tau
        logits = z @ normalize(self.weights[0], dim=2).mT / tau
        active = self.ring["queue_active"]
        return (logits.masked_fill(~active, -torch.inf).logsumexp(2) - active.sum().log()).T - positive / tau

    def estimate(self, call: Call) -> Estimate:
        z, positive = torch.stack(call.batch.features), call.pairs.positive
        target, tau = call.pairs.log_ghat, call.tau
        if self.architecture == "prototype":
            weights = self.weights[0].detach()
            new, _ = push(
                {**self.ring, "prototypes": weights},
                z.flip(0),
                F.all_finite(z),
                self.part,
                self.calls,
                self.restart_every,
            )
            weights.copy_(new.pop("prototypes"))
            self.ring = new
        self.calls += 1
        with torch.enable_grad():
            for _ in range(self.updates):
                gap = target - self.predict(z, positive, tau)
                unified = tau * (gap.clamp(max=40.0).exp() - gap)
                loss = 2 * (unified if self.objective == "unified" else gap.square() / 2).mean()
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
        return Estimate(self.predict(z, positive, tau), target=target)

    def stored(self, rows: object, features: tuple[Tensor, Tensor], tau: float | Tensor, hyper: object) -> Tensor:
        positive = torch.linalg.vecdot(*features).unsqueeze(1)
        return self.predict(torch.stack(features), positive, tau)


def register() -> None:
    """Give the recipes' NeuCLIP the options ``objective`` and ``architecture``, in this process."""
    plain = METHODS["neuclip"]
    if "objective" in plain.defaults:
        return

    def build(n: int, mode: str, o: SimpleNamespace) -> compopt.ContrastiveEstimator:
        if (o.objective, o.architecture) == ("unified", "prototype"):
            return plain.build(n, mode, o)
        network = (DIM, o.prototypes, o.network_lr, o.updates, o.restart_every or None)
        normalizer = AblationNormalizer(*network, o.objective, o.architecture)
        return compopt.ContrastiveEstimator(normalizer, compopt.FixedTemperature(o.tau), mode=mode, **o.placement)

    options = {**plain.defaults, "objective": "unified", "architecture": "prototype"}
    METHODS["neuclip"] = replace(plain, build=build, defaults=options)
