"""The study of visits and EMC2's figure: runs can be stopped and resumed, and the page says what the runs say."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from benchmarks.report import append_run
from benchmarks.studies import emc2
from benchmarks.studies.search import Job, Results
from benchmarks.studies.visits import __main__ as visits
from benchmarks.studies.visits import runs
from benchmarks.studies.visits.data import SIZES, Pairs, load
from benchmarks.studies.visits.runs import ARMS, DCL, INFONCE, METHODS, SOGCLR, START, STUDY, TUNED_AT, VISITS, name
from tests.helpers import generator

N, ARM = 16, name("digits", DCL, *TUNED_AT)


def tiny(data: str = "digits", final: bool = True) -> Pairs:
    sides = torch.randn(2, 2 * N, 6, generator=generator(0))
    return Pairs((sides[0, :N], sides[1, :N]), (sides[0, N:], sides[1, N:]), shared=False)


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(runs, "load", tiny)
    monkeypatch.setattr(STUDY, "path", tmp_path / "visits.jsonl")
    return STUDY.path


def test_a_stopped_study_resumes_and_repeats_no_run(file: Path) -> None:
    visits.main(["final", "--minutes", "0"])
    assert not file.exists()
    command = ["final", "--data", "digits", "--methods", DCL, "--batches", "8", "--visits", "20"]
    visits.main(command)
    lines, results = file.read_text().splitlines(), STUDY.finished()
    assert sum(Job(**run["job"]).final for run in results.values()) == len(STUDY.seeds)
    chosen = STUDY.best(ARM, results)
    assert chosen is not None and chosen.keys() == ARMS[ARM].grids.keys()
    file.write_text("\n".join(lines[:-1]) + "\n" + lines[-1][:40])  # stopped while it was writing
    visits.main(command)
    assert len(file.read_text().splitlines()) == len(lines) + 1
    assert {key: run["metrics"] for key, run in STUDY.finished().items()} == {
        key: run["metrics"] for key, run in results.items()
    }
    assert runs.plan(results)[0] == len(STUDY.seeds) * (len(ARMS) - 1)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_trains(method: str) -> None:
    cell = replace(ARMS[name("digits", method, *TUNED_AT)], batch=4, visits=2)
    before, after = (runs.train(one, cell.first, tiny(), 0) for one in (replace(cell, visits=0), cell))
    moved = [not torch.equal(*pair) for pair in zip(before.parameters(), after.parameters(), strict=True)]
    assert all(moved) and all(weight.isfinite().all() for weight in after.parameters())


def test_pairs_of_the_tuning_are_none_of_the_held_out_ones() -> None:
    def rows(sides: tuple[torch.Tensor, ...]) -> set[bytes]:
        return {row.numpy().tobytes() for row in torch.cat(sides, 1)}

    final, tuning = load("digits", final=True), load("digits", final=False)
    assert (len(rows(final.train)), len(rows(final.held_out))) == SIZES["digits"]
    assert rows(final.held_out).isdisjoint(rows(final.train) | rows(tuning.train) | rows(tuning.held_out))
    assert rows(tuning.held_out).isdisjoint(rows(tuning.train))


def results_of(recall: dict[str, float]) -> Results:
    """Return a complete tuning of some methods on digits, and final runs whose recall rises by 0.01 with the seed."""
    found: Results = {}
    told = {"seconds": 1.0, "steps": 1, "machine": "m", "threads": 1, "python": "3", "torch": "2", "commit": "c"}

    def add(job: Job, metric: str, value: float) -> None:
        found[job.key] = {"job": asdict(job), "metrics": {metric: value}, **told, "date": "2026-01-01"}

    for method, value in recall.items():
        home = name("digits", method, *TUNED_AT)
        while missing := STUDY.next_jobs(home, found):
            for job in missing:
                add(job, "validation/recall", 0.5 if job.options == ARMS[home].first else 0.1)
        chosen = STUDY.best(home, found)
        assert chosen == {key: START[key] for key in chosen}
        for seed in STUDY.seeds:
            add(Job(home, chosen, seed), "test/recall", value + 0.01 * seed)
    return found


def test_the_page_compares_with_the_better_baseline() -> None:
    results = results_of({INFONCE: 0.16, DCL: 0.18, SOGCLR: 0.2})
    page = visits.page(results)
    assert "| InfoNCE | 18.0 ± 0.7 |" in page and "| DCL | 20.0 ± 0.7 |" in page
    assert "| SogCLR | **22.0 ± 0.7 (+2.0 ± 0.0)** |" in page
    assert "In 1 of 1 finished cells" in page and "| SogCLR | +2.0 (+2.0 to +2.0), 1 |" in page
    assert "| digits | SogCLR | 10.0 | 50.0 | 10.0 | 10.0 |" in page  # by gamma
    assert "In 0 of 1 finished cells" in visits.page(results_of({INFONCE: 0.21, DCL: 0.18, SOGCLR: 0.2}))


def test_the_picture_has_a_panel_per_data_set_and_batch(tmp_path: Path) -> None:
    visits.plot(results_of({INFONCE: 0.16, DCL: 0.18, SOGCLR: 0.2}), tmp_path / "visits.png")
    assert (tmp_path / "visits.png").stat().st_size > 10_000


def test_page_and_picture_stand_next_to_compressed_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(STUDY, "path", tmp_path / "visits.jsonl.gz")
    results = results_of({INFONCE: 0.16, DCL: 0.18, SOGCLR: 0.2})
    for run in [*results.values()][-2:]:
        append_run(STUDY.path, run)
    assert [*STUDY.finished().values()] == [*results.values()][-2:]
    monkeypatch.setattr(STUDY, "finished", lambda: results)
    visits.main(["report"])
    visits.main(["plot"])
    assert {path.name for path in tmp_path.iterdir()} == {"visits.jsonl.gz", "visits.md", "visits.png"}


def test_every_finished_run_belongs_to_an_arm_and_has_the_settings_of_a_search() -> None:
    results = STUDY.finished()
    assert set(VISITS) == {arm.visits for arm in ARMS.values()}
    for run in results.values():
        job = Job(**run["job"])
        assert job.arm in ARMS
        if job.seed in STUDY.seeds:
            assert job.options == STUDY.best(ARMS[job.arm].after or job.arm, results), job.arm


@pytest.mark.parametrize("method", emc2.METHODS)
def test_a_method_comes_nearer_to_a_stationary_point(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arm = f"{method}, {emc2.SMALL}, {emc2.STEPS[0]}"
    found = {}
    for steps in (0, 60):
        monkeypatch.setitem(emc2.ARMS, arm, replace(emc2.ARMS[arm], steps=steps))
        found[steps] = emc2.run_one(Job(arm, {}, 0), None)
    assert found[60]["metrics"]["loss"] < found[0]["metrics"]["loss"]
    assert math.isfinite(found[60]["metrics"]["squared_norm"])
    assert found[60]["encoded"] - found[0]["encoded"] >= 2 * emc2.SMALL * 60


def test_further_runs_for_gamma_use_the_pairs_of_the_tuning(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (runs, visits):
        monkeypatch.setattr(module, "WEIGHED_AT", ((4, 20), (8, 5)))
    visits.main(["tune", "--data", "digits", "--methods", SOGCLR])
    tuned = len(STUDY.finished())
    visits.main(["gamma", "--data", "digits"])
    results = STUDY.finished()
    further = [run for run in results.values() if run["job"]["seed"] in runs.WEIGHT_SEEDS]
    grid = runs.WEIGHTS
    assert len(further) == len(results) - tuned == len(runs.WEIGHED_AT) * len(grid) * len(runs.WEIGHT_SEEDS)
    assert {run["job"]["options"]["gamma"] for run in further} == set(grid)
    assert all("validation/recall" in run["metrics"] for run in further)
    assert STUDY.best(name("digits", SOGCLR, *TUNED_AT), results) is not None
    visits.main(["gamma", "--data", "digits"])
    assert len(STUDY.finished()) == len(results)
    table = visits.further_gammas(results)
    assert table.count("\n| digits |") == len(runs.WEIGHED_AT)
    assert table.count("\n| digits, mean |") == 1
