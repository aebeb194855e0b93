"""Choice of the negatives of an anchor: repeated indices, index2, labels; and the options of a single call."""

import contextlib
import copy
import warnings

import pytest
import torch
import torch.distributed as dist

import compopt
from tests.database import BY_NAME, DATABASE, MODES
from tests.helpers import batches, bits, features, make, near, run, snapshot
from tests.pool import the_pool
from tests.test_agreement import compare_forward, follow

N = 17
SOME = [BY_NAME[name] for name in ("infonce", "infonce-no-positive", "sogclr", "sogclr-positive", "isogclr-adam")]
PAIRED = [info for info in SOME if info.has_rows]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("info", SOME, ids=str)
def test_repeats_are_not_negatives(info, mode):
    """Batches with two distinct samples: only the occurrences of the other sample are negatives of an anchor."""
    est, ref = make(info, mode, N)
    z1, z2 = features(6, 4, seed=1)
    indices = ([0, 5, 0, 5, 0, 5], [0, 5, 5, 5, 5, 5])
    follow(info, est, ref, N, [(z1, z2, torch.tensor(index)) for index in indices])


@pytest.mark.parametrize("info", PAIRED, ids=str)
def test_index2_names_the_rows_of_the_second_modality(info):
    """Image i and caption (i + 8): direction 0 writes rows 0..7, direction 1 rows 8..15."""
    est, ref = make(info, "bimodal", N)
    for z1, z2, index in batches(8, steps=4, seed=3):
        compare_forward(info, est, ref, z1, z2, index, index2=index + 8)
        est.step()
        ref.step()
    columns = est.read(torch.arange(16))
    seen = [i for i in range(8) if ref.visits(i, 0)]
    for name in info.columns:
        for column in (0, 1):
            rows = [i + 8 * column for i in seen]
            store = {"log_u": "u", "tau": "tau", "tau_exp_avg": "m", "tau_exp_avg_sq": "v"}[name]
            want = torch.tensor([ref.rows[store][r][column] for r in rows], dtype=torch.float64)
            near(columns[name][rows, column], want.log() if name == "log_u" else want, what=name)


@pytest.mark.parametrize("info", PAIRED, ids=str)
def test_a_row_seen_in_one_direction_is_unseen_in_the_other(info):
    """Row 3 is first an image, then a caption: its average for captions is initialized with g."""
    est, ref = make(info, "bimodal", N)
    steps = [([0, 1, 2, 3], [8, 9, 10, 11]), ([4, 5, 6, 7], [3, 12, 13, 14]), ([0, 1, 2, 3], [3, 9, 10, 12])]
    for t, (index, index2) in enumerate(steps):
        z1, z2 = features(4, 4, seed=20 + t)
        compare_forward(info, est, ref, z1, z2, torch.tensor(index), index2=torch.tensor(index2))
        est.step()
        ref.step()


def test_any_non_negative_index_serves_a_stateless_estimator():
    z1, z2 = features(4, 4, seed=7)
    est = compopt.InfoNCEEstimator(tau=0.1)
    a = run(est, z1, z2, torch.tensor([0, 1, 2, 3]))
    b = run(est, z1, z2, torch.tensor([10**15, 7, 5 * 10**12, 2]))
    for x, y in zip(a, b, strict=True):
        near(x, y, 0.0)


# -- batches without negatives -----------------------------------------------------------------------------------------

LACKING = "no sample of a batch has a negative"
ONE, WITHIN = torch.full((4,), 5), compopt.PairPolicy(within=True)
WITHOUT = {
    "labels": {"labels": ONE},
    "index2": {"index2": ONE},
    "index": {"index": [3] * 4, "index2": torch.arange(4) + 5},
    # each pair has equal values of one key
    "all keys": {"index": [3, 3, 4, 4], "index2": torch.tensor([5, 6, 5, 6]), "labels": torch.tensor([0, 1, 1, 0])},
    "within": {"within": torch.arange(4), "pairs": WITHIN},
    "false negatives": {"pairs": compopt.PairPolicy(false_negatives=-3.0)},
}


def refuses(info, mode, case):
    """Return whether an estimator does not take the arguments of a case."""
    policy = WITHOUT[case].get("pairs")
    if policy is None:
        return mode == "unimodal" and "index2" in WITHOUT[case]
    est, _ = make(info, mode, N)
    try:
        est.normalizer.check_pairs(policy)
    except ValueError:
        return True
    return False


def without(case, seed=3):
    """Return features, index and other arguments of a batch in which no anchor has a negative."""
    given = dict(WITHOUT[case])
    index = torch.tensor(given.pop("index", [3, 8, 4, 9]))
    return *features(4, 4, seed=seed), index, given


LACKING_CASES = [
    (info, mode, case)
    for info in DATABASE
    for mode in (*MODES, "forward")
    for case in WITHOUT
    if not refuses(info, mode, case)
]


