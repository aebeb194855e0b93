"""``compopt.integrations.transformers``: the Trainer's runs are the plain loop's; rows in its checkpoints."""

import contextlib
import importlib
import os
import shutil
import sys
import types
import warnings

import pytest
import torch

import compopt
from tests.pool import the_pool
from tests.trainers import SKIPPED, UPDATES, Items, estimator, plain_loop, same, spoil
from tests.training import MICRO, WINDOW, Encoders, rows, weights

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
            loss = self.est(*model(inputs["x1"], inputs["x2"]), inputs["index"])
            return loss * getattr(self.model, "scale", 1.0)

    ranks = int(os.environ.get("WORLD_SIZE", 1))
    defaults = {
        "use_cpu": True, "per_device_train_batch_size": MICRO // ranks, "gradient_accumulation_steps": WINDOW,
        "save_steps": 1, "num_train_epochs": 1, "max_grad_norm": 0.0, "lr_scheduler_type": "constant",
        "train_sampling_strategy": "sequential", "remove_unused_columns": False, "dataloader_drop_last": True,
        "dataloader_pin_memory": False, "report_to": [], "logging_steps": 1, "disable_tqdm": True,
        "optim": "adamw_torch", "learning_rate": 1e-2, "weight_decay": 0.01,
    }  # fmt: skip
    try:
        args = TrainingArguments(str(folder), **{**defaults, **options})
        model = Encoders(dtype)  # weight decay for its weights, as Encoders.groups() has it
        data = data or Items(dtype=dtype)
        made = DualEncoderTrainer(model, args, train_dataset=data, eval_dataset=data, callbacks=[*callbacks])
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


