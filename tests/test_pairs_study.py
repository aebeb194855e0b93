"""The study of pair policies from the data to its page, on a few made-up texts."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from benchmarks.studies import pairs
from benchmarks.studies.search import SEEDS, Search
from recipes.text import TextPairs
from tests.helpers import carried_out

DEFINITIONS, HELD_OUT = 24, 8


@pytest.fixture()
def study(monkeypatch, tmp_path):
    """Return the study with few samples, one learning rate, one strength per option, and only the arms with words."""
    monkeypatch.setenv("COMPOPT_CACHE", str(tmp_path))
    monkeypatch.setattr(pairs.text, "load", made_up)
    for name, value in {"PAIRS": {"words": 64}, "PASSES": 1, "BATCH": 16, "TEACHER_PASSES": 4}.items():
        monkeypatch.setattr(pairs, name, value)
    arms = {
        name: replace(arm, grids={key: values[:1] for key, values in arm.grids.items()}, widen={})
        for name, arm in pairs.ARMS.items()
        if arm.data == "words"
    }
    monkeypatch.setattr(pairs, "STUDY", Search(arms, tmp_path / "runs.jsonl", pairs.score))
    return pairs.STUDY


def made_up(folder, held_out, each):
    """Four words for each definition; without ``each`` every word has a definition of its own."""
    words = [f"{kind}{at}" for at in range(DEFINITIONS) for kind in "abcd"]
    ends = (f"of {at}" for at in range(len(words)))
    definitions = [f"some {word[1:]} {'' if each else end}" for word, end in zip(words, ends, strict=True)]
    out = [f"held{at}" for at in range(2 * HELD_OUT)]
    at = np.arange(len(words), len(words) + 2 * HELD_OUT)
    return TextPairs(words + out, definitions + out, np.arange(len(words)), at[:HELD_OUT], at[HELD_OUT:])


def test_the_description_says_how_many_runs_there_are():
    runs = sum(len(SEEDS) + sum(map(len, arm.grids.values())) for arm in pairs.ARMS.values())
    assert f"There are {runs} runs" in pairs.__doc__


@pytest.mark.parametrize("situation", pairs.SITUATIONS)
def test_the_data_have_the_false_negatives_of_their_situation(study, situation):
    task, clusters = pairs.load(situation, "words", "validation", None)
    order = pairs.Clustered(clusters, 16, seed=0)
    groups = torch.cat([task.group[order(number)].view(1, -1) for number in range(4)])
    false = (groups[:, :, None] == groups[:, None]).sum() - groups.numel()
    copies = 64 // pairs.COPIED
    assert task.n == 64 and len(task.group.unique()) == {"duplicates": 64 - copies}.get(situation, 16)
    if situation == "repeats":
        assert false == 3 * 64
    elif situation == "duplicates":
        assert copies <= false <= 2 * copies, "a cluster may lie across two batches"
    else:
        assert false < 2 * 64, "batches are random"


@pytest.mark.slow
def test_every_arm_comes_onto_the_page(study):
    results = carried_out(study, pairs.run_one)
    page = pairs.page(results)
    tuned = sum(bool(arm.grids) for arm in study.arms.values())
    assert len(results) == tuned + 3 * len(study.arms)
    assert all(study.best(arm, results)["lr"] == pairs.RATES[0] for arm in study.arms)
    for name in study.arms:
        assert page.count(f"| {name} |") == bool(study.arms[name].grids), "each setting that was tried"
    for name, option in pairs.OPTIONS.items():
        assert page.count(f"\n| {name} |") == len(option.situations), "a row of each situation"
    assert page.count("±") > 3 * len(study.arms) // 2