FRESH = ("index2", "within")  # cases with an estimator that has seen nothing


@pytest.mark.filterwarnings("error", "ignore:batches with . negatives per anchor")
@pytest.mark.covering("mode case")
@pytest.mark.parametrize("info, mode, case", LACKING_CASES, ids=str)
def test_a_batch_without_negatives_changes_nothing(info, mode, case):
    """The loss and all gradients are 0; rows, other state, pending deposits and ``t`` stay; the first one warns."""
    est, _ = make(info, mode, N)
    data = batches(N, 4, batch=4, seed=5, repeats=False)
    if case not in FRESH and not info.name.startswith("memory"):  # past features would be negatives
        run(est, *data[0])
        est.step()
        run(est, *data[1])
    other, before, t, pending = copy.deepcopy(est), snapshot(est, N), est.t, est.pending
    leaf = info.tau_leaf(est) if info.tau_leaf else None
    for number in range(2):
        if leaf is not None:
            leaf.grad = None
        z1, z2, index, given = without(case)
        with pytest.warns(UserWarning, match=LACKING) if number == 0 else contextlib.nullcontext():
            found = run(est, z1, z2, index, **given)
        assert not any(value.count_nonzero() for value in found)
        assert leaf is None or leaf.grad.count_nonzero() == 0
        assert est.pending == pending
    assert alike(snapshot(est, N), before) and est.t == t
    for same in (est, other):
        same.step()
        run(same, *data[2])
        same.step()
    assert alike(snapshot(est, N), snapshot(other, N)) and est.t == other.t


def alike(one, other):
    """Return whether two snapshots are bitwise equal."""
    return one.keys() == other.keys() and all(bits(one[name]) == bits(other[name]) for name in one)


@pytest.mark.parametrize("name", ["sogclr", "infonce", "memory", "emc2"])
def test_one_pair_for_the_whole_batch_is_refused(name):
    """Two samples are distinct if their index or their index2 differ."""
    est, _ = make(BY_NAME[name], "bimodal", N)
    with pytest.raises(ValueError, match="index is 5 and index2 is 5 for the whole batch.*two distinct samples"):
        est(*features(4, 4, seed=0), ONE, index2=ONE)
    assert est.pending == 0


def test_extra_of_one_label_are_candidates():
    """With one label further candidates are the negatives."""
    z1, z2, index, given = without("labels")
    extra = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    info = BY_NAME["infonce"]
    est, ref = make(info, "forward", N)
    compare_forward(info, est, ref, z1, z2, index, extra=extra, labels=given["labels"])


# the labels or keys of two batches on several ranks: without negatives everywhere, and on the first rank only
SHARED = {
    "all": ({"labels": torch.full((12,), 3)}, True),
    "first": ({"labels": torch.tensor([0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 2])}, False),
    "first within": ({"within": torch.tensor([*range(10, 18), 0, 0, 0, 0]), "pairs": WITHIN}, False),
}


def some_without(group, name, mode, case, shard):
    """Run a batch without and one with negatives, both twice; return losses, gradients, steps and state."""
    given, _ = SHARED[case]
    est, _ = make(BY_NAME[name], mode, N, process_group=group, shard=shard)
    own, trace = slice(0, 12), []
    if group is not None:
        part = 12 // dist.get_world_size(group)
        own = slice(dist.get_rank(group) * part, (dist.get_rank(group) + 1) * part)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(4):
            z1, z2 = (z[own] for z in features(12, 4, seed=step))
            mine = {key: value if key == "pairs" else value[own] for key, value in given.items() if step % 2 == 0}
            trace.append(run(est, z1, z2, torch.arange(12)[own], **mine))
            est.step()
    return trace, est.t, snapshot(est, N)


@pytest.mark.covering()
@pytest.mark.parametrize("shard", [False, True])
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("case", SHARED)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["sogclr", "isogclr-adam", "memory-dual", "neural-queue", "global-dual", "emc2"])
def test_ranks_without_negatives(name, mode, case, ranks, shard):
    if case == "first within" and name in ("memory-dual", "emc2"):  # which take within at construction, and never
        case = "first"
    whole, t, state = some_without(None, name, mode, case, False)
    if SHARED[case][1] and name != "memory-dual":
        assert t == 2 and all(whole[step][0] == 0 for step in (0, 2))
    answers = the_pool().run(some_without, ranks, name, mode, case, shard)
    for step, want in enumerate(whole):
        parts = [trace[step] for trace, *_ in answers]
        near(parts[0][0], want[0], 1e-11, atol=1e-11)
        for at in (1, 2):
            near(torch.cat([part[at] for part in parts]) / ranks, want[at], 1e-10, atol=1e-11)
    for _, steps, own in answers:
        assert steps == t and own.keys() == state.keys()
        for key, value in state.items():
            near(own[key], value, 1e-9, atol=1e-9, what=key)
