"""Reader from the arguments of a call to the rows of the whole batch, on one rank or on many."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from compopt import accelerator
from compopt.batch import Batch
from compopt.checks.inputs import INDEX_REMEDY, check_range, distinct_values
from compopt.distributed.handshake import KEYS, Agreement, Handshake
from compopt.estimator.async_checks import AsyncChecks
from compopt.estimator.groups import SampleGroups
from compopt.kernel.features import working_dtype
from compopt.stores import Ticket
from compopt.stores.layout import Column, moved
from compopt.stores.prefetch import Fetch, Prefetcher
from compopt.stores.table import RowTable

ROW_KEYS = KEYS[:2]  # index, index2; labels are no rows


class BatchReader:
    """Check indices, learn the global batch and fetch its committed rows.

    Communicates, with several ranks and per call: one small all-gather of host integers (:class:`Handshake`), one
    all-gather of the call's values and the own rows; with shards one all-reduce of the global batch's rows instead of
    the latter.

    Args:
        groups: sizes and hyper-parameters of the data sets.
        table: the rows; ``None`` for an estimator without any.
        handshake: with the other ranks.
        async_checks: what is learned on the device and refused later.
        dtype: of the rows.
        columns: what each part keeps per sample, by role.
        row_keys: which keys of a call name rows.
    """

    def __init__(
        self,
        groups: SampleGroups,
        table: RowTable | None,
        handshake: Handshake,
        async_checks: AsyncChecks,
        dtype: torch.dtype,
        columns: Mapping[str, Sequence[Column]],
        row_keys: Sequence[str] = ROW_KEYS,
    ) -> None:
        self.row_keys = row_keys
        self.groups, self.table, self.handshake, self.dtype = groups, table, handshake, dtype
        self.async_checks, self.ranks = async_checks, handshake.ranks
        self.prefetcher = None if table is None else Prefetcher(table, self.ranks)
        self._device = torch.device("cpu")
        self._columns = columns
        self._described: object = None
        self._crc = 0

    def read(
        self,
        keys: Mapping[str, Tensor],
        values: Mapping[str, Tensor],
        depositing: bool,
        facts: Mapping[str, int],
        identity: Callable[[], object],
        least: int = 1,
        more: int = 0,
    ) -> Batch:
        """Meet the other ranks and read.

        Args:
            keys: this rank's ``index`` and, if given, ``index2`` and ``labels``, ``(b,)`` int64.
            values: what the call brings beside, ``(b, ...)`` each; device and dtype of the first are those of the call.
            depositing: the call may move rows to the features' device.
            facts: what must be equal on all ranks.
            identity: gives what must be alike on all ranks beside the sample groups.
            least: 2 refuses a global batch without two distinct samples.
            more: how many further candidates this rank brings.
        """
        like = next(iter(values.values()))
        self._device = device = like.device
        with self.handshake.guard():
            self.ranks.check_alive()
            self.async_checks.poll()
            self.groups.check()
            if self.ranks.size > 1:  # an index on a device is waited for
                keys = {name: key.cpu() for name, key in keys.items()}
            there = _on(keys, device)
            rows, bad = self._in_range(keys, there)
            host_rows = rows if bad is None and rows.device.type == "cpu" else self._on_host(keys)
            fetch = None if self.prefetcher is None else self.prefetcher.find(host_rows)
            own = self._fetch_own(rows, host_rows, fetch, depositing)
        facts = {**facts, "width": math.prod(like.shape[1:]), "dtype": like.dtype.itemsize}
        facts["configuration"] = self._fingerprint(identity) if self.ranks.size > 1 else 0
        agreed = self.handshake.exchange(keys, facts, 0 if fetch is None else fetch.number, more)
        if self.ranks.size > 1:
            there = _on(agreed.keys, device)
            rows, host_rows = self._stack(there), self._on_host(agreed.keys)
        block, everyone = self._gather(agreed, host_rows, fetch, own, values)
        batch = self._batch(agreed, there, everyone, rows, host_rows, block, bad, like, depositing)
        for name, key in agreed.keys.items() if least == 2 else ():
            batch.bad = _either(batch.bad, self.async_checks.two_samples(name, key))
        return batch

    def look(self, index: Tensor, like: Tensor, values: Mapping[str, Tensor] | None = None) -> Batch:
        """Return committed rows of ``index`` for this process alone; collective only on shards, index by rank."""
        keys = {"index": index}
        there = _on(keys, like.device)
        rows, bad = self.agree(lambda: self._in_range(keys, there))
        block = None
        if self.table is not None and self.table.sharded:
            block = self._look_sharded(index, like.device)
        elif self.table is not None:
            block = self._fetch_own(rows, index[:, None], None, False)
        alone = Agreement(keys, [len(index)], slice(0, len(index)))
        return self._batch(alone, there, dict(values or {}), rows, self._on_host(keys), block, bad, like, False)

    def prefetch(self, keys: Mapping[str, Tensor]) -> None:
        """Start reading the rows of a batch."""
        for name in self.row_keys:
            if name in keys:
                check_range(name, keys[name], self.groups.n)  # one on a device is checked when its batch is called
        rows = self._on_host(keys)
        if self.prefetcher is not None and rows is not None:
            self.prefetcher.start(rows, self._device)

    def agree(self, action: Callable[[], Any]) -> Any:
        """Run an action; on shards, where ranks ask each other for rows next, refuse on all if one rank refuses."""
        return self.ranks.agree(action) if self.table is not None and self.table.sharded else action()

    # -- inside ------------------------------------------------------------------------------------------------

    def _fingerprint(self, identity: Callable[[], object]) -> int:
        """Return a fingerprint of what must be equal on all ranks; computed anew when a sample group was changed."""
        if self._described is not self.groups.checked:
            values = [{k: v for k, v in g.items() if not isinstance(v, Tensor)} for g in self.groups.checked]
            self._crc = zlib.crc32(repr((identity(), values)).encode())
            self._described = self.groups.checked
        return self._crc

    def _in_range(self, keys: Mapping[str, Tensor], there: Mapping[str, Tensor]) -> tuple[Tensor, Tensor | None]:
        """Return row numbers ``(b, R)`` on the device, in range, and a flag if some on a device were not.

        Args:
            keys: as they were given.
            there: the same on the device.
        """
        bad: Tensor | None = None
        for name in self.row_keys:
            flag = check_range(name, keys[name], self.groups.n) if name in keys else None
            bad = _either(bad, None if flag is None else flag.to(there[name].device))
        rows = self._stack(there)
        if bad is not None:
            self.async_checks.watch(bad.to(torch.int32), self._refuse_index)
            rows = rows.clamp(0, (self.groups.n or 1) - 1)
        return rows, bad

    def _stack(self, keys: Mapping[str, Tensor]) -> Tensor:
        """Return row numbers ``(b, R)`` beside the keys, copied: the caller may change the keys."""
        return torch.stack([keys[name] for name in self.row_keys if name in keys], dim=1)

    def _on_host(self, keys: Mapping[str, Tensor]) -> Tensor | None:
        """Return row numbers ``(b, R)`` on the CPU; ``None`` if that would wait for a device."""
        given = [keys[name] for name in self.row_keys if name in keys]
        return self._stack(keys) if all(key.device.type == "cpu" for key in given) else None

    def _refuse_index(self, bad: int) -> None:
        if bad:
            raise IndexError(
                f"an index of an earlier call was outside n={self.groups.n} (its loss was NaN); {INDEX_REMEDY}. On the "
                f"CPU it is refused at once"
            )

    def _fetch_own(
        self, rows: Tensor, host_rows: Tensor | None, fetch: Fetch | None, depositing: bool
    ) -> Tensor | None:
        """Return rows of this rank's samples, ``(b, R * words)``; ``None`` on shards, which need all indices first."""
        if self.table is None:
            return None
        self.table.rows.ready()
        if depositing:
            self.table.store.to(rows.device)
        if self.table.sharded:
            return None
        if fetch is not None:
            block = fetch.claim().take(rows.device)
        else:
            block = self.table.rows.fetch(rows.flatten(), None if host_rows is None else host_rows.flatten())
        block = moved(block, rows.device)
        return block.view(len(rows), rows.shape[1] * self.table.layout.width(block))

    def _gather(
        self,
        agreed: Agreement,
        host_rows: Tensor | None,
        fetch: Fetch | None,
        own: Tensor | None,
        values: Mapping[str, Tensor],
    ) -> tuple[Tensor | None, dict[str, Tensor]]:
        """Return the rows of the global batch and the values of all ranks."""
        block: Tensor | None = None
        if own is None and self.table is not None:
            assert host_rows is not None  # several ranks have their keys on the CPU
            ticket = None if fetch is None or agreed.prefetched == 0 else fetch.claim()
            block = self._read_sharded(host_rows.flatten(), ticket, self._device)
        everyone = self.ranks.gather([*values.values()] if own is None else [*values.values(), own], agreed.sizes)
        block = block if own is None else everyone.pop()
        return block, dict(zip(values, everyone, strict=True))

    def _read_sharded(self, rows: Tensor, ticket: Ticket | None, device: torch.device) -> Tensor:
        assert self.table is not None
        owned = self.table.owned(rows)
        local = self.table.local(rows[owned])
        if ticket is not None:
            mine = moved(ticket.take(), device)
        else:
            mine = self.table.rows.fetch(accelerator.to_device(local, device), local)
        return self.table.fetch_sharded(rows, device, owned, mine)

    def _look_sharded(self, index: Tensor, device: torch.device) -> Tensor:
        """Read rows on shards, where each rank may ask for others."""
        indices = self.ranks.gather_objects(index.cpu())
        block = self._read_sharded(torch.cat(indices), None, device)
        return block.split([len(other) for other in indices])[self.ranks.rank]

    def _batch(
        self,
        agreed: Agreement,
        keys: dict[str, Tensor],
        values: dict[str, Tensor],
        rows: Tensor,
        host_rows: Tensor | None,
        block: Tensor | None,
        bad: Tensor | None,
        like: Tensor,
        depositing: bool,
    ) -> Batch:
        dtype = working_dtype(like.dtype, self.dtype)
        columns: dict[str, Tensor] = {}
        if self.table is not None and block is not None:
            block = block.view(-1, self.table.layout.width(block))
            columns = self.table.unpack(rows, block, dtype)
        batch = Batch(
            keys=keys,
            values=values,
            sizes=agreed.sizes,
            more=agreed.more,
            own=agreed.own,
            rows=rows,
            host_rows=host_rows,
            columns=columns,
            block=block,
            distinct=len(keys) == 1 and distinct_values(agreed.keys["index"]) == len(rows),
            bad=bad,
            dtype=dtype,
            depositing=depositing,
        )
        if columns:
            self._show_unseen(batch)
        return batch

    def _show_unseen(self, batch: Batch) -> None:
        """Fill in what the columns of parts that were never visited show: zero, or a hyper-parameter."""
        assert self.table is not None
        columns = batch.columns
        for role, own in self._columns.items():
            if own and own[0].name in self.table.partial:
                blank = columns[own[0].name] == own[0].blank
                columns[own[0].name] = columns[own[0].name].masked_fill(blank, 0)
                batch.blank |= dict.fromkeys((column.name for column in own), blank)
            for column in own:
                if column.initial is None:
                    continue
                value = self.groups.hyper(role, batch.rows, batch.dtype)(column.initial)
                unseen = batch.unseen(column.name)
                if isinstance(value, Tensor):
                    columns[column.name] = torch.where(unseen, value, columns[column.name])
                else:
                    columns[column.name] = columns[column.name].masked_fill(unseen, value)


def _on(keys: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Move keys to a device."""
    return {name: accelerator.to_device(key, device) for name, key in keys.items()}


def _either(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    """Join two flags on the device."""
    return one if other is None else other if one is None else one | other
