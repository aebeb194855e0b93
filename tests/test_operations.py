"""A training step dispatches no more torch operations than it is known to need: on an accelerator each is a launch."""

import pytest

from benchmarks.operations import ESTIMATORS, operations

# What benchmarks/results/operations.md shows. A change that needs fewer lowers them; one that needs more says why.
MOST = {
    "InfoNCE": 47,
    "DCL": 46,
    "SogCLR": 60,
    "iSogCLR": 85,
    "Residual": 105,
    "FastCLIP v3": 103,
    "EMC2": 338,
    "NeuCLIP, 10 updates": 305,
}


@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_step_needs_so_many_operations(name):
    assert operations(ESTIMATORS[name]) <= MOST[name]
