"""LARS against a reference in float64, and schedules and learning rates of the recipes."""

import math

import pytest
import torch

from recipes import experiment, optimizers
from recipes.optimizers import LARS, OPTIMIZERS, RULES
from tests.reference.lars import lars


def test_lars_by_hand():
    """|w| = 5, |g| = 10, decay 0.1: lambda = 0.5 * 5 / 10.5; one step of rate 2."""
    w = torch.nn.Parameter(torch.tensor([[3.0, 4.0]], dtype=torch.float64))
    w.grad = torch.tensor([[6.0, 8.0]], dtype=torch.float64)
    LARS([w], lr=2.0, weight_decay=0.1, eta=0.5).step()
    factor = 2 * 0.5 * 5 / 10.5
    torch.testing.assert_close(w.data, torch.tensor([[3 - factor * 6.3, 4 - factor * 8.4]], dtype=torch.float64))


@pytest.mark.parametrize("start", ["drawn", "zero"])
def test_lars_is_the_reference_over_steps(start):
    draw = torch.Generator().manual_seed(0)
    w = torch.randn(2, 3, generator=draw, dtype=torch.float64) * (start == "drawn")
    gradients = [torch.randn(2, 3, generator=draw, dtype=torch.float64) for _ in range(4)]
    gradients[2].zero_()
    parameter = torch.nn.Parameter(w.clone())
    optimizer = LARS([parameter], lr=0.3, momentum=0.8, weight_decay=0.05, eta=0.02)
    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.step()
    expected = lars(w.flatten().tolist(), [g.flatten().tolist() for g in gradients], 0.3, 0.8, 0.05, 0.02)
    torch.testing.assert_close(parameter.detach().flatten(), torch.tensor(expected, dtype=torch.float64))


def test_lars_leaves_biases_and_norms_to_sgd():
    start, gradients = torch.tensor([1.0, -2.0]), torch.tensor([[0.5, 1.0], [1.0, 0.0]])
    ours, theirs = (torch.nn.Parameter(start.clone()) for _ in range(2))
    pairs = (ours, LARS([ours], lr=0.1, weight_decay=1.0)), (theirs, torch.optim.SGD([theirs], lr=0.1, momentum=0.9))
    for parameter, optimizer in pairs:
        for gradient in gradients:
            parameter.grad = gradient.clone()
            optimizer.step()
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("decay", [0.0, 0.01])
def test_lars_equals_timm(decay):
    timm = pytest.importorskip("timm.optim.lars", reason="in the environment of make test-clip")
    draw = torch.Generator().manual_seed(1)
    start, gradients = torch.randn(3, 4, generator=draw), torch.randn(3, 3, 4, generator=draw)
    ours, theirs = (torch.nn.Parameter(start.clone()) for _ in range(2))
    theirs_optimizer = timm.Lars([theirs], lr=0.5, momentum=0.9, weight_decay=decay, always_adapt=True)
    for parameter, optimizer in ((ours, LARS([ours], lr=0.5, weight_decay=decay)), (theirs, theirs_optimizer)):
        for gradient in gradients:
            parameter.grad = gradient.clone()
            optimizer.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def rates(name, steps, warmup=0):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.8, momentum=0.9)
    schedule, found = optimizers.schedule(name, optimizer, 0.8, steps, warmup), []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return found


def test_cosine_rises_linearly_and_falls_along_half_a_cosine():
    found = rates("cosine", 12, warmup=4)
    assert found[:4] == pytest.approx([0.2, 0.4, 0.6, 0.8])
    assert found[4:] == pytest.approx([0.4 * (1 + math.cos(math.pi * k / 8)) for k in range(8)])
    assert max(rates("one-cycle", 12)) == pytest.approx(0.8, rel=0.05)


def parsed(*options):
    root = experiment.parser("test", "", "unimodal", epochs=1, output="runs")
    return experiment.parse(root, options, "unimodal")


def test_rules_of_the_rate_count_the_samples_of_an_update():
    assert RULES["sqrt"](256) == pytest.approx(1.2) and RULES["linear"](256) == pytest.approx(0.3)
    args = parsed("--optimizer", "lars", "--batch-size", "64", "--accumulate", "4")
    assert (args.lr, args.weight_decay) == (pytest.approx(1.2), OPTIMIZERS["lars"].weight_decay)
    assert parsed("--optimizer", "sgd", "--lr", "0.5").lr == 0.5
    assert (parsed().lr, parsed().weight_decay) == (pytest.approx(0.016), 0.1)  # AdamW, batch 64


def test_warmup_of_another_schedule_is_refused(capsys):
    with pytest.raises(SystemExit):
        parsed("--warmup", "2")
    assert "--warmup belongs to --schedule cosine" in capsys.readouterr().err
