"""Configuration of the test session: one thread, since tensors are small and results must not depend on the machine."""

import fcntl
import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.register_assert_rewrite("tests.devices")  # before tests.devices is imported

from tests.covering import mark_the_rest  # noqa: E402
from tests.pool import close_pools  # noqa: E402


@pytest.hookimpl(tryfirst=True)  # before -m evaluates the marks
def pytest_collection_modifyitems(config, items):
    mark_the_rest(items)
    if hasattr(config, "workerinput"):
        # pytest-xdist gives the first half to one worker, so that only this one starts the processes of tests/pool.py
        items.sort(key=lambda item: 2 - 2 * ("launch" in item.keywords) - ("distributed" in item.keywords))


def pytest_collection_finish():
    """Freeze the thousands of items and modules, which stay alive, so that later garbage collections skip them."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """Run torch on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def switch_often():
    """Switch between threads every few microseconds."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(5e-6)
    yield
    sys.setswitchinterval(before)


@pytest.fixture(scope="session", autouse=True)
def _end_the_pool():
    """End the processes of tests/pool.py with the session."""
    yield
    close_pools()


@pytest.fixture(scope="session", autouse=True)
def extensions():
    """Use a folder of compiled extensions that all sessions of this tree share instead of the user's."""
    folder = Path(__file__).parents[1] / ".cache" / f"extensions-{torch.__version__}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_EXTENSIONS_DIR", str(folder))
        yield folder


@pytest.fixture(scope="session")
def deepspeed_compiled(extensions):
    """Compile the communication of DeepSpeed, which takes a minute at first use, before anything is timed."""
    deepspeed = pytest.importorskip("deepspeed")
    built = extensions / f"built-{deepspeed.__version__}"
    extensions.mkdir(parents=True, exist_ok=True)
    with open(extensions / "session.lock", "w") as file:
        # released with its process, unlike torch's lock file, which a killed process leaves and others wait for
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for left in extensions.glob("*/lock"):
                left.unlink()
        except BlockingIOError:
            fcntl.flock(file, fcntl.LOCK_SH)  # acquired once another session has built it
        if not built.exists():
            code = "from deepspeed.comm.torch import build_shm_op; build_shm_op()"
            subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "DS_ACCELERATOR": "cpu"})
            built.touch()
        fcntl.flock(file, fcntl.LOCK_SH)
        yield
