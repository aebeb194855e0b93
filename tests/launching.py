"""Start programs in tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
SETTLED = Path(__file__).parent / "settled"  # explained in its sitecustomize.py


def environment(**more: str) -> dict[str, str]:
    """Return this environment, set up for ranks on one machine: one thread, import paths, exit without gloo threads."""
    path = os.pathsep.join((str(SETTLED), str(ROOT)))
    return {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONPATH": path, **more}


def run_code(code: str, *arguments: object, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """Run Python code in a separate process, which may be ended by a signal."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=timeout)
