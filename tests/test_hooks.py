"""Hooks as in torch.optim: six families, each with a handle that removes it."""

import pytest
import torch

import compopt
from tests.helpers import batches, run

N = 13


def trained():
    """An estimator with one deposit waiting."""
    est = compopt.SogCLREstimator(N, tau=0.1)
    deposit(est)
    return est


def deposit(est):
    """One more."""
    run(est, *batches(N, 1, seed=1, dtype=torch.float32)[0])


@pytest.mark.parametrize("when", ["pre", "post"])
def test_step_hooks(when):
    est = trained()
    seen = []

    def hook(estimator, args, kwargs):
        assert estimator is est
        seen.append((int(estimator.read(torch.arange(N))["count"].sum()), estimator.pending))

    handle = getattr(est, f"register_step_{when}_hook")(hook)
    est.step()
    rows = 6
    assert seen == [(0, 1)] if when == "pre" else seen == [(rows, 0)]
    deposit(est)
    est.step()
    assert len(seen) == 2
    handle.remove()
    deposit(est)
    est.step()
    assert len(seen) == 2
    assert int(est.read(torch.arange(N))["count"].sum()) == 3 * rows


def test_step_hooks_run_in_the_order_of_registration():
    est = trained()
    order = []
    for name in "abc":
        est.register_step_post_hook(lambda *_, name=name: order.append(name))
    est.step()
    assert order == ["a", "b", "c"]


def test_state_dict_hooks():
    est = trained()
    est.step()
    calls = []

    def post(estimator, state):
        state["mine"] = 42

    before = est.register_state_dict_pre_hook(lambda estimator: calls.append(estimator))
    after = est.register_state_dict_post_hook(post)
    assert est.state_dict()["mine"] == 42
    assert calls == [est]
    before.remove()
    after.remove()
    assert "mine" not in est.state_dict()
    assert calls == [est]


def test_a_state_dict_post_hook_may_replace_the_dict():
    """As in torch.optim: a returned value is used."""
    est = trained()
    est.register_state_dict_post_hook(lambda estimator, state: {**state, "mine": 1})
    assert est.state_dict()["mine"] == 1


def test_load_state_dict_hooks():
    source = trained()
    source.step()
    est = compopt.SogCLREstimator(N, tau=0.1)
    log = []

    def pre(estimator, state):
        log.append(("pre", int(estimator.read(torch.arange(N))["count"].sum())))

    def post(estimator):
        log.append(("post", int(estimator.read(torch.arange(N))["count"].sum())))

    handles = [est.register_load_state_dict_pre_hook(pre), est.register_load_state_dict_post_hook(post)]
    est.load_state_dict(source.state_dict())
    assert log == [("pre", 0), ("post", 6)]
    for handle in handles:
        handle.remove()
    est.load_state_dict(source.state_dict())
    assert len(log) == 2


def test_a_load_pre_hook_may_translate_an_old_dict():
    source = trained()
    source.step()
    old = source.state_dict()
    old["renamed_rows"] = old.pop("rows")
    est = compopt.SogCLREstimator(N, tau=0.1)

    def translate(estimator, state):
        state = dict(state)
        state["rows"] = state.pop("renamed_rows")
        return state

    est.register_load_state_dict_pre_hook(translate)
    est.load_state_dict(old)
    assert int(est.read(torch.arange(N))["count"].sum()) == 6


def test_removing_one_hook_leaves_the_others():
    est = trained()
    calls = []
    first = est.register_step_pre_hook(lambda *_: calls.append(1))
    est.register_step_pre_hook(lambda *_: calls.append(2))
    first.remove()
    first.remove()  # twice is harmless
    est.step()
    assert calls == [2]
