"""Small tensors everywhere: one thread is fastest, and results do not depend on the machine."""

import pytest
import torch

from tests.pool import close_pools


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """Run on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session", autouse=True)
def _end_the_pool():
    """The processes of tests/pool.py end with the session."""
    yield
    close_pools()
