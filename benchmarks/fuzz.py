"""Things that should go wrong loudly, at random and in numbers.

    python -m benchmarks.fuzz damage --seed 0 --flips 10000 --others 1000
    python -m benchmarks.fuzz calls --seed 0 --count 100000

``damage``: a bit of a checkpoint flips, a file is cut, lengthened, blanked, removed, exchanged with another or with one
of another save. Each trial loads the checkpoint: that must raise, name a damaged file, and leave every bit of the
estimator's state.

``calls``: random calls of every estimator, most with a few changes, between commits and edits. Each must be refused by
the library with an error that its contract names, with every bit of the state kept, or agree with the float64 twin of
``tests/reference``; a feature that is no number makes the loss NaN and keeps the rows that it reaches. ``--trial K``
repeats one.

Anything else ends the program with an error, after the page is written.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch

from benchmarks import fuzz_calls, fuzz_damage, saved
from benchmarks.report import environment, heading, table

NAMES = {
    "flip": "one bit flipped",
    "truncate": "cut off",
    "lengthen": "bytes added",
    "blank": "a range of zeros",
    "remove": "removed",
    "swap": "two files exchanged",
    "mix": "files of the save before",
}
ABOUT = """Two checkpoints were damaged, one trial at a time, in every file in turn, and loaded into an estimator with a
state of its own ({checkpoints}). Noticed: loading raised an error. Named: a `ValueError` or `FileNotFoundError` with
the name of a damaged file. Kept: every bit of `state_dict()` was as before. Seed {seed}, {seconds} s, commit {commit},
{date}."""
KEYS = ("seed", "seconds", "commit", "date")


def damage_page(results: dict) -> str:
    """Say what became of the trials."""
    held = [f"{name}: {size['files']} files, {size['bytes']:,} bytes" for name, size in results["checkpoints"].items()]
    about = ABOUT.format(checkpoints="; ".join(held), **{key: results.get(key) for key in KEYS})
    body = []
    for kind, title in NAMES.items():
        for file, count in sorted(results["counts"].get(kind, {}).items()):
            trials, wrong = count["trials"], count["wrong"]
            noticed = trials - wrong["not noticed"]
            named = noticed - wrong["file not named"] - wrong["another error"]
            kept = noticed - wrong["estimator changed"]
            body.append([title, file, *(f"{number:,}" for number in (trials, noticed, named, kept))])
    totals = [sum(int(line[i].replace(",", "")) for line in body) for i in range(2, 6)]
    body.append(["all", "", *(f"{total:,}" for total in totals)])
    head = ["damage", "of", "trials", "noticed", "named", "kept"]
    return "\n".join(["## Damaged checkpoints", "", about, "", table(head, body, "ll")])


def failures(results: dict) -> int:
    """Count the trials that went wrong."""
    counts = [count for by_file in results["counts"].values() for count in by_file.values()]
    return sum(sum(count["wrong"].values()) for count in counts)


def run_damage(args: argparse.Namespace) -> int:
    """Damage checkpoints, write the page, and count what went wrong."""
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        env = environment()
        results = fuzz_damage.damage(Path(folder), args.seed, args.flips, args.others)
    print(damage_page({**env, **results}))
    if not args.quick:
        write("damage", results, env)
    return failures(results)


CALLS = """{trials:,} trials, each an estimator of `tests/database.py` with its float64 twin, nine samples and one to
four calls, commits, edits of hyper-parameters and hooks that fail; about half of the calls break a rule. By the last
change made to a call: refused by an error that the library raises itself, with every bit of the state and of what was
pending kept; the twin's loss and gradients (and its rows after every commit); a loss of NaN with the rows kept; or
with no twin to compare (an anchor without negatives, extreme but legal values, what draws or trains in lower
precision). Seed {seed}, {seconds} s, commit {commit}, {date}."""
OUTCOMES = ("calls", "refused", "agreed", "nan", "uncompared")


def calls_page(results: dict) -> str:
    """Say what became of the calls."""
    body = [
        [kind.replace("_", " "), *(f"{count[key]:,}" for key in OUTCOMES), f"{sum(count['wrong'].values()):,}"]
        for kind, count in results["counts"].items()
    ]
    totals = [sum(int(line[i].replace(",", "")) for line in body) for i in range(1, 7)]
    body.append(["all", *(f"{total:,}" for total in totals)])
    head = ["last change", "calls", "refused", "the twin's", "NaN", "no twin", "wrong"]
    about = CALLS.format(**{key: results.get(key) for key in ("trials", *KEYS)})
    return "\n".join(["## Random calls", "", about, "", table(head, body)])


def calls_failures(results: dict) -> int:
    """Count the trials that went wrong."""
    return len(results["findings"])


def run_calls(args: argparse.Namespace) -> int:
    """Call estimators at random, write the page, and count what went wrong."""
    env = environment()
    results = fuzz_calls.calls(args.seed, args.count, args.trial, args.seconds)
    for number, kind, wrong, text in results["findings"]:
        print(f"{kind}: {wrong}: {text}\npython -m benchmarks.fuzz calls --seed {args.seed} --trial {number}\n")
    print(calls_page({**env, **results}))
    if not args.quick and args.trial is None:
        write("calls", results, env)
    return calls_failures(results)


PAGES = {"damage": damage_page, "calls": calls_page}


def write(kind: str, results: dict, env: dict) -> None:
    """Write the page anew, with what it has of the other kinds."""
    everything = saved.stored("fuzz", saved.RESULTS)["results"] if (saved.RESULTS / "fuzz.json").exists() else {}
    everything[kind] = {"commit": env["commit"], "date": env["date"], **results}
    sections = [PAGES[name](everything[name]) for name in PAGES if name in everything]
    saved.save(
        "fuzz", "\n\n".join(["\n".join(heading("Fuzzing", env)).rstrip(), *sections]), env, everything, saved.RESULTS
    )


def main(arguments: list[str] | None = None) -> None:
    """Run one of the kinds of trials."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(dest="kind", required=True)
    damage = kinds.add_parser("damage", help="checkpoints that changed on the disk")
    damage.add_argument("--seed", type=int, default=0)
    damage.add_argument("--flips", type=int, default=10_000, help="single bits")
    damage.add_argument("--others", type=int, default=1_000, help="everything else")
    damage.add_argument("--dir", type=Path, help="where to work (default: a temporary directory)")
    damage.add_argument("--quick", action="store_true", help="printed only")
    damage.set_defaults(run=run_damage)
    calls = kinds.add_parser("calls", help="random calls of every estimator")
    calls.add_argument("--seed", type=int, default=0)
    calls.add_argument("--count", type=int, default=10_000, help="trials")
    calls.add_argument("--seconds", type=float, default=float("inf"), help="stop after these")
    calls.add_argument("--trial", type=int, help="only this one, printed only")
    calls.add_argument("--quick", action="store_true", help="printed only")
    calls.set_defaults(run=run_calls)
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    wrong = args.run(args)
    if wrong:
        raise SystemExit(f"{wrong} trials went wrong; the table says how")


if __name__ == "__main__":
    main()
