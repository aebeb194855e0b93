"""The study of the default: its additions to the library behave as its pages state."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import compopt
from benchmarks.studies.default import mining
from benchmarks.studies.default.arms import ARMS, VARIANTS
from benchmarks.studies.default.losses import DualMemory, Followed, MovedQueue, loss_of
from benchmarks.studies.default.tasks import packages
from benchmarks.studies.default.training import Setting, train
from tests.training import Encoders, micro_batches

TAU, DIM, B = 0.1, 8, 6


def test_mined_batches_have_what_the_teacher_finds_close_but_not_the_closest() -> None:
    """Test twelve directions with eight samples each, in pairs of equal samples."""
    pytest.importorskip("pymetis", reason="pip install -e '.[studies]'")
    directions = torch.eye(12).repeat_interleave(8, 0)
    within = torch.randn(48, 12, generator=torch.Generator().manual_seed(0)).repeat_interleave(2, 0)
    z = F.normalize(directions + 0.05 * within)
    edges = mining.neighbours([z, z], skip=1, kept=6)
    assert edges.shape == (2, 96, 6)
    assert not (edges == torch.arange(96)[:, None]).any()
    assert not (edges == (torch.arange(96) ^ 1)[:, None]).any(), "the equal one is skipped"
    assert torch.equal(edges[0] // 8, (torch.arange(96) // 8)[:, None].expand(-1, 6))
    clusters = torch.from_numpy(mining.partition(edges, 8))
    assert clusters.view(12, 8).unique(dim=1).shape == (12, 1), "a direction is a cluster"


def test_an_epoch_of_mined_batches_has_every_sample_once_and_clusters_whole() -> None:
    clusters = torch.arange(40).remainder(10)
    order = mining.Clustered(clusters, size=8, seed=0)
    epochs = [torch.stack([order(5 * epoch + number) for number in range(5)]) for epoch in range(2)]
    for epoch in epochs:
        assert epoch.flatten().sort().values.tolist() == list(range(40))
        assert all(clusters[batch].bincount(minlength=10)[clusters[batch]].eq(4).all() for batch in epoch)
    assert not torch.equal(*epochs)
    again = mining.Clustered(clusters, size=8, seed=0)
    assert torch.equal(again(7), epochs[1][2])


@pytest.mark.parametrize("mode", ["bimodal", "unimodal"])
def test_momentum_features_train_a_model_as_the_study_s_own_queue_does(mode: str) -> None:
    """The library's estimator and encoder give the same weights after twenty updates as the study's loss and copy."""

    def trained(loss: torch.nn.Module) -> list[torch.Tensor]:
        model = Encoders()
        loss.watch(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step, (x1, x2, index) in enumerate(micro_batches(20)):
            loss(*model(x1, x2), torch.arange(len(index)) + len(index) * step).backward()
            optimizer.step()
            loss.step()
            optimizer.zero_grad()
        return [p.detach() for p in model.parameters()]

    est = compopt.MemoryEstimator(Encoders().first.out_features, 40, TAU, True, mode=mode, dtype=torch.float64)
    own = trained(Followed(est))
    for p, q in zip(own, trained(MovedQueue(TAU, 40, 0.99, False, mode == "unimodal")), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-12)


def test_what_is_compared_with_is_built_for_every_arm() -> None:
    """Every loss accepts the first settings of its arm, but for those whose code was removed."""
    task = SimpleNamespace(n=4096, mode="bimodal")
    for arm, cell in ARMS.items():
        if arm.startswith("glyphs") and cell.batch == 16 and cell.loss not in ("Residual", *VARIANTS[:2]):
            loss = loss_of(cell, cell.first, task)
            assert isinstance(loss, torch.nn.Module | compopt.Estimator), arm
    assert isinstance(loss_of(ARMS["glyphs: recommended, 16"], {}, task), compopt.MemoryEstimator)
    for removed, commit in ((f"recommended, {VARIANTS[0]}", "2310a77"), ("Residual", "95c7f8b6")):
        with pytest.raises(ValueError, match=f"commit {commit}"):
            loss_of(ARMS[f"glyphs: {removed}, 16"], {}, task)


@pytest.mark.parametrize("mode", ["bimodal", "unimodal"])
def test_contaccum_is_the_cross_entropy_of_batch_and_queue(mode: str) -> None:
    g = torch.Generator().manual_seed(0)
    loss, queue = DualMemory(TAU, 2 * B, mode == "unimodal"), torch.zeros(2, 0, DIM, dtype=torch.float64)
    for _ in range(4):
        z = torch.randn(2, B, DIM, generator=g, dtype=torch.float64, requires_grad=True)
        one, two = torch.cat([queue, F.normalize(z, dim=-1)], 1)
        queue = torch.stack([one, two]).detach()[:, -2 * B :]
        expected = (_cross_entropy(one, two, mode) + _cross_entropy(two, one, mode)) / 2
        found = loss(z[0], z[1], torch.arange(B))
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(*(torch.autograd.grad(value, z)[0] for value in (found, expected)))


def _cross_entropy(anchors: torch.Tensor, candidates: torch.Tensor, mode: str) -> torch.Tensor:
    """Return tau times the mean cross-entropy of all anchors, with the other anchors as candidates if unimodal."""
    logits = anchors @ candidates.T
    if mode == "unimodal":
        logits = torch.cat([logits, (anchors @ anchors.T).fill_diagonal_(-torch.inf)], 1)
    return TAU * F.cross_entropy(logits / TAU, torch.arange(len(anchors)))


@pytest.mark.parametrize("share", [0.1, 0.75])
def test_the_learning_rate_is_highest_at_the_end_of_the_warm_up(share: float, monkeypatch: Any) -> None:
    rates = []

    class Watched(torch.optim.AdamW):
        def step(self, closure: Any = None) -> None:
            rates.append(self.param_groups[0]["lr"])
            super().step(closure)

    monkeypatch.setattr(torch.optim, "AdamW", Watched)
    x1, x2 = torch.randn(2, 32, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    task = SimpleNamespace(n=32, model=Encoders, inputs=lambda index, draws: (x1[index], x2[index]))
    train(task, lambda task: compopt.DCLEstimator(TAU), Setting(batch=8, lr=0.01, samples=320, warmup=share))
    assert len(rates) == 40 and max(rates) == pytest.approx(0.01)
    assert abs(rates.index(max(rates)) - share * 40) <= 1


@pytest.mark.parametrize("arm", [name for name in ARMS if "warm-up" in name and name.startswith("icons")])
def test_arms_with_another_warm_up_differ_from_others_in_nothing_else(arm: str) -> None:
    cell = ARMS[arm]
    assert round(100 * cell.warmup) == int(arm.split("warm-up ")[1].split(" %")[0])
    if cell.after:
        same = {"warmup": ARMS[cell.after].warmup, "grids": ARMS[cell.after].grids, "after": ""}
        assert replace(cell, **same) == ARMS[cell.after]
    else:
        assert cell.loss in ("recommended", "momentum features")


def test_packages_pair_short_and_long_descriptions_without_repeated_paragraphs(tmp_path: Path) -> None:
    entries = [
        f"Package: p{n}\nDescription-md5: {n}\nDescription-en: {short}\n {long}\n of the package.\n .\n More."
        for n, (short, long) in enumerate([("one", "first words"), ("one (data)", "first words"), ("two", "others")])
    ]
    (tmp_path / "Translation-en").write_text("\n\n".join(entries) + "\n")
    pairs = packages(tmp_path)
    assert pairs.queries == ["one"] and pairs.documents == ["first words of the package."]
