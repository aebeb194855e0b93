"""Counter-based random numbers: the published generator, reproducible words, uniform and independent draws."""

import torch

from compopt import rng as draws
from tests.reference.mcmc import scramble, word


def unsigned(words):
    return [x & (2**64 - 1) for x in words.flatten().tolist()]


def test_the_generator_is_splitmix64():
    """The first outputs for seed 0 equal those that its authors publish."""
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert unsigned(draws.bits(torch.zeros(1, dtype=torch.int64), 0, 3)) == published


def test_draws_depend_on_what_they_are_for_only():
    positions = torch.tensor([0, 5, 1 << 40])
    streams = draws.streams((3, 9, 1, 0), positions)
    whole = draws.bits(streams, 0, 7)
    assert unsigned(whole) == [word(3, 9, 1, 0, p, r) for r in range(7) for p in positions.tolist()]
    assert torch.equal(draws.bits(streams[1:2], 4, 3), whole[4:, 1:2])
    assert scramble(2**64 - 1) == draws.scramble(-1)


def test_draws_are_uniform_and_independent():
    words = draws.bits(draws.streams((0,), torch.arange(300)), 0, 500)
    u = draws.uniform(words, torch.float64)
    assert u.min() > 0 and u.max() <= 1 and draws.uniform(words, torch.float32).max() <= 1
    number = draws.below(words, torch.full((300,), 7))
    assert number.min() == 0 and number.max() == 6
    cells = torch.bincount((number * 10 + (u * 10).long().clamp(max=9)).flatten(), minlength=70).double()
    expected = cells.sum() / 70
    assert ((cells - expected) ** 2 / expected).sum() < 120  # 69 degrees of freedom: p = 1e-4
    for other in (u.roll(1, 0), u.roll(1, 1)):  # next word of the stream, next stream
        assert abs(torch.corrcoef(torch.stack([u.flatten(), other.flatten()]))[0, 1]) < 4 / u.numel() ** 0.5
