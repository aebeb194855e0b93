"""Small tensors everywhere: one thread is fastest, and results do not depend on the machine."""

import fcntl
import gc
import os
import subprocess
import sys
from pathlib import Path

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
def extensions():
    """The folder of compiled extensions, which all sessions of this tree share; not the user's."""
    folder = Path(__file__).parents[1] / ".cache" / f"extensions-{torch.__version__}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_EXTENSIONS_DIR", str(folder))
        yield folder


@pytest.fixture(scope="session")
def deepspeed_compiled(extensions):
    """DeepSpeed compiles its communication at first use, for a minute; here, before anything is timed."""
    deepspeed = pytest.importorskip("deepspeed")
    built = extensions / f"built-{deepspeed.__version__}"
    extensions.mkdir(parents=True, exist_ok=True)
    with open(extensions / "session.lock", "w") as file:
        # ends with its process, unlike torch's own, which a killed process leaves and others wait for
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for left in extensions.glob("*/lock"):
                left.unlink()
        except BlockingIOError:
            fcntl.flock(file, fcntl.LOCK_SH)  # once another session has built it
        if not built.exists():
            code = "from deepspeed.comm.torch import build_shm_op; build_shm_op()"
            subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "DS_ACCELERATOR": "cpu"})
            built.touch()
        fcntl.flock(file, fcntl.LOCK_SH)
        yield
