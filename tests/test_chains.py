"""EMC2's chains: one step enumerated, the softmax over the data set, the gradient that they estimate."""

from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import normalize

import compopt
from compopt import diagnostics
from compopt import rng as draws
from compopt.negatives import walk as walks
from compopt.negatives.walk import walk
from tests.helpers import features

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


def test_on_a_device_chains_move_as_on_the_host():
    """A device finds the places from the accepted proposals at once; the host goes along with them."""
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


def ranked(chain, p, generator):
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


@pytest.mark.slow
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
        u.append(ranked(est.read(torch.arange(128))["chain"], p, generator))
    assert chi_square(torch.cat(u)) < 33.7  # p = 1e-4


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
        est._engine.t = 100 * seed  # other luck
        wander(est, z1, z2, 3, n, generator)
        u.append(ranked(est.read(torch.arange(n))["chain"], p, generator))
    assert (chi_square(torch.cat(u)) > 70) == biased


@pytest.mark.slow
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
        u.append(ranked(est.read(torch.arange(n))["chain"], p[:1], generator))
    assert chi_square(torch.cat(u)) < 33.7


@pytest.mark.slow
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
        est._engine.t = draw  # other luck
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


# -- which chain is kept where several are deposited --------------------------------------------------------------


def test_a_chain_takes_one_of_its_proposals_whatever_their_order():
    """Sample and score come from the same deposit, and not always from the one with the larger position."""
    from compopt.stores.deposits import Deposit, merge
    from compopt.stores.layout import Column, RowLayout

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
    from compopt.stores.deposits import Deposit, merge
    from compopt.stores.layout import Column, RowLayout

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
