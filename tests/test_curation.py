"""Scores of samples: rows kept with any loss, and results computed from them."""

import csv
import pickle
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn.functional import normalize

import compopt
from compopt import curation
from compopt.stores.prefetch import Prefetcher
from tests.helpers import batches, features, near, run, snapshot, whole
from tests.pool import the_pool

N, D, RATE = 13, 4, 0.3
BUILDERS = {
    "dcl": lambda **o: compopt.DCLEstimator(0.2, **o),
    "memory": lambda **o: compopt.MemoryEstimator(D, 8, **o),
    "isogclr": lambda **o: compopt.ISogCLREstimator(N, rho=0.4, **o),
    "emc2": lambda **o: compopt.EMC2Estimator(N, **o),
    "neuclip": lambda **o: compopt.NeuCLIPEstimator(D, prototypes=4, restart_every=None, updates=2, **o),
}


def build(name, mode, **options):
    directions = {"mode": mode} if mode != "forward" else {"directions": "forward"}
    return BUILDERS[name](**directions, dtype=torch.float64, **options)


def kept(est, n=N, **options):
    """Return a keeper of an estimator's scores."""
    keeper = compopt.ScoreKeeper(n, **options)
    keeper.attach(est)
    return keeper


def with_scores(name, mode, **options):
    est = build(name, mode, **options)
    return est, kept(est, rate=RATE)


class Moments:
    """Running moments of one sample and direction, computed in loops over the visits."""

    def __init__(self):
        self.visits, self.mean, self.var = 0, None, None

    def see(self, x):
        self.visits += 1
        rate = max(RATE, 1 / self.visits)
        if self.visits == 1:
            self.mean, self.var = x, 0 * x
            return
        change = x - self.mean
        self.mean, self.var = self.mean + rate * change, (1 - rate) * (self.var + rate * change**2)


def observed(z, index, tau, mode):
    """Return the observations of each sample in one call, computed in loops: dictionary of (B, D) by name."""
    z = [normalize(each, dim=1) for each in z]
    sides = [(0, [1]), (1, [0])] if mode != "unimodal" else [(0, [0, 1]), (1, [1, 0])]
    shown = {"log_g": [], "similarity": [], "rank": []}
    for one, others in sides[: 1 if mode == "forward" else 2]:
        columns = {name: [] for name in shown}
        for i, anchor in enumerate(z[one]):
            positive = anchor @ z[1 - one][i]
            negatives = torch.stack([z[k][j] for k in others for j in range(len(index)) if index[j] != index[i]])
            s = negatives @ anchor
            columns["log_g"].append(((s - positive) / tau).exp().mean().log())
            columns["similarity"].append(positive)
            columns["rank"].append((s > positive).double().mean())
        for name, values in columns.items():
            shown[name].append(torch.stack(values))
    stacked = {name: torch.stack(values, dim=1) for name, values in shown.items()}
    return {name: x.mean(1, keepdim=True) for name, x in stacked.items()} if mode == "unimodal" else stacked


@pytest.mark.parametrize("mode", ["bimodal", "unimodal", "forward"])
def test_running_moments_equal_their_definition(mode):
    est, keeper = with_scores("dcl", mode)
    width = 2 if mode == "bimodal" else 1
    known = {name: [[Moments() for _ in range(width)] for _ in range(N)] for name in ("log_g", "similarity", "rank")}
    for z1, z2, index in batches(N, steps=12, seed=3, repeats=False):
        run(est, z1, z2, index)
        est.step()
        for name, values in observed((z1, z2), index, 0.2, mode).items():
            for row, value in zip(index.tolist(), values, strict=True):
                for moments, x in zip(known[name][row], value, strict=True):
                    moments.see(x)
    rows = keeper.read(torch.arange(N))
    for name, table in known.items():
        for row, sides in enumerate(table):
            for side, moments in enumerate(sides):
                if moments.visits:
                    near(rows[name][row, side], moments.mean, 1e-9, what=name)
                if moments.visits and name != "rank":
                    near(rows[f"{name}_var"][row, side], moments.var, 1e-8, atol=1e-12, what=name)


