"""A billion rows for real: CLIP on shards whose keys span them, on two ranks, killed and resumed again and again.

    .venv-clip/bin/python -m benchmarks.billion            # `make test-clip` makes this environment; writes results/
    .venv-clip/bin/python -m benchmarks.billion --n 1000000 --kills 3 --no-save

``recipes/clip_webdataset.py`` trains SogCLR with rows on disk, sharded over two ranks, under ZeRO 2, and saves every
few steps. Every process of it is killed with SIGKILL at random moments, and it is started again with ``--resume``.
At the end weights and rows must be those of a run that nobody killed, bit for bit. Then the time and memory of a
step are compared with those of a thousandth of the rows. A small model: what is measured is what rows cost.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np
import psutil
import torch
from safetensors import safe_open

from benchmarks.saved import ROOT, save, stored
from compopt.checkpoint import manifest
from recipes import glyphs
from recipes.exports import GlyphExport
from recipes.report import environment, heading, table

MODEL = {
    "embed_dim": 16,
    "vision_cfg": {"image_size": 16, "layers": 1, "width": 32, "head_width": 16, "patch_size": 8},
    "text_cfg": {"context_length": 8, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 1},
}
SHARDS, PER_SHARD, BATCH, EPOCHS, SAVE_EVERY = 16, 256, 16, 6, 16
STEPS = EPOCHS * SHARDS * PER_SHARD // (2 * BATCH)


# -- data and runs -------------------------------------------------------------------------------------------------


def write_shards(folder: Path, n: int) -> None:
    """Pairs of glyphs and their names; keys are evenly spaced from 0 to n."""
    data, step = GlyphExport(glyphs.load()), n // (SHARDS * PER_SHARD)
    pairs = data.parts["train"][: SHARDS * PER_SHARD].tolist()
    folder.mkdir()
    for shard in range(SHARDS):
        with tarfile.open(folder / f"{shard:05d}.tar", "w") as archive:
            for number in range(shard * PER_SHARD, (shard + 1) * PER_SHARD):
                pair = pairs[number]
                for suffix, content in {"png": data.png(pair), "txt": data.caption(pair).encode()}.items():
                    member = tarfile.TarInfo(f"{number * step:010d}.{suffix}")
                    member.size = len(content)
                    archive.addfile(member, io.BytesIO(content))


def command(folder: Path, name: str, n: int, *more: str) -> list[str]:
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"),
        *("-m", "recipes.clip_webdataset", "--shards", str(folder / f"shards-{n}"), "--index", f"keys:{n}"),
        *("--model", str(folder / "micro.json"), "--output", str(folder / name), "--estimator", "sogclr"),
        *("--offload", "disk", "--shard", "--prefetch", "--deepspeed-config", "recipes/deepspeed/zero2.json"),
        *("--batch-size", str(BATCH), "--epochs", str(EPOCHS), "--workers", "1", "--shuffle", "200", *more),
    ]


@dataclass
class Watched:
    """A run under way, and what it took so far."""

    process: subprocess.Popen[bytes]
    output: IO[bytes]
    folder: Path
    started: float
    peak: int = 0
    first_state: float = 0.0  # seconds until there was one

    def family(self) -> list[psutil.Process]:
        """The launcher and all that it started."""
        try:
            first = psutil.Process(self.process.pid)
            return [first, *first.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def look(self) -> None:
        """Memory of its own of the largest process: without pages of files, which the kernel may take back."""
        if not self.first_state and (self.folder / "state" / "latest").exists():
            self.first_state = time.perf_counter() - self.started
        for process in self.family():
            try:
                memory = process.memory_info()
                self.peak = max(self.peak, memory.rss - memory.shared)
            except psutil.Error:
                continue

    def kill(self) -> None:
        """SIGKILL to every process, the launcher first, so that it cannot tidy up."""
        for process in self.family():
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        self.process.wait()


def start(folder: Path, name: str, n: int, *more: str) -> Watched:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    output = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the process
    process = subprocess.Popen(command(folder, name, n, *more), cwd=ROOT, env=env, stdout=output, stderr=output)
    return Watched(process, output, folder / name, time.perf_counter())


def finish(run: Watched) -> str:
    """Wait for the end; what it printed."""
    while run.process.poll() is None:
        run.look()
        time.sleep(0.3)
    run.output.seek(0)
    text = run.output.read().decode()
    if run.process.returncode:
        raise SystemExit(f"a run failed:\n{text[-4000:]}")
    return text


# -- killing -------------------------------------------------------------------------------------------------------


def steps_done(output: Path) -> int:
    """Steps in the newest complete state; 0 before the first."""
    pointer = output / "state" / "latest"
    if not pointer.exists():
        return 0
    found = list((output / "state" / pointer.read_text().strip()).rglob("manifest.json"))
    return int(json.loads(found[-1].read_text())["t"])


@dataclass
class Kill:
    """One kill: after how many seconds, whether a state was being written, and where the next life goes on."""

    after: float
    inside_save: bool
    step: int


def inside_save(output: Path, begun: float) -> bool:
    """A state was begun since, and not finished: its folder is younger than the pointer to the newest one."""
    pointer = output / "state" / "latest"
    finished = pointer.stat().st_mtime if pointer.exists() else 0.0
    folders = [output / "state" / name for name in "ab"]
    return any(folder.exists() and folder.stat().st_mtime > max(finished, begun) for folder in folders)


def kill_and_resume(folder: Path, n: int, kills: int, ready: float, rest: float, seed: int) -> list[Kill]:
    """Start, kill, resume, until so many kills were made; then let it end.

    Args:
        folder: of all runs.
        n: rows.
        kills: how many.
        ready: seconds from a start to the first state.
        rest: seconds from there to the end: a life gets about a share of them, so that the last kill finds a run.
        seed: of the moments.
    """
    draw, told = random.Random(seed), []
    again = ("--save-every", str(SAVE_EVERY), "--resume", "--quiet")
    while len(told) < kills:
        begun, run = time.time(), start(folder, "killed", n, *again)
        moment = draw.uniform(0.8 * ready, ready + 1.5 * rest / kills)
        while time.perf_counter() - run.started < moment and run.process.poll() is None:
            time.sleep(0.02)
        if run.process.poll() is not None:
            raise SystemExit(f"the run ended after {len(told)} kills; ask for fewer:\n{finish(run)[-2000:]}")
        run.kill()
        told.append(Kill(moment, inside_save(folder / "killed", begun), steps_done(folder / "killed")))
        print(f"kill {len(told)}: {told[-1]}, of {STEPS} steps", flush=True)
    finish(start(folder, "killed", n, *again))
    return told


# -- comparing -----------------------------------------------------------------------------------------------------


def visited_rows(checkpoint: Path) -> dict[str, np.ndarray]:
    """All rows of a checkpoint that were ever visited: their numbers, and each column's values."""
    chosen = manifest.choose(checkpoint, None)
    parts: dict[str, list[np.ndarray]] = {}
    for file in manifest.read(chosen)[1]:
        if file.name == manifest.STATE:
            continue
        with safe_open(chosen.path / file.name, framework="np") as opened:
            columns = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - no dictionary
        seen = columns["count"].any(axis=1)
        local = np.concatenate([np.arange(start, stop) for start, stop in file.spans])
        for name, values in {"row": file.first + file.stride * local, **columns}.items():
            parts.setdefault(name, []).append(values[seen])
    whole = {name: np.concatenate(values) for name, values in parts.items()}
    order = whole["row"].argsort()
    return {name: values[order] for name, values in whole.items()}


