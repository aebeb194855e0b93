"""Any matrix of similarities: contrast rows of the identity with its columns (docs/guides/pairs.md)."""

import pytest
import torch

import compopt

N, B, TAU = 20, 6, 0.2
ONE_HOT = torch.eye(B, dtype=torch.float64)


def tokens(count=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((B, 3, 4), (B, 5, 4), (2, 5, 4))[:count]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]


def maxsim(queries, documents):
    return torch.einsum("pqd,ntd->pnqt", queries, documents).amax(-1).mean(-1)


def estimator(kind=compopt.SogCLREstimator, *args, **options):
    given = {"tau": TAU, "normalize": False, "dtype": torch.float64, **options}
    return kind(*args, **given)


def test_late_interaction_is_autograd_s_cross_entropy():
    queries, documents, mined = tokens()
    est = estimator(compopt.InfoNCEEstimator, directions="forward", multiply_tau=False)
    est(ONE_HOT, maxsim(queries, documents).T, negatives=maxsim(queries, mined).T).backward()
    found = [x.grad for x in (queries, documents, mined)]
    scores = torch.cat([maxsim(queries, documents), maxsim(queries, mined)], 1)
    expected = torch.nn.functional.cross_entropy(scores / TAU, torch.arange(B))
    torch.testing.assert_close(found, list(torch.autograd.grad(expected, (queries, documents, mined))))
    torch.testing.assert_close(est.metrics["info_nce"], expected.detach())


@pytest.mark.parametrize("mode", ["both", "forward"])
def test_inner_products_are_what_features_give(mode):
    z1, z2 = torch.randn(2, B, 4, dtype=torch.float64).unbind()
    index = torch.arange(B) // 2 * 2 + 1  # two of each
    results = []
    for matrix in (False, True):
        leaves = [z.clone().requires_grad_() for z in (z1, z2)]
        est = estimator(n=N, gamma=0.5, directions=mode, pairs=compopt.PairPolicy(hardness=2.0))
        given = (ONE_HOT, (leaves[0] @ leaves[1].T).T) if matrix else leaves
        loss = est(*given, index)
        loss.backward()
        est.step()
        results.append([loss.detach(), *(z.grad for z in leaves), est.read(index)["log_u"]])
    torch.testing.assert_close(*results, rtol=1e-10, atol=1e-12)