@pytest.mark.parametrize("mode", ["bimodal", "unimodal"])
@pytest.mark.parametrize("name", list(BUILDERS))
def test_no_result_depends_on_scores(name, mode):
    est, plain = with_scores(name, mode)[0], build(name, mode)
    for batch in batches(N, steps=4, seed=5):
        assert all(torch.equal(a, b) for a, b in zip(run(est, *batch), run(plain, *batch), strict=True))
        est.step(), plain.step()


@pytest.mark.parametrize("name", ["dcl", "isogclr"])
def test_resumed_rows_are_the_same_bits(name, tmp_path):
    data = batches(N, steps=6, seed=7)
    whole, first, again = (with_scores(name, "bimodal") for _ in range(3))
    for number, batch in enumerate(data):
        run(whole[0], *batch), whole[0].step()
        if number < 3:
            run(first[0], *batch), first[0].step()
    for number in (0, 1):
        compopt.save(first[number], tmp_path / f"{number}")
        compopt.load(again[number], tmp_path / f"{number}")
    for batch in data[3:]:
        run(again[0], *batch), again[0].step()
    for one, other in zip(whole, again, strict=True):
        for key, value in snapshot(one, N).items():
            assert torch.equal(snapshot(other, N)[key], value), key


def on_ranks(group, mode, shard):
    est, keeper = with_scores("dcl", mode, shard=shard, process_group=group)
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size(group)
    for z1, z2, index in batches(N, steps=4, batch=8, seed=9):
        mine = torch.arange(8).tensor_split([1, 5, 6][: size - 1])[rank]
        run(est, z1[mine], z2[mine], index[mine])
        est.step()
    return snapshot(keeper, N), curation.scores(keeper)


@pytest.mark.distributed
@pytest.mark.parametrize(("mode", "shard"), [("bimodal", True), ("unimodal", False)])
def test_ranks_keep_what_one_process_does(mode, shard):
    wanted, found = the_pool().run(on_ranks, 1, mode, shard)[0]
    for answer, scores in the_pool().run(on_ranks, 3, mode, shard):
        for name, value in wanted.items():
            near(answer[name].double(), value.double(), 1e-9, what=name)
        near(scores.score.nan_to_num(), found.score.nan_to_num(), 1e-9)


def on_one_rank(group):
    est = build("dcl", "bimodal", process_group=group)
    if torch.distributed.get_rank(group) == 0:
        kept(est)
    with pytest.raises(ValueError, match=r"attach a ScoreKeeper on all ranks: by rank \[1, 0\]"):
        run(est, *batches(N, steps=1)[0])


@pytest.mark.distributed
def test_a_keeper_on_one_rank_is_refused():
    the_pool().run(on_one_rank, 2)


@pytest.mark.parametrize("name", ["dcl", "isogclr"])
def test_a_keeper_commits_and_discards_with_its_estimator(name):
    first, second, third = batches(N, steps=3, seed=8, repeats=False)
    est, keeper = with_scores(name, "bimodal")
    seen = lambda: curation.scores(keeper).visits.nonzero().flatten().tolist()  # noqa: E731
    run(est, *first), run(est, *second)
    assert (est.pending, keeper.pending, seen()) == (2, 2, [])
    est.step()
    assert (est.t, keeper.t, seen()) == (1, 1, sorted({*first[2].tolist(), *second[2].tolist()}))
    before = snapshot(keeper, N)
    with torch.no_grad():
        est(*third)
    est.eval()
    run(est, *third)
    est.train()
    assert keeper.pending == 0
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.1, fused=True)
    est.attach(optimizer)
    forget = [est.discard, lambda: est.load_state_dict(est.state_dict()), optimizer.step]
    for act in forget:
        run(est, *third)
        optimizer.found_inf = torch.ones(1)  # as a GradScaler sets it on a fused optimizer
        act()
        assert (est.pending, keeper.pending, keeper.t) == (0, 0, 1)
    for key, value in before.items():
        assert torch.equal(snapshot(keeper, N)[key], value), key
    run(est, *third)
    optimizer.found_inf = torch.zeros(1)
    optimizer.step()
    assert keeper.t == est.t == 2 and set(third[2].tolist()) <= set(seen())


