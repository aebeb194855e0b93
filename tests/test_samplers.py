"""Batch samplers: the batches of an epoch, before and after every sample has features, and invalid input."""

import numpy as np
import pytest
import torch
from torch.nn.functional import normalize

from compopt.samplers.ordered import batch_losses
from tests.samplers import KINDS, B, N, both, filled, ordered, spectral, table, train

# epochs -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("known, drop_last", [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("n", [8, 10, 48, 74])
def test_spectral_epochs_have_every_sample_once(n, drop_last, known):
    sampler = spectral(n, drop_last=drop_last)
    if known:
        sampler.observe(torch.arange(n), *table(n))
    epochs = []
    for _ in range(3):
        epoch = list(sampler)
        reference = [len(b) for b in torch.utils.data.BatchSampler(range(n), B, drop_last)]
        assert [len(batch) for batch in epoch] == reference and len(epoch) == len(sampler)
        assert all(type(i) is int for batch in epoch for i in batch)
        samples = sorted(sum(epoch, []))
        assert len(samples) == len(set(samples)) == sum(reference)
        epochs.append(epoch)
    assert epochs[0] != epochs[1] != epochs[2], "every epoch draws anew"


def test_spectral_batches_are_harder_than_random_ones():
    n = 480
    z1, z2 = (normalize(z, dim=1) for z in table(n))
    sampler = spectral(n, group=10, tau=0.1)
    losses = []
    for _ in range(2):  # random, then clustered
        batches = torch.tensor(list(sampler))
        losses.append(batch_losses(z1[batches], z2[batches], 0.1).mean())
        sampler.observe(torch.arange(n), z1, z2)
    assert losses[1] > 1.2 * losses[0]


def test_samples_with_one_label_are_not_gathered():
    """Four copies of each of sixteen samples are the hardest negatives of all, but false ones."""
    z1, z2 = (z.repeat(4, 1) for z in table(16))
    label = torch.arange(64) % 16

    def twins(**options):
        sampler = spectral(64, group=2, **options)  # four groups
        sampler.observe(torch.arange(64), z1, z2)
        return sum(len(batch) - len({i % 16 for i in batch}) for batch in sampler)

    assert twins() > 10
    assert twins(labels=label) == 0


def test_labels_are_dealt_anew_every_epoch_and_fill_every_group():
    labels = torch.arange(74) // 3
    sampler = spectral(74, group=2, labels=labels)
    partners = set()
    for epoch in range(60):
        groups = [piece.samples for piece in sampler.work(epoch)]
        assert sorted(torch.cat(groups).tolist()) == list(range(74))
        assert all(len(labels[group].unique()) == len(group) for group in groups)
        (mine,) = (group for group in groups if 0 in group)
        partners |= set(mine.tolist())
    assert partners == set(range(74)) - {1, 2}


def test_ordered_keeps_the_hardest_of_its_candidates():
    sampler = filled(ordered, dtype=torch.float32)
    z1, z2 = (normalize(z, dim=1).numpy().astype(np.float64) for z in table())

    def loss(batch):
        total = 0.0
        for x, y in ((z1, z2), (z2, z1)):
            s = x[batch] @ y[batch].T / 0.1
            total += np.mean(np.log(np.exp(s).sum(1)) - np.diag(s)) / 2
        return total

    for epoch in range(3):
        candidates = sampler.random_batches(30, epoch).tolist()
        best = sorted(candidates, key=loss, reverse=True)[:5]
        got = list(sampler)
        assert {frozenset(batch) for batch in got} == {frozenset(batch) for batch in best}
        assert sampler.metrics["kept_loss"] == pytest.approx(np.mean([loss(b) for b in got]), rel=1e-5)
        assert sampler.metrics["candidate_loss"] == pytest.approx(np.mean([loss(b) for b in candidates]), rel=1e-5)


# before the bank is filled ------------------------------------------------------------------------


@both
def test_epochs_are_random_until_every_sample_was_observed(make):
    """Planning starts when the last sample is observed; earlier observations change no spectral batch."""
    plain, partly = make(), make()
    partly.observe(torch.arange(N - 1), *(z[:-1] for z in table()))
    assert not partly.bank.filled
    if make is spectral:
        assert list(plain) == list(partly)
    else:  # the missing sample comes first
        assert N - 1 in next(iter(partly))
    partly.observe(torch.tensor([N - 1]), *(z[-1:] for z in table()))
    assert partly.bank.filled
    next(iter(partly))
    assert "plan_seconds" in partly.metrics and "plan_seconds" not in plain.metrics


