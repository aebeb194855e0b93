"""One commit per real update, rows and weights of one process: DDP, FSDP2, GradScaler, accelerate."""

import contextlib
import shutil
import types
import warnings

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import compopt
from compopt.integrations import amp
from tests.pool import the_pool
from tests.training import MICRO, WINDOW, Encoders, N, micro_batches, needs_fsdp2, reference, rows, weights

pytestmark = pytest.mark.distributed
UPDATES = 4
SKIPPED = (1,)


def ours(function, *args):
    """On two processes."""
    return the_pool(2, timeout=120).run(function, 2, *args)


def counting(est):
    """Commits, counted by a hook."""
    commits = []
    est.register_step_post_hook(lambda *_: commits.append(1))
    return commits


def assert_like_reference(results, tolerance, **options):
    expected = reference(UPDATES, **options)
    for trace, commits in results:
        assert commits == UPDATES - len(options.get("skipped", ()))
        for found, wanted in zip(trace, expected, strict=True):
            for a, b in zip(found, wanted, strict=True):
                torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


# plain torch --------------------------------------------------------------------------------------


def train_ddp(group, shard):
    model = DistributedDataParallel(Encoders())
    est = compopt.ISogCLREstimator(N, rho=0.5, dtype=torch.float64, shard=shard)
    optimizer = torch.optim.AdamW(model.module.groups(), lr=1e-2)
    est.attach(optimizer)
    commits, trace = counting(est), []
    data = micro_batches(UPDATES * WINDOW, dist.get_rank(), 2)
    for step, (x1, x2, index) in enumerate(data):
        last = step % WINDOW == WINDOW - 1
        with contextlib.nullcontext() if last else model.no_sync():
            (est(*model(x1, x2), index) / WINDOW).backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()
            trace.append((weights(model.module), rows(est)))
    return trace, len(commits)


@pytest.mark.parametrize("shard", [False, True])
def test_ddp_with_no_sync(shard):
    assert_like_reference(ours(train_ddp, shard), 1e-11)


def full_weights(model):
    return torch.cat([p.full_tensor().detach().flatten() for p in model.parameters()])


def train_fsdp(group, scaled, fused):
    from torch.distributed.fsdp import fully_shard

    model = Encoders()
    for layer in (model.first, model.second):
        fully_shard(layer)
    fully_shard(model)
    est = compopt.ISogCLREstimator(N, rho=0.5, dtype=torch.float64, shard=True)
    optimizer = torch.optim.AdamW(model.groups(), lr=1e-2, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1000, enabled=scaled)
    if scaled:
        amp.attach(est, optimizer, scaler)
    else:
        est.attach(optimizer)
    commits, trace = counting(est), []
    for step, (x1, x2, index) in enumerate(micro_batches(UPDATES * WINDOW, dist.get_rank(), 2)):
        update, last = step // WINDOW, step % WINDOW == WINDOW - 1
        model.set_requires_gradient_sync(last)
        loss = scaler.scale(est(*model(x1, x2), index) / WINDOW)
        loss.backward()
        if last:
            if scaled and update in SKIPPED and dist.get_rank() == 0:
                spoil(model)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            trace.append((full_weights(model), rows(est)))
    return trace, len(commits)


def spoil(model):
    """An overflow in the shard of one rank."""
    parameter = next(model.parameters())
    gradient = parameter.grad.to_local() if hasattr(parameter.grad, "to_local") else parameter.grad
    gradient.view(-1)[0] = torch.inf


@pytest.mark.parametrize("fused", [False, True])
@needs_fsdp2
def test_fsdp2(fused):
    assert_like_reference(ours(train_fsdp, False, fused), 1e-11)


@pytest.mark.parametrize("fused", [False, True])
@needs_fsdp2
def test_fsdp2_with_a_gradient_scaler_that_skips_a_step(fused):
    assert_like_reference(ours(train_fsdp, True, fused), 1e-11, skipped=SKIPPED)


# GradScaler, one process --------------------------------------------------------------------------


def train_scaled(fused, adapter):
    """The second update overflows."""
    model, est = Encoders(), compopt.ISogCLREstimator(N, rho=0.5, dtype=torch.float64)
    optimizer = torch.optim.AdamW(model.groups(), lr=1e-2, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1000)
    handle = amp.attach(est, optimizer, scaler) if adapter else est.attach(optimizer)
    commits, trace = counting(est), []
    for update in range(UPDATES):
        for x1, x2, index in micro_batches(UPDATES * WINDOW)[update * WINDOW : (update + 1) * WINDOW]:
            scaler.scale(est(*model(x1, x2), index) / WINDOW).backward()
        if update in SKIPPED:
            spoil(model)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        trace.append((weights(model), rows(est)))
    handle.remove()
    return trace, len(commits), est


@pytest.mark.parametrize("fused", [False, True])
def test_amp_attach_discards_what_was_skipped(fused):
    trace, commits, _ = train_scaled(fused, adapter=True)
    assert_like_reference([(trace, commits)], 1e-12, skipped=SKIPPED)


