"""``compopt.integrations.transformers``: the Trainer's runs are the plain loop's; rows in its checkpoints."""

import contextlib
import os
import shutil
import types
import warnings
from pathlib import Path

import pytest
import torch

import compopt
from compopt.estimator import forgotten
from tests.pool import the_pool
from tests.trainers import SKIPPED, UPDATES, Items, estimator, plain_loop, same, spoil
from tests.training import MICRO, WINDOW, Encoders, N, rows, weights

pytest.importorskip("transformers")


@contextlib.contextmanager
def trainer(folder, est=None, dtype=torch.float64, callback=True, scaler=None, data=None, callbacks=(), **options):
    """A Trainer whose batches are the plain loop's; accelerate's singletons are fresh afterwards."""
    from accelerate.state import AcceleratorState, GradientState, PartialState
    from transformers import Trainer, TrainingArguments

    from compopt.integrations.transformers import EstimatorCallback

    class DualEncoderTrainer(Trainer):
        def create_accelerator_and_postprocess(self):
            super().create_accelerator_and_postprocess()
            if scaler is not None:  # on a CPU accelerate makes none
                self.accelerator.scaler = scaler

        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            return self.est(*model(inputs["x1"], inputs["x2"]), inputs["index"])

    ranks = int(os.environ.get("WORLD_SIZE", 1))
    defaults = dict(
        use_cpu=True, per_device_train_batch_size=MICRO // ranks, gradient_accumulation_steps=WINDOW, save_steps=1,
        num_train_epochs=1, max_grad_norm=0.0, lr_scheduler_type="constant", train_sampling_strategy="sequential",
        remove_unused_columns=False, dataloader_drop_last=True, dataloader_pin_memory=False, report_to=[],
        logging_steps=1, disable_tqdm=True, seed=0,
    )  # fmt: skip
    try:
        args = TrainingArguments(str(folder), **{**defaults, **options})
        model = Encoders(dtype)
        optimizer = torch.optim.AdamW(model.groups(), lr=1e-2)
        data = data or Items(dtype=dtype)
        made = DualEncoderTrainer(model, args, None, data, data, optimizers=(optimizer, None), callbacks=[*callbacks])
        made.est = estimator(dtype) if est is None else est
        if callback:
            made.add_callback(EstimatorCallback(made.est, made, **(callback if isinstance(callback, dict) else {})))
        yield made
    finally:
        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()


def result(made):
    return weights(made.accelerator.unwrap_model(made.model)), rows(made.est)


def whole(folder, **options):
    """A run in one go, with a checkpoint after each update; -> weights and rows, number of commits."""
    with trainer(folder, **options) as made:
        made.train()
        return result(made), made.est.t


