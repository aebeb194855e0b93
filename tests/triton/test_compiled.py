"""Machine code of the kernels for other devices: no spilled registers, little shared memory, tensor cores."""

import json
import os
import subprocess
import sys

import pytest

from benchmarks.compiled import INSTRUCTIONS, TARGETS, cases
from benchmarks.report import ROOT

SHARED_MEMORY = 128 * 1024


@pytest.mark.parametrize("target", TARGETS)
def test_ahead_of_time(target):
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "benchmarks.compiled", target, "--daily"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-2000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == len(list(cases(target, daily=True)))
    for facts in found:
        what = f"{facts['kernel']}, {facts['precision']}, {facts['variant']}, {target}"
        assert facts["stack"] == 0, f"{what}: registers are spilled, {facts}"
        assert facts["shared"] <= SHARED_MEMORY, f"{what}: {facts}"
        assert facts["instructions"] > 0, f"{what}: no {INSTRUCTIONS[target]}, {facts}"
