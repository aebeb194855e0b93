"""Stopped and resumed epochs over tar shards: every sample once, the same batches, for any ranks and workers."""

import doctest
import pickle
import tracemalloc
from collections import Counter

import pytest
import torch

from compopt.data import KeyIndex, ShardIndex, indexed_reader, shard_list
from recipes import shard_batches
from recipes.shard_batches import ShardBatches
from tests.shards import read_tar, write_shard, write_shards

SIZES = [5, 13, 7, 14, 6, 11, 9, 8, 16, 10]  # 99 samples
TOTAL = sum(SIZES)
URLS = [f"s3://bucket/{shard:05d}.tar" for shard in range(len(SIZES))]
INDEX = ShardIndex(dict(zip(URLS, SIZES, strict=True)))


def reading(lost=()):
    """Return a reader stage without files, which yields only the first sample of lost shards, or none."""

    def read(sources):
        for shard in (URLS.index(source["url"]) for source in sources):
            for row in range(SIZES[shard] if shard not in lost else 1 if isinstance(lost, list) else 0):
                yield {"__key__": f"{shard:05d}{row:04d}", "__url__": URLS[shard]}

    return indexed_reader(read, INDEX)


def batches_of(rank=0, ranks=1, workers=0, batch_size=3, lost=(), **options):
    options = {"shuffle": 7, "seed": 5, **options}
    layout = {"num_workers": workers, "rank": rank, "ranks": ranks}
    return ShardBatches(URLS, reading(lost), batch_size, sizes=INDEX, **layout, **options)


def rows(batch):
    """Return the rows of a batch; assert that they match its keys."""
    assert all(s["index"] == sum(SIZES[: int(s["__key__"][:5])]) + int(s["__key__"][5:]) for s in batch)
    return [sample["index"] for sample in batch]


def read(batches, count=None):
    """Return the rows of the next batches; without a loader, all workers read in this process."""
    return [rows(batch) for batch, _ in zip(batches, range(count or len(batches)), strict=False)]


def loaded(batches, workers):
    return list(torch.utils.data.DataLoader(batches, batch_size=None, collate_fn=list, num_workers=workers))


