"""The study of the default: what it adds to the library is what its pages say."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import compopt
from benchmarks.studies.default import mining
from benchmarks.studies.default.arms import ARMS, DEFAULT, VARIANTS
from benchmarks.studies.default.losses import LOSSES, MomentumQueue, MovedQueue, loss_of
from benchmarks.studies.default.variants import CHANGED, NotBalanced, NotMoved
from compopt.normalizers.memory import MemoryNormalizer

TAU, DIM, B = 0.1, 8, 6


def test_every_arm_has_a_loss() -> None:
    assert {cell.loss for cell in ARMS.values()} == {*LOSSES, *CHANGED, DEFAULT}
    assert set(VARIANTS) == set(CHANGED)


@pytest.mark.parametrize("mode", ["bimodal", "unimodal"])
@pytest.mark.parametrize("moved", [False, True])
def test_out_of_balance_is_the_softmax_with_constant_past_features(mode: str, moved: bool) -> None:
    kind = NotBalanced if moved else type("Both", (NotBalanced, NotMoved), {})
    est = compopt.ContrastiveEstimator(kind(DIM, 3 * B), compopt.FixedTemperature(TAU), mode=mode, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    past: list[list[torch.Tensor]] = []
    for call in range(3):
        z = F.normalize(torch.randn(2, B, DIM, generator=generator, dtype=torch.float64), dim=2)
        expected, given = (z.clone().requires_grad_() for _ in range(2))
        softmax(expected, past, mode, moved).backward()
        est(*given, torch.arange(B) + B * call).backward()
        assert torch.allclose(given.grad, expected.grad, rtol=0, atol=1e-12)
        est.step()
        past.append([z[0], z[1]])


def softmax(z: torch.Tensor, past: list[list[torch.Tensor]], mode: str, moved: bool) -> torch.Tensor:
    """DCL by autograd, with the batches before as further negatives."""
    z, total = F.normalize(z, dim=2), z.new_zeros(())
    itself = torch.eye(B, dtype=torch.bool)
    means = [side.detach().mean(0) for side in z] if mode == "bimodal" else [z.detach().mean((0, 1))] * 2
    for own in range(2):
        sides = [1 - own] if mode == "bimodal" else [0, 1]
        logits = [(z[own] @ z[side].T).masked_fill(itself, -torch.inf) for side in sides]
        for batch in past:
            then = [side.mean(0) for side in batch] if mode == "bimodal" else [torch.stack(batch).mean((0, 1))] * 2
            shift = [now - old if moved else 0 for now, old in zip(means, then, strict=True)]
            logits += [z[own] @ (batch[side] + shift[side]).T for side in sides]
        total = total + (TAU * (torch.cat(logits, 1) / TAU).logsumexp(1) - (z[own] * z[1 - own]).sum(1)).mean()
    return total / 2


@pytest.mark.parametrize("unimodal", [False, True])
def test_a_moved_queue_of_momentum_keys_follows_their_mean(unimodal: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    moved, plain = (kind(TAU, 3 * B, 0.99, False, unimodal) for kind in (MovedQueue, MomentumQueue))
    past: list[torch.Tensor] = []
    for _ in range(3):
        z, keys = (torch.randn(2, B, DIM, generator=generator, dtype=torch.float64) for _ in range(2))
        means = keys.mean((0, 1)).expand(2, 1, DIM) if unimodal else keys.mean(1, keepdim=True)
        moved.encoded = plain.encoded = list(keys)
        plain.queue = [torch.cat([batch[side] + means[side] for batch in past]) for side in range(2)] if past else []
        assert torch.allclose(moved(*z, torch.arange(B)), plain(*z, torch.arange(B)), rtol=0, atol=1e-12)
        past.append(keys - means)


def test_mined_batches_have_what_the_teacher_finds_close_but_not_the_closest() -> None:
    """Twelve directions, eight samples each, in pairs of equal ones."""
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


def test_what_is_compared_with_is_built_for_every_arm() -> None:
    """A loss takes the settings that its arm begins with."""
    task = SimpleNamespace(n=4096, mode="bimodal")
    for arm, cell in ARMS.items():
        if arm.startswith("glyphs") and cell.batch == 16:
            loss = loss_of(cell, cell.first, task)
            assert isinstance(loss, torch.nn.Module | compopt.Estimator), arm
    assert isinstance(loss_of(ARMS["glyphs: recommended, 16"], {}, task).normalizer, MemoryNormalizer)
