"""Theorems 1 to 5 of the mini-batch paper at small size, and which batches come near the optimum soon."""

import statistics

import pytest

from benchmarks.studies.minibatch_geometry import (
    Setting,
    affine_blocks,
    all_batches,
    batch_sets,
    descend,
    distance,
    minimise,
)

N = 8


@pytest.mark.parametrize("dim", [2 * N, N // 2], ids=["frame", "cross-polytope"])
@pytest.mark.parametrize("size", [2, 4, 8])
def test_the_full_batch_and_all_batches_reach_the_optimum(dim, size):
    """Lemma 1, Theorems 3 and 4; size 8 is the full batch."""
    assert distance(minimise(all_batches(N, size), N, dim, seed=0)) < 1e-3


@pytest.mark.parametrize("dim", [2 * N, N // 2], ids=["frame", "cross-polytope"])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", ["all but those with one pair", "a partition"])
def test_a_subset_without_some_pair_does_not(dim, size, name):
    """Theorem 5."""
    assert distance(minimise(batch_sets(N, size)[name], N, dim, seed=0)) > 0.05


def test_a_block_design_reaches_the_frame():
    """A strict subset that covers all pairs equally: Theorem 5 does not exclude it."""
    assert distance(minimise(affine_blocks(), N, 2 * N, seed=0)) < 1e-3


@pytest.mark.slow
def test_chosen_batches_come_nearer_than_random_ones():
    """Figure 4e, half of its steps, the median of three seeds."""
    ends = {
        method: statistics.median(descend(method, Setting(N, 2, 2 * N, steps=250, seed=seed))[-1] for seed in range(3))
        for method in ("random", "OSGD", "spectral")
    }
    assert max(ends["OSGD"], ends["spectral"]) < ends["random"], ends
