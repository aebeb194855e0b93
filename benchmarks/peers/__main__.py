"""Parts of the comparison: ``python -m benchmarks.peers [PART ...]``; quality, which takes hours, only if named."""

from __future__ import annotations

import subprocess
import sys

from benchmarks.machine import ROOT

PARTS = {part: f"benchmarks.peers.{part}" for part in ("twins", "speed", "ranks", "resume", "rows", "quality")}
PARTS.update(scaling="benchmarks.scaling", summary="benchmarks.summary")  # from the files that the others leave


def main() -> None:
    chosen = sys.argv[1:] or [part for part in PARTS if part != "quality"]
    for part in chosen:
        if part not in PARTS:
            raise SystemExit(f"{part} is none of the parts: {', '.join(PARTS)}")
    for part in chosen:
        subprocess.run([sys.executable, "-m", PARTS[part]], check=True, cwd=ROOT)


if __name__ == "__main__":
    main()