@both
def test_the_loop_fills_the_bank(make):
    """This also holds if an epoch leaves samples out, because samples without features come first."""
    sampler = make(drop_last=True) if make is spectral else make()
    least = -(-N // (len(sampler) * B))
    train(sampler, least * len(sampler))
    assert sampler.bank.filled


# bad input ----------------------------------------------------------------------------------------


OF_BOTH = [
    ({"n": 0}, ValueError, "n must be a positive integer, got 0"),
    ({"n": 5.0}, TypeError, "n must be a positive integer, got 5.0"),
    ({"batch_size": 1}, ValueError, "batch_size must be between 2 and n=50, got 1"),
    ({"batch_size": 51}, ValueError, "batch_size must be between 2 and n=50, got 51"),
    ({"tau": 0.0}, ValueError, "tau must be greater than 0"),
    ({"seed": -1}, ValueError, "seed must be a non-negative integer, got -1"),
    ({"seed": 1 << 63}, ValueError, "seed must be below"),
    ({"dtype": torch.int8}, ValueError, "dtype must be one of .*float16.*int8"),
    ({"offload": "disk"}, ValueError, "offload must be None or 'cpu', got 'disk'"),
    ({"labels": torch.zeros(49, dtype=torch.int64)}, ValueError, "labels has 49 entries"),
    ({"labels": torch.zeros(50)}, TypeError, "labels must hold integers"),
]
OF_ONE = [
    (ordered, {"keep": 31}, ValueError, "keep must be at most candidates=30, got 31"),
    (ordered, {"keep": 0}, ValueError, "keep must be a positive integer"),
    (ordered, {"candidates": 2.5}, TypeError, "candidates must be a positive integer"),
    (ordered, {"n": 4, "batch_size": 2, "keep": 7}, ValueError, "keep must be at most the 6 batches of 2"),
    (spectral, {"group": 0}, ValueError, "group must be a positive integer, got 0"),
    (spectral, {"drop_last": 1}, TypeError, "drop_last must be True or False, got 1"),
    (spectral, {"sharpness": 0.0}, ValueError, "sharpness must be greater than 0"),
    # an estimator would reject it at the end of the epoch
    (spectral, {"n": 33, "batch_size": 32}, ValueError, "the last batch has 1 of n=33.*two.*drop_last=True"),
]


@pytest.mark.parametrize(
    ("make", "options", "error", "message"), [*((make, *bad) for make in KINDS for bad in OF_BOTH), *OF_ONE]
)
def test_bad_arguments(make, options, error, message):
    with pytest.raises(error, match=message):
        make(**options)


@pytest.mark.parametrize(
    ("index", "shapes", "error", "message"),
    [
        (torch.tensor([0, 50]), [(2, 3), (2, 3)], IndexError, "index 50 is outside n=50"),
        (torch.tensor([0.0, 1.0]), [(2, 3), (2, 3)], TypeError, "index must hold integers"),
        (torch.tensor([0]), [(2, 3), (2, 3)], ValueError, "index has 1 entries for a batch of 2"),
        (torch.tensor([0, 1]), [(2, 3), (2, 4)], ValueError, "same shape"),
        (torch.tensor([0, 1]), [(2, 5), (2, 5)], ValueError, "d=5, but the features so far had d=3"),
    ],
)
def test_bad_features(index, shapes, error, message):
    sampler = spectral()
    sampler.observe(torch.arange(2), torch.ones(2, 3), torch.ones(2, 3))
    before = sampler.bank.rows.clone(), sampler.bank.seen.clone()
    with pytest.raises(error, match=message):
        sampler.observe(index, *map(torch.ones, shapes))
    assert torch.equal(sampler.bank.rows, before[0]) and torch.equal(sampler.bank.seen, before[1])


def test_coverage_is_reported():
    sampler = filled(ordered)
    assert (sampler.coverage, sampler.total_coverage) == (0.0, 0.0)
    seen = set()
    for _ in range(3):
        epoch = set(sum(sampler, []))
        seen |= epoch
        assert sampler.coverage == sampler.metrics["coverage"] == len(epoch) / N <= 5 * B / N
        assert sampler.total_coverage == len(seen) / N
