"""DeepSpeed, ZeRO 0 to 3: one commit per real update, rows and weights of one process, checkpoints with all rows."""

import os
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import compopt
from tests.four import KINDS, assert_alike, loss, state
from tests.four import reference as reference_alone
from tests.pool import the_pool
from tests.test_integrations import counting
from tests.training import MICRO, WINDOW, Encoders, N, micro_batches, reference, rows, weights

pytestmark = [pytest.mark.launch, pytest.mark.distributed, pytest.mark.usefixtures("deepspeed_compiled")]
pytest.importorskip("deepspeed")
UPDATES = 3
STAGES = range(4)


def ours(function, *args):
    """On two processes."""
    return the_pool(2, timeout=120).run(function, 2, *args)


def engine_and_rows(stage, precision="fp32", universal=False):
    """An engine with two parameter groups, and the estimator attached to it."""
    engine = new_engine(stage, precision, universal)
    est = compopt.ISogCLREstimator(N, rho=0.5, shard=stage % 2 == 1)
    est.attach(engine)
    return engine, est


def new_engine(stage, precision="fp32", universal=False):
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
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def full_weights(engine):
    """All parameters, gathered where ZeRO 3 has split them."""
    import deepspeed

    parameters = list(engine.module.parameters())
    if not hasattr(parameters[0], "ds_id"):
        return weights(engine.module)
    with deepspeed.zero.GatheredParameters(parameters):
        return weights(engine.module)


def train(engine, est, data, overflow=()):
    """Windows of micro-batches; in some the loss is infinite on one rank. -> (weights, rows) after each."""
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


def run_stage(group, stage):
    engine, est = engine_and_rows(stage)
    commits = counting(est)
    return train(engine, est, data(UPDATES)), len(commits), est.pending


@pytest.mark.parametrize("stage", STAGES)
def test_one_commit_per_update_and_the_results_of_one_process(stage):
    expected = reference(UPDATES)
    for trace, commits, pending in ours(run_stage, stage):
        assert (commits, pending) == (UPDATES, 0)
        for found, wanted in zip(trace, expected, strict=True):
            for a, b in zip(found, wanted, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def run_overflow(group, stage):
    engine, est = engine_and_rows(stage, "bf16")
    commits = counting(est)
    trace = train(engine, est, data(4), overflow=(1, 2))
    return trace, len(commits), engine.skipped_steps, est.pending, est.t


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_window_skipped_for_overflow_commits_nothing(stage):
    for trace, commits, skipped, pending, t in ours(run_overflow, stage):
        (w0, r0), (w1, r1), (w2, r2), (w3, r3) = trace
        assert skipped == 2 and commits == t == 2 and pending == 0
        assert torch.equal(w0, w1) and torch.equal(w1, w2) and not torch.equal(w2, w3)
        assert torch.equal(r0, r1) and torch.equal(r1, r2)
        touched = torch.zeros(N, dtype=torch.bool)
        for *_, index in micro_batches(4 * WINDOW)[3 * WINDOW :]:
            touched[index] = True
        assert torch.equal((r3 != r2).any(dim=1), touched)  # the last window's rows, none of the skipped ones'


def run_checkpoint(group, stage, folder):
    from compopt.integrations import deepspeed as integration

    engine, est = engine_and_rows(stage)
    train(engine, est, data(4)[: 2 * WINDOW])
    mine = {"epoch": 1}
    integration.save_checkpoint(engine, est, folder, client_state=mine)
    expected = train(engine, est, data(4)[2 * WINDOW :])
    engine, est = engine_and_rows(stage)
    path, state = integration.load_checkpoint(engine, est, folder)
    t = est.t
    found = train(engine, est, data(4)[2 * WINDOW :])
    missing = integration.load_checkpoint(engine, est, folder + "-none")[0]
    return expected, found, t, state["epoch"], mine, "compopt" in state, path is not None, missing


@pytest.mark.parametrize("stage", STAGES)
def test_checkpoints_resume_bit_for_bit(stage, tmp_path):
    for expected, found, t, epoch, mine, ours_left, loaded, missing in ours(run_checkpoint, stage, str(tmp_path / "c")):
        assert (t, epoch, mine, ours_left, loaded, missing) == (2, 1, {"epoch": 1}, False, True, None)
        for a, b in zip(expected, found, strict=True):
            assert torch.equal(a[0], b[0]) and torch.equal(a[1], b[1])


def run_universal(group, stage, folder):
    """Saved, converted by DeepSpeed on one rank, loaded by both."""
    from deepspeed.checkpoint import ds_to_universal

    from compopt.integrations import deepspeed as integration

    engine, est = engine_and_rows(stage, "bf16")
    train(engine, est, data(2))
    integration.save_checkpoint(engine, est, folder, tag="first", client_state={"epoch": 1})
    if dist.get_rank() == 0:
        options = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False, "strict": True}
        paths = {"input_folder": f"{folder}/first", "output_folder": f"{folder}/universal"}
        ds_to_universal.main(SimpleNamespace(**paths, **options, inject_missing_state=True))
    dist.barrier()
    again, found = engine_and_rows(stage, "bf16", universal=True)
    _, state = integration.load_checkpoint(again, found, folder)
    return full_weights(engine), full_weights(again), rows(est), rows(found), found.t, state["epoch"]