def test_a_keeper_that_is_removed_or_attached_again_records_no_more():
    batch, (est, keeper) = batches(N, steps=1)[0], with_scores("dcl", "bimodal")
    other = build("dcl", "bimodal")
    copy = pickle.loads(pickle.dumps((est, keeper)))
    keeper.attach(other)
    run(est, *batch), run(copy[0], *batch)
    assert est.pending == copy[0].pending == keeper.pending == copy[1].pending == 0
    handle = keeper.attach(other)
    run(other, *batch)
    assert other.pending == keeper.pending == 1
    handle.remove()
    run(other, *batch)
    assert other.pending == keeper.pending == 1, "without followers DCL has nothing to commit"
    keeper.step()
    with pytest.raises(ValueError, match="ScoreKeeper is in use with width=2, the estimator has 1"):
        keeper.attach(build("dcl", "unimodal"))


def test_a_call_that_the_keeper_refuses_deposits_nothing():
    est = compopt.SogCLREstimator([{"n": N}])
    kept(est)
    est.add_sample_group({"n": 3})
    z = features(4, D, seed=0)
    with pytest.raises(IndexError, match="index 14 is outside n=13.*has grown to n=16; call add_sample_group of"):
        est(*z, torch.arange(N - 2, N + 2))
    assert est.pending == 0
    est = compopt.DCLEstimator()
    kept(est)
    with pytest.raises(TypeError, match="index is None; pass data-set positions: ScoreKeeper has rows for n=13"):
        est(*z)


def test_a_call_that_one_keeper_refuses_deposits_nothing_in_another():
    est = compopt.DCLEstimator()
    first, second = kept(est), kept(est)
    z = features(4, D, seed=0)
    run(est, *z, torch.arange(4))
    first.add_sample_group({"n": 3})
    with pytest.raises(IndexError, match=f"index {N + 1} is outside n={N}"):
        est(*z, torch.arange(N - 2, N + 2))
    assert first.pending == second.pending == 1  # the call before stays
    est.step()
    for keeper in (first, second):
        assert keeper.read(torch.arange(N))["count"].tolist() == [1] * 4 + [0] * (N - 4)


@pytest.mark.parametrize("options", [{"offload": "cpu"}, {"offload": "disk"}])
def test_the_rows_have_the_placement_of_the_estimator(options, tmp_path):
    if options["offload"] == "disk":
        options = {**options, "offload_dir": tmp_path}
    (est, keeper), (plain, wanted) = with_scores("dcl", "bimodal", **options), with_scores("dcl", "bimodal")
    data = batches(N, steps=5, seed=4)
    for ahead, batch in zip(est.prefetch(keeper.prefetch(data)), data, strict=True):
        run(est, *ahead), run(plain, *batch)
        est.step(), plain.step()
    for key, value in snapshot(wanted, N).items():
        assert torch.equal(snapshot(keeper, N)[key], value), key


def test_a_prefetch_of_the_estimator_reads_the_rows_of_its_keepers(monkeypatch):
    started, start = [], Prefetcher.start
    monkeypatch.setattr(Prefetcher, "start", lambda self, *given: started.append(self) or start(self, *given))
    for name in ("dcl", "isogclr"):
        est, keeper = with_scores(name, "bimodal", offload="cpu")
        for batch in est.prefetch(batches(N, steps=3, seed=4)):
            run(est, *batch), est.step()
        assert started.count(keeper._reading().prefetcher) == 3
        est.prefetch(torch.arange(4))
        assert started.count(keeper._reading().prefetcher) == 4


# -- results from rows ---------------------------------------------------------------------------------------------


def made(score, rank=None, visits=None):
    score = torch.as_tensor(score, dtype=torch.float64)
    visits = torch.ones(len(score), dtype=torch.int64) if visits is None else torch.as_tensor(visits)
    return curation.Scores(score, visits, rank=None if rank is None else torch.as_tensor(rank, dtype=torch.float64))


def test_suspects_are_the_lowest_scores_of_visited_samples():
    found = made([0.0, -5.0, float("nan"), -1.0, 3.0], visits=[1, 2, 0, 1, 1])
    assert curation.suspects(found, 0.5).tolist() == [1, 3]
    assert curation.suspects(found, 1.0).tolist() == [1, 3, 0, 4]
    assert curation.suspects(found, 0.0).tolist() == []
    with pytest.raises(ValueError, match="share must be in"):
        curation.suspects(found, 1.5)
    with pytest.raises(ValueError, match="rank=True"):
        curation.suspects(found)


