"""Estimators against the definitions of their methods in plain torch, which the pages of the papers show.

Losses, gradients and all state are equal over 30 steps with repeated and overlapping batches, some of which have two
calls, and with a resume of both in the middle.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest
import torch

import compopt
from compopt import rng
from tests.definitions.dcl import dcl
from tests.definitions.emc2 import EMC2
from tests.definitions.fastclip import FastCLIP
from tests.definitions.infonce import info_nce
from tests.definitions.isogclr import ISogCLR
from tests.definitions.memory import Memory
from tests.definitions.neuclip import NeuCLIP
from tests.definitions.sogclr import SogCLR
from tests.helpers import features, generator, near, through_a_file

N, BATCH, DIM, STEPS, RESUME = 20, 6, 5, 30, 14
TAU, DECAY, SEED = 0.2, 20, 3
DUAL = {"rho": 0.8, "lr": 0.01, "beta": 0.7, "tau_init": TAU, "tau_min": 0.18, "tau_max": 0.23, "max_grad": 2.0}
V3 = {"rho": 0.7, "lr": 0.02}
NETWORK = {"prototypes": 16, "lr": 0.1, "updates": 3, "restart_every": 7}


class Stateless:
    """Form of a definition that is a function."""

    def __init__(self, function):
        self.function = function

    def __call__(self, z1, z2, index):
        return self.function(z1, z2, index, TAU)

    def step(self):
        """Do nothing."""

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        """Do nothing."""


class FromStreams(EMC2):
    """Definition of EMC2 whose uniform numbers are those of the estimator's streams."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.t = self.window = 0

    def __call__(self, z1, z2, index):
        streams = rng.streams((SEED, self.t, self.window), torch.arange(len(index)), range(2))
        words = rng.bits(streams, 0, len(index)).T.view(2, len(index), -1)
        self.window += 1
        return super().__call__(z1, z2, index, high(words), rng.uniform(words, torch.float64))

    def step(self):
        words = rng.streams((), torch.arange(N)) + self.state["count"]
        super().step(high(rng.scramble_(words)))
        self.t, self.window = self.t + 1, 0

    def state_dict(self):
        return {**super().state_dict(), "t": torch.tensor(self.t)}

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.t = int(self.state.pop("t"))


def high(words):
    """Return the upper halves of words as uniform numbers in [0, 1)."""
    return (words.bitwise_right_shift(32) & 0xFFFFFFFF).double() / 2**32


def low_tau(dtype):
    """Return a temperature at which FastCLIP takes smaller steps, and NeuCLIP bounds the weights.

    In float32 the logits of that temperature have only six digits.
    """
    return 0.029 if dtype == torch.float64 else TAU


def fast_clip(dtype):
    est = compopt.FastCLIPEstimator(N, tau=low_tau(dtype), **V3, dtype=dtype)
    schedule = compopt.schedules.CosineGamma(est, decay_steps=DECAY)
    est.register_step_post_hook(lambda *_: schedule.load_state_dict({"t": est.t}))  # also after a resume
    return est


CASES = {
    "InfoNCE": (lambda dtype: Stateless(info_nce), lambda dtype: compopt.InfoNCEEstimator(TAU, dtype=dtype)),
    "DCL": (lambda dtype: Stateless(dcl), lambda dtype: compopt.DCLEstimator(TAU, dtype=dtype)),
    "SogCLR": (
        lambda dtype: SogCLR(N, 0.6, TAU, dtype),
        lambda dtype: compopt.SogCLREstimator(N, gamma=0.6, tau=TAU, dtype=dtype),
    ),
    "iSogCLR": (
        lambda dtype: ISogCLR(N, 0.6, **DUAL, dtype=dtype),
        lambda dtype: compopt.ISogCLREstimator(N, gamma=0.6, **DUAL, dtype=dtype),
    ),
    "FastCLIP v3": (lambda dtype: FastCLIP(N, low_tau(dtype), **V3, decay_steps=DECAY, dtype=dtype), fast_clip),
    "NeuCLIP": (
        lambda dtype: NeuCLIP(DIM, tau=low_tau(dtype), **NETWORK, dtype=dtype),
        lambda dtype: compopt.NeuCLIPEstimator(DIM, tau=low_tau(dtype), **NETWORK, dtype=dtype),
    ),
    "EMC2": (
        lambda dtype: FromStreams(N, TAU, 0.4, dtype),
        lambda dtype: compopt.EMC2Estimator(N, burn_in=0.4, tau=TAU, seed=SEED, dtype=dtype),
    ),
    "memory": (
        lambda dtype: Memory(DIM, 15, TAU, 12, dtype),
        lambda dtype: compopt.MemoryEstimator(DIM, 15, TAU, candidates=12, dtype=dtype),
    ),
}


