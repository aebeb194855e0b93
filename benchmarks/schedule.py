"""Disturb a run of the CLIP recipe by preemptions, full disks and lost ranks.

    python -m benchmarks.schedule                                      # 200, 20 and 20: an hour or more
    python -m benchmarks.schedule --preemptions 10 --full 2 --losses 2 --output /tmp/schedule.md

``recipes/train_clip.py`` trains on the smallest data under ``torchrun --max-restarts``, on two ranks, with rows sharded
on disk and a checkpoint after every update. In random order, all of its processes are killed and it is restarted with
``--resume`` (a preemption), its disk is filled until a save fails (a full disk), or one rank is killed (a lost rank).
There is at least one update between two events. History, final measures, weights and rows must be bit for bit those of
an undisturbed run.

The disk is a mounted file, which requires root.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import torch
from safetensors.torch import load_file

import compopt
from benchmarks.report import RESULTS, environment, heading, table
from recipes import checkpoints, glyphs, methods
from tests.disks import fill, mounted
from tests.launching import ROOT
from tests.launching import environment as launching

BATCH, LIMIT, WAIT = 12, 120, 240  # 10 updates per epoch; 12 samples on 4, 3 or 2 ranks
# Otherwise ranks restarted by torchrun may read the addresses of the previous ranks: pytorch issue 135712.
RESTARTABLE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
RANKS, DISK, PER_EPOCH = 2, 400 << 20, 10
PER_EVENT = 15  # updates; a failed save is noticed some updates later
FULL = "could not be written"
KINDS = ("preemptions", "full disks", "lost ranks")


class Elastic:
    """A run of the recipe under torchrun, in a session of its own."""

    def __init__(self, cache, output, ranks, *options, restarts=5, log=None):
        launcher = ("torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", f"--max-restarts={restarts}")
        arguments = ["--limit", str(LIMIT), "--batch-size", str(BATCH), "--epochs", "2", "--checkpoint-every", "1"]
        arguments += ["--eval-every", "100", "--timeout", "20", "--threads", "1", "--no-plots", "--no-progress"]
        arguments += ["--estimator", "sogclr", "--offload", "disk", "--shard"]
        arguments += ["--cache-dir", str(cache), "--output", str(output)]
        command = [sys.executable, "-m", *launcher, "-m", "recipes.train_clip", *arguments, *options]
        self.output, self.log = output, log or Path(f"{output}.log")
        with open(self.log, "a") as log:
            self.process = subprocess.Popen(
                command, cwd=ROOT, env=launching() | RESTARTABLE, start_new_session=True, stdout=log, stderr=log
            )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.kill()

    def kill(self):
        """Send SIGKILL to the launcher and to all ranks, which have sessions of their own."""
        if self.process.poll() is None:
            launcher = psutil.Process(self.process.pid)
            launcher.suspend()  # so that it starts no further ranks
            for process in (*launcher.children(recursive=True), launcher):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        self.process.wait()

    def saves(self):
        """Return the numbers of updates ``t`` of all complete checkpoints."""
        found = set()
        for path in self.output.glob("*/checkpoints/*/compopt/checkpoint-*/manifest.json"):
            with contextlib.suppress(OSError):  # the folder is just being removed
                found.add(json.loads(path.read_text())["t"])
        return found

    def await_saves(self, beyond):
        """Wait for a checkpoint of more than ``beyond`` updates; return its number of updates."""
        end = time.monotonic() + WAIT
        while time.monotonic() < end:
            found = max(self.saves(), default=0)
            if found > beyond:
                return found
            assert self.process.poll() is None, self.log.read_text()[-4000:]
            time.sleep(0.02)
        raise AssertionError(f"no checkpoint: {self.log.read_text()[-4000:]}")

    def kill_a_rank(self, which):
        """Send SIGKILL to one rank, once the launcher has started any."""
        end, ranks = time.monotonic() + WAIT, []
        while not ranks and time.monotonic() < end:
            ranks = self.ranks()
            time.sleep(0.02)
        assert ranks, f"no rank to kill: {self.log.read_text()[-4000:]}"
        ranks[which % len(ranks)].kill()

    def ranks(self):
        """Return the processes of the ranks."""
        found = []
        for child in psutil.Process(self.process.pid).children():
            with contextlib.suppress(psutil.NoSuchProcess):  # also raised for a zombie
                if "train_clip" in " ".join(child.cmdline()):
                    found.append(child)
        return found

    def result(self, limit=WAIT):
        """Wait at most ``limit`` seconds for a successful end; return final measures and history."""
        assert self.process.wait(limit) == 0, self.log.read_text()[-4000:]
        run = json.loads((self.output / "metrics.json").read_text())["runs"][0]
        assert run["finished"]
        return run["final"], run["history"]


def state(output: Path) -> dict[str, torch.Tensor]:
    """Return weights and rows at the end of a run."""
    found = checkpoints.latest(next(output.glob("*/checkpoints")))
    assert found is not None
    est = methods.build("sogclr", LIMIT, methods.BIMODAL, methods.METHODS["sogclr"].options(methods.BIMODAL), {})
    compopt.load(est, found / "compopt")
    return {**load_file(found / "model.safetensors"), **est.read(torch.arange(LIMIT))}


class Disturbed:
    """Run of the recipe that is restarted whenever it is stopped."""

    def __init__(self, cache: Path, disk: Path, epochs: int) -> None:
        self.cache, self.disk, self.epochs, self.saved = cache, disk, epochs, 0
        self.run = self.start()

    def start(self) -> Elastic:
        options = ("--resume", "--epochs", str(self.epochs))
        log = self.cache.with_name("disturbed.log")  # not on the disk that fills
        return Elastic(self.cache, self.disk / "run", RANKS, *options, restarts=1000, log=log)

    def disturb(self, kind: str, choose: random.Random) -> None:
        """Carry out one event after the next checkpoint."""
        self.saved = self.run.await_saves(self.saved)
        time.sleep(choose.uniform(0.0, 0.3))
        if kind == "preemptions":
            self.run.kill()
            self.run = self.start()
        elif kind == "lost ranks":
            self.run.kill_a_rank(choose.randrange(RANKS))
        else:
            self.fill_the_disk()

    def fill_the_disk(self) -> None:
        """Fill the disk until a save has failed; torchrun restarts the ranks meanwhile."""
        before, end = self.run.log.read_text().count(FULL), time.monotonic() + WAIT
        balloon = fill(self.disk)
        try:
            while self.run.log.read_text().count(FULL) == before:
                if time.monotonic() > end or self.run.process.poll() is not None:
                    raise AssertionError(f"no save failed: {self.run.log.read_text()[-4000:]}")
                time.sleep(0.1)
                fill(self.disk)  # removed checkpoints free space for the next
        finally:
            balloon.unlink()


def carry_out(counts: dict[str, int], seed: int, folder: Path, disk: Path) -> tuple[float, int]:
    """Disturb a run, compare it with an undisturbed one, and return its seconds and its number of updates."""
    choose, cache = random.Random(seed), folder / "cache"
    cache.mkdir()
    glyphs.load(cache)
    events = [kind for kind, count in counts.items() for _ in range(count)]
    choose.shuffle(events)
    epochs = len(events) * PER_EVENT // PER_EPOCH + 2
    updates = epochs * PER_EPOCH
    limit = WAIT + updates  # seconds
    once = ("--epochs", str(epochs), "--checkpoint-every", str(updates))
    with Elastic(cache, folder / "undisturbed", RANKS, *once) as run:
        expected = run.result(limit)
    started, disturbed = time.perf_counter(), Disturbed(cache, disk, epochs)
    try:
        for number, kind in enumerate(events):
            disturbed.disturb(kind, choose)
            print(f"{number + 1} of {len(events)}: {kind} after update {disturbed.saved}", flush=True)
        found = disturbed.run.result(limit)
    finally:
        disturbed.run.kill()
    if found != expected:
        raise AssertionError(f"another end: {found} instead of {expected}")
    one, other = state(folder / "undisturbed"), state(disk / "run")
    different = [name for name in one if not torch.equal(one[name], other[name])]
    if different or one.keys() != other.keys():
        raise AssertionError(f"weights or rows differ: {different}")
    return time.perf_counter() - started, updates


ABOUT = """The CLIP recipe is trained on the smallest data (two ranks, rows sharded on disk, a checkpoint after every
update) in one run with the following numbers of interruptions. History, final metrics, weights and rows were bit for
bit those of an undisturbed run; a difference would have ended the program with an error."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preemptions", type=int, default=200)
    parser.add_argument("--full", type=int, default=20, help="number of full disks")
    parser.add_argument("--losses", type=int, default=20, help="number of lost ranks")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=RESULTS / "schedule.md")
    args = parser.parse_args()
    torch.set_num_threads(1)
    counts = dict(zip(KINDS, (args.preemptions, args.full, args.losses), strict=True))
    env = environment()
    with tempfile.TemporaryDirectory() as folder, mounted(Path(folder) / "disk", DISK) as disk:
        seconds, updates = carry_out(counts, args.seed, Path(folder), disk)
    cells = [*map(str, counts.values()), str(updates), f"{seconds:.0f}"]
    text = "\n".join(
        [*heading("Interruptions of one run", env), ABOUT, "", table([*KINDS, "updates", "s"], [cells]), ""]
    )
    args.output.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
