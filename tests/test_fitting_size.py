"""compopt.FittingSize: a micro-batch size that is halved before anything is accumulated."""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import compopt
from compopt.gradient_cache import fitting
from tests.cached import (
    FSDP2,
    SHARES,
    D,
    Encoders,
    N,
    Noisy,
    Scarce,
    assert_like_two_windows,
    data,
    linear_towers,
    run_windows,
    two,
)
from tests.pool import the_pool


class Huge(Scarce):
    """A layer that requests more memory than the machine has."""

    def ask(self, x):
        torch.empty(2**60 if len(x) > self.room else 1)


class Library(Scarce):
    """A layer that fails with a given message."""

    def ask(self, x):
        if len(x) > self.room:
            raise RuntimeError(self.message)


def tower_with(layer):
    """Return a tower with dropout and batch normalisation that already has gradients."""
    tower = Noisy(norm=nn.BatchNorm1d(8).double())
    tower.layers.insert(2, layer)
    for p in tower.parameters():
        p.grad = torch.ones_like(p)
    return tower


@pytest.mark.parametrize("kind", [Scarce, Huge])
@pytest.mark.parametrize("when", ["forward", "backward"])
def test_the_results_are_those_of_the_size_that_fits(kind, when):
    x, towers, losses, after = torch.randn(15, 5).double(), [], [], []
    for size, room in ((4, 15), (compopt.FittingSize(16), 5)):
        est, tower = compopt.SogCLREstimator(N), tower_with(kind(room, when))
        torch.manual_seed(1)
        batch = {"batch": (x, x), "index": torch.arange(15), "micro_batch_size": size, "batch_norm": "update_once"}
        losses.append(compopt.gradient_cache(est, (tower, tower), **batch))
        towers.append(tower)
        after.append(torch.get_rng_state())
        assert est.pending == 1
    assert size.size == 4 and torch.equal(*losses) and torch.equal(*after)
    expected, found = ([*tower.buffers(), *(p.grad for p in tower.parameters())] for tower in towers)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def encodes(size, calls, tower=None, **call):
    """Yield, call by call, the sizes of the micro-batches that one tower, used as both, encodes."""
    tower, seen = tower or nn.Sequential(Scarce(4, "forward"), linear_towers()[0]), []
    tower.register_forward_pre_hook(lambda _, args: seen.append(len(args[0])))
    x = torch.randn(8, 5).double()
    for _ in range(calls):
        compopt.gradient_cache(compopt.DCLEstimator(), (tower, tower), (x, x), micro_batch_size=size, **call)
        yield seen.copy()
        seen.clear()


@pytest.mark.parametrize("message", ["CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED"])
def test_libraries_that_are_out_of_memory(message):
    """Libraries raise a plain RuntimeError."""
    size, tower = compopt.FittingSize(8), nn.Sequential(Library(4, "forward"), linear_towers()[0])
    tower[0].message = message
    next(encodes(size, 1, tower))
    assert size.size == 4


def test_trials_begin_the_first_calls_or_all():
    passes = [4] * 8  # two towers, two micro-batches each, two passes
    assert list(encodes(compopt.FittingSize(8), 3)) == [[8, 4, 4, *passes], [4, 4, *passes], passes]
    assert list(encodes(compopt.FittingSize(8, trials=1), 2)) == [[8, 4, 4, *passes], passes]
    assert list(encodes(compopt.FittingSize(4, trials=None), 3)) == 3 * [[4, 4, *passes]]
    with torch.no_grad():
        assert list(encodes(compopt.FittingSize(4), 1)) == [[4] * 4]


def test_a_budget_is_halved_and_the_largest_micro_batch_tried():
    budget = compopt.FittingSize(12, cut=lambda inputs, tokens: [2, *[tokens // 2] * (12 // tokens)], trials=1)
    assert list(encodes(budget, 1)) == [[6, 3, 3, *4 * [2, 3, 3]]]


def test_what_does_not_fit_at_all_and_other_errors():
    with pytest.raises(RuntimeError, match="out of memory with micro-batches of size 1"):
        next(encodes(compopt.FittingSize(8), 1, nn.Sequential(Scarce(0, "forward"), linear_towers()[0])))
    size = compopt.FittingSize(8)
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        next(encodes(size, 1, nn.Linear(6, D).double()))
    assert size.size == 8


@pytest.mark.parametrize(
    ("tower", "message"),
    [
        (lambda x: x, "needs a module"),
        (nn.Sequential(nn.Linear(5, D), nn.SyncBatchNorm(D)), "waiting in SyncBatchNorm"),
    ],
)
def test_trials_that_are_refused(tower, message):
    with pytest.raises(ValueError, match=message):
        x = torch.randn(8, 5)
        compopt.gradient_cache(
            compopt.DCLEstimator(),
            (tower, tower),
            (x, x),
            micro_batch_size=compopt.FittingSize(4),
            batch_norm="update_once",
        )


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"size": 0}, ValueError, "size must be a positive integer, got 0"),
        ({"size": 2, "trials": 0}, ValueError, "trials must be a positive integer, got 0"),
        ({"size": 2, "cut": 5}, TypeError, "cut must be a function of inputs and a size, got 5"),
    ],
)
def test_mistakes_are_named(change, error, message):
    with pytest.raises(error, match=message):
        compopt.FittingSize(**change)


