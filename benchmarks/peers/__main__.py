"""Parts of the comparison: ``python -m benchmarks.peers [PART ...]``; quality, which takes hours, only if named."""

from __future__ import annotations

import subprocess
import sys

from benchmarks.machine import ROOT

PARTS = ("ranks", "rows", "speed", "resume", "quality")


def main() -> None:
    chosen = sys.argv[1:] or PARTS[:-1]
    for part in chosen:
        if part not in PARTS:
            raise SystemExit(f"{part} is none of the parts: {', '.join(PARTS)}")
    for part in chosen:
        subprocess.run([sys.executable, "-m", f"benchmarks.peers.{part}"], check=True, cwd=ROOT)


if __name__ == "__main__":
    main()