def compare(folder: Path) -> int:
    """Refuse any difference between the two runs' ends; how many rows were visited."""
    weights = [torch.load(folder / name / f"epoch_{EPOCHS}.pt", weights_only=True) for name in ("whole", "killed")]
    one, other = (found["state_dict"] for found in weights)
    different = [name for name in one if not torch.equal(one[name], other[name])]
    rows = [visited_rows(folder / name / f"epoch_{EPOCHS}.compopt") for name in ("whole", "killed")]
    different += [name for name in rows[0] if rows[0][name].tobytes() != rows[1][name].tobytes()]
    if different or one.keys() != other.keys():
        raise SystemExit(f"the killed run ended differently: {different}")
    return len(rows[0]["row"])


def disk(path: Path) -> int:
    """Bytes that a folder takes on the disk; a file with several names once."""
    found = {(file.stat().st_ino): file.stat().st_blocks * 512 for file in path.rglob("*") if file.is_file()}
    return sum(found.values())


# -- the report ----------------------------------------------------------------------------------------------------


def measure(folder: Path, sizes: Sequence[int], rounds: int) -> dict[int, dict[str, list[float]]]:
    """Milliseconds per step of the last epoch, and memory, of runs that do not save within epochs, in turns."""
    found: dict[int, dict[str, list[float]]] = {n: {"step": [], "memory": []} for n in sizes}
    for number in range(rounds):
        for n in sizes if number % 2 else reversed(sizes):
            run = start(folder, "timed", n)
            rates = re.findall(r"(\d+) samples/s", finish(run))
            found[n]["step"].append(1e3 * 2 * BATCH / float(rates[-1]))
            found[n]["memory"].append(run.peak / 2**20)
            shutil.rmtree(folder / "timed")
    return found


