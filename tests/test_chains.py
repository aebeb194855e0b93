"""EMC2's chains: enumeration of one step, the softmax over the data set, the estimated gradient."""

from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import normalize

import compopt
from compopt import diagnostics
from compopt import rng as draws
from compopt.estimator import Estimator
from compopt.negatives import walk as walks
from compopt.negatives.walk import walk
from compopt.stores.rows import Column
from tests.helpers import call, features
from tests.reference.mcmc import kernel

# -- enumeration of one step -------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["outside", "candidate"])
def test_one_proposal_has_the_probabilities_of_metropolis_and_hastings(where, monkeypatch):
    """Enumerate all slots of the pool and a grid of uniform numbers."""
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
        width=negatives, most=1, equal_counts=True, count=torch.tensor([negatives]), column=lambda slot: slot
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


def test_on_a_device_chains_move_as_on_the_host():
    """Places found from all accepted proposals at once, as on a device, equal those of the loop on the host."""
    generator = torch.Generator().manual_seed(1)
    scores = torch.randn(40, 30, generator=generator)
    keys = scores - torch.rand(40, 30, generator=generator).log()
    slots = torch.randint(0, 9, (40, 30), generator=generator)
    score, start = torch.randn(30, generator=generator), torch.randint(0, 9, (30,), generator=generator)
    accepted, current, place = torch.zeros(40, 30, dtype=torch.bool), score.clone(), start.clone()
    want = torch.empty_like(slots)
    for r in range(40):
        for chain in range(30):
            if keys[r, chain] > current[chain]:
                accepted[r, chain], current[chain], place[chain] = True, scores[r, chain], slots[r, chain]
        want[r] = place
    where, count = walks.move(keys, scores, slots, score, start)
    assert torch.equal(where, want) and torch.equal(count, accepted.sum(0))
    assert torch.equal(walks.places(accepted, slots, start), want)


# -- the softmax over the data set ---------------------------------------------------------------------------------


def data_set(n, dim=6, seed=0):
    z1, z2 = features(n, dim, seed, spread=1.5)
    return normalize(z1, dim=1), normalize(z2, dim=1)


def targets(z1, z2, tau):
    """Return similarities and softmax of every chain, ``(2, n, n)``, bimodal."""
    s = torch.stack([z1 @ z2.T, z2 @ z1.T])
    return s, (s / tau).masked_fill(torch.eye(len(z1), dtype=torch.bool), -torch.inf).softmax(2)


def started(est, z1, z2, tau, seed, t=0):
    """Set every chain to an independent draw from its softmax; ``t`` selects the following random numbers."""
    s, p = targets(z1, z2, tau)
    generator = torch.Generator().manual_seed(seed)
    chain = torch.stack([torch.multinomial(p[d], 1, generator=generator)[:, 0] for d in (0, 1)], dim=1)
    state = {**est.normalizer.state_dict(), "t": t}
    score = torch.stack([s[d].gather(1, chain[:, d : d + 1])[:, 0] for d in (0, 1)], dim=1)
    state["rows"] = {"chain": chain, "score": score, "count": torch.ones_like(state["rows"]["count"])}
    est.normalizer.load_state_dict(state)
    return est


def ranked(chain, p, generator):
    """Return each chain's quantile, best candidates first: uniform in [0, 1) for chains distributed as ``p``."""
    order = p.argsort(dim=2, descending=True)
    below = (p.gather(2, order).cumsum(2) - p.gather(2, order)).gather(2, order.argsort(dim=2))
    own = chain.T[:, :, None]
    jitter = torch.rand(own.shape, generator=generator, dtype=p.dtype)
    return (below.gather(2, own) + jitter * p.gather(2, own)).flatten()


def chi_square(u, bins=10):
    cells = torch.histc(u, bins, 0, 1)
    expected = len(u) / bins
    return float(((cells - expected) ** 2 / expected).sum())


def wander(est, z1, z2, epochs, batch, generator, **options):
    n = len(z1)
    with torch.enable_grad():
        for _ in range(epochs):
            for index in torch.randperm(n, generator=generator).split(batch):
                est(z1[index], z2[index], index, **options)
                est.step()


@pytest.mark.parametrize("draws", [1, 6])
def test_proposals_from_the_data_set_move_a_chain_as_the_kernel_s_power_does(draws):
    """Compare the states of 2,000 anchors of one sample after R proposals, started from its least likely negative."""
    n, tau, count = 7, 0.4, 2000
    z1, z2 = data_set(n, seed=2)
    z1[1] = normalize(z1[1] - z1[0] * (z1[0] @ z1[1]), dim=0)
    options = {"directions": "forward", "normalize": False, "dtype": torch.float64}
    est = compopt.EMC2Estimator(n, draws - 1, tau, proposals="dataset", draws=draws, seed=4, **options)
    negatives = torch.arange(1, n)
    similarity = z2[negatives] @ z1[0]
    start, state = similarity.argmin(), est.normalizer.state_dict()
    chain = negatives[start].expand(n, 1)
    state["rows"] = {
        "chain": chain,
        "score": torch.zeros(n, 1).double(),
        "count": torch.ones_like(state["rows"]["count"]),
    }
    est.normalizer.load_state_dict(state)
    index, bank = torch.tensor([0] * count + [1]), z2.clone().requires_grad_()
    call(est, z1[index], z2[index], index, encode=lambda samples: (z1[samples], bank[samples])).backward()
    found = (bank.grad @ z1[0])[negatives] * len(index)  # only the last proposal is counted: one visit per anchor
    assert found.sum() == pytest.approx(count)
    want = torch.linalg.matrix_power(kernel(similarity, tau), draws)[start] * count
    assert ((found - want) ** 2 / want).sum() < 27.9  # 5 degrees of freedom: p = 4e-5


