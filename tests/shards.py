"""Tar shards for tests: every sample contains its own key."""

import io
import json
import tarfile
from pathlib import Path

import torch


def write_shard(path: Path, keys, corrupt=(), captionless=()) -> Path:
    """Write one tar; the caption of sample ``k`` has its key, its image is broken if ``k`` is among ``corrupt``."""
    with tarfile.open(path, "w") as archive:
        for key in keys:
            files = {"jpg": "broken" if key in corrupt else f"image of {key}", "json": json.dumps({"key": key})}
            if key not in captionless:
                files["txt"] = f"caption of {key}"
            for suffix, content in files.items():
                content = content.encode()
                member = tarfile.TarInfo(f"{key}.{suffix}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    return path


def write_shards(folder: Path, sizes, **options) -> list[Path]:
    """Write shards ``00000.tar``, ... of these sizes, with img2dataset's keys: shard and row in one number."""
    folder.mkdir(exist_ok=True, parents=True)
    return [
        write_shard(folder / f"{shard:05d}.tar", [f"{shard:05d}{row:04d}" for row in range(size)], **options)
        for shard, size in enumerate(sizes)
    ]


def read_tar(sources):
    """Read tars as webdataset does, without any package: consecutive members of one key are one sample."""
    for source in sources:
        sample = {}
        with tarfile.open(source["url"]) as archive:
            for member in archive:
                key, suffix = member.name.split(".", 1)
                if sample and sample["__key__"] != key:
                    yield sample
                    sample = {}
                sample |= {"__key__": key, "__url__": source["url"], suffix: archive.extractfile(member).read()}
        if sample:
            yield sample


class Shuffled(torch.utils.data.IterableDataset):
    """Stages of a pipeline after reading: split by rank and worker, shuffle, drop samples that cannot be decoded."""

    def __init__(self, stage, urls, rank=0, ranks=1, replacement=False, seed=0):
        self.stage, self.urls, self.rank, self.ranks = stage, [str(url) for url in urls], rank, ranks
        self.replacement, self.seed = replacement, seed

    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        random = torch.Generator().manual_seed(self.seed + (100 * self.rank + worker if self.replacement else 0))
        count = len(self.urls)
        if self.replacement:
            order = torch.randint(count, (count,), generator=random).tolist()
        else:
            order = torch.randperm(count, generator=random).tolist()[self.rank :: self.ranks][worker::workers]
        samples = list(self.stage({"url": self.urls[k]} for k in order))
        for k in torch.randperm(len(samples), generator=random).tolist():
            if samples[k]["jpg"] != b"broken" and "txt" in samples[k]:
                yield samples[k]["index"], json.loads(samples[k]["json"])["key"]
