"""Interrupt and resume the CLIP trainer on two nodes: stop requests, full disks, lost nodes and lost folders.

    python -m benchmarks.nodes                  # every event once
    python -m benchmarks.nodes --rounds 20      # and so often

Two agents of torchrun on one machine act as two nodes: they share an output folder and a store for uploads, and each
has its own folder for rows. After each event they restart with ``--resume``. The final weights and rows, in the output
and in the store, must be bit for bit those of an uninterrupted run. The state after the loss of a node is also resumed
on one node and on three. It runs in the environment of ``make test-clip``.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import environment, finish, table
from tests.open_clip.data import SIZES, N, arguments, rows, weights, write_model, write_pairs
from tests.open_clip.nodes import EVENTS, LONG, Day, Nodes, disks_of

LOST = "a node is lost"
ABOUT = """The smallest CLIP model of the tests is trained with SogCLR, with rows sharded on disk and a saved state
after every third update, on two nodes with one process each. After every event the nodes are restarted. The program
ends with an error unless the final weights and rows are those of an uninterrupted run. Runs on one and on three nodes
form different batches and therefore have different final states; an epoch omits the pairs that do not fill a batch."""


def digest(folder: Path, epoch: int) -> str:
    """Hash weights and rows at the end of an epoch."""
    found = hashlib.sha256()
    for name, value in sorted({**weights(folder, epoch), **rows(folder, epoch)}.items()):
        found.update(name.encode() + value.contiguous().numpy().tobytes())
    return found.hexdigest()[:16]


def run(flags: Callable[..., Sequence[str]], output: Path, count: int, *more: str) -> None:
    """Train to the end on ``count`` nodes, which begin with empty disks."""
    disks = disks_of(output.with_name(f"{output.name}-disks"), count)
    with Nodes(flags, [output] * count, disks, *LONG, *more) as nodes:
        if nodes.end() != [0] * count:
            raise AssertionError(nodes.said())


def go_on_elsewhere(flags: Callable[..., Sequence[str]], state: Path, epochs: int, count: int) -> dict[str, Any]:
    """Resume from a copy of a run's folder on another number of nodes."""
    copy = state.with_name(f"on-{count}")
    shutil.copytree(state, copy)
    run(flags, copy, count, "--epochs", str(epochs), "--resume")
    visits = rows(copy, epochs)["count"]
    return {"nodes": count, "digest": digest(copy, epochs), "visits": [int(visits.min()), int(visits.max())]}


def carry_out(folder: Path, rounds: int) -> dict[str, Any]:
    """Run every event ``rounds`` times and compare the final state with that of an uninterrupted run."""
    flags = functools.partial(arguments, (write_pairs(folder / "shards", SIZES), write_model(folder)))
    epochs, started = rounds * len(EVENTS) + 1, time.perf_counter()  # an event uses some of the ten updates of an epoch
    run(flags, folder / "undisturbed", 2, "--epochs", str(epochs))
    day, others = Day(flags, folder, epochs), []
    for number in range(rounds):
        for name in EVENTS:
            day.bear(name)
            print(day.events[-1], flush=True)
            if name == LOST and number == 0:
                others = [go_on_elsewhere(flags, day.output, epochs, count) for count in (1, 3)]
    day.finish()
    ends = {"undisturbed": folder / "undisturbed", "disturbed": day.output, "disturbed, in the store": day.store}
    digests = {name: digest(place, epochs) for name, place in ends.items()}
    if len(set(digests.values())) != 1:
        raise AssertionError(f"another end: {digests}")
    seconds = time.perf_counter() - started
    return {"epochs": epochs, "events": day.events, "others": others, "digests": digests, "seconds": seconds}


def tables(found: dict[str, Any]) -> list[str]:
    """Return the paragraphs of the page."""
    head = ["event", "newest state before", "after", "exit codes", "s"]
    body = []
    for event in found["events"]:
        states = [event[name] or "none" for name in ("before", "left")]
        body.append([event["event"], *states, str(event["codes"]), f"{event['seconds']:.0f}"])
    ends = [["2", name, value, ""] for name, value in found["digests"].items()]
    for other in found["others"]:
        low, high = other["visits"]
        name = "resumed from the state after the loss of a node"
        ends.append([str(other["nodes"]), name, other["digest"], f"{low} to {high}"])
    about = f"{ABOUT} {found['epochs']} epochs of {N} pairs; {found['seconds']:.0f} s in total."
    runs = table(["nodes", "run", "digest of the final state", "visits of a pair"], ends, "rllr")
    return [about, table(head, body, "lllr"), runs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1, help="number of times that every event occurs")
    args = parser.parse_args()
    env = environment()
    with tempfile.TemporaryDirectory() as folder:
        found = carry_out(Path(folder), args.rounds)
    finish("nodes", "Interruptions of a run on two nodes", env, tables(found), found)


if __name__ == "__main__":
    main()
