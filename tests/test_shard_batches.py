"""Epochs over tar shards that are left and taken up: every sample once, the same batches, on any ranks and workers."""

import pickle
import tracemalloc
from collections import Counter

import pytest
import torch

from compopt.data import KeyIndex, ShardBatches, ShardIndex, indexed_reader, shard_list
from compopt.data.spans import Spans
from tests.shards import read_tar, write_shard, write_shards

SIZES = [5, 13, 7, 14, 6, 11, 9, 8, 16, 10]  # 99 samples
TOTAL = sum(SIZES)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    shards = write_shards(tmp_path_factory.mktemp("data"), SIZES, corrupt={"000040002"})
    return shards, ShardIndex.build(shards)


def batches_of(data, rank=0, ranks=1, workers=0, batch_size=3, **options):
    shards, index = data
    stage = indexed_reader(read_tar, index)
    options = {"shuffle": 7, "seed": 5, **options}
    return ShardBatches(shards, stage, batch_size, sizes=index, num_workers=workers, rank=rank, ranks=ranks, **options)


def rows(batch):
    assert all(
        sample["index"] == sum(SIZES[: int(k[:5])]) + int(k[5:]) for sample in batch for k in [sample["__key__"]]
    )
    return [sample["index"] for sample in batch]


def read(batches, count=None):
    """Rows of the next batches, with as many processes as it was told."""
    workers = batches.layout.workers if batches.layout.workers > 1 else 0
    loader = iter(torch.utils.data.DataLoader(batches, batch_size=None, collate_fn=rows, num_workers=workers))
    found = []
    while count is None or len(found) < count:
        batch = next(loader, None)
        if batch is None:
            break
        found.append(batch)
    return found


