"""EMC2: the draws, the chains, features from outside the batch; against twins, enumeration and statistics."""

import re
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import normalize

import compopt
from compopt import diagnostics, draws
from compopt.negatives.walk import walk
from tests.database import MODES, dual_options
from tests.helpers import batches, features, near, run
from tests.reference import DualReference, FixedReference, MCMCReference, Reference
from tests.reference.mcmc import scramble, word

N = 13
TAU = 0.2


# -- draws -----------------------------------------------------------------------------------------------------


def unsigned(words):
    return [x & (2**64 - 1) for x in words.flatten().tolist()]


def test_the_generator_is_splitmix64():
    """Its first outputs from seed 0, as its authors publish them."""
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert unsigned(draws.bits(torch.zeros(1, dtype=torch.int64), 0, 3)) == published


def test_draws_depend_on_what_they_are_for_only():
    positions = torch.tensor([0, 5, 1 << 40])
    streams = draws.streams((3, 9, 1, 0), positions)
    whole = draws.bits(streams, 0, 7)
    assert unsigned(whole) == [word(3, 9, 1, 0, p, r) for r in range(7) for p in positions.tolist()]
    assert torch.equal(draws.bits(streams[1:2], 4, 3), whole[4:, 1:2])
    assert scramble(2**64 - 1) == draws.scramble(-1)


def test_draws_are_uniform_and_independent():
    words = draws.bits(draws.streams((0,), torch.arange(300)), 0, 500)
    u = draws.uniform(words, torch.float64)
    assert u.min() > 0 and u.max() <= 1 and draws.uniform(words, torch.float32).max() <= 1
    number = draws.below(words, torch.full((300,), 7))
    assert number.min() == 0 and number.max() == 6
    cells = torch.bincount((number * 10 + (u * 10).long().clamp(max=9)).flatten(), minlength=70).double()
    expected = cells.sum() / 70
    assert ((cells - expected) ** 2 / expected).sum() < 120  # 69 degrees of freedom: p = 1e-4
    for other in (u.roll(1, 0), u.roll(1, 1)):  # next of the stream, next stream
        assert abs(torch.corrcoef(torch.stack([u.flatten(), other.flatten()]))[0, 1]) < 4 / u.numel() ** 0.5


