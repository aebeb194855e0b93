"""Epochs over tar shards that can be interrupted after any batch and resumed."""

from __future__ import annotations

import hashlib
import os
import warnings
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, islice
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset, get_worker_info

from compopt import checks
from compopt.checks import values
from compopt.data.shards import ShardIndex, shard_list
from compopt.rng import fold

Sample = dict[str, Any]
Integers = npt.NDArray[np.int64]
MOST_WORKERS = 1 << 12  # of a rank, in a state: the division of the rest takes time for each


class Spans:
    """Ordered positions as intervals ``(k, 2)``, since thousands of workers may leave millions of positions."""

    def __init__(self, intervals: Integers) -> None:
        intervals = intervals[intervals[:, 0] < intervals[:, 1]]
        # join adjacent intervals
        apart, edge = intervals[1:, 0] != intervals[:-1, 1], np.ones(min(1, len(intervals)), dtype=bool)
        self._starts, stops = intervals[np.append(edge, apart), 0], intervals[np.append(apart, edge), 1]
        self._ends = np.cumsum(stops - self._starts)
        self._begins = self._ends - (stops - self._starts)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def cut(self, start: int, stop: int) -> Integers:
        """Return the intervals ``(k, 2)`` of the positions number ``start`` to ``stop - 1``."""
        first, last = np.searchsorted(self._ends, start, side="right"), np.searchsorted(self._begins, stop)
        begins, starts = self._begins[first:last], self._starts[first:last]
        low, high = np.maximum(start, begins), np.minimum(stop, self._ends[first:last])
        return np.stack([starts + low - begins, starts + high - begins], axis=1)


