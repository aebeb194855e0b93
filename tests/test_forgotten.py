"""Warnings about steps that a loop lacks: once each, with the remedy; none for loops that lack nothing."""

import gc
import warnings
from functools import partial

import pytest
import torch

import compopt
from compopt.estimator import attach as forgotten
from tests.helpers import generator

N, B = 100, 6
PATIENCE, POSITIONS = 32, 20


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    """Reduce the numbers of calls before a warning."""
    for name, value in {"CALLS": PATIENCE, "POSITIONS": POSITIONS}.items():
        assert getattr(forgotten, name) > value
        monkeypatch.setattr(forgotten, name, value)


class Loop:
    """One parameter, its optimizer, an estimator, and the recorded warnings."""

    def __init__(self, est=None, make=torch.optim.SGD, attach=True):
        self.parameter = torch.nn.Parameter(torch.ones(4))
        self.est = compopt.SogCLREstimator(N, tau=0.1) if est is None else est
        self.make = lambda: make([self.parameter], lr=1e-3)
        self.optimizer, self.calls, self.said = self.make(), 0, []
        if attach:
            self.est.attach(self.optimizer)

    def call(self, count=1, index=None):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(count):
                g = generator(self.calls)
                z1, z2 = torch.randn(2, B, 4, generator=g)
                rows = torch.randperm(N, generator=g)[:B] if index is None else index
                self.est(z1 * self.parameter, z2, rows).backward()
                self.calls += 1
        assert all(w.filename == __file__ for w in caught), "a warning shows the user's line"
        self.said += [str(w.message) for w in caught]

    def train(self, updates, window=1, index=None, zero=True):
        for _ in range(updates):
            self.call(window, index)
            self.optimizer.step()
            if zero:
                self.optimizer.zero_grad()

    def heard(self, *parts):
        """Check that there is exactly one warning and that it has these words."""
        assert len(self.said) == 1 and all(part in self.said[0] for part in parts), self.said
        return True


# no commit --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kept", [False, True])
def test_an_optimizer_made_anew(kept):
    """The attached optimizer is deleted, or is kept and never steps again."""
    loop = Loop()
    old = loop.optimizer if kept else None
    loop.train(10)
    loop.optimizer = loop.make()
    gc.collect()
    loop.train(3)
    assert not loop.said
    loop.train(10 * PATIENCE)
    assert loop.heard("3 updates", "SGD", "has not run step()" if kept else "is gone", "attach")
    assert loop.est.pending == 10 * PATIENCE + 3
    loop.est.attach(loop.optimizer)
    loop.train(1)
    assert loop.est.pending == 0
    del old


@pytest.mark.parametrize("commits, window", [(0, 1), (0, 4), (5, 1), (5, 4)])
@pytest.mark.parametrize("frozen", [False, True])
def test_another_optimizer_steps_parameters_of_the_attached_one(commits, window, frozen):
    """Three such updates are a proof, whatever keeps the attached optimizer alive; a save says so even earlier."""
    for save in (False, True):
        loop = Loop()
        schedule = torch.optim.lr_scheduler.StepLR(loop.optimizer, 1)
        if frozen:  # in the second stage
            loop.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
        loop.train(commits, window)
        loop.optimizer = loop.make()
        if save:
            loop.train(2, window)
            with pytest.warns(UserWarning, match=r"updates? of the model .* saved has none of them: the attached SGD"):
                loop.est.state_dict()
        loop.train(3, window)
        assert not loop.said
        loop.train(3, window)
        assert save or loop.heard("3 updates of the model", "SGD has not run step()", "attach the optimizer whose step")
        assert loop.est.t == commits and schedule.optimizer is not loop.optimizer


class SAM(torch.optim.Optimizer):
    """Sharpness-aware minimisation in its usual form: users need not call step()."""

    def __init__(self, params, lr):
        super().__init__(params, {"rho": 0.05, "lr": lr})
        self.base_optimizer = torch.optim.SGD(self.param_groups, lr=lr)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self):
        for p in self.param_groups[0]["params"]:
            self.state[p]["old"] = p.clone()
            p.add_(p.grad, alpha=0.05)

    @torch.no_grad()
    def second_step(self):
        for p in self.param_groups[0]["params"]:
            p.copy_(self.state[p]["old"])
        self.base_optimizer.step()

    def step(self, closure):
        self.first_step()
        closure()
        self.second_step()


