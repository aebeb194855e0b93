"""EMC2: features from outside the batch against the reference; metrics, options and invalid input."""

import pickle
import warnings

import pytest
import torch
from torch.nn.functional import normalize

import compopt
from tests.bits import bits
from tests.database import MODES, dual_options
from tests.helpers import batches, call, features, near, run, through_a_file
from tests.reference import DatasetMCMCReference, DualReference, FixedReference, MCMCReference, Reference
from tests.test_chains import data_set

N = 13
TAU = 0.2


# -- features from outside the batch -------------------------------------------------------------------------------


class Bank:
    """Features of a whole data set as leaf tensors; records the calls."""

    def __init__(self, n, dim, mode, dtype=torch.float64):
        z1, z2 = features(n, dim, 77)
        self.leaves = [z.to(dtype).requires_grad_() for z in (z1, z2)]
        self.unimodal, self.calls = mode == "unimodal", []

    def __call__(self, index):
        self.calls.append(index)
        first, second = (z[index] for z in self.leaves)
        return first if self.unimodal else (first, second)

    def one(self, sample):
        """Return the unit features of both modalities of one sample, for the reference."""
        return [z[sample] / z[sample].norm() for z in (self.leaves if not self.unimodal else self.leaves[:1] * 2)]

    def take_gradients(self):
        gradients = [torch.zeros_like(z) if z.grad is None else z.grad for z in self.leaves]
        for z in self.leaves:
            z.grad = None
        return torch.stack(gradients)


def same_call(est, ref, bank, want_bank, batch, step):
    """Compare the loss and the gradients of a call, including those of encoded features, with the reference."""
    got, want = run(est, *batch, encode=bank), ref.forward(*batch, encode=want_bank.one)
    for name, a, b in zip(("loss", "g1", "g2"), got, want, strict=True):
        near(a, b, what=f"{name} of step {step}")
    near(bank.take_gradients(), want_bank.take_gradients(), atol=1e-12, what=f"bank of step {step}")


def same_rows(est, ref, step):
    """Commit two of every three calls, and compare the rows with the reference."""
    if step % 3 != 1:
        est.step()
        ref.step()
    seen = [i for i in range(N) if ref.visits(i, 0)]
    rows = est.read(torch.tensor(seen))
    for name in ("chain", "score"):
        near(rows[name], torch.tensor([ref.read(i)[name] for i in seen], dtype=torch.float64), what=name)


