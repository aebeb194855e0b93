"""Further candidates, blocks, accumulation, learned temperatures, checkpoints: on an accelerator as on the CPU."""

import copy
import threading

import pytest
import torch

import compopt
from compopt.stores import snapshot, table
from tests.accelerated import BUILD, KINDS, WITH_ROWS, B, D, N, batch, one_step, same, same_rows, train
from tests.devices import DEVICE, HAS_STREAMS, needs_accelerator, quiet

pytestmark = needs_accelerator
SOME = ("infonce", "sogclr", "isogclr", "residual")


def both(build, call, seeds=range(4)):
    """What `call(est, *batch)` returns at each step, on the CPU and (after two steps without a wait) on the device."""
    on_cpu, there = build(), build()
    expected = [call(on_cpu, *batch(seed), "cpu") for seed in seeds]
    found = [call(there, *batch(seed, DEVICE), DEVICE) for seed in seeds[:2]]
    batches = [batch(seed, DEVICE) for seed in seeds[2:]]
    with quiet():
        found += [call(there, *given, DEVICE) for given in batches]
    same(found, expected)


@pytest.mark.parametrize("name", SOME)
def test_further_candidates(name):
    extra = {"cpu": torch.randn(9, D, generator=torch.Generator().manual_seed(1)), DEVICE: None}
    extra[DEVICE] = extra["cpu"].to(DEVICE)

    def call(est, z1, z2, index, device):
        further = extra[device].clone().requires_grad_()
        return [*one_step(est, z1, z2, index, extra=further, extra_index=torch.arange(9) + 100), further.grad]

    both(lambda: BUILD[name](), call)


@pytest.mark.parametrize("name", ["sogclr", "isogclr", "emc2"])
def test_groups_and_a_second_index(name):
    labels = torch.arange(B) // 2

    def call(est, z1, z2, index, device):
        del device
        return one_step(est, z1, z2, index, index2=index.flip(0), group=labels)

    both(lambda: BUILD[name](), call)


IN_BLOCKS = [(name, kind) for name in ("infonce", "isogclr") for kind in KINDS]


@pytest.mark.parametrize(("name", "kind"), [*IN_BLOCKS, *((n, "bimodal") for n in ("neuclip", "residual", "emc2"))])
def test_in_blocks(name, kind):
    both(lambda: BUILD[name](chunk_size=7, **KINDS[kind]), lambda est, *given: one_step(est, *given[:3]))


@pytest.mark.parametrize("name", WITH_ROWS)
def test_accumulation_with_repeats(name):
    def call(est, z1, z2, index, device):
        losses = [est(z1, z2, index).detach()]
        losses.append(est(z1, z2, torch.cat([index[:4], index[:-4]])).detach())
        est.step()
        return losses

    both(lambda: BUILD[name](), call)


def test_a_cached_window():
    def call(est, z1, z2, index, device):
        loss, g1, g2 = est.feature_gradients(z1, z2, index)
        est.step()
        return loss, g1, g2

    both(lambda: compopt.ISogCLREstimator(N, rho=1.0), call)


def test_chains_that_encode_wait_once_per_call_and_give_the_same():
    table = torch.randn(2, N, D, generator=torch.Generator().manual_seed(5))
    on_cpu, there = (compopt.EMC2Estimator(N, tau=0.3) for _ in range(2))
    expected = train(on_cpu, encode=lambda index: (table[0][index], table[1][index]))
    same(train(there, DEVICE, encode=lambda index: tuple(z[index].to(DEVICE) for z in table)), expected)


