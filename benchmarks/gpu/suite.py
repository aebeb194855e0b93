"""Run the tests marked `accelerator` on the accelerator of this machine."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import Any

from benchmarks.gpu.machine import Machine
from benchmarks.report import ROOT

FILES = ("test_accelerator.py", "test_accelerator_options.py", "test_stores.py", "test_sampler_bank.py")
# without the options of pyproject.toml, which need plugins that may not be installed
COMMAND = [sys.executable, "-m", "pytest", "-q", "-o", "addopts=", "-p", "no:cacheprovider", "-m", "accelerator"]


def measure(machine: Machine, seconds: float) -> list[dict[str, Any]]:
    """Return pytest's summary and the failed tests of every file."""
    results, end = [], min(machine.ends, time.monotonic() + seconds)
    env = {**os.environ, **({"COMPOPT_PRETEND": "cuda"} if machine.pretends else {})}
    for name in FILES[-1:] if machine.small else FILES:
        if not (ROOT / "tests" / name).exists() or machine.time_is_up(f"tests, {name}"):
            continue
        start, limit = time.perf_counter(), max(20.0, end - time.monotonic())
        options: dict[str, Any] = {"cwd": ROOT, "env": env, "capture_output": True, "text": True, "timeout": limit}
        try:
            done = subprocess.run([*COMMAND, f"tests/{name}"], **options)
            lines = done.stdout.strip().splitlines() or [done.stderr[-300:]]
        except subprocess.TimeoutExpired:
            lines = [f"not finished after {limit:.0f} s"]
        failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
        results.append({"file": name, "summary": lines[-1], "failed": failed, "seconds": time.perf_counter() - start})
    return results