@pytest.mark.covering()
@pytest.mark.parametrize("dual", [False, True])
@pytest.mark.parametrize("multiply_tau", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_encoded_samples_against_the_twin(mode, multiply_tau, dual):
    """Compare loss, gradients of batch and bank, and rows; the bank differs from the batches, as in training."""
    bank, want_bank = Bank(N, 4, mode), Bank(N, 4, mode)
    sampler = compopt.MCMCNegativeSampler(N, burn_in=0.3)
    temperature = compopt.TemperatureDual(N, **dual_options(TAU)) if dual else compopt.FixedTemperature(TAU)
    est = compopt.ContrastiveEstimator(
        sampler, temperature, mode=mode, multiply_tau=multiply_tau, dtype=torch.float64, chunk_size=5 if dual else None
    )
    groups = [{"n": N, "tau": TAU, **dual_options(TAU)}]
    beside = DualReference("momentum", 0.9) if dual else FixedReference()
    ref = Reference(groups, MCMCReference(0.3), beside, mode, multiply_tau)
    asked = 0
    for step, (z1, z2, index) in enumerate(batches(N, steps=25, batch=5, seed=3)):
        same_call(est, ref, bank, want_bank, (z1, z2, index), step)
        same_rows(est, ref, step)
        assert len(bank.calls) <= step + 1, "more than one call per forward"
        if len(bank.calls) > asked:
            asked = len(bank.calls)
            last = bank.calls[-1].tolist()
            assert bank.calls[-1].dtype == torch.int64 and bank.calls[-1].device.type == "cpu"
            assert len(set(last)) == len(last) and not set(last) & set(index.tolist())
    assert asked > 10


@pytest.mark.covering()
@pytest.mark.parametrize("dual", [False, True])
@pytest.mark.parametrize("draws", [None, 7])
@pytest.mark.parametrize("burn_in", [0, 0.5, 900])
@pytest.mark.parametrize("mode", MODES)
def test_proposals_from_the_data_set_against_the_twin(mode, burn_in, draws, dual):
    """Compare loss, gradients of batch and bank, and rows, over windows of several calls."""
    bank, want_bank = Bank(N, 4, mode), Bank(N, 4, mode)
    sampler = compopt.MCMCNegativeSampler(N, burn_in=burn_in, proposals="dataset", draws=draws, seed=3)
    temperature = compopt.TemperatureDual(N, **dual_options(TAU)) if dual else compopt.FixedTemperature(TAU)
    est = compopt.ContrastiveEstimator(sampler, temperature, mode=mode, dtype=torch.float64)
    beside = DualReference("momentum", 0.9) if dual else FixedReference()
    twin = DatasetMCMCReference(N, burn_in, seed=3, draws=draws)
    ref = Reference([{"n": N, "tau": TAU, **dual_options(TAU)}], twin, beside, mode)
    for step, (z1, z2, index) in enumerate(batches(N, steps=12, batch=5, seed=3)):
        same_call(est, ref, bank, want_bank, (z1, z2, index), step)
        assert len(bank.calls) == step + 1 and len(set(bank.calls[-1].tolist())) == len(bank.calls[-1])
        same_rows(est, ref, step)


def test_an_anchor_without_a_visit_pulls_its_positive_only():
    n, tau = 6, 0.01
    z = torch.eye(n, 6, dtype=torch.float64)
    z2 = normalize(z + 0.1, dim=1)
    est = compopt.EMC2Estimator(n, tau=tau, dtype=torch.float64, normalize=False)
    state = est.normalizer.state_dict()
    state["rows"] = {
        "chain": torch.tensor([[5, 5]]).repeat(n, 1),
        "score": torch.full((n, 2), 0.99, dtype=torch.float64),
        "count": torch.ones(n, 2, dtype=torch.int32),
    }
    est.normalizer.load_state_dict(state)
    index = torch.tensor([0, 1, 2])
    _, g1, g2 = run(est, z[index], z2[index], index)
    assert est.metrics["unused_anchors"] == 1 and est.metrics["acceptance_rate"] < 0.5
    near(g1, -2 * z2[index] / 6)
    near(g2, -2 * z[index] / 6)


def test_metrics():
    torch.manual_seed(0)
    est = compopt.EMC2Estimator(40, tau=0.3, burn_in=0)
    z1, z2 = data_set(40)
    for t in range(4):
        index = torch.randperm(40)[:10] if t > 1 else torch.arange(10) + 10 * t
        est(z1[index].requires_grad_(), z2[index], index)
        est.step()
        seen = {name: est.metrics[name].item() for name in ("acceptance_rate", "outside_visits", "unused_anchors")}
        assert 0.2 < seen["acceptance_rate"] < 1 and seen["unused_anchors"] < 0.2
        assert (seen["outside_visits"] > 0) == (t >= 2)  # chains of samples seen before may stay outside
        assert 1 <= est.metrics["effective_negatives"] <= 9


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_and_autocast_reach_encode(dtype):
    """encode runs under the caller's autocast settings, and its features receive gradients in their own dtype."""
    model = torch.nn.Linear(6, 4)
    x = torch.randn(2, 20, 6)
    est = compopt.EMC2Estimator(20, tau=0.5, burn_in=0)
    seen = []

    def encode(index):
        z = tuple(model(x[:, index]))
        seen.append(z[0].dtype)
        return z

    for _ in range(8):
        index = torch.randperm(20)[:6]
        with torch.autocast("cpu", dtype=dtype):
            z1, z2 = model(x[:, index])
            loss = call(est, z1, z2, index, encode=encode)
        assert loss.dtype == torch.float32
        loss.backward()
        est.step()
    assert set(seen) == {dtype}
    with torch.no_grad():
        call(est, *model(x[:, index]), index, encode=encode)
    assert torch.isfinite(model.weight.grad).all()


# -- invalid input -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("burn_in", [-1, 1.0, 1.5, float("nan"), "half", True])
def test_bad_burn_in(burn_in):
    with pytest.raises((ValueError, TypeError), match="burn_in"):
        compopt.EMC2Estimator(10, burn_in=burn_in)


def test_a_resumed_run_draws_the_same_samples():
    """A run of Algorithm 1 resumes from a file; the features come from a sampler's bank."""
    bank = compopt.samplers.FeatureBank(N, torch.float64)
    bank.write(torch.arange(N), bank.rounded(*features(N, 4, 77)))
    data = batches(N, steps=8, batch=5, seed=1)

    def trained(est, part):
        trace = []
        for z1, z2, index in part:
            trace += [bits(x) for x in run(est, z1, z2, index, encode=bank.read)]
            est.step()
        return trace

    def fresh():
        return compopt.EMC2Estimator(N, tau=TAU, proposals="dataset", draws=6, dtype=torch.float64)

    whole, first, second = fresh(), fresh(), fresh()
    expected = trained(whole, data)
    got = trained(first, data[:3])
    second.load_state_dict(through_a_file(first.state_dict()))
    assert got + trained(second, data[3:]) == expected
    with pytest.raises(ValueError, match="proposals"):
        compopt.EMC2Estimator(N, tau=TAU, dtype=torch.float64).load_state_dict(first.state_dict())


def test_as_many_draws_as_an_anchor_has_negatives():
    asked = []

    def encode(index):
        asked.append(len(index))
        return torch.randn(len(index), 4)

    est = compopt.EMC2Estimator(10**6, mode="unimodal", burn_in=0, proposals="dataset")
    call(est, *torch.randn(2, 5, 4), torch.arange(5), encode=encode)
    assert asked == [2 * 2 * 4 * 5]  # 2 (B - 1) in each of two passes of B chains; no sample repeats for so large n


def test_bad_calls_with_proposals_from_the_data_set(monkeypatch):
    z1, z2 = features(4, 3, 0)
    index, encode = torch.arange(4), lambda i: (torch.ones(len(i), 3),) * 2
    est = compopt.EMC2Estimator(10, proposals="dataset")
    with pytest.raises(ValueError, match='proposals="dataset" needs encode='):
        est(z1, z2, index)
    with pytest.raises(ValueError, match='labels= cannot be combined with proposals="dataset"'):
        call(est, z1, z2, index, labels=index, encode=encode)
    alone = compopt.MCMCNegativeSampler(10, proposals="dataset")
    with pytest.raises(ValueError, match=r'sample\(\) walks over the pool.*proposals="pool"'):
        alone.sample(z1 @ z2.T, index, index)
    monkeypatch.setattr(type(est.normalizer), "n", (1 << 31) + 1)
    with pytest.raises(ValueError, match=r"at most 2\^31 samples, got n=2147483649"):
        call(est, z1, z2, index, encode=encode)


def test_bad_options():
    with pytest.raises(ValueError, match='draws=3 is for proposals="dataset"'):
        compopt.EMC2Estimator(10, draws=3)
    with pytest.raises(ValueError, match="draws must be a positive integer, got 0"):
        compopt.EMC2Estimator(10, proposals="dataset", draws=0)
    with pytest.raises(ValueError, match="proposals.*pool.*sweep"):
        compopt.EMC2Estimator(10, proposals="all")
    with pytest.raises(ValueError, match="seed"):
        compopt.EMC2Estimator(10, seed=-1)


def test_bad_calls():
    z1, z2 = features(4, 3, 0)
    index = torch.arange(4)
    est = compopt.EMC2Estimator(10, tau=1.0)
    run(est, z1, z2, index)
    est.step()
    with pytest.raises(TypeError, match="encode must be a function"):
        est.normalizer.encode = z1
    with pytest.raises(ValueError, match="index2"):
        call(est, z1, z2, index, index2=index, encode=lambda i: (z1[i], z2[i]))
    with pytest.raises(ValueError, match="encode of the sampler"):
        est.feature_gradients(z1, z2, index)
    assert pickle.loads(pickle.dumps(est)).normalizer.encode is None
    wrong = {
        "pair of tensors": lambda i: torch.zeros(len(i), 3),
        r"\d features of dimension 3": lambda i: (torch.zeros(len(i), 4),) * 2,
        "floating": lambda i: (torch.zeros(len(i), 3, dtype=torch.int64),) * 2,
    }
    est = compopt.EMC2Estimator(10, tau=0.01)
    state = est.normalizer.state_dict()
    rows = {"chain": torch.full((10, 2), 9), "score": torch.ones(10, 2), "count": torch.ones(10, 2, dtype=torch.int32)}
    est.normalizer.load_state_dict({**state, "rows": rows})  # every chain at a sample outside the batch
    for message, encode in wrong.items():
        with pytest.raises((TypeError, ValueError), match=message):
            call(est, z1, z2, index, encode=encode)
        assert est.pending == 0 and est.read(torch.arange(10))["chain"].eq(9).all()


def test_a_group_s_own_burn_in_and_added_samples():
    est = compopt.EMC2Estimator([{"n": 6, "burn_in": 0.9}, {"n": 4}], burn_in=2, tau=0.5)
    z1, z2 = features(8, 3, 0)
    run(est, z1, z2, torch.arange(8))
    est.step()
    est.add_sample_group({"n": 5, "burn_in": 0})
    run(est, z1, z2, torch.arange(7, 15))
    est.step()
    assert est.read(torch.arange(15))["count"].tolist() == [1] * 7 + [2] + [1] * 7
    with pytest.raises(ValueError, match="burn_in"):
        est.add_sample_group({"n": 5, "burn_in": 1.0})


def test_a_burn_in_that_leaves_nothing_leaves_the_last_proposal():
    """Short batches, repeats and groups can leave an anchor fewer proposals than burn_in."""
    z1, z2 = features(6, 3, 0)
    for options in ({}, {"labels": torch.tensor([0, 0, 0, 0, 1, 2])}):
        got = [
            run(compopt.EMC2Estimator(10, burn_in=burn_in, tau=1.0), z1, z2, torch.arange(6), **options)
            for burn_in in (4, 5, 700, 0.999)
        ]
        for one, other in zip(got[1:], got[2:], strict=False):
            assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("proposals", ["pool", "dataset"])
@pytest.mark.parametrize("directions", ["forward", "both"])
def test_bad_features_from_outside_show_in_the_loss(directions, proposals):
    """Non-finite features also show in the loss if they belong to the modality that no anchor's chain visits."""
    torch.manual_seed(0)
    est = compopt.EMC2Estimator(30, tau=0.05, directions=directions, proposals=proposals)
    data = torch.randn(2, 30, 8)
    seen = 0
    for _ in range(12):
        index, scale = torch.randperm(30)[:6], torch.ones(8, requires_grad=True)

        def encode(missing, scale=scale):
            return data[0][missing] * scale + torch.nan, data[1][missing] * scale

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            loss = call(est, data[0][index] * scale, data[1][index] * scale, index, encode=encode)
        loss.backward()
        est.step()
        assert loss.isfinite() == scale.grad.isfinite().all()
        assert all(value.double().isfinite().all() for value in est.read(torch.arange(30)).values())
        seen += loss.isnan()
    assert seen


def test_states_of_chains_over_other_candidates_than_rows_are_loaded():
    """A pool may name any candidates, and index2 with directions="forward" any second modality."""
    chains = compopt.MCMCNegativeSampler(n=5)
    chains.sample(torch.randn(5, 20), torch.arange(5), torch.arange(100, 120))
    chains.step()
    again = compopt.MCMCNegativeSampler(n=5)
    again.load_state_dict(through_a_file(chains.state_dict()))
    assert torch.equal(again.read(torch.arange(5))["chain"], chains.read(torch.arange(5))["chain"])
    est = compopt.EMC2Estimator(n=8, directions="forward")
    run(est, *features(8, 4, 0), torch.arange(8), index2=torch.arange(8) - 1000)
    est.step()
    compopt.EMC2Estimator(n=8, directions="forward").load_state_dict(through_a_file(est.state_dict()))
