"""The pretend device is as strict as a real one: deliberate bugs give wrong numbers and are listed."""

import contextlib

import pytest
import torch

import compopt
from compopt import accelerator
from tests.accelerated import N, batch, one_step, same, train
from tests.devices import DEVICE, PRETEND, quiet, synchronize
from tests.pretend import LEDGER

pytestmark = [pytest.mark.accelerator, pytest.mark.skipif(PRETEND != "cuda", reason="is about the pretend device")]


@pytest.fixture(autouse=True)
def _clear():
    LEDGER.clear()


def test_devices_do_not_mix():
    with pytest.raises(RuntimeError, match="expected all tensors to be on"):
        torch.ones(3, device=DEVICE) + torch.ones(3)
    assert (torch.ones(3, device=DEVICE) + torch.tensor(1.0)).tolist() == [2, 2, 2]  # single numbers are allowed


def test_it_is_torchs_accelerator_and_the_cpu_is_what_it_was():
    assert accelerator.available().type == DEVICE.type and accelerator.has_streams(DEVICE) and accelerator.pins()
    x = torch.randn(5, requires_grad=True)
    (x * 2).sum().backward()
    assert type(x.grad) is torch.Tensor and x.grad.tolist() == [2] * 5
    assert not torch.zeros(3).is_pinned() and torch.zeros(3).pin_memory().is_pinned()


def test_a_copy_to_the_host_is_there_after_its_event():
    value = torch.arange(4.0, device=DEVICE)
    host = accelerator.to_host(value)
    event = accelerator.event(DEVICE)
    assert host.isnan().all() and not event.query()
    event.synchronize()
    assert host.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("waits", [True, False])
def test_another_stream_must_wait(waits):
    side = accelerator.new_stream(DEVICE)
    with accelerator.current(DEVICE, side):
        there = torch.ones(3).pin_memory().to(DEVICE, non_blocking=True)
        event = accelerator.event(DEVICE)
    if waits:
        accelerator.wait_event(event, DEVICE, [there])
    assert (there + 1).tolist() == ([2, 2, 2] if waits else pytest.approx([torch.nan] * 3, nan_ok=True))
    assert bool(LEDGER.races) != waits


@pytest.mark.parametrize("recorded", [True, False])
def test_memory_that_another_stream_uses_must_be_recorded(recorded):
    side, there = accelerator.new_stream(DEVICE), torch.ones(3, device=DEVICE)
    accelerator.wait_stream(side, DEVICE)
    with accelerator.current(DEVICE, side):
        host = accelerator.to_host(there)
    if recorded:
        there.record_stream(side)
    del there  # its stream may reuse the memory
    synchronize()
    assert host.tolist() == ([1, 1, 1] if recorded else pytest.approx([torch.nan] * 3, nan_ok=True))
    assert bool(LEDGER.races) != recorded


def test_what_waits_is_listed(monkeypatch):
    monkeypatch.setattr(LEDGER, "everything", True)  # count also what this file does
    x, indices = torch.ones(4, device=DEVICE), torch.zeros(2, dtype=torch.int64, device=DEVICE)
    for act, what in (
        (lambda: x.sum().item(), "_local_scalar_dense"),
        (lambda: x.cpu(), "a blocking copy to host"),
        (lambda: x[x > 0], "index"),
        (lambda: x.nonzero(), "nonzero"),
        (lambda: torch.tensor([1.0], device=DEVICE), "a blocking copy to device"),
        (lambda: x[torch.tensor([0, 1])], "an index on the host"),
        (lambda: x.where(torch.tensor(True), 0), "a number on the host"),
        (lambda: x.repeat_interleave(torch.ones_like(x, dtype=torch.int64)), "repeat_interleave"),
        (synchronize, "synchronize"),
        (lambda: x.sum() + torch.tensor(1), None),
        (lambda: x.where(x > 0, 0), None),
        (lambda: x.to("cpu", non_blocking=True), None),
        (lambda: x.masked_fill_(x > 0, 0)[indices], None),
        (lambda: torch.ones(4).pin_memory().to(DEVICE, non_blocking=True), None),
    ):
        LEDGER.clear()
        act()
        assert {wait.what for wait in LEDGER.waits} >= {what} if what else not LEDGER.waits


def test_the_line_that_caused_it_is_named(monkeypatch):
    before = compopt.objective.Objective.value
    monkeypatch.setattr(compopt.objective.Objective, "value", lambda self: before(self).clamp(min=before(self).item()))
    est = compopt.SogCLREstimator(N)
    train(est, DEVICE, range(1))
    assert any(w.what == "_local_scalar_dense" and w.line.startswith("contrastive.py:") for w in LEDGER.waits)


# the library with deliberate bugs ----------------------------------------------------------------------------------


def offloaded(steps=6, **options):
    """Return losses and gradients of steps with prefetched rows in host memory."""
    est = compopt.SogCLREstimator(N, gamma=0.5, offload="cpu", **options)
    batches = [batch(seed, DEVICE) for seed in range(steps)]
    for _, _, index in batches:
        index.remainder_(30)  # rows recur in consecutive batches
    return [one_step(est, *given) for given in est.prefetch(batches)]


def broken(monkeypatch, name, replacement):
    """Return whether steps still give the right numbers, and whether something was listed."""
    expected = [[x.cpu() for x in result] for result in offloaded()]
    LEDGER.clear()
    with quiet():
        same(offloaded(), expected, rtol=0, atol=0)
    monkeypatch.setattr(accelerator, name, replacement)
    right = True
    for _ in range(10):  # the library's own threads may have waited in time, by chance
        LEDGER.clear()
        with contextlib.suppress(AssertionError, IndexError, RuntimeError):
            same(offloaded(), expected, rtol=0, atol=0)
            continue
        right = False
        break
    return right, bool(LEDGER.races)


def test_a_commit_that_does_not_wait_for_the_step_is_caught(monkeypatch):
    right, listed = broken(monkeypatch, "wait_stream", lambda stream, device: None)
    assert listed and not right


def test_rows_that_are_used_before_they_arrived_are_caught(monkeypatch):
    right, listed = broken(monkeypatch, "wait_event", lambda recorded, device, tensors=(): None)
    assert listed and not right


def test_a_writer_that_does_not_wait_for_the_copy_is_caught(monkeypatch):
    event = accelerator.event

    def premature(device):
        done = event(device)
        monkeypatch.setattr(done, "synchronize", lambda: None)
        return done

    right, _ = broken(monkeypatch, "event", premature)
    assert not right