@pytest.mark.parametrize("share", [0.0, 0.2, 0.6])
def test_the_share_of_wrong_pairs_is_estimated_from_ranks(share):
    g = torch.Generator().manual_seed(1)
    wrong = torch.rand(20_000, generator=g) < share
    rank = torch.where(wrong, torch.rand(20_000, generator=g), 0.2 * torch.rand(20_000, generator=g))
    assert curation.wrong_share(made(-rank, rank)) == pytest.approx(share, abs=0.02)


def test_a_high_estimate_of_the_share_asks_for_the_true_one(monkeypatch):
    """Early in training, right pairs look wrong."""
    for share, warned in ((0.29, False), (0.31, True)):
        monkeypatch.setattr(curation, "wrong_share", lambda found, share=share: share)
        sampler = compopt.samplers.ScoredSampler(trained(), warm_up=1, returning=0.0)
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            list(sampler), list(sampler)
        assert any("31% of the pairs are wrong" in str(each.message) for each in found) == warned


def test_trend_is_the_change_since_earlier_scores():
    (est, keeper), data = with_scores("dcl", "bimodal"), batches(N, steps=8, seed=2)
    for batch in data[:4]:
        run(est, *batch), est.step()
    before = curation.scores(keeper)
    for batch in data[4:]:
        run(est, *batch), est.step()
    keeper.add_sample_group({"n": 2})
    after = curation.scores(keeper, since=before)
    known = before.visits > 0
    near(after.trend[:N][known], (after.score[:N] - before.score)[known])
    assert after.trend[N:].isnan().all() and len(after.score) == N + 2
    with pytest.raises(ValueError, match="since= has 15"):
        curation.scores(compopt.ScoreKeeper(N), since=after)


@pytest.mark.parametrize("suffix", [".csv", ".npy", ".parquet"])
def test_export(suffix, tmp_path):
    found, path = made([0.5, -1.0], [0.1, 0.9]), tmp_path / f"scores{suffix}"
    if suffix == ".parquet":
        pytest.importorskip("pyarrow")
    curation.export(found, path, keys=["a", "b"])
    if suffix == ".csv":
        rows = list(csv.DictReader(path.open()))
        assert [row["key"] for row in rows] == ["a", "b"] and float(rows[1]["score"]) == -1.0
    elif suffix == ".npy":
        assert np.load(path)["rank"].tolist() == [0.1, 0.9]
    else:
        import pyarrow.parquet

        assert pyarrow.parquet.read_table(path).column("visits").to_pylist() == [1, 1]


def test_refusals(tmp_path):
    with pytest.raises(ValueError, match="ScoreKeeper"):
        curation.scores(compopt.SogCLREstimator(N))
    with pytest.raises(ValueError, match="none"):
        curation.scores(compopt.DCLEstimator())
    with pytest.raises(ValueError, match="rate"):
        compopt.ScoreKeeper(N, rate=0.0)
    with pytest.raises(TypeError, match="rank"):
        compopt.ScoreKeeper(N, rank=1)
    with pytest.raises(TypeError, match="est must be a contrastive estimator, with whose .*, got AdamW"):
        compopt.ScoreKeeper(N).attach(torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))]))
    with pytest.raises(ValueError, match="n differs: the ScoreKeeper has 13, the estimator 14"):
        compopt.ScoreKeeper(N).attach(compopt.SogCLREstimator(N + 1))
    with pytest.raises(ValueError, match="must end with"):
        curation.export(made([0.0]), tmp_path / "scores.txt")
    with pytest.raises(ValueError, match="keys must have"):
        curation.export(made([0.0]), tmp_path / "scores.csv", keys=["a", "b"])


def test_uncertainty_is_the_standard_error_of_the_score():
    """Scores of 2,048 samples seen five times with independent features have the standard deviation they report."""
    est = compopt.DCLEstimator(0.5, directions="forward")
    keeper = kept(est, 2048, rank=False)
    g = torch.Generator().manual_seed(3)
    for _ in range(5):
        for index in torch.arange(2048).split(64):
            run(est, *torch.randn(2, 64, 4, generator=g), index)
            est.step()
    found = curation.scores(keeper)
    claimed = found.uncertainty.square().mean().sqrt()
    assert float(claimed) == pytest.approx(float(found.score.std()), rel=0.08)


