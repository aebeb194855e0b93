"""Damage to a checkpoint, at random: is it noticed, is its file named, and is the estimator as it was?"""

from __future__ import annotations

import hashlib
import random
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path
from unittest.mock import patch

import torch

import compopt
from compopt.checkpoint import manifest

N, DIM, BATCH = 400, 4, 32
Change = dict[Path, bytes | None]  # new contents by file; None: it is gone
WRONG = ("not noticed", "file not named", "estimator changed", "another error")


@dataclass
class Count:
    """What became of the trials of one kind, on one kind of file."""

    trials: int = 0
    wrong: dict[str, int] = field(default_factory=lambda: dict.fromkeys(WRONG, 0))


@dataclass
class Case:
    """A checkpoint, an earlier one of the same run, and an estimator with a state of its own."""

    path: Path
    former: Path
    est: compopt.ContrastiveEstimator
    before: str

    def files(self) -> list[Path]:
        """Every file of the checkpoint."""
        return sorted(self.path.iterdir())


@contextmanager
def small_chunks() -> Iterator[None]:
    """Give a few hundred rows several files, with the same names in every run, so that a seed says all."""
    numbers = count(1)
    with (
        patch.object(manifest, "PIECE_ROWS", 128),
        patch.object(manifest, "CHUNK_ROWS", 32),
        patch.object(secrets, "token_hex", lambda length: f"{next(numbers):0{2 * length}x}"),
    ):
        yield


def rows() -> compopt.ContrastiveEstimator:
    """Build an estimator that keeps all it has in rows."""
    return compopt.ISogCLREstimator([{"n": N - 100, "gamma": 0.6}, {"n": 100}], rho=1.0, tau_init=0.07, lr=1e-5)


def network() -> compopt.ContrastiveEstimator:
    """Build one with a network beside its rows."""
    temperature = compopt.TemperatureDual(N, rho=1.0, tau_init=0.07, tau_min=0.02)
    return compopt.ContrastiveEstimator(compopt.NeuralNormalizer(DIM, prototypes=16, updates=2), temperature)


def train(est: compopt.ContrastiveEstimator, seed: int, steps: int, among: int = N) -> None:
    """Visit some of the first rows."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        z1, z2 = torch.randn(2, BATCH, DIM, generator=generator, requires_grad=True).unbind()
        est(z1, z2, torch.randperm(among, generator=generator)[:BATCH]).backward()
        est.step()


def prepare(build: Callable[[], compopt.ContrastiveEstimator], folder: Path) -> Case:
    """Save twice; the second checkpoint shares files with the first."""
    run, est = build(), build()
    train(run, 0, 40)
    former = compopt.save(run, folder)
    train(run, 1, 3, among=40)
    path = compopt.save(run, folder)
    compopt.load(est, path)  # an undamaged one loads
    train(est, 2, 5)
    return Case(path, former, est, digest(est))


def digest(est: compopt.ContrastiveEstimator) -> str:
    """Every bit of the state in a few letters."""
    state, found = est.state_dict(), hashlib.sha256()
    for part in (state.pop("rows"), *state.pop("extra").values()):
        for name, value in part.items():
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
    """Cut the end off."""
    content = file.read_bytes()
    return {file: content[: rng.choice([0, len(content) - 1, rng.randrange(len(content))])]}


def lengthen(case: Case, file: Path, rng: random.Random) -> Change:
    """Add bytes at the end."""
    return {file: file.read_bytes() + rng.choice([b"\0", b" ", b"\n", rng.randbytes(100)])}


def blank(case: Case, file: Path, rng: random.Random) -> Change:
    """Make a range zero, as a lost block of a disk."""
    content = bytearray(file.read_bytes())
    start = rng.randrange(len(content))
    stop = min(len(content), start + rng.randint(1, 512))
    content[start:stop] = bytes(stop - start)
    return {file: bytes(content)}


def remove(case: Case, file: Path, rng: random.Random) -> Change:
    """Take the file away."""
    return {file: None}


def swap(case: Case, file: Path, rng: random.Random) -> Change:
    """Exchange it with another file of the checkpoint."""
    other = rng.choice([one for one in case.files() if one != file])
    return {file: other.read_bytes(), other: file.read_bytes()}


def mix(case: Case, file: Path, rng: random.Random) -> Change:
    """Put files of the save before in the places of this and some others."""
    change: Change = {}
    for one in [file, *rng.sample(case.files(), rng.randint(0, 3))]:
        kind = one.name.split("-")[0]
        change[one] = rng.choice(sorted(case.former.glob(f"{kind}*"))).read_bytes()
    return change


OTHERS = (truncate, lengthen, blank, remove, swap, mix)


# -- trials --------------------------------------------------------------------------------------------------------


def trial(case: Case, change: Change) -> str | None:
    """Load the damaged checkpoint, and mend it again; what went wrong."""
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
    """Write a file of its own: the one that is there may be shared with another checkpoint."""
    file.unlink(missing_ok=True)
    if content is not None:
        file.write_bytes(content)


def run(cases: list[Case], flips: int, others: int, rng: random.Random) -> Iterator[tuple[str, str, str | None]]:
    """Damage every file in turn: the kind of damage, the kind of file, and what went wrong."""
    for kinds, trials in (((flip,), flips), (OTHERS, others)):
        done = 0
        while done < trials:
            case = cases[done % len(cases)]
            files = case.files()
            file = files[done // len(cases) % len(files)]
            kind = rng.choice(kinds)
            change = {f: c for f, c in kind(case, file, rng).items() if c is None or c != f.read_bytes()}
            if not change:  # the range was zero, or the saves share the file: another kind
                continue
            wrong = trial(case, change)
            yield kind.__name__, file.name.split("-")[0].split(".")[0], wrong
            case.before = digest(case.est) if wrong in ("not noticed", "estimator changed") else case.before
            done += 1


def damage(folder: Path, seed: int, flips: int, others: int) -> dict:
    """Make checkpoints, damage them, and count."""
    rng, started = random.Random(seed), time.perf_counter()
    counts: dict[str, dict[str, Count]] = {}
    with small_chunks():
        cases = [prepare(build, folder / build.__name__) for build in (rows, network)]
        sizes = {build.__name__: held(case) for build, case in zip((rows, network), cases, strict=True)}
        for kind, file, wrong in run(cases, flips, others, rng):
            tally = counts.setdefault(kind, {}).setdefault(file, Count())
            tally.trials += 1
            if wrong is not None:
                tally.wrong[wrong] += 1
        for case in cases:  # mended each time
            compopt.load(case.est, case.path)
    found = {kind: {file: asdict(tally) for file, tally in by_file.items()} for kind, by_file in counts.items()}
    return {"seed": seed, "checkpoints": sizes, "counts": found, "seconds": round(time.perf_counter() - started, 1)}


def held(case: Case) -> dict[str, int]:
    """Files and bytes of a checkpoint."""
    return {"files": len(case.files()), "bytes": sum(file.stat().st_size for file in case.files())}
