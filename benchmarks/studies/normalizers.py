"""How well normalizers are estimated, what that is worth, and which parts of the neural ones matter; on glyphs.

    python -m benchmarks.studies.normalizers errors     # NeuCLIP's Figure 2c: batch 256 and 64, n = 51k and 5k
    python -m benchmarks.studies.normalizers ablation   # NeuCLIP's Tables 14 to 19 in small
    python -m benchmarks.studies.normalizers residual   # the switches of the residual normalizer
    python -m benchmarks.studies.normalizers report     # results/normalizers.md and .png

Finished runs are kept in results/normalizers.jsonl; a command that is started again does the rest.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmarks.saved import RESULTS as FOLDER
from benchmarks.studies.glyphs import carry_out
from benchmarks.studies.normalizers_cells import STUDIES
from benchmarks.studies.normalizers_report import write

RESULTS = FOLDER / "normalizers.jsonl"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.studies.normalizers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=(*STUDIES, "report"))
    parser.add_argument("--workers", type=int, default=2, help="runs at a time (default 2)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of each run (default 1)")
    parser.add_argument("--results", type=Path, default=RESULTS, help="file of the finished runs")
    args = parser.parse_args(argv)
    if args.command == "report":
        write([cell for study in STUDIES.values() for cell in study()], args.results)
        return
    carry_out([job for cell in STUDIES[args.command]() for job in cell.jobs], args)


if __name__ == "__main__":
    main()
