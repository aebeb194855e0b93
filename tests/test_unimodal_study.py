"""The study of unimodal training from the first run to its page, on a few random images."""

import json
from dataclasses import replace

import pytest
import torch

from benchmarks.studies import unimodal
from benchmarks.studies.search import Search
from recipes.tasks import ImageViews, Labelled, Views


@pytest.fixture()
def study(monkeypatch, tmp_path):
    """One setting per grid, and few samples."""
    monkeypatch.setattr(unimodal, "load", lambda name, part, file: task())
    monkeypatch.setattr(unimodal, "SAMPLES", {"glyphs": 128, "icons": 128})
    monkeypatch.setattr(unimodal, "BATCH", 16)
    arms = {
        name: replace(arm, grids={key: values[:1] for key, values in arm.grids.items()}, widen={})
        for name, arm in unimodal.ARMS.items()
        if name in ("icons: SimCLR", "icons: SimCLR, spectral batches")
    }
    monkeypatch.setattr(unimodal, "STUDY", Search(arms, tmp_path / "runs.jsonl", unimodal.score))
    return unimodal.STUDY


def task():
    draw = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (64, 3, 32, 32), dtype=torch.uint8, generator=draw)
    judged = Labelled(images[:16], torch.arange(16) % 2)
    return ImageViews(images, judged, judged, "test", Views(augment=("shift",)))


@pytest.mark.slow
def test_every_arm_comes_onto_the_page(study):
    results = {}
    for arm in study.arms:
        while jobs := study.next_jobs(arm, results, final=True):
            for job in jobs:
                told = {"machine": "m", "threads": 1, "python": "3", "torch": "2", "commit": "c", "date": "d"}
                run = {"job": json.loads(job.key), **unimodal.run_one(job, None), **told}
                results[job.key] = run
    page = unimodal.page(results)
    assert len(results) == 2 * (2 + 3), "two settings of each arm, one after the other, and three seeds"
    for arm in study.arms:
        assert page.count(f"| {arm} |") == 3, "a row of results, and each setting that was tried"
    assert "±" in page and "**lr" in page