def resumed(folder, step, est=None, callbacks=(), **options):
    """The same run from a checkpoint on; -> what `whole` returns, and how many commits were loaded."""
    from transformers import TrainerCallback

    loaded = []

    class Look(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            loaded.append(made.est.t)

    with trainer(folder, est, callbacks=[Look(), *callbacks], **options) as made:
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
    optim = "adamw_torch_fused" if fused else "adamw_torch"  # the former is the Trainer's own choice
    with trainer(tmp_path, scaler=scaler, callbacks=[spoiler()], optim=optim) as made:
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
    options = {"eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": "loss", "greater_is_better": False}
    with trainer(tmp_path, load_best_model_at_end=True, **options) as made:
        made.evaluate = lambda **_: {"eval_loss": 1.0 if made.state.global_step == 2 else 2.0}
        made.train()
        assert made.state.best_model_checkpoint.endswith("checkpoint-2")
        assert made.est.t == 2 and same(result(made), plain_loop(updates=2))


def test_several_estimators(tmp_path):
    from compopt.integrations.transformers import EstimatorCallback

    results = []
    for checkpoint in (None, str(tmp_path / "checkpoint-2")):
        with trainer(tmp_path, callback=False) as made:
            first, second = estimator(), estimator()
            made.est = lambda z1, z2, index, one=first, two=second: one(z1, z2, index) + two(z2, z1, index)
            made.add_callback(EstimatorCallback(first, made))
            made.add_callback(EstimatorCallback(second, made, name="second"))
            made.train(resume_from_checkpoint=checkpoint)
            assert first.t == second.t == UPDATES
            results.append((weights(made.model), rows(first), rows(second)))
    assert same(*results) and not torch.equal(results[0][1], results[0][2])


def test_one_callback_for_several_estimators(tmp_path):
    """transformers warns of a second callback of one class; the rows of each estimator have a folder."""
    from compopt.integrations.transformers import EstimatorCallback

    results = []
    for checkpoint in (None, str(tmp_path / "checkpoint-2")):
        with trainer(tmp_path, callback=False) as made:
            first, second = estimator(), estimator()
            made.est = lambda z1, z2, index, one=first, two=second: one(z1, z2, index) + two(z2, z1, index)
            made.add_callback(EstimatorCallback({"first": first, 2: second}, made))
            made.train(resume_from_checkpoint=checkpoint)
            assert first.t == second.t == UPDATES
            results.append((weights(made.model), rows(first), rows(second)))
            shown = {name for entry in made.state.log_history for name in entry if "info_nce" in name}
            assert shown == {"first/info_nce", "2/info_nce"}
    assert same(*results) and not torch.equal(results[0][1], results[0][2])
    assert all((tmp_path / "checkpoint-3" / "compopt" / name).is_dir() for name in ("first", "2"))


def test_the_cross_entropy_is_logged_as_often_as_the_loss(tmp_path):
    with trainer(tmp_path, logging_steps=2) as made:
        made.train()
        logged = {entry["step"]: entry["info_nce"] for entry in made.state.log_history if "info_nce" in entry}
        assert list(logged) == [entry["step"] for entry in made.state.log_history if "loss" in entry] == [2, 4]
        assert logged[4] == made.est.metrics["info_nce"].item()


def travelling(made):
    """Let the state travel with the optimizer, as a subclass of the Trainer does."""
    create = made.create_optimizer

    def create_optimizer(*args):
        made.est.attach(create(*args), checkpoint=True)
        return made.optimizer

    made.create_optimizer = create_optimizer


@pytest.mark.parametrize("callback", [False, True])
def test_rows_travel_with_the_optimizer(tmp_path, callback):
    """Attached when the optimizer is made, before the Trainer loads it."""
    with trainer(tmp_path, callback=callback) as made:
        travelling(made)
        made.train()
        expected = result(made)
    assert same(expected, plain_loop())
    with trainer(tmp_path, callback=callback) as made:
        travelling(made)
        made.train(resume_from_checkpoint=f"{tmp_path}/checkpoint-2")
        assert made.est.t == UPDATES and same(result(made), expected)
    for step in (1, 2):
        assert torch.load(tmp_path / f"checkpoint-{step}" / "optimizer.pt", weights_only=True)["compopt"]["t"] == step


def test_rows_that_travel_are_missed_where_the_optimizer_was_loaded_before(tmp_path):
    from transformers import TrainerCallback

    class Late(TrainerCallback):
        def on_train_begin(self, args, state, control, optimizer=None, **kwargs):
            made.est.attach(optimizer, checkpoint=True)

    with trainer(tmp_path, callback=False) as made:
        travelling(made)
        made.train()
    with (
        trainer(tmp_path, callback=False, callbacks=[Late()]) as made,
        pytest.warns(UserWarning, match="loaded before attach"),
    ):
        made.train(resume_from_checkpoint=f"{tmp_path}/checkpoint-2")


# accumulation -------------------------------------------------------------------------------------


class Anything(Encoders):
    """Takes what it does not know, as CLIPModel does; its own loss, where it is asked for one."""

    est = None

    def forward(self, x1, x2, index=None, labels=None, **kwargs):
        features = super().forward(x1, x2)
        return (self.est(*features),) if self.est else features


def step_of(folder, accumulated, key, how):
    """Weights after one update, whose micro-batches are all the same one."""
    from accelerate.state import AcceleratorState, GradientState, PartialState
    from transformers import Trainer, TrainingArguments

    from compopt.integrations.transformers import EstimatorCallback

    est, model = compopt.DCLEstimator(tau=0.5), Anything(torch.float64)
    batch = Items(1, 1).items
    data = [{"x1": item["x1"], "x2": item["x2"], key: item["index"]} for item in batch * accumulated]

    class Contrastive(Trainer):
        loss_is_scaled_for_ga = False if how == "the class" else None

        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            return est(*model(**inputs), inputs[key])

    options = {
        "use_cpu": True, "per_device_train_batch_size": len(batch), "gradient_accumulation_steps": accumulated,
        "num_train_epochs": 1, "max_grad_norm": 0.0, "lr_scheduler_type": "constant", "save_strategy": "no",
        "train_sampling_strategy": "sequential", "dataloader_pin_memory": False, "report_to": [],
        "disable_tqdm": True, "optim": "sgd", "learning_rate": 1.0, "label_names": [],
        "remove_unused_columns": key == "index",
    }  # fmt: skip
    try:
        args = TrainingArguments(str(folder), **options)
        if how == "compute_loss_func":
            loss = {"compute_loss_func": lambda outputs, labels, num_items_in_batch: est(*outputs)}
            made = Trainer(model, args, train_dataset=data, **loss)
        elif how == "the model":
            model.est = est
            made = Trainer(model, args, train_dataset=data)
        else:
            made = Contrastive(model, args, train_dataset=data)
        if how != "the class":
            made.add_callback(EstimatorCallback(est, made))
        made.train()
        return weights(made.model)
    finally:
        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()


@pytest.mark.parametrize("how", ["the class", "the callback", "compute_loss_func", "the model"])
@pytest.mark.parametrize("key", ["labels", "index"])
@pytest.mark.parametrize("accumulated", [1, 2])
def test_the_size_of_a_step(tmp_path, accumulated, key, how):
    """Whatever the name of the index, and whoever says that the loss is the mean of a batch."""
    model = Encoders(torch.float64)
    x1, x2, _ = (torch.stack([item[name] for item in Items(1, 1).items]) for name in ("x1", "x2", "index"))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    compopt.DCLEstimator(tau=0.5)(*model(x1, x2)).backward()
    optimizer.step()
    torch.testing.assert_close(step_of(tmp_path, accumulated, key, how), weights(model), rtol=1e-12, atol=1e-12)


def test_a_loss_that_was_scaled_by_the_user_stays_so(tmp_path):
    with trainer(tmp_path) as made:
        made.loss_is_scaled_for_ga, made.model_accepts_loss_kwargs = True, True
        made.train()
        assert made.loss_is_scaled_for_ga and made.model_accepts_loss_kwargs


# bad input ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({}, ValueError, "names a folder"),
        ({"../up": None}, ValueError, "names a folder"),
        ({1: None, "1": None}, ValueError, "names a folder"),
        ({"first": None}, TypeError, "compopt/first.*NoneType"),
        (torch.nn.Linear(1, 1), TypeError, "compopt: est must be an estimator.*Linear"),
    ],
)
def test_what_is_no_estimator_is_refused_at_once(given, error, words):
    from compopt.integrations.transformers import EstimatorCallback

    with pytest.raises(error, match=words):
        EstimatorCallback(given, None)


