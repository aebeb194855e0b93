"""DeepSpeed, ZeRO 0 to 3: one commit per real update, rows and weights of one process, checkpoints with all rows."""

import ast
import os
import re
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import compopt
from tests.test_integrations import counting, ours
from tests.trainers import fresh_accelerate
from tests.training import MICRO, WINDOW, Encoders, N, micro_batches, reference, rows, weights

pytestmark = [pytest.mark.launch, pytest.mark.distributed, pytest.mark.usefixtures("deepspeed_compiled")]
pytest.importorskip("deepspeed")
UPDATES = 3


def assert_alike(found, expected, tolerance):
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def new(stage, precision="fp32"):
    """Return an engine with two parameter groups, and an estimator attached to it."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    config = {
        "train_batch_size": MICRO * WINDOW,
        "train_micro_batch_size_per_gpu": MICRO // 2,
        "gradient_accumulation_steps": WINDOW,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": precision == "bf16"},
        "steps_per_print": 10**9,
    }
    model = Encoders(torch.float32)
    optimizer = torch.optim.AdamW(model.groups(), lr=1e-2)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    est = compopt.ISogCLREstimator(N, rho=0.5, shard=stage % 2 == 1)
    est.attach(engine)
    return engine, est


def full_weights(engine):
    """Return all parameters, gathered where ZeRO 3 has split them."""
    import deepspeed

    parameters = list(engine.module.parameters())
    if not hasattr(parameters[0], "ds_id"):
        return weights(engine.module)
    with deepspeed.zero.GatheredParameters(parameters):
        return weights(engine.module)


def train(engine, est, data, overflow=()):
    """Train on windows, some with an infinite loss on one rank. -> weights and rows after each window."""
    trace = []
    for step, (x1, x2, index) in enumerate(data):
        kind = next(engine.module.parameters()).dtype
        loss = est(*engine(x1.to(kind), x2.to(kind)), index)
        if step // WINDOW in overflow and step % WINDOW == 1 and dist.get_rank() == 0:
            loss = loss * torch.inf
        engine.backward(loss)
        engine.step()
        if step % WINDOW == WINDOW - 1:
            trace.append((full_weights(engine), rows(est)))
    return trace


def data(updates):
    return micro_batches(updates * WINDOW, dist.get_rank(), 2, dtype=torch.float32)


def save_and_resume(group, stage, folder):
    from compopt.integrations import deepspeed as integration

    (engine, est), first, second = new(stage), data(UPDATES)[: 2 * WINDOW], data(UPDATES)[2 * WINDOW :]
    commits, mine = counting(est), {"epoch": 1}
    trace = train(engine, est, first)
    integration.save_checkpoint(engine, est, folder, client_state=mine)
    trace += train(engine, est, second)
    counts = len(commits), est.t, est.pending
    engine, est = new(stage)
    path, found = integration.load_checkpoint(engine, est, folder)
    assert path is not None and mine == {"epoch": 1} and found["epoch"] == 1 and "compopt" not in found and est.t == 2
    resumed = train(engine, est, second)
    assert integration.load_checkpoint(engine, est, folder + "-none")[0] is None
    return trace, counts, resumed


@pytest.mark.parametrize("stage", range(4))
def test_one_commit_per_update_and_a_resume_to_the_bit(stage, tmp_path):
    """Weights and states equal those of one process."""
    for trace, counts, resumed in ours(save_and_resume, stage, str(tmp_path / "c")):
        assert counts == (UPDATES, UPDATES, 0)
        assert_alike(trace, reference(UPDATES), 1e-4)
        assert_alike(resumed, trace[2:], 0)


def run_overflow(group, stage):
    engine, est = new(stage, precision="bf16")
    commits = counting(est)
    trace = train(engine, est, data(4), overflow=(1, 2))
    return trace, len(commits), est.pending, engine.skipped_steps


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_window_skipped_for_overflow_commits_nothing(stage):
    touched = torch.zeros(N, dtype=torch.bool)
    for *_, index in micro_batches(4 * WINDOW)[3 * WINDOW :]:
        touched[index] = True
    for trace, commits, pending, skipped in ours(run_overflow, stage):
        assert skipped == 2 and commits == 2 and pending == 0
        for first, second, third, fourth in zip(*trace, strict=True):
            assert torch.equal(first, second) and torch.equal(second, third) and not torch.equal(third, fourth)
        changed = (trace[3][1] != trace[2][1]).any(dim=1)
        assert torch.equal(changed, touched)  # the rows of the last window, none of the skipped ones


def run_accelerate(group, stage, folder):
    """Train by accelerate with a DeepSpeed plugin: update and commit happen inside accelerator.backward."""
    os.environ.update(DS_ACCELERATOR="cpu", ACCELERATE_USE_DEEPSPEED="true", ACCELERATE_USE_CPU="false")
    from accelerate import Accelerator, DeepSpeedPlugin, InitProcessGroupKwargs

    from compopt.integrations import accelerate as integration

    def fresh():
        plugin = DeepSpeedPlugin(zero_stage=stage, gradient_accumulation_steps=WINDOW)
        plugin.deepspeed_config.update(train_micro_batch_size_per_gpu=MICRO // 2, zero_allow_untested_optimizer=True)
        # without a backend's name accelerate assumes a single process for DeepSpeed on the CPU
        handlers = [InitProcessGroupKwargs(backend="gloo")]
        acc = Accelerator(deepspeed_plugin=plugin, gradient_accumulation_steps=WINDOW, kwargs_handlers=handlers)
        model = Encoders(torch.float32)
        model, optimizer = acc.prepare(model, torch.optim.AdamW(model.groups(), lr=1e-2))
        est = compopt.ISogCLREstimator(N, rho=0.5, shard=True)
        integration.attach(est, optimizer, acc)
        integration.register_for_checkpointing(est, acc)
        return acc, model, optimizer, est

    def updates(acc, model, optimizer, est, micro):
        trace = []
        for step, (x1, x2, index) in enumerate(micro):
            with acc.accumulate(model):
                acc.backward(est(*model(x1, x2), index))
                optimizer.step()
                optimizer.zero_grad()
            if step % WINDOW == WINDOW - 1:
                trace.append((full_weights(model), rows(est)))
        return trace

    try:
        with fresh_accelerate():
            parts = fresh()
            commits = counting(parts[3])
            trace = updates(*parts, data(UPDATES)[: 2 * WINDOW])
            parts[0].save_state(folder)
            trace += updates(*parts, data(UPDATES)[2 * WINDOW :])
            count = len(commits)
        with fresh_accelerate():
            parts = fresh()
            parts[0].load_state(folder)
            return trace, updates(*parts, data(UPDATES)[2 * WINDOW :]), count
    finally:
        for key in ("ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_CPU"):
            os.environ.pop(key, None)


@pytest.mark.parametrize("stage", [2, 3])
def test_under_accelerate(stage, tmp_path):
    for trace, resumed, commits in ours(run_accelerate, stage, str(tmp_path / "state")):
        assert commits == UPDATES
        assert_alike(trace, reference(UPDATES), 1e-4)
        assert_alike(resumed, trace[2:], 0)


def page_configuration():
    page = Path(__file__).parents[1] / "docs" / "guides" / "accelerate.md"
    return ast.literal_eval(re.search(r"^config = (\{.*?^\})", page.read_text(), re.M | re.S)[1])


STEPS, SAMPLES = 30, 100


def steep():
    """Return a model of small weights, whose gradients are large, and an optimizer."""
    model = Encoders(torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.02)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3), compopt.SogCLREstimator(SAMPLES, gamma=0.8)


def batch_of(step, rank, ranks):
    g = torch.Generator().manual_seed(step)
    x = torch.randn(2, 32, 6, generator=g)[:, rank * 32 // ranks : (rank + 1) * 32 // ranks]
    return *x, torch.randperm(SAMPLES, generator=g)[:32].chunk(ranks)[rank]


def run_configuration(group, config):
    """Train; return the losses, the weights, and what attach() warned of."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    model, optimizer, est = steep()
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config={**config, "steps_per_print": 10**9})[0]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        est.attach(engine)
        est.attach(engine)
        compopt.InfoNCEEstimator(multiply_tau=False).attach(engine)
    losses = []
    for step in range(STEPS):
        x1, x2, index = batch_of(step, dist.get_rank(), 2)
        loss = est(*engine(x1, x2), index)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return torch.tensor(losses), weights(engine.module), [str(each.message) for each in caught]


