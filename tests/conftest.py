"""Small tensors everywhere: one thread is fastest, and results do not depend on the machine."""

import gc
import os
import subprocess
import sys

import pytest
import torch

pytest.register_assert_rewrite("tests.devices")  # before it is imported

from tests.covering import mark_the_rest  # noqa: E402
from tests.pool import close_pools  # noqa: E402


@pytest.hookimpl(tryfirst=True)  # before -m looks at the marks
def pytest_collection_modifyitems(config, items):
    mark_the_rest(items)
    if hasattr(config, "workerinput"):
        # pytest-xdist gives the first half to one worker: it alone starts the processes of tests/pool.py
        items.sort(key=lambda item: 2 - 2 * ("launch" in item.keywords) - ("distributed" in item.keywords))


def pytest_collection_finish():
    """Thousands of items and the modules stay: the collections of the tests need not look at them again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """Run on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def switch_often():
    """Threads take turns every few microseconds."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(5e-6)
    yield
    sys.setswitchinterval(before)


@pytest.fixture(scope="session", autouse=True)
def _end_the_pool():
    """The processes of tests/pool.py end with the session."""
    yield
    close_pools()


@pytest.fixture(scope="session", autouse=True)
def _extensions(tmp_path_factory):
    """A folder of this session's own for compiled extensions: in the user's, a killed process leaves its lock."""
    folder = tmp_path_factory.mktemp("extensions")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_EXTENSIONS_DIR", str(folder))
        yield


@pytest.fixture(scope="session")
def deepspeed_compiled(_extensions):
    """DeepSpeed compiles its communication at first use; here, before anything is timed."""
    pytest.importorskip("deepspeed")
    code = "from deepspeed.comm.torch import build_shm_op; build_shm_op()"
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "DS_ACCELERATOR": "cpu"})
