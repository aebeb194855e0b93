"""Pairwise sigmoid loss: its value and all gradients against the equation, in every mode and on several ranks."""

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

import compopt
from compopt.normalizers.sigmoid import SigmoidPairs
from tests.helpers import features, generator, near
from tests.pool import the_pool

BATCH, DIM = 7, 4
LABELS = torch.tensor([0, 0, 1, 2, 3, 3, 4])


def equation(views, kind, tau, bias, key=None):
    """Return Algorithm 1 of the paper without equal keys as negatives; the mean over all ordered pairs of views."""
    z = [torch.nn.functional.normalize(view, dim=1) for view in views]
    key, itself = torch.arange(BATCH) if key is None else key, torch.eye(BATCH, dtype=torch.bool)
    apart = key[:, None] != key
    losses = []
    for view in range(1 if kind == "forward" else len(z)):
        others = range(len(z)) if kind == "unimodal" else (1 - view,)
        logits = {other: z[view] @ z[other].T / tau + bias for other in others}
        negative = sum(-torch.nn.functional.logsigmoid(-x)[apart].sum() for x in logits.values())
        for other in others:
            if other != view:
                losses.append(negative - torch.nn.functional.logsigmoid(logits[other])[itself].sum())
    return sum(losses) / len(losses) / BATCH


def build(kind, tau=0.2, bias=-2.0, **options):
    mode = {"directions": kind} if kind == "forward" else {"mode": kind}
    return compopt.SigLIPEstimator(tau, bias, dtype=torch.float64, **mode, **options)


def all_gradients(est, z, **given):
    """Return the loss, and the gradients of views, of log(1 / tau) and of the bias."""
    est.temperature.log_inverse.grad = est.normalizer.bias.grad = None
    loss = est(*z, **given) if isinstance(z, tuple) else est(z, **given)
    loss.backward()
    leaves = [*z] if isinstance(z, tuple) else [z]
    return loss.detach(), *(x.grad for x in (*leaves, est.temperature.log_inverse, est.normalizer.bias))


@pytest.mark.parametrize("chunk_size", [3, pytest.param(None, marks=pytest.mark.full)])
@pytest.mark.parametrize("labels", [None, LABELS])
@pytest.mark.parametrize("kind", ["bimodal", "unimodal", "forward"])
def test_value_and_all_gradients(kind, labels, chunk_size):
    z = tuple(x.requires_grad_() for x in features(BATCH, DIM, seed=90))
    est = build(kind, chunk_size=chunk_size)
    t, b = (torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in (0.2, -2.0))
    theirs = equation(z, kind, t, b, labels)
    wanted = torch.autograd.grad(theirs, (*z, t, b))
    loss, *found = all_gradients(est, z, labels=labels)
    near(loss, theirs)
    for got, want in zip(found, (*wanted[:2], wanted[2] * -0.2, wanted[3]), strict=True):
        near(got, want)


def test_the_paper_counts_each_pair_once():
    """The paper's sum over all pairs, divided by the batch size; both directions have the same value and gradients."""
    z1, z2 = features(BATCH, DIM, seed=91)
    s = torch.nn.functional.normalize(z1, dim=1) @ torch.nn.functional.normalize(z2, dim=1).T
    sign = 2 * torch.eye(BATCH, dtype=torch.float64) - 1
    theirs = -torch.nn.functional.logsigmoid(sign * (s / 0.2 - 2.0)).sum() / BATCH
    found = [build(kind).feature_gradients(z1, z2) for kind in ("forward", "bimodal")]
    near(found[0][0], theirs)
    for one, other in zip(*found, strict=True):
        near(one, other)


def test_temperatures_and_biases_of_samples():
    """Each anchor has its own temperature and bias, in both directions; the first data set has another bias."""
    z = [x.requires_grad_() for x in features(BATCH, DIM, seed=93)]
    tau = torch.linspace(0.1, 0.5, BATCH, dtype=torch.float64).requires_grad_()
    parts = compopt.SigmoidNormalizer(-1.0), compopt.FixedTemperature(0.1)
    groups = {"sample_groups": [{"n": 3, "bias": -2.0}, {"n": 4}]}
    est = compopt.ContrastiveEstimator(*parts, multiply_tau=False, **groups)
    loss, bias = est(*z, torch.arange(BATCH), tau=tau), torch.tensor([-2.0] * 3 + [-1.0] * 4)[:, None]
    s = torch.nn.functional.normalize(z[0], dim=1) @ torch.nn.functional.normalize(z[1], dim=1).T
    sign = 2 * torch.eye(BATCH, dtype=torch.float64) - 1
    terms = [torch.nn.functional.logsigmoid(sign * (x / tau[:, None] + bias)).sum() for x in (s, s.T)]
    theirs = -sum(terms) / 2 / BATCH
    near(loss, theirs)
    leaves = [*z, tau]
    for got, want in zip(torch.autograd.grad(loss, leaves), torch.autograd.grad(theirs, leaves), strict=True):
        near(got, want)