@pytest.mark.parametrize("proposals, biased", [("pool", False), ("sweep", True)])
def test_the_sweep_is_biased_even_on_the_full_data_set(proposals, biased):
    """Test the same statistic for stationary chains after three epochs, where a sweep proposes all negatives once."""
    n, tau = 24, 0.1
    z1, z2 = data_set(n, seed=3)
    generator = torch.Generator().manual_seed(3)
    _, p = targets(z1, z2, tau)
    est = compopt.EMC2Estimator(n, tau=tau, proposals=proposals, dtype=torch.float64)
    u = []
    for seed in range(40):
        started(est, z1, z2, tau, seed, 100 * seed)
        wander(est, z1, z2, 3, n, generator)
        u.append(ranked(est.read(torch.arange(n))["chain"], p, generator))
    assert (chi_square(torch.cat(u)) > 45) == biased  # p = 1e-6


@pytest.mark.slow
def test_the_gradient_is_unbiased():
    """Compare the mean over draws from stationary chains with the gradient over the data set, in standard errors."""
    n, batch, tau, draws_ = 40, 8, 0.2, 1500
    z1, z2 = (z.requires_grad_() for z in data_set(n, seed=5))
    exact = torch.stack(diagnostics.global_gradient(z1.detach(), z2.detach(), tau))
    generator = torch.Generator().manual_seed(5)
    est = compopt.EMC2Estimator(n, tau=tau, dtype=torch.float64)
    others = {include: compopt.InfoNCEEstimator(tau=tau, include_positive=include) for include in (True, False)}
    drawn = compopt.EMC2Estimator(n, tau=tau, proposals="dataset", dtype=torch.float64)
    found = {name: [] for name in ("emc2", "drawn", *others)}
    for draw in range(draws_):
        index = torch.randperm(n, generator=generator)[:batch]
        for name, chains in (("emc2", est), ("drawn", drawn)):
            started(chains, z1.detach(), z2.detach(), tau, draw, draw)
            loss = call(chains, z1[index], z2[index], index, encode=lambda missing: (z1[missing], z2[missing]))
            found[name].append(torch.stack(torch.autograd.grad(loss, (z1, z2))))
        for name, other in others.items():
            found[name].append(torch.stack(torch.autograd.grad(other(z1[index], z2[index], index), (z1, z2))))

    def excess(name):
        gradients = torch.stack(found[name])
        error = gradients.std(0) / draws_**0.5
        return float((((gradients.mean(0) - exact) / error) ** 2).mean())

    assert max(excess("emc2"), excess("drawn")) < 1.25  # expected to be 1, up to the sampling error of 480 coordinates
    assert excess(True) > 3
    assert excess(False) > 1.6


# -- selection among several deposits of a chain ------------------------------------------------------------------


class Kept(Estimator):
    """Estimator with the columns of a chain."""

    role = "kept"

    def check(self, group):
        pass

    def columns(self, directions, dtype):
        chain = Column("chain", directions, torch.int64, reduce="one")
        return [chain, Column("score", directions, dtype, reduce="one")]

    def put(self, sample, score, valid=None):
        rows = torch.arange(self.n)
        batch = self._read({"index": rows}, {"x": torch.zeros(self.n)})
        proposals = {"chain": torch.full((self.n, 1), sample), "score": torch.full((self.n, 1), score)}
        self._deposit(batch, proposals, None if valid is None else torch.full((self.n, 1), valid))


def test_every_proposal_of_a_chain_is_as_likely_as_any_other():
    """A sample that is two of five proposals is kept in two of five rows; the order of deposits does not matter."""
    proposals, kept = [(7, 0.1), (3, 0.2), (7, 0.3), (11, 0.4), (5, 0.5)], []
    for order in (proposals, proposals[::-1]):
        est = Kept(4000, {})
        for sample, score in order:
            est.put(sample, score)
        est.step()
        kept.append({name: value[:, 0] for name, value in est.read(torch.arange(4000)).items() if name != "count"})
    assert all(torch.equal(kept[0][name], kept[1][name]) for name in kept[0])
    for sample, want in ((3, 0.2), (5, 0.2), (7, 0.4), (11, 0.2)):
        share = float((kept[0]["chain"] == sample).double().mean())
        assert abs(share - want) < 4 * (want * (1 - want) / 4000) ** 0.5
    known = torch.tensor([[sample, score] for sample, score in proposals])
    pairs = torch.stack([kept[0]["chain"].float(), kept[0]["score"]], dim=1)
    assert (pairs[:, None] == known).all(2).any(1).all()  # sample and score are of the same deposit


def test_an_invalid_proposal_of_a_chain_is_never_chosen():
    """Valid proposals with the smallest and the largest value among invalid ones are each chosen in some rows."""
    est = Kept(200, {})
    for sample, valid in ((9, False), (3, True), (1, False), (5, False), (12, True), (15, False)):
        est.put(sample, sample / 10, valid)
    est.step()
    found = est.read(torch.arange(200))
    assert set(found["chain"].flatten().tolist()) == {3, 12}
    assert found["count"].eq(1).all()
