"""``compopt.integrations.sentence_transformers``: the trainer is the plain loop; labels, caches, dimensions."""

import contextlib
import copy
import math
import os
import warnings
from importlib.util import find_spec

import pytest
import torch
import torch.distributed as dist

import compopt
from tests import helpers
from tests.pool import the_pool
from tests.sentences import (
    BATCH,
    KINDS,
    N,
    call,
    embed,
    encoder,
    estimator,
    gradients,
    learned,
    loss_of,
    losses,
    texts,
    their_loss,
)
from tests.trainers import fresh_accelerate, same, update
from tests.training import weights

pytestmark = pytest.mark.skipif(find_spec("sentence_transformers") is None, reason="needs sentence_transformers")

WINDOW, UPDATES = 2, 4  # two updates an epoch


def data(columns=2, n=N):
    from datasets import Dataset

    names = ("anchor", "positive", "negative", "negative_2")
    return Dataset.from_dict({name: texts(column, n) for column, name in zip(range(columns), names, strict=False)})


@pytest.fixture(scope="module", autouse=True)
def quiet():
    import transformers

    transformers.logging.disable_progress_bar()


def rows(est):
    columns = est.read(torch.arange(N))
    return torch.cat([columns[name].double().reshape(N, -1) for name in sorted(columns)], dim=1)


@contextlib.contextmanager
def trainer(folder, loss, train, callback=True, **options):
    """Yield a SentenceTransformerTrainer with ``loss(model)``; accelerate's singletons are reset afterwards."""
    from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments

    ranks = int(os.environ.get("WORLD_SIZE", 1))
    defaults = {
        "use_cpu": True, "per_device_train_batch_size": BATCH // ranks, "gradient_accumulation_steps": WINDOW,
        "save_steps": 1, "num_train_epochs": 2, "max_grad_norm": 0.0, "lr_scheduler_type": "constant",
        "dataloader_drop_last": True, "dataloader_pin_memory": False, "report_to": [], "disable_tqdm": True,
        "optim": "adamw_torch", "learning_rate": 1e-2, "weight_decay": 0.0, "logging_strategy": "no",
        "prompts": {"anchor": "xi: "},
    }  # fmt: skip
    with fresh_accelerate():
        args = SentenceTransformerTrainingArguments(str(folder), **{**defaults, **options})
        model = encoder()
        made = SentenceTransformerTrainer(model, args, train, loss=loss(model))
        if callback:
            for number, module in enumerate(made.loss.estimators):
                made.add_callback(losses().EstimatorCallback(module.est, made, name=f"compopt-{number}"))
        yield made


def train(folder, resume=None, kind="EstimatorLoss", shard=False, **options):
    """Train; return weights and rows, the labels of the batches, and the number of commits."""
    est, seen = estimator(shard=shard), []
    indexed = losses().add_index(data(), positives="positive")
    loss = lambda model: loss_of(est, model, kind)  # noqa: E731
    with trainer(folder, loss, indexed, **options) as made:
        made.loss.register_forward_pre_hook(lambda module, args: seen.append(args[1].clone()))
        made.train(resume_from_checkpoint=None if resume is None else f"{folder}/checkpoint-{resume}")
        return (weights(made.accelerator.unwrap_model(made.model)), rows(est)), seen, est.t


