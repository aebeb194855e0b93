"""Choice of the negatives of an anchor: repeated indices, index2, group; and the options of a single call."""

import pytest
import torch

import compopt
from tests.database import BY_NAME, DATABASE, MODES
from tests.helpers import batches, features, make, near, run
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


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("info", SOME, ids=str)
def test_group(info, mode):
    """Samples of equal groups are not negatives, whatever their indices; rows are still selected by the index."""
    est, ref = make(info, mode, N)
    for t, batch in enumerate(batches(N, steps=4, seed=2)):
        follow(info, est, ref, N, [batch], group=torch.tensor([7, 7, 3, 1 + t % 2, 3, 90]))


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


@pytest.mark.parametrize("info", SOME, ids=str)
def test_a_shared_caption_is_no_negative(info):
    """Two images share a caption row (equal index2): neither caption is a negative of the other image."""
    est, ref = make(info, "bimodal", N)
    z1, z2 = features(5, 4, seed=4)
    compare_forward(info, est, ref, z1, z2, torch.arange(5), index2=torch.tensor([6, 7, 6, 8, 9]))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["infonce", "sogclr", "isogclr"])
def test_normalize_false_takes_features_as_they_are(name, mode):
    info = BY_NAME[name]
    est, ref = make(info, mode, N, tau=0.5, normalize=False)
    ref.normalize = False
    follow(info, est, ref, N, [(0.3 * z1, 0.3 * z2, index) for z1, z2, index in batches(N, steps=3, seed=5)])


@pytest.mark.parametrize("mode", MODES)
def test_lengths_do_not_matter_when_normalized(mode):
    info = BY_NAME["sogclr"]
    z1, z2, index = batches(N, steps=1, seed=6)[0]
    a = run(make(info, mode, N)[0], z1, z2, index)
    b = run(make(info, mode, N)[0], 3.0 * z1, 0.25 * z2, index)
    near(a[0], b[0])
    near(a[1], 3.0 * b[1])
    near(a[2], 0.25 * b[2])
    near((a[1] * z1).sum(1), torch.zeros(len(z1)), atol=1e-12)  # orthogonal to the feature itself


def test_any_non_negative_index_serves_a_stateless_estimator():
    z1, z2 = features(4, 4, seed=7)
    est = compopt.InfoNCEEstimator(tau=0.1)
    a = run(est, z1, z2, torch.tensor([0, 1, 2, 3]))
    b = run(est, z1, z2, torch.tensor([10**15, 7, 5 * 10**12, 2]))
    for x, y in zip(a, b, strict=True):
        near(x, y, 0.0)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("info", [info for info in DATABASE if not info.draws], ids=str)
def test_the_order_within_the_batch_does_not_matter(info, mode):
    z1, z2, index = batches(N, steps=4, seed=8)[3]
    order = torch.tensor([3, 1, 5, 0, 4, 2])
    if info.name == "neural-few":
        order = torch.tensor([1, 0, 3, 5, 4, 2])  # its prototypes are the last four
    est, _ = make(info, mode, N)
    other, _ = make(info, mode, N)
    loss, g1, g2 = run(est, z1, z2, index)
    loss_p, p1, p2 = run(other, z1[order], z2[order], index[order])
    near(loss, loss_p)
    near(g1[order], p1)
    near(g2[order], p2)


@pytest.mark.parametrize("info", [i for i in DATABASE if not i.draws], ids=str)  # draws would differ
def test_swapping_the_modalities_swaps_the_gradients(info):
    z1, z2, index = batches(N, steps=2, seed=9)[1]
    loss, g1, g2 = run(make(info, "bimodal", N)[0], z1, z2, index)
    swapped, h2, h1 = run(make(info, "bimodal", N)[0], z2, z1, index)
    near(loss, swapped)
    near(g1, h1)
    near(g2, h2)


@pytest.mark.parametrize("name", ["sogclr", "sogclr-positive", "isogclr-adam", "infonce", "infonce-no-positive"])
def test_an_anchor_without_negatives(name):
    """Sample 0 shares its group with 1 and its caption with 2: no negatives, zero gradients, and finite values."""
    info = BY_NAME[name]
    est, _ = make(info, "bimodal", N)
    z1, z2 = features(3, 4, seed=10)
    loss, g1, g2 = run(
        est, z1, z2, torch.tensor([0, 1, 2]), index2=torch.tensor([7, 8, 7]), group=torch.tensor([5, 5, 6])
    )
    assert torch.isfinite(loss) and torch.isfinite(g1).all() and torch.isfinite(g2).all()
    assert not g1[0].any() and not g2[0].any() and g1[1].any()
    est.step()
    if info.has_rows:
        assert est.read(torch.tensor([0, 1, 2]))["count"].tolist()[:2] == [0, 1]
