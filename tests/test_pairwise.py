"""``compopt.pairwise`` equals a loop over pairs of modalities; pairs share no rows, and modalities may be missing."""

from itertools import combinations

import pytest
import torch

import compopt
from tests.pool import the_pool

N, B, D = 40, 6, 5
NAMES = ("image", "text", "audio")
EVERY = list(combinations(NAMES, 2))


def features(counts=(B, B, B), seed=0):
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.randn(B, D, generator=generator, dtype=torch.float64) for _ in NAMES]
    return {name: z[:count].requires_grad_() for name, z, count in zip(NAMES, drawn, counts, strict=True)}


def estimators(pairs=EVERY, **options):
    return {pair: compopt.SogCLREstimator(N, gamma=0.5, dtype=torch.float64, **options) for pair in pairs}


def gradients(z):
    return [torch.zeros_like(each) if each.grad is None else each.grad for each in z.values()]


def rows(every):
    return [est.read(torch.arange(N))["log_u"] for est in every.values()]


@pytest.mark.parametrize("pairs", [EVERY, EVERY[:2]])
def test_it_is_the_loop(pairs):
    every, alone = estimators(pairs), estimators(pairs)
    for step in range(2):
        index = torch.randperm(N, generator=torch.Generator().manual_seed(step))[:B]
        z, other = features(seed=step), features(seed=step)
        loss = compopt.pairwise(every, z, index)
        expected = sum(alone[a, b](other[a], other[b], index) for a, b in pairs)
        loss.backward()
        expected.backward()
        for one, each in zip([loss, *gradients(z)], [expected, *gradients(other)], strict=True):
            torch.testing.assert_close(one, each, rtol=0, atol=1e-12)
        for est in (*every.values(), *alone.values()):
            est.step()
        assert all(map(torch.equal, rows(every), rows(alone)))
    assert not torch.equal(*rows(every)[:2])


def test_one_estimator_without_rows_serves_all_pairs():
    est, z = compopt.InfoNCEEstimator(0.1, learn_tau=True, dtype=torch.float64), features()
    expected = sum(est(z[a], z[b]) for a, b in EVERY)
    loss = compopt.pairwise(est, z)
    torch.testing.assert_close(loss, expected)
    found, wanted = (torch.autograd.grad(value, [*z.values(), *est.parameters()]) for value in (loss, expected))
    torch.testing.assert_close(found, wanted)


def test_a_missing_modality_leaves_its_pairs_out():
    every, z = estimators(), features()
    del z["audio"]
    loss, alone = compopt.pairwise(every, z, torch.arange(B)), estimators()["image", "text"]
    assert torch.equal(loss, alone(z["image"], z["text"], torch.arange(B)))
    assert [est.pending for est in every.values()] == [1, 0, 0]


def subsets():
    """Return the samples of each modality, in different orders; text and audio share only one, too few for a pair."""
    return {
        "image": torch.tensor([3, 1, 4, 7, 5]),
        "text": torch.tensor([4, 7, 2, 3]),
        "audio": torch.tensor([1, 7, 9]),
    }


def test_samples_are_found_by_their_positions():
    index, z, every = subsets(), features((5, 4, 3)), estimators()
    loss = compopt.pairwise(every, z, index)
    loss.backward()
    alone, other = estimators(), features((5, 4, 3))
    first = alone["image", "text"](other["image"][[0, 2, 3]], other["text"][[3, 0, 1]], torch.tensor([3, 4, 7]))
    second = alone["image", "audio"](other["image"][[1, 3]], other["audio"][[0, 1]], torch.tensor([1, 7]))
    (first + second).backward()
    for one, each in zip([loss, *gradients(z)], [first + second, *gradients(other)], strict=True):
        torch.testing.assert_close(one, each, rtol=0, atol=1e-12)
    assert [est.pending for est in every.values()] == [1, 1, 0]


def test_no_pair_with_two_samples_is_zero():
    z = features((2, 2, 1))
    index = {"image": torch.tensor([0, 1]), "text": torch.tensor([1, 2]), "audio": torch.tensor([2])}
    loss = compopt.pairwise(estimators(), z, index)
    loss.backward()
    assert loss == 0 and all(each.grad is not None and not each.grad.any() for each in z.values())


def on_ranks(group, parts):
    """Return loss, gradients and rows of this rank; image and text have the samples ``parts``, audio some of them."""
    at = parts[torch.distributed.get_rank()]
    every, z = estimators(), features((B, B, B))
    some = [i for i in at if i % 2 == 0]  # rank 1 has none
    mine = {name: z[name].detach()[some if name == "audio" else at].requires_grad_() for name in NAMES}
    index = {name: torch.tensor(some if name == "audio" else at, dtype=torch.long) for name in NAMES}
    loss = compopt.pairwise(every, mine, index)
    loss.backward()
    for est in every.values():
        est.step()
    return loss.detach(), gradients(mine), rows(every)


