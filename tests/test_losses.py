"""Non-contrastive losses against float64 references; ranks, placements and checkpoints are in tests/test_alone.py."""

import copy
import itertools

import pytest
import torch
import torch.distributed as dist

from compopt import losses
from tests.helpers import generator, whole
from tests.pool import the_pool
from tests.reference import LossReference

N, BATCH = 30, 12
CASES = {
    "ap": (losses.AveragePrecisionLoss, {"gamma": 0.6, "margin": 0.8}),
    "pauc": (losses.PartialAUCLoss, {"gamma": 0.6, "tau": 0.7, "margin": 0.8}),
    "two_way": (losses.TwoWayPartialAUCLoss, {"gamma": 0.6, "tau": 0.7, "tau_positive": 1.3, "margin": 0.8}),
    "cvar": (losses.CVaRPartialAUCLoss, {"max_fpr": 0.4, "lr": 0.3, "margin": 0.8}),
    "two_way_cvar": (
        losses.TwoWayCVaRPartialAUCLoss,
        {"max_fpr": 0.4, "min_tpr": 0.5, "gamma": 0.6, "lr": 0.3, "margin": 0.8},
    ),
    "robust": (losses.RobustLoss, {"gamma": 0.6, "tau": 0.7}),
    "robust_total": (losses.RobustLoss, {"gamma": 0.6, "tau": 0.7}),
    "ndcg": (losses.NDCGLoss, {"gamma": 0.6, "margin": 0.8}),
    "listwise": (losses.ListwiseLoss, {"gamma": 0.6}),
}
CASES_BY_KIND = {kind: name for name, (kind, _) in CASES.items()}


def batch(name, step):
    """Arguments of a call; in odd steps the last sample repeats the first (not for "ndcg" and "listwise")."""
    g = generator(step)
    if name in ("ndcg", "listwise"):
        scores = torch.randn(3, 5, generator=g, dtype=torch.float64)
        relevance = torch.randint(-2, 4, (3, 5), generator=g).clamp(min=0)
        relevance[0, 0] = 2
        return scores, relevance, torch.randperm(N, generator=g)[:15].view(3, 5)
    scores, index = torch.randn(BATCH, generator=g, dtype=torch.float64), torch.randperm(N, generator=g)[:BATCH]
    labels = index % 3 == 0
    labels[0] = True
    if step % 2:
        index[-1], labels[-1] = index[0], labels[0]
    return (scores, index) if name.startswith("robust") else (scores, labels.to(torch.int64), index)


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_values_gradients_and_rows_equal_the_reference(name, window):
    kind, hyper = CASES[name]
    total = name == "robust_total"
    loss, ref = kind(None if total else N, **hyper, dtype=torch.float64), LossReference(**hyper)
    for step in range(8):
        given, *rest = batch(name, step)
        a, b = (given.clone().requires_grad_() for _ in range(2))
        value, surrogate = getattr(ref, name)(a, *rest)
        got = loss(b, *(rest[:-1] if total else rest))
        (2.5 * surrogate).backward()
        (2.5 * got).backward()
        torch.testing.assert_close(got.item(), value, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(b.grad, a.grad, rtol=1e-10, atol=1e-12)
        if step % window == window - 1:
            loss.step()
            ref.step()
    for row, want in ref.rows.items():
        read = loss.read(torch.tensor([row]))
        found = torch.cat([value[0] for key, value in read.items() if key != "count"])
        found = found.exp() if "log_u" in read else found
        torch.testing.assert_close(found, torch.tensor(want, dtype=torch.float64), rtol=1e-12, atol=1e-12)
    if total:
        torch.testing.assert_close(loss.state["log_v"].exp().item(), ref.total[0], rtol=1e-12, atol=0)
    assert total or ref.rows


def gradients_on_ranks(group, name, options):
    """Return value and this rank's gradient / world size for three calls; all ranks but the last have one sample."""
    kind, hyper = CASES[name]
    total, rank, ranks = name == "robust_total", dist.get_rank(group), dist.get_world_size(group)
    loss = kind(None if total else N, **hyper, dtype=torch.float64, process_group=group, **options)
    found = []
    for step in range(3):
        arguments = batch(name, step)
        arguments = arguments[:-1] if total else arguments
        bounds = [0, *range(1, ranks), len(arguments[0])]
        own = slice(bounds[rank], bounds[rank + 1])
        given, *rest = (x[own] for x in arguments)
        given = given.clone().requires_grad_()
        value = loss(given, *rest)
        value.backward()
        loss.step()
        found.append((value.detach(), given.grad / ranks))
    return found


@pytest.mark.distributed
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.full] * (name not in ("ap", "ndcg"))) for name in CASES]
)
@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.full)])
def test_gradients_of_many_ranks_are_those_of_one(name, ranks):
    """The average over ranks (DDP) cancels the factor of the world size; a rank may have no positive or no negative."""
    options = {} if name == "robust_total" else {"shard": True}
    single, several = (
        the_pool().run(gradients_on_ranks, 1, name, {})[0],
        the_pool().run(gradients_on_ranks, ranks, name, options),
    )
    for step, (value, gradient) in enumerate(single):
        torch.testing.assert_close(torch.cat([found[step][1] for found in several]), gradient, rtol=1e-12, atol=1e-14)
        for found in several:
            torch.testing.assert_close(found[step][0], value, rtol=1e-12, atol=1e-14)