class Outer(torch.optim.Optimizer):
    """A wrapper that is an optimizer itself, with the parameters and the state of the one that it steps twice."""

    def __init__(self, params, lr):
        self.optimizer = torch.optim.SGD(params, lr=lr)
        super().__init__(self.optimizer.param_groups, {})

    def step(self, closure=None):
        self.optimizer.step()
        self.optimizer.step()


def beside(loop, attached):
    """Return an update by another optimizer, with other parameters or attached too."""
    own = loop.parameter if attached else torch.nn.Parameter(torch.ones(4))
    other = torch.optim.SGD([own], lr=0.1)
    if attached:
        loop.est.attach(other)
    return lambda: (other.step(), other.step(), loop.optimizer.step())


def scaled(loop):
    """Return an update whose gradients overflow in most steps, so that the attached optimizer does not step."""
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.zeros(1))

    def update():
        if loop.calls % 4:
            loop.parameter.grad[0] = torch.inf
        scaler.step(loop.optimizer)
        scaler.update()

    return update


def accelerated(loop):
    from accelerate import Accelerator

    optimizer = Accelerator(cpu=True).prepare(loop.optimizer)
    loop.est.attach(optimizer)
    return optimizer.step


LEGITIMATE = {
    "disjoint": (torch.optim.SGD, lambda loop: beside(loop, attached=False)),
    "both attached": (torch.optim.SGD, lambda loop: beside(loop, attached=True)),
    "wrapper": (Outer, lambda loop: loop.optimizer.step),
    "wrapped": (Outer, lambda loop: (loop.est.attach(loop.optimizer.optimizer), loop.optimizer.step)[1]),
    "sam": (SAM, lambda loop: partial(loop.optimizer.step, loop.call)),
    "scaler": (torch.optim.SGD, scaled),
    "accelerate": (torch.optim.SGD, accelerated),
}


@pytest.mark.parametrize("name", LEGITIMATE)
def test_steps_of_others_that_are_no_alarm(name):
    make, updating = LEGITIMATE[name]
    loop = Loop(make=make)
    update = updating(loop)
    for window in (1, 3, 1, 6, 2, 4):  # some are longer than all before
        for _ in range(2):
            loop.call(window)
            update()
            loop.optimizer.zero_grad()
    assert not loop.said and loop.est.t > 2


def test_ordinary_training_watches_no_other_optimizer():
    loop = Loop()
    for _ in range(3):
        loop.call()
        assert loop.est._attachments.stepped is None
        loop.optimizer.step()


@pytest.mark.parametrize("attach", [False, True])
def test_no_commit_from_the_start(attach):
    loop = Loop(attach=attach)
    loop.call(2 * PATIENCE)
    assert loop.heard("32 calls", "SGD has not run step()" if attach else "call est.step() after optimizer.step()")


@pytest.mark.parametrize("window", [1, 5])
@pytest.mark.parametrize("make", [torch.optim.SGD, partial(torch.optim.AdamW, fused=True)])
def test_no_commit_in_three_updates(window, make):
    """Warn at the first batch after the third update, for every loop and trainer."""
    loop = Loop(attach=False, make=make)
    loop.train(3, window)
    assert not loop.said
    loop.call()
    assert loop.heard(f"{3 * window + 1} calls", "3 updates", "est.step()", "EstimatorCallback")
    loop.train(PATIENCE)
    assert len(loop.said) == 1


def test_commits_by_hand_are_no_alarm():
    loop = Loop(attach=False)
    other = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    for _ in range(PATIENCE):
        loop.train(1, window=2)
        other.step()
        loop.est.step()
    loop.train(2)  # a loop that has committed by hand may commit later
    loop.call(PATIENCE - 3)
    assert not loop.said


