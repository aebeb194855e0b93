"""Named losses, as docs/guides/pairs.md builds them, against their equations: values and gradients."""

import math
import re
from pathlib import Path

import pytest
import torch

import compopt
from compopt import PairPolicy
from tests.helpers import features, near
from tests.reference import policies

PAGE = Path(__file__).parent.parent / "docs" / "guides" / "pairs.md"
BATCH, DIM = 8, 4
LABELS = torch.tensor([0, 0, 1, 1, 1, 2, 3, 3])
GUIDE, EXTRA, EXTRA_GUIDE = (
    features(BATCH, 3, seed=81),
    features(BATCH, DIM, seed=82)[0],
    features(BATCH, 3, seed=83)[0],
)
TEACHER = features(BATCH, 3, seed=84)
cosines = policies.cosines


def of_the_page():
    """Execute the code block of the page, and return its estimators by name."""
    text = PAGE.read_text()
    section = text[text.index("## Losses with names") :]
    code = re.search(r"```python\n(.*?)```", section, re.S).group(1)
    names = {"compopt": compopt, "PairPolicy": PairPolicy}
    exec(code, names)
    return {name: est for name, est in names.items() if isinstance(est, compopt.ContrastiveEstimator)}


NAMED = of_the_page()


def further(z1, z2):
    """Query-query and document-document similarities side by side, with -inf on the diagonals."""
    itself = torch.eye(BATCH, dtype=torch.bool)
    return torch.cat([cosines(z, z).masked_fill(itself, -torch.inf) for z in (z1, z2)], dim=1)


def gist(z1, z2, extra):
    return policies.false_negatives_masked(
        cosines(z1, z2), cosines(*GUIDE), 0.05, -0.1, torch.stack([further(z1, z2), further(*GUIDE)])
    )


def nv_retriever(z1, z2, extra):
    seen = cosines(*GUIDE), cosines(GUIDE[0], EXTRA_GUIDE)
    return policies.mined_below_share(cosines(z1, z2), cosines(z1, extra), *seen, 0.05, 0.95)


def qwen(z1, z2, extra):
    more = further(z1, z2)
    return policies.false_negatives_masked(cosines(z1, z2), cosines(z1, z2), 0.05, 0.1, torch.stack([more, more]))


def soft_clip(z1, z2, extra):
    s, t = cosines(z1, z2), cosines(*TEACHER) / 0.07
    return sum(policies.soft_targets(x, y.softmax(1), 0.07) for x, y in ((s, t), (s.T, t.T))) / 2


def llave_mined(z1, z2, extra):
    """Weight the in-batch negatives, including those mined for other anchors, but not the anchor's own."""
    s = torch.cat([cosines(z1, z2), cosines(z1, extra)], dim=1)
    plain = torch.eye(BATCH, dtype=torch.bool).repeat(1, 2)
    logits = s / 0.05 + 9.0 * s.detach().masked_fill(plain, 0)
    return torch.nn.functional.cross_entropy(logits, torch.arange(BATCH))


# arguments of the call, and the equation as a function of z1, z2 and further candidates
LOSSES = {
    "clip": ({}, lambda z1, z2, extra: policies.both_ways(cosines(z1, z2), 0.07)),
    "soft_clip": ({"teacher": TEACHER}, soft_clip),
    "gist": ({"guide": GUIDE}, gist),
    "nv_retriever": ({"guide": (*GUIDE, EXTRA_GUIDE), "extra": EXTRA}, nv_retriever),
    "qwen": ({}, qwen),
    "gte": ({}, lambda z1, z2, extra: policies.improved(z1, z2, 0.05)),
    "llave": ({}, lambda z1, z2, extra: policies.hardness_weighted(*policies.split(cosines(z1, z2)), 0.05, 9.0)),
    "llave_mined": ({"extra": EXTRA}, llave_mined),
    "gemma": (
        {"extra": EXTRA},
        lambda z1, z2, extra: policies.own_hard_negatives(cosines(z1, z2), cosines(z1, extra), 0.05, 5.0),
    ),
    "hcl": ({}, lambda z1, z2, extra: policies.hard(*policies.of_views(z1, z2), 0.5, 0.1, 1.0)),
    "debiased": ({}, lambda z1, z2, extra: policies.debiased(*policies.of_views(z1, z2), 0.5, 0.1)),
    "supcon": (
        {"labels": LABELS},
        lambda z1, z2, extra: policies.supervised(torch.cat([z1, z2]), LABELS.repeat(2), 0.1),
    ),
    "supcon_in": (
        {"labels": LABELS},
        lambda z1, z2, extra: policies.supervised_inside(torch.cat([z1, z2]), LABELS.repeat(2), 0.1),
    ),
    "nt_xent": ({}, lambda z1, z2, extra: policies.nt_xent(torch.cat([z1, z2]), torch.arange(BATCH).repeat(2), 0.07)),
    "dclw": ({}, lambda z1, z2, extra: policies.weighted_decoupled(z1, z2, 0.1, 0.5)),
}


def test_every_line_of_the_page_has_an_equation():
    assert set(LOSSES) == set(NAMED)


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_the_line_is_the_equation(name):
    given, equation = LOSSES[name]
    leaves = [z.requires_grad_() for z in (*features(BATCH, DIM, seed=80), EXTRA.clone())]
    leaves = leaves if "extra" in given else leaves[:2]
    est = NAMED[name]
    loss = est(*leaves[:2], **(given | ({"extra": leaves[2]} if "extra" in given else {})))
    loss = loss + torch.as_tensor(est._last.negatives, dtype=torch.float64).log().mean()  # est averages over them
    theirs = equation(*leaves[:2], leaves[-1])
    near(loss, theirs, 1e-9)
    for got, want in zip(torch.autograd.grad(loss, leaves), torch.autograd.grad(theirs, leaves), strict=True):
        near(got, want, 1e-8)


def test_samples_of_a_class_as_views():
    """NTXentLoss with class labels: four samples of each of five classes."""
    z = torch.randn(4, 5, DIM, dtype=torch.float64, requires_grad=True)
    loss = NAMED["nt_xent"](z) + math.log(4 * 4)
    theirs = policies.nt_xent(z.flatten(0, 1), torch.arange(5).repeat(4), 0.07)
    near(loss, theirs), near(torch.autograd.grad(loss, z)[0], torch.autograd.grad(theirs, z)[0], 1e-8)
