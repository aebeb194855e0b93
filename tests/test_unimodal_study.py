"""The study of unimodal training from the first run to its page, on a few random images."""

from dataclasses import replace

import pytest
import torch

from benchmarks.studies import unimodal
from benchmarks.studies.search import Search
from recipes.tasks import ImageViews, Labelled
from tests.helpers import carried_out


@pytest.fixture()
def study(monkeypatch, tmp_path):
    """Return the study with one setting per grid, and few samples."""
    monkeypatch.setattr(unimodal, "load", lambda arm, part, file: task(arm.views))
    monkeypatch.setattr(unimodal, "PASSES", {"icons": 2})
    monkeypatch.setattr(unimodal, "BATCH", 16)
    arms = {
        name: replace(arm, grids={key: values[:1] for key, values in arm.grids.items()}, widen={})
        for name, arm in unimodal.ARMS.items()
        if name.startswith("icons: SimCLR")
    }
    monkeypatch.setattr(unimodal, "STUDY", Search(arms, tmp_path / "runs.jsonl", unimodal.score))
    return unimodal.STUDY


def task(views):
    draw = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (64, 3, 32, 32), dtype=torch.uint8, generator=draw)
    judged = Labelled(images[:16], torch.arange(16) % 2)
    return ImageViews(images, judged, judged, "test", replace(views, augment=("shift",)))


@pytest.mark.slow
def test_every_arm_comes_onto_the_page(study):
    results = carried_out(study, unimodal.run_one)
    page = unimodal.page(results)
    assert len(results) == 2 * 2 + 3 * 3, "two settings of each tuned arm, one after the other, and three seeds"
    for arm, contender in study.arms.items():
        assert page.count(f"| {arm} |") == (1 if contender.after else 3), "a row of results, and each setting tried"
    assert "±" in page and "**lr" in page
