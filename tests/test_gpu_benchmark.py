"""`make gpu` on the pretend accelerator: every part runs, and the page names the device."""

import json
import math
import subprocess
import sys

import pytest
import torch

from benchmarks.gpu import fused, trace
from benchmarks.gpu.machine import Machine
from benchmarks.report import ROOT


def event(name, start, thread, category="cuda_runtime", length=1):
    return {"name": name, "ts": start, "dur": length, "tid": thread, "cat": category, "ph": "X"}


STEP = [
    event(trace.MARK, 10, 1, "user_annotation", 50),
    event(trace.MARK, 200, 7, "gpu_user_annotation", 50),
    event("autograd::engine::evaluate_function: MmBackward0", 30, 2, "cpu_op", 5),
    event("cudaLaunchKernel", 12, 1),
    event("cudaMemcpyAsync", 14, 1),
    event("cudaStreamWaitEvent", 15, 1),
    event("cudaLaunchKernel", 31, 2),
]


def test_a_trace_without_a_wait():
    others = [
        event("cudaEventSynchronize", 20, 3),  # the thread that writes rows
        event("cudaDeviceSynchronize", 90, 1),  # from the profiler, after the steps
    ]
    assert trace.read(STEP + others) == {"waits": {}, "launches": 3 / trace.STEPS, "recorded": 4}


@pytest.mark.parametrize("thread", [1, 2])
@pytest.mark.parametrize(
    "name", ["cudaStreamSynchronize", "cudaDeviceSynchronize", "hipEventSynchronize", "cudaMemcpy", "urEventWait"]
)
def test_a_trace_with_one(name, thread):
    assert trace.read([*STEP, event(name, 40, thread)])["waits"] == {name: 1}


def test_the_fused_kernel_is_measured_in_both_precisions(monkeypatch):
    """Plain torch replaces the kernel, since the features are on the CPU."""
    monkeypatch.setattr(fused, "reason_for_torch", lambda backend, z: None)
    monkeypatch.setattr(fused, "DENSE", 0)  # nothing is compiled
    machine = Machine(torch.device("cpu"), small=True, pretends=False, ends=math.inf)
    before, found = torch.get_float32_matmul_precision(), fused.measure(machine, 0.01)
    assert torch.get_float32_matmul_precision() == before and not machine.left_out
    assert [(r["B"], r["d"], r["precision"]) for r in found["times"]] == [(96, 32, "TF32"), (96, 32, "bf16")]
    assert all(cell["seconds"][0] > 0 for r in found["times"] for cell in r["rows"].values())
    assert all(0 < error < 1e-2 for r in found["errors"] for error in r["rows"].values())


@pytest.mark.slow
def test_every_part_runs_on_the_pretend_accelerator(tmp_path):
    command = [sys.executable, "-m", "benchmarks.gpu", "--pretend", "--output", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    page, found = (tmp_path / "gpu.md").read_text(), json.loads((tmp_path / "gpu.json").read_text())["results"]
    assert "| device | a pretend accelerator on the CPU" in page and "## Left out\n\nNothing." in page
    assert all(not r["waits"] and r["recorded"] for r in found["trace"])
    assert all("failed" not in cell for r in found["losses"] for cell in r["rows"].values())
    assert all(" passed" in r["summary"] and not r["failed"] for r in found["tests"])
