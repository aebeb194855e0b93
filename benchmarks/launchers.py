"""Train under every launcher, and compare losses, parameters and rows with those of one process.

    DS_ACCELERATOR=cpu python -m benchmarks.launchers    # writes benchmarks/results/launchers.md and launchers.json

Two processes with gloo on one machine; DeepSpeed compiles its communication first. The last rows load the checkpoints
of version 0.3.0 on two processes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import compopt
from benchmarks.machine import free_port
from benchmarks.report import ROOT, environment, finish, table
from tests.fixtures import make as fixtures
from tests.launching import environment as launching

N, BATCH, DIM, STEPS, RANKS = 64, 16, 8, 20, 2
ZERO = ROOT / "recipes" / "deepspeed"
PYTHON = [sys.executable, "-m"]
TORCHRUN = [*PYTHON, "torch.distributed.run", "--standalone", "--nproc_per_node", str(RANKS), "-m"]
NODE = [*PYTHON, "torch.distributed.run", "--nnodes", str(RANKS), "--nproc_per_node", "1", "--master_addr", "127.0.0.1"]
ACCELERATE = [*PYTHON, "accelerate.commands.launch", "--num_processes", str(RANKS), "--num_machines", "1"]
ACCELERATE += ["--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"]
USE_DEEPSPEED = [*ACCELERATE, "--use_deepspeed", "--deepspeed_config_file"]
# launcher -> commands that are started together, and the trainings that their processes carry out
JOBS: dict[str, tuple[list[list[str]], list[str]]] = {
    "one process": ([[*PYTHON]], ["plain"]),
    "torchrun": ([TORCHRUN], ["DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3", "ZeRO-3, gradient cache", "checkpoints of 0.3.0"]),
    "two nodes of torchrun": ([[*NODE, "--node_rank", str(k), "-m"] for k in range(RANKS)], ["DDP"]),
    "deepspeed": ([[*PYTHON, "deepspeed.launcher.runner", "--num_gpus", str(RANKS), "--module"]], ["ZeRO-2", "ZeRO-3"]),
    "accelerate launch": ([[*ACCELERATE, "--multi_gpu", "-m"]], ["accelerate, DDP"]),
    "accelerate launch --use_deepspeed, stage 2": ([[*USE_DEEPSPEED, f"{ZERO}/zero2.json", "-m"]], ["accelerate"]),
    "accelerate launch --use_deepspeed, stage 3": ([[*USE_DEEPSPEED, f"{ZERO}/zero3.json", "-m"]], ["accelerate"]),
}
HEAD = ["launcher", "training", "loss", "parameters", "rows"]
ABOUT = f"""SogCLR with AdamW for {STEPS} steps in float32, {BATCH} of {N} samples each, divided between two processes.
Entries: largest difference from one process, relative to its largest value. Nothing is clipped, and the norm of every
gradient is above 1. Checkpoints of 0.3.0: largest difference of rows, and of the loss of a call, from the recorded
ones, after loading on two processes."""


# -- one process of a launcher -----------------------------------------------------------------------------------------


class Towers(nn.Module):
    """Two layers with small weights, whose gradients are large."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        draw = torch.Generator().manual_seed(0)
        for parameter in self.parameters():
            parameter.data = 0.02 * torch.randn(parameter.shape, generator=draw)

    def forward(self, x1: Tensor, x2: Tensor) -> tuple[Tensor, Tensor]:
        return self.first(x1), self.second(x2)


