"""``compopt.integrations.transformers``: the Trainer's runs equal the plain loop's; checkpoints include the rows."""

import contextlib
import os
import shutil
import types
import warnings
from importlib.util import find_spec

import numpy as np
import pytest
import torch

import compopt
from tests.pool import the_pool
from tests.trainers import SKIPPED, UPDATES, Items, estimator, fresh_accelerate, placed, plain_loop, same, spoil
from tests.training import MICRO, WINDOW, Encoders, N, rows, weights

pytestmark = pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers")


def callback(*args, **options):
    from compopt.integrations.transformers import EstimatorCallback

    return EstimatorCallback(*args, **options)


@contextlib.contextmanager
def trainer(
    folder, est=None, dtype=torch.float64, own=None, scaler=None, data=None, events=None, shard=False, **options
):
    """Yield a Trainer with the plain loop's batches. ``own``: options of the callback, or ``False`` for no callback."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class DualEncoderTrainer(Trainer):
        def create_accelerator_and_postprocess(self):
            super().create_accelerator_and_postprocess()
            if scaler is not None:  # accelerate makes none on a CPU
                self.accelerator.scaler = scaler

        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            loss = self.est(*model(inputs["x1"], inputs["x2"]), inputs["index"])
            return loss * getattr(self.model, "scale", 1.0)

    defaults = {
        "use_cpu": True, "per_device_train_batch_size": MICRO // int(os.environ.get("WORLD_SIZE", 1)),
        "gradient_accumulation_steps": WINDOW, "save_steps": 1, "num_train_epochs": 1, "max_grad_norm": 0.0,
        "lr_scheduler_type": "constant", "train_sampling_strategy": "sequential", "remove_unused_columns": False,
        "dataloader_drop_last": True, "dataloader_pin_memory": False, "report_to": [], "logging_steps": 1,
        "disable_tqdm": True, "optim": "adamw_torch", "learning_rate": 1e-2, "weight_decay": 0.01,
    }  # fmt: skip
    with fresh_accelerate():
        args = TrainingArguments(str(folder), **{**defaults, **options})
        data = data or Items(dtype=dtype)
        events = [type("Event", (TrainerCallback,), {name: staticmethod(f)})() for name, f in (events or {}).items()]
        made = DualEncoderTrainer(Encoders(dtype), args, train_dataset=data, eval_dataset=data, callbacks=events)
        made.est = estimator(dtype, shard=shard) if est is None else est
        if own is not False:
            made.add_callback(callback(made.est, made, **(own or {})))
        yield made


def train(folder, resume=None, **options):
    """Train with a checkpoint after each update; return weights and rows, commits, and commits at the beginning."""
    begun = []
    events = {"on_step_begin": lambda *_, **__: begun.append(made.est.t), **options.pop("events", {})}
    with trainer(folder, events=events, **options) as made:
        made.train(resume_from_checkpoint=f"{folder}/checkpoint-{resume}" if type(resume) is int else resume)
        return (
            (weights(made.accelerator.unwrap_model(made.model)), rows(made.est)),
            made.est.t,
            begun[0] if begun else None,
        )


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Return the folder of a finished run, and its weights and rows."""
    folder = tmp_path_factory.mktemp("finished")
    found, commits, _ = train(folder)
    assert commits == UPDATES and same(found, plain_loop())
    return folder, found


# one process --------------------------------------------------------------------------------------


def test_bf16(tmp_path):
    found, commits, _ = train(tmp_path, dtype=torch.float32, bf16=True, save_strategy="no")
    assert commits == UPDATES and same(found, plain_loop(dtype=torch.float32, precision=torch.bfloat16))