def test_without_the_adapter_a_skipped_window_joins_the_next_commit():
    trace, commits, _ = train_scaled(fused=False, adapter=False)
    assert commits == UPDATES - 1
    expected = reference(UPDATES, skipped=SKIPPED)
    torch.testing.assert_close(trace[1][1], expected[1][1], rtol=1e-12, atol=1e-12)
    assert (trace[2][1] - expected[2][1]).abs().max() > 1e-3  # documented: the window's finite rows


def test_amp_handle_and_other_optimizers():
    model, est = Encoders(), compopt.SogCLREstimator(N)
    first, second = (torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (model.first, model.second))
    scaler = torch.amp.GradScaler("cpu")
    handle = amp.attach(est, first, scaler)
    amp.attach(est, first, scaler)  # twice is once

    def window(overflow):
        x1, x2, index = micro_batches(1)[0]
        z1, z2 = model(x1, x2)
        scaler.scale(est(z1.float(), z2.float(), index)).backward()
        if overflow:
            model.second.weight.grad[0, 0] = torch.inf
        scaler.step(second)
        pending = est.pending
        scaler.step(first)
        scaler.update()
        model.zero_grad()
        return pending

    assert window(overflow=True) == 1 and est.t == 1  # the other optimizer's skip is not ours
    handle.remove()
    window(overflow=False)
    assert est.pending == 1 and est.t == 1
    state = scaler.state_dict()
    torch.amp.GradScaler("cpu").load_state_dict(state)


# accelerate ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def accelerator(**options):
    """A fresh one: accelerate keeps its state in singletons."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState, PartialState

    try:
        yield Accelerator(cpu=True, **options)
    finally:
        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()


class Samples(torch.utils.data.Dataset):
    """Micro-batches laid end to end: with `Slices`, every rank meets the reference's batches."""

    def __init__(self, count, dtype):
        self.items = [item for batch in micro_batches(count, dtype=dtype) for item in zip(*batch, strict=True)]

    def __len__(self):
        return len(self.items)

    def __getitem__(self, at):
        return self.items[at]


def prepare(accelerator, count, shard=True, dtype=torch.float64):
    from compopt.integrations import accelerate as integration

    model = Encoders(dtype)
    optimizer = torch.optim.AdamW(model.groups(), lr=1e-2)
    loader = torch.utils.data.DataLoader(Samples(count, dtype), batch_size=MICRO // 2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    est = compopt.ISogCLREstimator(N, rho=0.5, dtype=dtype, shard=shard)
    integration.attach(est, optimizer, accelerator)
    integration.register_for_checkpointing(est, accelerator)
    return model, optimizer, loader, est


def train_accelerate(group, prefetch):
    with accelerator(gradient_accumulation_steps=WINDOW) as acc:
        model, optimizer, loader, est = prepare(acc, UPDATES * WINDOW)
        commits, trace = counting(est), []
        for x1, x2, index in est.prefetch(loader) if prefetch else loader:
            with acc.accumulate(model):
                acc.backward(est(*model(x1, x2), index))
                optimizer.step()
                optimizer.zero_grad()
            if acc.sync_gradients:
                trace.append((weights(model), rows(est)))
        return trace, len(commits)


@pytest.mark.parametrize("prefetch", [False, True])
def test_accelerate(prefetch):
    assert_like_reference(ours(train_accelerate, prefetch), 1e-11)


def odd_windows(group, precision, prefetch):
    """Seven micro-batches in windows of two, two epochs: accelerate steps on the last, short window."""
    with accelerator(gradient_accumulation_steps=2, mixed_precision=precision) as acc:
        model, optimizer, loader, est = prepare(acc, 7, dtype=torch.float32)
        commits, updates, before = counting(est), 0, weights(model)
        for _epoch in range(2):
            for x1, x2, index in est.prefetch(loader) if prefetch else loader:
                with acc.accumulate(model):
                    acc.backward(est(*model(x1, x2), index))
                    optimizer.step()
                    optimizer.zero_grad()
                updates += not torch.equal(before, weights(model))
                before = weights(model)
        return updates, len(commits), est.pending, weights(model), rows(est)


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_accelerate_with_odd_windows(precision):
    plain, ahead = ours(odd_windows, precision, False), ours(odd_windows, precision, True)
    for updates, commits, pending, *_ in plain + ahead:
        assert (updates, commits, pending) == (8, 8, 0)
    for (*_, w, r), (*_, w2, r2) in zip(plain, ahead, strict=True):
        assert torch.equal(w, w2) and torch.equal(r, r2) and r.isfinite().all()


def save_and_resume(group, folder):
    """Four updates in one go; two, a save into a used folder, a fresh start, two more."""

    def updates(model, optimizer, loader, est, which):
        for number, (x1, x2, index) in enumerate(loader):
            if number in which:
                loss = est(*model(x1, x2), index)
                acc.backward(loss)
                optimizer.step()
                optimizer.zero_grad()

    with accelerator() as acc:
        parts = prepare(acc, 4)
        updates(*parts, range(2))
        acc.save_state(folder)
        updates(*parts, range(2, 4))
        expected = weights(parts[0]), rows(parts[3])
        acc.save_state(folder + "-later")
    with accelerator() as acc:
        parts = prepare(acc, 4)
        updates(*parts, range(3))  # something else before
        acc.load_state(folder)
        assert parts[3].t == 2 and parts[3].pending == 0
        updates(*parts, range(2, 4))
        found = weights(parts[0]), rows(parts[3])
    return expected, found


def test_accelerate_checkpoints_carry_every_rank_s_rows(tmp_path):
    for expected, found in ours(save_and_resume, str(tmp_path / "state")):
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def rows_of_another_save(group, folder):
    """The rows of a checkpoint were replaced by those of a later one."""
    import shutil

    with accelerator() as acc:
        model, optimizer, loader, est = prepare(acc, 2)
        acc.save_state(folder)
        x1, x2, index = next(iter(loader))
        acc.backward(est(*model(x1, x2), index))
        optimizer.step()
        acc.save_state(folder + "-later")
        if acc.is_main_process:
            shutil.rmtree(f"{folder}/compopt")
            shutil.copytree(f"{folder}-later/compopt", f"{folder}/compopt")
        acc.wait_for_everyone()
        before = rows(est)
        with pytest.raises((FileNotFoundError, RuntimeError), match="compopt"):
            acc.load_state(folder)
        return torch.equal(before, rows(est))


def test_accelerate_refuses_the_rows_of_another_save(tmp_path):
    assert ours(rows_of_another_save, str(tmp_path / "state")) == [True, True]


def test_batches_from_the_main_process_are_refused():
    from accelerate import DataLoaderConfiguration

    with accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=True)) as acc:
        loader = acc.prepare(torch.utils.data.DataLoader(Samples(1, torch.float32), batch_size=2))
        with pytest.raises(ValueError, match="dispatch_batches"):
            compopt.SogCLREstimator(N).prefetch(loader)


