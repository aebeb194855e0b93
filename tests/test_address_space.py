"""Tables larger than memory: a process needs bounded anonymous memory for estimators of 5e9 rows."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import compopt
from tests.database import DIM, WITH_ROWS
from tests.pool import the_pool

ROOT = Path(__file__).parent.parent
N = 5 * 10**9
SHARDED = 2 * 10**8
MIB = 2**20


def limit(more):
    """Limit the further anonymous memory of this process, written or only reserved, to ``more`` bytes."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmData"))
    now = int(line.split()[1]) * 1024
    resource.setrlimit(resource.RLIMIT_DATA, (now + more, resource.getrlimit(resource.RLIMIT_DATA)[1]))


def work(est, n):
    """Run all operations on rows that a training uses, except copies of the whole table."""
    index = torch.tensor([n - 1, 0, 7, n // 2])
    torch.manual_seed(0)  # with these features every anchor keeps a negative under every policy of pairs
    for _ in range(2):
        z1, z2 = torch.randn(2, 4, DIM, requires_grad=True).unbind()
        est.prefetch(index)
        est(z1, z2, index).backward()
        est.step()
    assert est.read(index)["count"].tolist() == [2, 2, 2, 2]
    est.add_sample_group({"n": 1000})
    assert est.n == n + 1000 and est.read(torch.tensor([n - 1, n + 999]))["count"].tolist() == [2, 0]


def every_estimator(folder):
    """Run all estimators in turn, in a separate process."""
    torch.set_num_threads(1)
    warm = torch.randn(2, 64, DIM)
    compopt.SogCLREstimator(100, offload="disk", offload_dir=f"{folder}/warm")(*warm, torch.arange(64))
    limit(512 * MIB)
    for info in WITH_ROWS:
        place = Path(folder, info.name)
        est = info.build("bimodal", N, torch.float32, 0.1, 0.9, offload="disk", offload_dir=place)
        work(est, N)
        files = [path for path in place.iterdir() if path.stat().st_size > N]  # one for each object with rows
        assert files and all(file.stat().st_blocks * 512 < 16 * MIB for file in files)  # sparse: only written pages
        del est
        for file in files:
            file.unlink()
    print("all of them")


def sparse(folder):
    """Return whether the file system supports files of this size."""
    try:
        with open(folder / "large", "wb") as file:
            os.truncate(file.fileno(), 64 * N)
    except OSError:
        return False
    finally:
        (folder / "large").unlink(missing_ok=True)
    return True


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA counts anonymous memory on Linux")
def test_five_billion_rows_on_disk_take_no_memory(tmp_path):
    if not sparse(tmp_path):
        pytest.skip("the file system has no sparse files of 300 GB")
    code = f"from tests.test_address_space import every_estimator; every_estimator({str(tmp_path)!r})"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=400)
    assert done.stdout.strip() == "all of them", done.stderr[-3000:]


def a_shard(group):
    """Construct, call and commit on one rank, which may allocate little more than its shard."""
    before = resource.getrlimit(resource.RLIMIT_DATA)
    limit(SHARDED // 2 * 16 + 256 * MIB)
    try:
        est = compopt.SogCLREstimator(SHARDED, shard=True, process_group=group)
        z1, z2 = torch.randn(2, 4, DIM, requires_grad=True).unbind()
        est(z1, z2, torch.arange(4) + 10 * torch.distributed.get_rank(group)).backward()
        est.step()
        return est.read(torch.arange(2))["count"].tolist()
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


@pytest.mark.distributed
@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA counts anonymous memory on Linux")
def test_a_rank_takes_its_shard_alone():
    assert the_pool(2, timeout=120).run(a_shard, 2) == [[1, 1], [1, 1]]


def test_what_cannot_be_had_is_said():
    with pytest.raises(MemoryError, match=r"n=4000000000000000 rows of 16 bytes need 64,000,.*offload=.disk.*shard"):
        compopt.SogCLREstimator(4 * 10**15)