# ranks -----------------------------------------------------------------------------------------------------------

ZERO = [pytest.param(f"ZeRO{k}", marks=[pytest.mark.launch, pytest.mark.full]) for k in range(4)]


@pytest.mark.distributed
@pytest.mark.parametrize("when", [pytest.param("forward", marks=pytest.mark.full), "backward"])
@pytest.mark.parametrize("framework", ["DDP", pytest.param("FSDP2", marks=pytest.mark.full), *ZERO])
def test_one_rank_of_two_has_less_memory(framework, when, request):
    """This rank encodes more micro-batches than the other one, in a window of two calls."""
    if framework.startswith("ZeRO"):
        request.getfixturevalue("deepspeed_compiled")
    for rank, (gradients, deposits, size) in enumerate(the_pool(2, timeout=120).run(run_windows, 2, framework, when)):
        assert deposits == 2 and size.size == (8, 2)[rank]
        assert_like_two_windows(framework, gradients)


def large(inputs, size):
    """Return sizes of micro-batches; raise if ``size`` is below 8."""
    if size < 8:
        raise KeyError("too small a budget")
    return [min(size, len(inputs[0]))] if len(inputs[0]) <= size else [size, len(inputs[0]) - size]


def refused(group, case):
    """Return the error message of this rank, or None."""
    model, size, last = Encoders(torch.float64), compopt.FittingSize(8), dist.get_rank() == 1
    if case == "beside":
        model.first = DistributedDataParallel(model.first)
    else:
        model.first.insert(1, Scarce(0 if last and case != "some" else N, "forward"))
        model = DistributedDataParallel(model)
    if case == "cut":
        size = compopt.FittingSize(8, cut=large)
    elif case == "some" and last:
        size = 8
    *inputs, index = data(dist.get_rank(), SHARES[2], torch.float64)
    try:
        compopt.gradient_cache(
            compopt.DCLEstimator(), model, tuple(inputs[:2]), index, encode=two, micro_batch_size=size
        )
    except (KeyError, RuntimeError, ValueError) as error:
        return str(error)


@pytest.mark.full
@pytest.mark.distributed
def test_ranks_do_not_wait_for_a_trial():
    assert all("waiting in DistributedDataParallel" in message for message in the_pool(2).run(refused, 2, "beside"))
    other, own = the_pool(2).run(refused, 2, "around")
    assert "rank 1 failed: RuntimeError: out of memory" in other and own.startswith("out of memory")
    other, own = the_pool(2).run(refused, 2, "cut")
    assert other == "rank 1 failed: KeyError: 'too small a budget'" and own == "'too small a budget'"
    expected = r"rank 0 is in a trial of compopt.FittingSize while rank 1 is in compopt.gradient_cache\(\)"
    assert all(re.match(expected, message) for message in the_pool(2).run(refused, 2, "some"))


def without_room(group):
    """Return the error message of this rank; the last rank has no memory for all parameters."""
    model, *inputs = FSDP2().wrap(Encoders(torch.float64)), *data(dist.get_rank(), SHARES[2], torch.float64)
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(fitting, "room_for", lambda wrapper: torch.empty(2**60))
        with pytest.raises(RuntimeError) as raised:
            est, size = compopt.DCLEstimator(), compopt.FittingSize(8)
            compopt.gradient_cache(est, model, tuple(inputs[:2]), inputs[3], encode=two, micro_batch_size=size)
    return str(raised.value)


@pytest.mark.full
@pytest.mark.distributed
def test_ranks_do_not_wait_for_one_that_cannot_hold_all_parameters():
    other, own = the_pool(2).run(without_room, 2)
    assert other.startswith("rank 1 failed: RuntimeError") and "can't allocate memory" in own


def room_in_a_lower_precision(group):
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = fully_shard(nn.Linear(5, 3), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    return sorted((held.numel(), held.dtype) for held in fitting.room_for(model))


@pytest.mark.distributed
def test_the_room_for_parameters_is_what_a_pass_gathers():
    """FSDP2 shards parameters in float32, and gathers them in the precision of the pass."""
    assert the_pool(2).run(room_in_a_lower_precision, 2) == [[(3, torch.bfloat16), (15, torch.bfloat16)]] * 2