@pytest.mark.parametrize("ranks, workers, shuffle", [(1, 0, 7), (3, 2, 7), (2, 3, 1), (4, 0, 1000), (16, 0, 7)])
def test_an_epoch_has_every_sample_once(data, ranks, workers, shuffle):
    given = [read(batches_of(data, rank, ranks, workers, shuffle=shuffle)) for rank in range(ranks)]
    assert {len(batches) for batches in given} == {TOTAL // (3 * ranks)}  # equally many on every rank
    seen = Counter(row for batches in given for batch in batches for row in batch)
    assert set(seen.values()) == {1} and len(seen) == TOTAL // (3 * ranks) * 3 * ranks


def test_epochs_and_seeds_differ(data):
    batches = batches_of(data)
    first = read(batches)
    batches.set_epoch(1)
    assert read(batches) != first and sorted(sum(read(batches), [])) == sorted(sum(first, []))
    assert read(batches_of(data, seed=6)) != first == read(batches_of(data))


def test_a_block_is_shuffled_and_shards_have_an_order(data):
    whole = sum(read(batches_of(data, batch_size=1, shuffle=1)), [])
    assert whole != sorted(whole)  # shards
    assert all(b == a + 1 for a, b in zip(whole, whole[1:], strict=False) if (a + 1) not in starts())
    mixed = sum(read(batches_of(data, batch_size=1, shuffle=7)), [])
    for at in range(0, TOTAL, 7):
        assert sorted(mixed[at : at + 7]) == sorted(whole[at : at + 7])
    assert mixed != whole


def starts():
    return {sum(SIZES[:k]) for k in range(len(SIZES) + 1)}


@pytest.mark.parametrize("workers", [0, 2, 3])
@pytest.mark.parametrize("left", [1, 2, 5, 10, 15, 16])
def test_a_resumed_epoch_gives_the_batches_that_would_have_come(data, workers, left):
    whole = [read(batches_of(data, rank, 2, workers)) for rank in range(2)]
    for rank in range(2):
        stopped = batches_of(data, rank, 2, workers)
        assert read(stopped, left) == whole[rank][:left]
        stopped.advance(left)
        state = pickle.loads(pickle.dumps(stopped.state_dict()))
        resumed = batches_of(data, rank, 2, workers)
        resumed.load_state_dict(state)
        assert len(resumed) == len(whole[rank]) - left and resumed.samples_seen == 6 * left
        assert read(resumed) == whole[rank][left:]
        assert resumed.state_dict() == state


@pytest.mark.parametrize("shuffle", [1, 7, 1000])
def test_other_ranks_workers_and_batches_take_up_the_same_epoch(data, shuffle):
    """Two ranks of two workers, then three of one, then one: no sample twice, and at most a batch is missing."""
    seen, state = Counter(), None
    for ranks, workers, size, count in [(2, 2, 3, 4), (3, 0, 4, 3), (3, 0, 4, 1), (1, 2, 2, None)]:
        for rank in range(ranks):
            batches = batches_of(data, rank, ranks, workers, size, shuffle=shuffle)
            if state is not None:
                batches.load_state_dict(state)
            given = read(batches, count)
            seen.update(row for batch in given for row in batch)
            batches.advance(len(given))
        state = batches.state_dict()
    assert set(seen.values()) == {1} and len(seen) >= TOTAL - 1
    assert batches.samples_seen == len(seen)


def test_the_position_moves_with_a_worker_in_this_process(data):
    """Batches may be counted while they are read."""
    whole, batches = read(batches_of(data, workers=3)), batches_of(data, workers=3)
    found = []
    for batch in batches:  # without a DataLoader
        found.append(rows(batch))
        batches.advance()
    assert found == whole and len(batches) == 0


def test_samples_that_cannot_be_read_make_a_batch_shorter(data, tmp_path):
    shards = write_shards(tmp_path, SIZES)
    index = ShardIndex.build(shards)

    def lenient(sources):
        samples = read_tar(sources)
        while True:
            try:
                yield next(samples)
            except (StopIteration, Exception):
                return

    batches = ShardBatches(shards, indexed_reader(lenient, index), 3, sizes=index, shuffle=20, seed=5)
    content = shards[3].read_bytes()
    shards[3].write_bytes(content[: len(content) // 2 // 512 * 512])  # before training it would be refused
    with pytest.warns(UserWarning, match="shard .*00003.tar gave"):
        given = [rows(batch) for batch in batches]
    lost = set(range(sum(SIZES[:3]), sum(SIZES[:4]))) - {row for batch in given for row in batch}
    assert len(given) == TOTAL // 3 and 0 < len(lost) <= SIZES[3]
    assert Counter(row for batch in given for row in batch) == Counter(set(range(TOTAL)) - lost)


def test_a_batch_without_a_sample_is_replaced(data):
    shards, index = data
    nothing = {3, 4}

    def some(sources):
        for source in sources:
            if int(source["url"].split("/")[-1][:5]) not in nothing:
                yield from read_tar([source])

    batches = ShardBatches(shards, indexed_reader(some, index), 3, sizes=index, shuffle=1, seed=5)
    with pytest.warns(UserWarning, match="nothing of a batch of 3 could be read or decoded .*2 such batches by now"):
        given = [rows(batch) for batch in batches]
    assert len(given) == TOTAL // 3 and all(given)
    batches.advance(9)
    assert (
        len(list(batches)) == TOTAL // 3 - 9
    )  # the share now begins with a shard that cannot be read, or soon meets it
    nothing.update(range(10))
    with pytest.raises(RuntimeError, match="nothing could be read or decoded of the share of worker 0"):
        list(batches)


def test_a_share_may_begin_with_samples_that_cannot_be_read(data):
    shards, index = data
    first = ShardBatches(shards, indexed_reader(read_tar, index), 3, sizes=index, shuffle=1, seed=5)
    lost = next(iter(first))[0]["__url__"]

    def some(sources):
        for source in sources:
            if source["url"] != lost:
                yield from read_tar([source])

    batches = ShardBatches(shards, indexed_reader(some, index), 3, sizes=index, shuffle=1, seed=5)
    with pytest.warns(UserWarning, match="another batch is given twice"):
        given = [rows(batch) for batch in batches]
    assert len(given) == TOTAL // 3 and given[0] == given[1] and all(given)


def rows_unless(bad):
    """Rows of what can be decoded; nothing if that is nothing."""

    def decode(batch):
        return [row for row in rows(batch) if row not in bad] or None

    return decode


@pytest.mark.filterwarnings("ignore:nothing of a batch")
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("bad", ["first", "middle", "last"])
def test_a_batch_of_which_nothing_can_be_decoded_is_replaced_alike_after_a_resume(data, workers, bad):
    order = sum(read(batches_of(data, workers=workers, shuffle=1)), [])
    lanes = [sum([order[at : at + 3] for at in range(3 * lane, TOTAL, 3 * max(1, workers))], []) for lane in range(2)]
    part = {"first": slice(0, 9), "middle": slice(10, 22), "last": slice(-9, None)}[bad]
    decode = rows_unless({row for lane in lanes[: max(1, workers)] for row in lane[part]})
    whole = read_decoded(batches_of(data, workers=workers, shuffle=1, decode=decode), workers)
    assert len(whole) == TOTAL // 3 and all(whole)
    assert Counter(map(tuple, whole)).most_common(1)[0][1] > 2  # given in place of those of which nothing is left
    for left in (1, 3, 7, 9, 28, 32):
        resumed = batches_of(data, workers=workers, shuffle=1, decode=decode)
        resumed.advance(left)
        assert read_decoded(resumed, workers) == whole[left:]


def read_decoded(batches, workers):
    return list(torch.utils.data.DataLoader(batches, batch_size=None, collate_fn=list, num_workers=workers))


def test_nothing_of_a_share_can_be_decoded(data):
    ends = pytest.raises(RuntimeError, match="nothing could be read or decoded of the share of worker 0")
    with pytest.warns(UserWarning, match="32 such batches by now") as said, ends:
        list(batches_of(data, decode=lambda batch: None))
    assert len(said) == 6  # 1, 2, 4, ..., 32 of 33


def test_workers_without_a_batch(data):
    whole = read(batches_of(data, batch_size=40))
    assert len(whole) == 2 == len(read(batches_of(data, workers=3, batch_size=40)))


@pytest.mark.parametrize(
    "index, said", [(None, "00001.tar has a sample at position 13"), (KeyIndex(10**6), "than the")]
)
def test_a_shard_longer_than_its_size_is_met_where_it_ends(tmp_path, index, said):
    """Its size may come from elsewhere, or the file may be written anew during the epoch."""
    shards = write_shards(tmp_path, [5, 14, 7])
    sizes = ShardIndex({shard.name: size for shard, size in zip(shards, [5, 13, 7], strict=True)})
    batches = ShardBatches(shards, indexed_reader(read_tar, index or sizes), 1, sizes=sizes)
    with pytest.raises(ValueError, match=f"{said}.* under another name"):
        list(batches)


def test_a_shard_that_was_replaced_is_refused_before_it_is_read(tmp_path):
    shards = write_shards(tmp_path, [5, 13])
    sizes = ShardIndex.build(shards)
    write_shard(shards[1], [f"00001{row:04d}" for row in range(40)])
    with pytest.raises(ValueError, match="00001.tar has .* bytes, and .* replaced"):
        ShardBatches(shards, indexed_reader(read_tar, KeyIndex(10**6)), 3, sizes=sizes)


def test_positions_that_cannot_be_are_refused(data):
    batches = batches_of(data)
    with pytest.raises(ValueError, match="33 batches of this epoch are left"):
        batches.advance(34)
    batches.advance(30)
    state = batches.state_dict()
    for name, value, said in [
        ("done", 34, "34 batches, and there were 33"),
        ("done", -3, "done"),
        ("ranks", 0, "ranks"),
    ]:
        wrong = {**state, "read": [{**state["read"][0], name: value}]}
        with pytest.raises(ValueError, match=said):
            batches.load_state_dict(wrong)
        assert batches.done == 30
    with pytest.raises(ValueError, match="other shards"):
        batches.load_state_dict({})


def test_other_shards_of_the_same_sizes_are_other_shards(tmp_path):
    for name in ("one", "other"):
        write_shards(tmp_path / name, [4, 4])
    index = ShardIndex.build([tmp_path / "one", tmp_path / "other"])
    one, other = (
        ShardBatches(tmp_path / name, indexed_reader(read_tar, index), 2, sizes=index) for name in ("one", "other")
    )
    one.advance()
    with pytest.raises(ValueError, match="other shards"):
        other.load_state_dict(one.state_dict())


def test_workers_that_persist_are_refused(data):
    batches = batches_of(data, workers=2)
    loader = torch.utils.data.DataLoader(batches, batch_size=None, num_workers=2, persistent_workers=True)
    assert len(list(loader)) == TOTAL // 3
    batches.set_epoch(1)
    with pytest.raises(RuntimeError, match="leave persistent_workers off"):
        list(loader)


def test_bad_input(data, tmp_path):
    shards, index = data
    stage = indexed_reader(read_tar, index)
    with pytest.raises(ValueError, match="too few for a batch of 60 on each of 2"):
        batches_of(data, ranks=2, batch_size=60)
    with pytest.raises(ValueError, match="occurs twice"):
        ShardBatches([shards[0], shards[1], shards[0]], stage, 2, sizes=index)
    with pytest.raises(ValueError, match="not among the 10 of the index"):
        ShardBatches([tmp_path / "other.tar"], stage, 2, sizes=index)
    with pytest.raises(FileNotFoundError, match="1 of 2 shards are missing or empty"):
        ShardBatches([shards[0], tmp_path / "00001.tar"], stage, 2, sizes=index)
    with pytest.raises(ValueError, match="rank must be between 0 and 1"):
        batches_of(data, rank=2, ranks=2)
    with pytest.raises(ValueError, match="other shards or another seed"):
        batches_of(data).load_state_dict(batches_of(data, seed=6).state_dict())
    fewer = ShardBatches(shards[:5], stage, 2, sizes=index, seed=5)
    with pytest.raises(ValueError, match="other shards or another seed"):
        fewer.load_state_dict(batches_of(data).state_dict())
    with pytest.raises(RuntimeError, match="num_workers=2, and ShardBatches was told 1"):
        next(iter(torch.utils.data.DataLoader(batches_of(data), batch_size=None, num_workers=2)))


def test_shards_that_moved_keep_their_position(data, tmp_path):
    shards, index = data
    stopped = batches_of(data)
    stopped.advance(4)
    moved = write_shards(tmp_path / "elsewhere", SIZES)
    resumed = ShardBatches(moved, indexed_reader(read_tar, index), 3, sizes=index, shuffle=7, seed=5)
    resumed.load_state_dict(stopped.state_dict())
    assert read(resumed) == read(stopped)


@pytest.mark.slow
def test_a_long_epoch_is_resumed_without_reading_what_was_done():
    """2e8 samples: the shards before the position are not opened."""
    opened = []

    def stage(sources):
        for source in sources:
            opened.append(source["url"])
            yield from ({"row": row} for row in range(10_000))

    sizes = ShardIndex({f"s3://{k}.tar": 10_000 for k in range(20_000)})
    names = [f"s3://{k}.tar" for k in range(20_000)]
    batches = ShardBatches(names, stage, 256, sizes=sizes, ranks=64, rank=3)
    batches.advance(8_000)
    assert len(next(iter(batches))) == 256 and len(opened) <= 2


def test_lists_of_shards(tmp_path):
    for name in ("0.tar", "1.tar.gz", "0.tar.idx", "notes.txt"):
        (tmp_path / name).write_text("x")
    assert [name.rsplit("/")[-1] for name in shard_list(tmp_path)] == ["0.tar", "1.tar.gz"]
    assert shard_list("s3://b/{a,b}/{08..10}.tar")[3:] == ["s3://b/b/08.tar", "s3://b/b/09.tar", "s3://b/b/10.tar"]
    for wrong in ("{3..1}.tar", "{a..c}.tar", "{00..10..5}.tar"):
        with pytest.raises(ValueError, match="range of numbers that ascends"):
            shard_list(wrong)
    with pytest.raises(ValueError, match="wildcards need a local disk"):
        shard_list("s3://b/*.tar")


def test_spans():
    spans = Spans([(10, 13), (13, 15), (20, 20), (3, 5)])
    assert len(spans) == 7 and len(Spans([])) == 0 and list(Spans([]).cut(0, 9)) == []
    assert list(spans.cut(4, 6)) == [(14, 15), (3, 4)]
    assert list(spans.cut(0, 99)) == [(10, 15), (3, 5)] and list(spans.cut(7, 9)) == []


@pytest.mark.slow
def test_a_new_layout_of_many_workers_needs_little_memory():
    """512 workers leave 256,000 stretches; 32 bytes each, and as much again while they are joined."""
    sizes = ShardIndex({f"s3://{k}.tar": 10_000 for k in range(500)})
    names = [f"s3://{k}.tar" for k in range(500)]
    old, new = (ShardBatches(names, read_tar, 10, sizes=sizes, num_workers=8, rank=0, ranks=k) for k in (64, 32))
    old.advance(800)
    tracemalloc.start()
    new.load_state_dict(old.state_dict())
    left, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert left < 15e6 and peak < 40e6