def test_equal_captions_tie():
    est = compopt.DCLEstimator(0.2)
    keeper = kept(est)
    run(est, torch.randn(8, D), torch.randn(1, D).repeat(8, 1), torch.arange(8))
    est.step()
    near(keeper.read(torch.arange(8))["rank"][:, 0], torch.full((8,), 0.5))


# -- results from features -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk_size", [4, 7, 64])
def test_duplicates_and_rare_samples_equal_their_definitions(chunk_size):
    g = torch.Generator().manual_seed(5)
    z = torch.randn(50, 3, generator=g, dtype=torch.float64)
    z[1::7] = z[0] * torch.arange(1, 9)[: len(z[1::7]), None]  # the same directions with other norms
    s = normalize(z, dim=1) @ normalize(z, dim=1).T
    labels = list(range(50))
    for i in range(50):
        labels[i] = labels[next(j for j in range(i + 1) if j == i or s[i, j] >= 0.95)]
    found = curation.duplicates(z, 0.95, chunk_size=chunk_size)
    assert found.tolist() == labels and (found[1::7] == 0).all() and len(set(labels)) < 40
    near = [sum(sorted((s[i, j].item() for j in range(50) if j != i), reverse=True)[:4]) for i in range(50)]
    want = sorted(range(50), key=lambda i: near[i])[:10]
    assert curation.rare(z, share=0.2, neighbours=4, chunk_size=chunk_size).tolist() == want


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_features_are_duplicates_at_any_threshold(dtype):
    z = torch.randn(300, 64, dtype=dtype, generator=torch.Generator().manual_seed(0))
    assert curation.duplicates(torch.cat([z, 3 * z]), 1.0).tolist() == 2 * list(range(300))


def test_duplicates_are_chained():
    angles = torch.tensor([0.0, 0.1, 0.2, 0.3])  # cos(0.1) = 0.995, cos(0.2) = 0.98
    z = torch.stack([angles.cos(), angles.sin()], dim=1)
    assert curation.duplicates(z, 0.99, chunk_size=2).tolist() == [0, 0, 0, 0]
    assert curation.duplicates(z, 0.999).tolist() == [0, 1, 2, 3]
    assert curation.duplicates(z[:0]).tolist() == []


def test_features_that_tell_nothing():
    z = torch.randn(5, 3)
    for call, kind, message in (
        (lambda: curation.duplicates(z.long()), TypeError, "floating-point"),
        (lambda: curation.duplicates(z / 0), ValueError, "finite"),
        (lambda: curation.duplicates(z, 1.5), ValueError, "least"),
        (lambda: curation.rare(z, share=2.0), ValueError, "share"),
        (lambda: curation.rare(z, neighbours=5), ValueError, "fewer than the 5 samples"),
    ):
        with pytest.raises(kind, match=message):
            call()


def test_directions_that_were_never_visited_do_not_count():
    """An anchor whose negatives a policy excludes is not visited in that direction."""
    est = compopt.DCLEstimator(0.1, pairs=compopt.PairPolicy(false_negatives=0.0))
    keeper = kept(est, 3)
    z1 = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.8, -0.6]])
    z2 = torch.tensor([[0.6, 0.8], [0.7, 0.7], [0.9, -0.3]])
    run(est, z1, z2, torch.arange(3))
    est.step()
    count = keeper._read_rows(torch.arange(3))[1]
    assert (count == 0).any() and (count.amax(1) > 0).all()
    found, rows = curation.scores(keeper), keeper.read(torch.arange(3))
    for row, seen in enumerate(count > 0):
        assert found.similarity[row].item() == pytest.approx(rows["similarity"][row][seen].mean().item())
        assert found.score[row].item() == pytest.approx(-rows["log_g"][row][seen].mean().item())


# -- the sampler ---------------------------------------------------------------------------------------------------