@pytest.mark.parametrize("mode", ["bimodal", "unimodal"])
def test_a_temperature_in_the_hands_of_the_optimizer(mode):
    results = []
    for device in ("cpu", DEVICE):
        est = BUILD["clip"](mode=mode).to(device)
        optimizer = torch.optim.AdamW(est.parameters(), lr=0.1)
        est.attach(optimizer)
        train(est, device, range(1))
        losses = []
        batches = [batch(seed, device) for seed in range(1, 4)]
        with quiet():
            for z1, z2, index in batches:
                loss = est(z1, z2, index)
                loss.backward()
                optimizer.step(), optimizer.zero_grad()
                losses.append(loss.detach())
        assert est.pending == 0
        results.append([losses, [p.detach() for p in est.parameters()]])
    same(results[1], results[0])
    assert float(results[0][1][0]) != pytest.approx(float(next(iter(BUILD["clip"]().parameters()))))


class Unmoved(torch.optim.Optimizer):
    """Stands for a fused one, which reads found_inf itself."""

    def step(self, closure=None):
        pass


@pytest.mark.parametrize("skips", [False, True])
def test_a_scaler_that_skips_the_update(skips):
    """Loss scaling in float16: a skipped update commits nothing, and nobody waits to learn of it."""
    est, weight = compopt.SogCLREstimator(N), torch.eye(D, device=DEVICE).requires_grad_()
    optimizer = Unmoved([weight], {})
    est.attach(optimizer)
    z1, z2, index = batch(0, DEVICE)
    est(z1 @ weight, z2, index).backward()
    optimizer.found_inf = torch.full((), float(skips), device=DEVICE)  # what a fused optimizer is given
    with quiet():
        optimizer.step()
    assert est.pending == 0
    assert bool((est.read(index)["count"].cpu() == (0 if skips else 1)).all())


def test_a_temperature_per_sample_in_the_call():
    tau = torch.rand(B, 1, generator=torch.Generator().manual_seed(3)) + 0.05

    def call(est, z1, z2, index, device):
        given = tau.to(device).requires_grad_()
        return [*one_step(est, z1, z2, index, tau=given), given.grad]

    on_cpu, there = BUILD["infonce"](), BUILD["infonce"]()
    same([call(there, *batch(0, DEVICE), DEVICE)], [call(on_cpu, *batch(0), "cpu")])


@pytest.mark.parametrize("to", ["cpu", "device"])
@pytest.mark.parametrize("name", ["sogclr", "fastclip-v3", "neuclip", "residual", "emc2", "clip"])
def test_a_checkpoint_goes_on_elsewhere(name, to, tmp_path):
    first, second = ("cpu", DEVICE) if to == "device" else (DEVICE, "cpu")
    est = BUILD[name]()
    train(est, first, range(3))
    compopt.save(est, tmp_path / "files")
    loaded, restored = BUILD[name](), BUILD[name]().to(second)
    compopt.load(loaded, tmp_path / "files")
    restored.load_state_dict(est.state_dict())
    expected = train(est, first, range(3, 6))
    same(train(loaded, second, range(3, 6)), expected)
    same(train(restored, second, range(3, 6)), expected)
    if name in WITH_ROWS:
        same_rows(loaded, est)
        same_rows(restored, est)


@pytest.mark.parametrize("offload", ["cpu", "disk"])
def test_a_checkpoint_of_rows_elsewhere(offload, tmp_path):
    options = {"offload_dir": tmp_path / "rows"} if offload == "disk" else {}
    far = compopt.ISogCLREstimator(N, rho=1.0, offload=offload, **options)
    near = compopt.ISogCLREstimator(N, rho=1.0)
    train(far, DEVICE, range(3))
    compopt.save(far, tmp_path / "files")
    compopt.load(near, tmp_path / "files")
    same(train(near, DEVICE, range(3, 6)), train(far, DEVICE, range(3, 6)), rtol=0, atol=0)


