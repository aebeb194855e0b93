"""Upper bounds on the torch operations that a training step dispatches; on an accelerator each is a kernel launch."""

import pytest

from benchmarks.operations import ESTIMATORS, operations

# Counts of benchmarks/results/operations.md. Lower them if a change needs fewer; justify a change that needs more.
# The backward pass takes one product per tensor that requires a gradient. Five find gradients that are not finite, and
# two bound the weights of NeuCLIP.
MOST = {
    "InfoNCE": 44,
    "DCL": 43,
    "SogCLR": 59,
    "iSogCLR": 88,  # four on a CPU only, for exponentials that underflow, as in FastCLIP v3
    "Memory": 84,
    "FastCLIP v3": 111,  # computes log tau, exponentiates it, and scales the rate with tau
    "EMC2": 189,
    "NeuCLIP, 10 updates": 250,
}


@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_step_needs_so_many_operations(name):
    assert operations(ESTIMATORS[name]) <= MOST[name]
