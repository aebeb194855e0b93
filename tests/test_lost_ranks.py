"""The other ranks name a rank that is lost, within the timeout of the group; the page has the same messages."""

import pytest

from benchmarks import losses
from benchmarks.report import ROOT, stored, table

pytestmark = [pytest.mark.distributed, pytest.mark.launch]
TIMEOUT, PATIENCE = 8.0, 3.0
SAID = {
    "killed": "lost the connection to rank 1 in",
    "raises inside a call": "rank 1 refused its arguments",
    "raises between calls": "lost the connection to rank 1 in",
    "out of data": "lost the connection to rank 1 in",
}
WAITED = "s in the estimator's call (commit {commit}) for rank 1"


@pytest.mark.parametrize("how", losses.WAYS)
def test_what_the_other_ranks_see(how, tmp_path):
    answers = losses.lose(how, {"offload": "disk", "shard": True}, TIMEOUT, PATIENCE, tmp_path)
    for rank, answer in zip((0, 2), answers, strict=True):
        *warned, (kind, said, seconds) = answer
        assert kind == "RuntimeError", answer
        # immediately, except for a rank that does not end, which only the timeout detects; slack for a busy machine
        assert seconds < TIMEOUT + 20, answer
        if how in SAID:
            assert SAID[how] in said and seconds < TIMEOUT - 1 and not warned, answer
            continue
        waited = WAITED.format(commit=5 if how == losses.SKIPS else 3)
        assert said.startswith(f"rank {rank} waited") and f"{waited}, which did not arrive" in said, answer
        assert [kind for kind, *_ in warned] == ["UserWarning"] * 2, answer  # after 3 and 6 s
        for after, (_, text, _) in zip((3, 6), warned, strict=True):
            assert text.startswith(f"rank {rank} has waited {after} {waited}: is it busy"), answer


def test_the_page_says_what_was_measured():
    lines = table(losses.HEAD, losses.rows(stored("losses")["results"]), "llrl").splitlines()
    page = (ROOT / "docs" / "guides" / "failures.md").read_text().splitlines()
    assert len(lines) > 2 + 2 * len(losses.WAYS) and set(lines) <= set(page)
