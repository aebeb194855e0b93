"""Run the same tests with another open_clip: its rebuilt main branch, from a checkout."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = os.environ.get("COMPOPT_OPEN_CLIP_MAIN")
ROOT = Path(__file__).parent.parent.parent


@pytest.mark.timeout(1800)
@pytest.mark.skipif(CHECKOUT is None, reason="COMPOPT_OPEN_CLIP_MAIN names no checkout of open_clip")
def test_main_branch():
    """Use a separate process, since two packages of one name cannot be imported together."""
    path = os.pathsep.join([str(Path(CHECKOUT) / "src"), str(ROOT)])
    environment = {k: v for k, v in os.environ.items() if k != "COMPOPT_OPEN_CLIP_MAIN"} | {"PYTHONPATH": path}
    which = "import open_clip; print(open_clip.__file__)"
    found = subprocess.run([sys.executable, "-c", which], env=environment, check=True, capture_output=True, text=True)
    assert Path(found.stdout.strip()).is_relative_to(Path(CHECKOUT).resolve() / "src"), found.stdout
    command = [sys.executable, "-m", "pytest", "tests/open_clip", "-q", "-x", "-p", "no:cacheprovider"]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:]
