"""The recipes on two ranks, with each launcher: results equal those of one process, and checkpoints can be resumed."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from accelerate.utils import DistributedType
from PIL import Image

from benchmarks import launchers
from benchmarks.report import stored
from recipes import checkpoints, glyphs, launch
from recipes.models import BatchNorm
from tests.launching import environment
from tests.pool import the_pool

pytestmark = pytest.mark.distributed
ROOT = Path(__file__).parent.parent
STEPS = 3
TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m")
ACCELERATE = (
    *("accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1"),
    *("--main_process_port", "0", "--mixed_precision", "no", "--dynamo_backend", "no", "-m"),
)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    folder = tmp_path_factory.mktemp("glyphs")
    glyphs.load(folder)
    return folder


def recipe(cache, output, *options, launcher=("recipes.train_clip",), steps=STEPS):
    """Carry out a short run of ``train_clip`` and return its record in metrics.json."""
    return carry_out(launcher, short(cache, output, *options, steps=steps))[0]


def short(cache, output, *options, steps=STEPS):
    """Return arguments for 6 updates of two batches of 16; the one-cycle schedule's first step sizes are small."""
    size = f"--limit 192 --batch-size 16 --accumulate 2 --epochs 1 --max-steps {steps}"
    return common(cache, output, *size.split(), *options)


def common(cache, output, *options):
    quiet = ["--eval-every", "1", "--threads", "1", "--no-plots", "--no-progress"]
    method = [] if "--compare" in options else ["--estimator", "sogclr"]
    return [*method, *options, *quiet, "--cache-dir", str(cache), "--output", str(output)]


def carry_out(launcher, *runs):
    """Carry out runs in the same processes; return their records in metrics.json, of each folder the last one."""
    command = launcher if len(runs) == 1 else (*launcher[:-1], "tests.several", launcher[-1])
    code, out, err = finish([sys.executable, "-m", *command, *(runs[0] if len(runs) == 1 else [json.dumps(runs)])])
    assert code == 0, err[-4000:]
    assert out.count("wrote ") == len(runs)  # by the main process only
    records = [json.loads((Path(run[-1]) / "metrics.json").read_text()) for run in runs]
    assert {record["processes"] for record in records} == {1 if len(launcher) == 1 else 2}
    return [record["runs"][0] for record in records]


