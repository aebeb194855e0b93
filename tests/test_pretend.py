"""Run the tests marked `accelerator` on a pretend device, in processes of their own: it is registered process-wide."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils import backend_registration

from tests import pretend
from tests.devices import PRETEND

ROOT = Path(__file__).parent.parent
SESSIONS = [
    ("cuda", ["tests/test_accelerator.py"]),
    ("cuda", ["tests/test_accelerator_options.py", "tests/test_sampler_bank.py", "tests/test_stores.py"]),
    ("cuda", ["tests/test_alone.py"]),
    ("cuda", ["tests/pretend/test_pretend_ranks.py"]),
    ("mps", ["tests/test_stores.py", "-k", "stores"]),
    ("mps", ["tests/test_accelerator.py", "tests/test_accelerator_options.py", "tests/test_sampler_bank.py"]),
]

pytestmark = pytest.mark.skipif(bool(PRETEND), reason="this process pretends already")


def run(like, files):
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        "-m",
        "accelerator and not every",
        *files,
    ]
    environment = {**os.environ, "COMPOPT_PRETEND": like, "OMP_NUM_THREADS": "1"}
    environment = {key: value for key, value in environment.items() if not key.startswith("PYTEST_")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


@pytest.mark.skipif(
    not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="this torch takes no backend written in Python",
)
@pytest.mark.slow
@pytest.mark.parametrize(("like", "files"), SESSIONS)
def test_on_a_pretend_device(like, files):
    run(like, files)


def test_this_process_has_none_of_it():
    """The pretend device is registered in other processes; in this one torch is unmodified."""
    assert torch._C._get_privateuse1_backend_name() != pretend.NAME and not hasattr(torch, pretend.NAME)
    assert type(torch.empty) is type(torch.add)  # not replaced
