"""Mutation testing: how many small wrong changes of the library the daily tests and the full suite notice.

    python -m benchmarks.mutants --list                 what would be changed
    python -m benchmarks.mutants                        run what is not in the results yet (hours), write the report
    python -m benchmarks.mutants --only kernel --limit 5
    python -m benchmarks.mutants --report               write the report alone

The mutants are chosen from all mutations of the library (benchmarks/mutations.py): an equal number from each room, from
its files and the kinds of mutation in turn. The choice depends only on the source and --seed. Each mutant is tried in a
copy of the checkout, where the tests run with -x in stages: the daily tests that run the changed line, the quickest
first, for LIKELY seconds; all daily tests; for kernel/triton the tests with Triton (after `make .venv-triton/.triton`);
and, after all other mutants, the rest of the suite. Mutants that no test on a CPU can notice (BY_READING) skip
the last stage. The lines that a test runs are measured once, with pytest-cov, on the unchanged library, which must
pass. The full suite contains the daily tests and notices what they notice. A test that hangs and a library that cannot
be imported count as noticed. Run nothing else meanwhile, since tests of several processes have time limits of their
own. --lanes mutants are tried at a time.

Each result is appended to results/mutants.jsonl, so that a run can be interrupted and continued. The mutants of a
file that has changed since are run again.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from itertools import accumulate, zip_longest
from pathlib import Path
from xml.etree import ElementTree

from coverage import CoverageData

from benchmarks.mutations import Mutation, mutations
from benchmarks.report import RESULTS, ROOT, append_run, read_runs, table

# name in the report: what of the library
ROOMS = {
    "kernel": "kernel",
    "objective": "objective",
    "normalizers": "normalizers",
    "temperatures": "temperatures",
    "negatives": "negatives",
    "deposits": "stores/rows",
    "stores": "stores",
    "saving": "checkpoint",
    "ranks": "distributed",
}
Verdict = Callable[[Path, Mutation], dict]
LATER = "not by test"  # the daily tests let it pass, and the others were not asked yet
ACCELERATOR, EQUAL = "runs on accelerators only", "changes no result"
# Mutants that no test on a CPU can notice, found by reading them: file, function and kind -> why.
BY_READING = {
    ("compopt/kernel/features.py", "_ClosedForm.backward", "constant"): f"{EQUAL}: zip over lists that are as long",
    ("compopt/normalizers/network.py", "FunctionalOptimizer._made", "and/or"): ACCELERATOR,
    ("compopt/negatives/walk.py", "move", "statement"): ACCELERATOR,
    ("compopt/stores/rows.py", "Deposit.of", "branches"): ACCELERATOR,
    ("compopt/stores/write_behind.py", "WriteBehind._read_ahead", "statement"): ACCELERATOR,
    ("compopt/stores/base.py", "RowStore._zeros", "keyword"): ACCELERATOR,
    ("compopt/stores/write_behind.py", "WriteBehind._to_host", "keyword"): ACCELERATOR,
    ("compopt/normalizers/neural.py", "NeuralNormalizer._state_on", "branches"): ACCELERATOR,
    ("compopt/temperatures/dual.py", "TemperatureDual.saved_state", "branches"): ACCELERATOR,
    ("compopt/stores/snapshot.py", "Snapshot.__init__", "statement"): ACCELERATOR,
    ("compopt/stores/disk.py", "DiskStore.scatter", "function"): f"{EQUAL}: a row on a hole was never written",
    ("compopt/stores/prefetch.py", "Prefetcher.start", "statement"): f"{EQUAL}: creating the group detects them too",
    ("compopt/stores/prefetch.py", "Prefetcher.start", "keyword"): f"{EQUAL}: name of a thread",
    ("compopt/stores/table.py", "RowTable.state_dict", "sign"): ACCELERATOR,
    ("compopt/objective.py", "Objective.feature_gradients", "and/or"): f"{EQUAL}: both are None, or none is",
    ("compopt/stores/disk.py", "DiskStore._gather_written", "constant"): f"{EQUAL}: from how many rows on it probes",
    ("compopt/stores/prefetch.py", "Prefetcher.__init__", "constant"): f"{EQUAL}: the first batch has number 1",
    ("compopt/checkpoint/manifest.py", "_load", "comparison"): f"{EQUAL}: a manifest of exactly the largest size",
    ("compopt/distributed/handshake.py", "tau_facts", "arithmetic"): f"{EQUAL}: other numbers for the same kinds",
    ("compopt/distributed/ranks.py", "Ranks.blank", "function"): f"{EQUAL}: integers that nobody reads",
}
LIMITS = {"first": 600, "daily": 1500, "triton": 1500, "rest": 3600}  # seconds, after which a stage hangs
TRITON = ROOT / ".venv-triton/bin/python"  # make .venv-triton/.triton
HANGS = 120  # seconds, after which one test does
LIKELY = 60  # seconds of the tests that run a mutant's line, before all are asked


# which ------------------------------------------------------------------------------------------------------------


def files_of(room: str) -> list[Path]:
    """The source files of a room; what has a room of its own is not in the larger one."""
    place = ROOT / "compopt" / ROOMS[room]
    own = {f"{place.name}.py"} if place.with_suffix(".py").is_file() else set()
    found = [place.parent / name for name in own] + sorted(place.rglob("*.py"))
    others = [ROOT / "compopt" / f"{path}.py" for name, path in ROOMS.items() if name != room]
    found = [path for path in found if path not in others]
    if not found:
        raise SystemExit(f"compopt has no {ROOMS[room]}: correct ROOMS in benchmarks/mutants.py")
    return found


def in_turn(groups: list[list[Mutation]]) -> list[Mutation]:
    """The first of every group, then the second of each."""
    return [item for row in zip_longest(*groups) for item in row if item is not None]


def chosen(room: str, count: int, seed: int) -> list[Mutation]:
    """Mutants of one room: files and kinds in turn, no two in one line."""
    shuffle, files = random.Random(f"{seed} {room}"), []
    for path in files_of(room):
        kinds = defaultdict(list)
        for mutation in mutations(path, ROOT):
            kinds[mutation.kind].append(mutation)
        groups = [kinds[kind] for kind in sorted(kinds)]
        shuffle.shuffle(groups)  # not every file begins with its arithmetic
        for group in groups:
            shuffle.shuffle(group)
        files.append(in_turn(groups))
    result, lines = [], set()
    for mutation in in_turn(files):
        if len(result) < count and (mutation.path, mutation.line) not in lines:
            lines.add((mutation.path, mutation.line))
            result.append(mutation)
    return result


# run --------------------------------------------------------------------------------------------------------------


def selection(name: str) -> str:
    """The marker expression of a target of the Makefile, which is the only place that says it."""
    return re.search(rf"^{name} := (.*)$", (ROOT / "Makefile").read_text(), re.M).group(1).strip()


def copy_of_checkout(folder: Path) -> Path:
    """A copy of the files that git tracks, as they stand in the working tree."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True).stdout
    for name in listed.decode().split("\0"):
        if name and (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    return folder


def run_tests(folder: Path, stage: str, *arguments: str) -> str | None:
    """Return the test that failed first, or None; the stage ``"triton"`` runs in the environment with Triton."""
    python, expression = sys.executable, selection("REST" if stage == "rest" else "DAILY")
    if stage == "triton":
        python, expression, arguments = str(TRITON), "", ("tests/triton", *arguments)
    command = [python, "-m", "pytest", "-x", "-q", "--no-header", "--tb=no", f"--timeout={HANGS}"]
    command += ["-p", "no:cacheprovider", "-p", "no:xdist", "-m", expression, *arguments]
    environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, cwd=folder, env=environment, start_new_session=True, **pipes) as process:
        try:
            said, _ = process.communicate(timeout=LIMITS[stage])
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            return "hangs"
    if process.returncode in (0, 5):  # 5: nothing was selected
        return None
    failed = re.search(r"^(?:FAILED|ERROR) (\S+::[^\[\s]+|\S+)", said, re.M)
    return failed.group(1) if failed else f"pytest ended with {process.returncode}: {said[-300:]}"


