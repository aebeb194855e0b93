"""The row of each sample is that of the picture which the model receives."""

import io
import tarfile

import open_clip
import pytest
import torch
import webdataset

import compopt
from benchmarks import bad_samples
from benchmarks.report import stored
from compopt.integrations.open_clip import rows
from tests.open_clip import tiny


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tars")
    pattern = tiny.write_tars(folder)
    compopt.data.ShardIndex.build(pattern, progress=False).save(folder / "shards.json")
    return pattern, folder / "shards.json"


def assert_own_rows(watch, samples):
    assert watch.seen
    for shown, index in watch.seen:
        assert index.device.type == "cpu" and index.dtype == torch.int64
        assert shown.tolist() == index.tolist()
    visited = torch.cat([index.unique() for _, index in watch.seen])  # a sample that repeats in a batch is one visit
    assert watch.rows()["count"].tolist() == visited.bincount(minlength=tiny.N).tolist()
    assert sum(len(index) for _, index in watch.seen) == samples


@pytest.mark.parametrize(("workers", "resampled", "keys"), [(0, False, True), (2, False, False), (2, True, False)])
def test_shards(tmp_path, shards, workers, resampled, keys):
    """Test workers, shuffling, epochs, and shards drawn with replacement."""
    pattern, index = shards[0], "keys:20" if keys else shards[1]
    given = {"train_num_samples": 16, "workers": workers, "dataset_resampled": resampled, "batch_size": 4}
    theirs = tiny.arguments(tmp_path, train_data=pattern, epochs=2, **given)
    watch = tiny.train(["--estimator", "sogclr", "--index", str(index)], theirs)
    assert_own_rows(watch, 32)
    assert watch.est.data_fingerprint == rows.open_index(str(index)).fingerprint
    assert watch.est.n == (20 if keys else 16)
    assert resampled or (watch.rows()["count"] == 2).all()


def change(shard, files):
    """Replace the contents of some files in a tar."""
    new = io.BytesIO()
    with tarfile.open(shard) as old, tarfile.open(fileobj=new, mode="w") as archive:
        for member in old:
            content = files.get(member.name, old.extractfile(member).read())
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    shard.write_bytes(new.getvalue())


@pytest.mark.parametrize("keys", [False, True])
def test_corrupt_pictures_and_empty_captions(tmp_path, keys):
    """open_clip skips a picture with a warning, and from version 4 an empty caption; other rows do not change."""
    pattern = tiny.write_tars(tmp_path)
    change(tmp_path / "00001.tar", {"000000005.png": b"broken", "000000006.txt": b""})
    compopt.data.ShardIndex.build(pattern, progress=False).save(tmp_path / "shards.json")
    index = "keys:16" if keys else str(tmp_path / "shards.json")
    watch = tiny.train(
        ["--estimator", "sogclr", "--index", index], tiny.arguments(tmp_path, train_data=pattern, train_num_samples=128)
    )
    assert_own_rows(watch, 128)
    skipped = [[5], [6]] if int(open_clip.__version__.split(".")[0]) >= 4 else [[5]]
    assert (watch.rows()["count"] == 0).nonzero().tolist() == skipped


def cut(shard):
    shard.write_bytes(shard.read_bytes()[:3000])


