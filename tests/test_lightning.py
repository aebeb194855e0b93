"""``compopt.integrations.lightning``: runs equal the plain loop, and checkpoints contain the rows."""

import logging
import os
import pickle
import warnings
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import compopt
from tests.pool import the_pool
from tests.trainers import SKIPPED, UPDATES, Items, estimator, plain_loop, same, spoil
from tests.training import DIM, MICRO, WINDOW, Encoders, N, needs_fsdp2, rows, weights

pl = pytest.importorskip("lightning.pytorch")
talk = "treespec|dirpath has changed|Checkpoint directory|Be aware|workers|ended before|logging interval|GPU"
pytestmark = pytest.mark.filterwarnings(f"ignore:.*({talk})")


class DualEncoder(pl.LightningModule):
    """A module as users write it."""

    def __init__(self, est=None, dtype=torch.float64, optimizer=torch.optim.AdamW, **options):
        super().__init__()
        self.model, self.kind, self.options, self.optimizer = Encoders(dtype), dtype, options, optimizer
        self.seen = []

    def setup(self, stage):
        self.est = estimator(self.kind, **self.options)

    def training_step(self, batch, batch_idx):
        if not self.seen:
            self.seen.append(self.est.t)
        return self.est(*(z.to(self.kind) for z in self.model(batch["x1"], batch["x2"])), batch["index"])

    def configure_optimizers(self):
        return self.optimizer(self.model.groups(), lr=1e-2)


class Spoil(pl.Callback):
    """Callback that makes one update overflow."""

    def on_after_backward(self, trainer, module):
        if trainer.global_step in SKIPPED:
            spoil(module)


class Resumable(torch.utils.data.DataLoader):
    """Data loader that Lightning can resume in the middle of an epoch."""

    taken = first = 0

    def __iter__(self):
        for self.taken, batch in enumerate(super().__iter__(), 1):
            if self.taken > self.first:
                yield batch
        self.first = 0

    def state_dict(self):
        return {"taken": self.taken}

    def load_state_dict(self, state):
        self.first = state["taken"]


def ranks():
    return dist.get_world_size() if dist.is_initialized() else 1


def loader(dtype=torch.float64, drop_last=True):
    """Return a loader that has the batches of the plain loop in each process."""
    data, part = Items(dtype=dtype), MICRO // ranks()
    own = [at for at in range(len(data)) if at % MICRO // part == (dist.get_rank() if ranks() > 1 else 0)]
    return Resumable(data, part, sampler=own, drop_last=drop_last)


def callback(*args, **options):
    from compopt.integrations.lightning import EstimatorCallback

    return EstimatorCallback(*args, **options)


def fit(folder, module=None, own=None, callbacks=(), ckpt_path=None, data=None, **options):
    """Train and return the module. ``own``: the estimator callback; ``None``: a default one; ``False``: none."""
    from lightning.pytorch.callbacks import ModelCheckpoint

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    module = module or DualEncoder()
    every = ModelCheckpoint(folder, "{step}", save_top_k=-1, every_n_train_steps=1)
    ours = [callback()] if own is None else [own] if own else []
    defaults = {
        "accelerator": "cpu", "devices": ranks(), "strategy": "ddp" if ranks() > 1 else "auto", "max_epochs": 1,
        "use_distributed_sampler": False, "accumulate_grad_batches": WINDOW, "logger": False,
        "enable_progress_bar": False, "enable_model_summary": False, "callbacks": [every, *ours, *callbacks],
    }  # fmt: skip
    trainer = pl.Trainer(**{**defaults, **options})
    with mock.patch.dict(os.environ):  # Lightning removes WORLD_SIZE
        trainer.fit(module, loader(module.kind) if data is None else data, ckpt_path=ckpt_path)
    return module


def result(module):
    return weights(module.model), rows(module.est)


# one process --------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["inside", "directory"])
def finished(request, tmp_path_factory):
    """Return the folder of a run with a checkpoint per update, its weights and rows, and a callback to resume it."""
    folder = tmp_path_factory.mktemp("finished")
    own = partial(callback, directory=folder / "rows", keep=20) if request.param == "directory" else callback
    module = fit(folder, own=own())
    assert module.est.t == UPDATES and same(result(module), plain_loop())
    return folder, result(module), own


@pytest.mark.parametrize("step", [1, 3])
def test_a_resumed_run_ends_as_the_whole_one(tmp_path, finished, step):
    folder, whole, own = finished
    module = fit(tmp_path, own=own(), ckpt_path=folder / f"step={step}.ckpt")
    assert module.seen == [step] and module.est.t == UPDATES and same(result(module), whole)


class Owner(DualEncoder):
    """The estimator is a submodule, and each epoch has validations, before training too."""

    def setup(self, stage):
        self.loss = compopt.as_module(estimator(self.kind))

    est = property(lambda self: self.loss.est)
    validation_step = DualEncoder.training_step

    def val_dataloader(self):
        return loader()


def test_validation_does_not_end_the_training_of_a_submodule(tmp_path):
    """Lightning restores modes by assigning ``training``."""
    module = fit(tmp_path, Owner(), callback("loss.est"), val_check_interval=WINDOW, num_sanity_val_steps=1)
    assert module.est.t == UPDATES and same(result(module), plain_loop())


@pytest.mark.parametrize("fused", [False, True])
def test_a_skipped_step_commits_nothing(tmp_path, fused):
    from lightning.pytorch.plugins import MixedPrecision

    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1000)
    module = DualEncoder(optimizer=partial(torch.optim.AdamW, fused=fused))
    fit(tmp_path, module, callbacks=[Spoil()], plugins=[MixedPrecision("16-mixed", "cpu", scaler)])
    assert module.est.t == UPDATES - len(SKIPPED)
    torch.testing.assert_close(result(module), plain_loop(skipped=SKIPPED), rtol=1e-12, atol=1e-12)


