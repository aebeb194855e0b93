"""Calls that backward would repeat: they raise an error inside checkpointed functions, and only there."""

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import compopt
from tests.database import BY_NAME, DATABASE, MODES, STATEFUL
from tests.helpers import assert_same_bits, features, make, near, run, snapshot
from tests.pool import the_pool

N = 16
REFUSED = "inside a checkpointed function.*checkpoint the encoders alone"
STATELESS = [info for info in DATABASE if not info.has_state]


def data(seed=0, rows=8):
    """Return two leaf tensors and an index."""
    return *(z.requires_grad_() for z in features(rows, 4, seed=seed)), torch.arange(rows) + 3 * seed


def back_and_forth(est, z1, z2, index, use_reentrant):
    """Run forward and backward through a checkpointed call."""
    checkpoint(lambda a, b: est(a, b, index), z1, z2, use_reentrant=use_reentrant).backward()


# errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("info", STATEFUL, ids=str)
def test_a_checkpointed_estimator_is_refused(info, mode, use_reentrant):
    """The call deposits nothing, earlier deposits stay, and the run continues as if the call had not been made."""
    est, twin = (make(info, mode, N)[0] for _ in range(2))
    run(est, *data(0))
    run(twin, *data(0))
    for seed in (1, 2):
        with pytest.raises(RuntimeError, match=REFUSED):
            back_and_forth(est, *data(seed), use_reentrant)
        assert est.pending == 1
    for got, want in zip(run(est, *data(1)), run(twin, *data(1)), strict=True):
        assert torch.equal(got, want)
    est.step()
    twin.step()
    assert_same_bits(snapshot(est, N), snapshot(twin, N))


def test_the_refusal_comes_before_backward():
    """Without reentrant autograd the first call already raises."""
    est, (z1, z2, index) = compopt.SogCLREstimator(N), data()
    with pytest.raises(RuntimeError, match=REFUSED):
        checkpoint(lambda a, b: est(a, b, index), z1, z2, use_reentrant=False)
    with pytest.raises(RuntimeError, match=REFUSED):  # feature_gradients computes gradients even under no_grad
        checkpoint(lambda a, b: est.feature_gradients(a, b, index)[0], z1, z2, use_reentrant=True)
    assert est.pending == 0


def test_other_ways_into_a_checkpoint_are_refused():
    """Raise for a module, nested checkpoints, saved-tensor hooks around the call, and checkpoint_sequential."""
    est, (z1, z2, index) = compopt.SogCLREstimator(N), data()

    class Loss(torch.nn.Module):
        def forward(self, a, b):
            with torch.autograd.graph.save_on_cpu():
                return est(a, b, index)

    loss = Loss()
    for call in (
        lambda: checkpoint(lambda a: checkpoint(loss, a, z2, use_reentrant=False), z1, use_reentrant=False),
        lambda: checkpoint_sequential([torch.nn.Identity(), lambda a: loss(a, z2)], 1, z1, use_reentrant=False),
        lambda: checkpoint(torch.enable_grad()(loss), z1, z2, use_reentrant=True),
    ):
        with pytest.raises(RuntimeError, match=REFUSED):
            call().backward()
    assert est.pending == 0


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpointed_moving_average_is_refused(use_reentrant):
    u, index = compopt.MovingAverageEstimator(N), torch.arange(4)
    g = (torch.rand(4) + 0.5).requires_grad_()
    for function in (lambda g: compopt.compositional_loss(g, index, u, torch.log), lambda g: g + u.update(g, index)):
        with pytest.raises(RuntimeError, match=REFUSED):
            checkpoint(function, g, use_reentrant=use_reentrant).sum().backward()
    assert u.pending == 0


def test_deepspeed_checkpoints_are_refused():
    checkpointing = pytest.importorskip("deepspeed.runtime.activation_checkpointing.checkpointing")
    est, (z1, z2, index) = compopt.SogCLREstimator(N), data()
    for how in (checkpointing.checkpoint, checkpointing.non_reentrant_checkpoint):
        with pytest.raises(RuntimeError, match=REFUSED):
            how(lambda a, b: est(2 * a, b, index), z1, z2).backward()
        assert est.pending == 0
        est(how(lambda a: 2 * a, z1), z2, index).backward()  # a checkpointed encoder is allowed
        assert est.pending == 1
        est.discard()


# several ranks ----------------------------------------------------------------------------------------------------


def outcome(call):
    """Return the error that a rank raises."""
    try:
        call()
    except RuntimeError as error:
        return str(error)
    return ""


