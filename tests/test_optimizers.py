"""LARS against a reference in float64, and schedules and learning rates of the recipes."""

import math

import pytest
import torch

from recipes import experiment, optimizers
from recipes.optimizers import LARS
from tests.reference.lars import lars


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
    root = experiment.parser("test", "", "unimodal", epochs=1, output_dir="runs")
    return experiment.parse(root, options, "unimodal")


def test_warmup_of_another_schedule_is_refused(capsys):
    with pytest.raises(SystemExit):
        parsed("--warmup", "2")
    assert "--warmup belongs to --schedule cosine" in capsys.readouterr().err
