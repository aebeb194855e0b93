"""Run parts of the comparison: ``python -m benchmarks.history.peers [PART ...]``.

Without names all parts run but ``quality``, which takes hours.
"""

from __future__ import annotations

import subprocess
import sys

from benchmarks.saved import ROOT

PARTS = {part: f"benchmarks.history.peers.{part}" for part in ("twins", "speed", "ranks", "resume", "rows", "quality")}
PARTS.update(scaling="benchmarks.history.scaling", summary="benchmarks.summary")  # from the files that the others leave


def main() -> None:
    chosen = sys.argv[1:] or [part for part in PARTS if part != "quality"]
    for part in chosen:
        if part not in PARTS:
            raise SystemExit(f"{part} is none of the parts: {', '.join(PARTS)}")
    for part in chosen:
        subprocess.run([sys.executable, "-m", PARTS[part]], check=True, cwd=ROOT)


if __name__ == "__main__":
    main()