def on_two_ranks(group, name, how, who):
    """Checkpoint the call on ranks ``who``, or run backward there if only that detects it; return error and pending."""
    est, _ = make(BY_NAME[name], "bimodal", N, process_group=group)
    rank = dist.get_rank(group)
    z1, z2, index = data(rank, 4)
    calls = {
        "forward": lambda a, b: est(a, b, index),
        "reentrant": lambda a, b: est(a, b, index),
        "monitored": lambda a, b: torch.no_grad()(est)(a, b, index) + a.exp().sum(),
    }
    if how != "forward":
        loss = checkpoint(calls[how], z1, z2, use_reentrant=how == "reentrant")
        heard = outcome(loss.backward) if rank in who else ""
    elif rank in who:
        heard = outcome(lambda: checkpoint(calls[how], z1, z2, use_reentrant=False))
    else:
        heard = outcome(lambda: calls[how](z1, z2))
    pending = est.pending
    run(est, z1, z2, index)  # the ranks are still synchronized
    return heard, pending


@pytest.mark.distributed
@pytest.mark.parametrize("who", [[0, 1], [0], [1]])
@pytest.mark.parametrize("how", ["forward", "reentrant", "monitored"])
@pytest.mark.parametrize("name", ["infonce", "sogclr", "neural", "emc2"])
def test_no_rank_waits_for_another(name, how, who):
    """Calls are collective, so stateless estimators raise too; ranks that do not recompute raise or continue."""
    answers = the_pool().run(on_two_ranks, 2, name, how, who)
    for rank, (heard, pending) in enumerate(answers):
        assert pending == 0
        if rank in who:
            assert "inside a checkpointed function" in heard
        elif how == "forward":
            assert "refused its arguments" in heard
        else:
            assert heard == ""


# allowed ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("info", STATELESS, ids=str)
def test_what_keeps_nothing_may_be_checkpointed(info, use_reentrant):
    z1, z2, index = data()
    _, *want = run(make(info, "bimodal", N)[0], z1, z2, index)
    back_and_forth(make(info, "bimodal", N)[0], z1, z2, index, use_reentrant)
    near(z1.grad, want[0], 1e-14)
    near(z2.grad, want[1], 1e-14)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("name", ["sogclr", "isogclr", "neural", "emc2", "global-dual"])
def test_what_deposits_nothing_may_be_checkpointed(name, use_reentrant):
    """Evaluation may be checkpointed, with and without a gradient."""
    est, _ = make(BY_NAME[name], "bimodal", N)
    z1, z2, index = data()
    run(est, z1, z2, index)
    est.step()
    before = snapshot(est, N)
    with torch.no_grad():
        checkpoint(lambda a, b: est(a, b, index), z1, z2, use_reentrant=use_reentrant)
    est.eval()
    _, want, _ = run(est, z1, z2, index)
    back_and_forth(est, z1, z2, index, use_reentrant)
    near(z1.grad, want, 1e-14)
    assert est.pending == 0
    assert_same_bits(before, snapshot(est, N))


def checkpointed_output(use_reentrant):
    """Call in a hook on a checkpointed encoder's output, as a gradient cache does, just before recomputation starts."""

    def way(x, call):
        z = checkpoint(torch.exp, x, use_reentrant=use_reentrant)
        z.register_hook(lambda g: call())
        z.sum().backward()

    return way


def inside_checkpointed_encoder(use_reentrant):
    """Call in a backward hook of a module that is recomputed."""

    def way(x, call):
        encoder = torch.nn.Sequential(torch.nn.Tanh(), torch.nn.Tanh())
        encoder[0].register_full_backward_hook(lambda *_: call())
        checkpoint(encoder, x, use_reentrant=use_reentrant).sum().backward()

    return way


def saved_tensor_hooks(x, call):
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        call()
    with torch.autograd.graph.save_on_cpu():
        call()


WAYS = {
    "hook on a checkpointed output": checkpointed_output(False),
    "hook on a reentrant output": checkpointed_output(True),
    "hook inside a checkpointed encoder": inside_checkpointed_encoder(False),
    "hook inside a reentrant encoder": inside_checkpointed_encoder(True),
    "saved tensor hooks": saved_tensor_hooks,
}


@pytest.mark.parametrize("way", list(WAYS))
@pytest.mark.parametrize("name", ["sogclr", "neural", "emc2"])
def test_ordinary_calls_in_unusual_places(name, way):
    """A call inside a backward pass is not a recomputation: it deposits, and its gradient is the usual one."""
    est, _ = make(BY_NAME[name], "bimodal", N)
    twin, _ = make(BY_NAME[name], "bimodal", N)
    z1, z2, index = data()
    calls = []

    def call():
        with torch.enable_grad():
            calls.append(run(est, z1, z2, index))

    WAYS[way](torch.randn(3, requires_grad=True, dtype=torch.float64), call)
    assert calls and est.pending == len(calls)
    for got in calls:
        for a, b in zip(got, run(twin, z1, z2, index), strict=True):
            assert torch.equal(a, b)
    est.step()
    twin.step()
    assert_same_bits(snapshot(est, N), snapshot(twin, N))
