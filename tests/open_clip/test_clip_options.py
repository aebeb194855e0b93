"""Options of recipes/clip_trainer.py that open_clip's trainer has too, and their effects."""

import json
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("open_clip")

import compopt
from recipes import clip_trainer as recipe
from tests.open_clip.data import write_model, write_pairs
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


def test_patches_sizes_and_augmentation(given):  # noqa: F811
    model, _, transform = trained_parts(
        given, "--force-patch-dropout", "0.5", "--force-image-size", "32", "--aug-cfg", "scale=(0.3,0.4)"
    )
    assert model.visual.patch_dropout.prob == 0.5 and model.visual.image_size == (32, 32)
    assert transform.transforms[0].scale == (0.3, 0.4)
    plain, _, transform = trained_parts(given)
    assert plain.visual.image_size == (16, 16) and transform.transforms[0].scale != (0.3, 0.4)


@pytest.mark.parametrize("cache", [(), ("--accumulate", "2", "--gradient-cache")])
def test_patch_dropout_is_the_same_after_a_resume(given, tmp_path, cache):  # noqa: F811
    more = ("--force-patch-dropout", "0.5", *cache)
    train(given, tmp_path / "whole", *more)
    train(given, tmp_path / "stopped", *more, "--max-steps", "3")
    train(given, tmp_path / "stopped", *more, "--resume")
    same(weights(tmp_path / "stopped"), weights(tmp_path / "whole"))
    train(given, tmp_path / "without", *cache)
    assert not torch.equal(weights(tmp_path / "without")["visual.proj"], weights(tmp_path / "whole")["visual.proj"])


def test_optimizer_and_compiled_model(given, tmp_path):  # noqa: F811
    train(given, tmp_path / "eager", "--epochs", "1", "--beta1", "0.8", "--beta2", "0.9", "--eps", "1e-3")
    more = ("--beta1", "0.8", "--beta2", "0.9", "--eps", "1e-3", "--compile", "eager")
    train(given, tmp_path / "compiled", "--epochs", "1", *more)
    same(weights(tmp_path / "compiled", 1), weights(tmp_path / "eager", 1))
    train(given, tmp_path / "default", "--epochs", "1")
    eager, default = (weights(tmp_path / name, 1)["visual.proj"] for name in ("eager", "default"))
    assert not torch.equal(eager, default)


def test_float8(given, tmp_path):  # noqa: F811
    """float8, emulated on a CPU, changes layers of both towers but no parameter names; features are near float32's."""
    pytest.importorskip("torchao")
    torch.manual_seed(0)
    plain, _, _ = trained_parts(given)
    torch.manual_seed(0)
    built, _, _ = trained_parts(given, "--float8")
    changed = {name for name, module in built.named_modules() if type(module).__name__ == "Float8Linear"}
    assert any(name.startswith("visual.") for name in changed) and any("visual" not in name for name in changed)
    assert not any(name.endswith("out_proj") for name in changed)  # its weight is read without a call
    images = torch.randn(8, 3, 16, 16)
    one, other = (m.eval().encode_image(images, normalize=True) for m in (plain, built))
    assert not torch.equal(one, other)
    torch.testing.assert_close(one, other, atol=0.05, rtol=0)
    train(given, tmp_path / "out", "--epochs", "1", "--float8")
    plain.load_state_dict(weights(tmp_path / "out", 1))


def test_batch_normalisation_over_all_processes(tmp_path):
    resnet = {"vision_cfg": {"image_size": 32, "layers": [1, 1, 1, 1], "width": 8, "head_width": 8}}
    model = write_model(tmp_path, "micro-resnet", **resnet)
    built, _, _ = trained_parts(("x", model), "--use-bn-sync")
    kinds = {type(module).__name__ for module in built.modules()}
    assert "SyncBatchNorm" in kinds and "BatchNorm2d" not in kinds


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


@pytest.mark.launch
def test_a_static_graph_changes_nothing(given, tmp_path):  # noqa: F811
    ways = {"plain": (), "cached": ("--accumulate", "2", "--gradient-cache")}
    runs = [
        arguments(given, tmp_path / f"{way}{graph}", "--epochs", "1", "--batch-size", "2", *ways[way], *graph.split())
        for way in ways
        for graph in ("", " --ddp-static-graph")
    ]
    started(2, "tests.several", "recipes.clip_trainer", json.dumps(runs))
    for way, tolerance in (("plain", 0.0), ("cached", 1e-4)):  # the first cached window is reduced in two parts
        for found in (weights, rows):
            one, other = found(tmp_path / f"{way} --ddp-static-graph", 1), found(tmp_path / way, 1)
            torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)