def finish(command):
    """Run in a new session, so that a launcher that hangs is killed together with its ranks."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=ROOT, env=environment(), start_new_session=True, **pipes) as process:
        try:
            out, err = process.communicate(timeout=300)  # DeepSpeed may compile an extension first
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return process.returncode, out, err


def launched(launcher):
    return (*launcher, "recipes.train_clip")


def losses(record):
    return [entry["loss"] for entry in record["history"]]


@pytest.fixture(scope="module")
def single(cache, tmp_path_factory):
    """Return the record of a run with one process."""
    return recipe(cache, tmp_path_factory.mktemp("single"))


def assert_like(record, single):
    assert losses(record) == pytest.approx(losses(single), abs=1e-4)
    assert record["final"]["r1"] == pytest.approx(single["final"]["r1"], abs=2e-3)


@pytest.mark.launch
def test_accelerate_launch(cache, single, tmp_path):
    assert_like(recipe(cache, tmp_path, "--offload", "cpu", launcher=launched(ACCELERATE)), single)


def check_processes(monkeypatch, variables):
    """Check a process without a process group, in the environment of an unlaunched process plus ``variables``."""
    for name in ("WORLD_SIZE", "MASTER_PORT", "ACCELERATE_USE_CPU", "ACCELERATE_USE_FSDP"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    launch.check_processes(SimpleNamespace(distributed_type=DistributedType.NO, device="cpu"))


@pytest.mark.parametrize(
    "variables, said",
    [
        ({"WORLD_SIZE": "2"}, "asked for 2 processes .*, and the process group has 1"),
        ({"ACCELERATE_USE_CPU": "True", "MASTER_PORT": "29500"}, "asked for several processes and started one"),
        ({"ACCELERATE_USE_FSDP": "true"}, "asked for FSDP, and this run would be NO on cpu"),
    ],
)
def test_a_run_that_is_not_what_its_launcher_was_asked_for_is_refused(monkeypatch, variables, said):
    with pytest.raises(SystemExit, match=said):
        check_processes(monkeypatch, variables)


def see(group, folders):
    return exit_of(lambda: launch.check_shared(folders[dist.get_rank()]))


def refuse_on_main(group, error):
    def function():
        raise error

    return exit_of(lambda: launch.on_main(function))


def exit_of(function):
    try:
        return function()
    except (Exception, SystemExit) as error:
        return f"{type(error).__name__}: {error}"


def test_a_folder_that_processes_do_not_share_is_refused(tmp_path):
    one, other = tmp_path / "one", tmp_path / "other"
    one.mkdir()
    other.mkdir()
    pool = the_pool(2, timeout=120)
    assert pool.run(see, 2, [one, one]) == [None, None]
    for said in pool.run(see, 2, [one, other]):
        assert said.startswith(f"SystemExit: {one if said.count(str(one)) else other}: process 1 on")
        assert "put it on a file system that the nodes share" in said
    assert not [*one.iterdir(), *other.iterdir()]


def test_an_error_of_the_main_process_ends_all():
    pool = the_pool(2, timeout=120)
    assert pool.run(refuse_on_main, 2, SystemExit("no")) == ["SystemExit: no", "SystemExit: 1"]
    assert pool.run(refuse_on_main, 2, ValueError("no")) == ["ValueError: no", "SystemExit: 1"]


def save_and_load(group, folder):
    """Return the folders that each process saves to and loads; the second process does not see the latest pointer."""
    told = []
    accelerator = SimpleNamespace(save_state=told.append, load_state=told.append)
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(checkpoints, "latest", lambda folder: None)
        for _ in range(2):
            checkpoints.save(accelerator, folder)
        checkpoints.load(accelerator, folder)
    return [Path(path).name for path in told]


def test_the_main_process_decides_which_state_is_the_latest(tmp_path):
    assert the_pool(2, timeout=120).run(save_and_load, 2, tmp_path / "state") == [["a", "b", "b"]] * 2


def heartbeats(group, signalled):
    """Return the results of two beats: the first is empty, the second has the numbers of all ranks."""
    pulse = launch.Pulse()
    first = pulse.beat(float(dist.get_rank() == signalled), dist.get_rank())
    return first.tolist(), pulse.beat(0, 0).tolist()


def test_all_processes_learn_of_a_signal_at_the_same_step():
    assert the_pool(2, timeout=120).run(heartbeats, 2, 1) == [([], [[0.0, 0.0], [1.0, 1.0]])] * 2


@pytest.mark.launch
def test_torchrun_and_resume(cache, single, tmp_path):
    """Rows are on disk, sharded and prefetched; a run is stopped after one update and resumed."""
    options, part = ("--offload", "disk", "--shard", "--prefetch"), tmp_path / "part"
    runs = short(cache, tmp_path / "whole", *options), short(cache, part, *options, steps=1)
    whole, _, resumed = carry_out(launched(TORCHRUN), *runs, short(cache, part, *options, "--resume"))
    assert_like(whole, single)
    assert losses(resumed) == losses(whole) and resumed["final"] == whole["final"]


def save_images(folder):
    draw = np.random.default_rng(0)
    for number in range(24):
        path = folder / f"label {number % 2}" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(draw.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(path)


@pytest.mark.launch
@pytest.mark.full
def test_lars_with_augmented_views_and_resume(tmp_path):
    """Two ranks train on two views as one does; a run is stopped in the second of three epochs and resumed."""
    pytest.importorskip("kornia")
    save_images(tmp_path / "images")
    options = ("--data", "folder", "--folder", str(tmp_path / "images"))
    options += ("--optimizer", "lars", "--schedule", "cosine", "--warmup", "1", "--batch-size", "8", "--epochs", "3")

    def run(name, *more):
        return common(tmp_path, tmp_path / name, *options, *more)

    def weights(name):
        saved = checkpoints.latest(tmp_path / name / "sogclr-seed0" / "checkpoints") / "model.safetensors"
        return saved.read_bytes()

    (single,) = carry_out(("recipes.train_simclr",), run("single"))
    runs = run("whole"), run("part", "--max-steps", "3"), run("part", "--resume")
    whole, _, resumed = carry_out((*TORCHRUN, "recipes.train_simclr"), *runs)
    assert losses(whole) == pytest.approx(losses(single), abs=1e-4)
    assert losses(resumed) == losses(whole) and weights("part") == weights("whole")


@pytest.mark.launch
def test_deepspeed_and_resume(cache, single, deepspeed_compiled, tmp_path):
    # --compare starts a second run in the same process, although accelerate accepts no second plugin
    options = ("--deepspeed-config", "recipes/deepspeed/zero2.json", "--compare", "sogclr", "infonce")
    options += ("--normalizer-error", "0")
    recipe(cache, tmp_path, *options, launcher=launched(TORCHRUN), steps=1)
    assert_like(recipe(cache, tmp_path, *options, "--resume", launcher=launched(TORCHRUN)), single)


def norm_of(x, part=slice(None)):
    """Return output, gradients (to be summed over ranks) and running statistics of one training step."""
    torch.manual_seed(0)
    norm, x = BatchNorm(3).double(), x[part].clone().requires_grad_()
    y = norm(x)
    (y * torch.linspace(-1, 2, 8 * 3 * 4, dtype=y.dtype).reshape(8, 3, 2, 2)[part]).square().sum().backward()
    return y.detach(), x.grad, norm.weight.grad, norm.bias.grad, norm.running_mean, norm.running_var


def norm_of_rank(group, x):
    return norm_of(x, slice(4 * dist.get_rank(), 4 * dist.get_rank() + 4))


def test_batch_norm_over_ranks():
    x = torch.randn(8, 3, 2, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    one, ranks = norm_of(x), the_pool(2, timeout=120).run(norm_of_rank, 2, x)
    split = [torch.cat(parts) for parts in zip(*(r[:2] for r in ranks), strict=True)]
    split += [a + b for a, b in zip(ranks[0][2:4], ranks[1][2:4], strict=True)]
    for found in (ranks[0][4:], ranks[1][4:]):
        torch.testing.assert_close((*split, *found), one, rtol=1e-10, atol=1e-10)


@pytest.mark.launch
@pytest.mark.timeout(1200)
@pytest.mark.usefixtures("deepspeed_compiled")
@pytest.mark.parametrize("launcher", [name for name in launchers.JOBS if name != "one process"])
def test_two_processes_of_every_launcher_are_one_process(launcher):
    pytest.importorskip("deepspeed")
    for found in launchers.compare([launcher]):
        assert max(found[name] for name in launchers.HEAD[2:]) < 1e-5, found


def test_the_results_of_all_launchers():
    """The stored table has every training; its differences are those of rounding."""
    found = stored("launchers")["results"]
    assert {(each["launcher"], each["training"]) for each in found} == {
        (launcher, kind) for launcher, (_, kinds) in launchers.JOBS.items() for kind in kinds if kind != "plain"
    }
    assert max(each[name] for each in found for name in launchers.HEAD[2:]) < 1e-5
