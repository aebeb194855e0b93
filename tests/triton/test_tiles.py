"""Kernels against plain torch in float64: every feature, odd sizes, masks, infinities, and equal bits in every run."""

import pytest
import torch

from compopt.kernel.triton import sweep
from compopt.kernel.triton.sweep import NO_PAIR
from tests.triton.operands import DEVICE, EXACT, low, operands, relative, weighted

CASES = {
    "both sides": {},
    "moments and counts": {"moments": True, "counted": True},
    "one temperature": {"shared": 1 / 0.07, "counted": True},
    "rows alone": {"columns": False, "moments": True},
    "columns alone": {"rows": False, "moments": True},
    "one key": {"keys": 1},
    "four keys": {"keys": 4, "counted": True},
    "waves": {"wave": 32, "moments": True},
    "small temperatures": {"tau": (0.003, 0.01), "moments": True},
    "d = 512": {"d": 512, "P": 20, "Q": 17},
    "d = 1": {"d": 1},
    "one row": {"P": 1, "Q": 200},
    "one column": {"P": 200, "Q": 1},
    "several tiles": {"P": 129, "Q": 257, "d": 33, "moments": True},
}


def both(o, precision=EXACT):
    """Return the sums in float64, and those of the kernel."""
    return sweep.sums(o), sweep.sums(low(o, precision))


def assert_sums(o, actual, expected, rtol):
    """Compare log-sums to ``rtol``, also of anchors without candidates, means and numbers of candidates."""
    for ours, theirs in zip(actual, expected, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is None:
            continue
        torch.testing.assert_close(ours.log_total().cpu().double(), theirs.log_total(), rtol=rtol, atol=20 * rtol)
        if o.counted:
            assert torch.equal(ours.number.cpu().double(), theirs.number)
        if o.moments:
            some = theirs.total > 0
            means = [(side.dot.cpu().double() / side.total.cpu().double())[some] for side in (ours, theirs)]
            torch.testing.assert_close(*means, rtol=20 * rtol, atol=20 * rtol)


@pytest.mark.parametrize("case", CASES)
def test_sums_and_products_equal_those_of_float64(case):
    o = operands(**CASES[case])
    expected, actual = both(o)
    exact_to = 1e-7 / CASES[case].get("tau", (0.02,))[0]  # s is rounded to 6e-8, and divided by tau
    assert_sums(o, actual, expected, exact_to)
    o = weighted(o, expected)
    exact, found = sweep.products(o, True), sweep.products(low(o), True)
    for f, e in zip(found, exact, strict=True):
        assert relative(f, e) < exact_to


def test_a_sum_is_what_its_definition_says():
    """Compare the implementation in torch with a loop over pairs."""
    o = operands(P=5, Q=7, moments=True, counted=True)
    (side, _), s = sweep.sums(o), o.x @ o.y.T
    for i in range(5):
        chosen = [j for j in range(7) if not (o.row_keys[:, i] == o.column_keys[:, j]).any()]
        terms = torch.tensor([float(s[i, j] * o.rows.scale[i]) for j in chosen])
        assert float(side.number[i]) == len(chosen)
        torch.testing.assert_close(side.log_total()[i], terms.double().logsumexp(0), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("precision, rtol", [("bf16", 2e-2), ("tf32x3", 1e-5)])
def test_other_precisions(precision, rtol):
    """bfloat16 rounds the features to 2^-9, which 1 / tau multiplies."""
    o = operands(d=64, tau=(0.07, 0.2), moments=True)
    expected, actual = both(o, precision)
    for ours, theirs in zip(actual, expected, strict=True):
        assert relative(ours.log_total(), theirs.log_total()) < rtol / 5
    o = weighted(o, expected)
    found = sweep.products(low(o, precision), True)
    for f, e in zip(found, sweep.products(o, True), strict=True):
        assert relative(f, e) < rtol and f.dtype == torch.float32


def test_anchors_without_candidates():
    """No result is NaN, and other anchors keep their sums."""
    o = operands(P=6, Q=9, keys=1, moments=True, counted=True)
    o.row_keys[0, 2], o.column_keys[0] = 5, 5
    o.row_keys[0, :2], o.row_keys[0, 3:] = 1, 1
    (rows, columns), (exact, _) = sweep.sums(low(o)), sweep.sums(o)
    assert rows.number.tolist() == [9, 9, 0, 9, 9, 9] and columns.number.tolist() == [5] * 9
    assert float(rows.total[2]) == 0 and float(rows.top[2]) == pytest.approx(NO_PAIR, rel=1e-6)
    assert torch.equal(rows.log_total().isinf().cpu(), exact.log_total().isinf())
    (found, _) = sweep.products(low(weighted(o, sweep.sums(o))), True)
    assert found.isfinite().all() and float(found[2].abs().sum()) == 0


def test_the_sums_of_small_temperatures_do_not_underflow():
    """At tau = 0.005 and s = 0 a shift of 1 / tau leaves exp(-200), which is 0 in float32."""
    o = operands(P=8, Q=8, d=64, tau=(0.005, 0.005001))
    assert float((o.x @ o.y.T).max()) < 0.5
    for ours, theirs in zip(sweep.sums(low(o)), sweep.sums(o), strict=True):
        assert ours.log_total().isfinite().all()
        assert relative(ours.log_total(), theirs.log_total()) < 1e-5


def test_a_bad_row_spoils_its_own_pairs_alone():
    """NaN as in the torch path: the row's sums, and those of the columns that it is paired with."""
    o = operands(P=6, Q=5, keys=1)
    o.row_keys[0], o.column_keys[0] = torch.arange(6), torch.arange(5)
    o.x[3] = torch.nan
    for ours, theirs in zip(sweep.sums(low(o)), sweep.sums(o), strict=True):
        assert torch.equal(ours.log_total().isnan().cpu(), theirs.log_total().isnan())
    assert int(theirs.log_total().isnan().sum()) == 4  # column 3 is no pair of row 3


@pytest.mark.parametrize("case", ["moments and counts", "one temperature"])
def test_the_same_bits_in_every_run(case):
    o = low(operands(P=150, Q=140, **CASES[case]))
    runs = [sweep.sums(o) for _ in range(2)]
    for one, other in zip(*runs, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True) if a is not None)


def test_infinite_and_zero_weights_leave_no_trace():
    """An infinite log-normalizer is a top of +inf: the anchor's coefficients are 0."""
    o = operands(P=6, Q=5)
    o = weighted(o, sweep.sums(o))
    o.rows.top[1] = torch.inf
    o.columns.factor[:] = 0
    found, _ = sweep.products(low(o), False)
    assert found.isfinite().all() and float(found[1].abs().sum()) == 0
    assert found.device.type == DEVICE.type and found[0].abs().sum() > 0
