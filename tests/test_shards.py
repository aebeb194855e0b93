"""Rows of samples in tar shards: every sample gets its own row, for any reader and any order."""

import bz2
import gzip
import json
import lzma
import pickle

import numpy as np
import pytest
import torch

import compopt
from compopt.data import KeyIndex, ShardIndex, UidIndex, indexed_reader
from tests.shards import Shuffled, read_tar, write_shard, write_shards

SIZES = [5, 3, 7, 4, 6, 2]


def expected(key):
    """Return the row of a key of `write_shards`, as computed from the key."""
    shard, row = int(key[:5]), int(key[5:])
    return sum(SIZES[:shard]) + row


@pytest.fixture
def shards(tmp_path):
    return write_shards(tmp_path / "data", SIZES)


def epoch(dataset, workers):
    loader = torch.utils.data.DataLoader(dataset, batch_size=None, num_workers=workers)
    return [(int(index), key) for index, key in loader]


@pytest.mark.parametrize("ranks, workers", [(1, 0), (3, 2)])
def test_every_sample_once_with_its_own_row(shards, ranks, workers):
    stage = indexed_reader(read_tar, ShardIndex.build(shards))
    seen = [pair for rank in range(ranks) for pair in epoch(Shuffled(stage, shards, rank, ranks), workers)]
    assert sorted(index for index, _ in seen) == list(range(sum(SIZES)))
    assert all(index == expected(key) for index, key in seen)


def test_resampling_and_skipped_samples_keep_the_rows(tmp_path):
    lost = {"000020001", "000000000"}
    urls = write_shards(tmp_path / "data", SIZES, corrupt=lost, captionless={"000020003"})
    stage = indexed_reader(read_tar, ShardIndex.build(urls))
    seen = [p for rank in range(3) for p in epoch(Shuffled(stage, urls, rank, 3, replacement=True), 0)]
    assert len(seen) > sum(SIZES)  # with replacement every rank and worker draws as many shards as there are
    assert all(index == expected(key) for index, key in seen)
    assert not {key for _, key in seen} & (lost | {"000020003"})


# the index ----------------------------------------------------------------------------------------


def test_saved_and_loaded_on_another_machine(shards, tmp_path):
    index = ShardIndex.build(shards)
    index.save(tmp_path / "shards.json")
    again = ShardIndex.load(tmp_path / "shards.json")
    assert (again.n, again.fingerprint, len(again)) == (27, index.fingerprint, 6)
    for url in (
        "/other/00001.tar",
        "s3://bucket/00001.tar",
        "pipe:aws s3 cp s3://bucket/00001.tar -",
        "h://x/00001.tar?a=b",
    ):
        assert again.index({"__url__": url}, 2) == 7


def test_growing_data_keeps_all_rows(shards, tmp_path):
    old = ShardIndex.build(shards[2:])
    more = ShardIndex.build(shards, extend=old)
    assert more.n == sum(SIZES) and old.n == sum(SIZES[2:])
    for shard in shards[2:]:
        assert more.index({"__url__": str(shard)}, 0) == old.index({"__url__": str(shard)}, 0)
    assert [more.index({"__url__": str(shard)}, 0) for shard in shards[:2]] == [19, 24]
    write_shard(shards[3], ["000030000"])
    with pytest.raises(ValueError, match=r"00003.tar has 1 samples and \d+ bytes, and 4 and \d+ in the index"):
        ShardIndex.build(shards, extend=old)


def test_shards_of_another_folder_are_not_taken_for_older_ones(tmp_path):
    old = ShardIndex.build(write_shards(tmp_path / "train", [2, 3]))
    more = write_shards(tmp_path / "extra" / "2024", [2, 3])
    more[0].write_bytes(more[0].read_bytes() + bytes(10_240))  # their sizes are those of other samples
    with pytest.raises(ValueError, match=r"00000.tar has 2 samples and .* needs another name"):
        ShardIndex.build(more, extend=old)
    for folder in ("extra", "."):
        with pytest.raises(ValueError, match=r"2024/00000.tar cannot be told from 00000.tar of the index.*root="):
            ShardIndex.build(more, extend=old, root=tmp_path / folder)
    deep = ShardIndex.build(more, root=tmp_path)
    with pytest.raises(ValueError, match=r"2024/00000.tar cannot be told from extra/2024/00000.tar"):
        ShardIndex.build(more, extend=deep, root=tmp_path / "extra")
    assert ShardIndex.build(tmp_path / "train", extend=deep, root=tmp_path).n == 10


