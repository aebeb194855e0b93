"""The study of the default: its additions to the library behave as its pages state."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import compopt
from benchmarks.studies.default.arms import ARMS, VARIANTS
from benchmarks.studies.default.losses import DualMemory, loss_of

TAU, DIM, B = 0.1, 8, 6


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
