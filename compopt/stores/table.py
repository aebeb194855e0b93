"""Table of the rows of one object: placement, layout, reading and committing."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import Tensor

from compopt import accelerator, checks
from compopt.batch import COUNT, Batch, Rows
from compopt.checks import values
from compopt.distributed.collectives import doing
from compopt.distributed.ranks import ProcessGroup, Ranks
from compopt.stores import DiskStore, Offload, RowStore, WriteBehind
from compopt.stores.base import BLOCK_ROWS, chosen, lazy_zeros, rows_of
from compopt.stores.rows import Column, Deposit, RowLayout, merge
from compopt.stores.snapshot import Snapshot


@dataclass(frozen=True)
class Placement:
    """Arguments of an estimator that determine the location of its rows, and never their values.

    Args:
        process_group: the ranks that form the global batch; ``None``: the default group, if there is one.
        offload: ``None``: on the features' device; ``"cpu"``: in host memory; ``"disk"``: in a file.
        offload_dir: directory of that file, on a local disk.
        shard: each of K ranks keeps ``n / K`` rows instead of all; implied by ``"disk"``.
    """

    process_group: ProcessGroup | None = None
    offload: Offload | None = None
    offload_dir: str | os.PathLike[str] | None = None
    shard: bool = False

    def __post_init__(self) -> None:
        offload, directory = self.offload, self.offload_dir
        checks.flag("shard", self.shard)
        if offload not in (None, *get_args(Offload)):
            raise ValueError(f'offload must be None, "cpu" or "disk", got {offload!r}')
        if offload == "disk" and directory is None:
            raise ValueError('offload="disk" needs offload_dir=, a directory for the table; got None')
        if offload != "disk" and directory is not None:
            raise ValueError(f'offload_dir={str(directory)!r} needs offload="disk", got offload={offload!r}')
        if directory is not None:
            if not isinstance(directory, (str, os.PathLike)):
                raise TypeError(f"offload_dir must be a path, got {directory!r} of type {type(directory).__name__}")
            object.__setattr__(self, "offload_dir", os.path.abspath(directory))  # independent of a later chdir
        object.__setattr__(self, "shard", self.shard or offload == "disk")

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "process_group": None}  # process groups cannot leave their process

    def open(self, n: int, words: int, ranks: Ranks, name: str) -> RowStore | WriteBehind:
        """Create the ``n`` rows of this process; collective for ``"disk"``, where each rank has its own file."""
        if (directory := self.offload_dir) is None:
            store = RowStore(n, words, on_host=self.offload == "cpu")
            return store if self.offload is None else WriteBehind(store)
        name = f"{name}-rows" if name else "rows"
        name = name if ranks.size == 1 else f"{name}-{ranks.rank:05d}-of-{ranks.size:05d}"
        with doing("the construction of an estimator"):
            return ranks.agree(lambda: WriteBehind(DiskStore(directory, name, n, words)))


def blocks(rows: range) -> Iterator[range]:
    """Divide successive rows into blocks of at most :data:`BLOCK_ROWS`."""
    return (rows[start : start + BLOCK_ROWS] for start in range(0, len(rows), BLOCK_ROWS))


def numbers(rows: range) -> Tensor:
    """Return the row numbers of a range as a tensor on the CPU."""
    return torch.arange(rows.start, rows.stop, device="cpu")


def _at(rows: Tensor) -> slice | Tensor:
    """Return ascending row numbers as an index, a slice if they are successive."""
    whole = len(rows) and int(rows[-1] - rows[0]) < len(rows)
    return slice(int(rows[0]), int(rows[-1]) + 1) if whole else rows


class RowTable:
    """Table with one row per sample, which contains the columns of one object.

    With ``shard=True`` rows are distributed cyclically over the K ranks: row ``g`` is local row ``g // K`` of rank
    ``g % K``. This balances any ``n`` and any sample group, and appending rows moves no existing row.

    Args:
        columns: columns of a row, including ``count``.
        n: number of rows on all ranks together.
        placement: location of the rows.
        ranks: the ranks of the estimator.
        name: beginning of the name of a file on the disk.

    Attributes:
        first, stride: this process holds the rows ``first, first + stride, ...``.
    """

    def __init__(self, columns: Sequence[Column], n: int, placement: Placement, ranks: Ranks, name: str = "") -> None:
        self.layout, self.n, self._ranks = RowLayout(columns), n, ranks
        self.first, self.stride = (ranks.rank, ranks.size) if placement.shard else (0, 1)
        self.rows = placement.open(self._before(n, self.first), self.layout.words, ranks, name)
        self._deposits: list[Deposit] = []

    @property
    def sharded(self) -> bool:
        """Return whether this process holds only a part of the rows."""
        return self.stride > 1

    @property
    def store(self) -> RowStore:
        return self.rows.store if isinstance(self.rows, WriteBehind) else self.rows

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        here = (self._ranks.rank, self._ranks.size)
        if self.sharded and here != (self.first, self.stride):
            raise RuntimeError(
                f"this is the shard of rank {self.first} of {self.stride}, and this process is rank {here[0]} of "
                f"{here[1]}; move rows between runs with compopt.save and compopt.load"
            )

    def _before(self, row: int, first: int) -> int:
        """Count the rows ``first, first + stride, ...`` below ``row``."""
        return max(0, -(-(row - first) // self.stride))  # not len(range(...)), which is limited to 2^63

    def at_rest(self) -> RowStore:
        """Wait until every commit is in the store and no read is in flight, and return the store."""
        self.rows.settle()
        return self.store

    def readable(self) -> RowStore:
        """Return the store as :meth:`at_rest`; raise if its rows must not be read."""
        store = self.at_rest()
        store.ready()
        return store

    def snapshot(self) -> Snapshot:
        """Start an undo log, so that a thread can read the current rows while commits continue."""
        return Snapshot(self.readable())

    def remove(self) -> None:
        """Remove the file of a table that is not needed any more, if its rows are on the disk."""
        if isinstance(self.store, DiskStore):
            self.at_rest()
            self.store.path.unlink(missing_ok=True)

    def grow(self, n: int) -> None:
        """Append rows up to ``n``; if one rank fails, no rank does. Collective."""
        local, store = self._before(n, self.first), self.at_rest()
        before = store.n
        try:
            self._ranks.agree(lambda: store.resize(local))
        except BaseException:
            store.resize(before)
            raise
        self.n = n

    def owned(self, rows: Tensor) -> Tensor:
        """Return the positions in ``rows``, given on the CPU, of the rows that this process holds."""
        return torch.nonzero(rows % self.stride == self.first).flatten()

    def local(self, rows: Tensor) -> Tensor:
        """Convert numbers of rows that this process holds to row numbers of its store."""
        return rows // self.stride

    def share(self, rows: Tensor, device: torch.device, mine: Tensor | None = None) -> Tensor:
        """Return a block of rows ``(R,)``, given on the CPU, with zeros for the rows of other processes.

        The sum of the bits over all ranks is the block of all rows. ``mine`` is the block of the rows that this process
        holds, on ``device``, if it has already been read.
        """
        owned, block = self.owned(rows), self.layout.zeros(len(rows), device)
        if mine is None:
            local = self.local(rows[owned])
            mine = self.rows.fetch(accelerator.to_device(local, device), local)
        block[accelerator.to_device(owned, device)] = mine
        return block

    def unpack(self, rows: Tensor, block: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return columns ``(B, D)`` of a block ``(B * R, 2 * words)`` in the working dtype (integers as stored).

        ``rows`` is ``(B, 1)``, or ``(B, 2)``, in which case direction 1 is read from the rows in the first column, and
        direction 2 from those in the second.
        """
        views = self.layout.unpack(block)
        if rows.shape[1] == 2:
            views = {k: torch.stack([v[0::2, 0], v[1::2, 1]], dim=1) for k, v in views.items()}
        columns = {COUNT: views.pop(COUNT)}
        return columns | {
            name: v.to(dtype) if v.is_floating_point() and v.dtype != dtype else v for name, v in views.items()
        }

    def deposit(self, batch: Batch, read: Rows, proposals: Mapping[str, Tensor], valid: Tensor | None) -> None:
        """Keep the proposals of one call, ``(B, D)`` each, until :meth:`commit` or :meth:`discard`."""
        self._deposits.append(Deposit.of(batch, read, proposals, valid))

    def prepare(self, found_inf: Tensor | None) -> tuple[Tensor, Tensor] | None:
        """Return row numbers of the store and rows for :meth:`commit`; ``None`` without deposits.

        The rows keep their values if ``found_inf`` (on the device) is positive.
        """
        if not self._deposits:
            return None
        rows, old, new = merge(self._deposits, self.layout)
        if found_inf is not None:
            new = torch.where(found_inf.to(new.device) > 0, old, new)
        if self.sharded:
            picked = self._pick_owned(rows)
            rows, new = self.local(rows[picked]), new[picked]
        return rows, new

    def commit(self, prepared: tuple[Tensor, Tensor] | None) -> None:
        """Write the result of :meth:`prepare`, and drop the deposits."""
        if prepared is not None:
            self.rows.commit(*prepared)
            self._deposits.clear()

    def discard(self, first: int = 0) -> None:
        """Drop the deposits from number ``first`` on."""
        del self._deposits[first:]

    def _pick_owned(self, rows: Tensor) -> Tensor:
        """Return the positions of the rows that this process holds; counted on the host, to avoid synchronisation."""
        count = sum(len(self.owned(d.host_rows)) for d in self._deposits if d.host_rows is not None)
        other = (rows % self.stride != self.first).to(torch.uint8)
        return torch.argsort(other, stable=True)[:count]

    def visited(self) -> Iterator[Tensor]:
        """Return blocks of row numbers, ascending, on the CPU; all other rows are zeros. Collective on shards."""
        store = self._ranks.agree(self.readable) if self.sharded else self.readable()
        written = store.written
        if self.sharded:  # groups of the shards with equal numbers have successive rows
            most = torch.zeros(-(-self.n // (self.stride * store.group)), dtype=torch.int32, device=store.device)
            most[: len(written)] = written
            written = self._ranks.sum(most) > 0
        return rows_of(written, self.stride * store.group, self.n, BLOCK_ROWS)

    def state_dict(self, own: range | None = None) -> dict[str, Tensor]:
        """Copy every column of all rows, ``(n, D)``, or of the rows ``own``.

        The copy is on the store's device; on shards, and with ``own``, on the CPU. There, pages without a visited row
        use no memory until they are written. Collective on shards.
        """
        visited, store, rows = self.visited(), self.store, range(self.n) if own is None else own
        device = store.device if own is None and not self.sharded else torch.device("cpu")
        full = {c.name: lazy_zeros((len(rows), c.width), c.dtype).to(device) for c in self.layout.columns}
        for part in visited:
            asked = chosen((part >= rows.start) & (part < rows.stop))
            if self.sharded:  # all ranks take part in every block
                block = self._ranks.sum_bits(self.share(part, store.device)).to(device)[asked]
            else:
                block = store.gather(accelerator.to_device(part[asked], store.device)).to(device)
            kept = chosen(block.any(dim=1))
            at = _at(part[asked].to(device)[kept] - rows.start)
            for name, value in self.layout.unpack(block[kept]).items():
                full[name][at] = value
        return full

    def check_state(self, columns: Mapping[str, Tensor]) -> None:
        """Refuse columns ``(n, width)`` that cannot be loaded; all columns are required."""
        own = {c.name: c for c in self.layout.columns}
        for name in {**columns, **own}:
            if name not in own:
                raise ValueError(f"the checkpoint has a column {name!r}, which this estimator has not; it has {[*own]}")
            if name not in columns:
                raise ValueError(f"the checkpoint has no column {name!r}; it has {sorted(columns)}")
            values.dense(f"column {name!r} of the checkpoint", columns[name])
            given, needed, dtype = columns[name], (self.n, own[name].width), own[name].dtype
            if tuple(given.shape) != needed or given.dtype != dtype:
                raise ValueError(
                    f"column {name!r} differs: the checkpoint has {tuple(given.shape)} of {given.dtype}, this "
                    f"estimator {needed} of {dtype}"
                )
        self.check_values(columns, self.n)

    def check_values(self, columns: Mapping[str, Any], count: int, first: int = 0) -> None:
        """Refuse values that no run writes, block by block, see :meth:`RowLayout.check_values`.

        ``columns`` are those of ``count`` rows from row ``first`` on: tensors, or objects with slices that are tensors.
        """
        for at in blocks(range(count)):
            block = {c.name: columns[c.name][at.start : at.stop] for c in self.layout.columns if c.name in columns}
            self.layout.check_values(block, self.n, first + at.start)

    def load(self, parts: Iterable[tuple[Tensor, Mapping[str, Tensor]]]) -> None:
        """Reset all rows to zeros, then write parts: row numbers ``(R,)`` and columns ``(R, D)``, given on the CPU.

        This process writes only the rows that it holds.
        """
        store = self.at_rest()
        with torch.inference_mode(False), store.overwriting():  # inference tensors cannot be written outside
            for rows, columns in parts:
                if self.sharded:
                    mine = self.owned(rows)
                    rows, columns = rows[mine], {name: value[mine] for name, value in columns.items()}
                block = self.layout.zeros(len(rows), torch.device("cpu"))
                self.layout.write(block, columns)
                kept = chosen(block.any(dim=1))  # rows of zeros stay unwritten, and a sparse table sparse
                rows, block = accelerator.to_device(self.local(rows[kept]), store.device), block[kept]
                store.scatter(rows, accelerator.to_device(block, store.device))

    def load_state_dict(self, columns: Mapping[str, Tensor]) -> None:
        """Overwrite all rows that this process holds with those of ``columns``, ``(n, D)`` each."""
        parts = ((at, slice(at.start, at.stop)) for at in blocks(range(self.n)))
        self.load((numbers(at), {k: v.detach()[cut].cpu() for k, v in columns.items()}) for at, cut in parts)
