"""Estimators, and what holds them, in the workers of a DataLoader, forked and spawned."""

import copy
import hashlib
import io
import pickle
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.data import DataLoader, TensorDataset

import compopt
from tests.database import DATABASE
from tests.helpers import batches, bits, make, run, snapshot
from tests.helpers import train as trained
from tests.samplers import filled, ordered, spectral
from tests.samplers import train as observed

N = 13
STATES = ("fresh", "called", "pending", "attached")


def data(steps, seed=0):
    return batches(N, steps, seed=seed, dtype=torch.float32)


def in_state(est, state):
    """Bring a fresh estimator into a state; return it."""
    for number, batch in enumerate(data({"fresh": 0, "called": 1}.get(state, 2))):
        run(est, *batch)
        if not number:
            est.step()
    if state == "attached":
        est.attach(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]))
    return est


def of_kind(info, state):
    return in_state(make(info, "bimodal", N, dtype=torch.float32)[0], state)


def answer(est):
    """Return a digest of what an estimator holds, and of its training from here on; the estimator is unchanged."""
    est = copy.deepcopy(est)
    pending, before = est.pending, snapshot(est, N)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1)), *est.parameters()], lr=0.1)
    est.attach(optimizer)
    optimizer.step()
    trace = [*trained(est, data(2, seed=1)), *map(bits, before.values()), *map(bits, snapshot(est, N).values())]
    return pending, est.t, hashlib.sha256(b"".join(trace)).hexdigest()


# -- what a pickle refers to -------------------------------------------------------------------------------------


class Recorder(ForkingPickler):
    """Pickler for another process that records the memory of the tensors."""

    def __init__(self, file):
        super().__init__(file)
        self.memory = []

    def reducer_override(self, thing):
        if isinstance(thing, torch.Tensor):
            self.memory.append(StorageWeakRef(thing.untyped_storage()))
        return NotImplemented


def pickled(thing):
    """Return the pickle for another process, and the memory of its tensors."""
    file = io.BytesIO()
    pickler = Recorder(file)
    pickler.dump(thing)
    return file.getvalue(), pickler.memory  # without the pickler, which keeps all that it has pickled


def sent(thing):
    """Return a copy as another process receives it.

    A spawned process opens the memory of tensors after the pickle was made, so that none may be made for the pickle.
    """
    content, memory = pickled(thing)
    assert not [each for each in memory if each.expired()], "a tensor was made for the pickle, and is gone"
    return pickle.loads(content)


@pytest.mark.covering()
@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("info", DATABASE, ids=str)
def test_an_estimator_goes_on_in_another_process(info, state):
    est = of_kind(info, state)
    sent(est)  # and again, as in every epoch
    twin = sent(est)
    assert answer(twin) == answer(est) and twin.metrics.keys() == est.metrics.keys()


def alone():
    """Yield each object that may be used alone, with a commit and a deposit."""
    z, s, index = torch.randn(6, 4), torch.randn(6), torch.arange(6)
    calls = {
        compopt.MovingAverageEstimator(N): lambda est: est.update(s, index),
        compopt.TemperatureDual(N): lambda est: est.update(s, index),
        compopt.TemperatureDual(N, rho=0.5, mode="global"): lambda est: est.update(s, index),
        compopt.NeuralNormalizer(4, 8): lambda est: est.update(z, s, 0.1),
        compopt.MCMCNegativeSampler(N): lambda est: est.sample(torch.randn(6, 7), index, torch.arange(7) + 6),
        compopt.losses.RobustLoss(N): lambda est: est(s.clone().requires_grad_(), index).backward(),
    }
    for est, call in calls.items():
        call(est)
        est.step()
        call(est)
        yield est


def placed(**options):
    return in_state(compopt.SogCLREstimator(N, **options), "pending")


def encoders():
    est = placed()
    for dtype in (torch.float32, torch.bfloat16):  # with averages in float32
        encoder = compopt.MomentumEncoder(torch.nn.Linear(4, 4).to(dtype), decay=0.9)
        encoder.attach(est)
        encoder.update()
        yield encoder


def holders():
    """Yield objects that hold estimators or other state; data sets and collate functions may hold these."""
    est = placed(offload="cpu")
    est.prefetch(torch.arange(4))
    est_of_scores, scored = compopt.recommended(4, n=N, batch_size=6), compopt.ScoreKeeper(N)
    scored.attach(est_of_scores)
    in_state(est_of_scores, "pending")
    learned = compopt.InfoNCEEstimator(tau=0.1, learn_tau=True, multiply_tau=False)
    items = compopt.data.Indexed(TensorDataset(torch.randn(N, 3)))
    yield from (est, scored, items, compopt.samplers.ScoredSampler(scored), compopt.schedules.CosineGamma(est, 10))
    yield from (compopt.as_module(in_state(learned, "pending"), state=state) for state in (True, False))
    yield est.prefetch(DataLoader(items, batch_size=4))
    for sampler in (filled(spectral), filled(ordered)):
        observed(sampler, 3)
        yield sampler


@pytest.mark.parametrize("things", [alone, encoders, holders])
def test_other_objects_go_to_another_process(things):
    for thing in things():
        assert type(sent(thing)) is type(thing)


@pytest.mark.parametrize("options", [{}, {"offload": "cpu"}])
def test_another_process_shares_the_rows(options):
    est = placed(**options)
    twin = sent(est)
    trained(est, data(2, seed=3))
    est.normalizer._table.at_rest()
    assert bits(twin.read(torch.arange(N))["log_u"]) == bits(est.read(torch.arange(N))["log_u"]) and twin.t < est.t


# -- real workers --------------------------------------------------------------------------------------------------


class Answers(torch.utils.data.Dataset):
    """The answers of estimators, as given by a worker."""

    def __init__(self, estimators):
        self.estimators = estimators

    def __len__(self):
        return len(self.estimators)

    def __getitem__(self, at):
        return answer(self.estimators[at])


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_workers(method):
    """One estimator of each pair of normalizer and temperature, the states in turn."""
    kinds = {tuple(type(part) for part in make(info, "bimodal", N)[0]._objects().values()): info for info in DATABASE}
    ests = [of_kind(info, STATES[at % len(STATES)]) for at, info in enumerate(kinds.values())]
    loader = DataLoader(Answers(ests), batch_size=None, num_workers=1, multiprocessing_context=method)
    assert list(map(tuple, loader)) == list(map(answer, ests))
