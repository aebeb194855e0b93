"""State is on the right device and results are the same for any default device and dtype of torch.

``meta`` stands for any device other than that of the features: tensors created there by accident have no values.
"""

from contextlib import contextmanager, nullcontext

import pytest
import torch
import torch.distributed as dist

import compopt
from tests import four
from tests.database import BY_NAME, DATABASE, MODES
from tests.helpers import assert_same_bits, batches, features, make, run, snapshot
from tests.pool import the_pool
from tests.samplers import both
from tests.test_shard_batches import batches_of, rows
from tests.training import micro_batches

N = 23


@contextmanager
def by_default():
    """Set the defaults globally, as a program does at its start."""
    torch.set_default_device("meta")
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)


elsewhere = pytest.mark.parametrize("context", [by_default, lambda: torch.device("meta")], ids=["default", "context"])
DATA = batches(N, 4, batch=8, dtype=torch.float32)


def built(info, mode):
    """Build an estimator; the user chooses the device of a tensor tau."""
    with torch.device("cpu") if "tensor-tau" in info.name else nullcontext():
        return make(info, mode, N, torch.float32)[0]


def life(info, mode, folder):
    """Run all operations of an estimator; return their results and its final state."""
    est, twin, trace = built(info, mode), built(info, mode), []
    for z1, z2, index in DATA[:3]:
        trace += run(est, z1, z2, index)
        est.step()
    twin.load_state_dict(est.state_dict())
    compopt.save(twin, folder)
    compopt.load(est, folder)
    if info.has_rows:
        est.prefetch(DATA[3][2])
        est.add_sample_group({"n": 4})
        trace.append(est.read(DATA[0][2])["count"])
    est.eval()
    trace += run(est, *DATA[3])
    est.train()
    trace += run(est, *DATA[3])
    est.step()
    state = {**snapshot(est, N), **est.state_dict()["rows"], **est.metrics}
    counters = {name: value.float() for name, value in state.items() if name.endswith(".step")}  # from torch.optim
    return dict(enumerate(trace)), {**state, **counters}


@elsewhere
@pytest.mark.covering()
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("info", DATABASE, ids=str)
def test_every_method(info, mode, context, tmp_path):
    usual = life(info, mode, tmp_path / "usual")
    with context():
        elsewhere = life(info, mode, tmp_path / "elsewhere")
    for expected, got in zip(usual, elsewhere, strict=True):
        assert_same_bits(expected, got)


@elsewhere
@pytest.mark.parametrize("kind", four.KINDS)
def test_objects_alone(kind, context):
    data = micro_batches(4, dtype=torch.float32)

    def trained():
        obj, twin = four.KINDS[kind](), four.KINDS[kind]()
        for x, _, index in data:
            four.call(obj, x, index)
            obj.step()
        twin.load_state_dict(obj.state_dict())
        return obj, twin

    usual, _ = trained()
    with context():
        found = trained()
    for obj in found:
        assert torch.equal(four.state(obj), four.state(usual))


@elsewhere
@pytest.mark.parametrize("replacement", [False, True])
def test_batches_of_shards(context, replacement):
    def epoch():
        return [rows(batch) for batch in batches_of(replacement=replacement)]

    usual = epoch()
    with context():
        assert epoch() == usual


@elsewhere
def test_curation(context):
    z1, z2 = features(50, 5, 0, dtype=torch.float32)

    def curated():
        est, keeper = compopt.DCLEstimator(), compopt.ScoreKeeper(50)
        keeper.attach(est)
        for _ in range(2):
            est(z1, z2, torch.arange(50, device="cpu"))
            est.step()
        before = compopt.curation.scores(keeper)
        sampler = compopt.samplers.ScoredSampler(keeper, warm_up=1, drawn=0.5, reference=before)
        found = compopt.curation.scores(keeper, since=before)
        epochs = torch.tensor([*sampler, *sampler], device="cpu")
        return {**found.columns(), "epochs": epochs}

    usual = curated()
    with context():
        found = curated()
    assert_same_bits(usual, found)


@elsewhere
@both
def test_samplers(make, context):
    z1, z2 = features(50, 5, 0, dtype=torch.float32)

    def epochs():
        sampler, batches = make(labels=torch.arange(50, device="cpu") // 2), []
        for _ in range(3):
            for batch in sampler:
                batches.append(batch)
                index = torch.tensor(batch, device="cpu")
                sampler.observe(index, z1[index], z2[index])
        sampler.refresh(lambda index: (z1[index], z2[index]), chunk_size=16)
        sampler.load_state_dict(sampler.state_dict())
        return batches + list(sampler)

    usual = epochs()
    with context():
        assert epochs() == usual


def on_ranks(group, folder, context):
    """Return the states of a rank after all operations in which ranks communicate."""
    own = slice(dist.get_rank(group), None, 2)
    with context():
        kept = {"offload": "disk", "offload_dir": folder / "rows"}
        estimators = [
            compopt.SogCLREstimator(N, process_group=group, shard=True),
            compopt.SogCLREstimator(N, process_group=group, **kept),
            compopt.NeuCLIPEstimator(4, prototypes=8, process_group=group),
        ]
        for number, est in enumerate(estimators):
            for (z1, z2, index), following in zip(DATA, [*DATA[1:], DATA[0]], strict=True):
                run(est, z1[own], z2[own], index[own])
                est.prefetch(following[2][own])
                est.step()
            compopt.save(est, folder / str(number))
            compopt.load(est, folder / str(number))
            if est.n:
                est.add_sample_group({"n": 3})
                est.read(DATA[0][2])
        states = [est.state_dict() for est in estimators]
    return [{**state["rows"], **state["extra"]["normalizer"]} for state in states]


@pytest.mark.distributed
def test_ranks(tmp_path):
    usual = the_pool().run(on_ranks, 2, tmp_path / "usual", nullcontext)
    elsewhere = the_pool().run(on_ranks, 2, tmp_path / "elsewhere", by_default)
    for expected, got in zip(usual, elsewhere, strict=True):
        for one, other in zip(expected, got, strict=True):
            assert_same_bits(one, other)


def test_a_temperature_without_a_value_says_so():
    with torch.device("meta"):
        tau = torch.tensor(0.1)
    est = built(BY_NAME["infonce"], "bimodal")
    for attempt in (lambda: compopt.FixedTemperature(tau), lambda: est(*DATA[0], tau=tau)):
        with pytest.raises(ValueError, match="tau is on the meta device.*device='cpu'"):
            attempt()


def test_a_network_with_a_default_dtype_of_half_precision():
    torch.set_default_dtype(torch.float16)
    try:
        loss = compopt.NeuCLIPEstimator(5)(*features(8, 5, 0, dtype=torch.float32), torch.arange(8))
    finally:
        torch.set_default_dtype(torch.float32)
    assert loss.dtype == torch.float32 and loss.isfinite()
