"""From the arguments of a call to the rows of the whole batch, on one rank or on many."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from compopt.checks.inputs import check_range, distinct_values
from compopt.distributed.handshake import KEYS, Meeting, Samples
from compopt.distributed.ranks import Ranks
from compopt.estimator.async_checks import Monitor
from compopt.estimator.batch import Visit
from compopt.estimator.groups import SampleGroups
from compopt.stores import Ticket
from compopt.stores.deposits import COUNT
from compopt.stores.prefetch import Fetch, Prefetcher
from compopt.stores.table import RowTable

ROW_KEYS = KEYS[:2]  # index, index2; a group is no row


class Reader:
    """Checks indices, learns the global batch and fetches its committed rows.

    Communicates, with several ranks and per call: one small all-gather of host integers (:class:`Meeting`), one
    all-gather of the payload and the own rows; with shards one all-reduce of the global batch's rows instead of
    the latter.
    """

    def __init__(
        self,
        groups: SampleGroups,
        table: RowTable | None,
        ranks: Ranks,
        monitor: Monitor,
        dtype: torch.dtype,
        identity: Callable[[], object],
        initial: Mapping[str, tuple[str, str]],
    ) -> None:
        self.groups, self.table, self.ranks, self.monitor, self.dtype = groups, table, ranks, monitor, dtype
        self.meeting = Meeting(ranks)
        self.prefetcher = None if table is None else Prefetcher(table, ranks)
        self._device = torch.device("cpu")
        self._identity, self._crc = identity, 0
        self._described: object = None
        self._initial = initial  # column -> role and hyper-parameter that a row shows before its first visit

    def visit(
        self,
        keys: Mapping[str, Tensor],
        like: Tensor,
        payload: Sequence[Tensor],
        depositing: bool,
        progress: Mapping[str, int],
    ) -> Visit:
        """Meet the other ranks and read.

        Args:
            keys: this rank's ``index`` and, if given, ``index2`` and ``group``, ``(b,)`` int64.
            like: a tensor of this rank's batch; its device and dtype are those of the call.
            payload: what to gather along, ``(b, ...)`` each.
            depositing: the call may move rows to the features' device.
            progress: what must be equal on all ranks.
        """
        self._device = like.device
        with self.meeting.guard():
            self.ranks.check_alive()
            self.monitor.poll()
            self.groups.check()
            if self.ranks.size > 1:  # an index on a device is waited for
                keys = {name: key.cpu() for name, key in keys.items()}
            rows, bad = self._rows(keys, like.device)
            fetch = None if self.prefetcher is None else self.prefetcher.find(_on_host(keys))
            if self.table is not None:
                self.table.rows.ready()
                if depositing:
                    self.table.store.to(like.device)
            own = self._fetch_own(rows, _on_host(keys), fetch)
        written = 0 if self.table is None else self.table.rows.written
        facts = {**progress, "width": math.prod(like.shape[1:]), "dtype": like.dtype.itemsize}
        facts["configuration"] = self._fingerprint() if self.ranks.size > 1 else 0
        samples = self.meeting.exchange(keys, facts, 0 if fetch is None else fetch.number, written)
        old, everyone = self._gather(samples, fetch, own, list(payload), like.device)
        if self.ranks.size > 1:
            rows, _ = self._rows(samples.keys, like.device)
        return self._seen(samples, rows, old, everyone, bad, like, depositing)

    def look(self, index: Tensor, like: Tensor | None = None) -> Visit:
        """Committed rows of ``index`` for this process alone; collective only on shards, index by rank."""
        like = torch.zeros((), dtype=self.dtype, device="cpu") if like is None else like
        rows, bad = self.agree(lambda: self._rows({"index": index}, like.device))
        samples = Samples({"index": index}, [len(index)], slice(0, len(index)))
        old = None
        if self.table is not None:
            old = (
                self._look_sharded(index, like.device)
                if self.table.sharded
                else self._fetch_own(rows, index[:, None], None)
            )
        return self._seen(samples, rows, old, [], bad, like, False)

    def prefetch(self, keys: Mapping[str, Tensor]) -> None:
        """Start reading the rows of a batch."""
        for name in ROW_KEYS:
            if name in keys:
                check_range(name, keys[name], self.groups.n)  # one on a device is checked when its batch is called
        rows = _on_host(keys)
        if self.prefetcher is not None and rows is not None:
            self.prefetcher.start(rows, self._device)

    def agree(self, action: Callable[[], Any]) -> Any:
        """Before ranks ask each other for rows, which they do on shards only, all of them must be able to."""
        return self.ranks.agree(action) if self.table is not None and self.table.sharded else action()

    # -- inside ------------------------------------------------------------------------------------------------

    def _fingerprint(self) -> int:
        """Of everything that all ranks must have alike; computed anew when a sample group was changed."""
        if self._described is not self.groups.checked:
            values = [{k: v for k, v in g.items() if not isinstance(v, Tensor)} for g in self.groups.checked]
            self._crc = zlib.crc32(repr((self._identity(), values)).encode())
            self._described = self.groups.checked
        return self._crc

    def _rows(self, keys: Mapping[str, Tensor], device: torch.device) -> tuple[Tensor, Tensor | None]:
        """Row numbers ``(b, R)`` on the device, in range; a flag if some of an index on a device were not."""
        given = {name: keys[name] for name in ROW_KEYS if name in keys}
        flags = [check_range(name, key, self.groups.n) for name, key in given.items()]
        rows = torch.stack([key.to(device, non_blocking=True) for key in given.values()], dim=1)
        bad: Tensor | None = None
        for flag in flags:
            if flag is not None:
                bad = flag.to(device) if bad is None else bad | flag.to(device)
        if bad is not None:
            self.monitor.watch(bad.to(torch.int32), self._refuse_index)
            rows = rows.clamp(0, (self.groups.n or 1) - 1)
        return rows, bad

    def _refuse_index(self, bad: int) -> None:
        if bad:
            raise IndexError(
                f"an index of an earlier call was outside n={self.groups.n} (its loss was NaN); pass data-set "
                f"indices, not batch positions, and pass them on the CPU to learn of this at once"
            )

    def _fetch_own(self, rows: Tensor, host_rows: Tensor | None, fetch: Fetch | None) -> Tensor | None:
        """Rows of this rank's samples, ``(b, R * words)``; shards first need to know everybody's."""
        if self.table is None or self.table.sharded:
            return None
        if fetch is not None:
            block = fetch.ticket().take()
        else:
            block = self.table.rows.fetch(rows.flatten(), None if host_rows is None else host_rows.flatten())
        return block.to(rows.device).view(len(rows), rows.shape[1] * self.table.layout.words)

    def _gather(
        self, samples: Samples, fetch: Fetch | None, own: Tensor | None, payload: list[Tensor], device: torch.device
    ) -> tuple[Tensor | None, list[Tensor]]:
        """Rows of the global batch and everybody's payload."""
        if self.table is None:
            return None, self.ranks.gather(payload, samples.sizes)
        self.table.rows.acknowledge(samples.written)
        if own is not None:
            *everyone, old = self.ranks.gather([*payload, own], samples.sizes)
            return old, everyone
        rows = _on_host(samples.keys)
        assert rows is not None
        ticket = None if fetch is None or samples.ticket == 0 else fetch.ticket()
        return self._read_sharded(rows.flatten(), ticket, device), self.ranks.gather(payload, samples.sizes)

    def _read_sharded(self, rows: Tensor, ticket: Ticket | None, device: torch.device) -> Tensor:
        assert self.table is not None
        owned = self.table.owned(rows)
        local = self.table.local(rows[owned])
        if ticket is not None:
            mine = ticket.take().to(device)
        else:
            mine = self.table.rows.fetch(local.to(device, non_blocking=True), local)
        return self.table.fetch_sharded(rows, device, owned, mine)

    def _look_sharded(self, index: Tensor, device: torch.device) -> Tensor:
        """Every rank may ask for other rows."""
        indices = self.ranks.gather_objects(index.cpu())
        block = self._read_sharded(torch.cat(indices), None, device)
        return block.split([len(other) for other in indices])[self.ranks.rank]

    def _seen(
        self,
        samples: Samples,
        rows: Tensor,
        old: Tensor | None,
        payload: list[Tensor],
        bad: Tensor | None,
        like: Tensor,
        depositing: bool,
    ) -> Visit:
        dtype = torch.promote_types(torch.promote_types(like.dtype, torch.float32), self.dtype)
        columns = {COUNT: torch.zeros_like(rows, dtype=torch.int32)}
        if self.table is not None and old is not None:
            old = old.view(-1, self.table.layout.words)
            columns = self.table.unpack(rows, old, dtype)
            for name, (role, key) in self._initial.items():
                unseen = self.groups.hyper(role, rows, dtype)(key)
                columns[name] = torch.where(columns[COUNT] == 0, unseen, columns[name])
        keys = samples.keys
        distinct = len(keys) == 1 and distinct_values(keys["index"]) == len(rows)
        return Visit(
            self.groups,
            {name: key.to(rows.device, non_blocking=True) for name, key in keys.items()},
            samples.sizes,
            samples.own,
            rows,
            _on_host(keys),
            columns,
            old,
            payload,
            distinct,
            bad,
            dtype,
            depositing,
        )


def _on_host(keys: Mapping[str, Tensor]) -> Tensor | None:
    """Row numbers ``(b, R)`` on the CPU; ``None`` if that would wait for a device."""
    rows = [keys[name] for name in ROW_KEYS if name in keys]
    return torch.stack(rows, dim=1) if all(row.device.type == "cpu" for row in rows) else None