def must_pass(folder: Path, stage: str, *arguments: str) -> None:
    """End the program if a test fails on the unchanged library: every mutant would count as noticed."""
    if failed := run_tests(folder, stage, *arguments):
        raise SystemExit(f"the unchanged library fails ({stage}): {failed}")


def measured(folder: Path) -> Callable[[Mutation], list[str]]:
    """Run the daily tests of the unchanged library; return a function that gives the tests of a mutant's line.

    Of every test function the quickest case that runs the line, the quickest function first, for LIKELY seconds. Lines
    that run only in other processes have none.
    """
    lines, times = folder / ".coverage", folder / "times.xml"
    options = ("--cov=compopt", "--cov-context=test", "--cov-report=", f"--junitxml={times}")
    must_pass(folder, "daily", *options)
    data, seconds = CoverageData(str(lines)), {}
    data.read()
    for case in ElementTree.parse(times).iter("testcase"):
        seconds[f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}"] = float(case.get("time", 0))

    def tests_of(mutant: Mutation) -> list[str]:
        contexts = data.contexts_by_lineno(str(folder / mutant.path)).get(mutant.line, ())
        cases = {context.partition("|")[0] for context in contexts} & seconds.keys()
        quickest: dict[str, str] = {}
        for case in sorted(cases, key=seconds.__getitem__):
            quickest.setdefault(case.partition("[")[0], case)
        sums = accumulate(seconds[case] for case in quickest.values())
        return [case for case, total in zip(quickest.values(), sums, strict=True) if total <= LIKELY]

    return tests_of


