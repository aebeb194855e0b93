"""Upper bounds on the files, lines and Python calls of a training step (:mod:`benchmarks.path`)."""

import sys
from collections import OrderedDict

import pytest

from benchmarks.path import path, totals

# Files entered, lines of the functions entered, calls. Lower them if a change needs fewer; justify a change that needs
# more. The goals of the design are 20, 900 and 250 for SogCLR, and 15 files and 140 calls for InfoNCE.
MOST = {
    "SogCLR": (22, 1191, 213),
    "InfoNCE": (18, 887, 127),
}


@pytest.fixture(autouse=True)
def no_hooks_of_other_tests(monkeypatch):
    """Hide the hook of all optimizers that watches for estimators without a commit, once there was one."""
    hooks = OrderedDict()
    monkeypatch.setattr(sys.modules["torch.optim.optimizer"], "_global_optimizer_post_hooks", hooks)
    yield
    assert not hooks, "a hook that is registered here is missing in later tests"


@pytest.mark.parametrize("name", MOST)
def test_a_step_enters_so_many_files_lines_and_calls(name):
    parts = path(name)
    found = totals(parts)
    assert all(number <= most for number, most in zip(found, MOST[name], strict=True)), (found, MOST[name], parts)


def test_the_trace_sees_a_step():
    """Every step enters the call and the normalizer; only a step with rows enters the stores."""
    stateful, stateless = path("SogCLR"), path("InfoNCE")
    assert {"contrastive.py", "normalizers/moving_average.py"} <= stateful.keys()
    assert {"contrastive.py", "normalizers/batch.py"} <= stateless.keys()
    assert any(file.startswith("stores/") for file in stateful)
    assert not any(file.startswith("stores/") for file in stateless)
    assert all(part.functions and part.lines and part.calls >= part.functions for part in stateful.values())