@pytest.mark.distributed
def test_two_ranks_are_one():
    parts = [[0, 2, 4], [1, 3, 5]]
    found = the_pool(2, 60).run(on_ranks, 2, parts)
    z, every = features(), estimators()
    index = {"image": torch.arange(B), "text": torch.arange(B), "audio": torch.tensor([0, 2, 4])}
    given = {**z, "audio": z["audio"][[0, 2, 4]]}
    loss = compopt.pairwise(every, given, index)
    loss.backward()
    for est in every.values():
        est.step()
    for rank, (value, grads, table) in enumerate(found):
        torch.testing.assert_close(value, loss.detach(), rtol=1e-12, atol=1e-12)
        for name, gradient in zip(NAMES, grads, strict=True):
            at = [i for i in parts[rank] if name != "audio" or i % 2 == 0]
            torch.testing.assert_close(gradient / 2, z[name].grad[at], rtol=1e-10, atol=1e-12)
        for one, other in zip(table, rows(every), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def one_sound(group):
    """Both ranks have sample 9, as from a padding sampler, and only it has audio; then one rank has no audio."""
    rank = torch.distributed.get_rank()
    z, every = features((2, 2, 1), seed=rank), estimators(EVERY[:2])
    index = {"image": torch.tensor([rank, 9]), "text": torch.tensor([rank, 7]), "audio": torch.tensor([9])}
    loss = compopt.pairwise(every, z, index)
    pending = [est.pending for est in every.values()]
    names = NAMES[:2] if rank else NAMES
    with pytest.raises(ValueError, match=r"different pairs of modalities.*features \(0, d\)"):
        compopt.pairwise(every, {name: z[name] for name in names}, index)
    return loss.isfinite().item(), pending


def another_order(group, one):
    """Pass one index for all modalities, whose order differs between the ranks, and then the same order."""
    names = NAMES if torch.distributed.get_rank() else NAMES[::-1]
    est = compopt.DCLEstimator() if one else estimators(EVERY if names == NAMES else EVERY[::-1])
    z = features()
    with pytest.raises(ValueError, match=r"the ranks have different pairs of modalities, .*in the same order") as told:
        compopt.pairwise(est, {name: z[name] for name in names}, torch.arange(B))
    pending = 0 if one else sum(each.pending for each in est.values())
    other = compopt.DCLEstimator() if one else estimators()
    return str(told.value), pending, compopt.pairwise(other, z, torch.arange(B)).item()


@pytest.mark.distributed
@pytest.mark.parametrize("one", [True, False], ids=["one estimator", "an estimator for each pair"])
def test_ranks_with_another_order_are_told_before_anything_is_computed(one):
    first, second = the_pool(2, 60).run(another_order, 2, one)
    assert first == second and first[1] == 0


@pytest.mark.distributed
def test_ranks_with_the_same_sample_and_with_other_modalities():
    assert the_pool(2, 60).run(one_sound, 2) == [(True, [1, 0])] * 2


def test_what_is_refused():
    z, index = features(), torch.arange(B)
    with pytest.raises(ValueError, match="SogCLREstimator keeps a state.*an estimator for each"):
        compopt.pairwise(compopt.SogCLREstimator(N), z, index)
    with pytest.raises(ValueError, match="SogCLREstimator keeps a state"):  # another batch may have more modalities
        compopt.pairwise(compopt.SogCLREstimator(N), {name: z[name] for name in NAMES[:2]}, index)
    with pytest.raises(ValueError, match="MemoryEstimator keeps a state"):
        compopt.pairwise(compopt.recommended(D), z, index)
    with pytest.raises(ValueError, match=r"\['audio'\] make no pair"):
        compopt.pairwise(estimators([("image", "text")]), z, index)
    with pytest.raises(ValueError, match=r"\['image'\] make no pair"):
        compopt.pairwise(estimators(), {"image": z["image"]}, index)
    with pytest.raises(TypeError, match=r"contrastive estimator for \('image', 'text'\), got Linear"):
        compopt.pairwise(torch.nn.Linear(2, 2), z, index)
    with pytest.raises(ValueError, match=r"index\['audio'\] has 3 more than once"):
        compopt.pairwise(estimators(), z, dict.fromkeys(NAMES, index) | {"audio": torch.tensor([0, 1, 3, 3, 4, 5])})
    with pytest.raises(KeyError, match="index has no 'audio'; give it the positions of the 6 samples"):
        compopt.pairwise(estimators(), z, {"image": index, "text": index})
    with pytest.raises(ValueError, match=r"index\['text'\] has 3 entries"):
        compopt.pairwise(estimators(), z, {"image": index, "text": index[:3], "audio": index})


def test_each_of_them_is_attached_and_saved(tmp_path):
    every, model = estimators(), torch.nn.Linear(D, D, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for est in every.values():
        est.attach(optimizer)
    compopt.pairwise(every, {name: model(z) for name, z in features().items()}, torch.arange(B)).backward()
    optimizer.step()
    assert [est.t for est in every.values()] == [1, 1, 1]
    again = estimators()
    for (a, b), est in every.items():
        compopt.save(est, tmp_path / f"{a}-{b}")
        compopt.load(again[a, b], tmp_path / f"{a}-{b}")
    assert all(map(torch.equal, rows(every), rows(again)))
