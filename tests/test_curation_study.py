"""Noise of the study of curation: which pairs are wrong, and what the copies are."""

import pytest
import torch

from benchmarks.studies import curation

N = 40


class Pairs:
    """Pairs whose sides contain the number of the sample."""

    n, mode, group = N, "bimodal", torch.arange(N)

    def inputs(self, index, draws):
        return index, index

    def training_features(self, model):
        return (torch.randn(N, 8, generator=torch.Generator().manual_seed(0)),) * 2


@pytest.fixture(params=curation.NOISES)
def noisy(request, monkeypatch):
    monkeypatch.setitem(curation.DATA, "pairs", curation.Data(lambda wordnet: Pairs()))
    return curation.Noisy(curation.Case("pairs", request.param, 0.25), None)


def test_wrong_pairs_are_those_that_the_noise_changed(noisy):
    one, two = noisy.inputs(torch.arange(N), torch.Generator())
    changed = (one != torch.arange(N)) | (two != torch.arange(N))
    assert torch.equal(noisy.wrong, changed)
    assert 8 <= noisy.wrong.sum() <= N // 4  # a pair of the boilerplate may keep its own side


def test_copies_are_right_pairs_and_copy_samples_that_remain(noisy):
    one, two = noisy.inputs(torch.arange(N), torch.Generator())
    copied = torch.equal(one, two)
    assert copied != bool((one != two).any())
    if copied:
        assert noisy.wrong.sum() == N // 4 and not noisy.wrong[one].any()


@pytest.mark.parametrize("noisy", ["duplicated"], indirect=True)
def test_the_arm_of_duplicates_finds_copies_or_their_originals(noisy):
    first = curation.FirstRun.__new__(curation.FirstRun)
    first.features, first.wrong = noisy.features(torch.nn.Identity()), noisy.wrong
    dropped = first.suspects(curation.COPIES)
    left = torch.ones(N, dtype=torch.bool)
    left[dropped] = False
    sources = noisy.first[left]
    assert len(sources) == len(sources.unique()) == len(noisy.first.unique())  # one of each group is left