def test_sample_groups_have_temperatures_of_their_own():
    each, task = torch.tensor([0.1, 0.8, 0.5, 0.3], dtype=torch.float64), torch.tensor([0, 1, 2, 3])
    loss = losses.RobustLoss([{"n": 2, "tau": 0.2}, {"n": 2, "tau": 3.0}], gamma=1.0)
    parts = [losses.RobustLoss(4, gamma=1.0, tau=tau) for tau in (0.2, 3.0)]
    expected = sum(part(each[at], task[at]) for part, at in zip(parts, (slice(0, 2), slice(2, 4)), strict=True)) / 2
    torch.testing.assert_close(loss(each, task), expected)


def test_large_losses_do_not_overflow():
    each = torch.tensor([1e3, 2e3], requires_grad=True)
    value = losses.RobustLoss(tau=0.1)(each)
    value.backward()
    assert value.isfinite()
    torch.testing.assert_close(each.grad, torch.tensor([0.0, 1.0]), rtol=1e-3, atol=1e-3)  # 20,000 nats in float32


S, Y, I = torch.zeros(3), torch.tensor([1, 0, 0]), torch.arange(3)  # noqa: E741
WRONG = [
    ("ap", (S[:, None], Y, I), ValueError, r"scores must have shape \(B,\), got \(3, 1\)"),
    ("ap", (S, Y[:2], I), ValueError, r"labels must have the shape \(3,\), as scores, got \(2,\)"),
    ("ap", (S, Y, I + N), IndexError, f"index {N} is outside n={N}"),
    ("ap", (S, 0 * Y, I), ValueError, "no sample that AveragePrecisionLoss is a mean over"),
    ("pauc", (S, Y + 1, I), ValueError, "no negatives"),
    ("pauc", (I, Y, I), TypeError, "scores must be a floating-point tensor"),
    ("robust", (S, None), TypeError, "index is None"),
    ("ndcg", (S[None], Y, I[None]), ValueError, r"relevance must have the shape \(1, 3\), as scores"),
    ("ndcg", (S[None], Y[None], I[None], S[:2]), ValueError, r"items must have the shape \(1,\)"),
    ("ndcg", (S[None], Y[None], I[None], 0 * S[:1]), ValueError, "items must be at least 1"),
    ("ndcg", (S[None], Y[None] - 1, I[None]), ValueError, "relevance must be finite and at least 0 .*, got -1"),
    ("listwise", (S[None], Y[None] * torch.inf, I[None]), ValueError, "relevance must be finite"),
    ("ap", (S, [1, 0, 0], I), TypeError, "labels must be a tensor"),
]


@pytest.mark.parametrize(("name", "arguments", "error", "message"), WRONG)
def test_wrong_input_is_named_and_changes_nothing(name, arguments, error, message):
    loss = CASES[name][0](N)
    with pytest.raises(error, match=message):
        loss(*arguments)
    assert loss.pending == 0


def test_wrong_hyper_parameters():
    with pytest.raises(ValueError, match="tau must be greater than 0, got 0"):
        losses.PartialAUCLoss(N, tau=0)
    with pytest.raises(ValueError, match=r"max_fpr must be in \(0, 1\], got 2"):
        losses.CVaRPartialAUCLoss(N, max_fpr=2)
    with pytest.raises(ValueError, match="margin must be greater than 0"):
        losses.AveragePrecisionLoss(N, margin=-1.0)
    with pytest.raises(TypeError, match="unexpected keyword argument 'Lambda'"):
        losses.PartialAUCLoss(N, Lambda=1.0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["ndcg", "listwise"])
def test_differences_of_half_precision_are_taken_in_full(name, dtype):
    scores, found = torch.tensor([[0.0, 300.0, -300.0]]).to(dtype), []  # squares overflow float16
    for given in (scores, scores.float()):
        leaf, loss = given.clone().requires_grad_(), CASES[name][0](N)
        loss(leaf, torch.tensor([[1, 0, 0]]), I[None]).backward()
        loss.step()
        found.append((leaf.grad, *loss.read(I[:1]).values()))
    (gradient, *rows), (expected, *expected_rows) = found
    assert torch.equal(gradient, expected.to(dtype)) and all(map(torch.equal, rows, expected_rows))


