"""torchrun --max-restarts: after a rank is killed, the run resumes from its last checkpoint, on any number of ranks."""

import pytest

from benchmarks.schedule import WAIT, Elastic
from recipes import glyphs

pytestmark = [pytest.mark.distributed, pytest.mark.launch, pytest.mark.slow]


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    folder = tmp_path_factory.mktemp("glyphs")
    glyphs.load(folder)
    return folder


@pytest.fixture(scope="module")
def undisturbed(cache, tmp_path_factory):
    with Elastic(cache, tmp_path_factory.mktemp("undisturbed") / "run", 2) as run:
        return run.result()


def test_a_killed_rank_restarts_the_run_from_its_last_checkpoint(cache, undisturbed, tmp_path):
    """Kill a rank twice, at different times and without --resume: torchrun's environment announces the restart."""
    with Elastic(cache, tmp_path / "run", 2) as run:
        saved = 0
        for which in (1, 0):
            saved = run.await_saves(saved)
            run.kill_a_rank(which)
        assert run.result() == undisturbed  # bit for bit
    assert "exitcode" in run.log.read_text() or "SIGKILL" in run.log.read_text()


def test_other_numbers_of_ranks(cache, undisturbed, tmp_path):
    """Runs on 4 and 3 ranks each lose a rank without a restart; the next run, finally one on 4 ranks, resumes."""
    saved = 0
    for ranks in (4, 3):
        with Elastic(cache, tmp_path / "run", ranks, "--resume", restarts=0) as run:
            saved = run.await_saves(saved)
            run.kill_a_rank(ranks - 1)
            assert run.process.wait(WAIT) != 0
    with Elastic(cache, tmp_path / "run", 4, "--resume") as run:
        final, _ = run.result()
    expected, _ = undisturbed
    assert final["loss"] == pytest.approx(expected["loss"], abs=1e-3)