class TwoOptimizers(DualEncoder):
    """Each encoder has its own optimizer, stepped by hand."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization, self.pending = False, []

    def configure_optimizers(self):
        groups = self.model.groups()
        own = [[{**group, "params": group["params"][part]} for group in groups] for part in (0, 1)]
        return [torch.optim.AdamW(each, lr=1e-2) for each in own]

    def training_step(self, batch, batch_idx):
        self.manual_backward(super().training_step(batch, batch_idx) / WINDOW)
        if batch_idx % WINDOW == WINDOW - 1:
            for optimizer in self.optimizers():
                optimizer.step()
                optimizer.zero_grad()
                self.pending.append(self.est.pending)


def test_several_optimizers(tmp_path):
    for chosen, pending in ((0, [0, 0]), (1, [WINDOW, 0])):  # after each of the two steps
        module = fit(tmp_path, TwoOptimizers(), callback(optimizer=chosen), accumulate_grad_batches=1)
        assert module.pending == pending * UPDATES
        assert module.est.t == UPDATES and same(result(module), plain_loop())
    with pytest.raises(ValueError, match=r"2 optimizers.*optimizer=0"):
        fit(tmp_path, TwoOptimizers(), accumulate_grad_batches=1)


class TwoEstimators(DualEncoder):
    """Two estimators, one of them inside another part of the module."""

    def setup(self, stage):
        super().setup(stage)
        self.part = torch.nn.Module()
        self.part.second = estimator(self.kind)

    def training_step(self, batch, batch_idx):
        second = self.part.second(*self.model(batch["x2"], batch["x1"]), batch["index"])
        loss = super().training_step(batch, batch_idx) + second
        self.log("loss", loss)
        both = {"info_nce": self.est, "part.second/info_nce": self.part.second}
        self.shown = {name: est.metrics["info_nce"].item() for name, est in both.items()}
        return loss


class Recorder(pl.loggers.logger.DummyLogger):
    """Logger that keeps the logged metrics."""

    def __init__(self):
        super().__init__()
        self.found = []

    def log_metrics(self, metrics, step=None):
        self.found.append((step, metrics))


def test_several_estimators(tmp_path):
    """Each has a callback, its rows in the checkpoint, and a metric that is logged with the loss."""
    results = []
    for checkpoint in (None, tmp_path / "step=2.ckpt"):
        more, logger = {"callbacks": [callback("part.second")], "log_every_n_steps": 2}, Recorder()
        module = fit(tmp_path, TwoEstimators(), ckpt_path=checkpoint, logger=logger, **more)
        assert module.est.t == module.part.second.t == UPDATES
        results.append((*result(module), rows(module.part.second)))
        step, metrics = logger.found[-1]
        assert step == 3 and {*metrics} == {"loss", "epoch", *module.shown}
        assert {name: metrics[name] for name in module.shown} == pytest.approx(module.shown, rel=1e-6)
    assert same(*results) and not torch.equal(results[0][1], results[0][2])


class Scored(DualEncoder):
    def setup(self, stage):
        super().setup(stage)
        self.scores = compopt.ScoreKeeper(N)
        self.scores.attach(self.est)


def test_a_score_keeper_is_saved_and_loaded_beside_its_estimator(tmp_path):
    results = []
    for checkpoint in (None, tmp_path / "step=2.ckpt"):
        module = fit(tmp_path, Scored(), callbacks=[callback("scores")], ckpt_path=checkpoint)
        assert module.scores.t == module.est.t == UPDATES
        results.append((*result(module), rows(module.scores)))
    assert same(*results)


def test_validating_loads_no_rows(tmp_path):
    """A checkpoint without rows loads its weights, and one with rows does not change the estimator."""
    for own in (False, None):
        fit(tmp_path / str(own), own=own)
        trainer = pl.Trainer(accelerator="cpu", logger=False, callbacks=[callback()], barebones=False)
        module = DualEncoder()
        module.validation_step = lambda batch, batch_idx: None
        trainer.validate(module, loader(), ckpt_path=tmp_path / str(own) / "step=2.ckpt", verbose=False)
        assert module.est.t == 0
    with pytest.raises(ValueError, match="no rows of 'est'.*without this EstimatorCallback"):
        fit(tmp_path, ckpt_path=tmp_path / "False" / "step=2.ckpt")


# bad input ----------------------------------------------------------------------------------------


def test_a_directory_that_is_not_given_or_has_other_rows_is_refused(tmp_path):
    fit(tmp_path, own=callback(directory=tmp_path / "rows"))
    with pytest.raises(ValueError, match="directory"):
        fit(tmp_path, ckpt_path=tmp_path / "step=4.ckpt")
    for step, folder in ((4, "others"), (1, "rows")):  # keep=2 has removed the first
        with pytest.raises(FileNotFoundError, match=r"last 2 saves.*keep="):
            fit(tmp_path, own=callback(directory=tmp_path / folder), ckpt_path=tmp_path / f"step={step}.ckpt")


def test_a_module_without_an_estimator_is_refused(tmp_path):
    with pytest.raises(TypeError, match=r"DualEncoder.loss.est must be an estimator"):
        fit(tmp_path, own=callback("loss.est"))


def test_an_estimator_that_setup_replaces_is_noticed(tmp_path):
    module, own = DualEncoder(), callback()
    fit(tmp_path, module, own)
    module.validation_step = lambda batch, batch_idx: None
    trainer = pl.Trainer(accelerator="cpu", logger=False, callbacks=[own], enable_progress_bar=False)
    trainer.validate(module, loader(), verbose=False)  # its setup() makes another one
    assert module.est.t == 0
    with pytest.raises(RuntimeError, match=r"setup\(\) has replaced the module's 'est'.*are not saved"):
        trainer.save_checkpoint(tmp_path / "after.ckpt")
    with pytest.warns(UserWarning, match=r"has replaced.*begins with the state of a new one"):
        fit(tmp_path / "again", module, own)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*has replaced")
        fit(tmp_path / "resumed", module, own, ckpt_path=tmp_path / "step=2.ckpt")  # has its rows
        fit(tmp_path / "another", DualEncoder(), own)
    assert pickle.loads(pickle.dumps(own)).est == "est"


# several processes --------------------------------------------------------------------------------


def whole_weights(module):
    parameters = (p.full_tensor() if hasattr(p, "full_tensor") else p for p in module.model.parameters())
    return torch.cat([p.detach().double().flatten() for p in parameters])


def whole_and_again(folder, make, strategy=lambda: "ddp", own=lambda: None, **options):
    """Train without interruption and from the second checkpoint on. -> weights and rows of both, the counts"""
    whole = fit(folder, make(), own(), strategy=strategy(), **options)
    again = fit(folder + "-again", make(), own(), strategy=strategy(), ckpt_path=f"{folder}/step=2.ckpt", **options)
    both = [(whole_weights(module), rows(module.est)) for module in (whole, again)]
    return *both, (whole.est.t, again.est.t, *again.seen)


def two_ranks(group, folder, shard, directory):
    own = partial(callback, directory=folder + "-rows", keep=UPDATES) if directory else lambda: None
    with pytest.raises(ValueError, match="drop_last=True"):
        fit(folder, data=loader(drop_last=False))
    return *whole_and_again(folder, partial(DualEncoder, shard=shard), own=own), plain_loop(shard=shard)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("shard", "directory"),
    [(True, True), *(pytest.param(*other, marks=pytest.mark.full) for other in ((False, True), (True, False)))],
)
def test_two_ranks(tmp_path, shard, directory):
    for whole, again, counts, plain in the_pool(2, 120).run(two_ranks, 2, str(tmp_path / "c"), shard, directory):
        assert same(whole, plain) and same(again, whole) and counts == (UPDATES, UPDATES, 2)


class Sharded(DualEncoder):
    """FSDP2, whose checkpoints are directories."""

    def configure_model(self):
        from torch.distributed.fsdp import fully_shard

        for part in (self.model.first, self.model.second, self.model):
            fully_shard(part)


def fsdp2(group, folder):
    from lightning.pytorch.strategies import ModelParallelStrategy

    return whole_and_again(folder, Sharded, ModelParallelStrategy)


@pytest.mark.slow
@pytest.mark.distributed
@needs_fsdp2
def test_checkpoints_that_are_directories(tmp_path):
    for whole, again, counts in the_pool(2, 120).run(fsdp2, 2, str(tmp_path / "c")):
        assert same(whole, again) and counts == (UPDATES, UPDATES, 2)
        torch.testing.assert_close(whole, plain_loop(), rtol=1e-11, atol=1e-11)
    assert (tmp_path / "c" / "step=2.ckpt").is_dir()


def test_processes_that_train_alone_are_told(tmp_path, monkeypatch):
    """Warn under torchrun on a CPU, where ``devices="auto"`` is one."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.warns(UserWarning, match=r"trains alone.*devices="):
        fit(tmp_path)


