"""Two processes under DDP equal one process with their combined batches."""

import json
import os
import socket
import subprocess
import sys

import open_clip
import pytest
import torch

import compopt
from tests.open_clip import tiny

pytestmark = pytest.mark.distributed
REBUILT = hasattr(open_clip, "create_task")

# Each update sees the whole data set, whose order then does not matter.
SHAPE = {"epochs": 3, "grad_clip_norm": 0.1}
METHODS = {"sogclr": ("--estimator sogclr --gamma 0.5", 1), "clip": ("--estimator clip", 2)}


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def two(folder, runs):
    """Start two processes; return the results of each for each run."""
    common = {**os.environ, "MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    runs = json.dumps({name: (*run, free_port()) for name, run in runs.items()})
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.open_clip.rank", str(folder / f"{rank}.out"), runs],
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    errors = [process.communicate(timeout=300)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], "\n".join(error[-3000:] for error in errors)
    return [torch.load(folder / f"{rank}.out", weights_only=False) for rank in range(2)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def ranks(folder):
    """Carry out all runs in the same two processes: importing open_clip takes longer than training."""
    data, pattern = tiny.write_csv(folder), tiny.write_tars(folder)
    compopt.data.ShardIndex.build(pattern, progress=False).save(folder / "shards.json")
    runs = {}
    for name, (ours, batches) in METHODS.items():
        shape = {**SHAPE, "batch_size": 8 // batches, "accum_freq": batches, "dist_backend": "gloo"}
        runs[name] = ours.split(), tiny.arguments(folder, name, train_data=data, **shape)
    if REBUILT:
        ours = METHODS["sogclr"][0].split()
        shape = {"train_data": data, "grad_clip_norm": 0.1, "save_frequency": 1, "fsdp": True, "dist_backend": "gloo"}
        runs["fsdp-first"] = ours, tiny.arguments(folder, "fsdp", epochs=2, **shape)
        shape["fsdp_checkpoint"] = "sharded"
        runs["fsdp"] = ours, tiny.arguments(folder, "fsdp", epochs=3, resume="latest", **shape)
    ours = ["--estimator", "sogclr", "--shard", "--index", str(folder / "shards.json")]
    shape = {"train_data": pattern, "train_num_samples": 16, "batch_size": 4, "workers": 2, "save_frequency": 1}
    runs["first"] = ours, tiny.arguments(folder, "shards", epochs=1, **shape)
    runs["resumed"] = ours, tiny.arguments(folder, "shards", epochs=2, resume="latest", **shape)
    return two(folder, runs)


@pytest.mark.parametrize("name", METHODS)
def test_two_processes_are_one(tmp_path, folder, ranks, name):
    theirs = tiny.arguments(tmp_path, train_data=folder / "data.csv", batch_size=16, **SHAPE)
    whole = tiny.train(METHODS[name][0].split(), theirs)
    for rank in (both[name] for both in ranks):
        assert rank["t"] == whole.est.t
        for one, other in zip(rank["gradients"], whole.gradients, strict=True):
            tiny.assert_alike(one, other, 1e-4)
        tiny.assert_alike(rank["weights"], whole.weights, 1e-3)
        if whole.est.n is not None:
            tiny.assert_alike(rank["rows"], whole.rows(), 1e-3)
    tiny.assert_alike(ranks[0][name]["weights"], ranks[1][name]["weights"], 0)


@pytest.mark.skipif(not REBUILT, reason="this open_clip has no FSDP")
def test_fsdp(tmp_path, folder, ranks):
    """Compare a resumed run under FSDP, whose last checkpoint is a folder."""
    theirs = tiny.arguments(tmp_path, train_data=folder / "data.csv", batch_size=16, **SHAPE)
    whole = tiny.train(METHODS["sogclr"][0].split(), theirs)
    for rank in (both["fsdp"] for both in ranks):
        assert rank["t"] == 3
        tiny.assert_alike(rank["gradients"][0], whole.gradients[2], 1e-4)
        tiny.assert_alike(rank["weights"], whole.weights, 1e-3)
        tiny.assert_alike(rank["rows"], whole.rows(), 1e-3)
    expected = ["epoch_1.compopt", "epoch_1.pt", "epoch_2.compopt", "epoch_2.pt", "epoch_3", "epoch_3.compopt"]
    assert tiny.files(folder, "fsdp") == expected


def test_two_processes_read_shards_save_and_resume(folder, ranks):
    """Each rank has its own shards and half of the rows, which are saved together and restored."""
    resumed = [both["resumed"] for both in ranks]
    shown = [torch.cat([shown for shown, _ in rank["seen"]]).tolist() for rank in resumed]
    assert [torch.cat([index for _, index in rank["seen"]]).tolist() for rank in resumed] == shown
    assert sorted(shown[0] + shown[1]) == list(range(16))
    assert [both["first"]["rows"]["count"].tolist() for both in ranks] == [[1] * 16] * 2
    assert [rank["rows"]["count"].tolist() for rank in resumed] == [[2] * 16] * 2
    assert tiny.files(folder, "shards") == ["epoch_1.compopt", "epoch_1.pt", "epoch_2.compopt", "epoch_2.pt"]
