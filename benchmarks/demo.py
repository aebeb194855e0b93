"""Learning curves of the methods that ``make demo`` compares, over several seeds.

    python -m benchmarks.demo             # three seeds, writes benchmarks/results/demo.md
    python -m benchmarks.demo --seeds 0   # one, as ``make demo`` trains it
    python docs/drawings.py               # draws docs/concepts/learning_curves.svg from the result

Methods and arguments are those of the Makefile.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import ROOT, environment, finish, mean_spread, table
from recipes import train_clip
from recipes.methods import METHODS
from recipes.tasks import NamedImages

ABOUT = """`make demo` trains these methods on glyphs and their names ({data}), for one epoch at batch 64, all with the
same learning rate. The temperatures of InfoNCE, DCL, SogCLR and iSogCLR were tuned in `glyphs.md`; `recommended` is not
tuned. The table has recall at 1 among the held-out pairs in per cent: mean ± standard deviation if there are several
seeds (here {seeds})."""


def arguments() -> list[str]:
    """Return the arguments of the command that ``make demo`` runs."""
    text = (ROOT / "Makefile").read_text()
    methods, options = (re.search(rf"^{name} \?= (.+)$", text, re.M) for name in ("DEMO_METHODS", "DEMO_ARGS"))
    if methods is None or options is None:
        raise SystemExit("the Makefile has no DEMO_METHODS or no DEMO_ARGS")
    return ["--compare", *methods[1].split(), *shlex.split(options[1])]


def train(seeds: Sequence[int]) -> list[dict[str, Any]]:
    """Return configuration, measures and history of every run."""
    with tempfile.TemporaryDirectory() as folder:
        given = ["--seeds", *map(str, seeds), "--output-dir", folder, "--no-plots", "--no-progress"]
        train_clip.main([*arguments(), *given])
        return json.loads((Path(folder) / "metrics.json").read_text())["runs"]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], metavar="N")
    parser.add_argument("--quick", action="store_true", help="print the results and write no files")
    args, env = parser.parse_args(argv), environment()
    groups: dict[str, list[dict[str, Any]]] = {}
    for run in train(args.seeds):
        groups.setdefault(run["config"]["method"], []).append(run)
    body, curves = [], {}
    for method, runs in groups.items():
        measures = [mean_spread([run["final"][name] for run in runs], 100) for name in NamedImages.labels]
        body.append([METHODS[method].title, *measures])
        curves[method] = [[[record["samples"], round(record["r1"], 6)] for record in run["history"]] for run in runs]
    data = next(iter(groups.values()))[0]["config"]["data"]
    about = ABOUT.format(data=data, seeds=", ".join(map(str, args.seeds)))
    parts = [about, table(["", *NamedImages.labels.values()], body)]
    finish("demo", "Demo: six methods on glyphs", env, parts, curves, args.quick)


if __name__ == "__main__":
    main()
