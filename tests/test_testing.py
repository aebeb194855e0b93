"""``compopt.testing`` accepts the library's normalizers, and names the rule that a normalizer breaks."""

import pytest
import torch
from torch import Tensor

import compopt
from compopt import functional as F
from compopt.estimator import Column, Estimate
from compopt.testing import check_normalizer

N, DIM = 24, 6
ACCEPTED = {
    "moving average": lambda: compopt.MovingAverageEstimator(N, gamma=0.6),
    "relative to the positive": lambda: compopt.MovingAverageEstimator(N, gamma=0.6, reference="positive"),
    "batch": compopt.BatchNormalizer,
    "batch with the positive": lambda: compopt.BatchNormalizer(include_positive=True),
    "memory": lambda: compopt.MemoryNormalizer(DIM, length=20),
    "network": lambda: compopt.NeuralNormalizer(DIM, prototypes=16, updates=2, restart_every=3),
    "network, through alpha": lambda: compopt.NeuralNormalizer(DIM, prototypes=16, updates=2, through_alpha=True),
    "sigmoid": compopt.SigmoidNormalizer,
}


@pytest.mark.parametrize("mode", ["bimodal", "unimodal"])
@pytest.mark.parametrize("name", ACCEPTED)
def test_the_normalizers_of_the_library_keep_all_rules(name, mode):
    check_normalizer(ACCEPTED[name], dim=DIM, n=N, mode=mode)


class Average(compopt.Normalizer):
    """Moving average that keeps all rules; subclasses break one each."""

    def __init__(self, n: int) -> None:
        super().__init__(n, {})

    def check(self, group):
        """Nothing to refuse."""

    def columns(self, directions, dtype):
        return [Column("log_u", directions, dtype, reduce="log_mean_exp")]

    def estimate(self, call):
        log_g = F.mean_of_views(call.pairs.log_ghat) if call.unimodal else call.pairs.log_ghat
        log_u = self.average(call, call.rows["log_u"], log_g)
        return Estimate(alpha=log_u, proposals=self.proposed(log_u))

    def average(self, call, old, log_g):
        return F.moving_average(old, log_g, 0.5, first=call.unseen)

    def proposed(self, log_u: Tensor) -> dict[str, Tensor]:
        return {"log_u": log_u}


class OneDirection(Average):
    def proposed(self, log_u):
        return {"log_u": log_u[:, 0]}


class NoProposals(Average):
    def proposed(self, log_u):
        return {}


class Linear(Average):
    """Stores u, which is not finite at a small temperature."""

    def average(self, call, old, log_g):
        u = torch.where(call.unseen, log_g.exp(), 0.5 * old + 0.5 * log_g.exp())
        return (u * torch.exp(call.pairs.positive.amax() / call.tau)).log()  # of s_ij instead of h_ij


class WritesInEval(Average):
    """Remembers the last batch, of whichever call."""

    last = 0.0

    def average(self, call, old, log_g):
        before, self.last = self.last, log_g.mean()
        return super().average(call, old, log_g) + 0.1 * before


class WritesAtOnce(Average):
    """Remembers the last batch in training, before the step."""

    last = 0.0

    def average(self, call, old, log_g):
        before = self.last
        self.last = log_g.mean() if call.training else before
        return super().average(call, old, log_g) + 0.1 * before


class CountsSteps(Average):
    """Counts commits in an attribute that its state lacks."""

    seen, last = 0, 0

    def average(self, call, old, log_g):
        seen = self.seen + (call.t != self.last)
        if call.training:
            self.seen, self.last = seen, call.t
        return super().average(call, old, log_g) + 0.1 * seen


class CountsCalls(Average):
    def average(self, call, old, log_g):
        return super().average(call, old, log_g) + 0.1 * call.window * call.training


class HidesNaN(Average):
    def proposed(self, log_u):
        return {"log_u": log_u.nan_to_num()}


class WithFunction(Average):
    """Cannot be pickled."""

    def __init__(self, n):
        super().__init__(n)
        self.function = lambda x: x


class DividesIntegers(Average):
    """Has a weight in the default dtype."""

    def average(self, call, old, log_g):
        return F.moving_average(old, log_g, 1 / (call.count + 2), first=call.unseen)


class SinglePrecision(Average):
    def average(self, call, old, log_g):
        return super().average(call, old, log_g).float().to(old.dtype)


BROKEN = {
    OneDirection: "proposals",
    NoProposals: "proposals",
    Linear: "gradients",
    WritesInEval: "deposits",
    WritesAtOnce: "commit",
    CountsCalls: "order",
    HidesNaN: "bad batches",
    CountsSteps: "state dict",
    WithFunction: "copies",
    DividesIntegers: "float64",
    SinglePrecision: "float64",
}


@pytest.mark.parametrize("mode", ["bimodal", "unimodal"])
def test_the_sound_version_keeps_all_rules(mode):
    check_normalizer(lambda: Average(N), dim=DIM, n=N, mode=mode)


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_normalizer_is_refused_with_the_name_of_the_rule(kind):
    with pytest.raises(AssertionError, match=f"^{kind.__name__} breaks the rule '{BROKEN[kind]}': "):
        check_normalizer(lambda: kind(N), dim=DIM, n=N)