def test_shards_of_several_folders(tmp_path):
    first, second = (write_shards(tmp_path / name, [2, 3]) for name in "ab")
    index = ShardIndex.build([*first, *second])
    assert index.index({"__url__": "/moved/b/00001.tar"}, 0) == 7
    old = ShardIndex.build(first, root=tmp_path)
    assert ShardIndex.build(second, extend=old, root=tmp_path).index({"__url__": "b/00000.tar"}, 1) == 6
    with pytest.raises(ValueError, match="root="):
        ShardIndex.build([*first, *first])


@pytest.mark.parametrize("kind", ["sizes", "stats", "wids", "energon"])
def test_sizes_that_a_writer_left_are_believed(shards, kind):
    folder, sizes = shards[0].parent, {shard.name: 10 * size for shard, size in zip(shards, SIZES, strict=True)}
    listed = [{"url": f"s3://b/{name}", "nsamples": size} for name, size in sizes.items()]
    files = {
        "sizes": {"sizes.json": sizes},
        "wids": {"index.json": {"wids_version": 1, "shardlist": listed}},
        "energon": {".nv-meta/.info.json": {"shard_counts": sizes}},
        "stats": {f"{name[:5]}_stats.json": {"count": n + 3, "successes": n} for name, n in sizes.items()},
    }[kind]
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(content))
    assert ShardIndex.build(shards, progress=False).n == 10 * sum(SIZES)


# errors -------------------------------------------------------------------------------------------


def test_a_shard_that_differs_from_its_manifest_is_named(shards):
    stage = indexed_reader(read_tar, ShardIndex.build(shards))
    write_shard(shards[1], [f"00001{row:04d}" for row in range(4)])
    with pytest.raises(ValueError, match=r"00001.tar has a sample at position 3 \(key '000010003'\), and 3"):
        list(stage([{"url": str(shards[1])}]))
    write_shard(shards[2], ["000020000", "000020001"])
    with pytest.warns(UserWarning, match=r"00002.tar gave 2 of 7 samples; by now 5 samples of 1 shards") as said:
        list(stage([{"url": str(shards[2])}] * 2))
    assert len(said) == 1


def test_bad_shards_are_named_before_training(shards, tmp_path):
    with pytest.raises(FileNotFoundError, match="no shards"):
        ShardIndex.build(tmp_path)
    with pytest.raises(ValueError, match=r"s3://bucket/000.tar is a URL, .*ShardIndex.load"):
        ShardIndex.build("s3://bucket/{000..003}.tar")
    with pytest.raises(FileNotFoundError, match="missing.tar"):
        ShardIndex.build([shards[0], tmp_path / "data" / "missing.tar"])
    for content, said in ((shards[4].read_bytes()[:2000], "00004.tar"), (b"", "00004.tar is empty: 0 bytes")):
        shards[4].write_bytes(content)
        with pytest.raises(ValueError, match=said):
            ShardIndex.build(shards)
    write_shard(shards[4], [])
    with pytest.raises(ValueError, match="00004.tar holds no sample"):
        ShardIndex.build(shards)
    (tmp_path / "data" / "sizes.json").write_text("{")
    with pytest.raises(ValueError, match="sizes.json cannot be read"):
        ShardIndex.build(shards)


def test_other_files_of_the_folder_are_no_manifests(shards):
    (shards[0].parent / "captions.json").write_text('{"caption": 1}\n{"caption": 2}\n')
    assert ShardIndex.build(shards).n == sum(SIZES)


def test_no_shard_is_left_out_in_silence(tmp_path):
    (one,) = write_shards(tmp_path / "run[1]", [2])
    (two,) = write_shards(tmp_path / "b", [3])
    assert ShardIndex.build([one, two]).n == 5
    with pytest.raises(FileNotFoundError, match=r"no shards at .*typo"):
        ShardIndex.build([str(two), f"{tmp_path}/typo/*.tar"])


CUTS = {  # content of a damaged shard of 48 samples, and what is said
    "at the end of a sample": (lambda whole: whole[: 512 * 60], "10 samples in 30720 bytes, and then 0 bytes of zeros"),
    "at the end of a file": (lambda whole: whole[:29696], "10 samples in 29696 bytes, and then 0 bytes of zeros"),
    "within a header": (lambda whole: whole[:30000], "10 samples in 29696 bytes, and then other content"),
    "within a file": (lambda whole: whole[:30300], "unexpected end of data"),
    "in the end blocks": (lambda whole: whole[: 512 * 289], "48 samples in 147456 bytes, and then 512 bytes of zeros"),
    "zeros in the middle": (lambda whole: whole[:30720] + bytes(1024) + whole[31744:], "10 samples .*other content"),
    "a damaged header": (lambda whole: whole[:30720] + b"x" * 512 + whole[31232:], "10 samples .*other content"),
    "compressed, cut": (lambda whole: gzip.compress(whole)[:-99], "Compressed file ended before"),
    "compressed after a cut": (lambda whole: gzip.compress(whole[:30720]), "10 samples in 30720 bytes"),
    "no tar": (lambda whole: b"words" * 999, "file could not be opened"),
}


