"""Trainers with the gradient cache: every strategy on two ranks ends as one process with the whole batch."""

import os
from functools import partial
from importlib.util import find_spec

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import compopt
from benchmarks.small_memory import parameters
from compopt.distributed.wrappers import current_step
from tests.pool import the_pool
from tests.sentences import encoder, loss_of, texts
from tests.trainers import KEYS, PLAIN_SGD, UPDATES, Items, estimator, fresh_accelerate, placed
from tests.training import DIM, MICRO, WINDOW, N, micro_batches, rows

pytestmark = pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers")
LR = 0.1
DEFAULTS = {
    "optim": "sgd", "seed": 1,
    "gradient_accumulation_steps": WINDOW, "save_strategy": "no", "num_train_epochs": 1, "max_grad_norm": 0.0,
    "lr_scheduler_type": "constant", "train_sampling_strategy": "sequential", "remove_unused_columns": False,
    "dataloader_drop_last": True, "dataloader_pin_memory": False, "report_to": [], "learning_rate": LR,
    "disable_tqdm": True, "weight_decay": 0.0, "logging_steps": 1,
}  # fmt: skip


def batch():
    """Return the size of a rank's batch, for one global batch on any number of ranks."""
    return {"per_device_train_batch_size": MICRO // int(os.environ.get("WORLD_SIZE", 1))}


class Encoder(nn.Module):
    """Two layers, so that a wrapper has several buckets or shards."""

    def __init__(self, dtype):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(DIM, 16), nn.Tanh(), nn.Linear(16, DIM)).to(dtype)

    def forward(self, x):
        return self.layers(x)


