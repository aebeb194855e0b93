"""Index of each sample, from the reader of a shard to the loss, and rows next to open_clip's checkpoints."""

from __future__ import annotations

import logging
import re
import shutil
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from compopt.checkpoint import load, save
from compopt.contrastive import ContrastiveEstimator
from compopt.data import Indexed, KeyIndex, SampleIndex, ShardIndex, UidIndex, indexed_reader
from compopt.files import checksum

INDEX = "index"
POSITIONS = "positions"
READERS = {"tarfile_to_samples_nothrow", "tarfile_samples"}
# Names of functions or classes of stages after the reader that keep every entry of a sample, or are edited to do so.
KEEP = {"_shuffle", "_select", "_map_dict", "_batched", "LengthBucketer"}
EDITED = {"_decode", "_rename", "_to_tuple"}
_log = logging.getLogger(__name__)


def open_index(text: str | None) -> SampleIndex | None:
    """Return the index of a stream, from a file of shards, a file of identifiers, or ``keys:N``."""
    if text is None or text == POSITIONS:
        return None
    if text.startswith("keys:"):
        if not text[5:].isdigit():
            raise ValueError(f"--index {text}: keys:N with N above the largest key, such as keys:20000")
        return KeyIndex(int(text[5:]))
    if not Path(text).is_file():
        raise FileNotFoundError(f"--index {text}: no such file")
    return UidIndex(text) if Path(text).suffix == ".npy" else ShardIndex.load(text)


def add_index(info: Any, index: SampleIndex | None, args: Any) -> tuple[int, str]:
    """Append the rows of the samples to the batches of open_clip's training data, before any worker starts.

    Returns the number of rows, and a fingerprint of their assignment to samples. Raises for a stream without an index,
    positions with an index, an unknown pipeline, and shards that are missing or not those of the index.
    """
    loader = info.dataloader
    if isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset):
        if index is not None:
            raise ValueError("--index: rows of this data set are positions in it; leave it out, or say positions")
        # DataLoader refuses to set dataset, since the sampler depends on its length; the length is the same here
        vars(loader)["dataset"] = Indexed(loader.dataset)
        n = len(loader.dataset)  # type: ignore[arg-type]  # it is map-style
        if args.train_data and Path(args.train_data).is_file():
            return n, f"positions in a file of {n} samples with crc32 {checksum(Path(args.train_data), crc32=True)}"
        return n, f"positions of {n} samples"
    if index is None:
        raise ValueError("--index: a stream of shards needs one: shards.json of a ShardIndex, keys:N, or uids.npy")
    inner = loader.pipeline[0] if getattr(loader, "pipeline", None) else loader
    stages = getattr(getattr(inner, "dataset", None), "pipeline", None)
    if not isinstance(stages, list):
        raise ValueError(f"expected a webdataset pipeline in open_clip's loader, found {type(inner).__name__}")
    reader, shards = edit(stages, index), getattr(stages[0], "urls", [])
    if shards and args.rank == 0:
        reader.check(list(dict.fromkeys(shards)))
    return index.n, index.fingerprint


def edit(stages: list[Any], index: SampleIndex) -> indexed_reader:
    """Edit a webdataset pipeline in place to add and keep an index; return its new reader."""
    # a stage of webdataset wraps a function, .f, or is an object of its own class
    functions = [getattr(stage, "f", stage) for stage in stages]
    names = [getattr(function, "__name__", type(function).__name__) for function in functions]
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
            stage.kw = {**stage.kw, "partial": True}  # leaves values other than bytes unchanged
        elif name == "_rename" and not stage.kw.get("keep", True):
            stage.kw = {**stage.kw, INDEX: INDEX}
        elif name == "_to_tuple":
            stage.args = (*(word for arg in stage.args for word in arg.split()), INDEX)
    return reader


class IndexedLoader:
    """Loader that moves the index of each batch to ``aside`` before open_clip reads the batch."""

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
        return getattr(self._loader, name)


class RowCheckpoints:
    """Rows next to open_clip's checkpoints: ``epoch_K.compopt/`` for ``epoch_K.pt``.

    The rows are not inside that file, since one rank writes it. Their suffix is not ``.pt``, since open_clip resumes
    from the latest file with this suffix.
    An estimator without state saves nothing, and can resume from any checkpoint.
    """

    def __init__(self, est: ContrastiveEstimator, args: Any) -> None:
        self.est, self.args = est, args
        self.stateful = est.n is not None or any(own["state"] for own in est.state_dict()["parts"].values())
        self.saves = bool(self.stateful and args.logs and args.logs.lower() != "none")

    def save(self, epoch: int) -> None:
        """Save on every rank, if open_clip writes a checkpoint after epoch ``epoch``."""
        args = self.args
        regular = args.save_frequency > 0 and epoch % args.save_frequency == 0
        if self.saves and (regular or epoch == args.epochs or args.save_most_recent):
            save(self.est, Path(args.checkpoint_path) / f"epoch_{epoch}.compopt", keep=1)

    def load(self, epoch: int) -> None:
        """Load on every rank, after open_clip has loaded its own file; ``epoch`` is the number of completed epochs."""
        if not self.stateful:
            return
        source = str(self.args.resume)
        if "://" in source:
            raise ValueError(f"--resume {source}: rows are read from a file system; copy the checkpoint and its rows")
        folder = Path(source).absolute().parent / f"epoch_{epoch}.compopt"
        instead = f"to begin with its weights and new rows, use --pretrained {source} instead of --resume"
        if not folder.is_dir():
            raise ValueError(f"--resume {source}: no rows beside it, {folder} is missing; {instead}")
        before = [dict(group) for group in self.est.sample_groups]
        try:
            load(self.est, folder)
        except (ValueError, FileNotFoundError) as error:
            raise ValueError(f"--resume {source}: its rows do not fit this run. {error}; {instead}") from error
        for old, new in zip(before, self.est.sample_groups, strict=False):
            changed = {key: (value, new[key]) for key, value in old.items() if new.get(key, value) != value}
            if changed:
                _log.warning(f"Options of the estimator are those of the checkpoint (asked, found): {changed}")

    def prune(self, epoch: int) -> None:
        """Remove rows without a file of open_clip; ``epoch`` is the number of completed epochs."""
        if not self.saves or self.args.rank != 0:
            return
        checkpoints = Path(self.args.checkpoint_path)
        # --save-most-recent overwrites one file, which belongs to the rows of the epoch that was completed last
        latest = any((checkpoints / name).exists() for name in ("epoch_latest.pt", "epoch_latest"))
        for folder in checkpoints.glob("epoch_*.compopt"):
            match = re.fullmatch(r"epoch_(\d+)\.compopt", folder.name)
            own = (checkpoints / f"{folder.stem}{ending}" for ending in (".pt", ""))
            if match and not any(path.exists() for path in own) and not (latest and int(match[1]) == epoch):
                shutil.rmtree(folder)
