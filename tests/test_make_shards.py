"""Tar shards of the recipes: samples read back unchanged, reproducible bytes, and the sets for clip-benchmark."""

import errno
import io
import json

import numpy as np
import pytest
import webdataset as wds
from PIL import Image

from compopt.data import KeyIndex, ShardIndex, indexed_reader
from recipes import glyphs, make_shards, tars

SIZE, LIMIT = 40, 100


def write(out, *options):
    arguments = ["--out", str(out), "--no-progress", "--shard-size", str(SIZE), "--limit", str(LIMIT)]
    make_shards.main([*arguments, *options])
    return out


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    return write(tmp_path_factory.mktemp("shards") / "glyphs")


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def ink(png):
    image = Image.open(io.BytesIO(png))
    assert image.mode == "L"
    return 255 - np.asarray(image)


def read(urls, index):
    urls = [{"url": str(url)} for url in sorted(urls)]
    return list(indexed_reader(wds.tarfile_to_samples(), index)(iter(urls)))


@pytest.mark.parametrize("part", ["train", "test"])
def test_every_sample_reads_back_with_its_own_caption_and_picture(shards, part):
    data = glyphs.load()
    split = glyphs.split_pairs(data)
    pairs = set((split.train if part == "train" else split.held_out).tolist())
    characters = zip(data.codepoint.tolist(), data.face.tolist(), strict=True)
    place = {(code, glyphs.FACES[face]): k for k, (code, face) in enumerate(characters)}
    samples = read((shards / part).glob("*.tar"), ShardIndex.build(shards / part, progress=False))
    assert [sample["index"] for sample in samples] == list(range(LIMIT))
    by_key = KeyIndex(300)
    seen = []
    for sample in samples:
        about = json.loads(sample["json"])
        pair = place[ord(about["character"]), about["family"]]
        seen.append(pair)
        assert sample["txt"].decode() == about["caption"] == data.names[data.caption[pair]]
        assert np.array_equal(ink(sample["png"]), data.images[pair].numpy())
        assert about["key"] == sample["__key__"] and about["width"] == about["height"] == 32
        shard = int(sample["__url__"][-9:-4])
        assert by_key.index(sample) == 100 * shard + sample["index"] - SIZE * shard
    assert set(seen) <= pairs and len(set(seen)) == LIMIT and seen != sorted(seen)


def test_a_killed_run_is_continued(shards, tmp_path, monkeypatch, capsys):
    """The disk is full in the second shard; no partial shard is left, and the next run writes only the missing ones."""
    out, written, replace = tmp_path / "out", [], tars.os.replace

    def full(source, target):
        if target.name == "00001.tar":
            raise OSError(errno.ENOSPC, "No space left on device")
        written.append(target.name)
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(tars.os, "replace", full)
        with pytest.raises(SystemExit):
            write(out)
    assert "No space left" in capsys.readouterr().err
    assert [path.name for path in out.rglob("*") if "0000" in path.name and path.suffix != ".json"] == ["00000.tar"]
    before = (out / "train" / "00000.tar").stat().st_mtime_ns
    write(out)
    assert contents(out) == contents(shards) and (out / "train" / "00000.tar").stat().st_mtime_ns == before


# -- clip-benchmark ------------------------------------------------------------------------------------------------


def benchmark(folder):
    """Return the samples as clip-benchmark's build_wds_dataset reads them."""
    shards = int((folder / "test" / "nshards.txt").read_text())
    urls = [str(folder / "test" / f"{shard}.tar") for shard in range(shards)]
    decoder = wds.autodecode.ImageHandler("pil", extensions=["webp", "png", "jpg", "jpeg"])
    return list(wds.WebDataset(urls, nodesplitter=lambda urls: urls, shardshuffle=False).decode(decoder))


def test_the_classes_of_the_zeroshot_set(shards):
    folder = shards / "benchmark" / "zeroshot"
    names = (folder / "classnames.txt").read_text().splitlines()
    assert names == list(glyphs.SCRIPTS) and (folder / "dataset_type.txt").read_text().strip() == "classification"
    (template,) = (folder / "zeroshot_classification_templates.txt").read_text().splitlines()
    assert template.format(c=names[0]) == "LATIN"
    samples = benchmark(folder)
    assert len(samples) == LIMIT and len({sample["cls"] for sample in samples}) > 5
    assert all(names[sample["cls"]] and sample["png"].size == (32, 32) for sample in samples)


def test_a_caption_of_the_retrieval_set_has_one_picture(shards):
    data = glyphs.load()
    held_out = glyphs.split_pairs(data).held_out
    known = {(data.names[data.caption[k]], data.images[k].numpy().tobytes()) for k in held_out.tolist()}
    samples = benchmark(shards / "benchmark" / "retrieval")
    assert (shards / "benchmark" / "retrieval" / "dataset_type.txt").read_text().strip() == "retrieval"
    captions = [sample["txt"].splitlines() for sample in samples]
    assert len({caption for (caption,) in captions}) == LIMIT
    for sample, (caption,) in zip(samples, captions, strict=True):
        assert (caption, (255 - np.asarray(sample["png"].convert("L"))).tobytes()) in known