@pytest.mark.parametrize(
    "match, damage, index, changed",
    [
        ("1 of 4 shards are missing or empty, .*00001.tar", lambda shard: shard.unlink(), "shards", {}),
        ("1 of 4 shards are missing or empty, .*00001.tar", lambda shard: shard.write_bytes(b""), "keys:16", {}),
        ("00001.tar has 3000 bytes, and .* it was replaced", cut, "shards", {}),
        ("00000.tar has .* bytes, and", lambda shard: tiny.write_tars(shard.parent, n=4000), "shards", {}),
        ("shards.json: no such file", lambda shard: (shard.parent / "shards.json").unlink(), "shards", {}),
        ("'000000015' of 00003.tar is outside 0 .. 14; give KeyIndex the number of keys", None, "keys:15", {}),
        ("'cat' of 00000.tar is no integer", lambda shard: rename(shard.with_name("00000.tar"), "cat"), "keys:16", {}),
        ("number of shards must be >= total workers", None, "shards", {"workers": 5}),
    ],
)
@pytest.mark.parametrize("resampled", [False, True])
def test_what_can_be_known_is_refused_before_training(tmp_path, match, damage, index, changed, resampled):
    """open_clip itself would skip files that it cannot read."""
    if resampled and changed:
        pytest.skip("every worker draws from all shards")
    pattern, watch = tiny.write_tars(tmp_path), []
    compopt.data.ShardIndex.build(pattern, progress=False).save(tmp_path / "shards.json")
    if damage is not None:
        damage(tmp_path / "00001.tar")
    ours = ["--estimator", "sogclr", "--index", index if ":" in index else str(tmp_path / "shards.json")]
    theirs = tiny.arguments(tmp_path, train_data=pattern, train_num_samples=16, dataset_resampled=resampled, **changed)
    with pytest.raises((ValueError, FileNotFoundError, AssertionError), match=match):
        tiny.train(ours, theirs, prepare=lambda *_: watch.append(1))
    assert not watch


def rename(shard, key):
    """Change the first sample's key."""
    with tarfile.open(shard) as old:
        files = [(member.name.split("."), old.extractfile(member).read()) for member in old]
    with webdataset.TarWriter(str(shard)) as new:
        for name in sorted({name for (name, _), _ in files}):
            new.write({"__key__": key if name == "000000000" else name, **{s: c for (k, s), c in files if k == name}})


@pytest.mark.parametrize("workers", [0, 2])
def test_positions(tmp_path, data, workers):
    """Rows on the device and on the host are equal."""
    theirs = {"train_data": data, "workers": workers, "epochs": 2}
    watch = tiny.train(["--estimator", "sogclr", "--offload", "cpu"], tiny.arguments(tmp_path, **theirs))
    assert_own_rows(watch, 32)
    other = tiny.train(["--estimator", "sogclr"], tiny.arguments(tmp_path, "other", **theirs))
    tiny.assert_alike(watch.weights, other.weights, 0)
    tiny.assert_alike(watch.rows(), other.rows(), 0)


def test_a_method_without_rows_takes_an_index_if_it_is_given(tmp_path, shards):
    """Samples that repeat in a batch are then not negatives of themselves."""
    theirs = tiny.arguments(tmp_path, train_data=shards[0], train_num_samples=16)
    watch = tiny.train(["--estimator", "dcl", "--index", str(shards[1])], theirs)
    assert watch.seen and all(shown.tolist() == index.tolist() for shown, index in watch.seen)


def read(sources):
    """Stand-in for open_clip's reader, recognized by its name."""


read.__name__ = "tarfile_to_samples_nothrow"
INDEX = compopt.data.ShardIndex({"0.tar": 2})


def test_what_a_stage_does_not_keep_is_seen():
    def resize(samples): ...

    for stages, named in (([read, resize], "resize"), ([resize], "resize"), ([read, webdataset.map(resize)], "_map")):
        with pytest.raises(ValueError, match=f"not known here: .*{named}.*Expected a reader .tarfile_samples"):
            rows.edit(stages, INDEX)


def test_both_forms_of_the_pipeline_are_edited():
    released = [read, webdataset.decode("pilrgb"), webdataset.rename(image="png"), webdataset.to_tuple("image text")]
    rows.edit(released, INDEX)
    assert isinstance(released[0], compopt.data.indexed_reader)
    assert released[1].kw["partial"] and "index" not in released[2].kw
    assert released[3].args == ("image", "text", "index")
    rebuilt = [read, webdataset.rename(image="png", keep=False)]
    rows.edit(rebuilt, INDEX)
    assert rebuilt[1].kw["index"] == "index"


def test_the_table_of_bad_samples():
    found = list(bad_samples.outcomes())
    assert found == stored("bad_samples")["results"]
    assert {others for *_, others in found} == {"own"} and len(found) > 20