@pytest.mark.parametrize("offload", [None, "cpu", "disk"])
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_checkpoint_beside_training(after, offload, tmp_path, monkeypatch):
    """Commits neither wait for the thread that writes it nor get into it; it looks at the store around them."""
    options = {"offload_dir": tmp_path / "rows"} if offload == "disk" else {}
    est, at_the_cut = compopt.SogCLREstimator(N, offload=offload, **options), compopt.SogCLREstimator(N)
    train(est, DEVICE, range(8))
    at_the_cut.load_state_dict(est.state_dict())
    reached, go = held_reads(monkeypatch, after)
    batches = [batch(seed, DEVICE) for seed in range(8, 16)]
    handle = compopt.save(est, tmp_path / "files", blocking=False)
    assert reached.wait(30)
    with quiet():
        for given in batches:
            one_step(est, *given)
    go.set()
    loaded = compopt.SogCLREstimator(N)
    compopt.load(loaded, handle.wait(30))
    same_rows(loaded, at_the_cut)
    assert not torch.equal(est.read(torch.arange(N))["count"].cpu(), loaded.read(torch.arange(N))["count"])


def held_reads(monkeypatch, after=False):
    """Let the thread that saves wait before, or right after, it copies rows: events for "it is there" and "go on"."""
    reached, go = threading.Event(), threading.Event()

    class Held(snapshot.Snapshot):
        def read(self, start, stop):
            block = self._store.block

            def held(*args):
                rows = block(*args) if after else None
                reached.set()
                assert go.wait(30)
                return rows if after else block(*args)

            monkeypatch.setattr(self._store, "block", held)
            try:
                return super().read(start, stop)
            finally:
                monkeypatch.setattr(self._store, "block", block)

    monkeypatch.setattr(table, "Snapshot", Held)
    return reached, go


def test_rows_move_when_they_are_read(tmp_path, monkeypatch):
    est = compopt.SogCLREstimator(N)
    train(est, "cpu", range(3))
    _, go = held_reads(monkeypatch)
    handle = compopt.save(est, tmp_path, blocking=False)
    thread = threading.Thread(target=est.to, args=(DEVICE,))
    thread.start()
    thread.join(1)
    assert thread.is_alive() and est.device.type == "cpu"
    go.set()
    thread.join(30)
    loaded = compopt.SogCLREstimator(N)
    compopt.load(loaded, handle.wait(30))
    assert est.device == DEVICE
    same_rows(loaded, est)


def test_rows_on_the_device_grow_and_are_copied():
    on_cpu, there = (compopt.SogCLREstimator(N - 50) for _ in range(2))
    for est, device in ((on_cpu, "cpu"), (there, DEVICE)):
        est.to(device).add_sample_group({"n": 50})
        train(est, device, range(2))
    twin = copy.deepcopy(there)
    expected = train(on_cpu, "cpu", range(2, 4))
    same(train(twin, DEVICE, range(2, 4)), expected)
    same(train(there, DEVICE, range(2, 4)), expected)


def test_half_precision():
    z1, z2, index = batch(0, DEVICE)
    est = compopt.SogCLREstimator(N)
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
        weight = torch.eye(D, device=DEVICE)
        loss = est(z1 @ weight, z2 @ weight, index)
    loss.backward()
    expected = compopt.SogCLREstimator(N)(*(z.detach().bfloat16() for z in (z1, z2)), index)
    torch.testing.assert_close(loss.detach().cpu(), expected.detach().cpu(), rtol=1e-3, atol=1e-4)
    assert z1.grad.dtype == torch.float32


@pytest.mark.skipif(not HAS_STREAMS, reason="what is written is a stream's")
def test_est_read_sees_commits_that_the_writer_has_not_written():
    est = compopt.SogCLREstimator(N, offload="cpu")
    near = compopt.SogCLREstimator(N)
    train(est, DEVICE, range(3)), train(near, DEVICE, range(3))
    same_rows(est, near)
    same_rows(near, est)


def test_diagnostics_on_the_device():
    z1, z2, _ = batch(0)
    z1, z2 = z1.detach(), z2.detach()
    expected = compopt.diagnostics.log_normalizers(z1, z2, 0.1)
    found = compopt.diagnostics.log_normalizers(z1.to(DEVICE), z2.to(DEVICE), 0.1)
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-4, atol=1e-5)
