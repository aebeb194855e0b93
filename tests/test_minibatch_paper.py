"""Ordered SGD: the step that the mini-batch paper analyses, and its toy problem of section 5.1."""

import math

import pytest
import torch
from torch.nn.functional import normalize

import compopt
from benchmarks.studies import osgd
from tests.helpers import near
from tests.samplers import B, N, ordered, table


def test_an_epoch_s_accumulated_gradient_is_that_of_the_hardest_batches():
    """The gradient is that of the mean loss of the q batches; candidates are scored with the current weights."""
    tau, x = 0.1, torch.stack(table(dtype=torch.float64))
    weight = torch.eye(x.shape[2], dtype=torch.float64).add(0.1).requires_grad_()
    sampler, est = ordered(tau=tau, dtype=torch.float64), compopt.InfoNCEEstimator(tau, multiply_tau=False)
    sampler.refresh(lambda index: tuple(x[:, index] @ weight.detach()))
    for batch in sampler:  # as docs/batches.md has it
        index = torch.tensor(batch)
        (est(*(x[:, index] @ weight), index) / len(sampler)).backward()
    z1, z2 = normalize(x @ weight, dim=2)

    def loss(batch):
        s = z1[batch] @ z2[batch].T / tau
        return (torch.logsumexp(s, 0) + torch.logsumexp(s, 1) - 2 * s.diagonal()).mean() / 2

    everything = torch.stack([loss(batch) for batch in sampler.random_batches(sampler.candidates, sampler.epoch)])
    (want,) = torch.autograd.grad(everything.topk(sampler.keep).values.mean(), weight)
    near(weight.grad, want, 1e-9)
    assert sampler.keep * B < N


def test_both_reach_the_optimum_of_the_toy_and_ordered_sgd_is_sooner():
    assert pytest.approx(1.253, abs=5e-4) == osgd.OPTIMUM
    ordered_steps, random_steps = (osgd.steps_to_optimum(0.1, candidates, 0) for candidates in (60, 1))
    assert 2 * ordered_steps < random_steps


def test_the_speeds_at_the_start_have_the_factor_of_theorem_6():
    """Compare the mean drift of a vector: ordered SGD takes both near pairs in turn, SGD any of the six batches."""
    angles = osgd.start(1e-4)
    every = torch.combinations(torch.arange(4))
    hardest = osgd.losses(angles, every).topk(2).indices
    fast, slow = (osgd.gradient(angles, batches)[0] for batches in (every[hardest], every))
    assert float(fast / slow) == pytest.approx(3 * (math.e**2 + 1) / (math.e**2 - 1), rel=1e-5)
