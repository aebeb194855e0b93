"""Kill a training-and-saving run at random moments, and compare every recovery with an undisturbed run.

    python -m benchmarks.faults                              # 1,000 kills; stopped and called again it goes on
    python -m benchmarks.faults --kills 1000 --minutes 15    # for so long
    python -m benchmarks.faults --kills 20 --round 2 --output /tmp/faults.md    # a short look

A small encoder, AdamW and an estimator train for some steps and save often. The process is killed with SIGKILL at a
random moment, often during a save; a new process loads the newest complete checkpoint and continues until it is killed
or finishes. After every kill, there must be a checkpoint unless none had been completed, it must load, and model,
optimizer and rows must be bit for bit those of the undisturbed run after as many steps. The final state of every
finished run must be bit for bit that of the undisturbed run. Any difference ends the program with an error.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import functools
import hashlib
import itertools
import mmap
import os
import random
import shutil
import signal
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import compopt
from benchmarks.machine import free_port
from benchmarks.report import RESULTS, append_run, environment, heading, read_runs, table

DIM, BATCH = 8, 32
BEGUN, INSIDE = 0, 1  # positions of the status bytes of a run in shared memory
TIMEOUT = 30.0  # seconds: timeout of the process group

ABOUT = """A loop that trains and saves is killed with SIGKILL at random moments. After every kill, the newest complete
checkpoint was loaded and compared, bit for bit, with the state of an undisturbed run after the same number of steps.
Every resumed run that reached its end was compared with the final state of the undisturbed run. No difference was
found; a difference would have ended the program with an error. With two ranks, one of them or, with equal probability,
both were killed; a surviving rank ended with its own error. Checkpoints of two ranks were also loaded on one rank."""


# -- the run -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """The training run: method, placement, size, and how often it saves."""

    offload: str | None = None
    n: int = 300_000
    steps: int = 24
    blocking: bool = True
    ranks: int = 1
    shard: bool = False


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


class Training:
    """Model, optimizer and estimator with a common checkpoint.

    The model's file, named by the number of the step, is written before ``compopt.save``, so that the newest complete
    checkpoint of the estimator always has a matching model.
    """

    def __init__(self, setting: Setting, directory: Path) -> None:
        self.setting, self.directory = setting, directory
        torch.manual_seed(0)
        self.model = torch.nn.ModuleList([torch.nn.Linear(DIM, DIM), torch.nn.Linear(DIM, DIM)])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        options = {"offload": setting.offload, "shard": setting.shard and ranks() > 1}
        if setting.offload == "disk":
            options["offload_dir"] = directory / "rows"
        self.est = compopt.ISogCLREstimator(setting.n, gamma=0.7, rho=1.0, tau_init=0.1, **options)
        self.est.attach(self.optimizer)
        self.handle: Any = None

    def step(self, number: int) -> None:
        """Make one update; its batch is a function of its number."""
        generator = torch.Generator().manual_seed(number)
        # half of the samples come from a small set, so that rows are visited again
        index = torch.cat([torch.randperm(50, generator=generator)[: BATCH // 2],
                           50 + torch.randint(self.setting.n - 50, (BATCH // 2,), generator=generator)])  # fmt: skip
        x, y = torch.randn(2, BATCH, DIM, generator=generator)
        self.optimizer.zero_grad()
        own = slice(rank(), None, ranks())
        self.est(self.model[0](x[own]), self.model[1]((x + 0.5 * y)[own]), index[own]).backward()
        self._average_gradients()
        self.optimizer.step()

    def _average_gradients(self) -> None:
        if ranks() > 1:
            for parameter in self.model.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad /= ranks()

    def save(self) -> None:
        """Save model and optimizer, then the rows."""
        if rank() == 0:
            models = self.directory / "models"
            models.mkdir(exist_ok=True)
            partial = models / "partial"
            torch.save((self.model.state_dict(), self.optimizer.state_dict()), partial)
            os.replace(partial, models / f"{self.est.t}.pt")
        folder = self.directory / "checkpoints"
        if self.setting.blocking:
            compopt.save(self.est, folder, keep=2)
        else:
            self.handle = compopt.save(self.est, folder, keep=2, blocking=False)

    @property
    def saving(self) -> bool:
        """Return whether a background save is in progress."""
        return self.handle is not None and not self.handle.done

    def load(self) -> None:
        """Load the newest complete checkpoint."""
        compopt.load(self.est, self.directory / "checkpoints")
        model, optimizer = torch.load(self.directory / "models" / f"{self.est.t}.pt")
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)

    def digest(self) -> str:
        """Return a hash of the whole state."""
        total = hashlib.sha256()
        states = [*self.model.state_dict().values()]
        for moments in self.optimizer.state_dict()["state"].values():
            states += list(moments.values())
        state = self.est.state_dict()
        for tensor in (*states, *(value for own in state["parts"].values() for value in own["rows"].values())):
            total.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        return total.hexdigest()


def train(setting: Setting, directory: Path, flags: mmap.mmap | None = None) -> dict[int, str]:
    """Train from the newest checkpoint, if any, to the end; return the final digest, without ``flags`` of all steps."""
    run = Training(setting, directory)
    if any((directory / "checkpoints").glob("*/manifest.json")):
        run.load()
    if flags is not None:
        flags[BEGUN] = 1
    digests = {}
    while run.est.t < setting.steps:
        run.step(run.est.t)
        if flags is not None:
            flags[INSIDE] = 1
        run.save()
        if flags is None:
            digests[run.est.t] = run.digest()
        else:
            flags[INSIDE] = run.saving
    return {**digests, setting.steps: run.digest()}


# -- killing -------------------------------------------------------------------------------------------------------


@dataclass
class Outcome:
    """Counts of what happened to the runs."""

    kills: int = 0
    inside_save: int = 0
    before_first: int = 0
    ends: int = 0
    resumed_from: set[int] = field(default_factory=set)


def forked(function, *args) -> tuple[int, int]:
    """Run a function in a child process that exits without cleanup; return its id and the pipe of its answer."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.write(writing, function(*args).encode())
            status = 0
        except BaseException as error:
            os.write(2, f"child: {type(error).__name__}: {error}\n".encode())
        os._exit(status)
    os.close(writing)
    return pid, reading


