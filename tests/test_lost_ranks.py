"""If one rank is lost, the other ranks raise an error that names the cause within the timeout of the group."""

import pytest

from benchmarks import losses

pytestmark = [pytest.mark.distributed, pytest.mark.launch]
TIMEOUT = 8.0
SAID = {
    "killed": "lost the connection",
    "raises inside a call": "rank 1 refused its arguments",
    "raises between calls": "lost the connection",
    "out of data": "lost the connection",
    "hangs": "which did not arrive",
}


@pytest.mark.parametrize("how", losses.WAYS)
def test_what_the_other_ranks_see(how, tmp_path):
    answers = losses.lose(how, {"offload": "disk", "shard": True}, TIMEOUT, tmp_path)
    assert [answer["error"] for answer in answers] == ["RuntimeError"] * 2, answers
    for answer in answers:
        assert SAID[how] in answer["said"], answer
        # immediately, except for a rank that hangs, which only the timeout detects; 20 s of slack for a busy machine
        assert answer["seconds"] < TIMEOUT + 20, answer
        assert (answer["seconds"] > TIMEOUT - 1) == (how == "hangs"), answer
