"""Reader of the global batch of a call and its committed rows, on one or several ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from compopt import accelerator
from compopt.batch import COUNT, Batch, Rows
from compopt.checks.context import warn
from compopt.checks.inputs import INDEX_REMEDY, Survey, check_range, survey
from compopt.distributed.handshake import KEYS, Agreement, Handshake, fingerprint
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
        for name in ROW_KEYS:
            found = known.get(name)
            if found is not None and found.low < found.high:
                return None
        return self._one_sample(keys, known)

    def _one_sample(self, keys: Mapping[str, Tensor], known: Mapping[str, Survey | None]) -> Tensor:
        """Refuse a batch that is not known to have two distinct samples, or return a flag on the device."""
        given = [name for name in ROW_KEYS if name in keys]
        if len(keys["index"]) < 2:
            raise ValueError(
                f"the batch has {len(keys['index'])} samples on all ranks together; it needs at least two: if it is "
                f"the last of an epoch, give its DataLoader drop_last=True"
            )
        hidden = [keys[name] for name in given if known[name] is None]
        if hidden:
            flag = torch.stack([(key == key[0]).all() for key in hidden]).all()
            self.watch(flag.to(torch.int32), _refuse_batch)
            return flag
        values = " and ".join(f"{name} is {int(keys[name][0])}" for name in given)
        raise ValueError(f"{values} for the whole batch; a batch must have at least two distinct samples")

    def check_equal(self, values: Tensor) -> Tensor:
        """Return a flag on the device: values ``(B, k)`` that all samples share differ; refuse them later."""
        flag = ((values - values[:1]).abs() > SAME * values[:1].abs()).any()
        self.watch(flag.to(torch.int32), _refuse_different)
        return flag

    def watch_features(self, agree: Callable[[Callable[[], Any]], Any], *features: Tensor) -> None:
        """Warn about bad rows of prepared features ``(k, b, d)``.

        If the warning is an error on one rank, ``agree`` raises on the others, which call this method, too.
        """
        with torch.no_grad():
            bad = torch.cat([z[..., 0].flatten() for z in features]).isnan().sum()  # every entry of a bad row is NaN
        if bad.device.type == "cpu":
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


class Located(NamedTuple):
    """Keys of a batch with their row numbers.

    Attributes:
        keys: the keys on the device of the features.
        known: facts that are known on the host.
        rows: row numbers, ``(B, R)``, on the device, clamped to the range; a copy if the commit needs them, since the
            caller may overwrite the keys.
        host_rows: the same on the CPU; ``None`` if the copy would wait for a device.
        bad: 0-d flag on the device for row numbers out of range; ``None`` if the host knows that there are none.
    """

    keys: dict[str, Tensor]
    known: dict[str, Survey | None]
    rows: Tensor
    host_rows: Tensor | None
    bad: Tensor | None


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
        self._sized = [groups for groups in self._groups.values() if count(groups) is not None]
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
        sizes = [count(groups) for groups in self._sized]
        if sizes and sizes.count(sizes[0]) < len(sizes):
            raise ValueError(
                f"n differs: the parts of this estimator have {' and '.join(map(str, sizes))} samples; its "
                f"add_sample_group appends rows in all of them"
            )
        return sizes[0] if sizes else None

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
        self._device = like.device
        if self.several:
            return self._read_all(keys, values, depositing, facts, least, more)
        self.ranks.check_alone()
        self.async_checks.poll()
        at = self._locate(keys, like.device)
        fetch = None if self.prefetcher is None else self.prefetcher.find(at.host_rows)
        blocks = self._fetch_own(at, fetch, depositing) if self.tables else {}
        alone = Agreement(dict(keys), [len(like)], slice(0, len(like)), [more])
        return self._batch(alone, at, blocks, values, like, depositing, least)

    def _read_all(
        self,
        keys: Mapping[str, Tensor],
        values: Mapping[str, Tensor],
        depositing: bool,
        facts: Mapping[str, int],
        least: int,
        more: int,
    ) -> Batch:
        """Return the batch of several ranks, see :meth:`read`. Collective."""
        like = next(iter(values.values()))
        with self.handshake.guard():
            self.ranks.check_alive()
            self.async_checks.poll()
            # the exchange needs the keys on the host: wait for an index on a device
            keys = {name: key.cpu() for name, key in keys.items()}
            mine = self._locate(keys, like.device)
            fetch = None if self.prefetcher is None else self.prefetcher.find(mine.host_rows)
            own = self._fetch_own(mine, fetch, depositing)
        facts = {"width": math.prod(like.shape[1:]), "dtype": like.dtype.itemsize, **facts}
        shapes = {name: f"{value.dtype} {[*value.shape[1:]]}" for name, value in values.items()}
        facts["values"] = fingerprint(shapes)
        agreed = self.handshake.exchange(keys, facts, 0 if fetch is None else fetch.number, more)
        at = self._locate(agreed.keys, like.device)
        blocks, everyone = self._gather(agreed, at.host_rows, fetch, own, values)
        return self._batch(agreed, at, blocks, everyone, like, depositing, least)

    def read_committed(self, index: Tensor, like: Tensor, values: Mapping[str, Tensor] | None = None) -> Batch:
        """Return the committed rows of ``index`` for this process alone; on shards collective, with an index per rank.

        The result is on the device of ``like``, and has its dtype if that is wider than the dtype of the rows.
        """
        at = self.agree(lambda: self._locate({"index": index}, like.device))
        blocks = self._fetch_own(at, None, False)
        if self.sharded:
            indices = self.ranks.gather_objects(index.cpu())  # ranks may pass different indices
            found = self._fetch_shards(torch.cat(indices), like.device, {})
            lengths = [len(other) for other in indices]
            blocks |= {name: block.split(lengths)[self.ranks.rank] for name, block in found.items()}
        alone = Agreement({"index": index}, [len(index)], slice(0, len(index)))
        return self._batch(alone, at, blocks, values or {}, like, False)

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

    def _locate(self, keys: Mapping[str, Tensor], device: torch.device) -> Located:
        """Return the keys on the device of the features, and their row numbers.

        An index on the CPU raises if it is out of range; one on a device raises at a later call.
        """
        there, known = _on(keys, device), {name: survey(key) for name, key in keys.items()}
        bad: Tensor | None = None
        n = self.n
        for name in self.row_keys if n is not None else ():
            flag = check_range(name, keys[name], n, known[name]) if name in keys else None
            bad = bad if flag is None else or_flags(bad, flag.to(device))
        rows = self._stack(there)
        if bad is not None:
            self.async_checks.watch(bad.to(torch.int32), self._refuse_index)
            rows = rows.clamp(0, (n or 1) - 1)
        host_rows = rows if bad is None and device.type == "cpu" else self._on_host(keys)
        return Located(there, known, rows, host_rows, bad)

    def _stack(self, keys: Mapping[str, Tensor]) -> Tensor:
        """Return row numbers ``(b, R)``, see :class:`Located`."""
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

    def _fetch_own(self, at: Located, fetch: Fetch | None, depositing: bool) -> dict[str, Tensor]:
        """Return the rows of this rank's samples by table, one line per sample; without shards, which need all."""
        rows, host_rows = at.rows, at.host_rows
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
            block = block if block.device == rows.device else accelerator.to_device(block, rows.device)
            own[name] = block.view(len(rows), rows.shape[1] * block.shape[1])
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
        at: Located,
        blocks: Mapping[str, Tensor],
        values: Mapping[str, Tensor],
        like: Tensor,
        depositing: bool,
        least: int = 1,
    ) -> Batch:
        dtype, tables = working_dtype(like.dtype, self.dtype), {}
        for name, table in self.tables.items():
            block = blocks[name].view(-1, 2 * table.layout.words)
            columns = table.unpack(at.rows, block, dtype)
            tables[name] = Rows(columns, columns.pop(COUNT), block)
        if self._initial:
            self._fill_unseen(tables, at.rows, dtype)
        bad = at.bad if least < 2 else or_flags(at.bad, self.async_checks.two_samples(at.keys, at.known))
        index, on_device = at.known["index"], like.device.type != "cpu"
        distinct = len(at.keys) == 1 and index is not None and index.distinct
        constant = on_device and any(found is not None and found.low == found.high for found in at.known.values())
        sizes, more, own, rows = agreed.sizes, agreed.more, agreed.own, (at.rows, at.host_rows, tables)
        return Batch(at.keys, dict(values), sizes, more, own, *rows, distinct, bad, dtype, depositing, constant)

    def _fill_unseen(self, tables: Mapping[str, Rows], rows: Tensor, dtype: torch.dtype) -> None:
        """Give samples that were never visited the value of a hyper-parameter, in columns that have one."""
        for name, column, key in self._initial:
            value, read = Hyper(self._groups[name], rows, dtype)(key), tables[name]
            if isinstance(value, Tensor):
                read.columns[column] = torch.where(read.unseen, value, read.columns[column])
            else:
                read.columns[column] = read.columns[column].masked_fill(read.unseen, value)


def _on(keys: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    return {name: key if key.device == device else accelerator.to_device(key, device) for name, key in keys.items()}


def or_flags(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    """Return the disjunction of two flags, of which ``None`` is False."""
    return one if other is None else other if one is None else one | other
