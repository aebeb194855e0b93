"""SupConLoss against its equation in float64: modes, chunks, ranks, and arguments that are refused."""

import pytest
import torch
import torch.distributed as dist

from compopt.losses import SupConLoss
from tests.helpers import features, near
from tests.pool import the_pool
from tests.reference import policies

LABELS = torch.tensor([0, 0, 1, 1, 1, 2, 3, 3])


def written_out(z1, z2, tau, mode, normalize=True):
    """The equation of the docstring, for autograd."""
    if mode == "unimodal" and normalize:
        return policies.supervised(torch.cat([z1, z2]), LABELS.repeat(2), tau)
    a, b = (torch.nn.functional.normalize(z) if normalize else z for z in (z1, z2))
    terms = []
    for x, y in ((a, b), (b, a)) if mode == "bimodal" else ((torch.cat([a, b]),) * 2,):
        own = LABELS.repeat(len(x) // len(LABELS))
        s, positive = x @ y.T / tau, own[:, None] == own
        if mode == "unimodal":
            itself = torch.eye(len(x), dtype=torch.bool)
            s, positive = s.masked_fill(itself, -torch.inf), positive & ~itself
        log_prob = (s - s.logsumexp(1, keepdim=True)).masked_fill(~positive, 0)
        terms.append(-log_prob.sum(1) / positive.sum(1))
    return torch.cat(terms).mean()


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("chunk_size", [None, 3])
@pytest.mark.parametrize("tau", [0.02, 0.7])
@pytest.mark.parametrize("mode", ["unimodal", "bimodal"])
def test_the_equation(mode, tau, chunk_size, normalize):
    z = [x.requires_grad_() for x in features(8, 4, seed=30)]
    loss = SupConLoss(tau, mode, normalize, chunk_size)(*z, labels=LABELS)
    theirs = written_out(*z, tau, mode, normalize)
    near(loss, theirs)
    for got, want in zip(torch.autograd.grad(loss, z), torch.autograd.grad(theirs, z), strict=True):
        near(got, want, 1e-9)


def on_ranks(group, mode, sizes, z, chunk_size):
    """Return loss and gradients of this rank's part of the batch."""
    rank = dist.get_rank(group)
    own = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
    leaves = [x[own].clone().requires_grad_() for x in z]
    loss = SupConLoss(0.1, mode, chunk_size=chunk_size, process_group=group)(*leaves, labels=LABELS[own])
    loss.backward()
    return loss.detach(), *(x.grad for x in leaves)


@pytest.mark.distributed
@pytest.mark.parametrize("sizes, chunk_size", [([3, 4, 1], 2), ([0, 8], None)])
@pytest.mark.parametrize("mode", ["unimodal", "bimodal"])
def test_ranks(mode, sizes, chunk_size):
    z = features(8, 4, seed=31)
    ((loss, *gradients),) = the_pool().run(on_ranks, 1, mode, [8], z, None)
    parts = the_pool().run(on_ranks, len(sizes), mode, sizes, z, chunk_size)
    for part in parts:
        near(part[0], loss, 1e-11)
    for at, want in enumerate(gradients, start=1):
        near(torch.cat([part[at] for part in parts]) / len(sizes), want, 1e-10)


def differing(group):
    """Return the error of ranks with different temperatures."""
    loss = SupConLoss(0.1 + dist.get_rank(group), process_group=group)
    with pytest.raises(ValueError) as caught:
        loss(*torch.randn(2, 4, 3), labels=torch.arange(4))
    return str(caught.value)


@pytest.mark.distributed
def test_ranks_that_differ_are_told_so():
    assert all("SupConLoss(tau=0.1," in message for message in the_pool().run(differing, 2))


def test_half_precision_and_bad_features():
    z1, z2 = (z.bfloat16() for z in features(8, 4, seed=32))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = SupConLoss()(z1.requires_grad_(), z2, torch.arange(8), labels=LABELS)
    near(loss.detach(), SupConLoss()(z1.detach().float(), z2.float(), labels=LABELS), 1e-6)
    loss.backward()
    assert loss.dtype == torch.float32 and z1.grad.dtype == torch.bfloat16
    z2[3, 1] = torch.inf
    assert SupConLoss()(z1, z2, labels=LABELS).isnan()


@pytest.mark.parametrize(
    "options, message",
    [
        ({"tau": 0.0}, "tau must be greater than 0"),
        ({"mode": "both"}, "mode must be one of"),
        ({"chunk_size": 0}, "chunk"),
    ],
)
def test_options_that_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        SupConLoss(**options)


def test_calls_that_are_refused():
    z = torch.randn(2, 4, 3)
    with pytest.raises(TypeError, match="labels"):
        SupConLoss()(*z)
    with pytest.raises(ValueError, match="labels has 3 entries for a batch of 4 samples"):
        SupConLoss()(*z, labels=torch.arange(3))
    with pytest.raises(ValueError, match="z1 and z2 must have the same shape"):
        SupConLoss()(z[0], z[1, :2], labels=torch.arange(4))
