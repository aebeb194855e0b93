"""The accelerator that tests marked `accelerator` run on: that of this machine, or the one simulated by tests/pretend.

COMPOPT_PRETEND=cuda or mps makes a process simulate it: tests/test_pretend.py starts such processes.
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

needs_accelerator = [
    pytest.mark.accelerator,
    pytest.mark.skipif(DEVICE is None, reason="needs an accelerator, or COMPOPT_PRETEND=cuda"),
]


def marked(marks: list[pytest.MarkDecorator]):
    """Return a decorator that applies several marks to a test."""

    def mark(test):
        for one in marks:
            test = one(test)
        return test

    return mark


def synchronize() -> None:
    accelerator.synchronize(DEVICE)


@contextlib.contextmanager
def counted() -> Iterator[list[pretend.Wait]]:
    """Collect host waits, except those of library threads; only the pretend device with streams records them."""
    found: list[pretend.Wait] = []
    pretend.LEDGER.clear()
    yield found
    if PRETEND == "cuda":
        assert pretend.LEDGER.races == []
        found += pretend.LEDGER.waits_of_training()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Assert that the code inside the context does not wait for the device, except in threads of the library.

    A real CUDA device raises at operations that synchronize. The pretend one records waits and races; copies must use
    pinned memory and come from the lines of the library that are known to copy.
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
    else:  # no synchronization debug mode, or no streams
        yield
