"""Fuzz tests: random damage to checkpoints and random calls of estimators.

    python -m benchmarks.fuzz damage --seed 0 --flips 10000 --others 1000
    python -m benchmarks.fuzz calls --seed 0 --count 100000
    python -m benchmarks.fuzz loads --seed 0 --count 10000

``damage``: one bit of a checkpoint is flipped, or a file is truncated, lengthened, partly zeroed, removed, exchanged
with another file, or replaced by a file of the previous save. Each trial loads the checkpoint: loading must raise an
error that names a damaged file, and must leave every bit of the estimator's state unchanged.

``calls``: random calls of every estimator, most with a few changes, between commits and edits. The library must either
refuse a call with a documented error and leave every bit of the state unchanged, or agree with the float64 reference
of ``tests/reference``; a feature that is not finite must make the loss NaN and keep the rows that it affects.
``--trial K`` repeats one trial.

``loads``: the state of an object of any class with a ``load_state_dict`` is damaged in one or two places (entries
removed, added or exchanged; other types, shapes, dtypes and values), and loaded into another object. The load must
either raise a ``ValueError``, ``TypeError`` or ``FileNotFoundError`` and leave the whole object unchanged, or the
object must be usable and finite afterwards. ``--trial K`` repeats one trial.

Any other outcome ends the program with an error, after the page is written.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from benchmarks import fuzz_calls, fuzz_damage, fuzz_loads, report
from benchmarks.report import environment, heading, table

NAMES = {
    "flip": "one bit flipped",
    "truncate": "truncated",
    "lengthen": "bytes added",
    "blank": "a range of zeros",
    "remove": "removed",
    "swap": "two files exchanged",
    "mix": "files of the previous save",
}
DAMAGE = """Files of two checkpoints ({checkpoints}) were damaged in turn. In each trial, the damaged checkpoint was
loaded into an estimator with a different state. *Noticed*: loading raised an error. *Named*: it was a `ValueError` or a
`FileNotFoundError` with the name of a damaged file. *Kept*: all bits of `state_dict()` were unchanged. Seed {seed},
{seconds} s, commit {commit}, {date}."""
CALLS = """Each of the {trials:,} trials has an estimator of `tests/database.py` with its float64 reference, nine
samples, and one to four calls, with commits, edits of hyper-parameters and failing hooks; about half of the calls are
invalid. The table counts calls by the last change that was made to them. *Refused*: the library raised an error, and
all bits of the state and of the pending proposals were unchanged. *Agreed*: loss and gradients agreed with those of the
reference, and so did the rows after every commit. *NaN*: the loss was NaN, and the affected rows were unchanged. *Not
compared*: there was no reference for the call (an anchor without negatives, extreme but valid values, or estimators
that draw random numbers or train in lower precision). Seed {seed}, {seconds} s, commit {commit}, {date}."""
LOADS = """Each of the {trials:,} trials damages the state of an object and loads it into another one of its class; the
classes with a `load_state_dict` are found by introspection. *Refused*: the load raised a documented error, and the
whole object was unchanged, to the bit. *Loaded*: the object could be used afterwards, and all its numbers were finite.
Seed {seed}, {seconds} s, commit {commit}, {date}."""
KEYS = ("seed", "seconds", "commit", "date")


def page(title: str, about: str, head: list[str], body: list[list[Any]], labels: int) -> str:
    """Return a section with a table whose last line has the totals of the columns after the first ``labels``."""
    totals = [sum(line[i] for line in body) for i in range(labels, len(head))]
    lines = [*body, ["all", *[""] * (labels - 1), *totals]]
    cells = [[f"{cell:,}" if isinstance(cell, int) else cell for cell in line] for line in lines]
    return "\n".join([f"## {title}", "", about, "", table(head, cells, "l" * labels + "r")])


def damage_page(results: dict[str, Any]) -> str:
    held = [f"{name}: {size['files']} files, {size['bytes']:,} bytes" for name, size in results["checkpoints"].items()]
    about = DAMAGE.format(checkpoints="; ".join(held), **{key: results.get(key) for key in KEYS})
    body = []
    for kind, title in NAMES.items():
        for file, count in sorted(results["counts"].get(kind, {}).items()):
            noticed = count["trials"] - count.get("not noticed", 0)
            named = noticed - count.get("file not named", 0) - count.get("another error", 0)
            body.append([title, file, count["trials"], noticed, named, noticed - count.get("estimator changed", 0)])
    return page("Damaged checkpoints", about, ["damage", "of", "trials", "noticed", "named", "kept"], body, 2)


def calls_page(results: dict[str, Any]) -> str:
    columns = (*fuzz_calls.OUTCOMES, "wrong")
    body = [
        [kind.replace("_", " "), *(count.get(key, 0) for key in columns)] for kind, count in results["counts"].items()
    ]
    about = CALLS.format(**{key: results.get(key) for key in ("trials", *KEYS)})
    return page(
        "Random calls", about, ["last change", "calls", "refused", "agreed", "NaN", "not compared", "wrong"], body, 1
    )


def loads_page(results: dict[str, Any]) -> str:
    columns = ("trials", "refused", "loaded", "wrong")
    wrong = Counter(kind for _, kind, *_ in results["findings"])
    body = [
        [kind, *({**count, "wrong": wrong[kind]}.get(key, 0) for key in columns)]
        for kind, count in results["counts"].items()
    ]
    about = LOADS.format(trials=results["trials"], **{key: results.get(key) for key in KEYS})
    return page("Damaged states", about, ["class", *columns], body, 1)


def failures(results: dict[str, Any]) -> int:
    """Return the number of damage trials that failed."""
    counts = [count for by_file in results["counts"].values() for count in by_file.values()]
    return sum(count.get(wrong, 0) for count in counts for wrong in fuzz_damage.WRONG)


def run_damage(args: argparse.Namespace) -> tuple[dict[str, Any], int]:
    """Damage checkpoints and return the results and the number of failed trials."""
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        results = fuzz_damage.damage(Path(folder), args.seed, args.flips, args.others)
    return results, failures(results)


def run_calls(args: argparse.Namespace) -> tuple[dict[str, Any], int]:
    """Call estimators at random and return the results and the number of failed trials."""
    results = fuzz_calls.calls(args.seed, args.count, args.trial, args.seconds)
    for number, kind, wrong, text in results["findings"]:
        print(f"{kind}: {wrong}: {text}\npython -m benchmarks.fuzz calls --seed {args.seed} --trial {number}\n")
    args.quick = args.quick or args.trial is not None
    return results, len(results["findings"])


def run_loads(args: argparse.Namespace) -> tuple[dict[str, Any], int]:
    """Load damaged states and return the results and the number of failed trials."""
    results = fuzz_loads.loads(args.seed, args.count, args.trial)
    for number, kind, wrong, text in results["findings"]:
        print(f"{kind}: {wrong}: {text}\npython -m benchmarks.fuzz loads --seed {args.seed} --trial {number}\n")
    args.quick = args.quick or args.trial is not None
    return results, len(results["findings"])


PAGES = {"damage": damage_page, "calls": calls_page, "loads": loads_page}
TITLES = {"damage": "Damaged checkpoints", "calls": "Random calls", "loads": "Damaged states"}


def write(kind: str, results: dict[str, Any], env: dict[str, Any]) -> None:
    """Write the section of this kind and keep those of the other kinds."""
    path = report.RESULTS / "fuzz.json"
    known = json.loads(path.read_text())["results"] if path.exists() else {}
    page = path.with_suffix(".md")
    old = page.read_text().split("\n## ")[1:] if page.exists() else []
    sections = {name: f"## {text.rstrip()}" for text in old for name, title in TITLES.items() if text.startswith(title)}
    known[kind] = {"commit": env["commit"], "date": env["date"], **results}
    sections[kind] = PAGES[kind](known[kind])
    text = ["\n".join(heading("Fuzzing", env)).rstrip(), *(sections[name] for name in TITLES if name in sections)]
    report.save("fuzz", "\n\n".join(text), env, known)


def main(arguments: list[str] | None = None) -> None:
    """Run one of the kinds of trials."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(dest="kind", required=True)
    damage = kinds.add_parser("damage", help="damaged checkpoints")
    damage.add_argument("--flips", type=int, default=10_000, help="number of trials with one flipped bit")
    damage.add_argument("--others", type=int, default=1_000, help="number of trials with other damage")
    damage.add_argument("--dir", type=Path, help="working directory (default: a temporary directory)")
    calls = kinds.add_parser("calls", help="random calls of every estimator")
    calls.add_argument("--count", type=int, default=10_000, help="number of trials")
    calls.add_argument("--seconds", type=float, default=float("inf"), help="time limit in seconds")
    calls.add_argument("--trial", type=int, help="run only this trial and write no files")
    loads = kinds.add_parser("loads", help="damaged states")
    loads.add_argument("--count", type=int, default=10_000, help="number of trials")
    loads.add_argument("--trial", type=int, help="run only this trial and write no files")
    for each, run in ((damage, run_damage), (calls, run_calls), (loads, run_loads)):
        each.add_argument("--seed", type=int, default=0)
        each.add_argument("--quick", action="store_true", help="print the results and write no files")
        each.set_defaults(run=run)
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    env = environment()
    results, wrong = args.run(args)
    print(PAGES[args.kind]({**env, **results}))
    if not args.quick:
        write(args.kind, results, env)
    if wrong:
        raise SystemExit(f"{wrong} trials failed; see the table")


if __name__ == "__main__":
    main()
