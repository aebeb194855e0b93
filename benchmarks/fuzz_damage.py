"""Random damage to checkpoints: loading must raise, name a damaged file and leave the estimator unchanged."""

from __future__ import annotations

import hashlib
import random
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

import compopt

N, DIM, BATCH = 400, 4, 32
Change = dict[Path, bytes | None]  # new contents by file; None: the file is removed
WRONG = ("not noticed", "file not named", "estimator changed", "another error")


@dataclass
class Case:
    """A checkpoint, an earlier one of the same run, and an estimator in another state."""

    path: Path
    former: Path
    est: compopt.ContrastiveEstimator
    before: str

    def files(self) -> list[Path]:
        return sorted(path for path in self.path.rglob("*") if path.is_file())


def rows() -> compopt.ContrastiveEstimator:
    """Build an estimator whose whole state is in rows."""
    return compopt.ISogCLREstimator([{"n": N - 100, "gamma": 0.6}, {"n": 100}], rho=1.0, tau_init=0.07, lr=1e-5)


def network() -> compopt.ContrastiveEstimator:
    """Build an estimator with a network in addition to its rows."""
    temperature = compopt.TemperatureDual(N, rho=1.0, tau_init=0.07, tau_min=0.02)
    return compopt.ContrastiveEstimator(compopt.NeuralNormalizer(DIM, prototypes=16, updates=2), temperature)


BUILDS = (rows, network)


def train(est: compopt.ContrastiveEstimator, seed: int, steps: int, among: int = N) -> None:
    """Train on random samples among the first ones."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        z1, z2 = torch.randn(2, BATCH, DIM, generator=generator, requires_grad=True).unbind()
        est(z1, z2, torch.randperm(among, generator=generator)[:BATCH]).backward()
        est.step()


def prepare(build: Callable[[], compopt.ContrastiveEstimator], folder: Path) -> Case:
    """Save twice; the second checkpoint may share files with the first."""
    run, est = build(), build()
    train(run, 0, 40)
    former = compopt.save(run, folder)
    train(run, 1, 3, among=40)
    path = compopt.save(run, folder)
    compopt.load(est, path)  # the undamaged checkpoint loads
    train(est, 2, 5)
    return Case(path, former, est, digest(est))


def digest(est: compopt.ContrastiveEstimator) -> str:
    """Return a hash of the whole state."""
    state, found = est.state_dict(), hashlib.sha256()
    for part in state["parts"].values():
        for name, value in (part.pop("rows") | part.pop("state")).items():
            found.update(name.encode() + value.reshape(-1).contiguous().view(torch.uint8).numpy().tobytes())
    found.update(repr(state).encode())
    return found.hexdigest()


# -- kinds of damage -----------------------------------------------------------------------------------------------


def flip(case: Case, file: Path, rng: random.Random) -> Change:
    """Flip one bit."""
    content = bytearray(file.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    return {file: bytes(content)}


def truncate(case: Case, file: Path, rng: random.Random) -> Change:
    """Truncate the file."""
    content = file.read_bytes()
    return {file: content[: rng.choice([0, len(content) - 1, rng.randrange(len(content))])]}


def lengthen(case: Case, file: Path, rng: random.Random) -> Change:
    """Add bytes at the end."""
    return {file: file.read_bytes() + rng.choice([b"\0", b" ", b"\n", rng.randbytes(100)])}


def blank(case: Case, file: Path, rng: random.Random) -> Change:
    """Set a range to zero, like a lost block of a disk."""
    content = bytearray(file.read_bytes())
    start = rng.randrange(len(content))
    stop = min(len(content), start + rng.randint(1, 512))
    content[start:stop] = bytes(stop - start)
    return {file: bytes(content)}


def remove(case: Case, file: Path, rng: random.Random) -> Change:
    return {file: None}


def swap(case: Case, file: Path, rng: random.Random) -> Change:
    """Exchange the file with another file of the checkpoint."""
    other = rng.choice([one for one in case.files() if one != file])
    return {file: other.read_bytes(), other: file.read_bytes()}


def mix(case: Case, file: Path, rng: random.Random) -> Change:
    """Replace the file and some others by files of the previous save."""
    change: Change = {}
    files = case.files()
    for one in [file, *rng.sample(files, rng.randint(0, min(3, len(files))))]:
        kind = one.name.split("-")[0]
        before = case.former / one.parent.relative_to(case.path)
        change[one] = rng.choice(sorted(before.glob(f"{kind}*"))).read_bytes()
    return change


OTHERS = (truncate, lengthen, blank, remove, swap, mix)


# -- trials --------------------------------------------------------------------------------------------------------


def trial(case: Case, change: Change) -> str | None:
    """Load the damaged checkpoint, repair it, and return what went wrong, if anything."""
    kept = {file: file.read_bytes() for file in change}
    try:
        for file, content in change.items():
            put(file, content)
        try:
            compopt.load(case.est, case.path)
        except (ValueError, FileNotFoundError) as error:
            named = any(file.name in str(error) for file in change)
            wrong = None if named else "file not named"
        except Exception:
            wrong = "another error"
        else:
            return "not noticed"
        return "estimator changed" if digest(case.est) != case.before else wrong
    finally:
        for file, content in kept.items():
            put(file, content)


def put(file: Path, content: bytes | None) -> None:
    """Replace a file by a new one, since the existing one may be shared with another checkpoint, or remove it."""
    file.unlink(missing_ok=True)
    if content is not None:
        file.write_bytes(content)


def run(cases: list[Case], flips: int, others: int, rng: random.Random) -> Iterator[tuple[str, str, str | None]]:
    """Damage every file in turn; yield the kind of damage, the kind of file, and what went wrong."""
    for kinds, trials in (((flip,), flips), (OTHERS, others)):
        done = 0
        while done < trials:
            case = cases[done % len(cases)]
            files = case.files()
            file = files[done // len(cases) % len(files)]
            kind = rng.choice(kinds)
            change = {f: c for f, c in kind(case, file, rng).items() if c is None or c != f.read_bytes()}
            if not change:  # the range was zero already, or the saves share the file: draw another kind
                continue
            wrong = trial(case, change)
            yield kind.__name__, file.name.split("-")[0].split(".")[0], wrong
            case.before = digest(case.est) if wrong in ("not noticed", "estimator changed") else case.before
            done += 1


def damage(folder: Path, seed: int, flips: int, others: int) -> dict[str, Any]:
    """Create checkpoints, damage them, and return counts of the outcomes."""
    rng, started, numbers = random.Random(seed), time.perf_counter(), count(1)
    counts: dict[str, dict[str, Counter[str]]] = {}
    # the same file names in every run, so that the seed determines everything
    with patch.object(secrets, "token_hex", lambda length: f"{next(numbers):0{2 * length}x}"):
        cases = [prepare(build, folder / build.__name__) for build in BUILDS]
    sizes = {}
    for build, case in zip(BUILDS, cases, strict=True):
        lengths = [file.stat().st_size for file in case.files()]
        sizes[build.__name__] = {"files": len(lengths), "bytes": sum(lengths)}
    for kind, file, wrong in run(cases, flips, others, rng):
        tally = counts.setdefault(kind, {}).setdefault(file, Counter())
        tally.update(["trials"] if wrong is None else ["trials", wrong])
    for case in cases:  # every trial repaired its damage
        compopt.load(case.est, case.path)
    found = {kind: {file: dict(tally) for file, tally in by_file.items()} for kind, by_file in counts.items()}
    return {"seed": seed, "checkpoints": sizes, "counts": found, "seconds": round(time.perf_counter() - started, 1)}
