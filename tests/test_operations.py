"""Upper bounds on the torch operations that a training step dispatches; on an accelerator each is a kernel launch."""

import pytest

from benchmarks.operations import ESTIMATORS, RECOMMENDED, operations

# Counts of benchmarks/results/operations.md. Lower them if a change needs fewer; justify a change that needs more.
# Two find gradients that are not finite, and two bound the weights of NeuCLIP.
MOST = {
    "InfoNCE": 37,
    "DCL": 34,
    "SogCLR": 48,
    "iSogCLR": 88,  # four on a CPU only, for exponentials that underflow, as in FastCLIP v3
    "Memory": 69,  # six for slots of the batch's own samples
    RECOMMENDED: 65,
    "FastCLIP v3": 103,  # computes log tau, exponentiates it, and scales the rate with tau
    "EMC2": 184,
    "NeuCLIP, 10 updates": 244,
}


@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_step_needs_so_many_operations(name):
    assert operations(ESTIMATORS[name]) <= MOST[name]
