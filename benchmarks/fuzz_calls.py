"""Calls of every estimator at random: does each end in a clear refusal that changes nothing, or the twin's numbers?"""

from __future__ import annotations

import time
import traceback
import warnings
from dataclasses import asdict, dataclass, field

from benchmarks.fuzz_judge import Wrong
from benchmarks.fuzz_trial import Trial

WRONG = (
    "unclear error",
    "state changed",
    "not refused",
    "refused wrongly",
    "other numbers",
    "loss not NaN",
    "program failed",
)


@dataclass
class Count:
    """What became of the calls of one kind."""

    calls: int = 0
    refused: int = 0
    agreed: int = 0
    nan: int = 0
    uncompared: int = 0
    wrong: dict[str, int] = field(default_factory=lambda: dict.fromkeys(WRONG, 0))


def one(seed: int, number: int, counts: dict[str, Count]) -> tuple[str, str, str] | None:
    """Run one trial; what went wrong."""

    def tell(kind: str, outcome: str) -> None:
        tally = counts.setdefault(kind, Count())
        tally.calls += 1
        setattr(tally, outcome, getattr(tally, outcome) + 1)

    trial: Trial | None = None  # it may fail while it is made
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trial = Trial(seed, number, tell)
            trial.run()
    except Wrong as found:
        kind, what, text = found.args
        text = f"{trial.info} {trial.mode} {trial.dtype} {trial.names}: {text}" if trial else text
    except Exception as error:
        kind, what, text = "trial", "program failed", "".join(traceback.format_exception(error))[-1500:]
    else:
        return None
    tally = counts.setdefault(kind, Count())
    tally.calls += 1
    tally.wrong[what] += 1
    return kind, what, text


def calls(seed: int, count: int, only: int | None = None, seconds: float = float("inf")) -> dict:
    """Run trials until there are enough or the time is over, and count."""
    started, counts, findings, done = time.perf_counter(), {}, [], 0
    for number in range(count) if only is None else [only]:
        if time.perf_counter() - started > seconds:
            break
        found = one(seed, number, counts)
        done += 1
        if found is not None:
            findings.append([number, *found])
    found_counts = {kind: asdict(counts[kind]) for kind in sorted(counts)}
    spent = round(time.perf_counter() - started, 1)
    return {"seed": seed, "trials": done, "counts": found_counts, "findings": findings, "seconds": spent}
