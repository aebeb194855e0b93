"""Non-finite or too large feature rows never enter the state; the loss is not finite, and a warning counts them."""

import math
import re
import warnings
from functools import partial

import pytest
import torch
import torch.distributed as dist

import compopt
from compopt import losses
from compopt.estimator.attach import Attachments
from tests import four, test_losses
from tests.database import BY_NAME, DATABASE, MODES, STATEFUL
from tests.helpers import assert_same_bits, batches, bits, call, make, run, snapshot, tensors_of, warmed
from tests.pool import the_pool

N = 20


def poisoned(z, rows, value):
    """Return z with one coordinate of some rows replaced by a value."""
    z = z.clone()
    z[rows, 1] = value
    return z


def quietly(function, *args):
    """Call a function; return its result and the messages of its warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", message="batches with . negatives per anchor")  # of these small ones
        result = function(*args)
    return result, [str(w.message) for w in caught]


def count_in(messages):
    """Return the number of feature rows that the warnings report, 0 if there are none; no other warning is expected."""
    counts = [re.fullmatch(r"(\d+) feature rows of a batch are NaN, infinite or too large .*", m) for m in messages]
    assert all(counts) and len(counts) <= 1, messages
    return int(counts[0][1]) if counts else 0


def bad_rows(est, z1, z2, index, **options):
    """Call and commit; return how many rows the warning reports, which is 0 if and only if the loss is finite."""
    loss, messages = quietly(lambda: call(est, z1, z2, index, **options))
    est.step()
    assert bool(torch.isfinite(loss)) == (count_in(messages) == 0)
    return count_in(messages)


@pytest.mark.covering("info mode")
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 1e200])
@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("info", STATEFUL, ids=str)
def test_the_state_keeps_its_values(info, mode, side, value):
    est, twin = warmed(info, mode, N, 90), warmed(info, mode, N, 90)
    before = snapshot(est, N)
    z1, z2, index = batches(N, 1, seed=91)[0]
    z = [z1, z2]
    z[side] = poisoned(z[side], [2], value)
    messages = []
    loss, caught = quietly(est, *z, index)
    messages += caught
    assert not torch.isfinite(loss), "the user's own guards must see it"
    _, caught = quietly(est.step)
    messages += caught
    assert_same_bits(before, snapshot(est, N))
    for z1, z2, index in batches(N, 2, seed=92):  # hidden state is unaffected as well
        (got, caught) = quietly(run, est, z1, z2, index)
        messages += caught
        want = run(twin, z1, z2, index)
        if not (info.global_tau or info.restarts or info.draws):  # these depend on the number of commits
            assert all(bits(a) == bits(b) for a, b in zip(got, want, strict=True))
        assert torch.isfinite(got[0])
        est.step()
        twin.step()
    spoken = [m for m in messages if "finite" in m.lower() or "nan" in m.lower()]
    assert spoken, "no warning"


def test_the_warning_names_the_count():
    """Two bad feature rows among seven samples, then three of which two belong to one sample."""
    est = compopt.SogCLREstimator(N, tau=0.1)
    z1, z2, index = batches(N, 1, batch=7, seed=95, repeats=False, dtype=torch.float32)[0]
    for value in (float("nan"), 1e20):
        bad = poisoned(z1, [1, 4], value)
        assert bad_rows(est, bad, z2, index) == 2
        assert bad_rows(est, bad, poisoned(z2, [4], -value), index) == 3
        assert bad_rows(est, z1, z2, index) == 0


# rows too large to be normalised -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype, size", [(torch.float16, 1e4), (torch.bfloat16, 1e17), (torch.float32, 1e17)])
def test_large_rows_that_can_be_normalised_are_good(dtype, size):
    est, twin = (compopt.SogCLREstimator(N, tau=0.1) for _ in range(2))
    z1, z2, index = batches(N, 1, seed=99, dtype=dtype)[0]
    size = 2.0 ** round(math.log2(size))  # exact
    assert bad_rows(est, z1 * size, z2 * size, index) == 0
    twin(z1, z2, index)
    twin.step()
    torch.testing.assert_close(est.read(index)["log_u"], twin.read(index)["log_u"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_too_short_to_be_normalised_are_zero_rows(dtype):
    """Their norm is clamped to 1e-12, as in F.normalize."""
    z1, z2, index = batches(N, 1, seed=99, dtype=dtype)[0]
    short, zero = z1.clone(), z1.clone()
    short[2] *= 1e-30
    zero[2] = 0
    est, twin = (compopt.SogCLREstimator(N, tau=0.1) for _ in range(2))
    got, messages = quietly(run, est, short, z2, index)
    assert not messages
    for a, b in zip(got, run(twin, zero, z2, index), strict=True):
        torch.testing.assert_close(a, b)
    est.step()
    twin.step()
    torch.testing.assert_close(snapshot(est, N), snapshot(twin, N))


@pytest.mark.parametrize("size", [1e15, 1e16, 1e18, 1e20, 1e38])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("mode", MODES)
def test_features_as_they_come_have_a_limit_too(mode, dtype, size):
    """Similarities of 1e30 reach the sentinel for excluded pairs, which rows would store as a value."""
    est = compopt.SogCLREstimator(N, tau=0.1, mode=mode, normalize=False)
    z1, z2, index = batches(N, 1, seed=99, dtype=dtype)[0]
    z1, z2 = (torch.nn.functional.normalize(z) for z in (z1, z2))
    assert bad_rows(est, 1.01 * size * z1, 1.01 * size * z2, index) == 12
    assert est.read(index)["count"].sum() == 0
    assert bad_rows(est, 0.9e15 * z1, 0.9e15 * z2, index) == 0
    assert est.read(index)["log_u"].isfinite().all() and (est.read(index)["count"] == 1).all()


@pytest.mark.parametrize("mode", MODES)
def test_encoded_rows_count(mode):
    """Bad features from encode count like those of the batch; one tensor for both directions is counted once."""
    states = []
    for value in (float("nan"), 1e20):
        z1, z2, _ = batches(N, 1, seed=99, dtype=torch.float32)[0]
        est, asked = compopt.EMC2Estimator(N, tau=0.2, burn_in=0, mode=mode), []

        def encode(missing, value=value, asked=asked):
            asked.append(len(missing))
            z = torch.full((len(missing), 4), value)
            return z if mode == "unimodal" else (z, torch.ones_like(z))

        assert bad_rows(est, z1, z2, torch.arange(6), encode=encode) == 0 and not asked
        assert bad_rows(est, z1, z2, torch.tensor([0, 1, 2, 10, 11, 12]), encode=encode) == asked[0] > 0
        states.append(snapshot(est, N))
    assert_same_bits(*states)


def on_two_ranks(group, size):
    """Call with a bad row on rank 1 only; return the loss, the number of bad rows and the counts of the rows."""
    est = compopt.SogCLREstimator(N, tau=0.1, process_group=group)
    rank = dist.get_rank(group)
    z1, z2, _ = batches(N, 1, batch=8, seed=99, dtype=torch.float32)[0]
    own = slice(4 * rank, 4 * rank + 4)
    if rank:
        z1[5] *= size
    loss, messages = quietly(est, z1[own], z2[own], torch.arange(8)[own])
    est.step()
    return loss.item(), count_in(messages), est.read(torch.arange(8))["count"].tolist()


@pytest.mark.distributed
def test_a_large_row_of_one_rank_withholds_the_batch_of_all():
    (loss0, bad0, count0), (loss1, bad1, count1) = the_pool().run(on_two_ranks, 2, 1e20)
    assert math.isnan(loss0) and math.isnan(loss1)
    assert (bad0, bad1) == (0, 1)  # each rank counts its own
    assert count0 == count1 == [0] * 8


def test_a_sampler_s_bank_leaves_large_rows_out():
    bank = compopt.samplers.bank.FeatureBank(N)
    z1, z2, index = batches(N, 1, seed=99, dtype=torch.float32)[0]
    z1[2] *= 1e20
    bank.write(index, bank.rounded(z1, z2))
    with pytest.warns(UserWarning, match="1 features that were .* too large"):
        unseen = bank.unseen()
    assert unseen.sum() == N - 5 and unseen[index[2]]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["sogclr", "isogclr-adam", "batch-dual"])
def test_the_finite_deposits_of_a_window_are_committed(name, mode, order):
    """Commit the deposit without a NaN of two deposits with different samples."""
    est, twin = (warmed(BY_NAME[name], mode, N, 90) for _ in range(2))
    z1, z2, _ = batches(N, 1, batch=6, seed=96)[0]
    good, bad = torch.arange(0, 6), torch.arange(6, 12)
    for which in order:
        if which == 0:
            run(est, z1, z2, good)
        else:
            quietly(est, poisoned(z1, [3], float("nan")), z2, bad)
    quietly(est.step)
    run(twin, z1, z2, good)
    twin.step()
    assert_same_bits(snapshot(twin, N), snapshot(est, N))


@pytest.mark.parametrize("name", ["neural-through-alpha", "dcl"])
def test_a_bad_further_candidate(name):
    """A network's alpha does not depend on further candidates, but the weights do."""
    est = warmed(BY_NAME[name], "bimodal", N, 90)
    z1, z2, extra = torch.randn(3, 4, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    assert bad_rows(est, z1, z2, torch.arange(4), extra=poisoned(extra, 2, float("inf"))) == 1


@pytest.mark.covering("info mode")
@pytest.mark.parametrize("mode", [*MODES, "forward"])
@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("info", STATEFUL, ids=str)
def test_a_bad_sample_in_no_pair_reaches_no_later_call(info, side, mode):
    """Its gradient would be NaN nevertheless; it is in the first batch, when a memory or a queue is empty."""
    est, _ = make(info, mode, N)
    z = list(torch.randn(2, 4, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64))
    z[side] = poisoned(z[side], 0, math.nan)
    assert bad_rows(est, *z, torch.tensor([3, 3, 5, 7]), labels=torch.tensor([1, 0, 1, 1])) == 1
    for batch in batches(N, 2, seed=92):
        assert run(est, *batch)[0].isfinite()
        est.step()


@pytest.mark.parametrize("blocking", [True, False])
def test_a_save_refuses_what_no_load_accepts(tmp_path, blocking):
    """Otherwise the next saves would remove the last checkpoint that can be loaded."""
    est = compopt.InfoNCEEstimator(learn_tau=True)
    good = compopt.save(est, tmp_path)
    with torch.no_grad():
        next(est.parameters()).fill_(torch.nan)
    for _ in range(2):
        with pytest.raises(ValueError, match="log_inverse .*must be finite"):
            compopt.save(est, tmp_path, blocking=blocking)
    assert [path.name for path in tmp_path.iterdir()] == [good.name]
    est = compopt.SogCLREstimator(10)
    est.data_fingerprint = 123
    with pytest.raises(TypeError, match="data_fingerprint must be a str or None, got 123"):
        compopt.save(est, tmp_path / "other", blocking=blocking)


@pytest.mark.filterwarnings("ignore:.*are NaN, infinite or too large.*:UserWarning")
@pytest.mark.parametrize("chunk_size", [None, 2])
@pytest.mark.parametrize("index2", [None, [9, 1, 2, 3]])
@pytest.mark.parametrize("mode", ["forward", "bimodal"])
def test_a_positive_that_is_not_finite_keeps_the_row_of_its_anchor(mode, index2, chunk_size):
    """SogCLR's average does not contain the positive, which with one direction is in no other pair of its sample."""
    directions = "forward" if mode == "forward" else "both"
    est = compopt.SogCLREstimator(N, dtype=torch.float64, directions=directions, chunk_size=chunk_size)
    z1, z2 = torch.randn(2, 4, 6, dtype=torch.float64)
    z2[0] = torch.inf
    loss = est(z1, z2, torch.arange(4), index2=None if index2 is None else torch.tensor(index2))
    est.step()
    assert loss.isnan() and est.read(torch.tensor([0]))["count"].item() == 0


# errors after the estimate ------------------------------------------------------------------------------------------


def saved(obj):
    """Return all tensors of the state, and the counters, by name."""
    state = obj.state_dict()
    return {**tensors_of(state), "t": torch.tensor([obj.t, obj.pending])}


@pytest.mark.covering()
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("info", DATABASE, ids=str)
def test_a_warning_as_error_drops_the_deposit_of_its_own_call_alone(info, mode):
    est, twin = (warmed(info, mode, N, 90) for _ in range(2))
    first, (z1, z2, index), last = batches(N, 3, seed=97)
    for each in (est, twin):
        run(each, *first)
    for _ in range(2):
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="1 feature rows of a batch are NaN")
            with pytest.raises(UserWarning, match="1 feature rows"):
                run(est, poisoned(z1, [2], math.nan), z2, index)
    assert_same_bits(saved(twin), saved(est))
    for each in (est, twin):
        run(each, *last)
        each.step()
    assert_same_bits(saved(twin), saved(est))


