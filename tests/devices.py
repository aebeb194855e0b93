"""The accelerator that tests marked `accelerator` run on: this machine's, or the pretend one of tests/pretend.

COMPOPT_PRETEND=cuda or mps makes a process pretend: tests/test_pretend.py starts such processes.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import pytest
import torch

from compopt import accelerator
from tests import pretend

PRETEND = os.environ.get("COMPOPT_PRETEND", "")
DEVICE = pretend.install(PRETEND) if PRETEND else accelerator.available()
HAS_STREAMS = DEVICE is not None and accelerator.has_streams(DEVICE)

needs_accelerator = [
    pytest.mark.accelerator,
    pytest.mark.skipif(DEVICE is None, reason="needs an accelerator, or COMPOPT_PRETEND=cuda"),
]


def marked(marks: list[pytest.MarkDecorator]):
    """A test with several marks."""

    def mark(test):
        for one in marks:
            test = one(test)
        return test

    return mark


def synchronize() -> None:
    accelerator.synchronize(DEVICE)


@contextlib.contextmanager
def counted() -> Iterator[list[pretend.Wait]]:
    """The waits inside, but for those of the library's threads; only the pretend device can tell, with streams."""
    found: list[pretend.Wait] = []
    pretend.LEDGER.clear()
    yield found
    if PRETEND == "cuda":
        assert pretend.LEDGER.races == []
        found += pretend.LEDGER.waits_of_training()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Nothing inside may wait for the device, but for threads of the library.

    A real CUDA device raises at what waits. The pretend one lists it, and what would be a race; copies must go through
    pinned memory, and be foreseen.
    """
    synchronize()
    if PRETEND == "cuda":
        pretend.LEDGER.clear()
        yield
        assert pretend.LEDGER.waits_of_training() == []
        assert pretend.LEDGER.unforeseen() == []
        assert pretend.LEDGER.races == []
    elif DEVICE.type == "cuda":
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
    else:  # no such mode, or no streams
        yield
