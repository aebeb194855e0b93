"""recipes/clip_evaluation.py: metrics of one process, of several processes, and of open_clip."""

import io
import json
import re

import open_clip
import pytest
import torch

pytest.importorskip("open_clip_train")

from open_clip_train import zero_shot
from PIL import Image

from recipes import clip_trainer as recipe
from recipes import tars
from tests.open_clip.data import WORDS, image_of, write_pairs
from tests.open_clip.test_clip_trainer import arguments, given, launch, train  # noqa: F401

CLASSES = WORDS[:7]


def write_test_set(folder, broken=()):
    """Write pictures of seven classes, of which some cannot be read."""

    def files(row, key):
        picture = io.BytesIO()
        Image.fromarray(image_of(row)).save(picture, "png")
        return {"png": b"broken" if row in broken else picture.getvalue(), "cls": str(row % 7).encode()}

    tars.write_benchmark(folder / "test", 60, 25, files, progress=False)
    (folder / "classnames.txt").write_text("\n".join(CLASSES) + "\n")
    (folder / "zeroshot_classification_templates.txt").write_text("a {c} thing\n{c}\n")
    return folder


@pytest.fixture(scope="module")
def test_set(tmp_path_factory):
    return write_test_set(tmp_path_factory.mktemp("test_set"), broken=[5])


def measured(said, *names):
    return [float(re.findall(rf"val/{name} (\S+)", said)[-1]) for name in names]


def test_zero_shot_is_open_clips(given, test_set, tmp_path, capsys):  # noqa: F811
    train(given, tmp_path, "--epochs", "1")
    capsys.readouterr()
    train(given, tmp_path, "--resume", "--evaluate", "--zero-shot", str(test_set))
    ours = measured(capsys.readouterr().out, "zero_shot_top1", "zero_shot_top5", "zero_shot_lost")
    model, _, transform = open_clip.create_model_and_transforms("micro", pretrained=str(tmp_path / "epoch_1.pt"))
    model.eval()
    words = [lambda name: f"a {name} thing", lambda name: name]
    classifier = open_clip.build_zero_shot_classifier(model, open_clip.get_tokenizer("micro"), CLASSES, words)
    rows = [row for row in range(60) if row != 5]
    with torch.no_grad():
        images = torch.stack([transform(Image.fromarray(image_of(row))) for row in rows])
        logits = model.encode_image(images, normalize=True) @ classifier
    theirs = zero_shot.accuracy(logits, torch.tensor([row % 7 for row in rows]), topk=(1, 5))
    assert ours == pytest.approx([*(hits / len(rows) for hits in theirs), 1], rel=1e-3)


def test_clip_benchmark_measures_the_same_accuracy(given, tmp_path, capsys):  # noqa: F811
    """clip-benchmark reads the same folder, to which ``dataset_type.txt`` may be added."""
    from clip_benchmark.cli import main

    folder = write_test_set(tmp_path / "mine")
    (folder / "dataset_type.txt").write_text("classification\n")
    train(given, tmp_path / "run", "--epochs", "1", "--zero-shot", str(folder))
    ours = measured(capsys.readouterr().out, "zero_shot_top1", "zero_shot_top5")
    more = ["--model", "micro", "--pretrained", str(tmp_path / "run" / "epoch_1.pt"), "--no_amp", "--num_workers", "0"]
    more += ["--dataset", "wds/mine", "--dataset_root", str(folder), "--task", "zeroshot_classification"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["clip_benchmark", "eval", *more, "--output", str(tmp_path / "found.json")])
        main()
    metrics = json.loads((tmp_path / "found.json").read_text())["metrics"]
    assert [metrics["acc1"], metrics["acc5"]] == pytest.approx(ours, abs=1e-3)


def test_a_folder_that_is_no_test_set_is_refused(given, tmp_path):  # noqa: F811
    with pytest.raises(SystemExit, match="--zero-shot: .* lacks classnames.txt, zeroshot_.*.txt, test"):
        recipe.main(arguments(given, tmp_path, "--zero-shot", str(tmp_path)))


@pytest.mark.launch
@pytest.mark.parametrize("way", ["ddp", "fsdp2"])
def test_three_processes_measure_what_one_does(given, test_set, tmp_path, capsys, way):  # noqa: F811
    """Test more batches than processes, and fewer; the last batch is shorter."""
    names = ("image_to_text", "text_to_image", "lost", "zero_shot_top1", "zero_shot_top5", "zero_shot_lost")
    held_out = write_pairs(tmp_path / "held_out", [300, 260, 250], corrupt={7, 700})
    more = ("--val-shards", str(held_out), "--zero-shot", str(test_set), "--epochs", "1")
    module = "tests.open_clip.fsdp" if way == "fsdp2" else "recipes.clip_trainer"
    three = launch(3, given, tmp_path / "run", *more, "--batch-size", "2", module=module).stdout
    capsys.readouterr()
    train(given, tmp_path / "one", "--pretrained", str(tmp_path / "run" / "epoch_1.pt"), "--evaluate", *more)
    one = measured(capsys.readouterr().out, *names)
    assert measured(three, *names) == pytest.approx(one, abs=2e-3) and one[2] == 2 and one[5] == 1
