"""recipes/clip_trainer.py on several nodes: agents of torchrun with disks of their own, which are lost."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time

import psutil
import pytest

pytest.importorskip("open_clip")

from recipes import clip_trainer as recipe
from tests.launching import environment
from tests.open_clip.test_clip_trainer import arguments, given, rows, same, weights  # noqa: F401
from tests.pool import free_port

pytestmark = pytest.mark.launch
WAIT = 120.0
EPOCHS = 4
LONG = ("--epochs", str(EPOCHS), "--save-every", "3", "--shard", "--workers", "1")


class Nodes:
    """An agent of torchrun for each of several nodes, which share an output folder and have a disk each."""

    def __init__(self, given, outputs, disks, *more, before=""):  # noqa: F811
        self.outputs, self.agents, self.logs = outputs, [], []
        port = str(free_port())
        for node, (output, disk) in enumerate(zip(outputs, disks, strict=True)):
            command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(len(disks))]
            command += ["--node_rank", str(node), "--nproc_per_node", "1"]
            command += ["--master_addr", "127.0.0.1", "--master_port", port, "-m", "recipes.clip_trainer"]
            command += arguments(given, output, "--batch-size", "2", *more)
            command += ["--offload", "disk", "--offload-dir", str(disk)]
            self.logs.append(disk.with_suffix(".log"))
            with open(self.logs[-1], "w") as log:
                pipes = {"stdout": log, "stderr": subprocess.STDOUT, "start_new_session": True}
                shell = ["bash", "-c", f'{before} exec "$@"', "bash"]
                self.agents.append(subprocess.Popen([*shell, *command], env=environment(), **pipes))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for node in range(len(self.agents)):
            self.kill(node)

    def kill(self, node):
        """Lose a node: everything that runs there, at once."""
        with contextlib.suppress(psutil.NoSuchProcess):
            agent = psutil.Process(self.agents[node].pid)
            for process in (agent, *agent.children(recursive=True)):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        self.agents[node].wait()

    def await_state(self, after=None):
        """Wait for a state that is newer than another one; return its name."""
        pointer, deadline = self.outputs[0] / "state" / "latest", time.monotonic() + WAIT
        while not pointer.exists() or pointer.read_text() == after:
            assert time.monotonic() < deadline and self.agents[0].poll() is None, self.said()
            time.sleep(0.01)
        return pointer.read_text()

    def end(self):
        """Wait for all; return their exit codes."""
        return [agent.wait(WAIT) for agent in self.agents]

    def said(self):
        return "\n".join(log.read_text() for log in self.logs)


def disks_of(folder, count):
    folder.mkdir(exist_ok=True)
    return [folder / f"disk{node}" for node in range(count)]


@pytest.fixture(scope="module")
def undisturbed(given, tmp_path_factory):  # noqa: F811
    folder = tmp_path_factory.mktemp("undisturbed")
    with Nodes(given, [folder / "out"] * 2, disks_of(folder, 2), *LONG) as nodes:
        assert nodes.end() == [0, 0], nodes.said()
    return weights(folder / "out", EPOCHS), rows(folder / "out", EPOCHS)


def test_two_nodes(given, tmp_path):  # noqa: F811
    """Each removes the stale rows of its own disk; a folder that they do not share is refused."""
    disks, output = disks_of(tmp_path, 2), tmp_path / "out"
    more = ("--offload", "disk", "--offload-dir")
    stale = [recipe.rows_folder(recipe.parse(arguments(given, output, *more, str(disk)))) / "left" for disk in disks]
    for file in stale:
        file.parent.mkdir(parents=True)
        file.touch()
    with Nodes(given, [output] * 2, disks, "--epochs", "1") as nodes:
        assert nodes.end() == [0, 0], nodes.said()
    assert not any(file.exists() for file in stale)
    assert set(rows(output, 1)["count"].tolist()) == {1}
    (tmp_path / "unshared").mkdir()
    with Nodes(given, [output, tmp_path / "unshared"], disks, "--resume") as nodes:
        assert 0 not in nodes.end()
        assert all("does not see what process 0 on" in log.read_text() for log in nodes.logs)


def test_a_node_is_lost_and_two_or_one_or_three_go_on(given, tmp_path, undisturbed):  # noqa: F811
    output = tmp_path / "out"
    with Nodes(given, [output] * 2, disks_of(tmp_path, 2), *LONG) as nodes:
        nodes.await_state()
        nodes.kill(1)
        assert nodes.end()[0] not in (0, None)
    for count in (2, 1, 3):
        copy = tmp_path / f"on{count}"
        shutil.copytree(output, copy)  # its rows go to new disks: a node may be another machine
        with Nodes(given, [copy] * count, disks_of(tmp_path / f"disks{count}", count), *LONG, "--resume") as nodes:
            assert nodes.end() == [0] * count, nodes.said()
        assert "begins anew" not in nodes.said()
        if count == 2:
            same(weights(copy, EPOCHS), undisturbed[0])
            same(rows(copy, EPOCHS), undisturbed[1])
        else:  # 40 samples in batches of 6 leave 4 of an epoch out
            counts = rows(copy, EPOCHS)["count"]
            assert EPOCHS * 40 - 6 * EPOCHS < int(counts.sum()) <= EPOCHS * 40 and counts.max() == EPOCHS


def test_a_day(given, tmp_path, undisturbed):  # noqa: F811
    """A node is told to stop, one is lost, the disk is full, uploads fail; the bits are those of a quiet day."""
    output, disks = tmp_path / "out", disks_of(tmp_path, 2)
    (tmp_path / "file").touch()
    nowhere, store = f"file://{tmp_path}/file/run", f"file://{tmp_path}/store"
    start = (given, [output] * 2, disks, *LONG, "--resume", "--upload")

    with Nodes(*start, nowhere) as nodes:  # one node's torchrun is told to stop, as by a scheduler
        state = nodes.await_state()
        os.kill(nodes.agents[0].pid, signal.SIGTERM)
        assert 0 not in nodes.end()
        newer = (output / "state" / "latest").read_text()
        assert newer > state and f"exitcode  : {recipe.STOPPED}" in nodes.logs[1].read_text(), nodes.said()

    with Nodes(*start, nowhere) as nodes:
        state = nodes.await_state(newer)
        nodes.kill(1)
        assert nodes.end()[0] != 0
        assert "is not in the store" in nodes.said() and "training goes on" in nodes.said()

    with Nodes(*start, store, before="ulimit -f 500;") as nodes:  # no file above 500 KiB
        assert 0 not in nodes.end()
        assert "could not be written" in nodes.said() and "is complete: --resume goes on from it" in nodes.said()

    with Nodes(*start, store) as nodes:
        assert nodes.end() == [0, 0], nodes.said()
    same(weights(output, EPOCHS), undisturbed[0])
    same(rows(output, EPOCHS), undisturbed[1])
    same(weights(tmp_path / "store", EPOCHS), undisturbed[0])
    same(rows(tmp_path / "store", EPOCHS), undisturbed[1])


STAND_INS = {
    "scontrol": 'if [ "$1" = show ]; then echo 127.0.0.1; else echo "$@" >> "$CALLS"; fi',
    "srun": """
        while [[ "$1" == --* ]]; do shift; done
        for task in 0 1; do SLURM_PROCID=$task SLURM_LOCALID=0 SLURM_NTASKS=2 "$@" & tasks+=($!); done
        trap 'kill -USR1 "${tasks[@]}"' USR1  # --signal=USR1@600
        worst=0
        for task in "${tasks[@]}"; do
            while wait "$task"; status=$?; kill -0 "$task" 2> /dev/null; do :; done
            [ $status -le $worst ] || worst=$status
        done
        exit $worst""",
}


def test_slurm_requeues_a_job_whose_time_is_over(given, tmp_path, undisturbed):  # noqa: F811
    """The script itself, with stand-ins for what only a cluster has."""
    for name, body in STAND_INS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    output, calls = tmp_path / "out", tmp_path / "calls"
    path = os.pathsep.join((str(tmp_path), os.path.dirname(sys.executable), os.environ["PATH"]))
    slurm = {"SLURM_JOB_ID": str(free_port()), "SLURM_JOB_NODELIST": "node", "CALLS": str(calls), "PATH": path}
    more = ("--batch-size", "2", *LONG, "--offload", "disk", "--offload-dir", str(tmp_path / "disk"))
    command = ["bash", "recipes/slurm/clip.sbatch", *arguments(given, output, *more)]

    def job():
        return subprocess.Popen(command, env=environment(**slurm), stdout=subprocess.PIPE, stderr=subprocess.STDOUT)

    with job() as first:
        deadline = time.monotonic() + WAIT
        while not (output / "state" / "latest").exists():
            assert time.monotonic() < deadline and first.poll() is None, first.stdout.read()
            time.sleep(0.01)
        (srun,) = psutil.Process(first.pid).children()
        srun.send_signal(signal.SIGUSR1)
        assert first.wait(WAIT) == recipe.STOPPED, first.stdout.read()
    assert calls.read_text() == f"requeue {slurm['SLURM_JOB_ID']}\n"
    with job() as second:
        assert second.wait(WAIT) == 0, second.stdout.read()
    assert len(calls.read_text().splitlines()) == 1  # the end is no reason to requeue
    same(weights(output, EPOCHS), undisturbed[0])
    same(rows(output, EPOCHS), undisturbed[1])