# -- one step, enumerated ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["outside", "candidate"])
def test_one_proposal_has_the_probabilities_of_metropolis_and_hastings(where, monkeypatch):
    """All slots of the pool times a grid of uniform numbers."""
    negatives, grid, tau = 5, 2000, 0.3
    scores = torch.tensor([0.9, -0.4, 0.1, 0.55, 0.3, 0.35, -torch.inf], dtype=torch.float64) / tau  # last: nowhere
    start = negatives if where == "outside" else 2
    pool = negatives + (where == "outside")
    number = torch.arange(pool).repeat_interleave(grid)
    low = ((torch.arange(grid, dtype=torch.float64) + 0.5) / grid * 2**32).long().repeat(pool)
    high = -((-number << 32) // pool)  # the smallest word that falls into each slot
    monkeypatch.setattr(draws, "bits", lambda keys, first, count: ((high << 32) | low)[None])
    b = pool * grid
    candidates = SimpleNamespace(
        width=negatives, most=1, alike=True, count=torch.tensor([negatives]), column=lambda slot: slot
    )
    spare = torch.full((b,), int(where == "outside"))
    found = walk(candidates, scores[:, None].expand(-1, b), torch.full((b,), start), torch.tensor([0]), number, spare)
    got = torch.bincount(found.last, minlength=negatives + 1).double() / b
    want = torch.zeros(negatives + 1, dtype=torch.float64)
    for slot in range(pool):
        want[slot] += (scores[slot] - scores[start]).clamp(max=0).exp() / pool
    want[start] += 1 - want.sum()
    torch.testing.assert_close(got, want, rtol=0, atol=1 / grid)
    assert torch.equal(found.visits.argmax(0), found.last) and (found.visits.sum(0) == 1).all()


# -- the data set's softmax ----------------------------------------------------------------------------------------


def data_set(n, dim=6, seed=0):
    z1, z2 = features(n, dim, seed, spread=1.5)
    return normalize(z1, dim=1), normalize(z2, dim=1)


def targets(z1, z2, tau):
    """Softmax of every chain, ``(2, n, n)``, bimodal."""
    s = torch.stack([z1 @ z2.T, z2 @ z1.T])
    return s, (s / tau).masked_fill(torch.eye(len(z1), dtype=torch.bool), -torch.inf).softmax(2)


def started(est, z1, z2, tau, seed):
    """Every chain at a draw of its softmax, independent of all others."""
    s, p = targets(z1, z2, tau)
    generator = torch.Generator().manual_seed(seed)
    chain = torch.stack([torch.multinomial(p[d], 1, generator=generator)[:, 0] for d in (0, 1)], dim=1)
    state = est.state_dict()
    score = torch.stack([s[d].gather(1, chain[:, d : d + 1])[:, 0] for d in (0, 1)], dim=1)
    state["rows"] = {"chain": chain, "score": score, "count": torch.ones_like(state["rows"]["count"])}
    est.load_state_dict(state)
    return est


def places(chain, p, generator):
    """Where each chain is within its distribution, best candidates first: uniform in [0, 1) if it has that."""
    order = p.argsort(dim=2, descending=True)
    below = (p.gather(2, order).cumsum(2) - p.gather(2, order)).gather(2, order.argsort(dim=2))
    own = chain.T[:, :, None]
    jitter = torch.rand(own.shape, generator=generator, dtype=p.dtype)
    return (below.gather(2, own) + jitter * p.gather(2, own)).flatten()


def chi_square(u, bins=10):
    cells = torch.histc(u, bins, 0, 1)
    expected = len(u) / bins
    return float(((cells - expected) ** 2 / expected).sum())


def wander(est, z1, z2, epochs, batch, generator):
    n = len(z1)
    with torch.enable_grad():
        for _ in range(epochs):
            for index in torch.randperm(n, generator=generator).split(batch):
                est(z1[index], z2[index], index)
                est.step()


@pytest.mark.parametrize("tau", [0.05, 0.1, 0.3, 1.0])
def test_the_softmax_of_the_data_set_is_invariant(tau):
    """Chains that start there stay there, in batches of 8 of 128 samples; the statistic has 9 degrees of freedom."""
    z1, z2 = data_set(128)
    generator = torch.Generator().manual_seed(1)
    _, p = targets(z1, z2, tau)
    u = []
    for seed in range(8):
        est = started(compopt.EMC2Estimator(128, tau=tau, seed=seed, dtype=torch.float64), z1, z2, tau, seed)
        wander(est, z1, z2, 10, 8, generator)
        u.append(places(est.read(torch.arange(128))["chain"], p, generator))
    assert chi_square(torch.cat(u)) < 33.7  # p = 1e-4


@pytest.mark.parametrize("tau", [0.1, 0.3, 1.0])
def test_chains_find_the_softmax_of_the_data_set(tau):
    """From no state at all; what the batch alone would say is far from it."""
    z1, z2 = data_set(128)
    generator = torch.Generator().manual_seed(2)
    _, p = targets(z1, z2, tau)
    u = []
    for seed in range(3):
        est = compopt.EMC2Estimator(128, tau=tau, seed=seed, dtype=torch.float64)
        wander(est, z1, z2, 1, 8, generator)
        early = places(est.read(torch.arange(128))["chain"], p, generator)
        wander(est, z1, z2, 90 if tau == 0.1 else 30, 8, generator)
        u.append((early, places(est.read(torch.arange(128))["chain"], p, generator)))
    assert chi_square(torch.cat([late for _, late in u])) < 33.7
    if tau < 1:  # after one visit the chain knows one batch
        assert chi_square(torch.cat([early for early, _ in u])) > 100


@pytest.mark.parametrize("proposals, biased", [("pool", False), ("sweep", True)])
def test_the_sweep_is_biased_even_on_the_full_data_set(proposals, biased):
    """The same statistic, after three passes in which every negative is proposed once, from stationary chains."""
    n, tau = 24, 0.1
    z1, z2 = data_set(n, seed=3)
    generator = torch.Generator().manual_seed(3)
    _, p = targets(z1, z2, tau)
    est = compopt.EMC2Estimator(n, tau=tau, proposals=proposals, dtype=torch.float64)
    u = []
    for seed in range(100):
        started(est, z1, z2, tau, seed)
        est.t = 100 * seed  # other luck
        wander(est, z1, z2, 3, n, generator)
        u.append(places(est.read(torch.arange(n))["chain"], p, generator))
    assert (chi_square(torch.cat(u)) > 70) == biased


def test_unimodal_chains_keep_the_softmax_over_both_views():
    """Views that are alike, so that both passes have one target: the samples' softmax."""
    n, tau = 10, 0.3
    z, _ = data_set(n, seed=8)
    generator = torch.Generator().manual_seed(4)
    s, p = targets(z, z, tau)
    est = compopt.EMC2Estimator(n, tau=tau, mode="unimodal", dtype=torch.float64)
    state, u = est.state_dict(), []
    for seed in range(500):
        chain = torch.multinomial(p[0], 1, generator=generator)
        state["rows"] = {
            "chain": chain,
            "score": s[0].gather(1, chain),
            "count": torch.ones_like(state["rows"]["count"]),
        }
        est.load_state_dict({**state, "t": 100 * seed})
        wander(est, z, z, 3, 4, generator)
        u.append(places(est.read(torch.arange(n))["chain"], p[:1], generator))
    assert chi_square(torch.cat(u)) < 33.7


def test_the_gradient_is_unbiased():
    """Mean over draws from stationary chains against the gradient over the whole data set, in standard errors."""
    n, batch, tau, draws_ = 40, 8, 0.2, 1500
    z1, z2 = (z.requires_grad_() for z in data_set(n, seed=5))
    exact = torch.stack(diagnostics.global_gradient(z1.detach(), z2.detach(), tau))
    generator = torch.Generator().manual_seed(5)
    est = compopt.EMC2Estimator(n, tau=tau, dtype=torch.float64)
    others = {include: compopt.InfoNCEEstimator(tau=tau, include_positive=include) for include in (True, False)}
    found = {name: [] for name in ("emc2", *others)}
    for draw in range(draws_):
        index = torch.randperm(n, generator=generator)[:batch]
        started(est, z1.detach(), z2.detach(), tau, draw)
        est.t = draw  # other luck
        loss = est(z1[index], z2[index], index, encode=lambda missing: (z1[missing], z2[missing]))
        found["emc2"].append(torch.stack(torch.autograd.grad(loss, (z1, z2))))
        for name, other in others.items():
            found[name].append(torch.stack(torch.autograd.grad(other(z1[index], z2[index], index), (z1, z2))))

    def excess(name):
        gradients = torch.stack(found[name])
        error = gradients.std(0) / draws_**0.5
        return float((((gradients.mean(0) - exact) / error) ** 2).mean())

    assert excess("emc2") < 1.25  # 1, but for the 480 coordinates' own scatter
    assert excess(True) > 3
    assert excess(False) > 1.6


# -- features from outside the batch -------------------------------------------------------------------------------


class Bank:
    """Features of a whole data set as a leaf, and a record of the calls."""

    def __init__(self, n, dim, mode, dtype=torch.float64):
        z1, z2 = features(n, dim, 77)
        self.leaves = [z.to(dtype).requires_grad_() for z in (z1, z2)]
        self.unimodal, self.calls = mode == "unimodal", []

    def __call__(self, index):
        self.calls.append(index)
        first, second = (z[index] for z in self.leaves)
        return first if self.unimodal else (first, second)

    def one(self, sample):
        """Unit features of both modalities of one sample, for the twin."""
        return [z[sample] / z[sample].norm() for z in (self.leaves if not self.unimodal else self.leaves[:1] * 2)]

    def take_gradients(self):
        gradients = [torch.zeros_like(z) if z.grad is None else z.grad for z in self.leaves]
        for z in self.leaves:
            z.grad = None
        return torch.stack(gradients)


@pytest.mark.parametrize("dual", [False, True])
@pytest.mark.parametrize("rescore", [False, True])
@pytest.mark.parametrize("multiply_tau", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_encoded_samples_against_the_twin(mode, multiply_tau, rescore, dual):
    """Loss, gradients of batch and bank, rows; the bank differs from the batches' features, as in training."""
    bank, want_bank = Bank(N, 4, mode), Bank(N, 4, mode)
    sampler = compopt.MCMCNegativeSampler(N, burn_in=0.3, rescore=rescore)
    temperature = compopt.TemperatureDual(N, **dual_options(TAU)) if dual else compopt.FixedTemperature(TAU)
    est = compopt.ContrastiveEstimator(
        sampler, temperature, mode=mode, multiply_tau=multiply_tau, dtype=torch.float64, chunk_size=5 if dual else None
    )
    groups = [{"n": N, "tau": TAU, **dual_options(TAU)}]
    beside = DualReference("momentum", 0.9) if dual else FixedReference()
    ref = Reference(groups, MCMCReference(0.3, rescore=rescore), beside, mode, multiply_tau)
    asked = 0
    for step, (z1, z2, index) in enumerate(batches(N, steps=25, batch=5, seed=3)):
        got = run(est, z1, z2, index, encode=bank)
        want = ref.forward(z1, z2, index, encode=want_bank.one)
        for name, a, b in zip(("loss", "g1", "g2"), got, want, strict=True):
            near(a, b, what=f"{name} of step {step}")
        near(bank.take_gradients(), want_bank.take_gradients(), atol=1e-12, what=f"bank of step {step}")
        if step % 3 != 1:
            est.step()
            ref.step()
        seen = [i for i in range(N) if ref.visits(i, 0)]
        rows = est.read(torch.tensor(seen))
        for name in ("chain", "score"):
            near(rows[name], torch.tensor([ref.read(i)[name] for i in seen], dtype=torch.float64), what=name)
        assert len(bank.calls) <= step + 1, "more than one call per forward"
        if len(bank.calls) > asked:
            asked = len(bank.calls)
            last = bank.calls[-1].tolist()
            assert bank.calls[-1].dtype == torch.int64 and bank.calls[-1].device.type == "cpu"
            assert len(set(last)) == len(last) and not set(last) & set(index.tolist())
    assert asked > 10


@pytest.mark.parametrize("mode", MODES)
def test_without_encode_visits_outside_are_dropped(mode):
    """At a low temperature a chain stays at a good sample; an anchor without another visit only pulls its positive."""
    n = 30
    z1, z2 = data_set(n, seed=6)
    est = compopt.EMC2Estimator(n, tau=0.02, mode=mode, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    wander(est, z1, z2, 40, 10, generator)
    index = torch.randperm(n, generator=generator)[:4]
    loss, g1, g2 = run(est, z1[index], z2[index], index)
    metrics = est.metrics
    assert torch.isfinite(loss) and torch.isfinite(g1).all() and torch.isfinite(g2).all()
    assert metrics["unused_anchors"] > 0.3 and metrics["outside_visits"] > 0.3
    run(est, z1[index], z2[index], index, encode=Bank(n, 6, mode))
    assert est.metrics["unused_anchors"] == 0


def test_an_anchor_without_a_visit_pulls_its_positive_only():
    n, tau = 6, 0.01
    z = torch.eye(n, 6, dtype=torch.float64)
    z2 = normalize(z + 0.1, dim=1)
    est = compopt.EMC2Estimator(n, tau=tau, dtype=torch.float64, normalize=False)
    state = est.state_dict()
    state["rows"] = {
        "chain": torch.tensor([[5, 5]]).repeat(n, 1),
        "score": torch.full((n, 2), 0.99, dtype=torch.float64),
        "count": torch.ones(n, 2, dtype=torch.int32),
    }
    est.load_state_dict(state)
    index = torch.tensor([0, 1, 2])
    _, g1, g2 = run(est, z[index], z2[index], index)
    assert est.metrics["unused_anchors"] == 1 and est.metrics["acceptance_rate"] < 0.5
    near(g1, -2 * z2[index] / 6)
    near(g2, -2 * z[index] / 6)


def test_metrics():
    est = compopt.EMC2Estimator(40, tau=0.3, burn_in=0)
    z1, z2 = data_set(40)
    for t in range(4):
        index = torch.randperm(40)[:10] if t > 1 else torch.arange(10) + 10 * t
        est(z1[index].requires_grad_(), z2[index], index)
        est.step()
        seen = {name: est.metrics[name].item() for name in ("acceptance_rate", "outside_visits", "unused_anchors")}
        assert 0.2 < seen["acceptance_rate"] < 1 and seen["unused_anchors"] < 0.2
        assert (seen["outside_visits"] > 0) == (t >= 2)  # a chain of a batch met before may stay there
        assert 1 <= est.metrics["effective_negatives"] <= 9


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_and_autocast_reach_encode(dtype):
    """encode runs as the caller's own encoders do, and its gradients come back in its dtype."""
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
            loss = est(z1, z2, index, encode=encode)
        assert loss.dtype == torch.float32
        loss.backward()
        est.step()
    assert set(seen) == {dtype}
    with torch.no_grad():
        est(*model(x[:, index]), index, encode=encode)
    assert torch.isfinite(model.weight.grad).all()


# -- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("burn_in", [-1, 1.0, 1.5, float("nan"), "half", True])
def test_bad_burn_in(burn_in):
    with pytest.raises((ValueError, TypeError), match="burn_in"):
        compopt.EMC2Estimator(10, burn_in=burn_in)


def test_bad_options():
    with pytest.raises(ValueError, match="proposals.*pool.*sweep"):
        compopt.EMC2Estimator(10, proposals="all")
    with pytest.raises(TypeError, match="rescore"):
        compopt.EMC2Estimator(10, rescore=1)
    with pytest.raises(ValueError, match="seed"):
        compopt.EMC2Estimator(10, seed=-1)


def test_bad_calls():
    z1, z2 = features(4, 3, 0)
    index = torch.arange(4)
    est = compopt.EMC2Estimator(10, rescore=True)
    with pytest.raises(ValueError, match="rescore.*encode"):
        est(z1, z2, index)
    est = compopt.EMC2Estimator(10, tau=1.0)
    run(est, z1, z2, index)
    est.step()
    with pytest.raises(TypeError, match="encode must be a function"):
        est(z1, z2, index, encode=z1)
    with pytest.raises(ValueError, match="index2"):
        est(z1, z2, index, index2=index, encode=lambda i: (z1[i], z2[i]))
    with pytest.raises(ValueError, match="encode"):
        est.feature_gradients(z1, z2, index, encode=lambda i: (z1[i], z2[i]))
    with pytest.raises(ValueError, match="encode= serves samplers"):
        compopt.SogCLREstimator(10)(z1, z2, index, encode=lambda i: z1)
    others = torch.tensor([4, 5, 6, 7])
    wrong = {
        "pair of tensors": lambda i: torch.zeros(len(i), 3),
        r"\d features of dimension 3": lambda i: (torch.zeros(len(i), 4),) * 2,
        "floating": lambda i: (torch.zeros(len(i), 3, dtype=torch.int64),) * 2,
    }
    for seed in range(30):  # until a chain stays outside
        est = compopt.EMC2Estimator(10, tau=0.05, seed=seed)
        run(est, z1, z2, index)
        est.step()
        for message, encode in wrong.items():
            before = est.read(torch.arange(10))
            index_now = torch.cat([index[:2], others[:2]])
            try:
                est(z1, z2, index_now, encode=encode)
            except (TypeError, ValueError) as error:
                assert re.search(message, str(error)), error
                assert est.pending == 0
                assert all(torch.equal(before[k], v) for k, v in est.read(torch.arange(10)).items())
                wrong = {m: e for m, e in wrong.items() if m != message}
            else:
                est.discard()
    assert not wrong


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
    """Short batches, repeats and groups make R smaller than it was thought to be."""
    z1, z2 = features(6, 3, 0)
    for options in ({}, {"group": torch.tensor([0, 0, 0, 0, 1, 2])}):
        got = [
            run(compopt.EMC2Estimator(10, burn_in=burn_in, tau=1.0), z1, z2, torch.arange(6), **options)
            for burn_in in (4, 5, 700, 0.999)
        ]
        for one, other in zip(got[1:], got[2:], strict=False):
            assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_fractions_mean_the_same_in_one_group_and_in_several():
    from compopt.negatives.chains import _burn_in

    for fraction in (0.1, 0.3, 0.7, 0.9):
        count = torch.arange(1, 300)
        want = [min(int(round(fraction * 10) * r // 10), r - 1) for r in count.tolist()]
        for dtype in (torch.float32, torch.float64):
            assert _burn_in(torch.tensor(fraction, dtype=dtype), count).tolist() == want


@pytest.mark.parametrize("rescore", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_encoded_features_that_are_not_finite_show_in_the_loss(mode, rescore):
    n = 30
    z1, z2 = data_set(n, seed=6)
    est = compopt.EMC2Estimator(n, tau=0.05, mode=mode, dtype=torch.float64, rescore=rescore)
    bank = Bank(n, 6, mode)
    for _ in range(6):
        index = torch.randperm(n, generator=torch.Generator().manual_seed(1))[:10]
        est(z1[index], z2[index], index, encode=bank)
        est.step()
    index = torch.tensor([i for i in range(n) if i not in index.tolist()][:6] + index[:4].tolist())
    before = est.read(torch.arange(n))

    def broken(missing):
        z = tuple(torch.full((len(missing), 6), torch.nan, dtype=torch.float64) for _ in range(2))
        return z if mode == "bimodal" else z[0]

    with pytest.warns(UserWarning, match="feature rows of a batch are NaN"):
        loss = est(z1[index].requires_grad_(), z2[index], index, encode=broken)
    assert est.metrics["outside_visits"] > 0 and not torch.isfinite(loss)
    est.step()
    after = est.read(torch.arange(n))
    lost = after["count"] == before["count"]
    assert lost[index].any()
    for name in after:
        assert torch.equal(after[name][lost], before[name][lost]) and torch.isfinite(after[name].double()).all()


def test_gradients_reach_what_is_encoded_when_the_batch_is_frozen():
    n = 30
    z1, z2 = data_set(n, seed=6)
    results = []
    for frozen in (True, False):
        est, bank = compopt.EMC2Estimator(n, tau=0.1, dtype=torch.float64), Bank(n, 6, "bimodal")
        for t in range(5):
            index = torch.randperm(n, generator=torch.Generator().manual_seed(t))[:10]
            a, b = (z[index].requires_grad_(not frozen) for z in (z1, z2))
            loss = est(a, b, index, encode=bank)
            if loss.requires_grad:
                loss.backward()
            est.step()
        results.append(bank.take_gradients())
    assert results[0].abs().sum() > 0
    near(results[0], results[1])


def test_the_seed_is_state():
    """A run resumed by an estimator of another seed draws what the first one would have drawn."""
    z1, z2 = features(8, 3, 0)
    index = torch.arange(8)
    first, second = compopt.EMC2Estimator(20, seed=5), compopt.EMC2Estimator(20, seed=6)
    run(first, z1, z2, index)
    first.step()
    second.load_state_dict(first.state_dict())
    near(run(first, z1, z2, index)[1], run(second, z1, z2, index)[1], 0)
    other = compopt.EMC2Estimator(20, seed=6)
    assert not torch.equal(run(compopt.EMC2Estimator(20, seed=5), z1, z2, index)[1], run(other, z1, z2, index)[1])


def test_a_chain_takes_one_of_its_proposals_whatever_their_order():
    """Sample and score come from the same deposit, and not always from the one with the larger position."""
    from compopt.deposits import Deposit, merge
    from compopt.rows import Column, RowLayout

    layout = RowLayout(
        (
            Column("chain", 2, torch.int64, reduce="one"),
            Column("score", 2, reduce="one"),
            Column("count", 2, torch.int32),
        )
    )
    generator = torch.Generator().manual_seed(0)
    rows = torch.arange(200)
    old = torch.zeros(200, layout.words, dtype=torch.complex128)
    chains = torch.randint(0, 50, (3, 200, 2), generator=generator)
    scores = torch.rand(3, 200, 2, generator=generator)
    made = [Deposit(rows, old, {"chain": c, "score": s}, None, True) for c, s in zip(chains, scores, strict=True)]
    results = []
    for order in ((0, 1, 2), (2, 0, 1)):
        at, _, new = merge([made[k] for k in order], layout)
        columns = layout.unpack(new)
        results.append({name: columns[name][at.argsort(stable=True)][::3] for name in ("chain", "score")})
    for name in ("chain", "score"):
        assert torch.equal(results[0][name], results[1][name])
    assert not torch.equal(results[0]["chain"], chains.amax(0))
    matches = (results[0]["chain"] == chains) & (results[0]["score"] == scores)
    assert matches.any(0).all()
    taken = matches.double().argmax(0)
    assert 0.25 < (taken == 0).double().mean() < 0.42


def test_every_proposal_of_a_chain_is_as_likely_as_any_other():
    """Two of five proposals are the same sample: it is kept in two of five rows."""
    from compopt.deposits import Deposit, merge
    from compopt.rows import Column, RowLayout

    layout = RowLayout((Column("chain", 1, torch.int64, reduce="one"), Column("count", 1, torch.int32)))
    count = 4000
    rows, old = torch.arange(count), torch.zeros(count, layout.words, dtype=torch.complex128)
    valid = torch.ones(count, 1, dtype=torch.bool)
    made = [
        Deposit(rows, old, {"chain": torch.full((count, 1), sample)}, valid, True) for sample in (7, 3, 7, 11, 5)
    ] + [Deposit(rows, old, {"chain": torch.full((count, 1), 99)}, ~valid, True)]
    at, _, new = merge(made, layout)
    kept = layout.unpack(new)["chain"][at.argsort(stable=True)][:: len(made), 0]
    share = {sample: float((kept == sample).double().mean()) for sample in (3, 5, 7, 11, 99)}
    assert share[99] == 0
    for sample, want in ((3, 0.2), (5, 0.2), (7, 0.4), (11, 0.2)):
        assert abs(share[sample] - want) < 4 * (want * (1 - want) / count) ** 0.5, share
