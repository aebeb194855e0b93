"""One direction and further candidates: every estimator equals its naive twin (on several ranks: test_pairs)."""

import pytest
import torch

import compopt
from compopt import diagnostics
from tests.database import BY_NAME, DATABASE
from tests.helpers import assert_same_bits, batches, call, compare_state, features, generator, make, near, run, snapshot
from tests.test_agreement import compare_forward, follow

N, D = 13, 4
KINDS = ("forward", "bimodal", "unimodal")
TAKES_EXTRA = [info for info in DATABASE if info.takes_extra]


def further(step, count=5, known=True):
    """Return features and positions of further candidates, some of which are positives of anchors."""
    g = generator(900 + step)
    extra = torch.randn(count, D, generator=g, dtype=torch.float64)
    return {"extra": extra} | ({"extra_index": torch.randint(0, N, (count,), generator=g)} if known else {})


@pytest.mark.covering()
@pytest.mark.parametrize("tau", [0.07, 1.0])
@pytest.mark.parametrize("info", DATABASE, ids=str)
def test_one_direction(info, tau):
    est, ref = make(info, "forward", N, tau=tau, gamma=0.6)
    follow(info, est, ref, N, batches(N, steps=4 if info.network else 8, seed=1))


@pytest.mark.covering()
@pytest.mark.parametrize("chunk_size", [None, 2])
@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("info", TAKES_EXTRA, ids=str)
def test_further_candidates(info, kind, known, chunk_size):
    est, ref = make(info, kind, N, gamma=0.6, chunk_size=chunk_size)
    for step, batch in enumerate(batches(N, steps=4, seed=2)):
        follow(info, est, ref, N, [batch], **further(step, step, known))  # 0 to 3 candidates


@pytest.mark.parametrize("kind", ["forward", "bimodal"])
@pytest.mark.parametrize("name", ["dcl", "sogclr", "isogclr"])
def test_what_excludes_pairs(kind, name):
    """Test index2 and labels with further candidates; with one direction index2 does not address rows."""
    info = BY_NAME[name]
    est, ref = make(info, kind, N, gamma=0.6)
    for step, (z1, z2, index) in enumerate(batches(N, steps=4, seed=3)):
        g = generator(step)
        index2 = torch.randint(0, N, (len(index),), generator=g)
        given = {"index2": index2, "labels": torch.arange(len(index)) // 2, **further(step)}
        given["extra_index"][0] = index2[1]
        compare_forward(info, est, ref, z1, z2, index, **given)
        est.step(), ref.step()
        if kind == "forward":  # otherwise each direction has its own visits
            compare_state(est, ref, N, info)


# -- other operations of an estimator ----------------------------------------------------------------------------


def test_a_temperature_per_anchor():
    z1, z2 = features(6, D, seed=11)
    tau = torch.linspace(0.1, 0.5, 6, dtype=torch.float64)
    est = compopt.DCLEstimator(directions="forward", dtype=torch.float64)
    assert torch.equal(est(z1, z2, tau=tau), est(z1, z2, tau=tau[:, None]))
    with pytest.raises(ValueError, match=r"\(6, 1\)"):
        est(z1, z2, tau=tau[:, None].expand(6, 2))


def test_diagnostics():
    z1, z2 = features(9, D, seed=12)
    both = diagnostics.log_normalizers(z1, z2, 0.2)
    near(diagnostics.log_normalizers(z1, z2, 0.2, directions="forward", chunk_size=2), both[:, :1])
    near(diagnostics.global_loss(z1, z2, 0.2, directions="forward"), 0.2 * both[:, 0].mean())
    est = compopt.SogCLREstimator(9, gamma=1.0, tau=0.2, directions="forward", dtype=torch.float64)
    _, g1, g2 = run(est, z1, z2, torch.arange(9))
    exact = diagnostics.global_gradient(z1, z2, 0.2, directions="forward")
    near(g1, exact[0]), near(g2, exact[1])
    est.step()
    assert diagnostics.normalizer_error(est, z1, z2) < 1e-20
    assert diagnostics.gradient_error(est, z1, z2, batch_size=9)["relative"] < 1e-12
    assert diagnostics.normalizer_error(compopt.DCLEstimator(tau=0.2, directions="forward"), z1, z2, batch_size=5) > 0
    with pytest.raises(ValueError, match="two modalities"):
        diagnostics.global_loss(z1, z2, 0.2, "unimodal", directions="forward")


Z = torch.randn(4, D)


@pytest.mark.parametrize(
    "kind, match, given",
    [
        (ValueError, "negatives must be features .*, or these and their positions, got 1 of them", {"extra": [1.0]}),
        (TypeError, "negatives must be a floating-point tensor, got float", {"extra": 1.0}),
        (ValueError, r"\(M, 4\)", {"extra": torch.randn(3, D + 1)}),
        (ValueError, r"\(M, 4\)", {"extra": torch.randn(D)}),
        (TypeError, "dtype", {"extra": torch.randn(3, D, dtype=torch.float64)}),
        (ValueError, "device", {"extra": torch.randn(3, D, device="meta")}),
        (ValueError, r"negatives\[1\]", {"extra": torch.randn(3, D), "extra_index": torch.arange(2)}),
        (TypeError, r"negatives\[1\]", {"extra": torch.randn(3, D), "extra_index": torch.rand(3)}),
        (
            IndexError,
            r"negatives\[1\] .* is outside .*also pass index2=index",
            {"extra": torch.randn(3, D), "extra_index": torch.tensor([0, N, 1])},
        ),
    ],
)
def test_refusals(kind, match, given):
    est = compopt.SogCLREstimator(N, directions="forward")
    before = snapshot(est, N)
    with pytest.raises(kind, match=match):
        call(est, Z, Z, torch.arange(4), **given)
    assert est.pending == 0
    assert_same_bits(before, snapshot(est, N))


def test_what_cannot_be_built_or_called():
    with pytest.raises(TypeError, match="pass one of them"):  # positions without index
        compopt.DCLEstimator()(Z, Z, negatives=(Z, torch.arange(4)))
    with pytest.raises(ValueError, match="both views are anchors"):
        compopt.DCLEstimator(mode="unimodal", directions="forward")
    with pytest.raises(ValueError, match="'both', 'forward'"):
        compopt.DCLEstimator(directions="backward")
    with pytest.raises(ValueError, match="negatives= must be left out"):
        compopt.EMC2Estimator(N)(Z, Z, torch.arange(4), negatives=Z)