def resumed(folder, step, est=None, **options):
    """The same run from a checkpoint on; -> what `whole` returns, and how many commits were loaded."""
    from transformers import TrainerCallback

    loaded = []

    class Look(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            loaded.append(made.est.t)

    with trainer(folder, est, callbacks=[Look()], **options) as made:
        made.train(resume_from_checkpoint=step if isinstance(step, bool) else f"{folder}/checkpoint-{step}")
        return result(made), made.est.t, loaded[0] if loaded else None


# one process --------------------------------------------------------------------------------------


def test_the_run_is_the_plain_loop_s(tmp_path):
    found, commits = whole(tmp_path)
    assert commits == UPDATES and same(found, plain_loop())


def test_bf16(tmp_path):
    found, commits = whole(tmp_path, dtype=torch.float32, bf16=True)
    assert commits == UPDATES and same(found, plain_loop(dtype=torch.float32, precision=torch.bfloat16))


def spoiler():
    """A callback that makes one update overflow."""
    from transformers import TrainerCallback

    class Spoil(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
            if state.global_step in SKIPPED:
                spoil(model)

    return Spoil()


@pytest.mark.parametrize("fused", [False, True])
def test_a_skipped_step_commits_nothing(tmp_path, fused):
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1000)
    with trainer(tmp_path, scaler=scaler, callbacks=[spoiler()]) as made:
        made.optimizer.defaults["fused"] = fused
        for group in made.optimizer.param_groups:
            group["fused"] = fused
        made.optimizer._step_supports_amp_scaling = fused
        made.train()
        found, commits = result(made), made.est.t
    assert commits == UPDATES - len(SKIPPED)
    for a, b in zip(found, plain_loop(skipped=SKIPPED), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("step", [1, 2, True])
def test_a_resumed_run_ends_as_the_whole_one(tmp_path, step):
    expected, _ = whole(tmp_path)
    if step is True:  # the newest
        for number in (3, 4):
            shutil.rmtree(tmp_path / f"checkpoint-{number}")
    found, commits, loaded = resumed(tmp_path, step)
    assert same(found, expected) and (commits, loaded) == (UPDATES, 2 if step is True else step)


@pytest.mark.parametrize("limit", [1, 2])
def test_rows_go_with_the_checkpoints_that_are_removed(tmp_path, limit):
    expected, _ = whole(tmp_path, save_total_limit=limit)
    kept = [f"checkpoint-{step}" for step in range(UPDATES - limit + 1, UPDATES + 1)]
    assert sorted(os.listdir(tmp_path)) == kept
    for name in kept:
        est = estimator()
        compopt.load(est, tmp_path / name / "compopt")
        assert est.t == int(name.split("-")[1])
    assert torch.equal(rows(est), expected[1])


def test_the_best_model_has_its_rows(tmp_path):
    options = dict(eval_strategy="steps", eval_steps=1, load_best_model_at_end=True, metric_for_best_model="loss")
    with trainer(tmp_path, greater_is_better=False, **options) as made:
        made.evaluate = lambda **_: {"eval_loss": 1.0 if made.state.global_step == 2 else 2.0}
        made.train()
        assert made.state.best_model_checkpoint.endswith("checkpoint-2")
        assert made.est.t == 2 and same(result(made), plain_loop(updates=2))


# bad input ----------------------------------------------------------------------------------------


def test_a_checkpoint_without_rows_is_refused(tmp_path):
    whole(tmp_path, callback=False)
    with pytest.raises(FileNotFoundError, match=r"checkpoint-2 has no rows in compopt/.*without EstimatorCallback"):
        resumed(tmp_path, 2)


def test_rows_that_were_being_written_are_refused(tmp_path):
    whole(tmp_path)
    (saved,) = (tmp_path / "checkpoint-2" / "compopt").iterdir()
    (saved / "manifest.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"checkpoint-2 has no rows in compopt/.*killed"):
        resumed(tmp_path, 2)


def test_a_checkpoint_of_another_run_is_not_mistaken_for_this_one(tmp_path):
    """Both folders have a checkpoint-2; the Trainer resumes from the other one."""
    first, second = tmp_path / "first", tmp_path / "second"
    expected, _ = whole(first)
    whole(second, learning_rate=1.0, data=Items(updates=2 * UPDATES))
    with trainer(second) as made, pytest.raises(FileNotFoundError, match="resume_from="):
        made.train(resume_from_checkpoint=str(first / "checkpoint-2"))
    for options in (dict(callback={"resume_from": first / "checkpoint-2"}),
                    dict(resume_from_checkpoint=str(first / "checkpoint-2"))):  # fmt: skip
        with trainer(second, **options) as made:
            made.train(resume_from_checkpoint=str(first / "checkpoint-2"))
            assert same(result(made), expected)


def test_a_hyper_parameter_search_is_refused(tmp_path):
    with trainer(tmp_path) as made:
        (callback,) = (each for each in made.callback_handler.callbacks if hasattr(each, "est"))
        with pytest.raises(ValueError, match="search"):
            callback.on_train_begin(made.args, types.SimpleNamespace(is_hyper_param_search=True), None)


def test_a_loss_that_nobody_commits_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(forgotten, "PATIENCE", 6)
    monkeypatch.setattr(forgotten, "PATIENCE_GONE", 6)
    for callback, count in ((False, 1), (True, 0)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            whole(tmp_path / str(count), callback=callback)
        said = [str(each.message) for each in caught if "was committed" in str(each.message)]
        assert len(said) == count and all("EstimatorCallback" in each for each in said)


# several processes --------------------------------------------------------------------------------


def two_ranks(group, folder, shard):
    found, commits = whole(folder, est=estimator(shard=shard))
    again = resumed(folder, 2, est=estimator(shard=shard))
    return found, commits, plain_loop(shard=shard), again


@pytest.mark.distributed
@pytest.mark.parametrize("shard", [False, True])
def test_two_ranks(tmp_path, shard):
    for found, commits, plain, (again, commits_again, loaded) in the_pool(2, 120).run(
        two_ranks, 2, str(tmp_path), shard
    ):
        assert commits == commits_again == UPDATES and loaded == 2
        assert same(found, plain) and same(again, found)


def refused_on_two_ranks(group, folder):
    with trainer(folder, dataloader_drop_last=False) as made, pytest.raises(ValueError) as caught:
        made.train()
    return str(caught.value)


@pytest.mark.distributed
def test_a_last_batch_that_is_kept_is_refused_on_several_ranks(tmp_path):
    for message in the_pool(2, 120).run(refused_on_two_ranks, 2, str(tmp_path)):
        assert "dataloader_drop_last=True" in message
    whole(tmp_path / "alone", dataloader_drop_last=False)
