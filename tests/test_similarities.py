"""Any matrix of similarities: contrast rows of the identity with its columns (docs/guides/similarities.md)."""

import pytest
import torch
import torch.distributed as dist

import compopt
from tests.pool import the_pool

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


def on_ranks(group, half):
    from torch.distributed.nn.functional import all_gather

    first = dist.get_rank() * half
    queries, documents = (x.detach()[first : first + half].requires_grad_() for x in tokens(2))
    est = estimator(n=N, gamma=0.5)
    scores = maxsim(torch.cat(all_gather(queries)), documents)
    loss = est(ONE_HOT[first : first + half], scores.T, torch.arange(first, first + half))
    loss.backward()
    return loss.detach(), queries.grad / 2, documents.grad / 2


@pytest.mark.distributed
def test_two_ranks_are_one():
    queries, documents = tokens(2)
    loss = estimator(n=N, gamma=0.5)(ONE_HOT, maxsim(queries, documents).T, torch.arange(B))
    loss.backward()
    values, *gradients = zip(*the_pool(2, 60).run(on_ranks, 2, B // 2), strict=True)
    torch.testing.assert_close(torch.stack(values), loss.detach().expand(2))
    found = [torch.cat(parts) for parts in gradients]
    torch.testing.assert_close(found, [queries.grad, documents.grad], rtol=1e-10, atol=1e-12)
