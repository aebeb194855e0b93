"""The bank of features of the batch samplers."""

import warnings

import pytest
import torch
from torch.nn.functional import normalize

from compopt.samplers import FeatureBank
from compopt.samplers.ordered import batch_losses
from tests.devices import DEVICE, PRETEND, counted, marked, needs_accelerator
from tests.helpers import generator
from tests.samplers import DIM, N, both, filled, moving, spectral, table


def put(bank, index, z1, z2):
    bank.write(torch.as_tensor(index), bank.rounded(z1, z2))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_bank_keeps_normalised_features(dtype):
    bank = FeatureBank(N, dtype)
    z1, z2 = table()
    put(bank, torch.arange(N).flip(0), z1.flip(0), z2.flip(0))
    assert bank.rows.dtype == dtype and bank.rows.shape == (N, 2, DIM)
    index = torch.tensor([[3, 1], [4, 1]])
    for got, z in zip(bank.read(index), (z1, z2), strict=True):
        assert got.dtype == torch.float32
        assert torch.equal(got, normalize(z, dim=1).to(dtype).float()[index])


def test_a_bank_that_is_filled_in_inference_mode_can_be_written_later():
    bank, again, (z1, z2) = FeatureBank(N), FeatureBank(N), table()
    with torch.inference_mode():
        put(bank, torch.arange(N), z1, z2)
        again.load_state_dict(bank.state_dict())
    for each in (bank, again):
        put(each, [1], z1[:1], z2[:1])
        assert torch.equal(each.rows[1], each.rows[0])


def test_rows_that_are_not_finite_are_skipped():
    bank = FeatureBank(3)
    z1, z2 = table(3)
    z2[1, 2] = float("nan")
    put(bank, [0, 1, 2], z1, z2)
    assert bank.seen.tolist() == [True, False, True] and not bank.filled
    put(bank, [1], *(z[:1] for z in table(3)))
    before = bank.rows.clone()
    z1[0, 0] = float("inf")
    put(bank, [0], z1[:1], z1[:1])
    assert bank.filled and torch.equal(bank.rows, before)


@marked(needs_accelerator)
@both
@pytest.mark.parametrize("offload", [None, "cpu"])
def test_features_on_a_device(make, offload):
    sampler, plans = make(offload=offload), []
    for epoch in range(3):
        waits = []
        for step, batch in enumerate(sampler):
            features = moving(10 * epoch + step, batch)
            there = [z.to(DEVICE) for z in features]
            with counted() as found:
                sampler.observe(torch.tensor(batch), *there)
            waits += found[:1]
            plans.append(batch)
        # the first call allocates the bank; no other call waits for the device
        assert len(waits) <= (epoch == 0)
    if PRETEND:  # bit-identical to the CPU; the numbers of other devices may lead to other batches
        on_cpu = make()
        for number, batch in enumerate(batch for _ in range(3) for batch in on_cpu):
            assert batch == plans[number]
            epoch, step = divmod(number, len(on_cpu))
            on_cpu.observe(torch.tensor(batch), *moving(10 * epoch + step, batch))
    assert sampler.bank.rows.device.type == ("cpu" if offload else DEVICE.type)
    twin = make(offload=offload)
    twin.load_state_dict(sampler.state_dict())
    assert list(twin) == list(sampler)


# samples whose features are never finite --------------------------------------------------------------------------


def with_nan(make, bad, n=N, **options):
    """Return a sampler that has observed every sample, some of them with a NaN."""
    sampler, (z1, z2) = make(n, **options), table(n)
    z2[bad, 0] = torch.nan
    sampler.observe(torch.arange(n), z1, z2)
    return sampler


@both
def test_one_sample_that_is_nan_does_not_make_all_batches_random(make):
    sampler, words = with_nan(make, [17]), "1 of n=50 samples have never had finite features, the first is 17"
    with pytest.warns(UserWarning) as caught:
        epochs = [list(sampler) for _ in range(3)]
    assert [str(w.message).startswith(words) for w in caught].count(True) == 1
    assert "plan_seconds" in sampler.metrics and sampler.metrics["unseen"] == 1
    if make is spectral:
        assert all(sorted(sum(epoch, [])) == list(range(N)) for epoch in epochs)
        assert [len(batch) for batch in epochs[0]] == [len(batch) for batch in make()]


@pytest.mark.slow
def test_a_sample_without_features_is_dealt_at_random():
    """Over epochs of two clear clusters it shares batches with all other samples about equally often."""
    n, bad, together = 16, 5, torch.zeros(16, 16)
    centres = torch.eye(2).repeat_interleave(n // 2, 0)  # hard negatives: samples 0 .. 7 of each other, and 8 .. 15
    z = centres + 0.01 * torch.randn(n, 2, generator=generator(0))
    z[bad] = torch.nan
    sampler = spectral(n, 4, group=4)
    sampler.observe(torch.arange(n), z, z)
    with pytest.warns(UserWarning, match="finite"):
        for _ in range(150):
            for batch in sampler:
                together[torch.tensor(batch)[:, None], batch] += 1 / 150
    alike, other = together[0, [1, 2, 3, 4, 6, 7]].mean(), together[0, 8:].mean()
    assert alike > 5 * other
    mine = together[bad][torch.arange(n) != bad]  # three of the fifteen others share its batch
    assert mine.min() > 0.07 and mine.max() < 0.36, mine


@both
def test_nothing_changes_where_all_features_are_finite(make):
    """A sample whose features become finite is chosen like the others."""
    sampler, plain = with_nan(make, [17]), filled(make)
    sampler.observe(torch.tensor([17]), *(z[17:18] for z in table()))
    with warnings.catch_warnings(record=True):
        assert list(sampler) == list(plain)


@both
def test_a_resumed_run_leaves_the_same_samples_out(make):
    sampler, twin = with_nan(make, [3, 17]), make()
    twin.load_state_dict(sampler.state_dict())
    with pytest.warns(UserWarning, match="2 of n=50"):
        assert list(sampler) == list(twin)


def test_a_batch_is_judged_by_its_other_samples():
    """The loss of a batch is that of the batch without its absent samples."""
    z1, z2 = (normalize(z, dim=1) for z in table(12))
    batch = torch.tensor([[0, 1, 2, 3], [4, 5, 6, 7]])
    absent = torch.tensor([[False, True, False, False], [True, True, True, True]])
    got = batch_losses(z1[batch], z2[batch], 0.2, absent=absent)
    rest = batch[:1, [0, 2, 3]]
    assert torch.allclose(got[:1], batch_losses(z1[rest], z2[rest], 0.2)) and got[1] == 0