# every operation that deposits: how to build its object, and how to call it in a step
LOSSES = test_losses.CASES_BY_KIND
OPERATIONS = {  # of objects alone: how to build one, and how to call it in a step
    **{kind: (make, lambda o, k: four.call(o, *data(k)[1:])) for kind, make in four.KINDS.items()},
    **{kind: (partial(kind, 30), lambda o, k: o(*test_losses.batch(LOSSES[type(o)], k))) for kind in LOSSES},
    "inner average": (partial(losses.InnerAverage, N), lambda o, k: o.update(data(k)[1][:, 0], data(k)[2])),
    "compositional_loss": (
        four.KINDS["average"],
        lambda o, k: compopt.compositional_loss(data(k)[1][:, 0].abs() + 0.1, data(k)[2], o, torch.log),
    ),
}


def data(step):
    return batches(N, step + 1, dim=four.DIM)[step]


@pytest.mark.covering(all=True)
@pytest.mark.parametrize("name", OPERATIONS, ids=str)
def test_an_error_after_a_deposit_drops_it_alone(name, monkeypatch):
    """The last thing that a deposit does is to look at the loop, and a warning may be an error."""
    make, call = OPERATIONS[name]
    one, two = make(), make()
    for obj in (one, two):
        call(obj, 0)
    with monkeypatch.context() as patch:
        patch.setattr(Attachments, "count_pending", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            call(one, 1)
    assert_same_bits(saved(one), saved(two))
    for obj in (one, two):
        call(obj, 2)
        obj.step()
    assert_same_bits(saved(one), saved(two))


def test_feature_gradients_that_run_out_of_memory_in_backward(monkeypatch):
    est = compopt.SogCLREstimator(N)
    batch = batches(N, 1)[0]
    est.feature_gradients(*batch)

    def fails(*args, **options):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(torch.Tensor, "backward", fails)
    with pytest.raises(torch.OutOfMemoryError):
        est.feature_gradients(*batch)
    assert est.pending == 1


KINDS_OF_STATE = ("sogclr", "isogclr-adam", "memory-dual", "neural-queue", "emc2", "global-dual")


def two_windows(group):
    """Per entry: the state after a window in which the call with a NaN on rank 1 is an error, and after one without."""
    rank, found = dist.get_rank(group), {}
    own = slice(4 * rank, 4 * rank + 4)
    for info in map(BY_NAME.__getitem__, KINDS_OF_STATE):
        states = []
        for fails in (True, False):
            est = info.build("bimodal", N, torch.float64, max(0.07, info.min_tau), 0.6, process_group=group)
            for k, (z1, z2, index) in enumerate(batches(N, 3, batch=8, seed=98, repeats=False)):
                if k == 1 and not fails:
                    continue
                with warnings.catch_warnings():
                    warnings.filterwarnings("error", message=".* feature rows of a batch are NaN")
                    try:
                        run(est, poisoned(z1, [5], math.nan)[own] if k == 1 else z1[own], z2[own], index[own])
                    except (UserWarning, RuntimeError) as error:
                        assert k == 1 and isinstance(error, UserWarning if rank else RuntimeError)
                        assert rank or "rank 1 failed: UserWarning: 1 feature rows" in str(error)
                    else:
                        assert k != 1
                assert est.pending == max(1, k)
            est.step()
            states.append(saved(est))
        found[info.name] = states
    return found


@pytest.mark.distributed
def test_ranks_agree_on_a_warning_that_is_an_error_on_one():
    answers = the_pool().run(two_windows, 2)
    for name in answers[0]:
        states = [state for answer in answers for state in answer[name]]
        for state in states[1:]:
            assert_same_bits(states[0], state)


def alone_in_error(group):
    est, rank = compopt.SogCLREstimator(N, process_group=group), dist.get_rank(group)
    data = [[x[4 * rank : 4 * rank + 4] for x in batch] for batch in batches(N, 3, batch=8, repeats=False)]
    run(est, *data[0])
    with pytest.MonkeyPatch.context() as patch:
        if rank:  # after all communication of the call
            patch.setattr(compopt.contrastive, "with_gradients", lambda *given: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                run(est, *data[1])
        else:
            run(est, *data[1])
    for _ in range(2):
        est.step()
        with pytest.raises(RuntimeError, match=r"differ in the number of calls .* committed .*: by rank \[2, 1\]"):
            run(est, *data[2])
    est.load_state_dict(est.state_dict())
    run(est, *data[2])


@pytest.mark.distributed
def test_a_call_that_only_one_rank_has_completed_is_noticed():
    the_pool().run(alone_in_error, 2)


@pytest.mark.parametrize("name", ["sogclr", "memory", "neural", "memory-global-dual"])
def test_an_error_after_the_estimate_leaves_no_deposit(name, monkeypatch):
    """A call that runs out of memory and is repeated must count once."""
    from compopt.kernel.pairs import Pairs

    one, two = (warmed(BY_NAME[name], "bimodal", N, 2) for _ in range(2))
    batch = batches(N, 1, seed=9)[0]

    def fails(*args, **options):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(Pairs, "gradients", fails)
    with pytest.raises(torch.OutOfMemoryError):
        run(one, *batch)
    monkeypatch.undo()
    for est in (one, two):
        run(est, *batch)
        est.step()
    assert_same_bits(snapshot(one, N), snapshot(two, N))
