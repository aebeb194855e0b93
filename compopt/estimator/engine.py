"""Engine of an estimator: parts, groups, ranks, and the table of rows that the parts share."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any
from weakref import WeakValueDictionary

import torch
from typing_extensions import Self

from compopt.batch import COUNT
from compopt.distributed.handshake import Handshake
from compopt.distributed.ranks import Ranks
from compopt.estimator.attach import Attachments
from compopt.estimator.groups import Groups, SampleGroups
from compopt.estimator.reader import ROW_KEYS, AsyncChecks, BatchReader
from compopt.estimator.save_handle import SaveHandle
from compopt.stores.layout import Column
from compopt.stores.table import Placement, RowTable

DIRECTIONS = {"bimodal": 2, "unimodal": 1, "single": 1}
FIRST_USE = threading.RLock()  # a part alone creates its engine and its rows at its first use, in any thread


class Alone(WeakValueDictionary[str, Any]):
    """Weak mapping from a role to the part that is used alone; the part itself keeps the engine with this mapping."""

    def __init__(self, part: Any) -> None:
        super().__init__({part.role: part})

    def __deepcopy__(self, memo: dict[int, Any]) -> Alone:
        return Alone(*(deepcopy(part, memo) for part in self.values()))

    def __reduce__(self) -> tuple[Any, ...]:
        return Alone, tuple(self.values())


class Engine:
    """Groups, ranks, rows, counters and locks of one estimator, which its parts share.

    Args:
        parts: the parts by role, each a :class:`~compopt.estimator.Component`; a weak mapping for a part that is used
            alone.
        mode: ``"bimodal"`` (two values per column), ``"unimodal"`` or ``"single"`` (one).
        dtype: dtype of the floating-point columns, float32 or float64.
        directions: number of directions with anchors; with 1 the columns of bimodal mode have one value.
        placement: placement of the rows.
        sample_groups: one mapping per data set, which overrides the hyper-parameters of the parts.
        options: further plain values that determine the meaning of the state; saved, and compared by a load.
        row_keys: keys of a call that contain row numbers.

    Attributes:
        width: number of values per column and sample, ``D``.
        device: device of rows that are created later.
        t, pending: number of commits so far; number of calls with proposals that wait for the next commit.
        committed: number of calls in the commits of this process.
        made: time at which this object, or this copy, was made.
    """

    committed = 0  # in pickles of 0.3

    def __init__(
        self,
        parts: Mapping[str, Any],
        *,
        mode: str,
        dtype: torch.dtype,
        directions: int = 2,
        placement: Placement | None = None,
        sample_groups: Groups | None = None,
        options: Mapping[str, Any] | None = None,
        row_keys: Sequence[str] = ROW_KEYS,
    ) -> None:
        self.parts, self.mode, self.dtype = parts, mode, check_dtype(dtype)
        self.options = dict(options or {})
        self.placement, self._row_keys = placement or Placement(), row_keys
        self.width = min(directions, DIRECTIONS[mode])
        self.groups = SampleGroups(parts, mode, sample_groups)
        self.ranks = Ranks(self.placement.process_group)
        self.device = torch.device("cpu")
        self.table: RowTable | None = None
        self.t = self.pending = self.committed = 0
        self.training = True
        self._make_own()

    def _make_own(self) -> None:
        """Create the members that copies and pickles do not share."""
        self.made = time.monotonic()
        self._reader: BatchReader | None = None
        self._lock, self._writing = threading.RLock(), False
        self.attachments = Attachments()
        self.saving: SaveHandle | None = None
        self.handshake, self.async_checks = Handshake(self.ranks), AsyncChecks()

    def open(self) -> Self:
        """Create the rows and their reader, if they do not exist yet, and return the engine."""
        if self._reader is None:
            with FIRST_USE:
                self._reader = self._reader or self._make_reader()
        return self

    def _make_reader(self) -> BatchReader:
        columns = self.columns()
        if self.table is None and any(columns.values()):
            count = Column(COUNT, self.width, torch.int32)
            every = [*(column for own in columns.values() for column in own), count]
            alone = self.mode == "single"  # no other part can have visited a sample
            firsts = {own[0].name for own in columns.values() if own and not alone}
            with torch.inference_mode(False):  # inference tensors cannot be written outside inference mode
                table = RowTable(every, self.groups.n or 0, self.placement, self.ranks, firsts)
            table.store.to(self.device)
            self.table = table
        return BatchReader(
            self.groups, self.table, self.handshake, self.async_checks, self.dtype, columns, self._row_keys
        )

    @property
    def reader(self) -> BatchReader:
        """Reader of the rows of a call, created at the first use."""
        reader = self.open()._reader
        assert reader is not None
        return reader

    def columns(self) -> dict[str, list[Column]]:
        """Return the columns of each part, by role."""
        return {role: part.columns(self.width, self.dtype) for role, part in self.parts.items()}

    def forget_prefetched(self) -> None:
        """Drop prefetched rows."""
        if self._reader is not None and self._reader.prefetcher is not None:
            self._reader.prefetcher.drop_all()

    def await_save(self) -> None:
        """Wait for a background save, before the state that it reads is replaced."""
        if self.saving is not None:
            self.saving.settle()

    @contextmanager
    def copying(self) -> Iterator[None]:
        """Block writers, so that a copy of the state contains whole commits only.

        Raises:
            RuntimeError: this thread is itself inside :meth:`writing` (a signal handler that saves).
        """
        with self._lock:
            if self._writing:
                raise RuntimeError(
                    "the estimator is in the middle of a commit, and its state is of none: let a signal handler set a "
                    "flag, and save after optimizer.step()"
                )
            yield

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Block copies and other writers; the thread that writes may enter the context again."""
        with self._lock:
            before, self._writing = self._writing, True
            try:
                yield
            finally:
                self._writing = before

    @contextmanager
    def undone_on_error(self) -> Iterator[None]:
        """Drop what the block deposits if it raises; the deposits of earlier calls of the window stay pending."""
        pending, states = self.pending, [(part, part._pending_state) for part in self.parts.values()]
        try:
            yield
        except BaseException:
            with self.writing():
                self.pending = pending
                if self.table is not None:
                    self.table.discard(pending)
                for part, state in states:
                    part._pending_state = state  # deposits replace the mapping, and leave its tensors as they are
            raise

    def discard(self) -> None:
        """Drop all pending deposits and pending state."""
        with self.writing():
            self.pending = 0
            if self.table is not None:
                self.table.discard()
            for part in self.parts.values():
                part.discard_state()

    def __getstate__(self) -> dict[str, Any]:
        own = ("_reader", "_lock", "_writing", "saving", "handshake", "async_checks", "attachments", "made")
        return {name: value for name, value in self.__dict__.items() if name not in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._make_own()


def check_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return a dtype that rows can have; refuse any other."""
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype of the rows must be a torch.dtype such as torch.float32, got {dtype!r}")
    if dtype not in (torch.float32, torch.float64):
        raise ValueError(f"dtype of the rows must be torch.float32 or torch.float64, got {dtype}")
    return dtype