def whole_batches(dtype, updates=UPDATES):
    """Train in one process without a trainer and without a cache; return weights and rows."""
    model, est = Encoder(dtype), estimator(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for step, (x1, x2, index) in enumerate(micro_batches(updates * WINDOW, dtype=dtype)):
        (est(model(x1), model(x2), index) / WINDOW).backward()
        if step % WINDOW == WINDOW - 1:
            optimizer.step()
            est.step()
            optimizer.zero_grad()
    return parameters(model), rows(est)


def strategy_of(name):
    """Return the options of a strategy, without clipping."""
    return placed(name, **(PLAIN_SGD if name.startswith("zero") else {}))


def by_cache(est, model, columns, **given):
    x1, x2, index = columns
    return compopt.gradient_cache(est, (model, model), (x1, x2), index, micro_batch_size=2, **given)


def cached(folder, dtype, method=by_cache, prepared=None, **options):
    """Train with the Trainer; return weights, rows, commits and the log. ``prepared`` gets the wrapped model."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from compopt.integrations.transformers import EstimatorCallback, GradientCacheMixin

    class Cached(GradientCacheMixin, Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            return method(est, model, [inputs[key] for key in KEYS])

    class Prepared(TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            if prepared is not None:
                prepared(trainer.model_wrapped)

    with fresh_accelerate():
        args = TrainingArguments(str(folder), **{**batch(), **DEFAULTS, **options})
        est = estimator(dtype)
        trainer = Cached(Encoder(dtype), args, train_dataset=Items(dtype=dtype))
        trainer.add_callback(EstimatorCallback(est, trainer))
        trainer.add_callback(Prepared())
        trainer.train()
        return parameters(trainer.model_wrapped), rows(est), est.t, trainer.state.log_history


def on_ranks(group, folder, strategy, dtype):
    with strategy_of(strategy) as options:
        return cached(folder, dtype, **options)


def sentences(folder, dtype, kind="CachedEstimatorLoss", mixin=True, dims=None, checkpointing=False, **options):
    """Train with the SentenceTransformerTrainer; return weights, rows by dimension, and commits."""
    from datasets import Dataset
    from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments
    from sentence_transformers.sentence_transformer.losses import MatryoshkaLoss

    from compopt.integrations.sentence_transformers import EstimatorCallback, add_index
    from compopt.integrations.transformers import GradientCacheMixin

    class Cached(*((GradientCacheMixin,) if mixin else ()), SentenceTransformerTrainer):
        pass

    data = Dataset.from_dict({"anchor": texts(0), "positive": texts(1)})
    with fresh_accelerate():
        args = SentenceTransformerTrainingArguments(
            str(folder), gradient_checkpointing=checkpointing, **{**batch(), **DEFAULTS, **options}
        )
        model = encoder(layers=2).to(dtype)
        ests = {dim: compopt.SogCLREstimator(N, dtype=dtype) for dim in dims or (None,)}
        loss = loss_of(
            ests if dims else ests[None], model, kind, **({"mini_batch_size": 2} if "Cached" in kind else {})
        )
        wrapped = MatryoshkaLoss(model, loss, dims, [1.0, 0.5]) if dims else loss
        trainer = Cached(model, args, train_dataset=add_index(data, positives="positive"), loss=wrapped)
        trainer.add_callback(EstimatorCallback(ests if dims else ests[None], trainer))
        trainer.train()
        return (
            parameters(trainer.model_wrapped),
            torch.cat([rows(est) for est in ests.values()]),
            ests.popitem()[1].t,
        )


def sentences_on_ranks(group, folder, strategy, dtype, options):
    with strategy_of(strategy) as place:
        return sentences(folder, dtype, **place, **options)


def near(found, expected, rtol):
    assert (found - expected).abs().max() <= rtol * expected.abs().max()


@pytest.mark.parametrize("dtype, rtol", [(torch.float64, 1e-12), (torch.bfloat16, 2e-2)])
def test_one_process(tmp_path, dtype, rtol):
    bf16 = dtype == torch.bfloat16  # autocast of a model in float32, also around the backward passes
    dtype = torch.float32 if bf16 else dtype
    found, own, t, log = cached(tmp_path, dtype, use_cpu=True, bf16=bf16)
    expected, own_expected = whole_batches(dtype)
    assert t == UPDATES
    start = parameters(Encoder(dtype))
    near(found - start, expected - start, rtol)
    near(own, own_expected, rtol)
    losses = [entry["loss"] for entry in log if "loss" in entry]
    assert len(losses) == UPDATES and all(entry > 0 for entry in losses)


def plainly(est, model, columns):
    x1, x2, index = columns
    return est(model(x1), model(x2), index)


def test_another_loss_is_back_propagated_by_the_trainer(tmp_path):
    found = cached(tmp_path, torch.float64, plainly, use_cpu=True)
    near(found[0], whole_batches(torch.float64)[0], 1e-12)


@pytest.mark.parametrize("given", [{"reduce": False}, {"backward": torch.Tensor.backward}])
def test_what_the_trainer_sets_is_refused(tmp_path, given):
    with pytest.raises(ValueError, match="leave both out"):
        cached(tmp_path, torch.float64, partial(by_cache, **given), use_cpu=True)
    assert current_step() is None


def reductions(group, folder):
    """Return the number of reductions of a bucket and of updates."""
    calls = []

    def hook(state, bucket):
        calls.append(bucket.index())
        return default_hooks.allreduce_hook(state, bucket)

    with strategy_of("ddp") as options:
        found = cached(folder, torch.float64, prepared=lambda model: model.register_comm_hook(None, hook), **options)
    return calls.count(0), found[2]


@pytest.mark.slow
@pytest.mark.distributed
def test_one_reduction_per_update(tmp_path):
    assert the_pool(2, 180).run(reductions, 2, str(tmp_path)) == [(UPDATES, UPDATES)] * 2


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_two_ranks(tmp_path, strategy):
    expected = whole_batches(torch.float64)
    for found, own, t, _ in the_pool(2, 180).run(on_ranks, 2, str(tmp_path), strategy, torch.float64):
        assert t == UPDATES
        near(found, expected[0], 1e-6)
        near(own, expected[1], 1e-6)


@pytest.mark.launch
@pytest.mark.distributed
@pytest.mark.usefixtures("deepspeed_compiled")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeed(tmp_path, stage):
    pytest.importorskip("deepspeed")
    expected = whole_batches(torch.float32)
    for found, own, t, _ in the_pool(2, 180).run(on_ranks, 2, str(tmp_path), f"zero{stage}", torch.float32):
        assert t == UPDATES
        near(found, expected[0], 1e-5)
        near(own, expected[1], 1e-5)


# sentence-transformers ---------------------------------------------------------------------------------------------

FORMS = {"plain": {}, "matryoshka": {"dims": (32, 16)}, "checkpointing": {"checkpointing": True}}


@pytest.mark.filterwarnings("ignore::FutureWarning")  # gradient_checkpointing has another name in transformers 6
@pytest.mark.parametrize("form", FORMS)
def test_sentences_in_one_process(tmp_path, form):
    expected = sentences(tmp_path, torch.float64, "EstimatorLoss", mixin=False, use_cpu=True, **FORMS[form])
    for mixin in (True, False):
        found, own, t = sentences(tmp_path, torch.float64, mixin=mixin, use_cpu=True, **FORMS[form])
        assert t == expected[2] > 0
        near(found, expected[0], 1e-10)
        near(own, expected[1], 1e-10)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_sentences_on_two_ranks(tmp_path, strategy, form):
    expected = sentences(tmp_path, torch.float64, "EstimatorLoss", mixin=False, use_cpu=True, **FORMS[form])
    given = str(tmp_path), strategy, torch.float64, FORMS[form]
    for found, own, t in the_pool(2, 180).run(sentences_on_ranks, 2, *given):
        assert t == expected[2]
        near(found, expected[0], 1e-6)
        near(own, expected[1], 1e-6)


@pytest.mark.launch
@pytest.mark.distributed
@pytest.mark.usefixtures("deepspeed_compiled")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_sentences_with_deepspeed(tmp_path, stage, form):
    expected = sentences(tmp_path, torch.float32, "EstimatorLoss", mixin=False, use_cpu=True, **FORMS[form])
    given = str(tmp_path), f"zero{stage}", torch.float32, FORMS[form]
    for found, own, t in the_pool(2, 180).run(sentences_on_ranks, 2, *given):
        assert t == expected[2]
        near(found, expected[0], 1e-5)
        near(own, expected[1], 1e-5)