def trained(n=40, wrong=10, **options):
    """Return a keeper whose rows identify the first pairs as wrong."""
    est = compopt.DCLEstimator(0.1, **options)
    keeper = kept(est, n)
    z1 = normalize(torch.randn(n, 16, generator=torch.Generator().manual_seed(4)), dim=1)
    z2 = z1.clone()
    z2[:wrong] = z1[:wrong].roll(1, 0)
    for _ in range(3):
        run(est, z1, z2, torch.arange(n))
        est.step()
    return keeper


def test_the_sampler_leaves_suspects_out_after_the_warm_up():
    sampler = compopt.samplers.ScoredSampler(trained(), warm_up=1, returning=0.2, share=0.25)
    first, second, third = list(sampler), list(sampler), list(sampler)
    assert sorted(first) == list(range(40)) and first != list(range(40))
    assert len(second) == len(sampler) == 32 and set(range(10, 40)) < set(second)
    assert set(second) != set(third) or second != third


@pytest.mark.parametrize("drawn", [1.0, 0.5])
def test_a_loaded_sampler_repeats_its_epoch(drawn):
    sampler = compopt.samplers.ScoredSampler(trained(), warm_up=1, share=0.25, drawn=drawn)
    list(sampler)
    under_way = iter(sampler)
    begun = [next(under_way) for _ in range(5)]
    state = sampler.state_dict()
    again = compopt.samplers.ScoredSampler(trained(wrong=3), warm_up=1, share=0.25, drawn=drawn)  # with other rows
    again.load_state_dict(state)
    order = list(again)
    assert order == begun + list(under_way) and list(again) != order and again.epoch == 3


def divided(group, shard, drawn):
    torch.manual_seed(0)
    keeper = trained(process_group=group, shard=shard)
    options = {"warm_up": 0, "share": 0.2, "process_group": group, "drawn": drawn}
    sampler, whole = (compopt.samplers.ScoredSampler(keeper, divide=divide, **options) for divide in (True, False))
    return list(sampler), sampler.left_out, list(whole)


@pytest.mark.distributed
@pytest.mark.parametrize("drawn", [1.0, 0.5])
def test_ranks_divide_an_epoch(drawn):
    parts, out, orders = zip(*the_pool().run(divided, 3, True, drawn), strict=True)
    samples = [sample for step in zip(*parts, strict=True) for sample in step]
    each = int(drawn * 10)
    assert len(parts[0]) == each and len(set(samples)) == 3 * each
    assert all(order[: 3 * each] == samples for order in orders), "divide=False: the loader divides the order"
    assert all(torch.equal(other, out[0]) for other in out) and not set(samples) & set(out[0].tolist())


def scored(score, rank=0.2, visits=1):
    """Return scores of samples that were all visited, with the same rank."""
    score = torch.as_tensor(score, dtype=torch.float64)
    seen = torch.full((len(score),), visits)
    return curation.Scores(score, seen, rank=torch.full_like(score, rank))


def draws(monkeypatch, found, epochs, **options):
    """Return the drawn samples of each epoch, ``(epochs, n)`` bool, of a sampler that reads these scores."""
    monkeypatch.setattr(curation, "scores", lambda est: found)
    keeper = compopt.ScoreKeeper(len(found.score))
    sampler = compopt.samplers.ScoredSampler(keeper, warm_up=0, share=0.0, **options)
    drawn = torch.zeros(epochs, len(found.score), dtype=torch.bool)
    for row in drawn:
        row[list(sampler)] = True
    return drawn


def test_the_sampler_draws_by_the_scores_without_a_reference(monkeypatch):
    odds = torch.tensor([1.0, 2.0, 4.0, 8.0], dtype=torch.float64)  # weights; one of four samples is drawn
    drawn = draws(monkeypatch, scored(-odds.log()), 4000, drawn=0.25)
    assert (drawn.sum(1) == 1).all()
    assert torch.allclose(drawn.double().mean(0), odds / 15, atol=0.025), "three standard errors"


def test_samples_that_the_reference_lacks_have_the_median_of_the_differences(monkeypatch):
    odds = torch.tensor([1.0, 4.0, 8.0, 0.0, 0.0], dtype=torch.float64)
    reference = scored(torch.cat([odds[:3].log(), torch.tensor([torch.nan])]))  # one was excluded, one added later
    reference.visits[3] = 0
    drawn = draws(monkeypatch, scored(torch.zeros(5)), 4000, drawn=0.2, reference=reference)
    expected = torch.tensor([1.0, 4.0, 8.0, 4.0, 4.0], dtype=torch.float64) / 21
    assert torch.allclose(drawn.double().mean(0), expected, atol=0.025), "three standard errors"


