"""Programs that tests start."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
SETTLED = Path(__file__).parent / "settled"  # its sitecustomize.py says why


def environment(**more: str) -> dict[str, str]:
    """This one's, and what ranks on one machine need: a thread each, the tree, an end without gloo's threads."""
    path = os.pathsep.join((str(SETTLED), str(ROOT)))
    return {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONPATH": path, **more}


def run_code(code: str, *arguments: object, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """Run Python code in a process of its own, which a signal may end."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=timeout)
