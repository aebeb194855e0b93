"""Run parts of the comparison with other packages, by default all: ``python -m benchmarks.peers [PART ...]``."""

from __future__ import annotations

import subprocess
import sys

from benchmarks.report import ROOT

PARTS = ("gradients", "compositional", "speed", "ranks", "distributed", "rows")


def main() -> None:
    chosen = sys.argv[1:] or PARTS
    if unknown := set(chosen) - set(PARTS):
        raise SystemExit(f"unknown: {', '.join(sorted(unknown))}; the parts are {', '.join(PARTS)}")
    for part in chosen:
        subprocess.run([sys.executable, "-m", f"benchmarks.peers.{part}"], check=True, cwd=ROOT)
    subprocess.run([sys.executable, "-m", "benchmarks.summary"], check=True, cwd=ROOT)


if __name__ == "__main__":
    main()