def test_a_checkpoint_without_rows_is_refused(tmp_path):
    whole(tmp_path, callback=False)
    with pytest.raises(FileNotFoundError, match=r"checkpoint-2/compopt is not there.*without EstimatorCallback"):
        resumed(tmp_path, 2)


def test_rows_that_were_being_written_are_refused(tmp_path):
    whole(tmp_path)
    (saved,) = (tmp_path / "checkpoint-2" / "compopt").iterdir()
    (saved / "manifest.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"checkpoint-2/compopt.*killed"):
        resumed(tmp_path, 2)


def test_a_checkpoint_of_another_run_is_not_mistaken_for_this_one(tmp_path):
    """Both folders have a checkpoint-2; the Trainer resumes from the other one."""
    first, second = tmp_path / "first", tmp_path / "second"
    expected, _ = whole(first)
    whole(second, learning_rate=1e-3, data=Items(updates=2 * UPDATES))
    with trainer(second) as made, pytest.raises(FileNotFoundError, match="resume_from="):
        made.train(resume_from_checkpoint=str(first / "checkpoint-2"))
    there = str(first / "checkpoint-2")
    for options in ({"callback": {"resume_from": there}}, {"resume_from_checkpoint": there}):
        with trainer(second, **options) as made:
            made.train(resume_from_checkpoint=there)
            assert same(result(made), expected)


def test_a_hyper_parameter_search_is_refused(tmp_path):
    with trainer(tmp_path) as made:
        (callback,) = (each for each in made.callback_handler.callbacks if hasattr(each, "est"))
        with pytest.raises(ValueError, match="search"):
            callback.on_train_begin(made.args, types.SimpleNamespace(is_hyper_param_search=True), None)


def test_a_loss_that_nobody_commits_is_told(tmp_path):
    """After three updates."""
    for callback, count in ((False, 1), (True, 0)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            whole(tmp_path / str(count), callback=callback)
        said = [str(each.message) for each in caught if "was committed" in str(each.message)]
        assert len(said) == count and all("3 updates" in each and "EstimatorCallback" in each for each in said)


def test_the_package_is_asked_for(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "compopt.integrations.transformers", raising=False)
    with pytest.raises(ImportError, match=r"\.\[transformers\]"):
        importlib.import_module("compopt.integrations.transformers")


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


def travelling_on_two_ranks(group, folder):
    """Rank 0 writes the optimizer; the rows of all ranks are in it. What is split is refused."""
    found = []
    for checkpoint in (None, f"{folder}/checkpoint-2"):
        with trainer(folder, callback=False) as made:
            travelling(made)
            made.train(resume_from_checkpoint=checkpoint)
            found.append(result(made))
    with pytest.raises(ValueError, match="ranks hold different parts of it"):
        estimator(shard=True).attach(made.optimizer, checkpoint=True)
    return (*found, plain_loop())


@pytest.mark.distributed
def test_rows_travel_with_the_optimizer_on_two_ranks(tmp_path):
    for found, again, plain in the_pool(2, 120).run(travelling_on_two_ranks, 2, str(tmp_path)):
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


# DeepSpeed ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def deepspeed_on_the_cpu(bf16):
    """The Trainer uses DeepSpeed on accelerators only, unless it finds accelerate set up for it."""
    from accelerate import PartialState
    from transformers import training_args

    PartialState._reset_state()
    with pytest.MonkeyPatch.context() as patch:
        for key, value in {"DS_ACCELERATOR": "cpu", "ACCELERATE_USE_DEEPSPEED": "true"}.items():
            patch.setenv(key, value)
        patch.setattr(training_args, "is_torch_bf16_gpu_available", lambda: True)
        PartialState(backend="gloo")
        config = {
            "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
            "bf16": {"enabled": "auto"}, "zero_optimization": {"stage": 2}, "steps_per_print": 10**9,
        }  # fmt: skip
        state = {"use_configured_state": True}
        yield {"use_cpu": False, "deepspeed": config, "accelerator_config": state, "bf16": bf16, "dtype": torch.float32}


def overflow():
    """A callback that makes the loss of one update infinite on one rank."""
    from transformers import TrainerCallback

    class Overflow(TrainerCallback):
        def on_step_begin(self, args, state, control, model=None, **kwargs):
            bad = state.global_step in SKIPPED and torch.distributed.get_rank() == 0
            model.scale = torch.inf if bad else 1.0

    return Overflow()


def zero_two(group, folder, bf16):
    """In one go, and from each checkpoint on; with bf16 the second update overflows."""
    runs = []
    for step in (None, 1, 2, 3):
        with deepspeed_on_the_cpu(bf16) as options:
            options["callbacks"] = [overflow()] if bf16 else []
            runs.append(whole(folder, **options) if step is None else resumed(folder, step, **options)[:2])
    return runs


@pytest.mark.launch
@pytest.mark.distributed
@pytest.mark.usefixtures("deepspeed_compiled")
@pytest.mark.parametrize("bf16", [False, True])
def test_deepspeed_zero_two(tmp_path, bf16):
    pytest.importorskip("deepspeed")
    expected = plain_loop(dtype=torch.float32)
    for (found, commits), *again in the_pool(2, 120).run(zero_two, 2, str(tmp_path), bf16):
        assert commits == UPDATES - (len(SKIPPED) if bf16 else 0)
        assert all(same(each, found) and count == commits for each, count in again)
        for a, b in zip(found, expected, strict=True):
            assert bf16 or torch.allclose(a, b, rtol=1e-4, atol=1e-4)
