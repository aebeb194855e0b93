"""The unimodal recipe: augmentations, heads, probes, icons in colour, folders of images, and resuming."""

import dataclasses
import json

import numpy as np
import pytest
import torch
from PIL import Image

from recipes import augment, cache, folder, icons, train_simclr
from recipes.augment import Augmentation
from recipes.batches import seeded
from recipes.engine import Config, Control, Run
from recipes.icon_task import icon_views
from recipes.methods import METHODS
from recipes.models import BatchNorm, Projected
from recipes.tasks import ImageViews, Labelled, Views, linear_probe, logistic_regression
from tests.test_icons import icon_set, pack

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


def test_the_order_of_operations_is_not_that_of_the_names():
    pytest.importorskip("kornia")
    one, other = (Augmentation(names, 3)(images(4), generator()) for names in (("crop", "blur"), ("blur", "crop")))
    assert torch.equal(one, other)


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr(augment, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="augment='crop' needs kornia: pip install"):
        Augmentation(("crop",), channels=3)
    assert torch.equal(Augmentation((), 3)(images(2), generator()), images(2))


@pytest.mark.parametrize("channels", [1, 3])
def test_a_shift_moves_whole_images(channels):
    pictures = images(5, channels)
    offsets = torch.tensor([[0, 1, 2, 3, 4], [4, 3, 2, 1, 0]])
    moved = augment.shifted(pictures, offsets, 2)
    assert torch.equal(moved[2], pictures[2])
    assert torch.equal(moved[0, ..., 2:, :30], pictures[0, ..., :30, 2:]) and not moved[0, ..., :2, :].any()


# -- heads and probes ----------------------------------------------------------------------------------------------


def test_heads():
    model = Projected(channels=3, head=(64, 64, 32), dim=16)
    kinds = [type(layer) for layer in model.projection[1:]]
    assert kinds == [torch.nn.Linear, BatchNorm, torch.nn.ReLU] * 2 + [torch.nn.Linear]
    one, two = model(images(4), images(4).flip(0))
    assert one.shape == two.shape == (4, 32)
    assert [view.shape for view in model(*images(12).chunk(3))] == [(4, 32)] * 3
    model.eval()
    assert torch.equal(model.project(images(4)), model.project(images(4).float() / 255))


def test_batch_norm_of_features_is_that_of_torch():
    ours, theirs, x = BatchNorm(5), torch.nn.BatchNorm1d(5), torch.randn(7, 5, generator=generator())
    assert torch.equal(ours(x), theirs(x)) and torch.equal(ours.running_var, theirs.running_var)


@pytest.mark.full
def test_probes_find_what_is_linear_and_repeat_to_the_bit():
    z = torch.randn(600, 8, generator=generator())
    label = (z @ torch.randn(8, 4, generator=generator(1))).argmax(1)
    data = z[:400], label[:400], z[400:], label[400:]
    found = linear_probe(*data)
    assert found > 0.85 and abs(found - logistic_regression(*data)) < 0.08
    assert linear_probe(*data) == found
    shuffled = label[torch.randperm(600, generator=generator(2))]
    assert linear_probe(z[:400], shuffled[:400], z[400:], shuffled[400:]) < 0.5


# -- icons in colour -----------------------------------------------------------------------------------------------

RED, BLUE, WHITE = (f'<path fill="{colour}" d="M2 2h20v20H2z"/>' for colour in ("#f00", "#00f", "#fff"))
DOT = '<circle cx="12" cy="12" r="9" fill="#0a0"/>'


def coloured(prefix, bodies):
    content = icon_set(prefix, bodies)
    content["info"]["palette"] = True
    return content


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    pytest.importorskip("resvg")
    sets = [
        coloured("noto", {"heart": RED, "sea": BLUE, "pale": WHITE, "leaf": DOT}),
        coloured("fxemoji", {"heart": DOT, "sea": RED}),
        coloured("twemoji", {"heart": BLUE, "unknown": BLUE}),
        coloured("openmoji", {"sea": DOT}),
        icon_set("tabler", {"heart": RED}),
    ]
    return pack(tmp_path_factory.mktemp("npm") / "icons.tgz", sets)