def report(results: dict, env: dict) -> str:
    kills, timed = results["kills"], results["timed"]
    steps = ", ".join(str(kill["step"]) for kill in kills)
    inside = sum(kill["inside_save"] for kill in kills)
    body = [
        [
            f"{int(n):,}",
            " ".join(f"{value:.1f}" for value in sorted(found["step"])),
            " ".join(f"{value:.0f}" for value in sorted(found["memory"])),
        ]
        for n, found in timed.items()
    ]
    lines = [
        *heading("A billion rows", env),
        f"`recipes/clip_webdataset.py`, SogCLR, n = {results['n']:,}, `--offload disk --shard --prefetch`, two ranks, "
        f"ZeRO 2, {STEPS} steps of 2 x {BATCH} pairs whose keys are spread evenly over all rows, saved every "
        f"{SAVE_EVERY}.",
        "",
        f"Killed by SIGKILL, all processes at once, {len(kills)} times, and resumed: the same weights and the same "
        f"{results['visited']:,} visited rows, bit for bit, as the run that nobody killed. Kills inside a save: "
        f"{inside}. It went on from steps {steps}.",
        "",
        f"The undisturbed run took {results['ready']:.0f} s to its first state and {results['seconds']:.0f} s to its "
        f"end, with {STEPS // SAVE_EVERY} saves and {EPOCHS} ends of epochs. At the end its rows took "
        f"{results['disk']['rows'] / 2**20:,.0f} MiB of the disk (all of them would take "
        f"{results['n'] * 16 / 2**30:.1f} GiB), its states {results['disk']['state'] / 2**20:,.0f} MiB.",
        "",
        "What a step takes, saves left out, and the memory of its own of the largest process; a value per run:",
        "",
        table(["n", "step, ms", "memory, MiB"], body),
    ]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    root = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    root.add_argument("--n", type=int, default=10**9, help="rows (1e9)")
    root.add_argument("--kills", type=int, default=20)
    root.add_argument("--rounds", type=int, default=3, help="timed runs of each n")
    root.add_argument("--seed", type=int, default=0)
    root.add_argument("--folder", type=Path, help="where to work; a temporary folder by default")
    root.add_argument("--report", action="store_true", help="print the page again from the figures of the last run")
    root.add_argument("--no-save", dest="save", action="store_false", help="print only")
    args = root.parse_args(argv)
    if args.report:
        old = stored("billion")
        save("billion", report(old["results"], old["environment"]), old["environment"], old["results"])
        return
    env = environment()
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        (folder / "micro.json").write_text(json.dumps(MODEL))
        sizes = (args.n, args.n // 1000)
        for n in sizes:
            write_shards(folder / f"shards-{n}", n)
        whole = start(folder, "whole", args.n, "--save-every", str(SAVE_EVERY), "--quiet")
        finish(whole)
        seconds, ready = time.perf_counter() - whole.started, whole.first_state
        print(f"undisturbed: {ready:.0f} s to the first state, {seconds:.0f} s to the end", flush=True)
        kills = kill_and_resume(folder, args.n, args.kills, ready, seconds - ready, args.seed)
        results = {
            "n": args.n,
            "seconds": seconds,
            "ready": ready,
            "kills": [vars(kill) for kill in kills],
            "visited": compare(folder),
            "disk": {part: disk(folder / "whole" / part) for part in ("rows", "state")},
        }
        for run in ("whole", "killed"):
            shutil.rmtree(folder / run)
        results["timed"] = measure(folder, sizes, args.rounds)
    text = report(results, env)
    print(text)
    if args.save:
        save("billion", text, env, results)


if __name__ == "__main__":
    main()
