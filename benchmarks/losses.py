"""Lost ranks: what do the others see, and after how long, when one rank is killed, raises, hangs or runs out of data?

    python -m benchmarks.losses              # writes benchmarks/results/losses.md and losses.json
    python -m benchmarks.losses --timeout 5  # of the process group, in seconds

Three ranks (gloo) train. In its fourth step one of them fails. Every other rank must end with an error of its own
within the group's timeout; each says what it saw. One that is still there a minute after the timeout ends the
program with an error.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.losses_rank import LOST
from benchmarks.report import ROOT, environment, heading, save, table
from tests.launching import environment as launching
from tests.pool import free_port

RANKS, GRACE = 3, 60.0
WAYS = ("killed", "raises inside a call", "raises between calls", "out of data", "hangs")
PLACES = {"beside the features": {}, "on disk, sharded": {"offload": "disk", "shard": True}}
ABOUT = """Three ranks (gloo) train; rank 1 fails in its fourth step. *seconds*: from there until the last of the others
had its error. The timeout of the group was {timeout:.0f} s."""


def lose(how: str, place: dict, timeout: float, folder: Path) -> list[dict]:
    """What each of the other ranks raised, and how many seconds after the failure."""
    port = str(free_port())
    if place.get("offload") == "disk":
        place = {**place, "offload_dir": str(folder / "rows")}
    command = [sys.executable, "-m", "benchmarks.losses_rank"]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(RANKS), port, how, json.dumps(place), str(timeout), str(folder / "clock")],
            cwd=ROOT, env=launching(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )
        for rank in range(RANKS)
    ]  # fmt: skip
    try:
        others = [ranks[rank] for rank in range(RANKS) if rank != LOST]
        answers = [json.loads(other.communicate(timeout=120 + timeout + GRACE)[0]) for other in others]
    finally:
        for process in ranks:
            process.kill()
    ranks[LOST].communicate()
    failed = float((folder / "clock").read_text())
    return [{**answer, "seconds": answer["at"] - failed} for answer in answers]


def measure(timeout: float) -> list[dict]:
    """Every way in every placement."""
    results = []
    for where, place in PLACES.items():
        for how in WAYS:
            with tempfile.TemporaryDirectory() as folder:
                answers = lose(how, place, timeout, Path(folder))
            results.append({"where": where, "how": how, "timeout": timeout, "answers": answers})
            print(f"{where}, {how}: {answers}", file=sys.stderr)
            if any(answer["error"] is None for answer in answers):
                raise SystemExit(f"{where}, {how}: a rank noticed nothing: {answers}")
    return results


def report(env: dict, results: list[dict]) -> str:
    """A line per way and placement."""
    head = ["rank 1", "rows", "seconds", "what the others raise"]
    lines = []
    for result in results:
        seconds, says = max(answer["seconds"] for answer in result["answers"]), result["answers"][0]
        lines.append([result["how"], result["where"], f"{seconds:.2f}", f"{says['error']}: {says['said']}"])
    about = ABOUT.format(timeout=results[0]["timeout"])
    return "\n".join([*heading("Lost ranks", env), about, "", table(head, lines, "llrl"), ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--timeout", type=float, default=5.0, help="of the process group, in seconds")
    args = parser.parse_args()
    env = environment()
    results = measure(args.timeout)
    text = report(env, results)
    print(text)
    save("losses", text, env, results)


if __name__ == "__main__":
    main()
