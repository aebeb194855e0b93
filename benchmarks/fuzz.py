"""Things that should go wrong loudly, at random and in numbers.

    python -m benchmarks.fuzz damage --seed 0 --flips 10000 --others 1000

``damage``: a bit of a checkpoint flips, a file is cut, lengthened, blanked, removed, exchanged with another or with one
of another save. Each trial loads the checkpoint: that must raise, name a damaged file, and leave every bit of the
estimator's state. Anything else ends the program with an error, after the page is written.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch

from benchmarks import fuzz_damage, saved
from recipes.report import environment, heading, table

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


PAGES = {"damage": damage_page}


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
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    wrong = args.run(args)
    if wrong:
        raise SystemExit(f"{wrong} trials went wrong; the table says how")


if __name__ == "__main__":
    main()