def batches(rank: int, ranks: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield this rank's part of each batch."""
    draw = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        x, index = torch.randn(2, BATCH, DIM, generator=draw), torch.randperm(N, generator=draw)[:BATCH]
        x1, x2 = x.chunk(ranks, dim=1)[rank]
        yield x1, x2, index.chunk(ranks)[rank]


def prepared(kind: str, model: nn.Module, optimizer: Any) -> tuple[Any, Any, Any, Any]:
    """Return the wrapped model, the estimator, and functions for the backward pass and the update."""
    if kind.startswith("accelerate"):
        return with_accelerate(model, optimizer)
    if kind.startswith("ZeRO"):
        import deepspeed

        stage = int(kind[len("ZeRO-")])
        config = json.loads((ZERO / f"zero{stage}.json").read_text())
        config["train_micro_batch_size_per_gpu"] = BATCH // RANKS
        deepspeed.init_distributed("gloo")
        engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
        est = compopt.SogCLREstimator(N, gamma=0.8)
        est.attach(engine)
        return engine, est, engine.backward, engine.step
    if kind == "DDP":
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        model = DistributedDataParallel(model)
    est = compopt.SogCLREstimator(N, gamma=0.8)
    est.attach(optimizer)
    return model, est, Tensor.backward, lambda: (optimizer.step(), optimizer.zero_grad())


def with_accelerate(model: nn.Module, optimizer: Any) -> tuple[Any, Any, Any, Any]:
    from accelerate import Accelerator, InitProcessGroupKwargs

    from compopt.integrations import accelerate as integration
    from recipes.launch import set_micro_batch, uses_deepspeed

    deep = os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true"
    os.environ["ACCELERATE_USE_CPU"] = str(not deep).lower()
    accelerator = Accelerator(cpu=not deep, kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")])
    assert uses_deepspeed(accelerator) == deep
    set_micro_batch(accelerator, BATCH // RANKS)
    model, optimizer = accelerator.prepare(model, optimizer)
    est = compopt.SogCLREstimator(N, gamma=0.8)
    integration.attach(est, optimizer, accelerator)
    return model, est, accelerator.backward, lambda: (optimizer.step(), optimizer.zero_grad())


def train(kind: str) -> dict[str, list[float]]:
    """Train; return losses, parameters and rows."""
    from recipes.launch import whole

    model = Towers()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    wrapped, est, backward, update = prepared(kind, model, optimizer)
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    assert ranks == (1 if kind == "plain" else RANKS)
    losses = []
    for x1, x2, index in batches(rank, ranks):
        if "gradient cache" in kind:
            loss = compopt.gradient_cache(est, wrapped, (x1, x2), index, micro_batch_size=3)
        else:
            loss = est(*wrapped(x1, x2), index)
            backward(loss)
        if kind == "plain":
            assert torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]) > 1
        update()
        losses.append(loss.item())
    with whole(model):
        parameters = torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()
    rows = est.read(torch.arange(N))["log_u"].flatten().tolist()
    return {"loss": losses, "parameters": parameters, "rows": rows}


def load_old() -> dict[str, list[float]]:
    """Load every checkpoint of 0.3.0 on all processes; return the differences of rows, and of the loss of a call."""
    warnings.simplefilter("ignore")
    found: dict[str, list[float]] = {"loss": [], "parameters": [0.0], "rows": []}
    folder = fixtures.HERE / "0.3.0"
    everything = json.loads((folder / "expected.json").read_text())
    for name, build in fixtures.ESTIMATORS.items():
        est, expected = build(), everything[name]
        compopt.load(est, folder / name)
        assert est.t == expected["t"]
        if name != "scores":  # whose rows are those of a keeper now
            columns = sorted(set(expected) - {"t", "loss", "metrics"})
            rows = est.read(torch.arange(fixtures.N)) if columns else {}
            found["rows"] += [float((rows[c] - torch.tensor(expected[c])).nan_to_num().abs().max()) for c in columns]
        z = torch.randn(2, 4, fixtures.DIM, generator=torch.Generator().manual_seed(2))
        own = torch.arange(4).chunk(RANKS)[dist.get_rank()]
        found["loss"].append(abs(est(z[0][own], z[1][own], own).item() - expected["loss"]))
    return found


def process(kinds: list[str], folder: Path) -> None:
    """Carry out trainings, and write their results from rank 0."""
    torch.set_num_threads(1)
    for kind in kinds:
        found = load_old() if kind.startswith("checkpoints") else train(kind)
        if not dist.is_initialized() or dist.get_rank() == 0:
            (folder / f"{kind}.json").write_text(json.dumps(found))
    if dist.is_initialized():
        dist.barrier()


# -- all launchers -----------------------------------------------------------------------------------------------------


def run(launcher: str, folder: Path) -> dict[str, dict[str, list[float]]]:
    """Start the processes of a launcher; return the results of its trainings."""
    commands, kinds = JOBS[launcher]
    port, jobs = str(free_port()), []
    for command in commands:
        place = ["--master_port", port] if "--nnodes" in command else []
        end = len(command) - (command[-1] in ("-m", "--module")) if len(command) > 2 else len(command)
        command = [*command[:end], *place, *command[end:], "benchmarks.launchers"]
        command += ["--process", str(folder), json.dumps(kinds)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        jobs.append(subprocess.Popen(command, cwd=ROOT, env=launching(), **pipes))
    try:
        said = [job.communicate(timeout=900)[0] for job in jobs]
    finally:
        for job in jobs:
            job.kill()
    if any(job.returncode for job in jobs):
        raise SystemExit(f"{launcher}: exit status {[job.returncode for job in jobs]}\n{said[0][-4000:]}")
    return {kind: json.loads((folder / f"{kind}.json").read_text()) for kind in kinds}


def difference(found: list[float], expected: list[float]) -> float:
    """Return the largest difference relative to the largest value."""
    a, b = torch.tensor(found, dtype=torch.float64), torch.tensor(expected, dtype=torch.float64)
    return float((a - b).abs().max() / b.abs().max())


def compare(launchers: list[str]) -> list[dict[str, Any]]:
    """Return the differences of every training from one process."""
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        alone = run("one process", Path(folder))["plain"]
        for launcher in launchers:
            for kind, found in run(launcher, Path(folder)).items():
                old = kind.startswith("checkpoints")
                gaps = {k: max(found[k]) if old else difference(found[k], alone[k]) for k in alone}
                results.append({"launcher": launcher, "training": kind, **gaps})
                print(results[-1], flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--process", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--local_rank", help=argparse.SUPPRESS)  # DeepSpeed's launcher adds it
    args = parser.parse_args()
    if args.process:
        process(json.loads(args.process[1]), Path(args.process[0]))
        return
    env, results = environment(), compare([launcher for launcher in JOBS if launcher != "one process"])
    body = [[each["launcher"], each["training"], *(f"{each[k]:.0e}" for k in HEAD[2:])] for each in results]
    finish("launchers", "Launchers and one process", env, [ABOUT, table(HEAD, body, "llr")], results)


if __name__ == "__main__":
    main()
