"""A run of the CLIP recipe under torchrun, on the smallest data, that somebody disturbs."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from pathlib import Path

import psutil

from tests.launching import ROOT, environment

BATCH, LIMIT, WAIT = 12, 120, 240  # 10 updates per epoch; 12 samples on 4, 3 or 2 ranks
# Otherwise ranks that torchrun starts again may find the addresses of the ranks before them: pytorch issue 135712.
RESTARTABLE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


class Elastic:
    """A run of the recipe under torchrun, in a session of its own."""

    def __init__(self, cache, output, ranks, *options, restarts=5, log=None):
        launcher = ("torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", f"--max-restarts={restarts}")
        arguments = ["--limit", str(LIMIT), "--batch-size", str(BATCH), "--epochs", "2", "--checkpoint-every", "1"]
        arguments += ["--eval-every", "100", "--timeout", "20", "--threads", "1", "--no-plots", "--no-progress"]
        arguments += ["--offload", "disk", "--shard", "--cache-dir", str(cache), "--output-dir", str(output)]
        command = [sys.executable, "-m", *launcher, "-m", "recipes.train_clip", *arguments, *options]
        self.output, self.log = output, log or Path(f"{output}.log")
        with open(self.log, "a") as log:
            self.process = subprocess.Popen(
                command, cwd=ROOT, env=environment() | RESTARTABLE, start_new_session=True, stdout=log, stderr=log
            )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.kill()

    def kill(self):
        """The launcher and all ranks, which have sessions of their own, by SIGKILL."""
        if self.process.poll() is None:
            launcher = psutil.Process(self.process.pid)
            launcher.suspend()  # it starts no further ones
            for process in (*launcher.children(recursive=True), launcher):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        self.process.wait()

    def saves(self):
        """Checkpoints that were completed so far, by the numbers of their rows."""
        found = set()
        for path in self.output.glob("*/checkpoints/*/compopt/checkpoint-*/manifest.json"):
            with contextlib.suppress(OSError):  # the folder is just being removed
                found.add(json.loads(path.read_text())["t"])
        return found

    def await_saves(self, beyond):
        """Until a checkpoint of more than so many updates is there; its number."""
        end = time.monotonic() + WAIT
        while time.monotonic() < end:
            found = max(self.saves(), default=0)
            if found > beyond:
                return found
            assert self.process.poll() is None, self.log.read_text()[-4000:]
            time.sleep(0.02)
        raise AssertionError(f"no checkpoint: {self.log.read_text()[-4000:]}")

    def kill_a_rank(self, which):
        """By SIGKILL, once the launcher has started any."""
        end, ranks = time.monotonic() + WAIT, []
        while not ranks and time.monotonic() < end:
            ranks = self.ranks()
            time.sleep(0.02)
        assert ranks, f"no rank to kill: {self.log.read_text()[-4000:]}"
        ranks[which % len(ranks)].kill()

    def ranks(self):
        """Their processes."""
        found = []
        for child in psutil.Process(self.process.pid).children():
            with contextlib.suppress(psutil.NoSuchProcess):  # a zombie is one too
                if "train_clip" in " ".join(child.cmdline()):
                    found.append(child)
        return found

    def result(self, limit=WAIT):
        """When it ended well, within so many seconds: losses and final measures."""
        assert self.process.wait(limit) == 0, self.log.read_text()[-4000:]
        run = json.loads((self.output / "metrics.json").read_text())["runs"][0]
        assert run["finished"]
        return run["final"], run["history"]