@pytest.mark.parametrize("cut", CUTS)
def test_a_shard_that_was_cut_is_refused(cut, tmp_path):
    shard = write_shard(tmp_path / "0.tar", [f"{key:04d}" for key in range(48)])
    change, said = CUTS[cut]
    shard.write_bytes(change(shard.read_bytes()))
    with pytest.raises(ValueError, match=rf"0.tar is no complete tar file: {said}"):
        ShardIndex.build([shard], progress=False)


@pytest.mark.parametrize("compress", [bytes, gzip.compress, bz2.compress, lzma.compress])
@pytest.mark.parametrize("zeros", [0, 512, 1024, 9216])
def test_complete_shards_with_and_without_end_blocks(compress, zeros, tmp_path):
    """Shards may be compressed, also under the suffix .tar; with end_blocks=False the zeros may be missing."""
    shard = write_shard(tmp_path / "0.tar", [f"{key:04d}" for key in range(7)])
    shard.write_bytes(compress(shard.read_bytes()[: 7 * 3 * 1024] + bytes(zeros)))
    assert ShardIndex.build([shard], end_blocks=False).n == 7
    if zeros < 1024:
        with pytest.raises(ValueError, match=f"and then {zeros} bytes of zeros instead of at least 1024; .*end_blocks"):
            ShardIndex.build([shard])
    else:
        assert ShardIndex.build([shard]).n == 7


def test_shards_that_are_not_those_of_the_index(shards, tmp_path):
    """Detect renamed, replaced, truncated and missing shards without reading them, also if a writer left the sizes."""
    (shards[0].parent / "sizes.json").write_text(json.dumps({s.name: n for s, n in zip(shards, SIZES, strict=True)}))
    ShardIndex.build(shards[:4]).save(tmp_path / "shards.json")
    index = ShardIndex.load(tmp_path / "shards.json")
    names = [str(shard) for shard in shards]
    index.check([*names[:4], "s3://elsewhere/00001.tar"])
    shards[1].write_bytes(shards[1].read_bytes()[:2000])
    with pytest.raises(ValueError, match=r"00001.tar has 2000 bytes, and \d+ when the index was built: it was repl"):
        index.check(names[:4])
    with pytest.raises(ValueError, match=r"00001.tar has \d samples and 2000 bytes, and \d and \d+ in the index"):
        ShardIndex.build(shards, extend=index)
    ShardIndex({shard.name: 4 for shard in shards}).check(names)  # this index has no sizes of files
    shards[1].rename(shards[1].with_name("new.tar"))
    with pytest.raises(FileNotFoundError, match="1 of 4 shards are missing or empty, such as .*00001.tar"):
        index.check(names[:4])
    with pytest.raises(ValueError, match="new.tar is not among the 4 of the index. If it was renamed, give it its old"):
        index.check([str(shards[1].with_name("new.tar"))])
    with pytest.raises(ValueError, match="extend=index"):
        index.index({"__url__": "00077.tar"}, 0)
    with pytest.raises(ValueError, match="__url__"):
        index.index({}, 0)


def test_changed_files_are_refused(shards, tmp_path):
    path = tmp_path / "shards.json"
    ShardIndex.build(shards).save(path)
    saved = json.loads(path.read_text())
    assert saved["bytes"]["00000.tar"] == shards[0].stat().st_size
    assert ShardIndex.load(path).n == sum(SIZES)
    saved["shards"][0][2] += 1
    for content, said in ((json.dumps(saved), "was changed"), ("[]", "no index of shards")):
        path.write_text(content)
        with pytest.raises(ValueError, match=said):
            ShardIndex.load(path)


