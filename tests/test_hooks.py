"""Hooks as in torch.optim: six kinds, each with a handle that removes it."""

import pytest
import torch

import compopt
from tests.helpers import batches, run

N = 13


def deposit(est):
    run(est, *batches(N, 1, seed=1, dtype=torch.float32)[0])
    return est


def trained(steps=0):
    """Return an estimator with one deposit, pending or committed."""
    est = deposit(compopt.SogCLREstimator(N, tau=0.1))
    if steps:
        est.step()
    return est


def visits(est):
    return int(est.read(torch.arange(N))["count"].sum())


@pytest.mark.parametrize("when, expected", [("pre", [(0, 1), (6, 1)]), ("post", [(6, 0), (12, 0)])])
def test_step_hooks(when, expected):
    est, seen = trained(), []
    handle = getattr(est, f"register_step_{when}_hook")(
        lambda who, args, kwargs: seen.append((visits(who), who.pending))
    )
    est.step()
    deposit(est).step()
    assert seen == expected
    handle.remove()
    handle.remove()  # a second call is harmless
    deposit(est).step()
    assert len(seen) == 2 and visits(est) == 18


def test_hooks_run_in_the_order_of_registration_and_go_one_by_one():
    est, order = trained(), []
    handles = [est.register_step_post_hook(lambda *_, name=name: order.append(name)) for name in "abc"]
    est.step()
    handles[1].remove()
    deposit(est).step()
    est.register_state_dict_pre_hook(lambda _: order.append("late"))
    est.register_state_dict_pre_hook(lambda _: order.append("early"), prepend=True)
    est.state_dict()
    assert order == ["a", "b", "c", "a", "c", "early", "late"]


def test_state_dict_hooks_may_edit_or_replace_the_dict():
    est, calls = trained(1), []
    handles = [
        est.register_state_dict_pre_hook(calls.append),
        est.register_state_dict_post_hook(lambda _, state: state.update(edited=42)),
        est.register_state_dict_post_hook(lambda _, state: {**state, "replaced": state["edited"]}),
    ]
    state = est.state_dict()
    assert (state["edited"], state["replaced"], calls) == (42, 42, [est])
    for handle in handles:
        handle.remove()
    assert "edited" not in est.state_dict() and calls == [est]


def test_load_state_dict_hooks_run_before_and_after_and_may_translate():
    old, est, log = trained(1).state_dict(), compopt.SogCLREstimator(N, tau=0.1), []
    old["renamed"] = old.pop("parts")

    def translate(who, state):
        log.append(visits(who))
        return {**state, "parts": state["renamed"]}

    est.register_load_state_dict_pre_hook(translate)
    est.register_load_state_dict_post_hook(lambda who: log.append(visits(who)))
    est.load_state_dict(old)
    assert log == [0, 6]
