"""A training step dispatches no more torch operations than it is known to need: on an accelerator each is a launch."""

import pytest

from benchmarks.operations import ESTIMATORS, operations

# What benchmarks/results/operations.md shows. A change that needs fewer lowers them; one that needs more says why.
MOST = {
    "InfoNCE": 46,
    "DCL": 45,
    "SogCLR": 59,
    "iSogCLR": 84,
    "Residual": 100,
    "Memory": 100,
    "FastCLIP v3": 100,
    "EMC2": 188,
    "NeuCLIP, 10 updates": 249,
}


@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_step_needs_so_many_operations(name):
    assert operations(ESTIMATORS[name]) <= MOST[name]
