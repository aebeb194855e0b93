"""What one rank does in a thread to finish a checkpoint: its files, then on rank 0 the manifest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from compopt.checkpoint import manifest
from compopt.checkpoint.manifest import STATE, Checkpoint, File
from compopt.checkpoint.parts import Parts
from compopt.checkpoint.writing import Cut, write_tensors
from compopt.remote import Folder
from compopt.stores.snapshot import Snapshot
from compopt.stores.table import RowTable


@dataclass(frozen=True)
class Rows:
    """The rows of a checkpoint, as they are at its cut.

    Attributes:
        cut: what this rank writes of them.
        snapshot: reads them.
    """

    table: RowTable
    cut: Cut
    snapshot: Snapshot


@dataclass(frozen=True)
class Job:
    """One rank's part of a checkpoint; everything in it is as it was at the cut.

    Attributes:
        root, keep: see :func:`compopt.save`.
        content: of the manifest.
        state: state that is not rows.
        rows: ``None`` for an estimator without rows.
    """

    rank: int
    target: Checkpoint
    parts: Parts
    root: Folder
    keep: int
    content: Mapping[str, Any]
    state: Mapping[str, Tensor]
    rows: Rows | None

    def run(self) -> None:
        """Write this rank's files; return when the checkpoint is complete. Communicates through :class:`Parts` only."""
        try:
            try:
                files = self._write()
            finally:
                self.release()
            self._finish(files)
        except BaseException as error:
            self.fail(error)
            raise
        if self.rows is not None:
            self.rows.table.remember(self.rows.cut.saved)
        if self.rank == 0:
            manifest.prune(self.root, self.keep)

    def _write(self) -> list[File]:
        files: list[File] = []
        if self.rows is not None:
            files += self.rows.cut.write(self.rows.table, self.target, self._read)
        if self.rank == 0:
            files.append(write_tensors(self.target, STATE, self.state))
        return files

    def _read(self, chunks: Sequence[int]) -> list[Tensor]:
        assert self.rows is not None
        self.parts.alive()
        return self.rows.snapshot.read(chunks)

    def _finish(self, files: list[File]) -> None:
        if self.rank != 0:
            self.parts.written(files)
            self.parts.await_manifest()
            return
        manifest.write(self.target, [*files, *self.parts.collect()], self.content)
        self.parts.end()

    def release(self) -> None:
        """This rank's rows are read."""
        if self.rows is not None:
            self.rows.snapshot.release()

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks; rank 0 removes the directory when nobody writes into it any more."""
        if self.target.complete:
            return
        self.parts.failed(error)
        if self.rank == 0:
            self.parts.await_end()
            manifest.remove(self.target)
