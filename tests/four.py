"""Small trainings, each with one of the four objects alone: the loss uses its values, the rest is plain torch."""

from __future__ import annotations

import torch
from torch.nn.functional import normalize

import compopt
from tests.training import DIM, N

POOL, TAU, RHO = 20, 0.5, 0.3
WORDS = normalize(torch.randn(POOL, DIM, generator=torch.Generator().manual_seed(7), dtype=torch.float64), dim=1)

KINDS = {
    "average": lambda **options: compopt.MovingAverageEstimator(N, gamma=0.5, **options),
    "dual": lambda **options: compopt.TemperatureDual(N, lr=0.02, tau_init=0.3, optimizer="adam", **options),
    "global dual": lambda **options: compopt.TemperatureDual(None, lr=0.02, tau_init=0.3, mode="global", **options),
    "network": lambda **options: compopt.NeuralNormalizer(DIM, 8, lr=0.1, updates=2, restart_every=2, **options),
    "chains": lambda **options: compopt.MCMCNegativeSampler(N, seed=1, **options),
}
WITH_ROWS = ["average", "dual", "chains"]
PLACES = [*((kind, None) for kind in KINDS), *((kind, place) for kind in WITH_ROWS for place in ("cpu", "disk"))]


def loss(obj, h1, h2, index):
    """Return the mean over the batch of a loss that uses the object's value for every sample."""
    unit, words = normalize(h1, dim=1), WORDS.to(h1)
    scores, positive = unit @ words.T / TAU, (unit * normalize(h2, dim=1)).sum(1) / TAU
    if isinstance(obj, compopt.MovingAverageEstimator):  # log of a mean that cannot be computed from one batch
        log_g = (positive + scores[:, 0]) / 2
        log_u = obj.update(log_g, index)
        return ((log_g.detach() - log_u).exp() * log_g).mean()
    if isinstance(obj, compopt.TemperatureDual):  # the worst of DIM errors, within a KL ball
        errors = (h1 - h2).square().tanh()
        own = None if obj.mode == "global" else index
        tau = obj.value(own).reshape(-1, 1).to(h1)
        scaled = errors.detach() / tau
        share = scaled.softmax(1)
        gradient = scaled.logsumexp(1) - torch.tensor(DIM).log() + RHO - (share * scaled).sum(1)
        new = obj.update(gradient, own).reshape(-1, 1).to(h1)
        return ((errors.detach() / new).softmax(1) * errors).sum(1).mean()
    if isinstance(obj, compopt.NeuralNormalizer):  # log-partition functions over the words
        log_g = scores.detach().logsumexp(1) - torch.tensor(POOL).log()
        alpha = obj.update(unit.detach(), log_g, TAU, words[index % POOL])
        return (((scores.detach() - alpha[:, None]).exp() * scores).mean(1) - positive).mean()
    drawn = obj.sample(scores.detach(), index, torch.arange(POOL))
    return ((drawn * scores).sum(1) - positive).mean()


def call(obj, x, index):
    """Call the object's operation on arbitrary numbers of shape ``(B, DIM)``."""
    if isinstance(obj, compopt.NeuralNormalizer):
        return obj.update(x, x[:, 0], TAU, x)
    if isinstance(obj, compopt.MCMCNegativeSampler):
        return obj.sample(x, index, torch.arange(DIM, device="cpu"))
    return obj.update(x[:, 0], index) if obj.n else obj.update(x[:, 0])


def state(obj):
    """Return all committed state in one float64 vector."""
    found = obj.state_dict()
    entries = {**found["rows"], **found["state"], "t": torch.tensor(found["t"])}
    return torch.cat([entries[name].cpu().double().flatten() for name in sorted(entries)])