class Ranks:
    """Child processes that all run ``function(*args)``, in a process group if there are several."""

    def __init__(self, count: int, function, *args) -> None:
        port = free_port()
        self.children = [forked(as_rank, number, count, port, function, *args) for number in range(count)]

    def kill(self, which: list[int]) -> None:
        """Send SIGKILL to some children; it has no effect on children that have ended already (zombies)."""
        for number in which:
            os.kill(self.children[number][0], signal.SIGKILL)

    def answers(self) -> list[str | None]:
        """Wait for all children and return their answers: ``None`` if killed, ``""`` if failed after another's kill."""
        said = []
        for pid, reading in self.children:
            with os.fdopen(reading) as pipe:
                text = pipe.read()
            status = await_end(pid)
            said.append(None if os.WIFSIGNALED(status) else text if not status else "")
        if None not in said and "" in said:
            raise AssertionError("a child failed, see above")
        return said


def await_end(pid: int) -> int:
    """Wait for a child and return its status; raise if it still waits long after another rank has ended."""
    end = time.monotonic() + TIMEOUT + 60
    while time.monotonic() < end:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return status
        time.sleep(0.005)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    raise AssertionError(f"rank {pid} did not end within {TIMEOUT + 60} s after another one was killed")


def as_rank(number: int, count: int, port: int, function, *args) -> str:
    """Run a function as one of the ranks."""
    torch.set_num_threads(1)
    if count > 1:
        if number:  # hide the errors of the other ranks, which are expected
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        dist.init_process_group(
            "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=number, world_size=count,
            timeout=datetime.timedelta(seconds=TIMEOUT),
        )  # fmt: skip
    return function(*args)


def to_the_end(setting: Setting, directory: Path, flags: mmap.mmap) -> str:
    """Train to the end and return the final digest; runs in a child."""
    return train(setting, directory, flags)[setting.steps]


def recovered(setting: Setting, directory: Path) -> str:
    """Load the newest checkpoint and return its step and its digest; runs in a child."""
    run = Training(setting, directory)
    run.load()
    return f"{run.est.t} {run.digest()}"


def reference(setting: Setting, directory: Path) -> str:
    """Train without a kill and return the digests of all steps; runs in a child."""
    return " ".join(f"{t}:{digest}" for t, digest in train(setting, directory).items())


@functools.cache
def undisturbed(setting: Setting, directory: Path) -> tuple[dict[int, str], float]:
    """Return the digest of every step, and the duration in seconds of a run that computes only the final digest."""
    said = Ranks(setting.ranks, reference, setting, fresh(directory)).answers()[0]
    flags = mmap.mmap(-1, 16)
    ranks = Ranks(setting.ranks, to_the_end, setting, fresh(directory), flags)
    await_flag(flags, BEGUN)
    started = time.perf_counter()
    ranks.answers()
    return {int(t): digest for t, digest in (entry.split(":") for entry in said.split())}, time.perf_counter() - started


def torture(setting: Setting, kills: int, seed: int, root: Path, say=lambda outcome: None) -> Outcome:
    """Kill and recover runs until there were ``kills`` kills and the last run has finished.

    With several ranks, either a random one or all of them at once are killed, with equal probability.
    """
    generator, outcome = random.Random(seed), Outcome()
    expected, duration = undisturbed(setting, root / "reference")
    while outcome.kills < kills:
        directory, alive = fresh(root / "run"), True
        while alive:
            flags = mmap.mmap(-1, 16)
            ranks = Ranks(setting.ranks, to_the_end, setting, directory, flags)
            if generator.random() < 0.8:  # otherwise the kill may also come during construction or loading
                await_flag(flags, BEGUN)
            time.sleep(generator.uniform(0.0, duration))
            everyone = list(range(setting.ranks))
            ranks.kill(generator.choice([everyone, [generator.choice(everyone)]]))
            said = ranks.answers()
            if None not in said:
                outcome.ends += 1
                alive = False
                if set(said) != {expected[setting.steps]}:
                    raise AssertionError(f"the run ended in another state than the undisturbed one: {directory}")
                continue
            outcome.kills += 1
            outcome.inside_save += flags[INSIDE]
            check_recovery(setting, directory, expected, outcome)
            say(outcome)
    return outcome


