"""Schedules: a hyper-parameter as a function of the number of commits."""

import math

import pytest
import torch

import compopt
from compopt.schedules import CosineGamma, Schedule
from tests.database import BY_NAME
from tests.helpers import batches, group_key, near
from tests.reference import FixedReference, MovingAverageReference, Reference
from tests.test_agreement import compare_forward

N = 13


def gamma_of(est, k=0):
    """gamma of group k."""
    return est.sample_groups[k][group_key(est.sample_groups[k], "gamma")]


def cosine(t, steps, low):
    """DESIGN section 12."""
    return low + (1 - low) * (1 + math.cos(math.pi * min(1, t / steps))) / 2


@pytest.mark.parametrize("low", [0.2, 0.6])
def test_cosine_gamma(low):
    est = compopt.SogCLREstimator(N)
    schedule = CosineGamma(est, 10, gamma_min=low)
    assert gamma_of(est) == 1.0
    for t in range(1, 15):
        schedule.step()
        near(gamma_of(est), cosine(t, 10, low), 1e-12)
    near(gamma_of(est), low, 1e-12)


def test_cosine_gamma_defaults_to_02():
    est = compopt.SogCLREstimator(N)
    schedule = CosineGamma(est, decay_steps=2)
    for want in (0.6, 0.2, 0.2):
        schedule.step()
        near(gamma_of(est), want, 1e-12)


def test_every_group_is_scheduled():
    est = compopt.SogCLREstimator([{"n": 4, "gamma": 0.9}, {"n": 4}], gamma=0.5)
    schedule = CosineGamma(est, 4)
    schedule.step()
    assert gamma_of(est, 0) == gamma_of(est, 1) == pytest.approx(cosine(1, 4, 0.2))


def test_schedule_of_any_key():
    est = compopt.SogCLREstimator(N, tau=0.5)
    key = group_key(est.sample_groups[0], "tau")
    schedule = Schedule(est, key, lambda t: 0.5 / (1 + t))
    for t in range(1, 4):
        schedule.step()
        assert est.sample_groups[0][key] == pytest.approx(0.5 / (1 + t))


def test_an_unknown_key_is_refused():
    est = compopt.SogCLREstimator(N)
    with pytest.raises((KeyError, ValueError), match="gama"):
        Schedule(est, "gama", lambda t: 0.5)


def test_a_value_out_of_range_is_refused():
    """gamma outside (0, 1] is refused when it is set or, at the latest, when it is used."""
    est = compopt.SogCLREstimator(N)
    with pytest.raises(ValueError, match="gamma"):
        schedule = Schedule(est, group_key(est.sample_groups[0], "gamma"), lambda t: 1.0 if t == 0 else 1.5)
        schedule.step()
        est(*batches(N, 1, dtype=torch.float32)[0])


def test_the_schedule_takes_effect():
    est = compopt.SogCLREstimator(N, tau=0.1, dtype=torch.float64)
    schedule = CosineGamma(est, 5)
    ref = Reference([{"n": N, "tau": 0.1, "gamma": 1.0}], MovingAverageReference("none"), FixedReference())
    for t, (z1, z2, index) in enumerate(batches(N, 8, seed=3)):
        ref.groups[0]["gamma"] = cosine(t, 5, 0.2)
        compare_forward(BY_NAME["sogclr"], est, ref, z1, z2, index)
        est.step()
        ref.step()
        schedule.step()


def test_resume():
    est = compopt.SogCLREstimator(N)
    schedule = CosineGamma(est, 10)
    for _ in range(4):
        schedule.step()
    state, rows = schedule.state_dict(), est.state_dict()
    other = compopt.SogCLREstimator(N)
    resumed = CosineGamma(other, 10)
    other.load_state_dict(rows)
    resumed.load_state_dict(state)
    assert gamma_of(other) == gamma_of(est)
    schedule.step()
    resumed.step()
    assert gamma_of(other) == gamma_of(est)
    near(gamma_of(est), cosine(5, 10, 0.2), 1e-12)
    assert state == {**state}  # a plain dict
    import json

    assert json.loads(json.dumps(state)) == state, "small and plain, as torch's schedulers"


def test_a_schedule_of_a_bad_length_is_refused():
    est = compopt.SogCLREstimator(N)
    for steps in (0, -3):
        with pytest.raises(ValueError):
            CosineGamma(est, steps)
    with pytest.raises(ValueError):
        CosineGamma(est, 10, gamma_min=0.0)
