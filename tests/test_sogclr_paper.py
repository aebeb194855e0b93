"""SogCLR is the paper's: equations 9 and 10 written out, while features drift and every u is out of date."""

import pytest
import torch

import compopt
from tests.database import MODES
from tests.helpers import features, near, run
from tests.reference import LiteralSogCLR

N, BATCH, DIM, TAU = 13, 6, 5, 0.2


def drifting(steps, seed=0):
    """Batches of one data set whose features move by a fifth between two calls."""
    generator = torch.Generator().manual_seed(seed)
    z1, z2 = features(N, DIM, seed)
    for _ in range(steps):
        index = torch.randperm(N, generator=generator)[:BATCH]
        yield z1[index], z2[index], index
        z1, z2 = (z + 0.2 * torch.randn(z.shape, generator=generator, dtype=z.dtype) for z in (z1, z2))


@pytest.mark.parametrize("gamma", [0.3, 0.8, 1.0])
@pytest.mark.parametrize("mode", MODES)
def test_equations_9_and_10(mode, gamma):
    paper = LiteralSogCLR(N, gamma, TAU, two_way=mode == "bimodal")
    est = compopt.SogCLREstimator(N, gamma=gamma, tau=TAU, mode=mode, dtype=torch.float64)
    for z1, z2, index in drifting(15):
        _, g1, g2 = run(est, z1, z2, index)
        est.step()
        for got, want in zip((g1, g2), paper.gradients(z1, z2, index), strict=True):
            near(got, want, 1e-12)
    seen = est.read(torch.arange(N))
    near(seen["log_u"].exp().T[:, seen["count"] > 0], paper.u[:, seen["count"] > 0], 1e-12)


def surrogate(z1, z2, log_u, references, tau):
    """What is differentiated, u held as estimated: by anchor ``tau g_i / u_i``, and the positive where it is outside.

    g_i compares with the positive where the reference is "positive"; where it is "none" the outer function does.
    """
    a, b = (z / z.norm(dim=1, keepdim=True) for z in (z1, z2))
    outside = torch.tensor([reference == "none" for reference in references])
    off = 1 - torch.eye(len(a), dtype=a.dtype)
    positive, total = (a * b).sum(1), 0.0
    for direction, s in enumerate((a @ b.T, b @ a.T)):
        inner = torch.where(outside[:, None], s, s - positive[:, None])
        g = (torch.exp(inner / tau) * off).sum(1) / off.sum(1)
        held = tau.detach() * g / log_u[:, direction].exp()
        total = total + (held - torch.where(outside, positive, 0) + tau * log_u[:, direction]).mean() / 2
    return total


def test_sample_groups_of_different_reference():
    """Every anchor's positive has the weight of its own group; so has the temperature's gradient."""
    tau = torch.tensor(TAU, dtype=torch.float64, requires_grad=True)
    groups = [{"n": 6, "reference": "none"}, {"n": N - 6, "reference": "positive"}]
    est = compopt.SogCLREstimator(groups, gamma=0.5, tau=tau, dtype=torch.float64)
    apart = 0.0
    for z1, z2, index in drifting(10, seed=1):
        tau.grad = None
        _, g1, g2 = run(est, z1, z2, index)
        est.step()
        z1, z2, leaf = z1.clone().requires_grad_(), z2.clone().requires_grad_(), tau.detach().clone().requires_grad_()
        references = ["none" if i < 6 else "positive" for i in index.tolist()]
        objective = surrogate(z1, z2, est.read(index)["log_u"], references, leaf)
        want1, want2, want_tau = torch.autograd.grad(objective, (z1, z2, leaf))
        near(g1, want1, 1e-12)
        near(g2, want2, 1e-12)
        near(tau.grad, want_tau, 1e-11)
        other = surrogate(z1, z2, est.read(index)["log_u"], ["positive"] * BATCH, leaf)
        apart = max(apart, float((torch.autograd.grad(other, z1)[0] - want1).norm() / want1.norm()))
    assert apart > 0.1  # the references can be told apart


def equation_14(z1, z2, average):
    """iSogCLR's gradient of the model at one temperature; ``average``: by direction, what ``g_i`` is divided by."""
    z1, z2 = (z.clone().requires_grad_() for z in (z1, z2))
    a, b = (z / z.norm(dim=1, keepdim=True) for z in (z1, z2))
    off, positive = 1 - torch.eye(len(a), dtype=a.dtype), (a * b).sum(1, keepdim=True)
    inner = [(torch.exp((s - positive) / TAU) * off).sum(1) / off.sum(1) for s in (a @ b.T, b @ a.T)]  # eq. 11
    held = [average(direction, g.detach()) for direction, g in enumerate(inner)]
    total = sum((TAU * g / s).mean() / 2 for g, s in zip(inner, held, strict=True))
    return torch.cat(torch.autograd.grad(total, (z1, z2)))


@pytest.mark.parametrize("gamma", [0.3, 0.8])
def test_isogclr_divides_by_the_updated_average(gamma):
    """Eq. 13 and 14 print the previous one. Over features that drift that is another gradient."""
    est = compopt.ISogCLREstimator(N, gamma=gamma, rho=0.0, lr=0.0, tau_init=TAU, dtype=torch.float64)
    seen, apart = torch.zeros(N, dtype=torch.bool), []
    for z1, z2, index in drifting(25):
        before = est.read(index)["log_u"].exp()
        got = torch.cat(run(est, z1, z2, index)[1:])
        est.step()
        after = est.read(index)["log_u"].exp()
        near(got, equation_14(z1, z2, lambda direction, g, after=after: after[:, direction]), 1e-12)
        if seen[index].all():
            printed = equation_14(z1, z2, lambda direction, g, before=before: before[:, direction])
            apart.append(float((printed - got).norm() / got.norm()))
            updated = equation_14(
                z1,
                z2,
                lambda direction, g, before=before: (1 - gamma) * before[:, direction] + gamma * g,  # eq. 12
            )
            near(got, updated, 1e-12)
        seen[index] = True
    assert len(apart) > 10 and torch.tensor(apart).median() > 0.5
