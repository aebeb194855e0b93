"""Read tar shards with bad samples by the reader and the decoder of the CLIP recipes, and report what becomes of each.

    python -m benchmarks.bad_samples    # writes benchmarks/results/bad_samples.md; needs open_clip and webdataset

Every kind has a shard of its own: a good sample, the bad one, and another good sample, whose rows must not change.
"""

from __future__ import annotations

import io
import struct
import tarfile
import tempfile
import warnings
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.report import ROOT, environment, finish, table

Files = dict[str, bytes]  # name in the tar -> content
KEPT, LEFT_OUT, NO_SAMPLE = "kept", "left out and counted", "no sample: neither read nor in the index"
ABOUT = """Every kind has a shard with a good sample before and after the bad one. *Kept*: the sample is in the batch.
*Left out and counted*: its batch is shorter, and the metric `lost` counts it. *Rows of others*: whether both good
samples are in the batch with their own rows. A rotation by EXIF data is ignored, as in open_clip."""


def picture(mode: str = "RGB", size: tuple[int, int] = (24, 16), kind: str = "PNG", **options: Any) -> bytes:
    """Return an encoded picture of noise."""
    noise = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 4), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(noise, "RGBA").convert("RGB").convert(mode).save(file, kind, **options)
    return file.getvalue()


def png(width: int, height: int, *, damaged: bool = False) -> bytes:
    """Return a black PNG of one bit per pixel, whose pixels take no memory here."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        sum_ = zlib.crc32(kind + content) ^ damaged
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", sum_)

    packed = zlib.compressobj(9)
    row = bytes(1 + (width + 7) // 8)
    pixels = b"".join([*(packed.compress(row) for _ in range(height)), packed.flush()])
    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


def rotated() -> bytes:
    """Return a JPEG whose EXIF data asks for a rotation."""
    exif = Image.Exif()
    exif[0x0112] = 6
    return picture(kind="JPEG", exif=exif)


def of_key(key: str) -> Callable[[Files], Files]:
    """Return a function that renames a sample's files."""
    return lambda files: {f"{key}.{name.split('.', 1)[1]}": content for name, content in files.items()}


def with_picture(content: bytes, suffix: str = "jpg") -> Callable[[Files], Files]:
    return lambda files: {f"1.{suffix}": content, "1.txt": files["1.txt"]}


def with_caption(content: bytes | None) -> Callable[[Files], Files]:
    return lambda files: {"1.jpg": files["1.jpg"], **({} if content is None else {"1.txt": content})}


JPEG = picture(kind="JPEG", size=(240, 160))
KINDS: dict[str, Callable[[Files], Files]] = {
    "good": lambda files: files,
    "picture: truncated JPEG": with_picture(JPEG[: len(JPEG) // 2]),
    "picture: truncated PNG": with_picture(picture(size=(240, 160))[:20_000], "png"),
    "picture: random bytes": with_picture(np.random.default_rng(1).bytes(2000)),
    "picture: 0 bytes": with_picture(b""),
    "picture: an HTML page": with_picture(b"<html><body>404 Not Found</body></html>"),
    "picture: wrong checksums of a PNG": with_picture(png(16, 16, damaged=True), "png"),
    "picture: decompression bomb, 400 megapixels": with_picture(png(20_000, 20_000), "png"),
    "picture: CMYK": with_picture(picture("CMYK", kind="JPEG")),
    "picture: alpha": with_picture(picture("RGBA"), "png"),
    "picture: palette": with_picture(picture("P"), "png"),
    "picture: grey, 16 bits": with_picture(picture("I;16"), "png"),
    "picture: black and white": with_picture(picture("1"), "png"),
    "picture: rotated by EXIF": with_picture(rotated()),
    "picture: 1 x 1": with_picture(picture(size=(1, 1)), "png"),
    "picture: 1 x 3000": with_picture(picture(size=(1, 3000)), "png"),
    "picture: GIF, named jpg": with_picture(picture("P", kind="GIF")),
    "picture: WebP": with_picture(picture(kind="WEBP"), "webp"),
    "picture: suffix JPG": with_picture(JPEG, "JPG"),
    "picture: suffix tiff": with_picture(picture(kind="TIFF"), "tiff"),
    "picture: missing": lambda files: {"1.txt": files["1.txt"]},
    "caption: missing": with_caption(None),
    "caption: 0 bytes": with_caption(b""),
    "caption: spaces": with_caption(b" \n\t "),
    "caption: byte-order mark alone": with_caption(b"\xef\xbb\xbf"),
    "caption: byte-order mark and words": with_caption(b"\xef\xbb\xbfa red circle"),
    "caption: Latin-1": with_caption("\xe9t\xe9 \xe0 No\xebl".encode("latin-1")),
    "caption: 100,000 words": with_caption(b"word " * 100_000),
    "key: that of the sample before": of_key("0"),
    "key: with a dot": of_key("1.5"),
    "key: in a folder": of_key("folder/1"),
    "key: empty": of_key(""),
}


def write(path: Path, change: Callable[[Files], Files]) -> Path:
    """Write a shard with samples 0, 1 and 2, of which 1 is changed."""
    with tarfile.open(path, "w") as archive:
        for key in range(3):
            files = {f"{key}.jpg": picture(kind="JPEG"), f"{key}.txt": f"number {key}".encode()}
            for name, content in (change(files) if key == 1 else files).items():
                member = tarfile.TarInfo(name)
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    return path


def outcome(shard: Path, decode: Any) -> tuple[str, str]:
    """Return what becomes of the bad sample, and whether the good ones keep their rows."""
    import webdataset as wds

    from compopt.data import ShardIndex, indexed_reader

    index = ShardIndex.build([shard], progress=False)
    read = indexed_reader(wds.tarfile_to_samples(handler=wds.warn_and_continue), index)
    with warnings.catch_warnings():  # an error: a sample of the index that the reader does not give
        warnings.filterwarnings("error", message="shard .* gave")
        samples = list(read([{"url": str(shard)}]))
    *_, rows = decode(samples)
    good = {sample["index"]: int(sample["txt"].split()[1]) for sample in samples if b"number" in sample.get("txt", b"")}
    lost, decode.lost = decode.lost, 0
    last = index.n - 1
    what = NO_SAMPLE if last == 1 else LEFT_OUT if lost else KEPT
    others = good.get(0) == 0 and good.get(last) == 2 and {0, last} <= set(rows.tolist())
    return what, "own" if others else "differ"


def outcomes() -> Iterator[list[str]]:
    """Yield a row of the table for every kind."""
    import open_clip

    from recipes.clip_trainer import Decode

    open_clip.add_model_config(ROOT / "recipes" / "clip" / "tiny.json")
    _, transform, _ = open_clip.create_model_and_transforms("tiny")
    decode = Decode(transform, open_clip.get_tokenizer("tiny"))
    with tempfile.TemporaryDirectory() as folder:
        for number, (kind, change) in enumerate(KINDS.items()):
            yield [kind, *outcome(write(Path(folder) / f"{number}.tar", change), decode)]


def main() -> None:
    env, rows = environment(), list(outcomes())
    body = table(["sample", "what the recipes do", "rows of others"], rows, "l")
    finish("bad_samples", "Bad samples in tar shards", env, [ABOUT, body], rows)


if __name__ == "__main__":
    main()
