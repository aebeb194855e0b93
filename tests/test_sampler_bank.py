"""The bank of features of the batch samplers."""

import pytest
import torch
from torch.nn.functional import normalize

from compopt.samplers import FeatureBank
from tests.samplers import DIM, N, both, moving, spectral, table


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


def test_a_held_bank_takes_writes_later_and_in_order():
    bank = FeatureBank(3, torch.float32)
    put(bank, [0, 1, 2], *table(3))
    bank.hold()
    before = bank.rows.clone()
    for seed in (1, 2):
        put(bank, [0, 1, 2], *table(3, seed=seed))
    assert torch.equal(bank.rows, before)
    bank.release()
    assert torch.equal(bank.read(torch.arange(3))[0], normalize(table(3, seed=2)[0], dim=1))


def test_observing_keeps_no_graph_and_reads_any_integer_index():
    sampler = spectral()
    z1, z2 = (z.requires_grad_() for z in table())
    sampler.observe(torch.arange(N, dtype=torch.int32), z1, z2)
    assert not sampler.bank.rows.requires_grad and sampler.bank.filled


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@both
@pytest.mark.parametrize("offload", [None, "cpu"])
def test_features_on_a_device(make, offload):
    sampler = make(offload=offload)
    for step in range(3 * len(sampler)):
        for batch in sampler:
            sampler.observe(torch.tensor(batch), *(z.cuda() for z in moving(step, batch)))
    assert sampler.bank.rows.device.type == ("cpu" if offload else "cuda")
    twin = make(offload=offload)
    twin.load_state_dict(sampler.state_dict())
    assert list(twin) == list(sampler)