def test_the_sampler_draws_samples_without_a_score_first_and_suspects_never(monkeypatch):
    score = torch.linspace(-1, 1, 40, dtype=torch.float64)
    score[30:] = torch.nan
    found = scored(score)
    found.visits[30:] = 0
    monkeypatch.setattr(curation, "scores", lambda est: found)
    sampler = compopt.samplers.ScoredSampler(compopt.ScoreKeeper(40), warm_up=0, share=0.2, returning=0.0, drawn=0.5)
    for _ in range(20):
        drawn = set(sampler)
        assert set(range(30, 40)) < drawn and not drawn & set(range(6)), "a fifth of the visited samples is suspect"
        assert len(drawn) == len(sampler) == 17 and sampler.left_out[:6].tolist() == list(range(6))
        assert sorted([*drawn, *sampler.left_out.tolist()]) == list(range(40))


def test_the_sampler_refuses():
    with pytest.raises(ValueError, match="ScoreKeeper"):
        compopt.samplers.ScoredSampler(compopt.SogCLREstimator(N))
    with pytest.raises(ValueError, match="warm_up=0"):
        compopt.samplers.ScoredSampler(trained(), warm_up=0)
    with pytest.raises(ValueError, match="ranks"):
        compopt.samplers.ScoredSampler(compopt.ISogCLREstimator(N))
    for name, value in (("share", 1.0), ("share", -0.1), ("returning", 2.0), ("drawn", 0.0), ("drawn", 1.1)):
        with pytest.raises(ValueError, match=name):
            compopt.samplers.ScoredSampler(trained(), **{name: value})
    for reference, options, kind, message in (
        (scored(torch.zeros(40)), {}, ValueError, "no effect with drawn=1"),
        (scored(torch.zeros(41)), {"drawn": 0.5}, ValueError, "the scores of 41 samples, the estimator 40"),
        (torch.zeros(40), {"drawn": 0.5}, TypeError, "curation.scores, got Tensor"),
    ):
        with pytest.raises(kind, match=message):
            compopt.samplers.ScoredSampler(trained(), reference=reference, **options)


# -- states and arguments that are refused --------------------------------------------------------------------------


def visited(**options):
    """Return an estimator, the keeper of a score of every sample, and a sampler of it."""
    est = compopt.recommended(4, n=40)
    keeper = kept(est, 40)
    visit(est, 40, seed=0)
    return est, keeper, compopt.samplers.ScoredSampler(keeper, **options)


def visit(est, n, seed, right=False):
    z = torch.randn(2, n, 4, generator=torch.Generator().manual_seed(seed))
    z[1] = z[0] if right else z[1]
    est(*z.requires_grad_().unbind(), torch.arange(n))
    est.step()


@pytest.mark.parametrize("saved_again", [False, True])
def test_a_sampler_that_is_saved_right_after_its_load_repeats_its_epoch(saved_again):
    options = {"warm_up": 0, "share": 0.2, "drawn": 0.5}
    est, keeper, sampler = visited(**options)
    order = list(sampler)
    visit(est, 40, seed=1)
    state = sampler.state_dict()
    for _ in range(1 + saved_again):
        sampler = compopt.samplers.ScoredSampler(keeper, **options)
        sampler.load_state_dict(state)
        visit(est, 40, seed=2)
        state = sampler.state_dict()
    assert list(sampler) == order


def test_a_refused_estimate_of_the_share_is_not_kept():
    est = compopt.recommended(4, n=8)
    sampler = compopt.samplers.ScoredSampler(kept(est, 8), warm_up=1)
    sampler.set_epoch(1)
    with pytest.raises(RuntimeError, match="no sample has been visited"):
        list(sampler)
    z = torch.randn(2, 8, 4)
    est(z[0].requires_grad_(), -z[0].detach(), torch.arange(8))
    est.step()
    with pytest.raises(RuntimeError, match="all pairs look wrong"):
        list(sampler)
    assert sampler.share is None
    for seed in range(60):
        visit(est, 8, seed, right=True)
    assert len(list(sampler)) == 8 and sampler.share == 0