class Searched(DualEncoder):
    """A module with a learning rate and a batch size that Lightning may search."""

    lr, batch_size = 1e-2, MICRO

    def setup(self, stage):
        if not hasattr(self, "est"):  # a search is a fit of its own
            self.est = compopt.MemoryEstimator(DIM, 16)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.model.groups(), lr=self.lr)

    def train_dataloader(self):
        return torch.utils.data.DataLoader(Items(dtype=torch.float64), self.batch_size, drop_last=True)

    def training_step(self, batch, batch_idx):
        self.seen.append(self.est.t)
        return self.est(*self.model(batch["x1"], batch["x2"]), batch["index"])


@pytest.mark.filterwarnings("ignore:.*(lr_find|LR finder|learning rate)")
@pytest.mark.parametrize("search", ["lr_find", "scale_batch_size", None])
def test_a_search_trains_with_the_estimator_and_leaves_no_trace(search, tmp_path):
    """The memory is filled in a search; training then starts with the state from before it, without a warning."""
    from lightning.pytorch.tuner import Tuner

    from compopt.integrations.lightning import EstimatorCallback

    torch.manual_seed(0)
    module, quiet = Searched(), dict.fromkeys(["enable_progress_bar", "enable_model_summary"], False)
    made = pl.Trainer(
        accelerator="cpu",
        max_steps=3,
        callbacks=[EstimatorCallback()],
        logger=False,
        default_root_dir=tmp_path,
        **quiet,
    )
    if search == "lr_find":
        Tuner(made).lr_find(module, num_training=6, update_attr=False)
    elif search == "scale_batch_size":
        Tuner(made).scale_batch_size(module, max_trials=1, steps_per_trial=3, init_val=MICRO)
        module.batch_size = MICRO
    if search:
        assert max(module.seen) >= 2  # commits in the search
    module.seen.clear()
    made.fit(module)
    assert module.seen == [0, 1, 2] and module.est.t == 3 and module.est.pending == 0