def overflow(args, state, control, model=None, **kwargs):
    if state.global_step in SKIPPED:
        spoil(model)


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused"])  # the latter is the Trainer's own choice
def test_a_skipped_step_commits_nothing(tmp_path, optim):
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1000)
    events = {"on_pre_optimizer_step": overflow}
    found, commits, _ = train(tmp_path, scaler=scaler, events=events, optim=optim, save_strategy="no")
    assert commits == UPDATES - len(SKIPPED)
    torch.testing.assert_close(found, plain_loop(skipped=SKIPPED), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("step", [1, True])
def test_a_resumed_run_ends_as_the_whole_one(tmp_path, finished, step):
    """True resumes from the newest checkpoint, as after a run that was killed before it wrote the third."""
    ignored = shutil.ignore_patterns("checkpoint-3", "checkpoint-4")
    shutil.copytree(finished[0], tmp_path, dirs_exist_ok=True, ignore=ignored)
    found, commits, begun = train(tmp_path, resume=step)
    assert same(found, finished[1]) and (commits, begun) == (UPDATES, 2 if step is True else step)


def test_rows_go_with_the_checkpoints_that_are_removed(tmp_path):
    found, *_ = train(tmp_path, save_total_limit=1)
    assert os.listdir(tmp_path) == [f"checkpoint-{UPDATES}"]
    est = estimator()
    compopt.load(est, tmp_path / f"checkpoint-{UPDATES}" / "compopt")
    assert est.t == UPDATES and torch.equal(rows(est), found[1])


def test_the_best_model_has_its_rows(tmp_path):
    options = {"eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": "loss", "greater_is_better": False}
    with trainer(tmp_path, load_best_model_at_end=True, **options) as made:
        made.evaluate = lambda **_: {"eval_loss": 1.0 if made.state.global_step == 2 else 2.0}
        made.train()
        assert made.est.t == 2 and same((weights(made.model), rows(made.est)), plain_loop(updates=2))


def test_several_estimators(tmp_path):
    """Each estimator of a mapping has a folder and a line in the log."""
    results = []
    for checkpoint in (None, str(tmp_path / "checkpoint-2")):
        with trainer(tmp_path, own=False) as made:
            first, second = estimator(), estimator()
            made.est = lambda z1, z2, index, one=first, two=second: one(z1, z2, index) + two(z2, z1, index)
            made.add_callback(callback({"first": first, 2: second}, made))
            made.train(resume_from_checkpoint=checkpoint)
            assert first.t == second.t == UPDATES
            results.append((weights(made.model), rows(first), rows(second)))
            shown = {name for entry in made.state.log_history for name in entry if "info_nce" in name}
            assert shown == {"first/info_nce", "2/info_nce"}
    assert same(*results) and not torch.equal(results[0][1], results[0][2])
    assert all((tmp_path / "checkpoint-3" / folder).is_dir() for folder in ("compopt/first", "compopt/2"))


def test_a_score_keeper_is_saved_and_loaded_beside_its_estimator(tmp_path):
    results = []
    for checkpoint in (None, str(tmp_path / "checkpoint-2")):
        keeper = compopt.ScoreKeeper(N)
        with trainer(tmp_path, own=False) as made:
            handle = keeper.attach(made.est)
            made.add_callback(callback({"est": made.est, "scores": keeper}, made))
            made.train(resume_from_checkpoint=checkpoint)
            assert keeper.t == made.est.t == UPDATES
            results.append((weights(made.model), rows(made.est), rows(keeper)))
            handle.remove()
    assert same(*results)


def test_the_cross_entropy_is_logged_as_often_as_the_loss(tmp_path):
    with trainer(tmp_path, logging_steps=2, save_strategy="no") as made:
        made.train()
        logged = {entry["step"]: entry["info_nce"] for entry in made.state.log_history if "info_nce" in entry}
        assert list(logged) == [entry["step"] for entry in made.state.log_history if "loss" in entry] == [2, 4]
        assert logged[4] == made.est.metrics["info_nce"].item()


def travelling(folder, own=None, late=False, **options):
    """Train with the state in the optimizer's: attached when a subclass creates the optimizer, or too late."""

    def attach(args, state, control, optimizer, **kwargs):
        made.est.attach(optimizer, checkpoint=True)

    with trainer(folder, own=own, events={"on_train_begin": attach} if late else {}) as made:
        create = made.create_optimizer

        def create_optimizer(*args):
            made.est.attach(create(*args), checkpoint=True)
            return made.optimizer

        made.create_optimizer = create if late else create_optimizer
        made.train(**options)
        return (weights(made.accelerator.unwrap_model(made.model)), rows(made.est)), made.est.t


@pytest.mark.parametrize("own", [False, pytest.param(None, marks=pytest.mark.slow)])
def test_rows_travel_with_the_optimizer(tmp_path, own):
    whole, _ = travelling(tmp_path, own)
    again, commits = travelling(tmp_path, own, resume_from_checkpoint=f"{tmp_path}/checkpoint-2")
    assert commits == UPDATES and same(whole, plain_loop()) and same(again, whole)
    assert torch.load(tmp_path / "checkpoint-2" / "optimizer.pt", weights_only=True)["compopt"]["t"] == 2
    if own is False:
        with pytest.warns(UserWarning, match="loaded before attach"):
            travelling(tmp_path, own, late=True, resume_from_checkpoint=f"{tmp_path}/checkpoint-2")


# accumulation -------------------------------------------------------------------------------------


class Anything(Encoders):
    """A model that takes any keyword arguments, as CLIPModel does, and returns its own loss if it has an estimator."""

    est = None

    def forward(self, x1, x2, index=None, labels=None, **kwargs):
        features = super().forward(x1, x2)
        return (self.est(*features),) if self.est else features


@pytest.mark.covering()
@pytest.mark.parametrize("how", ["the class", "the callback", "compute_loss_func", "the model"])
@pytest.mark.parametrize("key", ["labels", "index"])
@pytest.mark.parametrize("accumulated", [1, 2])
def test_the_size_of_a_step(tmp_path, accumulated, key, how):
    """Make one update with equal micro-batches, for every way to declare that the loss is the mean of a batch."""
    from transformers import Trainer, TrainingArguments

    model, batch, est = Encoders(torch.float64), Items(1, 1).items, compopt.DCLEstimator(tau=0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    est(*model(*(torch.stack([item[name] for item in batch]) for name in ("x1", "x2")))).backward()
    optimizer.step()

    class Contrastive(Trainer):
        loss_is_scaled_for_ga = False if how == "the class" else None

        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            return est(*model(**inputs), inputs[key])

    data = [{"x1": item["x1"], "x2": item["x2"], key: item["index"]} for item in batch * accumulated]
    with fresh_accelerate():
        args = TrainingArguments(
            str(tmp_path), use_cpu=True, per_device_train_batch_size=len(batch), max_grad_norm=0.0, optim="sgd",
            gradient_accumulation_steps=accumulated, num_train_epochs=1, lr_scheduler_type="constant",
            save_strategy="no", train_sampling_strategy="sequential", dataloader_pin_memory=False, report_to=[],
            disable_tqdm=True, learning_rate=1.0, label_names=[], remove_unused_columns=key == "index",
        )  # fmt: skip
        trained, options = Anything(torch.float64), {}
        if how == "compute_loss_func":
            options["compute_loss_func"] = lambda outputs, labels, num_items_in_batch: est(*outputs)
        elif how == "the model":
            trained.est = est
        kind = Trainer if how in ("compute_loss_func", "the model") else Contrastive
        made = kind(trained, args, train_dataset=data, **options)
        if how != "the class":
            made.add_callback(callback(est, made))
        made.train()
    torch.testing.assert_close(weights(trained), weights(model), rtol=1e-12, atol=1e-12)


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
    with pytest.raises(error, match=words):
        callback(given, None)


@pytest.mark.parametrize("missing", ["compopt", "compopt/*/manifest.json"])
def test_a_checkpoint_without_all_rows_is_refused(tmp_path, finished, missing):
    """The checkpoint was saved without the callback, or the run was killed while the rows were written."""
    shutil.copytree(finished[0] / "checkpoint-2", tmp_path / "checkpoint-2")
    for path in (tmp_path / "checkpoint-2").glob(missing):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    with pytest.raises(FileNotFoundError, match=r"checkpoint-2/compopt.*without EstimatorCallback, or .* killed"):
        train(tmp_path, resume=2)


@pytest.mark.slow
def test_a_checkpoint_of_another_run_is_not_mistaken_for_this_one(tmp_path, finished):
    """Both folders have a checkpoint-2; the Trainer resumes from the other one."""
    train(tmp_path, learning_rate=1e-3, data=Items(updates=2 * UPDATES), max_steps=2)
    there = str(finished[0] / "checkpoint-2")
    with pytest.raises(FileNotFoundError, match="resume_from="):
        train(tmp_path, resume=there)
    for options in ({"own": {"resume_from": there}}, {"resume_from_checkpoint": there}):
        assert same(train(tmp_path, resume=there, save_strategy="no", **options)[0], finished[1])


def with_columns(form, **more):
    """Return the samples with further columns, as a list or a ``datasets.Dataset``."""
    from datasets import Dataset

    items = [{**item, **more} for item in Items().items]
    plain = [{name: torch.as_tensor(value).tolist() for name, value in item.items()} for item in items]
    return items if form == "list" else Dataset.from_list(plain).with_format("torch" if form == "torch" else None)


@pytest.mark.parametrize("form", ["list", "Dataset", "torch"])
def test_an_index_that_the_trainer_removes_is_refused(tmp_path, form):
    """Training would end with a KeyError in compute_loss. Classes are kept by the Trainer, and are no index."""
    data = with_columns(form, label=3, weight=0.5)
    with (
        trainer(tmp_path, data=data, remove_unused_columns=True) as made,
        pytest.raises(ValueError, match=r"removes the columns \['index'\].*remove_unused_columns=False"),
    ):
        made.train()


@pytest.mark.parametrize("case", ["label_names", "forward", "without rows", "kept"])
def test_removed_columns_that_are_no_index_are_accepted(tmp_path, case):
    est = compopt.DCLEstimator(tau=0.5) if case == "without rows" else None
    options = {"label_names": ["index"]} if case == "label_names" else {}
    with trainer(tmp_path, est, data=with_columns("list", width=5), **options) as made:
        made.args.remove_unused_columns = case != "kept"
        if case == "forward":
            made._signature_columns = ["x1", "x2", "index"]
        elif case == "without rows":
            made.compute_loss = lambda model, inputs, **_: est(*model(inputs["x1"], inputs["x2"]))
        made.train()
        assert made.state.global_step == UPDATES
        assert est is not None or same((weights(made.model), rows(made.est)), plain_loop())


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        yield {"x1": 1, "index": 0}


@pytest.mark.parametrize(
    "data", [Stream(), [{"x1": 1, "index": np.array([0]), "kind": 3}], [{"x1": 1, "index": [0], "kind": 3}]]
)
def test_an_index_that_is_kept_or_cannot_be_looked_at_is_accepted(data):
    """A stream has no samples by position, and an index may be an array or a list with one integer."""
    est = compopt.SogCLREstimator(8)
    kept = types.SimpleNamespace(train_dataset=data, _signature_columns=["x1", "index", "label"])
    made = callback(est, types.SimpleNamespace(train_dataset=[]))
    made.trainer = kept
    made._refuse_removed_index()


def test_a_hyper_parameter_search_is_refused(tmp_path):
    with trainer(tmp_path, own=False) as made, pytest.raises(ValueError, match="search"):
        search = types.SimpleNamespace(is_hyper_param_search=True)
        callback(made.est, made).on_train_begin(made.args, search, None)


@pytest.mark.parametrize(("own", "count"), [(False, 1), (None, 0)])
def test_a_loss_that_nobody_commits_is_told(tmp_path, own, count):
    """The warning comes after three updates."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(tmp_path, own=own, save_strategy="no")
    said = [str(each.message) for each in caught if "was committed" in str(each.message)]
    assert len(said) == count and all("3 updates" in each and "EstimatorCallback" in each for each in said)


# several processes --------------------------------------------------------------------------------


def two_ranks(group, folder, shard):
    found, commits, _ = train(folder, shard=shard)
    again, later, begun = train(folder, resume=2, shard=shard)
    return same(found, plain_loop(shard=shard)) and same(again, found), (commits, later, begun)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("shard", [False, True])
def test_two_ranks(tmp_path, shard):
    for equal, counts in the_pool(2, 180).run(two_ranks, 2, str(tmp_path), shard):
        assert equal and counts == (UPDATES, UPDATES, 2)


def travelling_on_two_ranks(group, folder):
    """Rank 0 saves the optimizer with the rows of all ranks. Split rows and a shorter last batch raise errors."""
    whole, _ = travelling(folder, own=False)
    again, _ = travelling(folder, own=False, resume_from_checkpoint=f"{folder}/checkpoint-2")
    optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.1)
    with pytest.raises(ValueError, match="ranks hold different parts of it"):
        estimator(shard=True).attach(optimizer, checkpoint=True)
    with pytest.raises(ValueError, match="dataloader_drop_last=True"):
        train(folder, dataloader_drop_last=False)
    return same(whole, plain_loop()) and same(again, whole)


@pytest.mark.slow
@pytest.mark.distributed
def test_rows_travel_with_the_optimizer_on_two_ranks(tmp_path):
    assert the_pool(2, 180).run(travelling_on_two_ranks, 2, str(tmp_path)) == [True, True]


# DeepSpeed ----------------------------------------------------------------------------------------


def infinite(args, state, control, model=None, **kwargs):
    """Make the loss of one update infinite on one rank."""
    model.scale = torch.inf if state.global_step in SKIPPED and torch.distributed.get_rank() == 0 else 1.0


def zero_two(group, folder, bf16):
    """Train without interruption, and from each checkpoint; with bf16 the second update overflows."""
    runs = []
    for step in (None, 1, 2, 3):
        with placed("zero2", bf16={"enabled": "auto"}) as options:
            options |= {"bf16": bf16, "dtype": torch.float32}
            options["events"] = {"on_step_begin": infinite} if bf16 else {}
            runs.append(train(folder, resume=step, **options)[:2])
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
        if not bf16:
            # Adam amplifies rounding: the same loop in float64 differs by 9e-4 from that in float32
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-3)
