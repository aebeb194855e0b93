"""The other ranks name a rank that is lost, within the timeout of the group; the page has the same messages."""

import re

import pytest

from benchmarks import losses
from benchmarks.report import ROOT, stored

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
        commit = 5 if how == losses.SKIPS else 3
        waited = WAITED.format(commit=commit)
        # the barrier of rank 1 has the same timeout: it may expire first, and then the process of rank 1 has ended
        ended = how in (losses.LEAVES, losses.SKIPS) and said.startswith(
            f"rank {rank} lost the connection to rank 1 in the estimator's call (commit {commit})"
        )
        assert ended or (said.startswith(f"rank {rank} waited") and f"{waited}, which did not arrive" in said), answer
        assert [kind for kind, *_ in warned] == ["UserWarning"] * 2, answer  # after 3 and 6 s
        for after, (_, text, _) in zip((3, 6), warned, strict=True):
            assert text.startswith(f"rank {rank} has waited {after} {waited}: is it busy"), answer


def test_the_page_says_what_was_measured():
    """The messages that the page quotes are those of the stored runs."""
    page = (ROOT / "docs" / "guides" / "checkpoints.md").read_text()
    section = " ".join(page.split("### A rank that is lost")[1].split("\n### ")[0].split())
    said = " ".join(text for result in stored("losses")["results"] for _, text, _ in result["answers"][0])
    quoted = re.findall(r'"(rank [^"]+)"', section)
    assert len(quoted) == 2 and all(message in said for message in quoted)
