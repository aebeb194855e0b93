"""A training step dispatches no more torch operations than it is known to need: on an accelerator each is a launch."""

import pytest

from benchmarks.operations import ESTIMATORS, operations

# What benchmarks/results/operations.md shows. A change that needs fewer lowers them; one that needs more says why.
MOST = {
    "InfoNCE": 48,
    "DCL": 47,
    "SogCLR": 61,
    "iSogCLR": 86,
    "Residual": 106,
    "Memory": 99,
    "FastCLIP v3": 104,
    "EMC2": 208,
    "NeuCLIP, 10 updates": 306,
}


@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_step_needs_so_many_operations(name):
    assert operations(ESTIMATORS[name]) <= MOST[name]
