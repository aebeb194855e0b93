"""The recipe for users' own pictures and texts: data formats, training, resuming, two processes."""

import csv
import gc
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

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


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Thirty single-colour pictures in three sub-folders, some with two captions, and the same pairs as tables."""
    import datasets
    from PIL import Image

    base = tmp_path_factory.mktemp("small")
    rows = []
    for at in range(30):
        kind, colour = ("red", "green", "blue")[at % 3], tuple(255 * (at % 3 == k) for k in range(3))
        (base / kind).mkdir(exist_ok=True)
        Image.new("RGB", (40, 30), colour).save(base / kind / f"{at:02d}.png")
        texts = [f"{kind} number {at}", f"a {kind} square"][: 1 + at % 2]
        (base / kind / f"{at:02d}.txt").write_text("\n".join(texts) + "\n")
        rows.append({"image": f"{kind}/{at:02d}.png", "text": texts, "label": kind})
    rows.sort(key=lambda row: row["image"])
    with open(base / "table.csv", "w", newline="") as file:
        table = csv.DictWriter(file, ["path", "caption"])
        table.writeheader()
        table.writerows({"path": row["image"], "caption": row["text"][0]} for row in rows)
    (base / "table.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    found = datasets.Dataset.from_list(rows)
    found.to_parquet(base / "table.parquet")
    absolute = found.map(lambda row: {"image": str(base / row["image"])}).cast_column("image", datasets.Image())
    absolute.save_to_disk(base / "saved")
    return base


@pytest.mark.parametrize("form", ["", "table.jsonl", "table.parquet", "saved"])
def test_every_form_gives_the_same_pairs(small, form):
    table = own_data.read(small / form, labels="label")
    texts = [own_data.Pairs(table, lambda texts: torch.zeros(len(texts), 1), 16).picture(k) for k in (0, 29)]
    assert table["text"][:3] == [["blue number 2"], ["blue number 5", "a blue square"], ["blue number 8"]]
    assert table["label"][0] == "blue"
    assert texts[0].shape == (3, 16, 16) and texts[0][2].eq(255).all() and texts[0][:2].eq(0).all()
    assert texts[1][0].eq(255).all() and not texts[1][1:].any()


def test_a_table_may_have_other_columns(small):
    table = own_data.read(small / "table.csv", image="path", text="caption")
    assert table["text"][1] == ["blue number 5"] and table["name"][1] == "blue/05.png"
    with pytest.raises(SystemExit, match=r"no column \['image', 'text'\], only"):
        own_data.read(small / "table.csv")


def test_pairs_without_a_picture_or_a_text_are_left_out(small):
    (small / "empty").mkdir()
    for name, text in {"a": "a text", "b": " \n"}.items():
        shutil.copy(small / "blue" / "02.png", small / "empty" / f"{name}.png")
        (small / "empty" / f"{name}.txt").write_text(text)
    assert own_data.read(small / "empty")["text"][:] == [["a text"]]
    (small / "holes.csv").write_text("image,text,label\nblue/02.png,one,\nblue/02.png,,x\n,three,x\n")
    assert own_data.read(small / "holes.csv")["text"][:] == [["one"]]
    with pytest.raises(SystemExit, match="--labels label: 1 pictures have no class"):
        own_data.read(small / "holes.csv", labels="label")
    with pytest.raises(SystemExit, match=r"no column \['kind'\], only .*give --image, --text, --labels"):
        own_data.read(small / "holes.csv", labels="kind")


def test_the_commands_of_the_description_are_understood(small):
    lines = [
        line for line in own_data.__doc__.splitlines() if " -m recipes.own_data DATA" in line and "--resume" not in line
    ]
    for line in lines:
        own_data.parse([str(small), *line.partition("#")[0].split(" DATA", 1)[1].split()])
    assert len(lines) == 3


def test_a_tenth_is_held_out_by_name(folder):
    train, held_out = own_data.split(own_data.read(folder))
    assert len(train) + len(held_out) == 240 and 12 < len(held_out) < 36
    assert not set(train["name"]) & set(held_out["name"])


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["nowhere"], "no folder and no table"),
        ([str(ROOT), "--resume"], "there is no"),
        ([str(ROOT), "--templates", "a {}", "a {c}"], "'a {c}' has no {}"),
    ],
)
def test_arguments_are_checked_first(arguments, said, tmp_path, capsys):
    with pytest.raises(SystemExit):
        own_data.main([*arguments, "--output", str(tmp_path)])
    assert said in capsys.readouterr().err


@pytest.mark.slow
def test_a_resumed_run_is_the_whole_run(small, tmp_path, capsys, monkeypatch):
    options = ["--batch-size", "8", "--augment", "crop", "jitter", "--labels", "label", "--precision", "bfloat16"]
    run = [str(small), *options, "--size", "24", "--workers", "1"]
    own_data.main([*run, "--output", str(tmp_path / "whole")])
    whole = capsys.readouterr().out.splitlines()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(own_data, "evaluate", interrupted)  # runs after the epoch is saved
        own_data.main([*run, "--output", str(tmp_path / "parts")])
    own_data.main([*run, "--output", str(tmp_path / "parts"), "--resume"])
    assert capsys.readouterr().out.splitlines() == whole[1:]
    assert len(whole) == 2 and "zero-shot" in whole[0]


def interrupted(*args, **options):
    raise KeyboardInterrupt


@pytest.mark.launch
@pytest.mark.distributed
def test_two_processes_go_on_where_one_stopped(folder, tmp_path):
    output = ["--output", str(tmp_path)]
    own_data.main([str(folder), "--batch-size", "32", "--epochs", "1", *output])
    gc.collect()  # an estimator that still exists holds the lock on the directory that it saved into
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command += ["-m", "recipes.own_data", str(folder), "--batch-size", "16", "--resume", *output]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    assert [line.split(":")[0] for line in done.stdout.splitlines() if line.startswith("epoch")] == ["epoch 2"]
