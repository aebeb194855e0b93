"""How far each rank is with its part of a checkpoint that is written beside training.

Collectives would meet those of training. Ranks tell each other through files in the directory of the new checkpoint::

    rank-00001.writing      touched as long as the rank lives, then renamed, which needs no room on a full disk, to
    rank-00001.written      its files, as in a manifest
    rank-00001.failed       why, if that could be written
    rank-00001.stopped      because another rank failed
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from compopt.checkpoint import durable
from compopt.checkpoint.manifest import Checkpoint, File

WRITING, WRITTEN, FAILED, STOPPED = "writing", "written", "failed", "stopped"
_ORDER = (WRITING, WRITTEN, STOPPED, FAILED)
_NAME = re.compile(r"rank-(\d+)\.(writing|written|failed|stopped)")
# Seconds after which a rank that gives no sign is given up. It gives one before each file, of 2^20 rows at most.
SILENCE = 600.0
SHORTEST, LONGEST = 0.01, 1.0  # seconds between two looks


class _AnotherRank(RuntimeError):
    """Another rank has said that it failed."""


class Parts:
    """One rank's view of what all ranks have done; with one rank nothing is told.

    Args:
        target: the new checkpoint.
        rank, size: who tells, of how many.
    """

    def __init__(self, target: Checkpoint, rank: int, size: int) -> None:
        self._target, self._rank, self._size = target, rank, size
        if size > 1:
            self._own = self._path(rank, WRITING)
        self._signs: dict[int, tuple[int, float]] = {}

    def _path(self, rank: int, state: str) -> Path:
        assert isinstance(self._target.path, Path)  # on a remote store one rank alone writes beside training
        return self._target.path / f"rank-{rank:05d}.{state}"

    # -- telling -------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """This rank will write."""
        if self._size > 1:
            durable.write_file(self._own, b"")

    def alive(self) -> None:
        """This rank is still writing; raises if another one has failed."""
        if self._size > 1:
            self._refuse(self._look())
            os.utime(self._own)

    def written(self, files: Sequence[File]) -> None:
        """This rank's files are on the disk."""
        content = json.dumps([asdict(file) for file in files]).encode()
        partial = self._path(self._rank, "partial")
        durable.write_file(partial, content)
        os.replace(partial, self._path(self._rank, WRITTEN))
        self._own.unlink()
        self._own = self._path(self._rank, WRITTEN)

    def failed(self, error: BaseException) -> None:
        """This rank writes no more, and neither shall the others."""
        state = STOPPED if isinstance(error, _AnotherRank) else FAILED
        if self._size > 1:
            with suppress(OSError):
                self._own.write_text(f"{type(error).__name__}: {error}")
            with suppress(OSError):
                os.replace(self._own, self._path(self._rank, state))

    # -- hearing -------------------------------------------------------------------------------------------------

    def collect(self) -> list[File]:
        """On rank 0: the files of the others, once all of them are on the disk."""
        if self._size == 1:
            return []
        others = range(1, self._size)
        self._wait(lambda: self._in(WRITTEN).issuperset(others), others)
        paths = [self._path(rank, WRITTEN) for rank in others]
        files = [File.parse(entry) for path in paths for entry in json.loads(path.read_bytes())]
        for path in paths:
            path.unlink()
        return files

    def await_manifest(self) -> None:
        """On the others: until the checkpoint is complete."""
        self._wait(lambda: self._target.complete, {0})

    def end(self) -> None:
        """On rank 0: the checkpoint is complete."""
        if self._size > 1:
            self._own.unlink()

    def await_end(self) -> None:
        """On rank 0, which failed: until the others write no more and know why, but no longer than :data:`SILENCE`."""
        if self._size == 1:
            return
        end = time.monotonic() + SILENCE
        for _ in _pauses():
            if self._in(FAILED, STOPPED).issuperset(range(1, self._size)) or time.monotonic() > end:
                return

    def _wait(self, over: Callable[[], bool], watched: Collection[int]) -> None:
        """Look until it is over; raises if a rank has failed, or a watched one gives no sign."""
        for _ in _pauses():
            if over():
                return
            states = self._look()
            self._refuse(states)
            self._refuse_silence(watched, states)
            with suppress(OSError):
                os.utime(self._own)

    def _look(self) -> dict[int, str]:
        """The state of each rank."""
        found = [match for name in self._names() if (match := _NAME.fullmatch(name)) is not None]
        found.sort(key=lambda match: _ORDER.index(match[2]))  # a rank may have two files for a moment
        return {int(match[1]): match[2] for match in found}

    def _names(self) -> list[str]:
        try:
            return [path.name for path in self._path(self._rank, WRITING).parent.iterdir()]
        except FileNotFoundError:
            raise RuntimeError(f"{self._target.path} was removed while it was written: by another run?") from None

    def _in(self, *states: str) -> set[int]:
        return {rank for rank, state in self._look().items() if state in states}

    def _refuse(self, states: dict[int, str]) -> None:
        for rank, state in sorted(states.items()):
            if state == FAILED and rank != self._rank:
                with suppress(OSError):
                    if why := self._path(rank, FAILED).read_text():
                        raise _AnotherRank(f"rank {rank} failed: {why}")
                raise _AnotherRank(f"rank {rank} failed to write its part of {self._target.path}; it knows why")

    def _refuse_silence(self, watched: Collection[int], states: dict[int, str]) -> None:
        now = time.monotonic()
        for rank in watched:
            if states.get(rank, WRITING) == WRITING:
                sign = self._sign(rank)
                known, since = self._signs.get(rank, (None, now))
                self._signs[rank] = (sign, since if sign == known else now)
                if now - self._signs[rank][1] > SILENCE:
                    raise RuntimeError(
                        f"rank {rank} has given no sign for {SILENCE:.0f} s while {self._target.path} was written: did "
                        f"it end?"
                    )

    def _sign(self, rank: int) -> int:
        with suppress(OSError):
            return self._path(rank, WRITING).stat().st_mtime_ns
        return 0


def _pauses() -> Iterator[None]:
    """Now, and again and again after pauses that become longer."""
    pause = SHORTEST
    while True:
        yield
        time.sleep(pause)
        pause = min(LONGEST, 1.5 * pause)
