"""The recipe for users' own pictures and texts: data formats, training, resuming, two processes."""

import csv
import gc
import json
import shutil
import subprocess
import sys
import zlib
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


def test_other_columns_of_the_same_names_are_not_in_the_way(small):
    import datasets

    rows = [{"name": f"row {k}", "path": f"blue/{2 + 3 * k:02d}.png", "caption": k, "kind": k % 2} for k in range(3)]
    for row in rows:
        row |= {"image": "other", "text": "other", "label": "other"}
    table = datasets.Dataset.from_list(rows).cast_column("kind", datasets.ClassLabel(names=["cat", "dog"]))
    table.save_to_disk(small / "columns")
    found = own_data.read(small / "columns", "path", "caption", "kind")
    assert found["text"][:] == [["0"], ["1"], ["2"]] and found["name"][0] == "blue/02.png"
    assert found["label"][:] == ["cat", "dog", "cat"]  # labels are class names, not numbers


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
    assert len(lines) == 4


def test_a_caption_is_drawn_anew_in_every_epoch(small):
    pairs = own_data.Pairs(own_data.read(small), lambda texts: torch.zeros(len(texts), 1), 8)
    drawn = []
    for pairs.epoch in range(20):
        drawn.append(pairs[1][2])
    assert {pairs.distinct[caption] for caption in drawn} == {"blue number 5", "a blue square"}
    assert drawn[0] == (setattr(pairs, "epoch", 0), pairs[1][2])[1]


def test_recall_counts_any_of_the_right_ones():
    similarities = torch.tensor([[0.9, 0.1, 0.5], [0.3, 0.2, 0.1]])
    right = torch.tensor([[False, False, True], [False, True, False]])
    assert own_data.recall(similarities, right, 1) == 0
    assert own_data.recall(similarities, right, 2) == 1
    right[0, 0] = True
    assert own_data.recall(similarities, right, 1) == 0.5
    assert own_data.recall(similarities.T, right.T, 9) == 1


class Ideal(torch.nn.Module):
    """An encoder that maps a picture to its mean colour and a text to the colour that it names."""

    def image(self, pictures):
        return pictures.float().mean((2, 3))

    def text(self, tokens):
        return torch.eye(4)[tokens[:, 0]][:, :3] + 1e-3


def test_evaluation_of_an_encoder_that_knows_colours(small):
    def tokenizer(texts):
        names = ("red", "green", "blue")
        return torch.tensor([[next((k for k, name in enumerate(names) if name in text), 3)] for text in texts])

    tables = own_data.split(own_data.read(small, labels="label"))
    classes = own_data.zero_shot_classes(tables, ["{}", "a {} one"], tokenizer)
    held_out = own_data.Pairs(tables[1], tokenizer, 8)
    found = own_data.evaluate(Ideal(), held_out, "cpu", **classes)
    assert found["zero-shot"] == 1 and found["recall@5"] == 1
    classes["labels"] = [(label + 1) % 3 for label in classes["labels"]]
    assert own_data.evaluate(Ideal(), held_out, "cpu", **classes)["zero-shot"] == 0


def test_a_tenth_is_held_out_by_name(folder):
    train, held_out = own_data.split(own_data.read(folder))
    assert len(train) + len(held_out) == 240 and 12 < len(held_out) < 36
    assert not set(train["name"]) & set(held_out["name"])


def test_a_folder_without_pairs_to_evaluate_on_is_refused(tmp_path, capsys):
    from PIL import Image

    for name in ("cat.PNG", "dog.JPG"):
        Image.new("L", (32, 32)).save(tmp_path / name)
        (tmp_path / name).with_suffix(".txt").write_text(name)
    with pytest.raises(SystemExit):
        own_data.main([str(tmp_path), "--batch-size", "2", "--output", str(tmp_path / "run")])
    assert "0 pairs to evaluate on" in capsys.readouterr().err


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


def new_pair(folder, held_out):
    """Write a pair whose name assigns it to the held-out set or to the training set."""
    names = (f"new {k}" for k in range(1000))
    name = next(name for name in names if (zlib.crc32(f"{name}.png".encode()) % 10 == 0) is held_out)
    shutil.copy(next(folder.glob("*.png")), folder / f"{name}.png")
    (folder / f"{name}.txt").write_text("a new pair")