# values that are not finite ----------------------------------------------------------------------------------------


def hostile(name):
    """Return arguments of which no mean is finite, in float32, by a description."""
    scores, *rest = batch(name, 0)
    found = {"all scores": (1e300 * scores, *rest)}
    places = [(0, 0), (0, 1), (0, 2)] if scores.dim() == 2 else [0, 1, 2, BATCH - 1]
    for at, value in itertools.product(places, (torch.nan, torch.inf, -torch.inf, 1e200, -1e200)):
        bad = scores.clone()
        bad[at] = value
        found[f"scores[{at}] = {value}"] = (bad, *rest)
    if name in ("ndcg", "listwise"):
        for value in (torch.nan, torch.inf, 1e39, *((2000, 128, 1e-30) if name == "ndcg" else ())):
            relevance = torch.where(rest[0] > 0, torch.tensor(value, dtype=scores.dtype), 0)
            found[f"relevance {value}"] = (scores, relevance, rest[1])
        for value in (torch.nan, torch.inf, 0.0):
            found[f"items {value}"] = (scores, *rest, torch.tensor([value, 5.0, 5.0]))
    elif not name.startswith("robust"):
        for at in range(3):
            labels = rest[0].to(scores.dtype)
            labels[at] = torch.nan
            found[f"labels[{at}]"] = (scores, labels, rest[1])
    return found


def committed(loss):
    """Return all tensors of the state."""
    state = loss.state_dict()
    return [*state["rows"].values(), *state["state"].values()]


@pytest.mark.filterwarnings("ignore:.*NaN, infinite or too large to compare.*:UserWarning")
@pytest.mark.parametrize("name", CASES)
def test_what_is_not_finite_is_refused_or_withholds_the_batch(name):
    """Labels, relevance and items are refused; with other scores the loss is not finite and nothing is committed."""
    kind, hyper = CASES[name]
    loss = kind(None if name == "robust_total" else N, **hyper, dtype=torch.float32)
    drop = 1 if name == "robust_total" else 0
    arguments = batch(name, 1)
    loss(arguments[0].float(), *arguments[1 : len(arguments) - drop])
    loss.step()
    before, wrong = committed(loss), []
    for what, (scores, *rest) in hostile(name).items():
        given = scores.float().requires_grad_(), *rest[: len(rest) - drop]
        if "scores" in what:
            value = loss(*given)
            value.backward()
            right = not value.isfinite()
        else:
            with pytest.raises(ValueError, match=f"{what.partition(' ')[0].partition('[')[0]} must be .*, got "):
                loss(*given)
            right = loss.pending == 0
        loss.step()
        if not (right and all(torch.equal(a, b) for a, b in zip(before, committed(loss), strict=True))):
            wrong.append(what)
    assert not wrong


def test_a_warning_names_the_number_of_scores():
    with pytest.warns(UserWarning, match="2 scores, or values of samples, of a batch are NaN, infinite or too large"):
        losses.PartialAUCLoss(N)(torch.tensor([0.0, torch.nan, torch.inf]), Y, I)


@pytest.mark.parametrize("kind", [kind for kind in vars(losses).values() if isinstance(kind, type)])
def test_numbers_that_no_run_writes_are_refused(kind):
    """Numbers for all samples are finite, and updates are counted from 0."""
    try:
        loss = kind(n=8) if kind is not losses.RobustLoss else kind()
    except TypeError:  # a base class
        return
    state, before = loss.state_dict(), whole(loss)
    numbers = getattr(loss, "numbers", ())
    bad = [("state", name, None, value) for name in numbers for value in (torch.nan, -torch.inf)]
    bad += [("state", "updates", None, -1.0)] if "updates" in numbers else []
    bad += [("rows", name, None, torch.nan) for name in state["rows"] if name != "count"]
    assert bad or not loss.numbers
    for part, name, entry, value in bad:
        changed = copy.deepcopy(state)
        (changed[part][name] if entry is None else changed[part][name][entry]).fill_(value)
        if part == "rows":
            changed["rows"]["count"].fill_(1)
        with pytest.raises(ValueError, match=f"{entry or name}.* must be finite"):
            loss.load_state_dict(changed)
        assert whole(loss) == before


def test_a_mark_of_other_parts_is_refused_where_there_are_none():
    loss = losses.PartialAUCLoss(n=8)
    state = loss.state_dict()
    state["rows"]["log_u"].fill_(-torch.inf), state["rows"]["count"].fill_(1)
    with pytest.raises(ValueError, match="column 'log_u' of the checkpoint must be finite, row 0 has"):
        loss.load_state_dict(state)
