"""Reader of the global batch of a call and its committed rows, on one or several ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from compopt import accelerator
from compopt.batch import COUNT, Batch, Rows
from compopt.checks.context import warn
from compopt.checks.inputs import INDEX_REMEDY, Survey, check_range, survey
from compopt.distributed.handshake import KEYS, NOTHING, Agreement, Handshake, fingerprint
from compopt.estimator.groups import Hyper, count
from compopt.kernel.features import working_dtype
from compopt.stores import WriteBehind
from compopt.stores.prefetch import Fetch, Prefetcher
from compopt.stores.rows import Column
from compopt.stores.table import RowTable

SAME = 1e-3  # relative difference of values on devices, which may round differently
ROW_KEYS = KEYS[:2]  # index and index2 contain row numbers; labels do not


class AsyncChecks:
    """Asynchronous copies of small integers to the host, each with a callback for its arrival.

    On the CPU the callback runs at once. From a device without streams, the integer is copied at the next
    :meth:`poll`.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[Any, Tensor, Callable[[int], None]]] = []

    def watch(self, value: Tensor, react: Callable[[int], None]) -> None:
        """Call ``react(int(value))`` without waiting: now on the CPU, otherwise at a later :meth:`poll`."""
        if value.device.type == "cpu":
            react(int(value))
        else:
            copied = accelerator.to_host(value) if accelerator.has_streams(value.device) else value
            self._waiting.append((accelerator.event(value.device), copied, react))  # the event follows the copy

    def poll(self) -> None:
        """Run the callbacks of all integers that have arrived; a callback that raises is not run again."""
        while self._waiting and (self._waiting[0][0] is None or self._waiting[0][0].query()):
            _, value, react = self._waiting.pop(0)
            react(int(value))

    def two_samples(self, keys: Mapping[str, Tensor], known: Mapping[str, Survey | None]) -> Tensor | None:
        """Refuse a global batch without two distinct samples; for keys on a device, return a flag and refuse later.

        A sample is an ``index`` or, if it is given, a pair of ``index`` and ``index2``.
        """
        given = [name for name in ROW_KEYS if name in keys]
        if len(keys["index"]) < 2:
            raise ValueError(
                f"the batch has {len(keys['index'])} samples on all ranks together; it needs at least two: if it is "
                f"the last of an epoch, give its DataLoader drop_last=True"
            )
        if any(found is not None and found.low < found.high for found in map(known.get, given)):
            return None
        hidden = [keys[name] for name in given if known[name] is None]
        if hidden:
            flag = torch.stack([(key == key[0]).all() for key in hidden]).all()
            self.watch(flag.to(torch.int32), _refuse_batch)
            return flag
        values = " and ".join(f"{name} is {int(keys[name][0])}" for name in given)
        raise ValueError(f"{values} for the whole batch; a batch must have at least two distinct samples")

    def alike(self, values: Tensor) -> Tensor:
        """Return a flag on the device: values ``(B, k)`` that all samples share differ; refuse them later."""
        flag = ((values - values[:1]).abs() > SAME * values[:1].abs()).any()
        self.watch(flag.to(torch.int32), _refuse_different)
        return flag

    def watch_features(self, agree: Callable[[Callable[[], Any]], Any], value: Tensor, *features: Tensor) -> None:
        """Warn about bad rows of prepared features ``(k, b, d)``; a finite ``value`` on the CPU rules them out.

        ``value`` is the same on all ranks. If the warning is an error on one rank, ``agree`` raises on the others.
        """
        on_host = value.device.type == "cpu"
        if on_host and math.isfinite(value.item()):
            return  # a bad feature makes the value NaN, see ``zero_or_nan``
        with torch.no_grad():
            bad = torch.cat([z[..., 0].flatten() for z in features]).isnan().sum()  # every entry of a bad row is NaN
        if on_host:
            agree(lambda: _warn_features(int(bad)))
        else:
            self.watch(bad, _warn_features)


def _refuse_batch(one_sample: int) -> None:
    if one_sample:
        raise ValueError(
            "an index of an earlier call was one value for the whole batch (its loss was NaN); a batch must have at "
            "least two distinct samples"
        )


def _refuse_different(different: int) -> None:
    if different:
        raise ValueError(
            "tau, or learned parameters, differed between ranks in an earlier call (its loss was NaN); change them on "
            "all ranks"
        )