def plain(seen, shard=False):
    """Train on the same batches in a plain torch loop; return weights and rows."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    model, est = encoder(), estimator(shard=shard)
    wrapped = torch.nn.parallel.DistributedDataParallel(model) if world > 1 else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    columns = (texts(0), texts(1))
    for step, labels in enumerate(seen):
        last = step % WINDOW == WINDOW - 1
        with wrapped.no_sync() if world > 1 and not last else contextlib.nullcontext():
            tokens = embed(model, columns, labels[:, 0].tolist(), ("xi: ", ""))
            z1, z2 = (wrapped(each)["sentence_embedding"] for each in tokens)
            index, index2 = labels.unbind(1)
            (est(z1, z2, index, index2=index2) / WINDOW).backward()
        if last:
            update(optimizer, est, skipped=False)
    return weights(model), rows(est)


# a run --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["EstimatorLoss", pytest.param("CachedEstimatorLoss", marks=pytest.mark.slow)])
def test_the_run_is_the_plain_loop_s(tmp_path, kind):
    found, seen, commits = train(tmp_path, kind=kind)
    assert commits == UPDATES and len(seen) == UPDATES * WINDOW
    tolerance = 0 if kind == "EstimatorLoss" else 1e-4
    torch.testing.assert_close(found, plain(seen), rtol=tolerance, atol=tolerance)
    card = (tmp_path / "checkpoint-4" / "README.md").read_text()
    assert "ISogCLREstimator" in card and "loss:MultipleNegativesRankingLoss" not in card and "oord" not in card


def two_ranks(group, folder, shard):
    found, seen, commits = train(folder, shard=shard)
    again, _, _ = train(folder, resume=2, shard=shard)
    return found, commits, plain(seen, shard=shard), again


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("shard", [False, True])
def test_two_ranks(tmp_path, shard):
    for found, commits, expected, again in the_pool(2, 180).run(two_ranks, 2, str(tmp_path), shard):
        assert commits == UPDATES and same(found, expected) and same(again, found)


@pytest.mark.parametrize("callback", [True, False])
def test_the_callback_logs_their_loss_and_the_trainer_ours(tmp_path, callback):
    """The two numbers of the guide, also for an estimator that needs no callback to train."""
    est = compopt.InfoNCEEstimator(tau=0.05, directions="forward")
    options = {"logging_strategy": "steps", "logging_steps": 1, "gradient_accumulation_steps": 1, "save_strategy": "no"}
    with trainer(tmp_path, lambda model: loss_of(est, model), data(), callback, **options) as made:
        made.train()
        ours, theirs = (
            torch.tensor([float(line[name]) for line in made.state.log_history if name in line])
            for name in ("loss", "compopt-0/info_nce")
        )
    assert len(ours) == N // BATCH * 2 and len(theirs) == (len(ours) if callback else 0)
    assert not callback or torch.allclose(ours, 0.05 * (theirs - math.log(BATCH - 1)), atol=1e-3)


def test_two_estimators_in_one_folder_are_refused(tmp_path):
    tau = {32: estimator(), 16: estimator()}
    with trainer(tmp_path, lambda model: loss_of(tau, model), data(), callback=False) as made:
        for est in tau.values():
            made.add_callback(losses().EstimatorCallback(est, made))
        with pytest.raises(ValueError, match="name='compopt-2'"):
            made.train()


def test_a_last_batch_of_one_sample_is_refused_before_training(tmp_path):
    indexed, loss = losses().add_index(data(n=33)), lambda model: loss_of(estimator(33), model)
    with (
        trainer(tmp_path, loss, indexed, dataloader_drop_last=False) as made,
        pytest.raises(ValueError, match="33 samples leave one.*dataloader_drop_last=True"),
    ):
        made.train()


# a call -------------------------------------------------------------------------------------------


def embeddings(model, columns=2, at=range(BATCH)):
    return [model(each)["sentence_embedding"] for each in embed(model, [texts(c) for c in range(columns)], at)]


@pytest.mark.parametrize(("columns", "both"), [(2, False), (4, False), (2, True), (3, True)])
def test_without_rows_it_replaces_their_loss(columns, both):
    """InfoNCE with 1 / tau equal to their scale; with multiply_tau=False the gradients are equal."""
    est = compopt.InfoNCEEstimator(tau=0.05, multiply_tau=False, directions="both" if both else "forward")
    mine, expected = call(loss_of(est), columns, None), call(their_loss(both), columns, None)
    torch.testing.assert_close(mine[1], expected[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("columns", "options"), [
    (2, {"mini_batch_size": 3}), (3, {"mini_batch_size": 16}), (2, {"mini_batch_num_tokens": 40}),
])  # fmt: skip
def test_the_cache_changes_nothing(columns, options):
    labels, sizes, results = torch.arange(BATCH), [], []
    for kind in ("EstimatorLoss", "CachedEstimatorLoss"):
        est = estimator()
        loss = loss_of(est, kind=kind, **(options if kind == "CachedEstimatorLoss" else {}))
        results.append((call(loss, columns, labels), est.pending))
    torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-6)
    assert results[0][1] == 1
    loss.model.register_forward_pre_hook(lambda model, args: sizes.append(len(args[0]["input_ids"])))
    call(loss, columns, labels)
    assert max(sizes) == min(options.get("mini_batch_size", max(sizes)), BATCH)
    assert "mini_batch_num_tokens" not in options or max(sizes) < BATCH


@pytest.mark.parametrize("accumulated", [1, 2])
def test_the_cache_scales_the_gradient_of_a_learned_temperature(accumulated):
    """The trainer divides the loss and a scaler multiplies it, both after the estimator has computed its gradients."""
    results = []
    for kind in ("EstimatorLoss", "CachedEstimatorLoss"):
        est = learned()
        loss = loss_of(est, kind=kind)
        (parameter,) = est.parameters()
        assert any(each is parameter for each in loss.parameters())  # so the trainer's optimizer has it
        for _ in range(accumulated):
            value = loss(embed(loss.model, (texts(0), texts(1)), range(BATCH)), None)
            (value * 0.25).backward()
        results.append(parameter.grad)
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("labels", [1, 2, 4])
def test_labels_become_rows(labels):
    index, model = torch.randperm(N)[:BATCH], encoder()
    column = torch.stack([index, index // 2 * 2, index.flip(0) // 2 * 2, index.roll(1) // 2 * 2][:labels], 1)
    value = loss_of(estimator(), model)(embed(model, [texts(c) for c in range(4)], range(BATCH)), column)
    z1, z2, *extra = embeddings(model, 4)
    given = dict(zip(("index", "index2"), column.unbind(1), strict=False))
    if labels == 4:
        given["extra_index"] = torch.cat(column.unbind(1)[2:])
    torch.testing.assert_close(value, helpers.call(estimator(), z1, z2, extra=torch.cat(extra), **given))


@KINDS
@pytest.mark.parametrize("make", [estimator, learned])
@pytest.mark.parametrize("weight", [1.0, 0.25])
def test_matryoshka(kind, make, weight):
    """Each dimension has its own estimator; the weights also scale the gradient of a learned temperature."""
    from sentence_transformers.sentence_transformer.losses import MatryoshkaLoss

    model, twin, est, alone = encoder(), encoder(), {32: make(), 16: make()}, {32: make(), 16: make()}
    labels = torch.arange(BATCH)
    found = call(MatryoshkaLoss(model, loss_of(est, model, kind), [32, 16], [1.0, weight]), 2, labels)
    z1, z2 = embeddings(twin)
    index = labels if make is estimator else None
    value = alone[32](z1, z2, index) + weight * alone[16](z1[:, :16], z2[:, :16], index)
    value.backward()
    torch.testing.assert_close(found, (value.detach(), gradients(twin)), rtol=1e-4, atol=1e-6)
    for dimension in (32, 16):
        assert est[dimension].pending == alone[dimension].pending
        for one, other in zip(est[dimension].parameters(), alone[dimension].parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-7)


def test_layers_do_not_share_rows():
    from sentence_transformers.sentence_transformer.losses import AdaptiveLayerLoss

    model, labels = encoder(layers=2), torch.arange(BATCH)
    with pytest.raises(ValueError, match="layers would share rows"):
        call(AdaptiveLayerLoss(model, loss_of(estimator(), model)), 2, labels)
    call(AdaptiveLayerLoss(model, loss_of(compopt.DCLEstimator(tau=0.1, directions="forward"), model)), 2, labels)


def test_matryoshka_wants_an_estimator_for_each_dimension():
    from sentence_transformers.sentence_transformer.losses import MatryoshkaLoss

    labels, model = torch.arange(BATCH), encoder()
    small = r"have 16 dimensions and the estimator is for 32.*\{d: compopt\.recommended\(d\)"
    for est, match in (
        (estimator(), "an estimator of its own"),
        ({32: estimator()}, "no estimator for dimension 16"),
        (compopt.recommended(32), small),
    ):
        with pytest.raises(ValueError, match=match):
            call(MatryoshkaLoss(model, loss_of(est, model), [32, 16]), 2, labels)
    for est in (compopt.DCLEstimator(tau=0.1), {dim: compopt.recommended(dim) for dim in (32, 16)}):
        call(MatryoshkaLoss(model, loss_of(est, model), [32, 16]), 2, None)


@KINDS
@pytest.mark.parametrize("both", [False, True])
def test_evaluation_has_a_loss_of_its_own(kind, both):
    model, est = encoder(), compopt.SogCLREstimator(N, directions="both" if both else "forward")
    tokens = embed(model, [texts(column) for column in range(3)], range(BATCH))
    with torch.no_grad():
        found = loss_of(est, model, kind, eval_scale=10.0)(tokens, torch.full((BATCH,), 10**6))
        expected = their_loss(both, model, scale=10.0)(tokens, None)
    assert est.pending == 0 and torch.allclose(found, expected)


# devices, dtypes and copies of a loss -------------------------------------------------------------


def test_it_moves_and_is_copied():
    loss = loss_of(learned())
    assert {each.device.type for each in loss.to("cpu").parameters()} == {"cpu"}
    assert next(loss.double().model.parameters()).dtype == torch.float64
    (temperature,) = loss.estimators[0].est.parameters()
    assert temperature.dtype == torch.float32  # half() and double() are for encoders
    assert copy.deepcopy(loss).estimators[0].est is not loss.estimators[0].est
    assert all(name.startswith("model.") for name in loss_of(estimator()).state_dict())  # the callback saves rows


def test_static_embeddings_cannot_be_cached():
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import StaticEmbedding

    static = StaticEmbedding(encoder().tokenizer.backend_tokenizer, embedding_dim=8)
    with pytest.raises(ValueError, match="StaticEmbedding"):
        losses().CachedEstimatorLoss(SentenceTransformer(modules=[static], device="cpu"), estimator())


# labels -------------------------------------------------------------------------------------------


def test_add_index():
    from datasets import DatasetDict

    add_index = losses().add_index
    assert add_index(data())["label"] == list(range(N))
    pairs = add_index(data(), positives="positive")["label"]
    assert pairs == [[at, at // 2 * 2] for at in range(N)]
    sets = add_index(DatasetDict({"one": data(), "two": data()}), positives="positive")
    assert isinstance(sets, DatasetDict) and sets["two"]["label"] == [[N + at, at // 2 * 2] for at in range(N)]
    assert add_index({"one": data(), "two": data()}, anchors="anchor")["two"]["label"] == list(range(N))
    same = data().map(lambda row: {"positive": row["anchor"]})
    rows = [text.index(one) for text in [texts(0)] for one in text]
    assert add_index(same, anchors="anchor", positives="positive")["label"] == [[row, row] for row in rows]
    crossed = data().map(lambda row, at: {"positive": texts(0)[at - 1]}, with_indices=True)
    labels = add_index(crossed, anchors="anchor", positives="positive")["label"]
    assert labels == [[at, at] for at in range(N)], "an anchor that is a positive elsewhere has two rows"


def test_add_index_knows_the_negatives_that_are_positives():
    """Negatives that are the positive of another sample, in any data set, have the row of that positive."""
    from datasets import Dataset, DatasetDict

    one = Dataset.from_dict({"q": ["a", "b"], "p": ["x", "y"], "n1": ["y", "z"], "n2": ["x", "w"]})
    two = Dataset.from_dict({"q": ["c"], "p": ["w"], "n1": ["x"], "n2": ["v"]})
    made = losses().add_index(DatasetDict({"one": one, "two": two}), positives="p", negatives=["n1", "n2"])
    assert made["one"]["label"] == [[0, 0, 1, 0], [1, 1, -1, 2]] and made["two"]["label"] == [[2, 2, 0, -1]]
    est, model = estimator(3), encoder()
    tokens = embed(model, [one[name] for name in one.column_names[:4]], range(2))
    value = loss_of(est, model)(tokens, torch.tensor(made["one"]["label"]))
    z1, z2, *extra = (model(each)["sentence_embedding"] for each in tokens)
    given = {"extra_index": torch.tensor([1, -1, 0, 2]), "index2": torch.tensor([0, 1]), "extra": torch.cat(extra)}
    assert est.pending == 1
    torch.testing.assert_close(value, helpers.call(estimator(3), z1, z2, torch.arange(2), **given))


@pytest.mark.parametrize("name", ["label", "labels", "score", "scores"])
def test_add_index_refuses_what_would_be_taken_for_the_label(name):
    with pytest.raises(ValueError, match=f"'{name}'"):
        losses().add_index(data().add_column(name, [0.0] * N))


def test_add_index_refuses_what_it_cannot_count():
    from datasets import Dataset

    add_index = losses().add_index
    with pytest.raises(TypeError, match="data of type IterableDataset has no length"):
        add_index(data().to_iterable_dataset())
    with pytest.raises(ValueError, match="positives=, which is None"):
        add_index(data(3), negatives="negative")
    for bad in ([["a"], ["b"]], [1, 2], ["a", None]):
        with pytest.raises(TypeError, match="'positive' holds"):
            add_index(Dataset.from_dict({"anchor": ["a", "b"], "positive": bad}), positives="positive")


BAD_LABELS = {
    "none": (None, ValueError, "no label column with the rows.*add_index"),
    "bools": (torch.arange(BATCH) > 3, TypeError, "integers, got torch.bool"),
    "floats": (torch.rand(BATCH), TypeError, "integers, got torch.float32"),
    "too many": (torch.zeros(BATCH, 4, dtype=torch.long), ValueError, "4 labels per sample and 3 columns"),
    "beyond n": (torch.arange(BATCH) + N, IndexError, f"the label column.*add_index.*outside n={N}"),
    "constant": (torch.zeros(BATCH, dtype=torch.long), ValueError, "the label column.*0 for the whole batch"),
}


@pytest.mark.filterwarnings("ignore:.*1 different labels")
@pytest.mark.parametrize("case", BAD_LABELS)
def test_labels_that_are_no_rows_are_refused(case):
    labels, error, match = BAD_LABELS[case]
    est = estimator()
    with pytest.raises(error, match=match):
        call(loss_of(est), 3, labels)
    assert est.pending == 0


@KINDS
def test_an_estimator_without_rows_ignores_the_label_column(kind):
    """Scores, classes or a constant are ignored; labels are read as rows only with index_labels=True."""
    options = {"tau": 0.1, "directions": "forward"}
    others = [torch.rand(BATCH), torch.arange(BATCH) // 2, torch.zeros(BATCH, dtype=torch.long), torch.rand(BATCH, 5)]
    for est in (compopt.DCLEstimator(**options), compopt.MemoryEstimator(32, 16, **options)):
        expected = call(loss_of(copy.deepcopy(est), kind=kind), 3, None)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for labels in others:
                assert same(call(loss_of(copy.deepcopy(est), kind=kind), 3, labels), expected)
        for labels, changes in ((torch.arange(BATCH), False), (torch.arange(BATCH) // 2, True)):
            read = loss_of(copy.deepcopy(est), kind=kind, index_labels=True)
            assert torch.equal(call(read, 3, labels)[0], expected[0]) != changes
    with pytest.raises(TypeError, match="index_labels is True: the label column.*float32"):
        call(read, 3, torch.rand(BATCH))
    with pytest.raises(ValueError, match="index_labels is True, and the data set has no label column"):
        call(read, 3, None)


@KINDS
def test_declared_duplicates_that_are_ignored_are_told_once(kind):
    """Several integers per sample have no other meaning; one integer may be a class."""
    indexed = losses().add_index(data(), anchors="anchor", positives="positive")
    labels = torch.tensor(indexed["label"][:BATCH])
    for est, given in ((None, {"scale": 20.0}), (compopt.DCLEstimator(tau=0.1, directions="forward"), {})):
        loss = loss_of(est, kind=kind, **given)
        with pytest.warns(UserWarning, match="2 integers per sample.*ignores them.*index_labels=True"):
            ignored, _ = call(loss, 2, labels)
        read = loss_of(est, kind=kind, index_labels=True, **given)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            call(loss, 2, labels)
            call(loss_of(est, kind=kind, **given), 2, torch.arange(BATCH))
            assert not torch.equal(call(read, 2, labels)[0], ignored)


def test_losses_compose_through_embeddings():
    """Wrappers of sentence-transformers, such as SpladeLoss, call compute_loss_from_embeddings."""
    from sentence_transformers.sparse_encoder.losses import SpladeLoss

    class Columns(torch.nn.Sequential):
        """A model with the output format of a SparseEncoder."""

        def forward(self, inputs):
            return {"sentence_embedding": super().forward(inputs["input_ids"])}

    torch.manual_seed(0)
    model, x = Columns(torch.nn.Linear(4, 6), torch.nn.ReLU()), torch.randn(2, BATCH, 4)
    z1, z2 = (model({"input_ids": each})["sentence_embedding"] for each in x)
    expected = estimator()(z1, z2, torch.arange(BATCH))
    for kind in ("EstimatorLoss", "CachedEstimatorLoss"):
        found = loss_of(estimator(), model, kind).compute_loss_from_embeddings([z1, z2], torch.arange(BATCH))
        torch.testing.assert_close(found, expected)
    around = SpladeLoss(model, loss_of(estimator(), model), document_regularizer_weight=0.0)
    value = around([{"input_ids": each} for each in x], torch.arange(BATCH))
    torch.testing.assert_close(value["base_loss"], expected)


def test_classes_are_told_from_rows_once():
    loss, classes = loss_of(estimator()), torch.arange(BATCH) % 2
    with pytest.warns(UserWarning, match="2 different labels.*not its class"):
        call(loss, 2, classes)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call(loss, 2, classes)
        call(loss_of(estimator()), 2, torch.arange(BATCH))
        call(loss_of(estimator()), 2, torch.arange(BATCH) // 2)  # two positives each


def test_bad_arguments():
    with pytest.raises(TypeError, match="contrastive estimator, got Linear"):
        loss_of(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="two columns"):
        call(loss_of(estimator()), 1, torch.arange(BATCH))
    with pytest.raises(ValueError, match="empty mapping"):
        loss_of({})
    with pytest.raises(ValueError, match="mini_batch_size"):
        loss_of(estimator(), kind="CachedEstimatorLoss", mini_batch_size=0)