def test_accelerate_without_a_group_is_told(monkeypatch):
    """torchrun on a machine without accelerators, and neither ``cpu=True`` nor ``accelerate launch --cpu``."""
    from compopt.integrations import accelerate as integration

    monkeypatch.setenv("WORLD_SIZE", "2")
    model = Encoders(torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    est = compopt.SogCLREstimator(n=8, tau=0.1, gamma=0.5)
    alone = types.SimpleNamespace(num_processes=1)
    with pytest.warns(UserWarning, match="trains alone"):
        integration.attach(est, optimizer, alone).remove()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        integration.attach(est, optimizer, types.SimpleNamespace(num_processes=2)).remove()


class Engine:
    """What ``compopt.integrations.deepspeed`` sees of DeepSpeed's: a tag has the client state, and nothing of ours."""

    global_steps = 3

    def save_checkpoint(self, save_dir, tag, client_state, **options):
        torch.save(client_state, f"{save_dir}/{tag}/states.pt")

    def load_checkpoint(self, load_dir, tag, **options):
        return f"{load_dir}/{tag}/states.pt", torch.load(f"{load_dir}/{tag}/states.pt")


def test_universal_checkpoints_have_the_rows_of_their_tag(tmp_path):
    """``ds_to_universal`` copies the files of a tag, and not its folders."""
    from compopt.integrations import deepspeed as integration

    def trained(steps):
        est = compopt.SogCLREstimator(10)
        for _ in range(steps):
            est(*torch.randn(2, 4, 3), torch.arange(4))
            est.step()
        return est

    est, old, elsewhere = trained(3), tmp_path / "run" / "global_step3", tmp_path / "copied" / "universal"
    integration.save_checkpoint(Engine(), trained(1), tmp_path / "run", tag="global_step1")
    integration.save_checkpoint(Engine(), est, tmp_path / "run", client_state={"epoch": 1})
    for place in (tmp_path / "run" / "global_step3_universal", elsewhere):
        place.mkdir(parents=True)
        shutil.copy2(old / "states.pt", place)

    def loaded(place):
        found = trained(0)
        assert integration.load_checkpoint(Engine(), found, place.parent, place.name)[1] == {"epoch": 1}
        assert found.t == 3 and torch.equal(found.read(torch.arange(10))["log_u"], est.read(torch.arange(10))["log_u"])

    loaded(old)
    loaded(tmp_path / "run" / "global_step3_universal")
    with pytest.raises(FileNotFoundError, match=rf"global_step3/compopt; ds_to_universal.* to {elsewhere}/compopt"):
        loaded(elsewhere)
    shutil.copytree(old / "compopt", elsewhere / "compopt")
    loaded(elsewhere)
    shutil.rmtree(old / "compopt")
    (elsewhere.parent / "renamed").mkdir()  # what is beside it is another save's
    shutil.copytree(tmp_path / "run" / "global_step1" / "compopt", elsewhere.parent / "renamed" / "compopt")
    shutil.rmtree(elsewhere / "compopt")
    with pytest.raises(FileNotFoundError, match="ds_to_universal"):
        loaded(elsewhere)
