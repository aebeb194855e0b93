"""The search of the studies: one option after another, on grids that are extended while the best value is at an end."""

import pytest

from benchmarks.studies.search import SEEDS, Arm, Search


def searched(tmp_path, arm, score):
    """Carry out a search without training; return the choice, every setting that was tried, and the final jobs."""
    study = Search({"a": arm}, tmp_path / "runs.jsonl", lambda run: run["score"])
    results, tried = {}, []
    while jobs := study.next_jobs("a", results):
        for job in jobs:
            tried.append(job.options)
            results[job.key] = {"job": {"arm": "a"}, "score": score(**job.options)}
    return study.best("a", results), tried, study.next_jobs("a", results, final=True)


@pytest.mark.parametrize("best", [1e-4, 2e-3, 6.4e-2])
def test_a_grid_grows_past_the_best_value(tmp_path, best):
    arm = Arm(first={"tau": 0.1}, grids={"lr": (1e-3, 2e-3, 4e-3), "tau": (0.05, 0.1)}, widen={"lr": 2.0, "tau": 2.0})
    chosen, tried, final = searched(tmp_path, arm, lambda lr, tau: -abs(lr - best) - abs(tau - 0.1))
    rates = {options["lr"] for options in tried}
    assert min(rates) < chosen["lr"] < max(rates) and best / 1.5 < chosen["lr"] < 1.5 * best
    assert chosen["tau"] == 0.1 and {options["tau"] for options in tried} == {0.05, 0.1, 0.2}
    assert [job.seed for job in final] == list(SEEDS)


def test_without_a_factor_a_grid_stays(tmp_path):
    chosen, tried, _ = searched(tmp_path, Arm(first={}, grids={"lr": (1.0, 2.0)}), lambda lr: lr)
    assert chosen == {"lr": 2.0} and tried == [{"lr": 1.0}, {"lr": 2.0}]


def test_an_arm_begins_with_what_was_chosen_for_another(tmp_path):
    arms = {"base": Arm(grids={"lr": (1.0, 2.0)}), "own": Arm(after="base", grids={"strength": (3.0, 4.0)})}
    study, results = Search(arms, tmp_path / "runs.jsonl", lambda run: run["score"]), {}
    first = study.next_jobs("own", results)
    assert [(job.arm, job.options) for job in first] == [("base", {"lr": 1.0}), ("base", {"lr": 2.0})]
    results |= {job.key: {"score": job.options["lr"]} for job in first}
    second = study.next_jobs("own", results)
    assert [(job.arm, job.options["lr"]) for job in second] == [("own", 2.0)] * 2
    results |= {job.key: {"score": -job.options["strength"]} for job in second}
    assert study.best("own", results) == {"lr": 2.0, "strength": 3.0}


def test_the_score_of_an_arm_is_that_of_its_chosen_settings(tmp_path):
    arm = Arm(first={"tau": 0.1}, grids={"lr": (1.0, 2.0), "tau": (0.05, 0.1)})
    study, results = Search({"a": arm}, tmp_path / "runs.jsonl", lambda run: run["score"]), {}
    while jobs := study.next_jobs("a", results):
        results |= {job.key: {"score": job.options["lr"] - job.options["tau"]} for job in jobs}
    assert study.validation("a", results) == 2.0 - 0.05
