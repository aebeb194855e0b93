"""What only a GPU can show: the same numbers, no host synchronisation, faults learned of late."""

import pytest
import torch

import compopt

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

N, B, D = 200, 32, 16
MODES = ("bimodal", "unimodal")
BUILD = {
    "infonce": lambda mode: compopt.InfoNCEEstimator(0.07, mode=mode),
    "clip": lambda mode: compopt.InfoNCEEstimator(0.07, learn_tau=True, multiply_tau=False, mode=mode),
    "sogclr": lambda mode: compopt.SogCLREstimator(N, gamma=0.7, mode=mode),
    "isogclr": lambda mode: compopt.ISogCLREstimator(N, rho=1.0, mode=mode),
    "fastclip-v2": lambda mode: compopt.FastCLIPEstimator(N, "v2", rho=1.0, mode=mode),
    "fastclip-v3": lambda mode: compopt.FastCLIPEstimator(N, "v3", rho=1.0, mode=mode),
    "neuclip": lambda mode: compopt.NeuCLIPEstimator(D, prototypes=48, lr=0.1, updates=3, mode=mode),
    "emc2": lambda mode: compopt.EMC2Estimator(N, tau=0.3, mode=mode),
    "residual": lambda mode: compopt.ResidualEstimator(D, N, prototypes=48, mode=mode),
    "groups": lambda mode: compopt.SogCLREstimator([{"n": 80, "gamma": 0.5}, {"n": N - 80}], mode=mode),
}


def batch(seed, device):
    generator = torch.Generator().manual_seed(seed)
    z1, z2 = torch.randn(2, B, D, generator=generator)
    index = torch.randperm(N, generator=generator)[:B]
    return z1.to(device).requires_grad_(), z2.to(device).requires_grad_(), index


def train(est, device, steps=5):
    results = []
    for seed in range(steps):
        z1, z2, index = batch(seed, device)
        loss = est(z1, z2, index)
        loss.backward()
        est.step()
        results.append((loss.detach().cpu(), z1.grad.cpu(), z2.grad.cpu()))
    return results


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", BUILD)
def test_as_on_the_cpu(name, mode):
    on_cpu, on_gpu = BUILD[name](mode), BUILD[name](mode)
    for expected, actual in zip(train(on_cpu, "cpu"), train(on_gpu, "cuda"), strict=True):
        for a, b in zip(actual, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    if on_cpu.n is not None and name != "fastclip-v3":
        everything = torch.arange(N)
        for column, value in on_cpu.read(everything).items():
            torch.testing.assert_close(on_gpu.read(everything)[column].cpu(), value, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", BUILD)
def test_nothing_waits_for_the_device(name, mode):
    est = BUILD[name](mode)
    train(est, "cuda", steps=2)  # allocations, the table's move, lazy initialisation
    z1, z2, index = batch(9, "cuda")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        loss = est(z1, z2, index)
        loss.backward()
        est.step()
        est.metrics  # noqa: B018
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.isfinite(loss)


def test_a_bad_index_on_the_device_is_heard_of_at_a_later_call():
    est = compopt.SogCLREstimator(N)
    train(est, "cuda", steps=1)
    before = est.state_dict()["rows"]
    z1, z2, index = batch(1, "cuda")
    index[3] = N + 5
    assert torch.isnan(est(z1, z2, index.cuda()))
    est.step()
    for column, value in est.state_dict()["rows"].items():
        assert torch.equal(value, before[column])
    torch.cuda.synchronize()
    with pytest.raises(IndexError, match="earlier call"):
        est(*batch(2, "cuda"))
    train(est, "cuda", steps=1)  # and the estimator goes on


def test_found_inf_on_the_device_drops_the_window():
    est = compopt.ISogCLREstimator(N, rho=1.0)
    train(est, "cuda", steps=1)
    before = est.state_dict()["rows"]
    est(*batch(1, "cuda"))
    est._commit(torch.ones((), device="cuda"))
    assert est.pending == 0
    for column, value in est.state_dict()["rows"].items():
        assert torch.equal(value, before[column])


def test_repeats_on_the_device_have_the_same_bits_every_time():
    def run():
        est = compopt.SogCLREstimator(N)
        z1, z2, index = batch(0, "cuda")
        est(z1, z2, (index % 7).cuda())
        est.step()
        return est.state_dict()["rows"]

    first, second = run(), run()
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("offload", ["cpu", "disk"])
@pytest.mark.parametrize("prefetch", [False, True])
def test_rows_on_the_host_wait_for_nobody_and_change_nothing(offload, prefetch, tmp_path):
    options = {"offload_dir": tmp_path} if offload == "disk" else {}
    near, far = compopt.SogCLREstimator(N), compopt.SogCLREstimator(N, offload=offload, **options)
    train(near, "cuda", steps=2), train(far, "cuda", steps=2)
    batches = [batch(seed, "cuda") for seed in range(10, 18)]
    if prefetch:
        far.prefetch(batches[0][2])
    torch.cuda.synchronize()
    losses = []
    for step, (z1, z2, index) in enumerate(batches):
        torch.cuda.set_sync_debug_mode("error")
        try:
            if prefetch and step + 1 < len(batches):
                far.prefetch(batches[step + 1][2])
            loss = far(z1, z2, index)
            loss.backward()
            far.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        losses.append((loss.detach(), near(z1, z2, index).detach()))
        near.step()
    assert all(torch.equal(a, b) for a, b in losses)
    everything = torch.arange(N)
    for column, value in near.read(everything).items():
        assert torch.equal(far.read(everything)[column].cpu(), value.cpu())
