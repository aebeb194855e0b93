"""A training step dispatches no more torch operations than it is known to need: on an accelerator each is a launch."""

import pytest

from benchmarks.operations import ESTIMATORS, operations

# What benchmarks/results/operations.md shows. A change that needs fewer lowers them; one that needs more says why.
# The backward pass takes one product per tensor that requires a gradient.
MOST = {
    "InfoNCE": 47,
    "DCL": 46,
    "SogCLR": 59,
    "iSogCLR": 83,
    "Residual": 99,
    "Memory": 101,
    "FastCLIP v3": 106,  # its logarithm of tau, the way back, and the rate that depends on tau
    "EMC2": 188,
    "NeuCLIP, 10 updates": 250,
}


@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_step_needs_so_many_operations(name):
    assert operations(ESTIMATORS[name]) <= MOST[name]
