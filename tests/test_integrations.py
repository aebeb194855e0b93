"""One commit per real update, results equal to one process: DDP, FSDP2, GradScaler, accelerate."""

import contextlib
import importlib
import shutil
import sys
import types
import warnings

import pytest
import torch
import torch.distributed as dist

import compopt
from compopt.integrations import amp
from tests.pool import the_pool
from tests.trainers import SKIPPED, UPDATES, Items, fresh_accelerate, spoil
from tests.training import MICRO, WINDOW, Encoders, N, micro_batches, needs_fsdp2, reference, rows, weights

pytestmark = pytest.mark.distributed


def ours(function, *args):
    """Run a function on two processes."""
    return the_pool(2, timeout=120).run(function, 2, *args)


def counting(est):
    """Return a list to which a hook adds every commit."""
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


@pytest.mark.parametrize(
    "name, missing",
    [
        ("lightning", "lightning.pytorch"),
        ("transformers", "transformers"),
        ("sentence_transformers", "sentence_transformers.base.losses.gradcache"),
    ],
)
def test_the_package_is_asked_for(name, missing, monkeypatch):
    monkeypatch.setitem(sys.modules, missing, None)
    for module in [module for module in sys.modules if module.startswith(f"compopt.integrations.{name}")]:
        monkeypatch.delitem(sys.modules, module)
    with pytest.raises(ImportError, match=rf"\[{name.replace('_', '-')}\]"):
        importlib.import_module(f"compopt.integrations.{name}")


# plain torch --------------------------------------------------------------------------------------


def full_weights(model):
    return torch.cat([p.full_tensor().detach().flatten() for p in model.parameters()])


def train_scaled(group, fused, scaled=True, adapter=True, sharded=False):
    """Train with FSDP2 on two ranks, or in one process; with a scaler the second update overflows."""
    model, rank = Encoders(), dist.get_rank() if sharded else 0
    if sharded:
        from torch.distributed.fsdp import fully_shard

        for layer in (model.first, model.second, model):
            fully_shard(layer)
    est = compopt.ISogCLREstimator(N, rho=0.5, dtype=torch.float64, shard=sharded)
    optimizer = torch.optim.AdamW(model.groups(), lr=1e-2, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1000, enabled=scaled)
    handle = amp.attach(est, optimizer, scaler if scaled and adapter else None)
    commits, trace = counting(est), []
    for step, (x1, x2, index) in enumerate(micro_batches(UPDATES * WINDOW, rank, 1 + sharded)):
        if sharded:
            model.set_requires_gradient_sync(step % WINDOW == WINDOW - 1)
        scaler.scale(est(*model(x1, x2), index) / WINDOW).backward()
        if step % WINDOW == WINDOW - 1:
            if scaled and step // WINDOW in SKIPPED and rank == 0:
                spoil(model)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            trace.append(((full_weights if sharded else weights)(model), rows(est)))
    handle.remove()
    return trace, len(commits)


@needs_fsdp2
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("scaled", [False, True])
def test_fsdp2(fused, scaled):
    results = ours(train_scaled, fused, scaled, True, True)
    assert_like_reference(results, 1e-11, skipped=SKIPPED if scaled else ())


@pytest.mark.parametrize("fused", [False, True])
def test_amp_attach_discards_what_was_skipped(fused):
    assert_like_reference([train_scaled(None, fused)], 1e-12, skipped=SKIPPED)


class Unknown:
    """A wrapper that est.attach() would refuse."""

    def __init__(self, inside):
        self.inside, self.param_groups, self.step = inside, inside.param_groups, inside.step


@pytest.mark.parametrize("wrap", [lambda sgd: sgd, Unknown])
def test_amp_handle_and_other_optimizers(wrap):
    model, est = Encoders(torch.float32), compopt.SogCLREstimator(N)
    first, second = (torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (model.first, model.second))
    second = wrap(second)
    scaler = torch.amp.GradScaler("cpu")
    handle = amp.attach(est, first, scaler)
    amp.attach(est, first, scaler)  # a second call has no effect

    def window(overflow):
        x1, x2, index = micro_batches(1, dtype=torch.float32)[0]
        scaler.scale(est(*model(x1, x2), index)).backward()
        if overflow:
            model.second.weight.grad[0, 0] = torch.inf
        scaler.step(second)
        pending = est.pending
        scaler.step(first)
        scaler.update()
        model.zero_grad()
        return pending

    assert window(overflow=True) == 1 and est.t == 1  # a skipped step of the other optimizer does not count
    handle.remove()
    window(overflow=False)
    assert est.pending == 1 and est.t == 1
    torch.amp.GradScaler("cpu").load_state_dict(scaler.state_dict())


# accelerate ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def accelerator(**options):
    from accelerate import Accelerator

    with fresh_accelerate():
        yield Accelerator(cpu=True, **options)


class Samples(Items):
    """Samples as tuples."""

    def __init__(self, count, dtype):
        super().__init__(count, 1, dtype)

    def __getitem__(self, at):
        return tuple(super().__getitem__(at).values())


