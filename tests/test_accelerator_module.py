"""compopt.accelerator without an accelerator; tests that need an accelerator are in test_accelerator.py."""

import pytest
import torch

from compopt import accelerator
from tests.devices import PRETEND

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("kind", "streams"), [("cpu", False), ("meta", False), ("mps", False), ("cuda", True), ("xpu", True)]
)
def test_which_devices_have_streams(kind, streams):
    assert accelerator.has_streams(torch.device(kind)) == streams


@pytest.mark.skipif(bool(PRETEND), reason="is about torch without torch.accelerator")
def test_before_torch_2_6_cuda_alone_is_asked_for(monkeypatch):
    monkeypatch.delattr(torch, "accelerator", raising=False)
    for there in (True, False):
        monkeypatch.setattr(torch.cuda, "is_available", lambda there=there: there)
        assert accelerator.available() == (torch.device("cuda") if there else None)
        assert accelerator.pins() == there


def test_formats():
    assert accelerator.supports(CPU, torch.complex128) and accelerator.widest(CPU) == torch.float64
    assert accelerator.supports(torch.device("cuda"), torch.float64)  # known in advance, without a trial allocation