@pytest.fixture(scope="module")
def data(packed, tmp_path_factory):
    return icons.load(tmp_path_factory.mktemp("cache"), packed, progress=False, coloured=True)


def test_icons_in_colour(data):
    assert "tabler:heart" not in data.sources, "its set is not in colour"
    red, blue, pale = (data.images[data.sources.index(f"noto:{name}")] for name in ("heart", "sea", "pale"))
    assert red.shape == (3, 32, 32) and red.dtype == torch.uint8
    assert red[:, 16, 16].tolist() == [255, 0, 0] and blue[:, 16, 16].tolist() == [0, 0, 255]
    assert red[:, 0, 0].tolist() == [255, 255, 255] and pale[:, 16, 16].tolist() == [0, 0, 0], "white is inverted"


def test_labels_of_icons(data):
    pytest.importorskip("kornia")
    names = icon_views(data, "names")
    assert names.n == 6 and names.channels == 3, "neither twemoji nor openmoji is trained on"
    assert len(names.queries.labels) == 1, "an unknown name is no class"
    assert len(icon_views(data, "names", "validation").queries.labels) == 1
    with pytest.raises(ValueError, match="part must be one of test, validation"):
        icon_views(data, part="train")


def test_families_are_told_for_names_never_seen(data):
    pytest.importorskip("kornia")
    caption, family = torch.arange(80) // 2, torch.arange(80) % 2
    many = dataclasses.replace(data, images=images(80), caption=caption, family=family, names=list("x" * 40))
    test, validation = (icon_views(many, "families", part) for part in ("test", "validation"))
    assert test.n == validation.n == len(test.bank.labels) == 64
    assert len(test.queries.labels) == len(validation.queries.labels) == 8, "a tenth of the names, two icons of each"
    shown = [{image.numpy().tobytes() for image in part} for part in (test.images, *two_queries(test, validation))]
    assert not (shown[0] & shown[1] or shown[0] & shown[2] or shown[1] & shown[2])


def two_queries(*tasks):
    return [task.queries.images for task in tasks]


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


@pytest.mark.parametrize("method", ["sogclr", "emc2"])
def test_a_step_is_the_call_with_both_views(method):
    task = of(images(64), augment=("shift",), head=(16,))
    config = Config(method, METHODS[method].options("unimodal"), batch_size=16, epochs=1)
    run_, twin = (Run(task, config, Control(max_steps=1)) for _ in range(2))
    index = twin.batches(0)
    features = twin.model.train()(*task.inputs(index, seeded("augment", 0, 0)))
    wanted = twin.est(*features, index)
    assert run_.train().loss_sum == wanted.detach()
    assert run_.est.metrics["effective_negatives"] <= 2 * 15


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


def test_a_checkpoint_of_before_a_field_was_added_is_taken(tmp_path):
    task, config = run()
    run_ = Run(task, config, Control(max_steps=1)).train()
    state = run_.state_dict()
    for name in ("optimizer", "schedule", "warmup"):
        del state["config"][name]
    run_.load_state_dict(state)
    with pytest.raises(ValueError, match="the checkpoint has optimizer='sgd', this run 'adamw'|optimizer"):
        run_.load_state_dict({**state, "config": {**state["config"], "optimizer": "sgd"}})


def test_the_command_trains_on_a_folder(photos, tmp_path):
    pytest.importorskip("kornia")
    train_simclr.main(
        [
            *("--data", "folder", "--folder", str(photos), "--head", "32", "32", "16", "--batch-size", "6"),
            *("--optimizer", "lars", "--schedule", "cosine", "--warmup", "1", "--epochs", "2", "--no-progress"),
            *("--no-plots", "--cache-dir", str(tmp_path), "--output", str(tmp_path / "out")),
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
