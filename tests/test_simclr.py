"""The unimodal recipe: augmentations, heads, probes, icons in colour, folders of images, and resuming."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

from recipes import cache, folder, train_simclr
from recipes.augment import Augmentation
from recipes.engine import Config, Control, Run
from recipes.methods import METHODS
from recipes.tasks import ImageViews, Labelled, Views

COLOUR_NAMES = ("crop", "flip", "jitter", "grey", "blur")


def images(count, channels=3):
    draw = torch.Generator().manual_seed(0)
    shape = (count, channels, 32, 32) if channels > 1 else (count, 32, 32)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=draw)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


# -- augmentation --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", COLOUR_NAMES)
def test_draws_are_a_function_of_the_generator_alone(name):
    pytest.importorskip("kornia")
    pictures, change = images(6), Augmentation([name], channels=3)
    before = torch.get_rng_state()
    one = change(pictures, generator(1))
    assert torch.equal(torch.get_rng_state(), before), "torch's own generator is left as it was"
    torch.rand(7)
    assert torch.equal(change(pictures, generator(1)), one)
    assert not torch.equal(change(pictures, generator(2)), one)
    assert one.shape == pictures.shape and one.min() >= 0 and one.max() <= 1 + 1e-6
    assert not torch.equal(one, pictures / 255)


def test_colours_of_grey_images_are_refused():
    with pytest.raises(ValueError, match="augment='grey' needs images in colour; these have 1 channel"):
        Augmentation(("shift", "grey"), channels=1)


# -- icons in colour -----------------------------------------------------------------------------------------------


# -- a folder ------------------------------------------------------------------------------------------------------


@pytest.fixture()
def photos(tmp_path):
    for label, colour in (("blue", (0, 0, 200)), ("red", (200, 0, 0))):
        for number in range(10):
            path = tmp_path / "photos" / label / ("deep" if number % 2 else "") / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            noise = np.random.default_rng(number).integers(0, 55, (40, 60, 3))
            Image.fromarray((noise + colour).astype(np.uint8)).save(path)
    return tmp_path / "photos"


def test_a_folder_is_read_and_cached(photos, tmp_path, monkeypatch):
    pictures, labels = folder.load(photos, tmp_path)
    assert pictures.shape == (20, 3, 32, 32) and labels.tolist() == [0] * 10 + [1] * 10
    assert (pictures[:10, 2].float().mean() > 200) and (pictures[10:, 0].float().mean() > 200)
    monkeypatch.setattr(folder, "_read", None)
    assert torch.equal(folder.load(photos, tmp_path)[0], pictures)
    monkeypatch.undo()
    Image.new("RGB", (32, 32)).save(photos / "red" / "new.png")
    assert len(folder.load(photos, tmp_path)[0]) == 21


def test_folders_that_cannot_be_used(photos, tmp_path):
    with pytest.raises(cache.Unavailable, match="two sub-folders"):
        folder.load(photos / "red", tmp_path)
    (photos / "red" / "bad.png").write_text("text")
    with pytest.raises(cache.Unavailable, match=r"bad\.png cannot be read"):
        folder.load(photos, tmp_path)


# -- views -------------------------------------------------------------------------------------------------


def of(pictures, **views):
    """Return a task on some images."""
    judged = Labelled(pictures[:32], torch.arange(32) % 4)
    return ImageViews(pictures, judged, judged, "test", Views(**views))


def test_two_views_are_the_halves_of_one_augmented_batch():
    pytest.importorskip("kornia")
    task, index = of(images(64)), torch.tensor([3, 1, 60])
    wanted = task.augmentation(task.images[index.repeat(2)], generator()).chunk(2)
    assert all(torch.equal(*pair) for pair in zip(task.inputs(index, generator()), wanted, strict=True))


# -- the recipe ----------------------------------------------------------------------------------------------------


def run(**options):
    task = of(images(64), head=(32, 16))
    config = Config(
        "recommended", METHODS["recommended"].options("unimodal"), batch_size=16, epochs=3, lr=0.1, **options
    )
    return task, config


@pytest.mark.parametrize("optimizer, schedule", [("lars", "cosine"), ("sgd", "one-cycle")])
def test_resume_with_augmentation(optimizer, schedule, tmp_path):
    pytest.importorskip("kornia")
    task, config = run(optimizer=optimizer, schedule=schedule)

    def train(steps, **control):
        return Run(task, config, Control(eval_every=0, max_steps=steps, **control)).train()

    whole = train(8)
    train(5, checkpoint=tmp_path / "checkpoints")
    resumed = train(8, checkpoint=tmp_path / "checkpoints", resume=True)
    parts = zip(whole.model.state_dict().items(), resumed.model.state_dict().values(), strict=True)
    assert all(torch.equal(one, two) for (_, one), two in parts)
    assert whole.optimizer.state_dict()["param_groups"] == resumed.optimizer.state_dict()["param_groups"]


def test_the_command_trains_on_a_folder(photos, tmp_path):
    pytest.importorskip("kornia")
    train_simclr.main(
        [
            *("--data", "folder", "--folder", str(photos), "--head", "32", "32", "16", "--batch-size", "6"),
            *("--optimizer", "lars", "--schedule", "cosine", "--warmup", "1", "--epochs", "2", "--no-progress"),
            *("--no-plots", "--cache-dir", str(tmp_path), "--output-dir", str(tmp_path / "out")),
        ]
    )
    (record,) = json.loads((tmp_path / "out" / "metrics.json").read_text())["runs"]
    assert record["finished"] and set(record["final"]) >= set(ImageViews.labels)
    assert record["config"]["lr"] == pytest.approx(0.075 * 6**0.5)


@pytest.mark.parametrize(
    "options, said",
    [
        (["--data", "folder"], "--data folder needs --folder DIR"),
        (["--labels", "names"], "--labels belongs to --data icons"),
        (["--folder", "x"], "--folder belongs to --data folder"),
        pytest.param(
            ["--augment", "jitter"], "augment='jitter' needs images in colour", marks=pytest.mark.slow
        ),  # draws glyphs
    ],
)
def test_wrong_options_end_with_one_line(options, said, tmp_path, capsys):
    with pytest.raises(SystemExit):
        train_simclr.main([*options, "--cache-dir", str(tmp_path)])
    assert said in capsys.readouterr().err
