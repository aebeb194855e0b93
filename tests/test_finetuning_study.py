"""The study of fine-tuning from the data to its page, on a few made-up texts."""

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.studies import finetuning
from benchmarks.studies.default.training import Setting
from benchmarks.studies.finetuning import CACHED, SEEDS
from benchmarks.studies.search import Search
from recipes.text import TextPairs
from tests.helpers import carried_out

SMALL = {"SAMPLES": 64, "LARGE": 16, "SKIP": 2, "NEAREST": 3, "LOOKED_AT": 12, "ROUNDS": 1, "SEEDS": SEEDS[:2]}


@pytest.fixture()
def study(monkeypatch, tmp_path):
    """Return the study with few samples of words, one learning rate and one temperature."""
    monkeypatch.setenv("COMPOPT_CACHE", str(tmp_path))
    monkeypatch.setattr("benchmarks.studies.default.tasks.text.load", made_up)
    for name, value in (SMALL | {"START": Setting(batch=16, lr=1e-2, samples=64), "DATA": ("words",)}).items():
        monkeypatch.setattr(finetuning, name, value)
    arms = {
        name: replace(arm, batch=min(arm.batch, 16), grids={key: values[:1] for key, values in arm.grids.items()})
        for name, arm in finetuning.ARMS.items()
        if arm.data == "words"
    }
    arms = {name: replace(arm, widen={}) for name, arm in arms.items()}
    monkeypatch.setattr(finetuning, "ARMS", arms)
    monkeypatch.setattr(finetuning, "STUDY", Search(arms, tmp_path / "runs.jsonl", finetuning.score, SEEDS[:2]))
    return finetuning.STUDY


def made_up(folder, held_out, limit):
    words = [f"word{at}" for at in range(80)]
    return TextPairs(words, [f"of {word}" for word in words], np.arange(64), np.arange(64, 72), np.arange(72, 80))


@pytest.mark.slow
def test_every_arm_comes_onto_the_page(study):
    results = carried_out(study, finetuning.run_one)
    page = finetuning.page(results)
    assert len(results) == sum(len(arm.grids) + len(study.seeds) for arm in study.arms.values())
    assert page.count("p = ") == 4 * len(finetuning.CASES)
    for name, arm in study.arms.items():
        assert page.count(f"| {name} |") == len(arm.grids), "each setting that was tried"
        runs = [run for run in results.values() if run["job"]["arm"] == name]
        assert all(run.get("share", 1.0) == 1.0 for run in runs) or arm.loss == CACHED
