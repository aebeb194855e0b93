"""compopt.testing.check_distributed finds the usual mistakes of losses on several ranks, and no others."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn
import torch.nn.functional as F
from torch import nn

import compopt
from compopt.testing import check_distributed

pytestmark = [pytest.mark.slow, pytest.mark.distributed]


def gathered(z, gradient):
    """Return the features of all ranks; ``gradient``: "none", "own" or "all"."""
    if not dist.is_initialized():
        return z
    if gradient == "all":
        return torch.cat(torch.distributed.nn.all_gather(z))
    parts = [torch.empty_like(z) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, z.detach())
    if gradient == "own":
        parts[dist.get_rank()] = z
    return torch.cat(parts)


class Loss(nn.Module):
    """InfoNCE in both directions, of all anchors or of this rank's, with or without a gradient of other features."""

    def __init__(self, anchors, gradient, times_ranks=False, shift=True):
        super().__init__()
        self.anchors, self.gradient, self.times_ranks, self.shift = anchors, gradient, times_ranks, shift

    def forward(self, z1, z2):
        z1, z2 = F.normalize(z1, dim=1), F.normalize(z2, dim=1)
        all1, all2 = (gathered(z, self.gradient) for z in (z1, z2))
        if self.anchors == "all":
            z1, z2 = all1, all2
        first = dist.get_rank() * len(z1) if dist.is_initialized() and self.anchors == "own" and self.shift else 0
        labels = torch.arange(len(z1)) + first
        loss = sum(F.cross_entropy(a @ b.T / 0.2, labels) for a, b in ((z1, all2), (z2, all1))) / 2
        return loss * dist.get_world_size() if self.times_ranks and dist.is_initialized() else loss


class NTXentLoss(Loss):
    """The loss of all anchors, of which the own features have a gradient, on every rank."""

    def __init__(self):
        super().__init__("all", "own")


class Detached(nn.Module):
    """A loss whose gradient is zero on several ranks."""

    def forward(self, z1, z2):
        value = (z1 * z2).sum(1).mean()
        return value.detach() + 0 * z1.sum() if dist.is_initialized() else value


class Correlations(nn.Module):
    """Barlow Twins: the correlations of the features over the samples of all ranks."""

    def forward(self, z1, z2):
        c, size = z1.T @ z2, dist.get_world_size() if dist.is_initialized() else 1
        if size > 1:
            total = c.detach().clone()
            dist.all_reduce(total)
            c = c + (total - c.detach())
        return (c / (len(z1) * size) - torch.eye(len(c))).square().sum()


class Centred(nn.Module):
    """A loss of features whose mean is a moving average, kept on each rank."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(8, dtype=torch.float64))

    def forward(self, z1, z2):
        self.mean = 0.9 * self.mean + 0.1 * z1.detach().mean(0)
        return (z1 * z2).sum(1).mean()


def sogclr():
    return compopt.SogCLREstimator(12, dtype=torch.float64)


def info_nce():
    return compopt.InfoNCEEstimator(0.2, directions="forward")


CASES = {
    "of all anchors, every feature with a gradient": (Loss("all", "all"), ""),
    "of own anchors, every feature with a gradient": (Loss("own", "all"), ""),
    "of all anchors, own features with a gradient": (NTXentLoss, "0.5 times that of one process (1 / K)"),
    "the same, times the number of ranks": (Loss("all", "own", times_ranks=True), "the value differs"),
    "of own anchors, own features with a gradient": (Loss("own", "own"), "gathered features carry no gradient"),
    "labels of the first rank": (Loss("own", "all", shift=False), "the value differs"),
    "correlations": (Correlations(), "0.5 times that of one process (1 / K)"),
    "no gradient": (Detached(), "0 times that of one process"),
    "a buffer on each rank": (Centred(), "the state differs"),
    "SogCLR": (sogclr, ""),
    "InfoNCE": (info_nce, ""),
}


@pytest.mark.parametrize("case", CASES)
def test_a_loss_on_two_ranks(case):
    loss, message = CASES[case]
    (result,) = check_distributed(loss, world_sizes=(2,))
    assert (message in result.message) if message else not result.message, str(result)
    assert str(result).startswith(f"2 ranks: {result.message or 'as one process'}")


def test_three_ranks_and_one():
    one, three = check_distributed(Loss("all", "own"), world_sizes=(1, 3))
    assert not one.message and one.gradient < 1e-12
    assert "0.333 times" in three.message and abs(three.factor - 1 / 3) < 1e-9 and three.value < 1e-12


def with_index(loss, z1, z2, index):
    return loss(z1, z2, labels=index // 2)


def supcon():
    return compopt.losses.SupConLoss()


def test_a_loss_that_is_called_in_another_way():
    (result,) = check_distributed(supcon, world_sizes=(2,), call=with_index)
    assert not result.message, str(result)


def fails():
    raise ValueError("built on a rank")


def test_errors():
    with pytest.raises(ValueError, match=r"must divide samples=12, got \[5\]"):
        check_distributed(sogclr, world_sizes=(5,))
    with pytest.raises(TypeError, match="loss cannot be sent to the ranks.*not as a lambda"):
        check_distributed(lambda: sogclr(), world_sizes=(2,))
    with pytest.raises(Exception, match="built on a rank"):
        check_distributed(fails, world_sizes=(2,))