def await_flag(flags: mmap.mmap, which: int) -> None:
    """Wait until a child has set the flag, at most for the timeout."""
    end = time.monotonic() + TIMEOUT
    while not flags[which] and time.monotonic() < end:
        time.sleep(0.002)


def check_recovery(setting: Setting, directory: Path, expected: dict[int, str], outcome: Outcome) -> None:
    """Check, after a kill, that the newest checkpoint loads, on one rank, and holds a state of the undisturbed run."""
    if not any((directory / "checkpoints").glob("*/manifest.json")):
        outcome.before_first += 1
        shutil.rmtree(directory / "rows", ignore_errors=True)  # as the error about a leftover table file advises
        return
    alone = dataclasses.replace(setting, ranks=1, offload=None)
    said = Ranks(1, recovered, alone, directory).answers()[0]
    t, digest = said.split()
    outcome.resumed_from.add(int(t))
    if expected[int(t)] != digest:
        raise AssertionError(f"the checkpoint of t={t} is not the state that the run had: {directory}")


def fresh(directory: Path) -> Path:
    """Create an empty directory; its previous content is removed."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    return directory


# -- the result --------------------------------------------------------------------------------------------------


def settings() -> list[Setting]:
    """Return placements on one rank and shards on two, each with blocking and with background saves."""
    places = [{"offload": None}, {"offload": "cpu"}, {"offload": "disk"}]
    places += [{"offload": place, "ranks": 2, "shard": True} for place in (None, "disk")]
    return [Setting(n=100_000, blocking=blocking, **place) for place in places for blocking in (True, False)]


def rounds(path: Path, setting: Setting) -> list[dict]:
    """Return the rounds of a setting that the file of runs contains."""
    wanted = dataclasses.asdict(setting).items()
    return [run for run in read_runs(path) if wanted <= run["setting"].items()]


def carry_out(path: Path, kills: int, per_round: int, minutes: float, seed: int, root: Path) -> None:
    """Add rounds of the settings in turn, until the total number of kills or the time limit is reached."""
    end, every = time.monotonic() + 60 * minutes, settings()
    for number in itertools.count():
        for setting in every:
            done = sum(run["outcome"]["kills"] for run in read_runs(path))
            if done >= kills or time.monotonic() > end:
                return
            if len(rounds(path, setting)) > number:
                continue
            started = time.perf_counter()
            outcome = torture(setting, per_round, hash((seed, number)), root / str(every.index(setting)))
            found = {**dataclasses.asdict(outcome), "resumed_from": sorted(outcome.resumed_from)}
            seconds = round(time.perf_counter() - started, 1)
            append_run(path, {"setting": dataclasses.asdict(setting), "outcome": found, "seconds": seconds})
            print(f"{done + outcome.kills} of {kills} kills; {setting}: {found}", flush=True)


def report(env: dict, path: Path, page: Path) -> None:
    """Write the result page from the file of runs."""
    head = [
        "rows",
        "ranks",
        "saved",
        "kills",
        "during a save",
        "before the first",
        "finished runs",
        "resumed from",
        "s",
    ]
    names = ("kills", "inside_save", "before_first", "ends")
    lines, total = [], Counter()
    for setting in settings():
        found, counts = rounds(path, setting), Counter()
        for run in found:
            counts.update({name: run["outcome"][name] for name in names}, seconds=run["seconds"])
        total.update(counts)
        resumed = {t for run in found for t in run["outcome"]["resumed_from"]}
        place = f"{setting.n:,} on {setting.offload or 'device'}{', sharded' if setting.shard else ''}"
        saved, part = "between steps" if setting.blocking else "in the background", f"{len(resumed)} of {setting.steps}"
        cells = [str(counts[name]) for name in names]
        lines.append([place, str(setting.ranks), saved, *cells, part, f"{counts['seconds']:.0f}"])
    lines.append(["all", "", "", *(str(total[name]) for name in names), "", f"{total['seconds']:.0f}"])
    page.write_text(
        "\n".join([*heading("Runs killed at random moments", env), ABOUT, "", table(head, lines, "lrl"), ""])
    )


def main() -> None:
    """Kill and recover runs with every placement; continue from the file of runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--kills", type=int, default=1000, help="total number of kills, including those of earlier calls"
    )
    parser.add_argument("--round", type=int, default=10, help="number of kills of one setting before the next setting")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="time limit; another call continues")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dir", type=Path, help="working directory (default: a temporary directory)")
    parser.add_argument(
        "--output",
        type=Path,
        default=RESULTS / "faults.md",
        help="page; the runs are written to a .jsonl file next to it",
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    env, runs = environment(), args.output.with_suffix(".jsonl")
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        carry_out(runs, args.kills, args.round, args.minutes, args.seed, Path(folder))
    report(env, runs, args.output)


if __name__ == "__main__":
    main()