def prepare(accelerator, count, shard=True, dtype=torch.float64, blocking=True):
    from compopt.integrations import accelerate as integration

    model = Encoders(dtype)
    optimizer = torch.optim.AdamW(model.groups(), lr=1e-2)
    loader = torch.utils.data.DataLoader(Samples(count, dtype), batch_size=MICRO // 2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    est = compopt.ISogCLREstimator(N, rho=0.5, dtype=dtype, shard=shard)
    integration.attach(est, optimizer, accelerator)
    est.saving = integration.register_for_checkpointing(est, accelerator, blocking=blocking)
    return model, optimizer, loader, est


def train_accelerate(group, count, epochs, precision, dtype, prefetch):
    """Train with accelerate, which also steps on an incomplete last window of an epoch."""
    with accelerator(gradient_accumulation_steps=WINDOW, mixed_precision=precision) as acc:
        model, optimizer, loader, est = prepare(acc, count, dtype=dtype)
        commits, trace = counting(est), []
        for _epoch in range(epochs):
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
    assert_like_reference(ours(train_accelerate, UPDATES * WINDOW, 1, None, torch.float64, prefetch), 1e-11)


def test_accelerate_with_odd_windows():
    """Test seven micro-batches in windows of two for two epochs."""
    plain, ahead = (ours(train_accelerate, 7, 2, "bf16", torch.float32, prefetch) for prefetch in (False, True))
    for (trace, commits), (other, _) in zip(plain, ahead, strict=True):
        assert commits == len(trace) == 8 and len({step[0].sum().item() for step in trace}) == 8
        assert all(torch.equal(a, b) and a.isfinite().all() for a, b in zip(trace[-1], other[-1], strict=True))


def save_and_resume(group, folder, blocking):
    """Compare four updates with two, a load into a used estimator and two more; refuse the rows of another save."""

    def updates(model, optimizer, loader, est, which):
        for number, (x1, x2, index) in enumerate(loader):
            if number in which:
                acc.backward(est(*model(x1, x2), index))
                optimizer.step()
                optimizer.zero_grad()

    with accelerator() as acc:
        parts = prepare(acc, 4, blocking=blocking)
        updates(*parts, range(2))
        acc.save_state(folder)
        updates(*parts, range(2, 4))
        parts[3].saving.wait()
        expected = weights(parts[0]), rows(parts[3])
        acc.save_state(folder + "-later")
        parts[3].saving.wait()
        acc.wait_for_everyone()
    with accelerator() as acc:
        parts = prepare(acc, 4)
        updates(*parts, range(3))  # other updates before the load
        acc.load_state(folder)
        assert parts[3].t == 2 and parts[3].pending == 0
        updates(*parts, range(2, 4))
        found = weights(parts[0]), rows(parts[3])
        if acc.is_main_process:
            shutil.rmtree(f"{folder}/compopt")
            shutil.copytree(f"{folder}-later/compopt", f"{folder}/compopt")
        acc.wait_for_everyone()
        with pytest.raises((FileNotFoundError, RuntimeError), match="compopt"):
            acc.load_state(folder)
        assert torch.equal(found[1], rows(parts[3]))
    return all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


@pytest.mark.parametrize("blocking", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_accelerate_checkpoints_carry_every_rank_s_rows(tmp_path, blocking):
    assert ours(save_and_resume, str(tmp_path / "state"), blocking) == [True, True]


def test_batches_from_the_main_process_are_refused():
    from accelerate import DataLoaderConfiguration

    with accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=True)) as acc:
        loader = acc.prepare(torch.utils.data.DataLoader(Samples(1, torch.float32), batch_size=2))
        with pytest.raises(ValueError, match="dispatch_batches"):
            compopt.SogCLREstimator(N).prefetch(loader)


def test_deepspeed_that_cpu_switches_off_is_told(monkeypatch):
    accelerate = pytest.importorskip("accelerate")
    from compopt.integrations import accelerate as integration

    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    with fresh_accelerate():
        acc = accelerate.Accelerator(cpu=True)
        optimizer = acc.prepare(torch.optim.SGD(Encoders().parameters(), 0.1))
        with pytest.warns(UserWarning, match="DeepSpeed was asked for .*without cpu=True"):
            integration.attach(compopt.InfoNCEEstimator(), optimizer, acc)


def test_accelerate_without_a_group_is_told(monkeypatch):
    """Warn for torchrun on a machine without accelerators, if neither ``cpu=True`` nor ``--cpu`` is given."""
    from compopt.integrations import accelerate as integration

    monkeypatch.setenv("WORLD_SIZE", "2")
    optimizer, est = torch.optim.SGD(Encoders().parameters(), lr=0.1), compopt.SogCLREstimator(n=8)
    with pytest.warns(UserWarning, match="trains alone.*accelerate launch --cpu"):
        integration.attach(est, optimizer, types.SimpleNamespace(num_processes=1)).remove()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        integration.attach(est, optimizer, types.SimpleNamespace(num_processes=2)).remove()


class Engine:
    """Stand-in for DeepSpeed's engine: the directory of a tag has the client state, but no rows."""

    global_steps = 3

    def save_checkpoint(self, save_dir, tag, client_state, **options):
        torch.save(client_state, f"{save_dir}/{tag}/states.pt")

    def load_checkpoint(self, load_dir, tag, **options):
        return f"{load_dir}/{tag}/states.pt", torch.load(f"{load_dir}/{tag}/states.pt")


def test_universal_checkpoints_have_the_rows_of_their_tag(tmp_path):
    """``ds_to_universal`` copies the files of a tag, but not its folders."""
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
    (elsewhere.parent / "renamed").mkdir()  # the directory beside it belongs to another save
    shutil.copytree(tmp_path / "run" / "global_step1" / "compopt", elsewhere.parent / "renamed" / "compopt")
    shutil.rmtree(elsewhere / "compopt")
    with pytest.raises(FileNotFoundError, match="ds_to_universal"):
        loaded(elsewhere)
