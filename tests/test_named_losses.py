"""Named losses, as docs/guides/pairs.md builds them, against their equations: values and gradients."""

import re
from pathlib import Path

import pytest
import torch

import compopt
from compopt import PairPolicy
from tests.helpers import call, features, near
from tests.reference import policies

PAGE = Path(__file__).parent.parent / "docs" / "guides" / "pairs.md"
BATCH, DIM = 8, 4
LABELS = torch.tensor([0, 0, 1, 1, 1, 2, 3, 3])
GUIDE, EXTRA, EXTRA_GUIDE = (
    features(BATCH, 3, seed=81),
    features(BATCH, DIM, seed=82)[0],
    features(BATCH, 3, seed=83)[0],
)
cosines = policies.cosines


def of_the_page():
    """Execute the code block of the page, and return its estimators by name."""
    text = PAGE.read_text()
    section = text[text.index("## Losses with names") :]
    code = re.search(r"```python\n(.*?)```", section, re.S).group(1)
    names = {"compopt": compopt, "PairPolicy": PairPolicy}
    exec(code, names)
    kinds = (compopt.ContrastiveEstimator, compopt.losses.SupConLoss)
    return {name: est for name, est in names.items() if isinstance(est, kinds)}


NAMED = of_the_page()


def gist(z1, z2, extra):
    return policies.false_negatives_masked(cosines(z1, z2), cosines(*GUIDE), 0.05, -0.1)


def nv_retriever(z1, z2, extra):
    seen = cosines(*GUIDE), cosines(GUIDE[0], EXTRA_GUIDE)
    return policies.mined_below_share(cosines(z1, z2), cosines(z1, extra), *seen, 0.05, 0.95)


# arguments of the call, and the equation as a function of z1, z2 and further candidates
LOSSES = {
    "clip": ({}, lambda z1, z2, extra: policies.both_ways(cosines(z1, z2), 0.07)),
    "gist": ({"guide": GUIDE}, gist),
    "nv_retriever": ({"guide": (*GUIDE, EXTRA_GUIDE), "extra": EXTRA}, nv_retriever),
    "llave": ({}, lambda z1, z2, extra: policies.hardness_weighted(*policies.split(cosines(z1, z2)), 0.05, 9.0)),
    "supcon": (
        {"labels": LABELS},
        lambda z1, z2, extra: policies.supervised(torch.cat([z1, z2]), LABELS.repeat(2), 0.1),
    ),
    "nt_xent": ({}, lambda z1, z2, extra: policies.nt_xent(torch.cat([z1, z2]), torch.arange(BATCH).repeat(2), 0.07)),
}


def test_every_line_of_the_page_has_an_equation():
    assert set(LOSSES) == set(NAMED)


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_the_line_is_the_equation(name):
    given, equation = LOSSES[name]
    leaves = [z.requires_grad_() for z in (*features(BATCH, DIM, seed=80), EXTRA.clone())]
    leaves = leaves if "extra" in given else leaves[:2]
    est = NAMED[name]
    loss = call(est, *leaves[:2], **(given | ({"extra": leaves[2]} if "extra" in given else {})))
    if isinstance(est, compopt.ContrastiveEstimator):  # it averages over the negatives
        loss = loss + torch.as_tensor(est._last.negatives, dtype=torch.float64).log().mean()
    theirs = equation(*leaves[:2], leaves[-1])
    near(loss, theirs, 1e-9)
    for got, want in zip(torch.autograd.grad(loss, leaves), torch.autograd.grad(theirs, leaves), strict=True):
        near(got, want, 1e-8)