def test_the_configuration_of_the_page_does_not_clip():
    """Losses and weights equal those of one process; without the page's line they do not, and attach() warns once."""
    (model, optimizer, est), losses = steep(), []
    est.attach(optimizer)
    for step in range(STEPS):
        x1, x2, index = batch_of(step, 0, 1)
        loss = est(*model(x1, x2), index)
        loss.backward()
        assert torch.nn.utils.get_total_norm(p.grad for p in model.parameters()) > 1
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    config = page_configuration()
    for found, moved, said in ours(run_configuration, config):
        assert_alike(found, torch.tensor(losses), 1e-5)
        assert_alike(moved, weights(model), 1e-5)
        assert not said
    del config["gradient_clipping"]
    for found, _, said in ours(run_configuration, config):
        assert (found - torch.tensor(losses)).abs().max() > 1e-3
        assert len(said) == 1 and "clips gradients at norm 1.0" in said[0] and "0.0, or to tau times" in said[0]


def run_mistakes(group, folder):
    from compopt.integrations import deepspeed as integration

    engine, est = new(1)
    engine.save_checkpoint(folder)
    messages = []
    for call in (
        lambda: integration.load_checkpoint(engine, est, folder),
        lambda: integration.save_checkpoint(engine, est, folder, client_state={"compopt": 1}),
        lambda: compopt.InfoNCEEstimator().attach(engine, checkpoint=True),
        lambda: compopt.InfoNCEEstimator().attach(engine.optimizer, checkpoint=True),
    ):
        with pytest.raises(ValueError) as caught:
            call()
        messages.append(str(caught.value))
    return messages


def test_mistakes_are_named(tmp_path):
    for first, second, *others in ours(run_mistakes, str(tmp_path / "c")):
        assert "without rows" in first and "'compopt'" in second
        assert len(others) == 2 and all("DeepSpeed saves a state of its own" in each for each in others)
