"""recipes/clip_trainer.py on several nodes: agents of torchrun with separate disks, and lost nodes."""

import functools
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

pytest.importorskip("open_clip")

from recipes import clip_trainer as recipe
from tests.launching import environment
from tests.open_clip.nodes import LONG, WAIT, Nodes, disks_of
from tests.open_clip.test_clip_trainer import arguments, given, rows, same, weights  # noqa: F401
from tests.pool import free_port

pytestmark = [pytest.mark.launch, pytest.mark.timeout(1800)]
EPOCHS = 6
WHOLE = ("--epochs", str(EPOCHS), *LONG)


@pytest.fixture(scope="module")
def flags(given):  # noqa: F811
    return functools.partial(arguments, given)


@pytest.fixture(scope="module")
def undisturbed(flags, tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    with Nodes(flags, [folder / "out"] * 2, disks_of(folder, 2), *WHOLE) as nodes:
        assert nodes.end() == [0, 0], nodes.said()
    return weights(folder / "out", EPOCHS), rows(folder / "out", EPOCHS)


def test_two_nodes(given, flags, tmp_path):  # noqa: F811
    """Each node removes stale rows from its own disk; an output folder that the nodes do not share raises an error."""
    disks, output = disks_of(tmp_path, 2), tmp_path / "out"
    more = ("--offload", "disk", "--offload-dir")
    stale = [recipe.rows_folder(recipe.parse(arguments(given, output, *more, str(disk)))) / "left" for disk in disks]
    for file in stale:
        file.parent.mkdir(parents=True)
        file.touch()
    with Nodes(flags, [output] * 2, disks, "--epochs", "1") as nodes:
        assert nodes.end() == [0, 0], nodes.said()
    assert not any(file.exists() for file in stale)
    assert set(rows(output, 1)["count"].tolist()) == {1}
    (tmp_path / "unshared").mkdir()
    with Nodes(flags, [output, tmp_path / "unshared"], disks, "--resume") as nodes:
        assert 0 not in nodes.end()
        assert all("does not see what process 0 on" in log.read_text() for log in nodes.logs)


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
    """Run the script itself, with stand-ins for the commands of a cluster."""
    for name, body in STAND_INS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    output, calls = tmp_path / "out", tmp_path / "calls"
    path = os.pathsep.join((str(tmp_path), os.path.dirname(sys.executable), os.environ["PATH"]))
    slurm = {"SLURM_JOB_ID": str(free_port()), "SLURM_JOB_NODELIST": "node", "CALLS": str(calls), "PATH": path}
    more = ("--batch-size", "2", *WHOLE, "--offload", "disk", "--offload-dir", str(tmp_path / "disk"))
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
    assert len(calls.read_text().splitlines()) == 1  # a finished job is not requeued
    same(weights(output, EPOCHS), undisturbed[0])
    same(rows(output, EPOCHS), undisturbed[1])