@pytest.mark.parametrize("ranks, workers, shuffle", [(1, 0, 7), (3, 2, 7), (2, 3, 1), (4, 0, 1000), (16, 0, 7)])
def test_an_epoch_has_every_sample_once(ranks, workers, shuffle):
    given = [read(batches_of(rank, ranks, workers, shuffle=shuffle)) for rank in range(ranks)]
    assert {len(batches) for batches in given} == {TOTAL // (3 * ranks)}  # equally many on every rank
    seen = Counter(row for batches in given for batch in batches for row in batch)
    assert set(seen.values()) == {1} and len(seen) == TOTAL // (3 * ranks) * 3 * ranks


def test_workers_give_what_one_process_gives():
    """Also test the middle of an epoch, where another worker is next, and fewer batches than workers."""
    for left, batch_size in ((0, 3), (7, 3), (0, 40)):
        batches = batches_of(workers=3, batch_size=batch_size, decode=rows)
        if left:
            batches.advance(left)
        assert loaded(batches, 3) == list(batches) and len(batches) == TOTAL // batch_size - left


def test_a_block_is_shuffled_and_shards_have_an_order():
    whole = sum(read(batches_of(batch_size=1, shuffle=1)), [])
    starts = {sum(SIZES[:k]) for k in range(len(SIZES) + 1)}
    assert whole != sorted(whole)  # shards are shuffled
    assert all(b == a + 1 for a, b in zip(whole, whole[1:], strict=False) if (a + 1) not in starts)
    mixed = sum(read(batches_of(batch_size=1, shuffle=7)), [])
    for at in range(0, TOTAL, 7):
        assert sorted(mixed[at : at + 7]) == sorted(whole[at : at + 7])
    assert mixed != whole


@pytest.mark.parametrize("workers", [0, 2, 3])
@pytest.mark.parametrize("left", [1, 2, 5, 10, 15, 16])
def test_a_resumed_epoch_gives_the_batches_that_would_have_come(workers, left):
    for rank in range(2):
        whole, stopped = read(batches_of(rank, 2, workers)), batches_of(rank, 2, workers)
        stopped.advance(left)
        state = pickle.loads(pickle.dumps(stopped.state_dict()))
        resumed = batches_of(rank, 2, workers)
        resumed.load_state_dict(state)
        assert len(resumed) == len(whole) - left and resumed.samples_seen == 6 * left
        assert read(resumed) == whole[left:]
        assert resumed.state_dict() == state


@pytest.mark.parametrize("shuffle", [1, 7, 1000])
def test_other_ranks_workers_and_batches_take_up_the_same_epoch(shuffle):
    """Use two ranks with two workers, then three ranks, then one: no sample repeats, and at most a batch is missing."""
    seen, state = Counter(), None
    for ranks, workers, size, count in [(2, 2, 3, 4), (3, 0, 4, 3), (3, 0, 4, 1), (1, 2, 2, None)]:
        for rank in range(ranks):
            batches = batches_of(rank, ranks, workers, size, shuffle=shuffle)
            if state is not None:
                batches.load_state_dict(state)
            given = read(batches, count)
            seen.update(row for batch in given for row in batch)
            batches.advance(len(given))
        state = batches.state_dict()
    assert set(seen.values()) == {1} and len(seen) >= TOTAL - 1
    assert batches.samples_seen == len(seen)


# samples that cannot be read or decoded ---------------------------------------------------------------------------


def test_shards_are_read_as_often_as_asked():
    """Every repetition has the same rows at another place of the epoch; a resumed run yields the rest."""
    repeats = [2, 1, 1, 3, 1, 1, 1, 1, 1, 1]
    total = TOTAL + SIZES[0] + 2 * SIZES[3]
    batches = batches_of(batch_size=2, repeats=repeats)
    whole = read(batches)
    often = {row: k for shard, k in enumerate(repeats) for row in range(sum(SIZES[:shard]), sum(SIZES[: shard + 1]))}
    assert batches.n == total and Counter(row for batch in whole for row in batch) - Counter(often) == Counter()
    assert len(whole) == total // 2
    batches.advance(20)
    other = batches_of(batch_size=2, repeats=repeats)
    other.load_state_dict(batches.state_dict())
    assert read(other) == whole[20:]
    with pytest.raises(ValueError, match="the position is of other shards"):
        batches_of(batch_size=2).load_state_dict(batches.state_dict())
    with pytest.raises(ValueError, match="repeats has 1 numbers for 10 shards"):
        batches_of(repeats=[2])
    with pytest.raises(ValueError, match="repeats"):
        batches_of(repeats=[0] * 10)


def test_shards_are_drawn_with_replacement():
    """Draw on two ranks; a shard drawn twice in a row is read twice, and a resumed epoch has the same draws."""

    def epoch(number, rank=0, ranks=1, workers=0, left=0, **options):
        batches = batches_of(rank, ranks, workers, replacement=True, **options)
        batches.set_epoch(number)
        if left:
            batches.advance(left)
        return batches

    counts = [Counter(sum((sum(read(epoch(number, rank, 2, 2)), []) for rank in (0, 1)), [])) for number in range(120)]
    assert {sum(count.values()) for count in counts} == {TOTAL // 6 * 6} and counts[0] != counts[1]
    mean = torch.tensor([[count[row] for row in range(TOTAL)] for count in counts]).double().mean(dim=0)
    assert (mean - 96 / 99).abs().max() < 0.4  # each has a standard deviation of 0.09
    order = epoch(3, shuffle=1, batch_size=1)
    orders = [epoch(number)._order() for number in range(50)]
    assert any(a == b for order in orders for a, b in zip(order, order[1:], strict=False))
    for number in range(10):
        whole = read(epoch(number))
        assert read(epoch(number, left=11)) == whole[11:]
        resumed = batches_of(2, 3, replacement=True, batch_size=2)
        resumed.load_state_dict(epoch(number, left=11).state_dict())
        assert len(read(resumed)) == (TOTAL - 33) // 6
    weighted = batches_of(replacement=True, repeats=[20] + [1] * 9, batch_size=1)
    first = sum(row < SIZES[0] for row in sum(read(weighted), [])) / weighted.n
    assert 0.3 < first < 0.75  # the mean is 20 * 5 / 194
    with pytest.raises(ValueError, match="the position is of other shards.*the same repeats and replacement"):
        batches_of().load_state_dict(order.state_dict())
    with pytest.raises(TypeError, match="replacement"):
        batches_of(replacement=1)


def test_samples_that_cannot_be_read_make_a_batch_shorter():
    with pytest.warns(UserWarning, match="shard .*00004.tar gave 1 of 6"):
        given = read(batches_of(lost=[4], shuffle=20))
    lost = set(range(sum(SIZES[:4]) + 1, sum(SIZES[:5])))
    assert len(given) == TOTAL // 3
    assert Counter(row for batch in given for row in batch) == Counter(set(range(TOTAL)) - lost)


@pytest.mark.filterwarnings("ignore:shard s3")
def test_a_batch_without_a_sample_is_replaced():
    lost = {3, 4}
    batches = batches_of(lost=lost, shuffle=1)
    with pytest.warns(
        UserWarning, match="nothing of a batch of 3 could be read, kept or decoded .*2 such batches by now"
    ):
        given = read(batches)
    assert len(given) == TOTAL // 3 and all(given)
    batches.advance(9)
    assert len(list(batches)) == TOTAL // 3 - 9
    lost.update(range(10))
    with pytest.raises(RuntimeError, match="nothing could be read, kept or decoded of the share of worker 0"):
        list(batches)


def test_samples_that_are_not_kept_make_a_batch_shorter_and_move_nothing():
    whole = read(batches_of())
    out = {row for batch in whole for row in batch if row % 3 == 1}
    batches = batches_of(keep=lambda sample: sample["index"] not in out)
    assert read(batches) == [[row for row in batch if row not in out] for batch in whole]
    batches.set_epoch(1)
    batches.keep = lambda sample: not sample["__key__"].endswith("0")
    batches.advance(2)
    following = batches_of()
    following.set_epoch(1)
    first = {0, *(sum(SIZES[: k + 1]) for k in range(len(SIZES)))}  # their keys end with 0, like that of the 11th
    given = read(batches)
    assert not first & {row for batch in given for row in batch}
    assert all(set(few) <= set(batch) for few, batch in zip(given, read(following)[2:], strict=True))


def rows_unless(bad):
    """Return a decoder that yields the rows of a batch that are not bad, or None if there are none."""
    return lambda batch: [row for row in rows(batch) if row not in bad] or None


@pytest.mark.filterwarnings("ignore:nothing of a batch")
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("bad", ["first", "middle", "last"])
def test_a_batch_of_which_nothing_can_be_decoded_is_replaced_alike_after_a_resume(workers, bad):
    order = sum(read(batches_of(workers=workers, shuffle=1)), [])
    lanes = [sum([order[at : at + 3] for at in range(3 * lane, TOTAL, 3 * max(1, workers))], []) for lane in range(2)]
    part = {"first": slice(0, 9), "middle": slice(10, 22), "last": slice(-9, None)}[bad]
    decode = rows_unless({row for lane in lanes[: max(1, workers)] for row in lane[part]})
    whole = list(batches_of(workers=workers, shuffle=1, decode=decode))
    assert len(whole) == TOTAL // 3 and all(whole)
    assert Counter(map(tuple, whole)).most_common(1)[0][1] > 2  # repeated in place of batches without samples
    for left in (1, 3, 7, 9, 28, 32):
        resumed = batches_of(workers=workers, shuffle=1, decode=decode)
        resumed.advance(left)
        assert list(resumed) == whole[left:]
    assert loaded(resumed, workers) == whole[left:]


# errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "index, said", [(None, "00001.tar has a sample at position 12"), (KeyIndex(10**6), "than the")]
)
def test_a_shard_longer_than_its_size_is_met_where_it_ends(index, said):
    """The size may come from another source, or the file may be rewritten during the epoch."""
    sizes = ShardIndex({**dict(zip(URLS, SIZES, strict=True)), URLS[1]: 12})
    stage = indexed_reader(reading().read, index or sizes)
    with pytest.raises(ValueError, match=f"{said}.* under another name"):
        list(ShardBatches(URLS, stage, 1, sizes=sizes))


def test_files_are_checked_before_they_are_read(tmp_path):
    shards = write_shards(tmp_path, [5, 13])
    sizes = ShardIndex.build(shards)
    write_shard(shards[1], [f"00001{row:04d}" for row in range(40)])
    with pytest.raises(ValueError, match="00001.tar has .* bytes, and .* replaced"):
        ShardBatches(shards, indexed_reader(read_tar, KeyIndex(10**6)), 3, sizes=sizes)
    shards[1].unlink()
    with pytest.raises(FileNotFoundError, match="1 of 2 shards are missing or empty"):
        ShardBatches(shards, indexed_reader(read_tar, sizes), 2, sizes=sizes)


def test_positions_that_cannot_be_are_refused():
    batches = batches_of()
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


def test_states_of_other_shards_or_seeds_are_refused():
    """Other shards with the same sizes are rejected too; shards that have been moved together are accepted."""
    state, sizes = batches_of().state_dict(), ShardIndex({f"{folder}/0.tar": 4 for folder in "ab"})
    one, other = (ShardBatches([f"s3://{folder}/0.tar"], reading(), 2, sizes=sizes) for folder in "ab")
    for sampler, wrong in (
        (batches_of(), {}),
        (batches_of(seed=6), state),
        (ShardBatches(URLS[:5], reading(), 2, sizes=INDEX, seed=5), state),
        (other, one.state_dict()),
    ):
        with pytest.raises(ValueError, match="other shards or another seed"):
            sampler.load_state_dict(wrong)
    ShardBatches(["http://elsewhere/a/0.tar"], reading(), 2, sizes=sizes).load_state_dict(one.state_dict())


def refused(loader, match):
    iterator = iter(loader)
    with pytest.raises(RuntimeError, match=match):
        list(iterator)
    iterator._shutdown_workers()  # an iterator that the garbage collector finds waits five seconds for each worker


def test_loaders_that_do_not_fit_are_refused():
    loader = torch.utils.data.DataLoader(batches_of(workers=2), batch_size=None, num_workers=2, persistent_workers=True)
    assert len(list(loader)) == TOTAL // 3
    refused(loader, "leave persistent_workers off")
    refused(
        torch.utils.data.DataLoader(batches_of(), batch_size=None, num_workers=2),
        "num_workers=2, and ShardBatches was told 1",
    )


def test_bad_input():
    with pytest.raises(ValueError, match="too few for a batch of 60 on each of 2"):
        batches_of(ranks=2, batch_size=60)
    with pytest.raises(ValueError, match="occurs twice"):
        ShardBatches([*URLS, URLS[0]], reading(), 2, sizes=INDEX)
    with pytest.raises(ValueError, match="not among the 10 of the index"):
        ShardBatches(["s3://bucket/other.tar"], reading(), 2, sizes=INDEX)
    with pytest.raises(ValueError, match="rank must be between 0 and 1"):
        batches_of(rank=2, ranks=2)


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


# large epochs -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_new_layout_of_many_workers_needs_little_memory():
    """512 workers leave 256,000 ranges of 32 bytes each, and as much again while they are merged."""
    names = [f"s3://{k}.tar" for k in range(500)]
    sizes = ShardIndex(dict.fromkeys(names, 10_000))
    old, new = (ShardBatches(names, read_tar, 10, sizes=sizes, num_workers=8, rank=0, ranks=k) for k in (64, 32))
    old.advance(800)
    tracemalloc.start()
    new.load_state_dict(old.state_dict())
    left, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert left < 15e6 and peak < 40e6


@pytest.mark.slow
def test_a_long_epoch_is_resumed_without_reading_what_was_done():
    """2e8 samples: the shards before the position are not opened."""
    opened, names = [], [f"s3://{k}.tar" for k in range(20_000)]

    def stage(sources):
        for source in sources:
            opened.append(source["url"])
            yield from ({"row": row} for row in range(10_000))

    batches = ShardBatches(names, stage, 256, sizes=ShardIndex(dict.fromkeys(names, 10_000)), ranks=64, rank=3)
    batches.advance(8_000)
    assert len(next(iter(batches))) == 256 and len(opened) <= 2


def test_the_example_of_the_docstring():
    assert doctest.testmod(shard_batches) == (0, 10)
