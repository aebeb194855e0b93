"""The loss: it equals open_clip's own where both agree, and that of one big batch if a window is accumulated."""

import math

import pytest
import torch

from tests.open_clip import tiny


def run(ours, folder, data, **changed):
    ours = None if ours is None else ["--estimator", *ours.split()]
    return tiny.train(ours, tiny.arguments(folder, train_data=data, **changed))


@pytest.mark.parametrize("accumulated", [False, True])
def test_infonce_at_the_models_temperature_is_open_clips_own_loss(tmp_path, data, accumulated):
    """Compare all gradients of all updates, including the scale's. open_clip's accumulation is one big batch too."""
    theirs = run(None, tmp_path, data, name="theirs", epochs=3)
    shape = {"batch_size": 4, "accum_freq": 2} if accumulated else {}
    ours = run("clip", tmp_path, data, name="ours", epochs=3, **shape)
    assert len(ours.gradients) == len(theirs.gradients) == 6
    tiny.assert_alike(ours.gradients[0], theirs.gradients[0], 1e-5)
    assert "logit_scale" in ours.gradients[0]
    for one, other in zip(ours.gradients, theirs.gradients, strict=True):
        tiny.assert_alike(one, other, 1e-3)  # Adam amplifies rounding
    tiny.assert_alike(ours.weights, theirs.weights, 2e-4)


@pytest.mark.parametrize(
    "ours",
    ["sogclr --gamma 0.5", "clip", "isogclr --rho 1 --tau-init 0.1"],
)
@pytest.mark.parametrize("batches", [2, 4])
def test_accumulation_is_one_big_batch(tmp_path, data, ours, batches):
    whole = run(ours, tmp_path, data, name="whole", epochs=3)
    parts = run(ours, tmp_path, data, name="parts", epochs=3, batch_size=8 // batches, accum_freq=batches)
    assert whole.updates == parts.updates == 6
    assert whole.est.t == parts.est.t == (0 if "clip" in ours else 6)  # one commit for each update
    for one, other in zip(parts.gradients, whole.gradients, strict=True):
        tiny.assert_alike(one, other, 1e-4)
    tiny.assert_alike(parts.weights, whole.weights, 1e-3)
    if whole.est.n is not None:
        tiny.assert_alike(parts.rows(), whole.rows(), 1e-3)
        assert (parts.rows()["count"] == 3).all()  # once in each epoch


def test_an_unfinished_window_is_forgotten(tmp_path, data):
    """16 samples are 5 batches of 3, two windows and a batch that open_clip drops at the end of an epoch."""
    watch = run("sogclr", tmp_path, data, epochs=2, batch_size=3, accum_freq=2)
    assert watch.updates == watch.est.t == 4
    assert watch.rows()["count"].sum() == 4 * 6


@pytest.mark.parametrize("ours, shown", [("dcl --tau 0.05", 0.05), ("sogclr --tau 0.2", 0.2)])
def test_a_constant_temperature_is_the_models_scale(tmp_path, data, ours, shown):
    """The scale is frozen, so that evaluation and the checkpoint have the temperature of training."""
    watch = run(ours, tmp_path, data)
    saved = tiny.checkpoint(tmp_path)["state_dict"]["logit_scale"]
    assert saved.item() == pytest.approx(math.log(1 / shown)) and not watch.model.logit_scale.requires_grad


@pytest.mark.parametrize("ours", ["isogclr --rho 1 --tau-init 0.1", "fastclip-v0 --lr 0.01", "fastclip-v3 --rho 1"])
def test_a_temperature_that_the_estimator_learns_is_shown(tmp_path, data, ours):
    watch = run(ours, tmp_path, data, epochs=2)
    tau = watch.est.metrics["tau_median"].item()
    assert watch.model.logit_scale.item() == pytest.approx(math.log(1 / tau), rel=1e-5)
    assert tau != pytest.approx(0.1 if "isogclr" in ours else 0.07, rel=1e-9)


@pytest.mark.parametrize(
    "ours", ["dcl", "infonce --tau model", "memory", "neuclip --prototypes 16 --updates 2", "recommended"]
)
def test_methods_without_rows_need_no_index(tmp_path, ours):
    """The methods run on any data that open_clip reads; its loader is not changed."""
    watch = run(ours, tmp_path, None, dataset_type="synthetic", train_num_samples=16, epochs=2)
    assert watch.updates == 4 and not watch.seen and watch.est.n is None
    assert all(torch.isfinite(value).all() for value in watch.weights.values())


def test_evaluation_and_logs_go_on(tmp_path, data, caplog, monkeypatch):
    """open_clip's evaluation and logs still work, and the estimator's metrics are added to them."""
    import open_clip_train.main as trainer

    written = {}

    class Writer:
        def __init__(self, path): ...

        def add_scalar(self, name, value, step):
            written.setdefault(name, []).append((step, value))

    monkeypatch.setattr(trainer, "tensorboard", type("tensorboard", (), {"SummaryWriter": Writer}))
    caplog.set_level("INFO")
    unused = {"local_loss": True, "gather_with_grad": True}
    watch = run("emc2", tmp_path, data, name="emc2", epochs=2, **unused)
    assert (watch.rows()["count"] == 2).all()
    assert sum("--local-loss and --gather-with-grad change nothing" in line for line in caplog.messages) == 1
    caplog.clear()
    run("sogclr", tmp_path, data, epochs=2, val_data=data, report_to="tensorboard")
    assert [step for step, _ in written["train/effective_negatives"]] == [0, 1, 2, 3]
    assert [step for step, value in written["train/info_nce"] if value > 0] == [0, 1, 2, 3]
    assert [step for step, _ in written["train/loss"]] == [0, 1, 2, 3]
    assert written["train/new_rows"][0][1] == 8 and written["train/new_rows"][-1][1] == 0
    assert len((tmp_path / "logs" / "run" / "checkpoints" / "results.jsonl").read_text().splitlines()) == 2
    assert sum("Estimator: log_normalizer" in message for message in caplog.messages) == 4