@dataclass(frozen=True)
class Lanes:
    """Division of an epoch between ranks and workers.

    A *lane* is the share of one worker of one rank: consecutive positions in blocks of ``shuffle``, each of which is
    shuffled separately. Every rank has the same number of batches. The lanes of a rank yield the batches in turn, so
    that the numbers of batches of two lanes differ by at most one.
    """

    ranks: int
    workers: int
    batch_size: int
    shuffle: int

    def batches(self, total: int) -> int:
        """Return the number of batches per rank; samples that do not fill a batch on every rank are omitted."""
        return total // (self.ranks * self.batch_size)

    def turns(self, worker: int, batches: int) -> int:
        """Return how many of a rank's first ``batches`` batches the worker yields."""
        return max(0, -(-(batches - worker) // self.workers))

    def lane(self, total: int, rank: int, worker: int) -> tuple[int, int]:
        """Return the first position and the number of samples of a lane."""
        batches = self.batches(total)
        before = rank * batches + sum(self.turns(earlier, batches) for earlier in range(worker))
        return before * self.batch_size, self.turns(worker, batches) * self.batch_size

    def rest(self, spans: Spans, done: int, key: tuple[int, ...]) -> Spans:
        """Return the positions that remain after every rank's first ``done`` batches."""
        left = []
        for lane in range(self.ranks * self.workers):
            rank, worker = divmod(lane, self.workers)
            start, size = self.lane(len(spans), rank, worker)
            block, given = divmod(self.turns(worker, done) * self.batch_size, self.shuffle)
            first, last = start + block * self.shuffle, start + size
            if given:  # in a partly read block, the later samples of its order remain
                order = block_order((*key, lane, block), min(self.shuffle, last - first))
                held = np.concatenate([np.arange(*span) for span in spans.cut(first, first + len(order))])
                positions = held[sorted(order[given:])]
                left.append(np.stack([positions, positions + 1], axis=1))
                first += len(order)
            left.append(spans.cut(first, last))
        left.append(spans.cut(self.ranks * self.batches(len(spans)) * self.batch_size, len(spans)))
        return Spans(np.concatenate(left))


def block_order(key: tuple[int, ...], size: int) -> list[int]:
    """Return the order of the samples of a block, a function of its key."""
    return torch.randperm(size, generator=torch.Generator("cpu").manual_seed(fold(*key)), device="cpu").tolist()


class ShardBatches(IterableDataset[Any]):
    """Batches of samples from tar shards, each sample once per epoch, resumable after any batch.

    The order of the shards in an epoch is drawn from ``(seed, epoch)``. Their samples are divided equally between all
    workers of all ranks, if necessary within a shard. Each worker reads its share in blocks of ``shuffle`` samples and
    shuffles each block. The position in an epoch is thus a number of batches: no buffer has to be saved, and a resumed
    run continues reading at the current block.

    A batch is a list of samples as returned by ``read``, shorter if samples could not be read, or the result of
    ``decode``. If no sample of a batch remains, the worker repeats the previous batch or, if there is none, the
    next one: all ranks have the same number of batches, and a resumed run yields the same batches.

    Args:
        shards: a folder, a pattern or a list, see :func:`~compopt.data.shard_list`; must be the same in a resumed run.
        read: a reader stage, such as :class:`~compopt.data.indexed_reader` around webdataset's
            ``tarfile_to_samples(handler=...)``.
        batch_size: samples per batch of one rank.
        sizes: index with the number of samples of each shard.
        num_workers: number of workers of the ``DataLoader`` that reads this data set.
        shuffle: number of samples that a worker holds in memory and shuffles; 1 keeps the order of the shards.
        seed: seed of all orders.
        repeats: number of times that an epoch reads each of ``shards`` (up-sampling); ``None``: once. The row of a
            sample does not depend on it.
        replacement: draw the shards of an epoch with replacement, with probabilities proportional to ``repeats``; an
            epoch still has ``n`` samples. A shard may then occur several times or not at all, and a sample twice in a
            batch, with the same row.
        keep: function of a sample (``sample["index"]``, ``sample["__key__"]``) that returns False to omit the sample,
            as if it could not be read: batches become shorter, and positions do not change. It may be replaced between
            epochs, see the attribute. The state does not include it: a resumed run needs the same function.
        decode: function from a list of samples to a batch, or to ``None`` if none of the samples is usable. A function
            that never returns ``None`` may be passed as the loader's ``collate_fn`` instead.
        rank, ranks: rank of this process, and number of ranks; by default those of ``torch.distributed``.

    Attributes:
        n: samples per epoch: those of all shards, each counted ``repeats`` times.
        epoch: see :meth:`set_epoch`.
        keep: the argument; a new function takes effect with the next iteration of the loader.
        done: batches of this epoch that this rank has trained on, see :meth:`advance`.

    State: seed, epoch and numbers of batches; see :meth:`state_dict`. A worker holds up to ``shuffle`` samples.
    Communicates nothing: the order is a function of seed, epoch, ranks and workers.

    Raises:
        ValueError: a shard occurs twice, has no known size, or is not the file for which ``sizes`` was built; there are
            too few samples for one batch on every rank; ``repeats`` has another length than ``shards``. While reading:
            a shard has more samples than ``sizes`` says.
        FileNotFoundError: there is no shard; a local shard is missing or empty.
        TypeError: an argument that must be an integer is not.
        RuntimeError: while reading: the number of workers differs from ``num_workers``; workers are persistent; no
            sample of a worker's share remains.

    Warns:
        UserWarning: no sample of a batch remains; at the 1st, 2nd, 4th, 8th, ... such batch, with their number.

    Example:
        >>> import compopt
        >>> from recipes.shard_batches import ShardBatches
        >>> def read(sources):  # webdataset.tarfile_to_samples() for real shards
        ...     for source in sources:
        ...         yield from ({"__url__": source["url"], "__key__": key} for key in "abc")
        >>> sizes = compopt.data.ShardIndex({"s3://0.tar": 3, "s3://1.tar": 3})
        >>> stage = compopt.data.indexed_reader(read, sizes)
        >>> batches = ShardBatches(["s3://0.tar", "s3://1.tar"], stage, 2, sizes=sizes, shuffle=4)
        >>> first = next(iter(batches))
        >>> batches.advance()
        >>> rest = [batch for batch in batches]  # a resumed run
        >>> sorted(sample["index"] for batch in [first, *rest] for sample in batch)
        [0, 1, 2, 3, 4, 5]
    """

    def __init__(
        self,
        shards: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
        read: Callable[[Iterable[Any]], Iterable[Sample]],
        batch_size: int,
        *,
        sizes: ShardIndex,
        num_workers: int = 0,
        shuffle: int = 2000,
        seed: int = 0,
        repeats: Sequence[int] | None = None,
        replacement: bool = False,
        keep: Callable[[Sample], bool] | None = None,
        decode: Callable[[list[Sample]], Any] | None = None,
        rank: int | None = None,
        ranks: int | None = None,
    ) -> None:
        self.shards = shard_list(shards)
        if not self.shards:
            raise FileNotFoundError(f"no shards at {shards}")
        self.read, self.keep, self.decode, self.seed = read, keep, decode, checks.seed(seed)
        listed = [(name, count) for name, _, count in map(sizes.entry, self.shards)]
        if len(dict(listed)) != len(listed):
            raise ValueError("a shard occurs twice among shards; each is read once per epoch")
        sizes.check(self.shards)
        if repeats is not None:
            if len(repeats) != len(self.shards):
                raise ValueError(f"repeats has {len(repeats)} numbers for {len(self.shards)} shards; give one for each")
            times = [place for place, k in enumerate(repeats) for _ in range(checks.positive_int("repeats", k))]
            self.shards, listed = [self.shards[place] for place in times], [listed[place] for place in times]
        self._counts = [count for _, count in listed]
        checks.flag("replacement", replacement)
        self._replacement = replacement
        order = ("drawn", listed) if replacement else listed
        self._fingerprint = hashlib.sha256(repr(order).encode()).hexdigest()[:32]
        grouped = dist.is_available() and dist.is_initialized()
        self.rank = rank if rank is not None else dist.get_rank() if grouped else 0
        ranks = ranks if ranks is not None else dist.get_world_size() if grouped else 1
        self.layout = Lanes(
            checks.positive_int("ranks", ranks),
            max(1, checks.non_negative_int("num_workers", num_workers)),
            checks.positive_int("batch_size", batch_size),
            checks.positive_int("shuffle", shuffle),
        )
        if not 0 <= self.rank < ranks:
            raise ValueError(f"rank must be between 0 and {ranks - 1}, got {self.rank}")
        self.n = sum(self._counts)
        if not self.layout.batches(self.n):
            raise ValueError(
                f"{self.n} samples are too few for a batch of {batch_size} on each of {ranks} ranks; lower batch_size"
            )
        self._iterated = False  # set in the worker's own copy
        self._empty = 0  # number of batches without samples
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """Begin epoch ``epoch`` >= 0, with an order of its own. Call it on every rank, with the same number."""
        self.epoch, self.done = checks.non_negative_int("epoch", epoch), 0
        self._earlier: list[tuple[Lanes, int]] = []  # former layouts of this epoch, and batches per rank read in them
        self._spans = Spans(np.array([[0, self.n]]))

    def advance(self, batches: int = 1) -> None:
        """Record that this rank has trained on ``batches`` >= 1 more; raise a ``ValueError`` if fewer are left."""
        if checks.positive_int("batches", batches) > len(self):
            raise ValueError(f"advance({batches}): {len(self)} batches of this epoch are left")
        self.done += batches

    def __len__(self) -> int:
        """Return the number of remaining batches of this epoch on every rank."""
        return self.layout.batches(len(self._spans)) - self.done

    @property
    def samples_seen(self) -> int:
        """Number of samples of this epoch that all ranks together have trained on."""
        stages = [*self._earlier, (self.layout, self.done)]
        return sum(layout.ranks * layout.batch_size * done for layout, done in stages)

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the epoch as numbers and strings, the same on every rank."""
        stages = [(layout, done) for layout, done in [*self._earlier, (self.layout, self.done)] if done]
        return {
            "shards": self._fingerprint,
            "seed": self.seed,
            "epoch": self.epoch,
            "read": [{**asdict(layout), "done": done} for layout, done in stages],
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue at the position of a state.

        With the same ranks, workers, ``batch_size`` and ``shuffle`` the batches are those of an uninterrupted run.
        Otherwise the rest of the epoch is divided again: the order differs, but no sample occurs twice, and only the
        samples of the last incomplete batch are omitted.

        Raises:
            TypeError, ValueError: the state is for other shards or another seed, or is not a state of this class.
                Nothing is changed in these cases.
        """
        values.mapping("state_dict", state_dict)
        mine = self.state_dict()
        if not all(values.equal(mine[name], state_dict.get(name)) for name in ("shards", "seed")):
            raise ValueError(
                "the position is of other shards or another seed, where it means nothing; give the same shards, of the "
                "same sizes and in the same order, the same repeats and replacement, and the same seed, or begin with "
                "the next epoch: set_epoch"
            )
        values.entries("state_dict", state_dict, mine)
        epoch = values.integer("epoch", state_dict["epoch"], 0, values.INT64_MAX)
        earlier, spans = [], Spans(np.array([[0, self.n]]))
        if not isinstance(state_dict["read"], list | tuple):
            raise TypeError(f"read of the checkpoint must be a list, got {type(state_dict['read']).__name__}")
        for stage, options in enumerate(state_dict["read"]):
            values.entries(f"read[{stage}]", options, (*asdict(self.layout), "done"))
            layout = Lanes(**{name: checks.positive_int(name, options[name]) for name in asdict(self.layout)})
            values.integer("workers", layout.workers, 1, MOST_WORKERS)
            done = checks.positive_int("done", options["done"])
            if done > layout.batches(len(spans)):
                raise ValueError(f"the state says {done} batches, and there were {layout.batches(len(spans))}")
            earlier.append((layout, done))
            if (layout, stage + 1) != (self.layout, len(state_dict["read"])):
                spans = layout.rest(spans, done, (self.seed, epoch, stage))
        self.set_epoch(epoch)
        if earlier and earlier[-1][0] == self.layout:
            self.done = earlier.pop()[1]
        self._earlier, self._spans = earlier, spans

    def __iter__(self) -> Iterator[Any]:
        info, layout = get_worker_info(), self.layout
        if info is not None and info.num_workers != layout.workers:
            raise RuntimeError(
                f"the DataLoader has num_workers={info.num_workers}, and ShardBatches was told {layout.workers}; give "
                f"both the same number"
            )
        if info is not None and self._iterated:
            raise RuntimeError(
                "workers that persist see neither set_epoch nor the position; leave persistent_workers off"
            )
        self._iterated = info is not None
        # a loader reads from worker 0 first, so that worker 0 gets the lane of the next batch
        workers = range(layout.workers) if info is None else [(self.done + info.id) % layout.workers]
        done, left = self.done, len(self)  # advance() may be called during the iteration
        lanes = [self._lane(worker, done) for worker in workers]
        if info is not None:
            yield from lanes[0]
            return
        for number in range(done, done + left):
            yield next(lanes[number % layout.workers])

    def _lane(self, worker: int, done: int) -> Iterator[Any]:
        """Iterate over a worker's remaining batches after ``done`` batches of this rank."""
        turn = self.layout.turns(worker, done)
        last, waiting = None, 0  # number of batches to yield as soon as one has samples
        for batch in self._batches(worker, turn):
            if batch is None:
                self._empty += 1
                if not self._empty & (self._empty - 1):  # warn at the 1st, 2nd, 4th, 8th, ...
                    warnings.warn(
                        f"nothing of a batch of {self.layout.batch_size} could be read, kept or decoded (rank "
                        f"{self.rank}, epoch {self.epoch}; {self._empty} such batches by now); another batch is given "
                        f"twice",
                        stacklevel=2,
                    )
                if not waiting and last is None:
                    last = self._before(worker, turn)  # resumed here: the interrupted run had read that batch
            last, waiting = last if batch is None else batch, waiting + 1
            while waiting and last is not None:
                yield last
                waiting -= 1
        if waiting:
            raise RuntimeError(
                f"nothing could be read, kept or decoded of the share of worker {worker} (rank {self.rank}, epoch "
                f"{self.epoch}); the reader's warnings name the damaged shards"
            )

    def _batches(self, worker: int, turn: int) -> Iterator[Any]:
        """Iterate over a worker's batches on this rank from a turn on; ``None`` for a batch without samples."""
        layout = self.layout
        start, size = layout.lane(len(self._spans), self.rank, worker)
        block, given = divmod(turn * layout.batch_size, layout.shuffle)
        first = start + block * layout.shuffle
        samples = self._read(self._spans.cut(first, start + size).tolist())
        shuffled = islice(self._shuffled(samples, self.rank * layout.workers + worker, block), given, None)
        while places := list(islice(shuffled, layout.batch_size)):
            batch = [sample for sample in places if sample is not None and (self.keep is None or self.keep(sample))]
            yield (self.decode(batch) if self.decode else batch) if batch else None

    def _before(self, worker: int, turn: int) -> Any:
        """Return the last non-empty batch before a turn, which an uninterrupted run would repeat."""
        earlier = (next(self._batches(worker, number)) for number in reversed(range(turn)))
        return next((batch for batch in earlier if batch is not None), None)

    def _shuffled(self, samples: Iterator[Sample | None], lane: int, block: int) -> Iterator[Sample | None]:
        """Iterate over the samples of a lane from a given block on, each block shuffled."""
        key = (self.seed, self.epoch, len(self._earlier), lane)
        held = list(islice(samples, self.layout.shuffle))
        while held:
            following: list[Sample | None] = []
            for place in block_order((*key, block), len(held)):
                following += islice(samples, 1)  # read the next block meanwhile, to avoid a pause between blocks
                sample, held[place] = held[place], None
                yield sample
            held, block = following, block + 1

    def _read(self, spans: Iterable[list[int]]) -> Iterator[Sample | None]:
        """Iterate over the samples at given positions of the epoch; ``None`` for samples that cannot be read."""
        opened, at = -1, 0  # the open shard, and the position in it
        stream: Iterator[Sample] = iter(())
        for shard, start, stop in self._places(spans):
            if shard != opened or start < at:  # the same shard may be drawn twice in succession
                opened, at, stream = shard, 0, iter(self.read(iter([{"url": self.shards[shard]}])))
            missing = stop - start
            for sample in islice(stream, start - at, stop - at):
                missing -= 1
                yield sample
            yield from [None] * missing
            at = stop
            if at == self._counts[shard] and not missing and next(stream, None) is not None:
                raise ValueError(
                    f"shard {self.shards[shard]} has more samples than the {at} of sizes; it was replaced since: "
                    f"append it under another name"
                )

    def _order(self) -> list[int]:
        """Return the shards of the epoch in order, with at least ``n`` samples in total."""
        if not self._replacement:
            return block_order((self.seed, self.epoch), len(self.shards))
        generator = torch.Generator("cpu").manual_seed(fold(self.seed, self.epoch))
        drawn: list[int] = []
        while sum(self._counts[shard] for shard in drawn) < self.n:
            drawn += torch.randint(len(self.shards), (len(self.shards),), generator=generator, device="cpu").tolist()
        return drawn

    def _places(self, spans: Iterable[list[int]]) -> Iterator[tuple[int, int, int]]:
        """Yield ``(shard, first, stop)`` for positions of the epoch, in the order of its shards."""
        order = self._order()
        ends = list(accumulate(self._counts[shard] for shard in order))
        for start, stop in spans:
            at = bisect_right(ends, start)
            while start < stop:
                begin = ends[at] - self._counts[order[at]]
                end = min(stop, ends[at])
                yield order[at], start - begin, end - begin
                start, at = end, at + 1
