"""Options of recipes/clip_trainer.py that open_clip's trainer has too, and their effects."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("open_clip")

import compopt
from recipes import clip_trainer as recipe
from tests.open_clip.data import write_pairs
from tests.open_clip.test_clip_trainer import arguments, given, rows, same, started, train, weights  # noqa: F401


def parsed(given, *more):  # noqa: F811
    return recipe.parse(arguments(given, "out", *more))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("cosine", {49: 0.25, 100: 0.5, 550: 0.25, 1000: 0.0}),
        ("const", {49: 0.25, 100: 0.5, 1000: 0.5}),
        ("const-cooldown", {49: 0.25, 100: 0.5, 600: 0.5, 800: 0.2, 1000: 0.1}),
    ],
)
def test_schedules(given, name, expected):  # noqa: F811
    """Learning rates after some of 1,000 samples, with a warmup over 100 and possibly a cooldown over the last 400."""
    more = ["--lr-scheduler", name, "--epochs", "10", "--lr", "0.5", "--warmup", "0.1", "--epochs-cooldown", "4"]
    args = parsed(given, *more, "--lr-cooldown-end", "0.1", "--lr-cooldown-power", "2")
    groups = [{}, {}]
    schedule = recipe.build_schedule(args, SimpleNamespace(param_groups=groups), 100)
    for samples, rate in expected.items():
        schedule(samples)
        assert [group["lr"] for group in groups] == [pytest.approx(rate)] * 2


def trained_parts(given, *more):  # noqa: F811
    _, model, train_transform, _ = recipe.build_model(parsed(given, *more))
    return model, {name for name, p in model.named_parameters() if p.requires_grad}, train_transform


def test_locked_towers_are_not_trained(given, tmp_path):  # noqa: F811
    _, everything, _ = trained_parts(given)
    text = {name for name in everything if not name.startswith("visual.") and name != "logit_scale"}
    _, image_locked, _ = trained_parts(given, "--lock-image")
    _, last_group, _ = trained_parts(given, "--lock-image", "--lock-image-unlocked-groups", "1")
    _, text_locked, _ = trained_parts(given, "--lock-text")
    assert text < image_locked and not any(name.startswith("visual.") for name in image_locked)
    assert image_locked < last_group < everything
    assert any(name.startswith("visual.") for name in text_locked) and not text & text_locked
    train(given, tmp_path, "--lock-image", "--lock-image-unlocked-groups", "1", "--epochs", "1")
    torch.manual_seed(0)
    before = trained_parts(given)[0].state_dict()
    after = weights(tmp_path, 1)
    moved = {name for name in everything - {"logit_scale"} if not torch.equal(before[name], after[name])}
    assert moved and moved <= last_group


def test_several_sources(given, tmp_path):  # noqa: F811
    """A source that is read three times per epoch visits the rows of its own shards up to three times."""
    other = write_pairs(tmp_path / "other", [6, 4], first=40)
    both = ("--shards", str(given[0]), str(other), "--upsample", "1", "3", "--index", "keys:50")
    train(given, tmp_path / "out", *both, "--epochs", "1", "--batch-size", "5")
    est = compopt.SogCLREstimator(50)
    compopt.load(est, tmp_path / "out" / "epoch_1.compopt")
    count = est.read(torch.arange(50))["count"]
    assert count[:40].tolist() == [1] * 40 and count[40:].min() >= 1 and count[40:].max() <= 3
    with pytest.raises(SystemExit, match="--upsample: 1 factors for 2 sources"):
        recipe.main(arguments(given, tmp_path / "x", *both[:3], "--upsample", "3"))


def test_shards_that_are_drawn_with_replacement(given, tmp_path):  # noqa: F811
    """An epoch keeps its number of samples, and a resumed run draws the same shards."""
    more = ("--dataset-resampled", "--epochs", "3", "--batch-size", "8", "--set", "tau=0.1")
    train(given, tmp_path / "whole", *more)
    train(given, tmp_path / "stopped", *more, "--max-steps", "7")
    train(given, tmp_path / "stopped", *more, "--resume")
    same(weights(tmp_path / "stopped", 3), weights(tmp_path / "whole", 3))
    same(rows(tmp_path / "stopped", 3), rows(tmp_path / "whole", 3))
    count = rows(tmp_path / "whole", 3)["count"]
    assert count.min() < 3 < count.max() and int(count.sum()) <= 3 * 40  # repeats within a batch are one visit
    with pytest.raises(ValueError, match="the position is of other shards"):
        recipe.main(arguments(given, tmp_path / "stopped", *more[1:], "--resume"))


def test_no_state_is_not_enough(given):  # noqa: F811
    with pytest.raises(SystemExit, match="--keep must be at least 1, got 0"):
        parsed(given, "--keep", "0")