def later(stage: str, missed: str) -> Verdict:
    """Return the verdict of the tests of a stage on mutants that the daily ones did not notice.

    Args:
        stage: ``"triton"`` or ``"rest"``.
        missed: what is recorded if no test fails.
    """

    def ask(folder: Path, _: Mutation) -> dict:
        failed = run_tests(folder, stage)
        return {"noticed": "test-full" if failed else missed, "test": failed}

    return ask


def daily(tests_of: Callable[[Mutation], list[str]]) -> Verdict:
    """Return the verdict of the daily tests: first of those that run the line, then of all."""

    def ask(folder: Path, mutant: Mutation) -> dict:
        tests, failed = tests_of(mutant), None
        if tests:
            (folder / "tests.txt").write_text("\n".join(tests))
            failed = run_tests(folder, "first", "@tests.txt")
        failed = failed or run_tests(folder, "daily")
        return {"noticed": "test" if failed else LATER, "test": failed}

    return ask


def waiting(mine: list[tuple[str, Mutation]], records: Path, noticed: str | None) -> list[tuple[str, Mutation]]:
    """Return the mutants whose record is ``noticed``: ``None`` for no record, or :data:`LATER`."""
    known = {record["key"]: judged(record)["noticed"] for record in read_runs(records)}
    return [(room, mutant) for room, mutant in mine if known.get(mutant.key) == noticed]


def run(todo: list[tuple[str, Mutation]], ask: Verdict, folders: list[Path], records: Path) -> None:
    """Try every mutant and append its verdict to the records; one mutant at a time in each folder."""
    free: queue.SimpleQueue[Path] = queue.SimpleQueue()
    writing = threading.Lock()
    for folder in folders:
        free.put(folder)

    def one(numbered: tuple[int, tuple[str, Mutation]]) -> None:
        number, (room, mutant) = numbered
        folder = free.get()
        file, started = folder / mutant.path, time.monotonic()
        source = file.read_bytes()
        file.write_bytes(mutant.apply(source))
        os.utime(file, (number, number))  # compiled files are told apart by the second
        try:
            answer = ask(folder, mutant)
        finally:
            file.write_bytes(source)
            os.utime(file, (0, 0))
            free.put(folder)
        answer["seconds"] = round(time.monotonic() - started)
        with writing:
            append_run(records, {"key": mutant.key, "room": room, **asdict(mutant), **answer})
        where = f"{room} {mutant.path}:{mutant.line} {mutant.kind}"
        print(
            f"{number}/{len(todo)} {where}: {answer['noticed']} ({answer['test']}, {answer['seconds']} s)", flush=True
        )

    with ThreadPoolExecutor(len(folders)) as lanes:
        list(lanes.map(one, enumerate(todo, 1)))


# report -----------------------------------------------------------------------------------------------------------


def judged(record: dict) -> dict:
    """The record, or the reason found by reading where no test noticed the mutant."""
    why = BY_READING.get((record["path"], record["function"], record["kind"]))
    return {**record, "noticed": "nobody", "test": why} if why and record["noticed"] == LATER else record