def windows(name, dtype):
    """Yield the batches of each step: one, or in every third step two; every second batch repeats a sample.

    The batches of one step have common samples, except for NeuCLIP, whose queue replaces the features of samples that
    are evaluated again before a step; this is not in its definition.
    """
    draw = generator(1)
    for t in range(STEPS):
        order, window = torch.randperm(N, generator=draw), []
        for call in range(2 if t % 3 == 2 else 1):
            start = call * (BATCH if name == "NeuCLIP" else BATCH - 2)
            index = order[start : start + BATCH].clone()
            if t % 2:
                index[-1] = index[-2]
            window.append((*features(BATCH, DIM, 10 * t + call, dtype=dtype), index))
        yield window


def results(loss, z1, z2, index):
    """Return a loss and its gradients."""
    leaves = [z.clone().requires_grad_() for z in (z1, z2)]
    value = loss(*leaves, index)
    return value.detach(), *torch.autograd.grad(value, leaves)


def found(state, name):
    """Return the tensor with a name, at any depth of a state."""
    for key, value in state.items():
        if key == name and isinstance(value, torch.Tensor):
            return value
        if isinstance(value, dict) and (inner := found(value, name)) is not None:
            return inner
    return None


def states(name, definition, est):
    """Yield the names of all entries of the state, with their values in the definition and in the estimator."""
    own = definition.state_dict()
    if "count" in own:
        rows = est.read(torch.arange(N))
        assert rows["count"].tolist() == own["count"].tolist()
        seen = own["count"] > 0
        for key, column in {"m": "tau_exp_avg"}.items() | {(key, key) for key in ("log_u", "tau", "chain", "score")}:
            if key in own:
                yield key, own[key][seen], rows[column][seen] if column in rows else None
    state = est.state_dict()
    if name == "FastCLIP v3":
        yield "tau", own["dual"][0].exp(), est.temperature.tau
    if name == "NeuCLIP":
        for key, entry in {"W": "prototypes", "queue": "queue", "sums": "optimizer.prototypes.sum"}.items():
            yield key, own[key], found(state, entry)
    if name == "memory":
        yield "queue", own["queue"], found(state, "queue").flip(0)[:, -len(own["index"]) :]
        yield "index", own["index"], found(state, "keys")[0, -len(own["index"]) :]


def through(name, dtype):
    """Return, by name, all results and states of a run of the definition, and those of the estimator.

    Both are replaced in the middle by new ones with their states.
    """
    define, build = CASES[name]
    definition, est = define(dtype), build(dtype)
    wanted, got = defaultdict(list), defaultdict(list)
    for t, window in enumerate(windows(name, dtype)):
        if t == RESUME:
            definition, est = resumed(definition, define(dtype)), resumed(est, build(dtype))
        for call in window:
            both = zip(("loss", "g1", "g2"), results(definition, *call), results(est, *call), strict=True)
            for what, want, have in both:
                wanted[what].append(want), got[what].append(have)
        definition.step(), est.step()
        for what, want, have in states(name, definition, est):
            wanted[what].append(want), got[what].append(have)
    return wanted, got


def resumed(old, new):
    """Return a new object with the state of an old one, which a file has stored."""
    new.load_state_dict(through_a_file(old.state_dict()))
    return new


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("name", CASES)
def test_an_estimator_equals_its_definition(name, dtype):
    """All values of a kind are compared relative to the largest one of the run: losses are sums with cancellation."""
    wanted, got = through(name, dtype)
    rtol = {torch.float32: 1e-6, torch.float64: 1e-12}[dtype]
    assert wanted.keys() == got.keys()
    for what, values in wanted.items():
        want, have = (torch.cat([value.flatten() for value in each]).double() for each in (values, got[what]))
        near(have, want, rtol, what=what)


def test_definitions_are_short():
    files = [file for file in (Path(__file__).parent / "definitions").glob("*.py") if file.stem != "__init__"]
    lengths = {file.name: len(file.read_text().splitlines()) for file in files}
    assert len(lengths) == len(CASES) and max(lengths.values()) <= 60, lengths