@pytest.mark.parametrize("stage", [1, 3])
def test_universal_checkpoints_have_their_rows(stage, tmp_path):
    for before, after, rows_before, rows_after, t, epoch in ours(run_universal, stage, str(tmp_path / "c")):
        assert torch.equal(before, after) and torch.equal(rows_before, rows_after) and (t, epoch) == (2, 1)


def run_mistakes(group, folder):
    from compopt.integrations import deepspeed as integration

    engine, est = engine_and_rows(1)
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


def train_alone(engine, objects, data, overflow=()):
    """As `train`, with objects whose values are in the loss."""
    trace = []
    for step, (x1, x2, index) in enumerate(data):
        kind = next(engine.module.parameters()).dtype
        h1, h2 = engine(x1.to(kind), x2.to(kind))
        total = sum(loss(obj, h1, h2, index) for obj in objects)
        if step // WINDOW in overflow and step % WINDOW == 1 and dist.get_rank() == 0:
            total = total * torch.inf
        engine.backward(total)
        engine.step()
        if step % WINDOW == WINDOW - 1:
            trace.append((full_weights(engine), *map(state, objects)))
    return trace


def run_alone(group, kind, stage, folder):
    from compopt.integrations import deepspeed as integration

    def fresh():
        engine, obj = new_engine(stage), KINDS[kind](shard=stage % 2 == 1)
        obj.attach(engine)
        return engine, obj

    engine, obj = fresh()
    commits, first, second = counting(obj), data(UPDATES)[: 2 * WINDOW], data(UPDATES)[2 * WINDOW :]
    trace = train_alone(engine, [obj], first)
    integration.save_checkpoint(engine, obj, folder)
    trace += train_alone(engine, [obj], second)
    counts = len(commits), obj.t, obj.pending
    engine, obj = fresh()
    integration.load_checkpoint(engine, obj, folder)
    return trace, counts, obj.t, train_alone(engine, [obj], second)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_an_object_alone(kind, stage, tmp_path):
    """One commit per update, the results of one process, and a resume to the bit from the engine's folder."""
    for trace, counts, t, resumed in ours(run_alone, kind, stage, str(tmp_path / "c")):
        assert counts == (UPDATES, UPDATES, 0) and t == 2
        assert_alike(trace, reference_alone(kind, UPDATES * WINDOW), 1e-4)
        assert_alike(resumed, trace[2:], 0)


def run_alone_overflow(group, stage):
    engine, objects = new_engine(stage, "bf16"), [make(shard=stage % 2 == 1) for make in KINDS.values()]
    commits = []
    for obj in objects:
        obj.attach(engine)
        commits.append(counting(obj))
    trace = train_alone(engine, objects, data(4), overflow=(1, 2))
    return trace, [len(own) for own in commits], [obj.pending for obj in objects], engine.skipped_steps


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_objects_alone_commit_nothing_of_a_skipped_window(stage):
    for trace, commits, pending, skipped in ours(run_alone_overflow, stage):
        assert skipped == 2 and commits == [2] * len(KINDS) and pending == [0] * len(KINDS)
        first, second, third, fourth = trace
        for values in zip(first, second, third, fourth, strict=True):
            assert torch.equal(values[0], values[1]) and torch.equal(values[1], values[2])
            assert not torch.equal(values[2], values[3])


def run_accelerate(group, stage, folder):
    """accelerate with a DeepSpeed plugin: the update, and the commit, happen inside accelerator.backward."""
    os.environ.update(DS_ACCELERATOR="cpu", ACCELERATE_USE_DEEPSPEED="true", ACCELERATE_USE_CPU="false")
    from accelerate import Accelerator, DeepSpeedPlugin, InitProcessGroupKwargs
    from accelerate.state import AcceleratorState, GradientState, PartialState

    from compopt.integrations import accelerate as integration

    def fresh():
        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()
        plugin = DeepSpeedPlugin(zero_stage=stage, gradient_accumulation_steps=WINDOW)
        plugin.deepspeed_config.update(train_micro_batch_size_per_gpu=MICRO // 2, zero_allow_untested_optimizer=True)
        # without a backend's name accelerate believes that DeepSpeed on the CPU has one process
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
        parts = fresh()
        commits = counting(parts[3])
        trace = updates(*parts, data(UPDATES)[: 2 * WINDOW])
        parts[0].save_state(folder)
        trace += updates(*parts, data(UPDATES)[2 * WINDOW :])
        count = len(commits)
        parts = fresh()
        parts[0].load_state(folder)
        resumed = updates(*parts, data(UPDATES)[2 * WINDOW :])
        return trace, resumed, count
    finally:
        for key in ("ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_CPU"):
            os.environ.pop(key, None)
        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()


@pytest.mark.parametrize("stage", [2, 3])
def test_under_accelerate(stage, tmp_path):
    expected = reference(UPDATES)
    for trace, resumed, commits in ours(run_accelerate, stage, str(tmp_path / "state")):
        assert commits == UPDATES
        for found, wanted in zip(trace, expected, strict=True):
            for a, b in zip(found, wanted, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
        assert all(torch.equal(a, b) for a, b in zip(trace[-1], resumed[-1], strict=True))
