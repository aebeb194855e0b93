"""A minimal open_clip model, minimal pairs in tar shards, and the results of a run with them."""

import io
import json
import tarfile

import numpy as np
import torch
from PIL import Image

import compopt

MODEL = {
    "embed_dim": 16,
    "vision_cfg": {"image_size": 16, "layers": 1, "width": 32, "head_width": 16, "patch_size": 8},
    "text_cfg": {"context_length": 8, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 1},
}
SIZES, N = [9, 13, 7, 11], 40
WORDS = "red green blue round square large small old new left right near far open closed deep".split()


def write_model(folder, name="micro", **changes):
    """Write the configuration's JSON file and return its path."""
    path = folder / f"{name}.json"
    path.write_text(json.dumps({**MODEL, **changes}))
    return path


def caption_of(row):
    return " ".join(WORDS[(row >> shift) % 16] for shift in (0, 4, 8))


def image_of(row):
    return np.random.default_rng(row).integers(0, 256, (16, 16, 3), dtype=np.uint8)


def write_pairs(folder, sizes, corrupt=(), captionless=(), first=0):
    """Write shards of pairs whose row can be determined from picture and caption; keys are rows."""
    folder.mkdir(parents=True, exist_ok=True)
    row = first
    for shard, size in enumerate(sizes):
        with tarfile.open(folder / f"{shard:05d}.tar", "w") as archive:
            for key in range(row, row + size):
                picture = io.BytesIO()
                Image.fromarray(image_of(key)).save(picture, "png")
                files = {
                    "png": b"broken" if key in corrupt else picture.getvalue(),
                    "txt": b" " if key in captionless else caption_of(key).encode(),
                    "json": json.dumps({"key": key}).encode(),
                }
                for suffix, content in files.items():
                    member = tarfile.TarInfo(f"{key:09d}.{suffix}")
                    member.size = len(content)
                    archive.addfile(member, io.BytesIO(content))
        row += size
    return folder


def arguments(given, output, *more, estimator="sogclr"):
    shards, model = given
    small = ["--batch-size", "4", "--epochs", "2", "--shuffle", "5", "--workers", "0", "--quiet"]
    return [
        *("--shards", str(shards), "--model", str(model), "--estimator", estimator, "--output", str(output)),
        *small,
        *more,
    ]


def weights(output, epoch=2):
    return torch.load(output / f"epoch_{epoch}.pt", weights_only=True)["state_dict"]


def rows(output, epoch=2):
    est = compopt.SogCLREstimator(N)
    compopt.load(est, output / f"epoch_{epoch}.compopt")
    return est.read(torch.arange(N))


def same(one, other):
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []
