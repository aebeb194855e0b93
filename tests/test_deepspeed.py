"""DeepSpeed, ZeRO 0 to 3: one commit per real update, rows and weights of one process, checkpoints with all rows."""

import os
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import compopt
from tests import four
from tests.four import assert_alike
from tests.test_integrations import counting, ours
from tests.trainers import fresh_accelerate
from tests.training import MICRO, WINDOW, Encoders, N, micro_batches, reference, rows, weights

pytestmark = [pytest.mark.launch, pytest.mark.distributed, pytest.mark.usefixtures("deepspeed_compiled")]
pytest.importorskip("deepspeed")
UPDATES = 3
KINDS = {"estimator": lambda **options: compopt.ISogCLREstimator(N, rho=0.5, **options), **four.KINDS}


def new(stage, kind="estimator", precision="fp32", universal=False):
    """Return an engine with two parameter groups, and an object attached to it."""
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
        "checkpoint": {"load_universal": universal},
    }
    model = Encoders(torch.float32)
    optimizer = torch.optim.AdamW(model.groups(), lr=1e-2)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    obj = KINDS[kind](shard=stage % 2 == 1)
    obj.attach(engine)
    return engine, obj


def full_weights(engine):
    """Return all parameters, gathered where ZeRO 3 has split them."""
    import deepspeed

    parameters = list(engine.module.parameters())
    if not hasattr(parameters[0], "ds_id"):
        return weights(engine.module)
    with deepspeed.zero.GatheredParameters(parameters):
        return weights(engine.module)


def state(obj):
    return rows(obj) if isinstance(obj, compopt.ContrastiveEstimator) else four.state(obj)


def train(engine, objects, data, overflow=()):
    """Train on windows, some with an infinite loss on one rank. -> weights and states after each window."""
    trace = []
    for step, (x1, x2, index) in enumerate(data):
        kind = next(engine.module.parameters()).dtype
        h1, h2 = engine(x1.to(kind), x2.to(kind))
        whole = (isinstance(obj, compopt.ContrastiveEstimator) for obj in objects)
        values = (
            obj(h1, h2, index) if own else four.loss(obj, h1, h2, index)
            for obj, own in zip(objects, whole, strict=True)
        )
        total = sum(values)
        if step // WINDOW in overflow and step % WINDOW == 1 and dist.get_rank() == 0:
            total = total * torch.inf
        engine.backward(total)
        engine.step()
        if step % WINDOW == WINDOW - 1:
            trace.append((full_weights(engine), *map(state, objects)))
    return trace


def data(updates):
    return micro_batches(updates * WINDOW, dist.get_rank(), 2, dtype=torch.float32)


def save_and_resume(group, kind, stage, folder):
    from compopt.integrations import deepspeed as integration

    (engine, obj), first, second = new(stage, kind), data(UPDATES)[: 2 * WINDOW], data(UPDATES)[2 * WINDOW :]
    commits, mine = counting(obj), {"epoch": 1}
    trace = train(engine, [obj], first)
    integration.save_checkpoint(engine, obj, folder, client_state=mine)
    trace += train(engine, [obj], second)
    counts = len(commits), obj.t, obj.pending
    engine, obj = new(stage, kind)
    path, found = integration.load_checkpoint(engine, obj, folder)
    assert path is not None and mine == {"epoch": 1} and found["epoch"] == 1 and "compopt" not in found and obj.t == 2
    resumed = train(engine, [obj], second)
    assert integration.load_checkpoint(engine, obj, folder + "-none")[0] is None
    return trace, counts, resumed


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("kind", KINDS)
def test_one_commit_per_update_and_a_resume_to_the_bit(kind, stage, tmp_path):
    """Weights and states equal those of one process."""
    expected = reference(UPDATES) if kind == "estimator" else four.reference(kind, UPDATES * WINDOW)
    for trace, counts, resumed in ours(save_and_resume, kind, stage, str(tmp_path / "c")):
        assert counts == (UPDATES, UPDATES, 0)
        assert_alike(trace, expected, 1e-4)
        assert_alike(resumed, trace[2:], 0)


def run_overflow(group, stage):
    engine, est = new(stage, precision="bf16")
    objects = [est, *(make(shard=stage % 2 == 1) for make in four.KINDS.values())]
    for obj in objects[1:]:
        obj.attach(engine)
    commits = [counting(obj) for obj in objects]
    trace = train(engine, objects, data(4), overflow=(1, 2))
    return trace, [len(own) for own in commits], [obj.pending for obj in objects], engine.skipped_steps


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_window_skipped_for_overflow_commits_nothing(stage):
    touched = torch.zeros(N, dtype=torch.bool)
    for *_, index in micro_batches(4 * WINDOW)[3 * WINDOW :]:
        touched[index] = True
    for trace, commits, pending, skipped in ours(run_overflow, stage):
        assert skipped == 2 and commits == [2] * len(KINDS) and pending == [0] * len(KINDS)
        for first, second, third, fourth in zip(*trace, strict=True):
            assert torch.equal(first, second) and torch.equal(second, third) and not torch.equal(third, fourth)
        changed = (trace[3][1] != trace[2][1]).any(dim=1)
        assert torch.equal(changed, touched)  # the rows of the last window, none of the skipped ones


def run_universal(group, stage, folder):
    """Save on both ranks, convert by DeepSpeed on one rank, load on both."""
    from deepspeed.checkpoint import ds_to_universal

    from compopt.integrations import deepspeed as integration

    engine, est = new(stage, precision="bf16")
    train(engine, [est], data(2))
    integration.save_checkpoint(engine, est, folder, tag="first", client_state={"epoch": 1})
    if dist.get_rank() == 0:
        options = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False, "strict": True}
        paths = {"input_folder": f"{folder}/first", "output_folder": f"{folder}/universal"}
        ds_to_universal.main(SimpleNamespace(**paths, **options, inject_missing_state=True))
    dist.barrier()
    again, found = new(stage, precision="bf16", universal=True)
    _, state = integration.load_checkpoint(again, found, folder)
    return full_weights(engine), full_weights(again), rows(est), rows(found), found.t, state["epoch"]


@pytest.mark.parametrize("stage", [1, 3])
def test_universal_checkpoints_have_their_rows(stage, tmp_path):
    for before, after, rows_before, rows_after, t, epoch in ours(run_universal, stage, str(tmp_path / "c")):
        assert torch.equal(before, after) and torch.equal(rows_before, rows_after) and (t, epoch) == (2, 1)


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
