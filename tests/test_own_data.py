"""The recipe for a folder of pictures and texts: train, resume, two processes."""

import gc
import shutil
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

from recipes import glyphs, own_data
from tests.launching import environment

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    from PIL import Image

    folder = tmp_path_factory.mktemp("pictures")
    data = glyphs.load()
    for at in range(0, 6000, 25):
        Image.fromarray(data.images[at].numpy()).save(folder / f"{at:05d}.png")
        (folder / f"{at:05d}.txt").write_text(data.names[data.caption[at]])
    (folder / "a text without a picture.txt").write_text("nobody's")
    return folder


def test_a_tenth_is_held_out_by_name(folder):
    train, held_out = own_data.read(folder)
    assert len(train) + len(held_out) == 240 and 12 < len(held_out) < 36
    assert not set(train.paths) & set(held_out.paths)


def test_a_folder_without_pairs_to_evaluate_on_is_refused(tmp_path, capsys):
    from PIL import Image

    for name in ("cat.PNG", "dog.JPG"):
        Image.new("L", (32, 32)).save(tmp_path / name)
        (tmp_path / name).with_suffix(".txt").write_text(name)
    with pytest.raises(SystemExit):
        own_data.main([str(tmp_path), "--batch-size", "2", "--output", str(tmp_path / "run")])
    assert "0 pairs to evaluate on" in capsys.readouterr().err


def new_pair(folder, held_out):
    """Write a pair whose name puts it among those held out, or among those to train on."""
    names = (f"new {k}" for k in range(1000))
    name = next(name for name in names if (zlib.crc32(f"{name}.png".encode()) % 10 == 0) is held_out)
    shutil.copy(next(folder.glob("*.png")), folder / f"{name}.png")
    (folder / f"{name}.txt").write_text("a new pair")


@pytest.mark.slow
@pytest.mark.parametrize("held_out", [True, False])
def test_a_resume_with_another_pair_is_refused_without_a_traceback(folder, tmp_path, held_out):
    shutil.copytree(folder, tmp_path / "pictures")
    run = [str(tmp_path / "pictures"), "--batch-size", "32", "--output", str(tmp_path / "run")]
    own_data.main([*run, "--epochs", "1"])
    new_pair(tmp_path / "pictures", held_out)
    with pytest.raises(SystemExit, match="--resume: .*fingerprint(.|\n)*another --output"):
        own_data.main([*run, "--resume"])


@pytest.mark.slow
def test_a_resumed_run_is_the_whole_run(folder, tmp_path, capsys):
    small = [str(folder), "--batch-size", "32"]
    own_data.main([*small, "--output", str(tmp_path / "whole")])
    whole = capsys.readouterr().out.splitlines()
    own_data.main([*small, "--output", str(tmp_path / "parts"), "--epochs", "1"])
    own_data.main([*small, "--output", str(tmp_path / "parts"), "--resume"])
    assert capsys.readouterr().out.splitlines() == whole
    assert len(whole) == 2


@pytest.mark.launch
@pytest.mark.distributed
def test_two_processes_go_on_where_one_stopped(folder, tmp_path):
    output = ["--output", str(tmp_path)]
    own_data.main([str(folder), "--batch-size", "32", "--epochs", "1", *output])
    gc.collect()  # an estimator that is there still holds the directory that it saved into
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command += ["-m", "recipes.own_data", str(folder), "--batch-size", "16", "--resume", *output]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    assert [line.split(":")[0] for line in done.stdout.splitlines() if line.startswith("epoch")] == ["epoch 2"]
