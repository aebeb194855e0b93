"""Ordered SGD: the toy problem of section 5.1 of the mini-batch paper."""

import math

import pytest
import torch

from benchmarks.studies import osgd


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