def _warn_features(bad: int) -> None:
    if bad:
        warn(
            f"{bad} feature rows of a batch are NaN, infinite or too large to compute similarities of: its loss is "
            f"not finite and the rows of its samples keep their previous values"
        )


class Reader:
    """Reader of a call: checks indices, gathers the global batch and fetches the committed rows of some objects.

    Communicates, with several ranks and per call: one small all-gather of host integers (:class:`Handshake`), and one
    all-gather of the call's values and of the rows of the local samples, of all objects together. On shards the rows
    come from one all-reduce of the global batch's rows instead.

    Args:
        objects: by name, the sample groups, the table and the columns of each object.
        handshake: handshake of the ranks.
        async_checks: checks of values on the device, which raise at a later call.
        dtype: dtype of the rows.
        row_keys: keys of a call that contain row numbers.
    """

    def __init__(
        self,
        objects: Mapping[str, tuple[Sequence[Mapping[str, Any]], RowTable | None, Sequence[Column]]],
        handshake: Handshake,
        async_checks: AsyncChecks,
        dtype: torch.dtype,
        row_keys: Sequence[str] = ROW_KEYS,
    ) -> None:
        self.row_keys, self.dtype = row_keys, dtype
        self.handshake, self.async_checks, self.ranks = handshake, async_checks, handshake.ranks
        self._groups = {name: groups for name, (groups, _, _) in objects.items()}
        self.tables = {name: table for name, (_, table, _) in objects.items() if table is not None}
        shown = [(name, column) for name, (_, _, columns) in objects.items() for column in columns]
        self._initial = [(name, column.name, column.initial) for name, column in shown if column.initial is not None]
        behind = {name: table for name, table in self.tables.items() if isinstance(table.rows, WriteBehind)}
        # rows on the features' device are read in the call itself
        self.prefetcher = Prefetcher(behind, self.ranks) if behind else None
        self.sharded = any(table.sharded for table in self.tables.values())
        self._device, self.several = torch.device("cpu"), self.ranks.size > 1

    @property
    def n(self) -> int | None:
        """Number of samples, the same for all objects with a size; ``None`` without."""
        found: int | None = None
        for groups in self._groups.values():
            n = count(groups)
            if n is not None and found not in (None, n):
                raise ValueError(
                    f"n differs: the parts of this estimator have {found} and {n} samples; its add_sample_group "
                    f"appends rows in all of them"
                )
            found = n if n is not None else found
        return found

    def read(
        self,
        keys: Mapping[str, Tensor],
        values: Mapping[str, Tensor],
        depositing: bool,
        facts: Mapping[str, int],
        least: int = 1,
        more: int = 0,
    ) -> Batch:
        """Exchange keys and values with the other ranks, and return the global batch with its committed rows.

        Args:
            keys: this rank's ``index`` and, if given, ``index2`` and ``labels``, ``(b,)`` int64.
            values: further tensors of the call, ``(b, ...)`` each; the first one sets the device and dtype of the call.
            depositing: the call deposits, so that rows may move to the features' device.
            facts: integers that must be equal on all ranks.
            least: least number of distinct samples in the global batch, 1 or 2.
            more: number of further candidates of this rank.
        """
        like = next(iter(values.values()))
        self._device = device = like.device
        several = self.several
        with self.handshake.guard() if several else NOTHING:
            if several:
                self.ranks.check_alive()
            self.async_checks.poll()
            if several:  # the exchange needs the keys on the host: wait for an index on a device
                keys = {name: key.cpu() for name, key in keys.items()}
            there = _on(keys, device)
            known = {name: survey(key) for name, key in keys.items()}
            rows, bad = self._in_range(keys, there, known)
            host_rows = rows if bad is None and rows.device.type == "cpu" else self._on_host(keys)
            fetch = None if self.prefetcher is None else self.prefetcher.find(host_rows)
            own = self._fetch_own(rows, host_rows, fetch, depositing)
        if several:
            facts = {"width": math.prod(like.shape[1:]), "dtype": like.dtype.itemsize, **facts}
            shapes = {name: f"{value.dtype} {[*value.shape[1:]]}" for name, value in values.items()}
            facts["values"] = fingerprint(shapes)
        agreed = Agreement(dict(keys), [len(like)], slice(0, len(like)), [more])
        if several:
            agreed = self.handshake.exchange(keys, facts, 0 if fetch is None else fetch.number, more)
            there = _on(agreed.keys, device)
            known = {name: survey(key) for name, key in agreed.keys.items()}
            rows, host_rows = self._stack(there), self._on_host(agreed.keys)
        blocks, everyone = self._gather(agreed, host_rows, fetch, own, values)
        batch = self._batch(agreed, there, everyone, rows, host_rows, blocks, bad, like, known["index"], depositing)
        if least == 2:
            batch.bad = either(batch.bad, self.async_checks.two_samples(agreed.keys, known))
        batch.alike = any(found is not None and found.low == found.high for found in known.values())
        return batch

    def look(self, index: Tensor, like: Tensor, values: Mapping[str, Tensor] | None = None) -> Batch:
        """Return the committed rows of ``index`` for this process alone; on shards collective, with an index per rank.

        The result is on the device of ``like``, and has its dtype if that is wider than the dtype of the rows.
        """
        keys, known = {"index": index}, survey(index)
        there = _on(keys, like.device)
        rows, bad = self.agree(lambda: self._in_range(keys, there, {"index": known}))
        blocks = self._fetch_own(rows, index[:, None], None, False)
        if self.sharded:
            indices = self.ranks.gather_objects(index.cpu())  # ranks may pass different indices
            found = self._fetch_shards(torch.cat(indices), like.device, {})
            lengths = [len(other) for other in indices]
            blocks |= {name: block.split(lengths)[self.ranks.rank] for name, block in found.items()}
        alone = Agreement(keys, [len(index)], slice(0, len(index)))
        host_rows = self._on_host(keys)
        return self._batch(alone, there, dict(values or {}), rows, host_rows, blocks, bad, like, known, False)

    def prefetch(self, keys: Mapping[str, Tensor]) -> None:
        """Start to read the rows of a future batch; ``keys`` as in :meth:`read`."""
        for name in self.row_keys:
            if name in keys:
                check_range(name, keys[name], self.n)  # an index on a device is checked at the call of its batch
        rows = self._on_host(keys)
        if self.prefetcher is not None and rows is not None:
            self.prefetcher.start(rows, self._device)

    def forget_prefetched(self) -> None:
        """Drop prefetched rows."""
        if self.prefetcher is not None:
            self.prefetcher.drop_all()

    def agree(self, action: Callable[[], Any]) -> Any:
        """Run an action; on shards, raise on all ranks if it raises on one, since a collective read follows."""
        return self.ranks.agree(action) if self.sharded else action()

    # -- inside ------------------------------------------------------------------------------------------------

    def _in_range(
        self, keys: Mapping[str, Tensor], there: Mapping[str, Tensor], known: Mapping[str, Survey | None]
    ) -> tuple[Tensor, Tensor | None]:
        """Return row numbers ``(b, R)`` on the device, clamped to the range, and a flag for those out of range.

        An index on the CPU raises if it is out of range; without an index on a device the flag is ``None``.
        """
        bad: Tensor | None = None
        n = self.n
        for name in self.row_keys if n is not None else ():
            flag = check_range(name, keys[name], n, known[name]) if name in keys else None
            bad = bad if flag is None else either(bad, flag.to(there[name].device))
        rows = self._stack(there)
        if bad is not None:
            self.async_checks.watch(bad.to(torch.int32), self._refuse_index)
            rows = rows.clamp(0, (n or 1) - 1)
        return rows, bad

    def _stack(self, keys: Mapping[str, Tensor]) -> Tensor:
        """Return row numbers ``(b, R)``; a copy if the commit needs them, since the caller may overwrite the keys."""
        if not self.tables and "index2" not in keys:
            return keys["index"].unsqueeze(1)
        return torch.stack([keys[name] for name in self.row_keys if name in keys], dim=1)

    def _on_host(self, keys: Mapping[str, Tensor]) -> Tensor | None:
        """Return row numbers ``(b, R)`` on the CPU; ``None`` if the copy would wait for a device."""
        given = [keys[name] for name in self.row_keys if name in keys]
        return self._stack(keys) if all(key.device.type == "cpu" for key in given) else None

    def _refuse_index(self, bad: int) -> None:
        if bad:
            raise IndexError(
                f"an index of an earlier call was outside n={self.n} (its loss was NaN); {INDEX_REMEDY}. On the "
                f"CPU it is refused at once"
            )

    def _fetch_own(
        self, rows: Tensor, host_rows: Tensor | None, fetch: Fetch | None, depositing: bool
    ) -> dict[str, Tensor]:
        """Return the rows of this rank's samples by table, one line per sample; without shards, which need all."""
        own: dict[str, Tensor] = {}
        for name, table in self.tables.items():
            table.rows.ready()
            if depositing:
                table.store.to(rows.device)
            if table.sharded:
                continue
            ticket = None if fetch is None else fetch.claim(name)
            if ticket is not None:
                block = ticket.take(rows.device)
            else:
                block = table.rows.fetch(rows.flatten(), None if host_rows is None else host_rows.flatten())
            own[name] = accelerator.to_device(block, rows.device).view(len(rows), rows.shape[1] * block.shape[1])
        return own

    def _fetch_shards(self, rows: Tensor, device: torch.device, mine: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the rows ``(R,)``, given on the CPU, of all sharded tables, by one all-reduce. Collective."""
        shares = {n: table.share(rows, device, mine.get(n)) for n, table in self.tables.items() if table.sharded}
        if len(shares) == 1:
            return {name: self.ranks.sum_bits(share) for name, share in shares.items()}
        together = self.ranks.sum_bits(torch.cat([*shares.values()], dim=1))
        parts = together.split([share.shape[1] for share in shares.values()], dim=1)
        return {name: part.contiguous() for name, part in zip(shares, parts, strict=True)}

    def _gather(
        self,
        agreed: Agreement,
        host_rows: Tensor | None,
        fetch: Fetch | None,
        own: Mapping[str, Tensor],
        values: Mapping[str, Tensor],
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the rows of the global batch by table, and the values of all ranks. Collective."""
        blocks: dict[str, Tensor] = {}
        if self.sharded:
            assert host_rows is not None  # with several ranks all keys are on the CPU
            mine: dict[str, Tensor] = {}
            for name, table in self.tables.items() if fetch is not None and agreed.prefetched else ():
                ticket = fetch.claim(name) if table.sharded and fetch is not None else None
                if ticket is not None:
                    mine[name] = accelerator.to_device(ticket.take(), self._device)
            blocks = self._fetch_shards(host_rows.flatten(), self._device, mine)
        # One message for the features and the rows.
        everyone = [*values.values(), *own.values()]
        if self.several:
            everyone = self.ranks.gather(everyone, agreed.sizes)
        blocks |= zip(own, everyone[len(values) :], strict=True)
        return blocks, dict(zip(values, everyone, strict=False))

    def _batch(
        self,
        agreed: Agreement,
        keys: dict[str, Tensor],
        values: dict[str, Tensor],
        rows: Tensor,
        host_rows: Tensor | None,
        blocks: Mapping[str, Tensor],
        bad: Tensor | None,
        like: Tensor,
        known: Survey | None,
        depositing: bool,
    ) -> Batch:
        dtype, tables = working_dtype(like.dtype, self.dtype), {}
        for name, table in self.tables.items():
            block = blocks[name].view(-1, 2 * table.layout.words)
            columns = table.unpack(rows, block, dtype)
            tables[name] = Rows(columns, columns.pop(COUNT), block)
        for name, column, key in self._initial:  # samples that were never visited have the value of a hyper-parameter
            value, read = Hyper(self._groups[name], rows, dtype)(key), tables[name]
            if isinstance(value, Tensor):
                read.columns[column] = torch.where(read.unseen, value, read.columns[column])
            else:
                read.columns[column] = read.columns[column].masked_fill(read.unseen, value)
        distinct = len(keys) == 1 and known is not None and known.distinct
        sizes, more, own = agreed.sizes, agreed.more, agreed.own
        return Batch(keys, values, sizes, more, own, rows, host_rows, tables, distinct, bad, dtype, depositing)


def _on(keys: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    return {name: key if key.device == device else accelerator.to_device(key, device) for name, key in keys.items()}


def either(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    """Return the disjunction of two flags, of which ``None`` is False."""
    return one if other is None else other if one is None else one | other