@pytest.mark.slow
@pytest.mark.parametrize("held_out", [True, False])
def test_a_resume_with_another_pair_is_refused_without_a_traceback(folder, tmp_path, held_out):
    shutil.copytree(folder, tmp_path / "pictures")
    run = [str(tmp_path / "pictures"), "--batch-size", "32", "--output", str(tmp_path / "run")]
    own_data.main([*run, "--stop-after", "1"])
    new_pair(tmp_path / "pictures", held_out)
    with pytest.raises(SystemExit, match="--resume: .*fingerprint(.|\n)*another --output"):
        own_data.main([*run, "--resume"])


def test_a_kill_leaves_the_former_model(small, tmp_path, monkeypatch):
    run = [str(small), "--batch-size", "8", "--output", str(tmp_path)]
    own_data.main([*run, "--stop-after", "1"])
    former = (tmp_path / "last.pt").read_bytes()

    def save(value, path):
        Path(path).write_bytes(b"the first bytes")
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", save)
    with pytest.raises(KeyboardInterrupt):
        own_data.main([*run, "--resume"])
    assert (tmp_path / "last.pt").read_bytes() == former


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


@pytest.mark.slow
def test_a_run_in_two_parts_has_the_weights_and_the_log_of_the_whole_run(small, tmp_path):
    run = [str(small), "--batch-size", "8", "--epochs", "2", "--log-every", "2"]
    own_data.main([*run, "--output", str(tmp_path / "whole")])
    own_data.main([*run, "--output", str(tmp_path / "parts"), "--stop-after", "1"])
    with open(tmp_path / "parts" / "metrics.jsonl", "a") as file:  # as a run that was killed in the second epoch
        file.write('{"step": 5, "loss": 0.0}\n{"step": 6, "lo')
    own_data.main([*run, "--output", str(tmp_path / "parts"), "--resume"])
    whole, parts = (torch.load(tmp_path / folder / "last.pt")["model"] for folder in ("whole", "parts"))
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    texts = [(tmp_path / folder / "metrics.jsonl").read_text() for folder in ("whole", "parts")]
    assert texts[0] == texts[1]
    records = [json.loads(line) for line in texts[0].splitlines()]
    steps = records[-1]["step"] // 2  # of an epoch
    assert [record["step"] for record in records if "recall@1" in record] == [steps, 2 * steps]
    assert {"step", "epoch", "loss", "lr", "info_nce"} == set(records[0]) and records[-1]["epoch"] == 2
    assert max(record["lr"] for record in records) <= 0.002 * 8**0.5
    assert (tmp_path / "parts" / "curve.png").stat().st_size > 10_000


@pytest.mark.slow
def test_a_resume_with_another_schedule_is_refused(small, tmp_path, capsys):
    run = [str(small), "--batch-size", "8", "--output", str(tmp_path)]
    own_data.main([*run, "--stop-after", "1"])
    with pytest.raises(SystemExit, match="--resume: the schedule of the run has 6 steps, and that of the arguments 9"):
        own_data.main([*run, "--epochs", "3", "--resume"])
    own_data.main([*run, "--resume"])
    with pytest.raises(SystemExit):
        own_data.main([*run, "--resume"])
    assert "all 2 epochs of the run are done" in capsys.readouterr().err


def interrupted(*args, **options):
    raise KeyboardInterrupt


@pytest.mark.launch
@pytest.mark.distributed
def test_two_processes_go_on_where_one_stopped(folder, tmp_path):
    output = ["--output", str(tmp_path)]
    own_data.main([str(folder), "--batch-size", "32", "--stop-after", "1", *output])
    gc.collect()  # an estimator that still exists holds the lock on the directory that it saved into
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command += ["-m", "recipes.own_data", str(folder), "--batch-size", "16", "--resume", *output]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    assert [line.split(":")[0] for line in done.stdout.splitlines() if line.startswith("epoch")] == ["epoch 2"]