def test_updates_of_a_network_are_none_of_the_model():
    loop = Loop(compopt.NeuCLIPEstimator(4, prototypes=8, updates=2, rho=1.0), attach=False)
    loop.call(8)  # micro-batches of the first window
    assert not loop.said
    loop.optimizer.step()
    loop.est.step()
    assert loop.est.t == 1


def test_a_step_of_several_optimizers_is_one_update():
    """An update is counted when all optimizers have stepped; one optimizer steps more often here."""
    loop = Loop(attach=False)
    other = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    for step in range(16):
        loop.call()
        other.step()
        if step % 4 == 0:
            loop.optimizer.step()
    assert loop.heard("10 calls", "3 updates")


def test_long_windows_are_no_alarm():
    """Do not warn below eight times the longest window, also for commits by hand after the optimizer is deleted."""
    loop = Loop()
    loop.train(2, window=8)
    loop.optimizer = None
    gc.collect()
    loop.call(8 * 8 - 1)
    loop.est.step()
    loop.call(8 * 63 - 1)
    assert not loop.said and loop.est.t == 3
    loop.call()
    assert loop.heard("504 calls", "SGD", "is gone")


@pytest.mark.parametrize("by_hand", [False, True])
def test_sam_commits(by_hand):
    """SAM's own hook does not run for first_step and second_step; that of its inner optimizer does."""
    loop, commits = Loop(make=SAM, attach=False), []
    loop.est.register_step_post_hook(lambda *_: commits.append(loop.est.t))
    handle = loop.est.attach(loop.optimizer)
    assert loop.est.attach(loop.optimizer) is handle
    for _ in range(3):
        loop.call()
        if by_hand:
            loop.optimizer.first_step()
            loop.call()
            loop.optimizer.second_step()
        else:
            loop.optimizer.step(loop.call)
        loop.optimizer.zero_grad()
        assert loop.est.pending == 0
    assert len(commits) == loop.est.t == 3 and not loop.said
    handle.remove()
    loop.call()
    loop.optimizer.step(loop.call)
    assert loop.est.pending == 2


# batch positions --------------------------------------------------------------------------------------------------


def test_batch_positions_for_an_index():
    loop = Loop()
    loop.train(POSITIONS - 1, index=torch.arange(B))
    assert not loop.said
    loop.train(POSITIONS, index=torch.arange(B))
    assert loop.heard("index was 0 .. 5", "first 20 calls", "n=100", "compopt.data.Indexed")


def test_batch_positions_for_an_index_that_a_memory_keeps():
    loop = Loop(compopt.MemoryEstimator(4, 20))
    loop.train(POSITIONS, index=torch.arange(B))
    assert loop.heard("index was 0 .. 5", "first 20 calls", "the memory", "or none")
    for est, index in ((compopt.MemoryEstimator(4, 20), None), (compopt.DCLEstimator(), torch.arange(B))):
        loop = Loop(est)
        loop.train(POSITIONS + 10, index=index)
        assert not loop.said


@pytest.mark.parametrize("first", [torch.arange(B) + 1, torch.arange(B).flip(0), torch.arange(B) * 2])
def test_one_batch_that_has_other_rows_is_enough(first):
    loop = Loop()
    loop.train(1, index=first)
    loop.train(POSITIONS + 10, index=torch.arange(B))
    assert not loop.said


@pytest.mark.parametrize("save", ["state_dict", "save"])
def test_a_save_without_any_commit_is_noticed_at_once(tmp_path, save):
    """Do not wait for PATIENCE calls, since a short run may end earlier."""
    loop = Loop(attach=False)

    def saved():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loop.est.state_dict() if save == "state_dict" else compopt.save(loop.est, tmp_path)
        assert all(w.filename == __file__ for w in caught)
        loop.said += [str(w.message) for w in caught]

    saved()
    loop.train(1)  # possibly the first part of a window
    saved()
    assert not loop.said
    loop.train(2)
    saved()
    assert loop.heard("3 calls", "none of them", "est.step()")
    saved()
    loop.train(PATIENCE)
    assert len(loop.said) == 1  # the warning is given once
    loop = Loop()
    loop.train(3)
    loop.call(2)
    saved()
    assert not loop.said
