"""Kill a training-and-saving run at random moments, and compare every recovery with an undisturbed run.

    python -m benchmarks.faults --kills 100

A small encoder, AdamW and an estimator train for some steps and save often. The process is killed with SIGKILL at a
random moment, which often falls inside a save; a new process loads the newest complete checkpoint and goes on, until
it is killed in turn or ends. Checked after every kill: there is a checkpoint unless none had been finished; it loads;
model, optimizer and rows are bit for bit those that the undisturbed run had after so many steps. Checked after every
end: the final state is bit for bit that of the undisturbed run. Any difference ends the program with an error.
"""

from __future__ import annotations

import argparse
import mmap
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch

from benchmarks.faults_training import INSIDE, Setting, Training, train
from benchmarks.saved import RESULTS
from recipes.report import environment, heading, table

ABOUT = """SIGKILL at a random moment of a training-and-saving loop. After every kill the newest complete checkpoint
was loaded and compared, bit for bit, with the state that an undisturbed run had after so many steps; every
resumed run that reached its end was compared with the end of the undisturbed one. No difference was found:
one would have ended the program with an error."""


@dataclass
class Outcome:
    """Counts of what happened to the runs."""

    kills: int = 0
    inside_save: int = 0
    before_first: int = 0
    ends: int = 0
    resumed_from: set[int] = field(default_factory=set)


def forked(function, *args) -> tuple[int, int]:
    """Run a function in a child that ends without cleaning up; the child's id and the pipe that gets its answer."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.write(writing, function(*args).encode())
            status = 0
        except BaseException as error:
            print(f"child: {type(error).__name__}: {error}", file=sys.stderr)
        os._exit(status)
    os.close(writing)
    return pid, reading


def answer(pid: int, reading: int) -> str | None:
    """What a child said, or ``None`` if it was killed."""
    _, status = os.waitpid(pid, 0)
    with os.fdopen(reading) as pipe:
        said = pipe.read()
    if os.WIFSIGNALED(status):
        return None
    if os.WEXITSTATUS(status):
        raise AssertionError("a child failed, see above")
    return said


def to_the_end(setting: Setting, directory: Path, flags: mmap.mmap) -> str:
    """Train to the end, in a child; the final digest."""
    return train(setting, directory, flags)[setting.steps]


def recovered(setting: Setting, directory: Path) -> str:
    """Load the newest checkpoint, in a child; its step and its digest."""
    run = Training(setting, directory)
    run.load()
    return f"{run.est.t} {run.digest()}"


def reference(setting: Setting, directory: Path) -> str:
    """Train undisturbed, in a child; the digests of all steps."""
    return " ".join(f"{t}:{digest}" for t, digest in train(setting, directory).items())


def torture(setting: Setting, kills: int, seed: int, root: Path, say=lambda outcome: None) -> Outcome:
    """Kill and recover until there were so many kills and the last run has ended."""
    generator, outcome = random.Random(seed), Outcome()
    started = time.perf_counter()
    pid, reading = forked(reference, setting, fresh(root / "reference"))
    said = drain(pid, reading)
    duration = time.perf_counter() - started
    expected = {int(t): digest for t, digest in (entry.split(":") for entry in said.split())}
    while outcome.kills < kills:
        directory, alive = fresh(root / "run"), True
        while alive:
            flags = mmap.mmap(-1, 16)
            pid, reading = forked(to_the_end, setting, directory, flags)
            time.sleep(generator.uniform(0.0, duration))
            os.kill(pid, signal.SIGKILL)
            said = answer(pid, reading)
            if said is not None:
                outcome.ends += 1
                alive = False
                if said != expected[setting.steps]:
                    raise AssertionError(f"the run ended in another state than the undisturbed one: {directory}")
                continue
            outcome.kills += 1
            outcome.inside_save += flags[INSIDE]
            check_recovery(setting, directory, expected, outcome)
            say(outcome)
    return outcome


def check_recovery(setting: Setting, directory: Path, expected: dict[int, str], outcome: Outcome) -> None:
    """Check, after a kill, that the newest checkpoint loads and holds a state that the undisturbed run had."""
    if not any((directory / "checkpoints").glob("*/manifest.json")):
        outcome.before_first += 1
        shutil.rmtree(directory / "rows", ignore_errors=True)  # as the error of a left table file says
        return
    said = drain(*forked(recovered, setting, directory))
    t, digest = said.split()
    outcome.resumed_from.add(int(t))
    if expected[int(t)] != digest:
        raise AssertionError(f"the checkpoint of t={t} is not the state that the run had: {directory}")


def drain(pid: int, reading: int) -> str:
    """Wait for the answer of a child that nobody kills."""
    with os.fdopen(reading) as pipe:
        said = pipe.read()
    _, status = os.waitpid(pid, 0)
    if status:
        raise AssertionError("a child failed, see above")
    return said


def fresh(directory: Path) -> Path:
    """Make an empty directory; what was there goes."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    return directory


def report(env: dict, lines: list[tuple[Setting, Outcome, float]], path: Path) -> None:
    """Write the result page."""
    head = ["method", "rows", "kills", "inside a save", "before the first", "runs ended", "resumed from", "seconds"]
    rows = []
    for setting, outcome, seconds in lines:
        counts = (outcome.kills, outcome.inside_save, outcome.before_first, outcome.ends)
        resumed = f"{len(outcome.resumed_from)} of {setting.steps // setting.save_every} checkpoints"
        place = f"{setting.n:,} on {setting.offload or 'device'}"
        rows.append([setting.method, place, *map(str, counts), resumed, f"{seconds:.0f}"])
    path.write_text("\n".join([*heading("Killed runs", env), ABOUT, "", table(head, rows, "ll"), ""]))


def show(outcome: Outcome) -> None:
    """Print how many kills there were."""
    print(f"{outcome.kills} kills", end="\r")


def main() -> None:
    """Kill and recover runs with every placement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100, help="kills per setting")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--offload", nargs="+", default=["none", "cpu", "disk"], choices=["none", "cpu", "disk"])
    parser.add_argument("--beside", action="store_true", help="save with blocking=False")
    parser.add_argument("--dir", type=Path, help="where to work (default: a temporary directory)")
    parser.add_argument("--output", type=Path, default=RESULTS / "faults.md")
    args = parser.parse_args()
    torch.set_num_threads(1)
    env, lines = environment(), []
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        for offload in args.offload:
            setting = Setting(offload=None if offload == "none" else offload, blocking=not args.beside)
            started = time.perf_counter()
            outcome = torture(setting, args.kills, args.seed, Path(folder), say=show)
            lines.append((setting, outcome, time.perf_counter() - started))
            print(f"{offload}: {outcome}")
    report(env, lines, args.output)


if __name__ == "__main__":
    main()
