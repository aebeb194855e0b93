"""Engine of one table of rows: groups, ranks, the table, its reader, and deposits that wait for the commit."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch

from compopt.batch import COUNT
from compopt.checks.values import Range
from compopt.distributed.handshake import Handshake
from compopt.distributed.ranks import Ranks
from compopt.estimator.async_checks import AsyncChecks
from compopt.estimator.attach import Attachments
from compopt.estimator.exclusive import Exclusive
from compopt.estimator.forgotten import Forgotten
from compopt.estimator.groups import Groups, SampleGroups
from compopt.estimator.part import PartHooks
from compopt.estimator.reader import ROW_KEYS, BatchReader
from compopt.estimator.save_handle import SaveHandle
from compopt.stores.layout import Column
from compopt.stores.table import Placement, RowTable

if TYPE_CHECKING:
    from typing_extensions import Self  # in typing from Python 3.11 on

DIRECTIONS = {"bimodal": 2, "unimodal": 1, "single": 1}
FIRST_USE = threading.RLock()  # a part alone makes its engine and its rows when it is first used, by whichever thread


class Engine:
    """State and machinery of one estimator, which its parts share.

    An estimator that is composed of parts makes its engine at construction, and its parts have none. A part that is
    used alone makes its own when it is first asked for something, and its rows when these are first needed.

    Args:
        parts: by role. Held as given: a part alone passes a weak mapping of itself.
        mode: ``"bimodal"`` (two values per column), ``"unimodal"`` or ``"single"`` (one).
        dtype: of the floating-point columns, float32 or float64.
        directions: how many have anchors; 1 makes the columns of bimodal mode one value wide.
        placement: where rows live.
        sample_groups: one mapping per data set, which overrides the hyper-parameters of the parts.
        options: plain values that decide the meaning of the state beside the parts.
        row_keys: which keys of a call name rows.

    Attributes:
        width: values per column and sample, ``D``.
        groups, ranks, table: hyper-parameters; who shares the batch; the rows, or ``None``.
        placement: where rows live.
        device: for rows that are made later.
        t: commits so far.
        pending: calls whose proposals wait for the commit.
        training: whether calls deposit.
        lock: held by commits, copies and loads.
        attachments, forgotten, saving: optimizers that commit; checks of the loop; a save beside training.
        handshake, async_checks: with the other ranks; of what the device learns. Made anew in copies.
    """

    def __init__(
        self,
        parts: Mapping[str, PartHooks],
        *,
        mode: str,
        dtype: torch.dtype,
        directions: int = 2,
        placement: Placement | None = None,
        sample_groups: Groups | None = None,
        options: Mapping[str, Any] | None = None,
        row_keys: Sequence[str] = ROW_KEYS,
    ) -> None:
        self.parts, self.mode, self.dtype = parts, mode, dtype
        self.options = dict(options or {})
        self.placement, self._row_keys = placement or Placement(), row_keys
        self.width = min(directions, DIRECTIONS[mode])
        self.groups = SampleGroups(parts, mode, sample_groups)
        self.ranks = Ranks(self.placement.process_group)
        self.device = torch.device("cpu")
        self.table: RowTable | None = None
        self._reader: BatchReader | None = None
        self.t = self.pending = 0
        self.training = True
        self.lock, self.attachments, self.forgotten = Exclusive(), Attachments(), Forgotten()
        self.saving: SaveHandle | None = None
        self._connect()

    def open(self) -> Self:
        """Make the rows and their reader, once."""
        if self._reader is None:
            with FIRST_USE:
                self._open()
        return self

    def _open(self) -> None:
        if self._reader is not None:  # another thread was first
            return
        if self.table is None:
            self.table = self._make_table()
        self._reader = BatchReader(
            self.groups,
            self.table,
            self.handshake,
            self.async_checks,
            self.dtype,
            self.columns(),
            self._row_keys,
        )

    @property
    def reader(self) -> BatchReader:
        """Reader of the rows of a call, which is made here if need be."""
        reader = self.open()._reader
        assert reader is not None
        return reader

    def columns(self) -> dict[str, list[Column]]:
        """Return the columns that each part keeps per sample, by role."""
        return {role: part.columns(self.width, self.dtype) for role, part in self.parts.items()}

    def _make_table(self) -> RowTable | None:
        by_role = self.columns()
        columns = [column for own in by_role.values() for column in own]
        if not columns:
            return None
        firsts = {own[0].name for own in by_role.values() if own}
        columns.append(Column(COUNT, self.width, torch.int32, values=Range(least=0)))
        with torch.inference_mode(False):  # rows made inside it could not be written outside
            table = RowTable(columns, self.groups.n or 0, self.placement, self.ranks, firsts)
        table.store.to(self.device)
        return table

    def _connect(self) -> None:
        self.handshake, self.async_checks = Handshake(self.ranks), AsyncChecks()

    def forget_prefetched(self) -> None:
        """Drop rows that were read ahead."""
        if self._reader is not None and self._reader.prefetcher is not None:
            self._reader.prefetcher.drop_all()

    def await_save(self) -> None:
        """Wait for a save beside training, before what it reads is replaced."""
        if self.saving is not None:
            self.saving.settle()

    def discard(self) -> None:
        """Drop everything pending."""
        with self.lock.writing():
            self.pending = 0
            if self.table is not None:
                self.table.discard()
            for part in self.parts.values():
                part.discard_state()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_reader": None, "handshake": None, "async_checks": None, "saving": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._connect()


class Alone(Mapping[str, PartHooks]):
    """Weak mapping of a part to itself, by its role; the part holds the engine that has this mapping."""

    def __init__(self, part: PartHooks) -> None:
        self._part = ref(part)

    def __getitem__(self, role: str) -> PartHooks:
        part = self._part()
        if part is None or role != part.role:
            raise KeyError(role)
        return part

    def __iter__(self) -> Iterator[str]:
        part = self._part()
        return iter(()) if part is None else iter((part.role,))

    def __len__(self) -> int:
        return 1

    def __getstate__(self) -> PartHooks | None:
        return self._part()

    def __setstate__(self, part: PartHooks) -> None:
        self._part = ref(part)


def check_dtype(dtype: torch.dtype) -> torch.dtype:
    """Refuse a dtype that rows cannot have."""
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype of the rows must be a torch.dtype such as torch.float32, got {dtype!r}")
    if dtype not in (torch.float32, torch.float64):
        raise ValueError(f"dtype of the rows must be torch.float32 or torch.float64, got {dtype}")
    return dtype
