"""Profiler trace of training steps, to find calls that wait for the device."""

from __future__ import annotations

import json
import re
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch

import compopt
from benchmarks.gpu.losses import features
from benchmarks.gpu.machine import Machine

STEPS = 5
MARK = "compopt step"
# cudaStreamSynchronize, cudaDeviceSynchronize, hipEventSynchronize, urEventWait ...; not cudaStreamWaitEvent, for
# which only a stream waits.
WAITS = re.compile(r"synchronize|eventwait(?!.*stream)|cudaMemcpy$|hipMemcpy$", re.IGNORECASE)
LAUNCHES = re.compile(r"LaunchKernel|MemcpyAsync|MemsetAsync|LaunchCooperative", re.IGNORECASE)


def estimators(d: int) -> dict[str, Any]:
    n = 10_000
    return {
        "InfoNCE": lambda folder: compopt.InfoNCEEstimator(0.07),
        "SogCLR": lambda folder: compopt.SogCLREstimator(n),
        "SogCLR, host": lambda folder: compopt.SogCLREstimator(n, offload="cpu"),
        "SogCLR, disk": lambda folder: compopt.SogCLREstimator(n, offload="disk", offload_dir=folder),
        "iSogCLR": lambda folder: compopt.ISogCLREstimator(n, rho=1.0),
        "FastCLIP v3": lambda folder: compopt.FastCLIPEstimator(n, "v3", rho=6.0),
        "NeuCLIP": lambda folder: compopt.NeuCLIPEstimator(d, prototypes=1024, learn_tau=False, through_alpha=False),
        "EMC2": lambda folder: compopt.EMC2Estimator(n, tau=0.2),
    }


def measure(machine: Machine) -> list[dict[str, Any]]:
    """Return, for every estimator, the calls that waited in the training thread and the number of launches per step."""
    d, B = 32 if machine.small else 128, 32 if machine.small else 256
    results = []
    for name, build in estimators(d).items():
        if machine.time_is_up(f"trace, {name}"):
            continue
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            est = build(folder)
            batches = [features(machine.device, B, d, torch.float32) for _ in range(STEPS + 3)]
            for batch in batches:  # the host checks that rows are distinct, so that any rows will do
                batch[2].remainder_(10_000)
            train(est, batches[:3])
            machine.synchronize()
            results.append({"name": name, "B": B, "d": d, **traced(machine, est, batches[3:], Path(folder))})
    return results


def train(est: compopt.ContrastiveEstimator, batches: Any) -> None:
    for z1, z2, index in est.prefetch(batches) if est.n is not None else batches:
        with torch.profiler.record_function(MARK):
            est(z1, z2, index).backward()
            est.step()


def traced(machine: Machine, est: Any, batches: Any, folder: Path) -> dict[str, Any]:
    if machine.pretends:
        from tests.pretend import LEDGER

        LEDGER.clear()
        train(est, batches)
        return {
            "waits": dict(Counter(f"{wait.what} {wait.line}" for wait in LEDGER.waits_of_training())),
            "launches": sum(LEDGER.operations.values()) / STEPS,
            "recorded": len(LEDGER.operations),
        }
    kinds = [kind for kind in torch.profiler.supported_activities() if kind.name != "MTIA"]
    with torch.profiler.profile(activities=kinds) as profiler:
        train(est, batches)
    profiler.export_chrome_trace(str(folder / "trace.json"))
    return read(json.loads((folder / "trace.json").read_text())["traceEvents"])


def read(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Return runtime calls of the device inside the steps, in the training threads: the loop's and autograd's.

    Threads of the library write rows in the background and may wait. They run neither a step nor an operation of
    autograd.
    """
    spans = [(e["ts"], e["ts"] + e["dur"]) for e in events if e.get("name") == MARK and "dur" in e and _on_host(e)]
    training = {e["tid"] for e in events if e.get("name") == MARK and _on_host(e)}
    training |= {e["tid"] for e in events if str(e.get("name", "")).startswith("autograd::engine")}
    calls = [e for e in events if str(e.get("cat", "")).endswith(("_runtime", "_driver")) and e.get("tid") in training]
    inside = [e["name"] for e in calls if any(start <= e["ts"] <= end for start, end in spans)]
    return {
        "waits": dict(Counter(name for name in inside if WAITS.search(name))),
        "launches": sum(1 for name in inside if LAUNCHES.search(name)) / STEPS,
        "recorded": len(inside),
    }


def _on_host(event: dict[str, Any]) -> bool:
    """Return whether an event is on the host; annotations appear twice in the trace, also on the device's row."""
    return "gpu" not in str(event.get("cat", ""))
