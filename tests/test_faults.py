"""A few kills by the harness in benchmarks/faults.py; the full run is a benchmark."""

import os

import pytest

from benchmarks import faults


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
@pytest.mark.parametrize("blocking", [True, False], ids=["blocking", "beside"])
@pytest.mark.parametrize("offload", [None, "disk"])
def test_killed_runs_recover(offload, blocking, tmp_path):
    setting = faults.Setting(offload=offload, n=20_000, steps=8, blocking=blocking)
    outcome = faults.torture(setting, kills=3, seed=1, root=tmp_path)
    assert outcome.kills >= 3 and outcome.ends >= 1


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
@pytest.mark.parametrize("blocking", [True, False], ids=["blocking", "beside"])
def test_killed_ranks_recover(blocking, tmp_path):
    """Kill one of two ranks, or both; the other one ends by itself."""
    setting = faults.Setting(offload="disk", n=20_000, steps=8, blocking=blocking, ranks=2, shard=True)
    outcome = faults.torture(setting, kills=2, seed=2, root=tmp_path)
    assert outcome.kills >= 2 and outcome.ends >= 1
