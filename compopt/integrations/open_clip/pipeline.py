"""The row of each sample: read where a shard is read, or where a data set is indexed, and handed to the loss."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from compopt.data import Indexed, KeyIndex, SampleIndex, ShardIndex, UidIndex, indexed_reader
from compopt.files import checksum

INDEX = "index"
POSITIONS = "positions"
READERS = {"tarfile_to_samples_nothrow", "tarfile_samples"}
# Stages after the reader that keep every entry of a sample, or are made to; by the function or class behind each.
KEEP = {"_shuffle", "_select", "_map_dict", "_batched", "LengthBucketer"}
EDITED = {"_decode", "_rename", "_to_tuple"}


def open_index(text: str | None) -> SampleIndex | None:
    """The index of streams: of a file of shards, of a file of identifiers, or ``keys:N``.

    Raises:
        ValueError, OSError: it is none of these.
    """
    if text is None or text == POSITIONS:
        return None
    if text.startswith("keys:"):
        if not text[5:].isdigit():
            raise ValueError(f"--index {text}: keys:N with N above the largest key, such as keys:20000")
        return KeyIndex(int(text[5:]))
    if not Path(text).is_file():
        raise FileNotFoundError(f"--index {text}: no such file")
    if Path(text).suffix == ".npy":
        return UidIndex(text)
    return ShardIndex.load(text)


def add_index(info: Any, index: SampleIndex | None, args: Any) -> tuple[int, str]:
    """Let the batches of open_clip's training data end with the rows of their samples.

    Args:
        info: open_clip's ``DataInfo``; its loader is edited before any worker starts.
        index: of a stream; map-style data have positions.
        args: open_clip's flags.

    Returns:
        Number of rows, and what must be equal for the same sample to have the same row.

    Raises:
        ValueError: no index for a stream, one for positions, or a pipeline that is not open_clip's.
    """
    loader = info.dataloader
    if isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset):
        if index is not None:
            raise ValueError("--index: rows of this data set are positions in it; leave it out, or say positions")
        info.dataloader = _with_positions(loader)
        n = len(loader.dataset)  # type: ignore[arg-type]  # it is map-style
        return n, _positions(args, n)
    if index is None:
        raise ValueError("--index: a stream of shards needs one: shards.json of a ShardIndex, keys:N, or uids.npy")
    inner = loader.pipeline[0] if getattr(loader, "pipeline", None) else loader
    stages = getattr(getattr(inner, "dataset", None), "pipeline", None)
    if not isinstance(stages, list):
        raise ValueError(f"expected a webdataset pipeline in open_clip's loader, found {type(inner).__name__}")
    check_shards(edit(stages, index), getattr(stages[0], "urls", []), args)
    return index.n, index.fingerprint


def check_shards(reader: indexed_reader, shards: list[str], args: Any) -> None:
    """Refuse shards that are missing or not those of the index; open_clip would skip the missing ones.

    Raises:
        ValueError, FileNotFoundError: see :meth:`~compopt.data.indexed_reader.check`.
    """
    if shards and args.rank == 0:
        reader.check(list(dict.fromkeys(shards)))


def edit(stages: list[Any], index: SampleIndex) -> indexed_reader:
    """Let a webdataset pipeline keep the index: from its reader on, through every stage after it.

    Returns:
        The reader, now with the index.

    Raises:
        ValueError: no reader, or a stage that is not known to keep what it is not told about.
    """
    names = [_name(stage) for stage in stages]
    at = next((place for place, name in enumerate(names) if name in READERS), None)
    unknown = names if at is None else [name for name in names[at + 1 :] if name not in KEEP | EDITED]
    if at is None or unknown:
        raise ValueError(
            f"open_clip's pipeline has stages that are not known here: {', '.join(unknown)}. Expected a reader "
            f"({', '.join(sorted(READERS))}), then any of {', '.join(sorted(KEEP | EDITED))}; an index would be lost"
        )
    reader = stages[at] = indexed_reader(stages[at], index)
    for stage, name in zip(stages[at + 1 :], names[at + 1 :], strict=True):
        if name == "_decode":
            stage.kw = {**stage.kw, "partial": True}  # what is no bytes is left as it is
        elif name == "_rename" and not stage.kw.get("keep", True):
            stage.kw = {**stage.kw, INDEX: INDEX}
        elif name == "_to_tuple":
            stage.args = (*(word for arg in stage.args for word in arg.split()), INDEX)
    return reader


def _name(stage: Any) -> str:
    """The function that a stage of webdataset stands for, or its class."""
    function = getattr(stage, "f", stage)
    return getattr(function, "__name__", type(function).__name__)


def _with_positions(loader: DataLoader[Any]) -> DataLoader[Any]:
    """The same loader over samples that end with their position."""
    same = DataLoader(
        Indexed(loader.dataset),
        batch_sampler=loader.batch_sampler,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=loader.generator,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
    )
    for name in ("num_samples", "num_batches"):
        setattr(same, name, getattr(loader, name))
    return same


def _positions(args: Any, n: int) -> str:
    """What positions mean: the lines of a file."""
    if args.train_data and Path(args.train_data).is_file():
        return f"positions in a file of {n} samples with crc32 {checksum(Path(args.train_data), crc32=True)}"
    return f"positions of {n} samples"


class IndexedLoader:
    """open_clip's batches as it expects them; their index is put aside, in the same order.

    Args:
        loader: its batches are dictionaries with ``index``, or end with it.
        aside: where each batch's index goes, a CPU tensor, before the batch is handed out.
    """

    def __init__(self, loader: Any, aside: deque[Tensor]) -> None:
        self._loader, self._aside = loader, aside

    def __iter__(self) -> Iterator[Any]:
        for batch in self._loader:
            if isinstance(batch, dict):
                rest: Any = {key: value for key, value in batch.items() if key != INDEX}
                index = batch[INDEX]
            else:
                *rest, index = batch
            self._aside.append(torch.as_tensor(index, device="cpu"))
            yield rest

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("_loader", "_aside"):
            raise AttributeError(name)
        return getattr(self._loader, name)
