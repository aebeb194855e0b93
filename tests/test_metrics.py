"""Metrics of a call: the anchors, candidates and samples that they count."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import compopt
from tests.helpers import call, features, run
from tests.pool import the_pool

IN_NO_PAIR = {"index": torch.tensor([0, 0, 2, 3, 4, 5]), "labels": torch.tensor([7, 8, 7, 7, 7, 7])}  # sample 0


@pytest.mark.parametrize("mode", ["bimodal", "unimodal"])
def test_anchors_without_negatives_have_no_effective_ones(mode):
    """The metric is the same for a temperature given as a float, a scalar tensor or a value per sample."""
    z = torch.randn(2, 6, 8, dtype=torch.float64)
    est = compopt.DCLEstimator(tau=0.1, mode=mode)
    found = []
    for tau in (0.1, torch.tensor(0.1, dtype=torch.float64), torch.full((6,), 0.1, dtype=torch.float64)):
        est(*z, **IN_NO_PAIR, tau=tau)
        found.append(est.metrics["effective_negatives"].item())
    assert found == pytest.approx([found[0]] * 3)
    if mode == "bimodal":  # no pair at all
        alone, keys = compopt.ISogCLREstimator(10, rho=0.1), torch.tensor([[0, 0, 1, 1], [5, 6, 5, 6], [7, 8, 8, 7]])
        alone(*torch.randn(2, 4, 8), keys[0], index2=keys[1], labels=keys[2])
        assert alone.metrics["effective_negatives"].isnan()


def test_further_candidates_are_no_anchors():
    z1, z2 = torch.nn.functional.normalize(torch.randn(2, 5, 4, dtype=torch.float64), dim=2)
    extra = torch.nn.functional.normalize(torch.randn(7, 4, dtype=torch.float64))
    est, found = compopt.DCLEstimator(tau=0.3), []
    for anchors, candidates in ((z1, torch.cat([z2, extra])), (z2, z1)):
        weights = (anchors @ candidates.T / 0.3).exp()
        weights[:, :5].fill_diagonal_(0)
        found.append(weights.sum(1).square() / weights.square().sum(1))
    est(z1, z2, negatives=extra)
    torch.testing.assert_close(est.metrics["effective_negatives"], torch.cat(found).mean())


# the cross-entropy with the positive ------------------------------------------------------------------------------

INDEX, INDEX2, LABELS = torch.tensor([[3, 1, 2, 3, 7, 8], [0, 4, 5, 9, 4, 6], [0, 1, 2, 3, 4, 1]])
CASES = {
    "distinct": {},
    "repeats": {"index": INDEX},
    "keys": {"index": INDEX, "index2": INDEX2, "labels": LABELS},
    "in no pair": IN_NO_PAIR,
    "extra": {"index": INDEX, "extra": True, "extra_index": torch.tensor([3, 0, 9, 5, 8])},
}


def cross_entropy(z1, z2, tau, mode, directions, given, extra):
    """Compute the metric with :func:`torch.nn.functional.cross_entropy`, without code of the library."""
    z1, z2 = F.normalize(z1, dim=1), F.normalize(z2, dim=1)
    size, one = len(z1), torch.eye(len(z1), dtype=torch.bool)
    same = one.clone()
    for key in ("index", "index2", "labels"):
        same |= given[key][:, None] == given[key] if key in given else one
    found = []
    for own, other in [(z1, z2), (z2, z1)][: 1 if directions == "forward" else 2]:
        logits = (own @ other.T).masked_fill(same & ~one, -torch.inf)
        if mode == "unimodal":
            logits = torch.cat([logits, (own @ own.T).masked_fill(same, -torch.inf)], dim=1)
        if own is z1 and extra is not None:
            positive = given.get("index2", given["index"])
            outside = own @ F.normalize(extra, dim=1).T
            logits = torch.cat([logits, outside.masked_fill(positive[:, None] == given["extra_index"], -torch.inf)], 1)
        found.append(F.cross_entropy(logits / tau, torch.arange(size)))
    return sum(found) / len(found)


def info_nce(group, case, mode, directions, chunk_size, dtype, kind):
    """Return the metric of a call on this rank, and the reference value."""
    rank, ranks = (dist.get_rank(group), dist.get_world_size(group)) if dist.is_initialized() else (0, 1)
    z1, z2 = features(6, 8, seed=1, dtype=dtype)
    given = dict(CASES[case])
    extra = features(5, 8, seed=2, dtype=dtype)[0] if given.pop("extra", None) else None
    if mode == "unimodal":
        given.pop("index2", None)
    options = {"mode": mode, "directions": directions, "chunk_size": chunk_size, "process_group": group}
    est = kind(tau=0.3, **options) if kind is not compopt.SogCLREstimator else kind(10, tau=0.3, **options)
    if est.n is not None:
        given.setdefault("index", torch.arange(6))
    wanted = cross_entropy(z1, z2, 0.3, mode, directions, given, extra)
    own = {name: value.chunk(ranks)[rank] for name, value in given.items()}
    if extra is not None:
        own["extra"] = extra.chunk(ranks)[rank]
    call(est, z1.chunk(ranks)[rank], z2.chunk(ranks)[rank], **own)
    return est.metrics["info_nce"], wanted


SETTINGS = [("bimodal", "both"), ("bimodal", "forward"), ("unimodal", "both")]


@pytest.mark.parametrize(("mode", "directions"), SETTINGS)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("chunk_size", [None, 2])
def test_info_nce_is_the_cross_entropy(case, mode, directions, chunk_size):
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-6)):
        for kind in (compopt.DCLEstimator, compopt.SogCLREstimator):
            found, wanted = info_nce(None, case, mode, directions, chunk_size, dtype, kind)
            assert found.shape == () and not found.requires_grad
            torch.testing.assert_close(found, wanted, rtol=0, atol=tolerance)


@pytest.mark.distributed
@pytest.mark.parametrize(("mode", "directions"), SETTINGS)
@pytest.mark.parametrize("case", CASES)
def test_info_nce_of_ranks_is_that_of_the_global_batch(case, mode, directions):
    args = case, mode, directions, None, torch.float64, compopt.DCLEstimator
    for found, wanted in the_pool(2, timeout=120).run(info_nce, 2, *args):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


def test_the_loss_of_info_nce_is_on_its_scale_after_a_shift():
    """The loss is tau (info_nce - log |N|), the formula of the guides."""
    z1, z2 = features(6, 8, seed=3)
    est = compopt.InfoNCEEstimator(tau=0.2)
    loss = est(z1, z2)
    torch.testing.assert_close(loss, 0.2 * (est.metrics["info_nce"] - torch.tensor(5.0).double().log()))


def test_info_nce_at_temperatures_of_samples():
    z1, z2 = features(6, 8, seed=3)
    tau = torch.linspace(0.1, 0.5, 6, dtype=torch.float64)
    est = compopt.DCLEstimator()
    est(z1, z2, tau=tau)
    logits = F.normalize(z1, dim=1) @ F.normalize(z2, dim=1).T
    wanted = [F.cross_entropy(each / tau[:, None], torch.arange(6)) for each in (logits, logits.T)]
    torch.testing.assert_close(est.metrics["info_nce"], sum(wanted) / 2, rtol=0, atol=1e-12)


def test_a_new_sample_counts_once():
    est = compopt.SogCLREstimator(10)
    z = torch.randn(2, 4, 8)
    for index, wanted in (([0, 0, 0, 1], 2), ([0, 5, 5, 1], 1), ([0, 1, 5, 5], 0)):
        est(*z, torch.tensor(index))
        assert est.metrics["new_rows"] == wanted
        est.step()


def test_a_radius_that_cannot_bind_is_noticed_with_labels_too():
    est = compopt.ISogCLREstimator(10)
    with pytest.warns(UserWarning, match="rho=6.0 is not below"):
        est(*torch.randn(2, 5, 4), torch.tensor([3, 1, 2, 7, 8]), labels=torch.tensor([0, 1, 2, 3, 3]))


def test_a_flag_with_an_axis_leaves_numbers_numbers():
    """Some gradient scalers pass the flag as a tensor of shape (1,); the scalars of the state keep their shapes."""
    est = compopt.FastCLIPEstimator(10, rho=0.1)
    est(*torch.randn(2, 5, 4), torch.arange(5))
    est._commit(torch.zeros(1))
    compopt.FastCLIPEstimator(10, rho=0.1).load_state_dict(est.state_dict())


@pytest.mark.parametrize(
    "build",
    [
        lambda: compopt.FastCLIPEstimator(10, version="v0", rho=-3),
        lambda: compopt.FastCLIPEstimator(10, version="v1", rho=-3),
        lambda: compopt.NeuCLIPEstimator(4, rho=-1),
    ],
)
def test_a_radius_below_zero_is_refused_where_it_is_not_used(build):
    with pytest.raises(ValueError, match="rho must be 0 or greater"):
        build()


def test_metrics_keep_the_temperature_of_their_call():
    tau = torch.tensor(0.1, requires_grad=True)
    est = compopt.DCLEstimator(tau)
    run(est, *features(8, 4, 0), torch.arange(8))
    with torch.no_grad():
        tau.fill_(0.5)
    assert est.metrics["tau_median"].item() == pytest.approx(0.1)
