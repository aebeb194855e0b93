"""The study of fine-tuning from the data to its page, on a few made-up texts."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from benchmarks.studies import finetuning
from benchmarks.studies.default.training import Setting
from benchmarks.studies.finetuning import CACHED, SEEDS, Half, mined
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


def whole_and_half():
    whole = finetuning.load("words", "validation", None)
    return whole, Half(whole, second=True)


def test_the_halves_have_no_caption_in_common_and_are_evaluated_on_the_same_samples(study):
    whole = finetuning.load("words", "validation", None)
    whole.group = torch.arange(whole.n) // 4  # four samples of each caption
    first, second = Half(whole, second=False), Half(whole, second=True)
    assert first.n == second.n == whole.n // 2
    assert not torch.isin(first.group, second.group).any()
    assert torch.cat([first.chosen, second.chosen]).sort().values.equal(torch.arange(whole.n))
    index = torch.tensor([3, 1])
    for half, ours in zip(second.inputs(index, None), (whole.queries, whole.answers), strict=True):
        assert torch.equal(half, ours[second.chosen[index]])


def test_mined_negatives_are_near_and_have_another_caption(study):
    whole, second = whole_and_half()
    second.group = torch.arange(second.n) // 2
    model = finetuning.begun("words", whole)
    found = mined("words", second, model)
    one, two = (torch.nn.functional.normalize(side.detach()) for side in second.training_features(model))
    similar = (one @ two.T).fill_diagonal_(-torch.inf)
    rank = similar.argsort(1, descending=True).argsort(1).gather(1, found)
    assert (second.group[found] != second.group[:, None]).all()
    assert rank.min() >= SMALL["SKIP"] and rank.max() < SMALL["SKIP"] + SMALL["NEAREST"] + 1, "at most one is excluded"


def test_adapters_are_the_only_weights_that_learn_and_change_nothing_at_first(study):
    whole, second = whole_and_half()
    model = finetuning.begun("words", whole)
    inputs = second.inputs(torch.arange(8), None)
    before = [side.detach() for side in model(*inputs)]
    adapted = finetuning.with_adapters(model)
    assert all(torch.equal(*pair) for pair in zip(before, adapted(*inputs), strict=True))
    learned = [name for name, weight in adapted.named_parameters() if weight.requires_grad]
    assert learned and all("lora_" in name for name in learned)


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
