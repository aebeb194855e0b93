"""Schedules: a hyper-parameter as a function of the number of commits."""

import json
import math

import pytest
import torch

import compopt
from compopt.schedules import CosineGamma, Schedule
from tests.database import BY_NAME
from tests.helpers import batches, whole
from tests.reference import FixedReference, MovingAverageReference, Reference
from tests.test_agreement import compare_forward

N = 13


def gammas(est):
    return [group["gamma"] for group in est.sample_groups]


def cosine(t, steps, low=0.2):
    """Return the cosine schedule of gamma, DESIGN section 12."""
    return low + (1 - low) * (1 + math.cos(math.pi * min(1, t / steps))) / 2


@pytest.mark.parametrize("options", [{}, {"gamma_min": 0.6}])
def test_cosine_gamma_in_every_group(options):
    est = compopt.SogCLREstimator([{"n": 4, "gamma": 0.9}, {"n": 4}], gamma=0.5)
    schedule = CosineGamma(est, 10, **options)
    for t in range(15):
        assert gammas(est) == [pytest.approx(cosine(t, 10, *options.values()), rel=1e-12)] * 2
        schedule.step()


def test_a_schedule_of_any_key():
    est = compopt.SogCLREstimator(N, tau=0.5)
    schedule = Schedule(est, "tau", lambda t: 0.5 / (1 + t))
    for t in range(1, 4):
        schedule.step()
        assert est.sample_groups[0]["tau"] == pytest.approx(0.5 / (1 + t))


@pytest.mark.parametrize(
    "build, message",
    [
        (lambda est: CosineGamma(est, -3), "decay_steps"),
        (lambda est: CosineGamma(est, 10, gamma_min=0.0), "gamma_min"),
        (lambda est: Schedule(est, "gamma", lambda t: 1.5) and est(*torch.randn(2, 4, 3), torch.arange(4)), "gamma"),
    ],
)
def test_a_bad_schedule_is_refused(build, message):
    """Reject values out of range when they are used; other mistakes are tested in tests/test_bad_input.py."""
    with pytest.raises(ValueError, match=message):
        build(compopt.SogCLREstimator(N))


def test_a_value_that_one_group_refuses_changes_no_group():
    est = compopt.ISogCLREstimator([{"n": 4}, {"n": 4, "tau_max": 0.1}], tau_init=0.05)
    schedule = Schedule(est, "tau_init", lambda t: 0.05 if t == 0 else 0.3)
    with pytest.raises(ValueError, match="tau_init"):
        schedule.step()
    assert [group["tau_init"] for group in est.sample_groups] == [0.05, 0.05] and schedule.t == 0


def test_the_schedule_takes_effect():
    est = compopt.SogCLREstimator(N, tau=0.1, dtype=torch.float64)
    schedule = CosineGamma(est, 5)
    ref = Reference([{"n": N, "tau": 0.1, "gamma": 1.0}], MovingAverageReference("none"), FixedReference())
    for t, (z1, z2, index) in enumerate(batches(N, 8, seed=3)):
        ref.groups[0]["gamma"] = cosine(t, 5)
        compare_forward(BY_NAME["sogclr"], est, ref, z1, z2, index)
        for each in (est, ref, schedule):
            each.step()


def test_resume():
    est, other = compopt.SogCLREstimator(N), compopt.SogCLREstimator(N)
    schedule, resumed = CosineGamma(est, 10), CosineGamma(other, 10)
    for _ in range(4):
        schedule.step()
    resumed.load_state_dict(json.loads(json.dumps(schedule.state_dict())))  # small and plain, like torch's
    assert gammas(other) == gammas(est)
    for each in (schedule, resumed):
        each.step()
    assert gammas(other) == gammas(est) == [pytest.approx(cosine(5, 10), rel=1e-12)]


@pytest.mark.parametrize("t", [-3, 1.5, None, True, "7"])
def test_a_refused_state_leaves_schedule_and_groups_as_they_were(t):
    schedule = CosineGamma(compopt.SogCLREstimator(N), 10)
    schedule.step()
    before = whole(schedule)
    with pytest.raises((TypeError, ValueError), match="t of the checkpoint must be"):
        schedule.load_state_dict({"t": t})
    with pytest.raises(ValueError, match="lacks t"):
        schedule.load_state_dict({})
    assert whole(schedule) == before


def test_a_function_that_raises_leaves_the_step_as_it_was():
    est = compopt.SogCLREstimator(N)
    schedule = Schedule(est, "gamma", lambda t: 1 / (2 - t))
    schedule.step()
    for call in (schedule.step, lambda: schedule.load_state_dict({"t": 2})):
        with pytest.raises(ZeroDivisionError):
            call()
        assert schedule.t == 1 and gammas(est) == [1.0]
