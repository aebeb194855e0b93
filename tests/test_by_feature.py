"""The recipes that users copy: each is short, trains, and resumes bit for bit."""

import importlib
import itertools
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.optim import AdamW
from torch.optim.lr_scheduler import OneCycleLR
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from recipes import minimal, text
from tests.launching import environment

ROOT = Path(__file__).parent.parent
BASE = Path(minimal.__file__)
SMALL = ("--limit", "192", "--batch-size", "32")


def features() -> list[str]:
    return sorted(path.stem for path in (BASE.parent / "by_feature").glob("*.py") if path.stem != "__init__")


@pytest.mark.parametrize(("name", "most"), [("minimal", 84), *((f"by_feature/{name}", 64) for name in features())])
def test_what_people_copy_is_short(name, most):
    assert len((BASE.parent / f"{name}.py").read_text().splitlines()) <= most


def train(name: str, folder: Path, *options: str) -> None:
    if name.startswith("with_"):
        pytest.importorskip(name.removeprefix("with_"))
    module = minimal if name == "minimal" else importlib.import_module(f"recipes.by_feature.{name}")
    encoder = ["--model", str(small_encoder(folder.parent / "encoder"))] if name == "finetune" else []
    module.main([*SMALL, *encoder, "--output", str(folder), *options])


def small_encoder(folder: Path) -> Path:
    """Return a folder with a small encoder with random weights in place of the published one."""
    if not folder.exists():
        torch.manual_seed(0)
        text.small_model(text.tokenizer_of(itertools.chain(*text.docstrings()))).save_pretrained(str(folder))
    return folder


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """Return the weights of the model in the last checkpoint."""
    if (folder / "last.pt").exists():
        return torch.load(folder / "last.pt")["model"]
    if (folder / "last.ckpt").exists():
        return torch.load(folder / "last.ckpt")["state_dict"]
    from safetensors.torch import load_file

    newest = max(folder.glob("*[0-9]"), key=lambda path: int(path.name.removeprefix("checkpoint-")))
    return load_file(newest / "model.safetensors")


PLAIN = ["minimal", "chosen_batches", "gradient_cache", "momentum", "several_captions", "two_data_sets", "wrong_pairs"]


@pytest.mark.slow
@pytest.mark.parametrize("name", PLAIN)
def test_a_resume_without_a_run_is_refused_without_a_traceback(name, tmp_path):
    with pytest.raises(SystemExit, match=r"--resume: there is no .*last\.pt"):
        train(name, tmp_path, "--resume")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["minimal", *(name for name in features() if name != "with_deepspeed")])
def test_a_resumed_run_ends_in_the_same_weights(name, tmp_path, capsys):
    train(name, tmp_path / "whole", "--epochs", "2")
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("epoch")]
    train(name, tmp_path / "parts", "--epochs", "2", "--stop-after", "1")
    train(name, tmp_path / "parts", "--epochs", "2", "--resume")
    assert [line for line in capsys.readouterr().out.splitlines() if line.startswith("epoch")] == said
    assert len(said) == 2
    whole, parts = weights(tmp_path / "whole"), weights(tmp_path / "parts")
    assert all(torch.equal(whole[key], parts[key]) for key in whole)


@pytest.mark.slow
@pytest.mark.parametrize("name", PLAIN)
def test_a_resume_with_another_length_is_refused_before_training(name, tmp_path, capsys):
    train(name, tmp_path, "--epochs", "2", "--stop-after", "1")
    assert [line[:7] for line in capsys.readouterr().out.splitlines() if line.startswith("epoch")] == ["epoch 1"]
    with pytest.raises(SystemExit, match="--resume: --epochs, --batch-size and the data must be those"):
        train(name, tmp_path, "--epochs", "3", "--resume")
    assert "epoch" not in capsys.readouterr().out


def rates(name: str, folder: Path) -> list[float]:
    """Train two epochs; return the learning rate of each update."""
    used: list[float] = []

    def record(optimizer, args, kwargs):
        used.append(optimizer.param_groups[0]["lr"])

    hook = register_optimizer_step_pre_hook(record)
    try:
        train(name, folder, "--epochs", "2")
    finally:
        hook.remove()
    return used


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["minimal", *(name for name in features() if name not in ("finetune", "with_deepspeed"))]
)
def test_the_rate_rises_during_three_quarters_of_the_run(name, tmp_path):
    factor = {"momentum": 0.003, "with_sentence_transformers": 0.001}.get(name, 0.002)
    used, rate = rates(name, tmp_path), factor * 32**0.5
    schedule = OneCycleLR(AdamW([torch.nn.Parameter(torch.zeros(1))]), rate, total_steps=len(used), pct_start=0.75)
    expected = []
    for _ in used:
        expected.append(schedule.get_last_lr()[0])
        schedule.optimizer.step(), schedule.step()
    if "transformers" in name:  # a linear rise, and the same highest rate
        assert max(used) == pytest.approx(rate, rel=0.1) and abs(used.index(max(used)) - 0.75 * len(used)) <= 1
        assert used[-1] < 0.5 * rate
    else:
        assert used == pytest.approx(expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["minimal", *(name for name in features() if name != "with_deepspeed")])
def test_weights_that_are_not_finite_end_the_run(name, tmp_path):
    def spoil(optimizer, args, kwargs):
        with torch.no_grad():
            optimizer.param_groups[0]["params"][0].fill_(torch.nan)

    hook = register_optimizer_step_post_hook(spoil)
    try:
        with pytest.raises(SystemExit, match="not finite"):
            train(name, tmp_path / "run")
    finally:
        hook.remove()
    assert not [*tmp_path.glob("run/last.*"), *tmp_path.glob("run/checkpoint-*/model.safetensors")]


def launched(name: str, *runs: list[str], own: bool = False) -> list[str]:
    """Train one model in two processes, in one or more runs; return the sorted lines printed about epochs."""
    launcher = [] if own else ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command = [sys.executable, *launcher, "-m", "tests.several", f"recipes.by_feature.{name}", json.dumps(runs)]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    # with DeepSpeed both processes print, possibly on the same line
    return sorted(re.findall(r"(?:rank \d, )?epoch \d+: .*?%", done.stdout))


@pytest.mark.launch
@pytest.mark.distributed
@pytest.mark.usefixtures("deepspeed_compiled")
@pytest.mark.parametrize("name", [name for name in features() if name.startswith("with_")])
def test_two_processes_train_and_resume(name, tmp_path):
    pytest.importorskip(name.removeprefix("with_"))
    devices = ["--devices", "2"] if name == "with_lightning" else []
    whole, first, second = (
        [*SMALL, "--output", str(tmp_path / folder), "--epochs", "2", *devices, *more]
        for folder, *more in (("whole",), ("parts", "--stop-after", "1"), ("parts", "--resume"))
    )
    if devices:  # Lightning starts the processes of one run itself
        said = launched(name, whole, own=True) + launched(name, first, second)
    else:
        said = launched(name, whole, first, second)
    each = 2 if name == "with_deepspeed" else 1  # lines per epoch
    assert {said.count(line) for line in said} == {2} and len(said) == 4 * each  # one group, not two independent runs
