"""Write glyphs or icons as tar shards for trainers that read webdataset, and as test sets for clip-benchmark.

    python -m recipes.make_shards --out data/glyphs
    python -m recipes.make_shards --data icons --out data/icons

The shards have img2dataset's names, keys, members and statistics, and open_clip's sizes.json.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import PIL
import torch
from torch import Tensor

from recipes import glyphs, icons, tars
from recipes.exports import Export, GlyphExport, IconExport

FORMAT = 1  # increase when the same arguments give other files
MANIFEST = "made_from.json"
TEMPLATE = "{c}"  # captions consist of the name alone, and so do the texts of classes


DATA: dict[str, Callable[[argparse.Namespace], Export]] = {
    "glyphs": lambda args: GlyphExport(glyphs.load(args.cache_dir)),
    "icons": lambda args: IconExport(icons.load(args.cache_dir, args.icons, progress=args.progress)),
}


def positive(text: str) -> int:
    """Parse a number of at least 1."""
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    root = argparse.ArgumentParser(
        prog="python -m recipes.make_shards",
        description="Write tar shards of image-text pairs in img2dataset's layout (train/, test/, and validation/ "
        "where there is one), and test sets for clip-benchmark (benchmark/zeroshot/, benchmark/retrieval/, and "
        "benchmark/validation/ to choose settings by).",
    )
    icons.add_data(root, tuple(DATA))
    root.add_argument("--out", type=Path, metavar="DIR", required=True, help="folder to write; new, or begun before")
    root.add_argument("--shard-size", type=positive, metavar="N", default=1000, help="samples per shard (1000)")
    root.add_argument("--limit", type=positive, metavar="N", help="write at most this many pairs of each part")
    root.add_argument("--seed", type=int, metavar="N", default=0, help="order of the samples (0)")
    root.add_argument("--cache-dir", type=Path, metavar="DIR", help="drawn data sets; default $COMPOPT_CACHE or .cache")
    root.add_argument("--progress", action=argparse.BooleanOptionalAction, default=True, help="show progress bars")
    return root


def claim(folder: Path, made_from: dict[str, Any] | None = None) -> None:
    """Create the folder and record what it is made from, or check that an earlier run recorded the same."""
    manifest = folder / MANIFEST
    if manifest.exists():
        former = json.loads(manifest.read_text())
        if others := [name for name, value in (made_from or {}).items() if former.get(name) != value]:
            told = ", ".join(f"{name}={former.get(name)!r} (now {made_from[name]!r})" for name in others)
            raise ValueError(f"--out {folder} was made from {told}; choose another folder, or remove this one")
    elif folder.exists() and any(folder.iterdir()):
        raise ValueError(f"--out {folder} is not empty, and holds no shards of this recipe; choose another folder")
    elif made_from is not None:
        folder.mkdir(parents=True, exist_ok=True)
        tars.write_json(manifest, made_from)


def shuffled(pairs: Tensor, seed: int, limit: int | None) -> list[int]:
    """Return all or ``limit`` pairs in random order, so that every shard is a mixture."""
    order = torch.randperm(len(pairs), generator=torch.Generator().manual_seed(seed))
    return pairs[order[:limit]].tolist()


def write_pairs(data: Export, args: argparse.Namespace) -> None:
    """Write the parts as ``KEY.png``, ``KEY.txt``, ``KEY.json``."""
    for part, positions in data.parts.items():
        pairs = shuffled(positions, args.seed, args.limit)

        def files(number: int, key: str, pairs: list[int] = pairs) -> dict[str, bytes]:
            pair, (height, width) = pairs[number], data.images.shape[1:]
            about = {"key": key, "status": "success", "caption": data.caption(pair), "width": width, "height": height}
            text = json.dumps(about | data.facts(pair), indent=1)
            return {"png": data.png(pair), "txt": data.caption(pair).encode(), "json": text.encode()}

        tars.write_img2dataset(args.out / part, len(pairs), args.shard_size, files, args.progress)


def write_zeroshot(data: Export, args: argparse.Namespace) -> None:
    """Write the classification test as ``KEY.png``, ``KEY.cls``."""
    folder = args.out / "benchmark" / "zeroshot"
    chosen = shuffled(torch.arange(len(data.classified)), args.seed, args.limit)

    def files(number: int, key: str) -> dict[str, bytes]:
        place = chosen[number]
        return {"png": data.png(int(data.classified[place])), "cls": str(int(data.label[place])).encode()}

    tars.write_benchmark(folder / "test", len(chosen), args.shard_size, files, args.progress)
    tars.write_text(folder / "classnames.txt", "".join(f"{name}\n" for name in data.classes))
    tars.write_text(folder / "zeroshot_classification_templates.txt", f"{TEMPLATE}\n")
    tars.write_text(folder / "dataset_type.txt", "classification\n")


def write_retrieval(data: Export, args: argparse.Namespace) -> None:
    """Write the retrieval test, and one of the validation pairs if there are any, as ``KEY.png``, ``KEY.txt``.

    The text file has one caption per line.
    """
    for part, name in {"test": "retrieval", "validation": "validation"}.items():
        if part not in data.parts:
            continue
        folder, (pairs, captions) = args.out / "benchmark" / name, data.one_per_caption(part)
        chosen = shuffled(torch.arange(len(pairs)), args.seed, args.limit)

        def files(number: int, key: str, pairs=pairs, captions=captions, chosen=chosen) -> dict[str, bytes]:
            place = chosen[number]
            return {"png": data.png(int(pairs[place])), "txt": "\n".join(captions[place]).encode()}

        tars.write_benchmark(folder / "test", len(chosen), args.shard_size, files, args.progress)
        tars.write_text(folder / "dataset_type.txt", "retrieval\n")


def main(argv: Sequence[str] | None = None) -> None:
    """Write the shards and test sets that the arguments specify."""
    root = parser()
    args = root.parse_args(argv)
    chosen = {name: getattr(args, name) for name in ("data", "shard_size", "limit", "seed")}
    try:
        claim(args.out)  # before icons are downloaded
        data = icons.data_or_exit(root, DATA[args.data], args)
        claim(args.out, {"format": FORMAT, **chosen, "fingerprint": data.fingerprint, "pillow": PIL.__version__})
        for write in (write_pairs, write_zeroshot, write_retrieval):
            write(data, args)
    except ValueError as error:
        root.error(str(error))
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        reason = os.strerror(error.errno)
        root.error(f"--out {args.out}: {reason}; a pair takes some 4 kB; make room and run again: it continues")
    for part, positions in data.parts.items():
        count = min(len(positions), args.limit or len(positions))
        print(f"wrote {args.out / part}: {count:,} pairs in {-(-count // args.shard_size):,} shards")
    print(f"wrote {args.out / 'benchmark'}: zeroshot with {len(data.classes)} classes, and retrieval")


if __name__ == "__main__":
    main()