@pytest.mark.parametrize("options", [{"share": 0.0, "drawn": 0.001}, {"share": 0.95, "returning": 0.0}])
def test_an_epoch_has_at_least_one_sample(options):
    assert len(list(compopt.samplers.ScoredSampler(trained(8, 2), warm_up=0, **options))) == 1


def test_states_that_no_sampler_writes_are_refused():
    *_, sampler = visited(warm_up=0, share=0.2)
    state = sampler.state_dict()
    with pytest.raises(ValueError, match="lacks n, seed"):
        sampler.load_state_dict({})
    with pytest.raises(ValueError, match="positions outside 0 .. 39"):
        sampler.load_state_dict({**state, "left_out": torch.tensor([40])})
    with pytest.raises(TypeError, match="state_dict"):
        sampler.load_state_dict(None)
    before = whole(sampler)
    for error, message, wrong in (
        (ValueError, "epoch of the checkpoint must be from 0", {"epoch": -3}),
        (TypeError, "epoch of the checkpoint must be an integer, got 1.5", {"epoch": 1.5}),
        (TypeError, "begun must be True or False", {"begun": 1.0}),
        (ValueError, r"share of the checkpoint must be in \[0, 1\), got 1", {"share": 1}),
        (ValueError, "warm_up=0 leaves no epoch", {"share": None}),
        (ValueError, "left_out has 40 of 40 samples.*one for each of 1 ranks must be left", {"left_out": range(40)}),
        (ValueError, "left_out has 2 of 40 samples: each may occur once", {"left_out": [3, 3]}),
    ):
        if "left_out" in wrong:
            wrong = {"left_out": torch.tensor(list(wrong["left_out"]))}
        with pytest.raises(error, match=message):
            sampler.load_state_dict({**state, **wrong})
        assert whole(sampler) == before


def test_negative_variances_are_refused():
    _, keeper, _ = visited(warm_up=0, share=0.2)
    state, before = keeper.state_dict(), whole(keeper)
    state["rows"]["similarity_var"][3] = -1
    with pytest.raises(ValueError, match="column 'similarity_var' of the checkpoint must be finite and >= 0, row 3"):
        keeper.load_state_dict(state)
    assert whole(keeper) == before


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_features_of_any_length_have_their_duplicates(scale):
    z = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    z[4] = z[1]
    assert curation.duplicates(z * scale).tolist() == [0, 1, 2, 3, 1, 5]
    assert curation.rare(z * scale, 0.5, 2).tolist() == curation.rare(z, 0.5, 2).tolist()


@pytest.mark.parametrize(("call", "message"), [
    (lambda: curation.scores(5), "est must be an estimator"),
    (lambda: curation.suspects(None), "est must be an estimator"),
    (lambda: compopt.samplers.ScoredSampler(None), "est must be an estimator"),
    (lambda: curation.wrong_share(visited()[1]), "found must be the result of scores"),
    (lambda: curation.scores(visited()[1], since=torch.zeros(40)), "since must be an earlier result"),
    (lambda: curation.export(visited()[1], "scores.csv"), "found must be the result of scores"),
])  # fmt: skip
def test_arguments_of_other_types_are_refused(call, message):
    with pytest.raises(TypeError, match=message):
        call()


def test_the_share_of_a_run_without_a_commit_is_unknown():
    found = curation.scores(compopt.ScoreKeeper(8))
    with pytest.warns(UserWarning, match="no sample has been visited"):
        assert curation.wrong_share(found) == 0


def test_a_batch_that_the_estimator_refuses_on_a_device_is_not_scored():
    class Refusing(compopt.ScoreKeeper):
        def _record(self, est, batch, pairs):
            super()._record(est, replace(batch, bad=torch.tensor(True)), pairs)

    est, keeper = compopt.DCLEstimator(0.1), Refusing(N)
    keeper.attach(est)
    z1, z2 = torch.randn(2, 4, 5, requires_grad=True).unbind()
    est(z1, z2, torch.arange(4)).backward()
    est.step()
    assert keeper.read(torch.arange(N))["count"].tolist() == [0] * N