def on_ranks(group, kind, sizes, views, labels, chunk_size):
    own = slice(sum(sizes[: dist.get_rank(group)]), sum(sizes[: dist.get_rank(group) + 1]))
    z = tuple(x[own].clone().requires_grad_() for x in views)
    est = build(kind, chunk_size=chunk_size, process_group=group)
    return all_gradients(est, z, labels=labels[own])


@pytest.mark.distributed
@pytest.mark.parametrize(
    "kind", ["unimodal", *(pytest.param(k, marks=pytest.mark.full) for k in ("bimodal", "forward"))]
)
def test_ranks(kind):
    """Feature gradients are those of the rank's part times K; parameter gradients are complete on every rank."""
    views = torch.randn(2, BATCH, DIM, generator=generator(94), dtype=torch.float64)
    (whole,) = the_pool().run(on_ranks, 1, kind, [BATCH], views, LABELS, None)
    parts = the_pool().run(on_ranks, 3, kind, [2, 0, 5], views, LABELS, 2)
    for part in parts:
        for at in (0, -2, -1):
            near(part[at], whole[at], 1e-11)
    for at in range(1, len(whole) - 2):
        near(torch.cat([part[at] for part in parts], dim=whole[at].dim() - 2) / 3, whole[at], 1e-10)


class Largest(TorchDispatchMode):
    """Dispatch mode that records the bytes of the largest tensor that an operation returns."""

    nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        for value in found if isinstance(found, tuple | list) else [found]:
            self.nbytes = max(self.nbytes, value.nbytes if isinstance(value, torch.Tensor) else 0)
        return found


def largest(group, kind, chunk_size, labelled):
    size, ranks = 400 // dist.get_world_size(group), dist.get_world_size(group)
    z = torch.randn(2, size, DIM, dtype=torch.float64, requires_grad=True)
    est = build(kind, chunk_size=chunk_size, process_group=group)
    with Largest() as found:
        est(*z, labels=torch.arange(size) // 2 if labelled else None).backward()
    return found.nbytes, size * ranks


@pytest.mark.distributed
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", ["bimodal", "unimodal", pytest.param("forward", marks=pytest.mark.full)])
def test_no_tensor_is_larger_than_a_chunk_of_rows(kind, ranks):
    """Memory is O(chunk_size x B), for B samples on all ranks; the features of all ranks are as large here."""
    views = 2 if kind == "unimodal" else 1
    for labelled in (False, True):
        for nbytes, B in the_pool().run(largest, ranks, kind, 8, labelled):
            assert nbytes <= 8 * 8 * B * views
    (nbytes, B), *_ = the_pool().run(largest, ranks, kind, None, False)
    assert nbytes == 8 * B * B * views // ranks  # of up to 1,024 rows


def without_gradients(group, views):
    """Return a validation loss under no_grad, with a gradient function that cannot be called."""
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(SigmoidPairs, "gradients", None)
        return build("bimodal", process_group=group)(*views)


@pytest.mark.distributed
def test_a_validation_computes_no_gradients():
    one, other = the_pool().run(without_gradients, 2, features(BATCH, DIM, seed=95))
    near(one, other)


def test_the_bias_is_learned_stored_and_shown():
    est, other = (compopt.SigLIPEstimator(bias=b) for b in (-5.0, -3.0))
    assert "bias: -5 (learned)" in repr(est)
    optimizer = torch.optim.SGD(est.parameters(), lr=1.0)
    est.attach(optimizer)
    est(*torch.randn(2, 6, 4)).backward()
    before = est.normalizer.bias.item()
    optimizer.step()
    assert est.normalizer.bias.item() != before and est.t == 0  # without rows there is no deposit to commit
    other.load_state_dict(est.state_dict())
    assert torch.equal(other.normalizer.bias, est.normalizer.bias)
    assert compopt.as_module(est).state_dict().keys() >= {"normalizer.bias", "temperature.log_inverse"}


def test_what_is_refused():
    z = torch.randn(2, 4, 3)
    with pytest.raises(ValueError, match="has the batch alone as candidates"):
        compopt.SigLIPEstimator()(*z, negatives=z[0])
    with pytest.raises(ValueError, match="a sigmoid per pair has none"):
        compopt.SigLIPEstimator(pairs=compopt.PairPolicy(hardness=1.0))
    with pytest.raises(ValueError, match="estimates no log-normalizer"):
        compopt.diagnostics.normalizer_error(compopt.SigLIPEstimator(), *z, batch_size=2)
    free = compopt.SigmoidNormalizer()
    with pytest.raises(ValueError, match="TemperatureDual requires normalised"):
        compopt.ContrastiveEstimator(free, compopt.TemperatureDual(4, rho=0.1))
    assert compopt.ContrastiveEstimator(free, compopt.FixedTemperature(0.1)).normalizer is free  # it can still be used
    with pytest.raises(TypeError, match="bias must be a number"):
        compopt.SigLIPEstimator(bias="-10")
