"""Further candidates, blocks, accumulation, learned temperatures, checkpoints: same results as on the CPU."""

import copy

import pytest
import torch

import compopt
from tests.accelerated import BUILD, KINDS, WITH_ROWS, B, D, N, batch, one_step, same, same_rows, train
from tests.devices import DEVICE, counted, needs_accelerator, quiet
from tests.helpers import rows_of

pytestmark = needs_accelerator
SOME = ("infonce", "sogclr", "isogclr")


def both(build, call, seeds=range(4)):
    """Run `call(est, *batch)` on the CPU and on the device, where steps after the first two must not wait."""
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


@pytest.mark.parametrize("kind", KINDS)
def test_a_momentum_copy(kind):
    """Test momentum features and the update of the momentum encoder after each commit."""
    towers = {"cpu": torch.nn.Linear(D, D)}
    towers[DEVICE] = copy.deepcopy(towers["cpu"]).to(DEVICE)
    encoders = {device: compopt.MomentumEncoder(tower, 0.5) for device, tower in towers.items()}

    def call(est, z1, z2, index, device):
        keys = [encoders[device](z) for z in (z1, z2)]
        result = one_step(est, z1, z2, index, keys=keys)
        with torch.no_grad():
            towers[device].weight.add_(z1.detach()[:D])
        encoders[device].update()
        return [*result, encoders[device].module.weight.clone()]

    both(lambda: BUILD["memory"](**KINDS[kind]), call)


@pytest.mark.parametrize("name", ["sogclr", "isogclr", "emc2"])
def test_groups_and_a_second_index(name):
    labels = torch.arange(B) // 2
    both(lambda: BUILD[name](), lambda est, *given: one_step(est, *given[:3], index2=given[2].flip(0), labels=labels))


IN_BLOCKS = [(name, kind) for name in ("infonce", "isogclr") for kind in KINDS]


@pytest.mark.parametrize(("name", "kind"), [*IN_BLOCKS, *((n, "bimodal") for n in ("neuclip", "emc2"))])
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
    """Stand-in for a fused optimizer, which reads found_inf itself."""

    def step(self, closure=None):
        pass


@pytest.mark.parametrize("skips", [False, True])
def test_a_scaler_that_skips_the_update(skips):
    """An update skipped by float16 loss scaling commits nothing, without waiting for the device."""
    est, weight = compopt.ISogCLREstimator(N, rho=1.0), torch.eye(D, device=DEVICE).requires_grad_()
    optimizer = Unmoved([weight], {})
    train(est, DEVICE, range(1, 2))
    before = rows_of(est.state_dict())
    est.attach(optimizer)
    z1, z2, index = batch(0, DEVICE)
    est(z1 @ weight, z2, index).backward()
    optimizer.found_inf = torch.full((), float(skips), device=DEVICE)  # set by GradScaler for a fused optimizer
    with quiet():
        optimizer.step()
    assert est.pending == 0
    assert all(torch.equal(value, before[name]) == skips for name, value in rows_of(est.state_dict()).items())


@pytest.mark.parametrize("to", ["cpu", "device"])
@pytest.mark.parametrize("name", ["sogclr", "fastclip-v3", "neuclip", "emc2", "clip"])
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


@pytest.mark.parametrize("offload", [None, "cpu", "disk"])
def test_a_checkpoint_beside_training(offload, tmp_path):
    """Commits neither wait for the thread that writes the checkpoint nor change its content."""
    options = {"offload_dir": tmp_path / "rows"} if offload == "disk" else {}
    est, at_the_cut = compopt.SogCLREstimator(N, offload=offload, **options), compopt.SogCLREstimator(N)
    train(est, DEVICE, range(8))
    at_the_cut.load_state_dict(est.state_dict())
    batches = [batch(seed, DEVICE) for seed in range(8, 16)]
    handle = compopt.save(est, tmp_path / "files", blocking=False)
    with counted() as waits:
        for given in batches:
            one_step(est, *given)
    assert waits == []
    loaded = compopt.SogCLREstimator(N)
    compopt.load(loaded, handle.wait(30))
    same_rows(loaded, at_the_cut)
    assert not torch.equal(est.read(torch.arange(N))["count"].cpu(), loaded.read(torch.arange(N))["count"])


def test_rows_on_the_device_grow_and_are_copied():
    on_cpu, there = (compopt.SogCLREstimator(N - 50) for _ in range(2))
    for est, device in ((on_cpu, "cpu"), (there, DEVICE)):
        est.to(device).add_sample_group({"n": 50})
        train(est, device, range(2))
    twin = copy.deepcopy(there)
    expected = train(on_cpu, "cpu", range(2, 4))
    same(train(twin, DEVICE, range(2, 4)), expected)
    same(train(there, DEVICE, range(2, 4)), expected)