def report(found: list[dict], wanted: int) -> tuple[str, dict]:
    """Markdown, and the same numbers."""
    found = [judged(record) for record in found]
    counts = {room: Counter(r["noticed"] for r in found if r["room"] == room) for room in ROOMS}
    total = sum(counts.values(), Counter())
    full = total["test"] + total["test-full"]
    share = total["test"] / full if full else 0.0
    tried = (
        f"Of {total.total()} mistakes put into the library one at a time ({wanted} were chosen), `make test` notices "
    )
    tried += f"{total['test']} and `make test-full` {full}: {share:.1%} of what the full suite notices."
    if total[LATER]:
        tried += f" Not finished: the other tests were not asked about {total[LATER]} yet."
    counted = [[name, c.total(), c["test"], c["test"] + c["test-full"], c["nobody"]] for name, c in counts.items()]
    counted.append(["all", total.total(), total["test"], full, total["nobody"]])
    head = ["room", "mutants", "noticed by `make test`", "by `make test-full`", "by nobody"]
    lines = [
        "# Mutants",
        "",
        tried,
        "`python -m benchmarks.mutants` makes this table; its docstring says how.",
        "",
    ]
    lines.append(table(head, [[str(cell) for cell in row] for row in counted]))
    titles = {"test-full": "Noticed by the full suite alone", "nobody": "Noticed by nobody, and why by reading"}
    if total[LATER]:
        titles[LATER] = "Not noticed by the daily tests, the others not asked yet"
    for who, title in titles.items():
        lines += ["", f"## {title}", ""]
        lines += [said(r) for r in found if r["noticed"] == who] or ["None."]
    summary = {"mutants": total.total(), "test": total["test"], "test_full": full, "share": round(share, 4)}
    return "\n".join(lines) + "\n", {**summary, "rooms": {room: dict(c) for room, c in counts.items()}}


def said(record: dict) -> str:
    """One mutant in a line."""
    before, after = (record[key].strip().replace("`", "'") for key in ("before", "after"))
    where = f"{record['path']}:{record['line']} ({record['function']}, {record['kind']})"
    return f"- {where}: `{before}` -> `{after}`" + (f"; {record['test']}" if record["test"] else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--each", type=int, default=13, help="mutants of every room (13)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=ROOMS, action="append", help="a room; may be repeated")
    parser.add_argument("--limit", type=int, help="ask each suite about at most so many now")
    parser.add_argument("--lanes", type=int, default=2, help="mutants that are tried at a time (2)")
    parser.add_argument("--records", type=Path, default=RESULTS / "mutants.jsonl")
    parser.add_argument("--list", action="store_true", help="print the mutants, run nothing")
    parser.add_argument("--report", action="store_true", help="write the report, run nothing")
    options = parser.parse_args()
    every = [(room, mutant) for room in ROOMS for mutant in chosen(room, options.each, options.seed)]
    mine = [(room, mutant) for room, mutant in every if not options.only or room in options.only]
    if options.list:
        for room, m in mine:
            print(f"{room:12} {m.path}:{m.line} {m.function} {m.kind}: {m.before} -> {m.after.strip()}")
        return
    if not options.report:
        with tempfile.TemporaryDirectory() as name:
            folders = [copy_of_checkout(Path(name) / str(lane)) for lane in range(options.lanes)]
            if todo := waiting(mine, options.records, None)[: options.limit]:
                run(todo, daily(measured(folders[0])), folders, options.records)
            fused = [(room, m) for room, m in mine if "kernel/triton/" in m.path and TRITON.exists()]
            for stage, group, missed in (("triton", fused, LATER), ("rest", mine, "nobody")):
                if todo := waiting(group, options.records, LATER)[: options.limit]:
                    must_pass(folders[0], stage)
                    run(todo, later(stage, missed), folders, options.records)
    known = {record["key"]: record for record in read_runs(options.records)}
    text, summary = report([known[mutant.key] for _, mutant in every if mutant.key in known], len(every))
    (options.records.with_suffix(".md")).write_text(text)
    (options.records.with_suffix(".json")).write_text(json.dumps(summary, indent=2) + "\n")
    print(text)


if __name__ == "__main__":
    main()
