"""Metrics of a call: whom they count, and whom not."""

import pytest
import torch

import compopt

IN_NO_PAIR = {"index": torch.tensor([0, 0, 2, 3, 4, 5]), "labels": torch.tensor([7, 8, 7, 7, 7, 7])}  # sample 0


@pytest.mark.parametrize("mode", ["bimodal", "unimodal"])
def test_anchors_without_negatives_have_no_effective_ones(mode):
    """Whatever the temperature is made of."""
    z = torch.randn(2, 6, 8, dtype=torch.float64)
    est = compopt.DCLEstimator(tau=0.1, mode=mode)
    found = []
    for tau in (0.1, torch.tensor(0.1, dtype=torch.float64), torch.full((6,), 0.1, dtype=torch.float64)):
        est(*z, **IN_NO_PAIR, tau=tau)
        found.append(est.metrics["effective_negatives"].item())
    assert found == pytest.approx([found[0]] * 3)
    if mode == "bimodal":  # no pair at all
        alone, keys = compopt.ISogCLREstimator(10, rho=0.1), torch.tensor([[0, 0, 1, 1], [5, 6, 5, 6], [7, 8, 8, 7]])
        alone(*torch.randn(2, 4, 8), keys[0], keys[1], labels=keys[2])
        assert alone.metrics["effective_negatives"].isnan()


def test_further_candidates_are_no_anchors():
    z1, z2 = torch.nn.functional.normalize(torch.randn(2, 5, 4, dtype=torch.float64), dim=2)
    extra = torch.nn.functional.normalize(torch.randn(7, 4, dtype=torch.float64))
    est, found = compopt.DCLEstimator(tau=0.3), []
    for anchors, candidates in ((z1, torch.cat([z2, extra])), (z2, z1)):
        weights = (anchors @ candidates.T / 0.3).exp()
        weights[:, :5].fill_diagonal_(0)
        found.append(weights.sum(1).square() / weights.square().sum(1))
    est(z1, z2, extra=extra)
    torch.testing.assert_close(est.metrics["effective_negatives"], torch.cat(found).mean())


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
    """As some gradient scalers hand over."""
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
