"""The end of a run: torch's threads release the tensors of collectives before the interpreter exits."""

import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from compopt.distributed import collectives

ROOT = Path(__file__).parent.parent


def hold(seconds):
    """Start a thread that refers to two tensors of a collective, to the second one longer, as threads of gloo do."""
    held = [collectives._lend(torch.zeros(3)) for _ in range(2)]

    def drop():
        del held[0]
        time.sleep(seconds)
        held.clear()

    thread = threading.Thread(target=drop)
    thread.start()
    return thread


def test_the_end_waits_until_tensors_are_given_back():
    start = time.monotonic()
    thread = hold(0.3)
    collectives._await_lent()
    assert time.monotonic() - start > 0.2
    assert not collectives._still_lent()
    thread.join(10)  # the thread ends after the release
    assert not thread.is_alive()


SCRIPT = """
import os, sys, torch, torch.distributed as dist, compopt
rank, port, folder, offload, shard, end = int(sys.argv[1]), *sys.argv[2:]
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
place = {"offload": offload, "offload_dir": folder} if offload == "disk" else {"offload": offload or None}
est = compopt.SogCLREstimator(200, shard=shard == "1", **place)
for step in range(3):
    index = torch.arange(8) + 8 * rank + 16 * step
    est.prefetch(index)
    z1, z2 = torch.randn(2, 8, 4, requires_grad=True).unbind()
    est(z1, z2, index).backward()
    est.step()
    est.prefetch(index)
assert est.read(torch.arange(48))["count"].tolist() == [1] * 48
if end == "destroyed":
    dist.destroy_process_group()
print("right")
"""


@pytest.mark.launch
@pytest.mark.distributed
@pytest.mark.parametrize(
    "offload, shard, end", [("", "0", "destroyed"), ("", "0", "kept"), ("cpu", "1", "kept"), ("disk", "0", "destroyed")]
)
def test_two_ranks_end_well(offload, shard, end, tmp_path):
    """Test pending prefetched rows that are not used, with and without destruction of the process group."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(rank), port, str(tmp_path / "rows"), offload, shard, end],
            cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    ended = [(*rank.communicate(timeout=120), rank.returncode) for rank in ranks]
    assert [(out.strip(), code) for out, _, code in ended] == [("right", 0)] * 2, ended