def test_a_look_before_training(shards):
    """check() tests names and files, for keys also the first sample and the last shard, which has the largest key."""
    names, largest = [str(shard) for shard in shards], 50_001
    for index in (ShardIndex.build(shards), KeyIndex(largest + 1)):
        indexed_reader(read_tar, index).check(names)
        with pytest.raises(FileNotFoundError, match="1 of 7 shards are missing or empty"):
            indexed_reader(read_tar, index).check([*names[:1], names[0].replace("data", "gone"), *names[1:]])
    with pytest.raises(ValueError, match="'000050001' of 00005.tar is outside"):
        indexed_reader(read_tar, KeyIndex(largest)).check(names)
    write_shard(shards[0], ["cat"])
    with pytest.raises(ValueError, match="'cat' of 00000.tar is no integer"):
        indexed_reader(read_tar, KeyIndex(largest + 1)).check(names)
    with pytest.raises(TypeError, match="read must be"):
        indexed_reader(None, KeyIndex(3))
    with pytest.raises(TypeError, match="index must be"):
        indexed_reader(read_tar, {"a": 1})


# keys ---------------------------------------------------------------------------------------------


def test_integer_keys_need_no_manifest(shards):
    stage = indexed_reader(read_tar, KeyIndex(60_000))
    assert [s["index"] for s in stage([{"url": str(shards[2])}])] == [20_000 + row for row in range(7)]
    index = KeyIndex(n=10, first=100)
    assert index.index({"__key__": "deep/folder/000109"}) == 9
    for key in ("99", "110"):
        with pytest.raises(ValueError, match=r"outside 100 .. 109.*not of samples"):
            index.index({"__key__": key, "__url__": "a/1.tar"})
    for key in ("cat", "1e3", "-5", "٣", None):
        with pytest.raises(ValueError, match="no integer"):
            index.index({"__key__": key})
    assert KeyIndex(10).fingerprint != KeyIndex(10, first=1).fingerprint


def test_identifiers_in_a_sorted_file(tmp_path):
    random = np.random.default_rng(0)
    values = sorted(int.from_bytes(random.bytes(16), "big") for _ in range(5_000))
    rows = np.array([(uid >> 64, uid & (2**64 - 1)) for uid in values], dtype="u8,u8")
    files = {"uids": rows, "fewer": rows[:-1], "backwards": rows[::-1], "twice": np.repeat(rows[:10], 2)}
    for name, content in {**files, "numbers": np.arange(5)}.items():
        np.save(tmp_path / f"{name}.npy", content)
    index = pickle.loads(pickle.dumps(UidIndex(tmp_path / "uids.npy")))
    for row in (0, 1, 2_500, 4_999):
        uid = f"{values[row]:032x}"
        for sample in (
            {"__key__": f"{uid}-17"},
            *({"json": about} for about in (f'{{"uid": "{uid}"}}'.encode(), {"uid": uid.upper()})),
        ):
            assert index.index({"__key__": "000012", **sample}) == row
    for sample, said in (
        ({"__key__": f"{values[7] + 1:032x}"}, "is not in"),
        ({"__key__": "000012", "json": b"{}"}, "has no identifier"),
        ({"__key__": "000012", "json": b"{damaged"}, "'000012' .* has no identifier"),
    ):
        with pytest.raises(ValueError, match=said):
            index.index(sample)
    for name, said in (("backwards", "not sorted"), ("twice", "not sorted"), ("numbers", "pairs of 64-bit integers")):
        with pytest.raises(ValueError, match=said):
            UidIndex(tmp_path / f"{name}.npy")
    assert index.fingerprint != UidIndex(tmp_path / "fewer.npy").fingerprint


# checkpoints --------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [lambda: compopt.SogCLREstimator(n=100), lambda: compopt.MemoryEstimator(4, 8)])
def test_rows_of_other_data_are_refused(tmp_path, make):
    est, other = make(), make()
    untold = compopt.save(est, tmp_path / "untold")
    est.data_fingerprint = KeyIndex(100).fingerprint
    path = compopt.save(est, tmp_path / "told")
    compopt.load(other, path)  # it has no fingerprint
    other.data_fingerprint = est.data_fingerprint
    compopt.load(other, path)
    other.data_fingerprint = KeyIndex(100, first=1).fingerprint
    with pytest.raises(ValueError, match=r"keys 0..99.*keys 1..100"):
        compopt.load(other, path)
    compopt.load(other, untold)  # like checkpoints of versions without fingerprints


def test_local_paths_may_contain_characters_of_queries(tmp_path):
    urls = write_shards(tmp_path / "run#1?", SIZES)
    index = ShardIndex.build(urls)
    assert index.entry(str(urls[1]))[1:] == (SIZES[0], SIZES[1])
    web = ShardIndex({"https://host/00000.tar": 3})
    assert web.entry("https://host/00000.tar?token=1#part")[1:] == (0, 3)
