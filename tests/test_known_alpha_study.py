"""The study of known normalizers: its weights against dense ones, and all steps from the data to the page."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import compopt
from benchmarks.studies import known_alpha
from benchmarks.studies.search import SEEDS, Search
from recipes.text import TextPairs
from tests.helpers import carried_out, near

N, B, TAU = 96, 32, known_alpha.TAU


def batches(count):
    """Yield features with near positives, ``(2, B, DIM)``, and the positions of their samples."""
    generator = torch.Generator().manual_seed(0)
    for number in range(count):
        z = torch.randn(2, B, known_alpha.DIM, generator=generator)
        yield torch.stack([z[0], z[0] + z[1]]) + 0.5, torch.arange(B) + number % 3 * B


def trained(loss):
    """Return an estimator of the study that has seen every sample, some of them twice."""
    est = known_alpha.build(loss, N)
    for z, index in batches(4):
        est(*z, index)
        est.step()
    return est


def gradients(est, seen):
    z, index = list(batches(seen + 1))[-1]
    return torch.stack(est.feature_gradients(*z, index)[1:]), z, index


BOUNDS = {"": lambda w: w, ", bounded": lambda w: w.clamp(max=1), ", saturated": lambda w: w / (1 + w)}


def dense(z, total, outer=False, bound="", queue=None, own_slots=None):
    """Return gradients for pair weights ``exp(s_ij / tau) / total_i``; pairs with a queue move only the anchor."""
    z = z.clone().requires_grad_()
    a, value = F.normalize(z, dim=2), 0.0
    for side in range(2):
        own, other = a[side], a[1 - side]
        s, positive = own @ other.T, torch.linalg.vecdot(own, other)[:, None]
        weight = BOUNDS[bound](((s / TAU).exp() / total[:, side, None]).fill_diagonal_(0).detach())
        value = value + (weight * s).sum() - ((1 if outer else weight.sum(1, keepdim=True)) * positive).sum()
        if queue is not None:
            past = own @ queue[side].T
            weight = ((past / TAU).exp() / total[:, side, None]).masked_fill(own_slots, 0).detach()
            value = value + (weight * (past - torch.linalg.vecdot(own, other.detach())[:, None])).sum()
    return torch.autograd.grad(value / (2 * B), z)[0]


@pytest.mark.parametrize("bound", ["", ", bounded"])
def test_a_last_visit_weighs_the_pairs(bound):
    est = trained(f"SogCLR, last visit{bound}")
    rows = est.read(torch.arange(B, 2 * B))["log_u"]
    found, z, _ = gradients(est, seen=4)
    near(found, dense(z, rows.exp() * (B - 1), outer=True, bound=bound), 1e-5)


def test_scaled_weights_are_the_same_but_for_a_factor():
    est = trained("SogCLR, positive, last visit")
    plain, *_ = gradients(est, seen=4)
    before = est.normalizer.sums.mean()
    est.normalizer.scaled = True
    scaled, *_ = gradients(est, seen=4)
    near(est.normalizer.sums.mean(), torch.tensor(1.0), 1e-5)
    near(scaled * before, plain, 1e-5)


@pytest.mark.parametrize(("rows", "bound"), [("", ""), ("", ", bounded"), ("", ", saturated"), (", last visit", "")])
def test_a_queue_weighs_the_pairs(rows, bound):
    est = trained(f"recommended, queue{rows}{bound}")
    state, last = est.normalizer.state, copy.deepcopy(est.normalizer.log_u)
    found, z, index = gradients(est, seen=4)
    a = F.normalize(z, dim=2).flip(0)
    queue, own_slots = state["queue"] + a.mean(1, keepdim=True), state["keys"][0] == index[:, None]
    past = [(F.normalize(own, dim=1) @ side.T / TAU).exp() for own, side in zip(z, queue, strict=True)]
    total = torch.stack([each.masked_fill(own_slots, 0).sum(1) for each in past], dim=1)
    if rows:
        positive = torch.linalg.vecdot(*F.normalize(z, dim=2))[:, None]
        total = total + last[index].exp() * (positive / TAU).exp() * (B - 1)
    else:
        slots = (~own_slots).sum(1, keepdim=True)
        total = total * (slots + B - 1) / slots
    near(found, dense(z, total, bound=bound, queue=queue, own_slots=own_slots), 1e-4)


def test_a_quarter_of_the_batch_weighs_the_pairs():
    est = trained("DCL, quarter")
    found, z, _ = gradients(est, seen=4)
    a = F.normalize(z, dim=2)
    few = B // 4
    parts = [(own @ other[:few].T / TAU).exp() for own, other in zip(a, a.flip(0), strict=True)]
    sums = torch.stack([part.fill_diagonal_(0).sum(1) for part in parts], dim=1)
    count = torch.full((B, 1), float(few)) - (torch.arange(B) < few)[:, None].float()
    near(found, dense(z, sums / count * (B - 1)), 1e-5)


LIBRARY = {
    "DCL": lambda: compopt.DCLEstimator(TAU),
    "SogCLR": lambda: compopt.SogCLREstimator(N, known_alpha.GAMMA, TAU),
    "SogCLR, positive": lambda: compopt.SogCLREstimator(N, known_alpha.GAMMA, TAU, reference="positive"),
    "recommended": lambda: compopt.recommended(known_alpha.DIM, batch_size=B),
    "NeuCLIP": lambda: compopt.NeuCLIPEstimator(known_alpha.DIM, tau=TAU, prototypes=1024, restart_every=100),
}


@pytest.mark.parametrize("loss", list(known_alpha.TODAY))
def test_with_todays_alpha_the_gradient_is_the_librarys(loss):
    est, today = trained(loss), LIBRARY[known_alpha.TODAY[loss]]()
    for z, index in batches(4):
        today(*z, index)
        today.step()
    known, *_ = gradients(est.eval(), seen=3)
    est.normalizer.known = False
    found, *_ = gradients(est, seen=3)
    assert torch.equal(found, gradients(today.eval(), seen=3)[0])
    assert not torch.allclose(found, known, rtol=1e-3)


@pytest.fixture()
def study(monkeypatch, tmp_path):
    """Reduce the study to few samples of words, one learning rate, no glyphs."""
    monkeypatch.setenv("COMPOPT_CACHE", str(tmp_path))
    monkeypatch.setattr("benchmarks.studies.default.tasks.text.load", made_up)
    monkeypatch.setattr(known_alpha, "EVERY", 4)  # once in each pass
    losses = ("DCL", "recommended", "recommended, queue, bounded", "NeuCLIP", "NeuCLIP, before")
    arms = {
        f"words, 16: {arm.loss}": replace(arm, after="", batch=16, grids={"lr": (1e-2,)})
        for arm in known_alpha.ARMS.values()
        if arm.data == "words" and arm.batch == 64 and arm.loss in losses
    }
    monkeypatch.setattr(known_alpha, "ARMS", arms)
    monkeypatch.setattr(known_alpha, "STUDY", Search(arms, tmp_path / "runs.jsonl", known_alpha.score))
    return known_alpha.STUDY


def made_up(folder, held_out, limit):
    words = [f"word{at}" for at in range(80)]
    return TextPairs(words, [f"of {word}" for word in words], np.arange(64), np.arange(64, 72), np.arange(72, 80))


def test_the_description_says_how_many_runs_there_are():
    runs = sum(len(SEEDS) + sum(map(len, arm.grids.values())) for arm in known_alpha.ARMS.values())
    assert f"There are {runs} runs" in known_alpha.__doc__


@pytest.mark.slow
def test_every_arm_comes_onto_the_page(study):
    results = carried_out(study, known_alpha.run_one)
    page = known_alpha.page(results)
    assert len(results) == 4 * len(study.arms)
    first = [run for run in results.values() if run["job"]["seed"] == SEEDS[0]]
    assert all(list(run["exact"]) == ["1.5", "3.5"] for run in first)
    for name, arm in study.arms.items():
        assert page.count(f"| words, 16 | {arm.loss} |") == 1 and page.count("| **lr 0.01** |") == len(study.arms)
        runs = [run["passes"] for run in results.values() if run["job"]["arm"] == name]
        assert all(bool(passes) == (arm.loss in known_alpha.TODAY) for passes in runs)
    known = sum(arm.loss in known_alpha.TODAY for arm in study.arms.values())
    cells = page.partition("## Recall")[2]
    assert cells.count("±") == len(study.arms) + known, "recall, and differences from today's"
