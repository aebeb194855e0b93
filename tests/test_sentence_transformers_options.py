"""``compopt.integrations.sentence_transformers``: the options and guides of the losses of sentence-transformers."""

import contextlib
import inspect
import itertools
from importlib.util import find_spec

import pytest
import torch
import torch.distributed as dist

import compopt
from tests.pool import the_pool
from tests.sentences import (
    BATCH,
    KINDS,
    WORDS,
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

BOTH = {"directions": ("query_to_doc", "doc_to_query"), "partition_mode": "per_direction"}

pytestmark = pytest.mark.skipif(find_spec("sentence_transformers") is None, reason="needs sentence_transformers")


class Columns(torch.nn.Module):
    """A model whose inputs are its embeddings, for losses that embed columns themselves."""

    tokenizer = None

    def forward(self, inputs):
        return {"sentence_embedding": inputs["x"]}


def columns_of(count, dim, seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(7, dim, generator=generator, dtype=torch.float64) for _ in range(count)]


def ranking(similarity, **options):
    """Return the options, and MultipleNegativesRankingLoss with them, or None if it rejects them."""
    from sentence_transformers import util
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

    options |= {"similarity_fct": getattr(util, similarity), "scale": 7.0}
    with contextlib.suppress(ValueError):
        return options, MultipleNegativesRankingLoss(None, **options)
    return options, None


def all_options():
    further = ("query_to_query", "doc_to_query", "doc_to_doc")
    some = [kinds for number in range(4) for kinds in itertools.combinations(further, number)]
    modes = (None, "in_batch_negatives", "hard_negatives", "all_negatives")
    for kinds, partition, mode in itertools.product(some, ("joint", "per_direction"), modes):
        yield {
            "directions": ("query_to_doc", *kinds), "partition_mode": partition,
            "hardness_mode": mode, "hardness_strength": 3.0,
        }  # fmt: skip


def expressible(directions, partition_mode, hardness_mode, **options):
    if directions == ("query_to_doc",):
        return hardness_mode in (None, "all_negatives")
    return {"directions": directions, "partition_mode": partition_mode} == BOTH and hardness_mode is None


def value_and_gradients(loss, columns, **given):
    leaves = [column.clone().requires_grad_() for column in columns]
    value = loss(leaves, **given)
    value.backward()
    return [value.detach(), *(leaf.grad for leaf in leaves)]


@pytest.mark.parametrize("similarity", ["cos_sim", "dot_score", "euclidean_sim"])
@pytest.mark.parametrize("columns", [2, pytest.param(3, marks=pytest.mark.full), 4])
def test_all_options_of_the_ranking_loss(columns, similarity):
    """Compare value and gradients, and the value in evaluation; options that no estimator has are refused."""
    compared, refused, data = 0, 0, columns_of(columns, 5, seed=columns)
    for options in all_options():
        options, theirs = ranking(similarity, **options)
        if theirs is None:
            continue
        if not expressible(**options):
            with pytest.raises(ValueError, match=r"directions=\('query_to_doc'.*use MultipleNegativesRankingLoss "):
                losses().EstimatorLoss(Columns(), **options)
            refused += 1
            continue
        mine = losses().EstimatorLoss(Columns(), **options)
        found = value_and_gradients(mine.compute_loss_from_embeddings, data)
        expected = value_and_gradients(theirs.compute_loss_from_embeddings, data, labels=None)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)
        with torch.no_grad():
            assert torch.equal(mine.compute_loss_from_embeddings(data), expected[0])
        compared += 1
    assert (compared, refused) == (5, 35)


def on_two_ranks(group, columns, options, gather):
    """Return value and gradients of this rank's half of the columns, by our loss and by theirs on this half alone."""
    options, theirs = ranking(**options)
    half = len(columns[0]) // 2
    mine = [column[dist.get_rank() * half :][:half] for column in columns]
    loss = losses().EstimatorLoss(Columns(), gather_across_devices=gather, **options)
    found = value_and_gradients(loss.compute_loss_from_embeddings, mine)
    return found, value_and_gradients(theirs.compute_loss_from_embeddings, mine, labels=None)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("number", range(3))
def test_the_ranking_loss_on_two_ranks(number):
    """If gathered, the loss is that of the whole batch, with gradients to be averaged; otherwise the rank's own."""
    options = [
        {"similarity": "cos_sim", "hardness_mode": "all_negatives", "hardness_strength": 3.0},
        {"similarity": "euclidean_sim"},
        {"similarity": "dot_score", **BOTH},
    ][number]
    columns = [column[:6] for column in columns_of(4, 5, seed=3)]
    for found, theirs in the_pool(2, 60).run(on_two_ranks, 2, columns, options, False):
        torch.testing.assert_close(found, theirs, rtol=1e-6, atol=1e-9)
    _, theirs = ranking(**options)
    value, *whole = value_and_gradients(theirs.compute_loss_from_embeddings, columns, labels=None)
    results = [found for found, _ in the_pool(2, 60).run(on_two_ranks, 2, columns, options, True)]
    for rank, found in enumerate(results):
        expected = [2 * gradient[3 * rank :][:3] for gradient in whole]
        torch.testing.assert_close(found[1:], expected, rtol=1e-6, atol=1e-9)
    values = [found[0] for found in results]
    torch.testing.assert_close(torch.stack(values).mean(), value, rtol=1e-6, atol=1e-9)
    assert number == 1 or torch.equal(*values)  # with other similarities each rank has its own value


@KINDS
def test_options_are_attributes(kind):
    loss = loss_of(None, kind=kind, scale=50.0, **BOTH)
    assert loss.scale == 50.0 and loss.temperature == 1 / 50.0 and loss.hardness_mode is None
    assert loss.get_config_dict()["directions"] == ("query_to_doc", "doc_to_query") and "Jina" in loss.citation
    loss.scale, loss.directions = 20.0, ("query_to_doc",)
    torch.testing.assert_close(call(loss, 3, None), call(their_loss(False), 3, None), rtol=1e-4, atol=1e-5)
    for _ in range(2):  # several calls before one step, as for layers or dimensions
        assert call(loss, 3, torch.zeros(BATCH))[0].isfinite()


WRONG = [
    ("hardness_mode", "hard", "hardness_mode must be one of"),
    ("partition_mode", "each", "partition_mode must be"),
    ("directions", ("doc_to_query",), "'query_to_doc' direction is required"),
    ("hardness_mode", "hard_negatives", "hardness_mode='hard_negatives' with .* use MultipleNegativesRankingLoss"),
    ("directions", ("query_to_doc", "query_to_query"), r"est\(z1, z2, index, negatives=\(z1, index\)\) in a loop"),
]


@pytest.mark.parametrize(("name", "value", "match"), WRONG)
def test_options_that_are_refused_cannot_be_assigned(name, value, match):
    loss = losses().EstimatorLoss(Columns(), hardness_strength=2.0)
    setattr(loss, name, value)
    with pytest.raises(ValueError, match=match):
        value_and_gradients(loss.compute_loss_from_embeddings, columns_of(2, 5, seed=9))


def test_a_warning_of_theirs_is_given_once(caplog):
    loss = losses().EstimatorLoss(Columns(), hardness_mode="all_negatives")
    for _ in range(3):
        value_and_gradients(loss.compute_loss_from_embeddings, columns_of(2, 5, seed=9))
    assert sum("hardness weighting has no effect" in message for message in caplog.messages) == 1


def test_options_beside_an_estimator_cannot_be_assigned():
    loss = loss_of(estimator(), eval_scale=10.0)
    assert not hasattr(loss, "scale")
    with pytest.raises(AttributeError, match="scale=50.0 is an option of a loss without est=.*eval_scale"):
        loss.scale = 50.0
    loss.eval_scale = 50.0
    with torch.no_grad():
        columns = columns_of(2, 5, seed=6)
        found = loss.compute_loss_from_embeddings(columns)
        assert torch.equal(found, their_loss(False, scale=50.0).compute_loss_from_embeddings(columns, None))


@pytest.mark.parametrize("columns", [2, 3])
def test_a_last_batch_of_one_sample_has_their_loss(columns):
    """An epoch may end with such a batch, which their loss accepts."""
    data = [column[:1] for column in columns_of(columns, 5, seed=7)]
    found = value_and_gradients(losses().EstimatorLoss(Columns()).compute_loss_from_embeddings, data)
    expected = value_and_gradients(their_loss(False).compute_loss_from_embeddings, data, labels=None)
    torch.testing.assert_close(found, expected)


def test_a_similarity_of_its_own_does_not_read_rows():
    loss = losses().EstimatorLoss(Columns(), similarity_fct=Bilinear(), index_labels=True)
    with pytest.raises(ValueError, match="index_labels=True needs similarity_fct=cos_sim or dot_score"):
        loss.compute_loss_from_embeddings(columns_of(2, 5, seed=8), torch.arange(7))


def test_similarities_in_another_dtype_than_embeddings():
    """Autocast computes matrix products in bfloat16."""
    options = {"similarity_fct": lambda queries, documents: queries @ documents.T, "scale": 1.0}
    data = [column.float() for column in columns_of(3, 5, seed=8)]
    mine, other = losses().EstimatorLoss(Columns(), **options), type(their_loss(False))(None, **options)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = value_and_gradients(mine.compute_loss_from_embeddings, data)
        expected = value_and_gradients(other.compute_loss_from_embeddings, data, labels=None)
    for one, each in zip(found, expected, strict=True):
        torch.testing.assert_close(one.float(), each.float(), rtol=2e-2, atol=2e-2)


def test_the_cache_trains_a_similarity_that_learns():
    results = []
    for kind in ("EstimatorLoss", "CachedEstimatorLoss"):
        similarity = Bilinear()
        loss = loss_of(None, kind=kind, similarity_fct=similarity)
        value = loss(embed(loss.model, (texts(0), texts(1)), range(BATCH)), None)
        (value * 0.25).backward()
        results.append(similarity.weight.grad)
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-7)


class Bilinear(torch.nn.Linear):
    """A similarity of embeddings with parameters."""

    def __init__(self):
        torch.manual_seed(0)
        super().__init__(32, 32)

    def forward(self, queries, documents):
        return super().forward(queries) @ documents.T


def test_options_of_theirs_for_estimators_with_rows():
    options = losses().ranking_options(scale=20.0, hardness_mode="all_negatives", hardness_strength=9.0)
    assert repr(options["pairs"]) == "PairPolicy(hardness=9.0)"
    est = compopt.SogCLREstimator(N, gamma=1.0, reference="positive", **options)
    value = loss_of(est)(embed(encoder(), [texts(column) for column in range(3)], range(BATCH)), torch.arange(BATCH))
    value.backward()
    est.step()
    assert est.t == 1 and value.isfinite()
    assert losses().ranking_options(**BOTH)["directions"] == "both"
    with pytest.raises(ValueError, match="hardness_mode='all_negatives' with directions=.* weights some candidates on"):
        losses().ranking_options(hardness_mode="all_negatives", hardness_strength=2.0, **BOTH)
    with pytest.raises(ValueError, match=r"directions=\('query_to_doc', 'doc_to_query'\) with partition_mode='joint'"):
        losses().ranking_options(directions=("query_to_doc", "doc_to_query"))
    with pytest.raises(ValueError, match=r"similarity_fct=SentenceTransformer\.similarity is nothing .* take cos_sim"):
        losses().ranking_options(similarity_fct=encoder().similarity)  # otherwise silently the inner product
    with pytest.raises(ValueError, match="scale, hardness_mode must be left out beside est="):
        loss_of(est, scale=20.0, hardness_mode=None)
    with pytest.raises(TypeError, match="unexpected keyword argument 'scales'"):
        loss_of(None, scales=20.0)


@pytest.mark.parametrize(
    "labels", [None, torch.arange(7) // 2, torch.stack([torch.arange(7), torch.arange(7) // 3], 1)]
)
def test_labels_of_both_directions(labels):
    """Equal labels are not negatives, also in the second direction: the terms are those of two losses."""
    options = {"scale": 5.0, "index_labels": labels is not None}
    loss, one = losses().EstimatorLoss(Columns(), **options, **BOTH), losses().EstimatorLoss(Columns(), **options)
    z1, z2 = (z.requires_grad_() for z in columns_of(2, 5, seed=4))
    flipped = labels.flip(1) if labels is not None and labels.dim() == 2 else labels
    expected = one.compute_loss_from_embeddings([z1, z2], labels) + one.compute_loss_from_embeddings([z2, z1], flipped)
    torch.testing.assert_close(loss.compute_loss_from_embeddings([z1, z2], labels), expected / 2, rtol=1e-6, atol=1e-8)


def test_queries_as_further_candidates():
    """The direction query_to_query of their loss is ``negatives=(z1, index)`` of an estimator."""
    _, theirs = ranking("cos_sim", directions=("query_to_doc", "query_to_query"))
    data = columns_of(2, 5, seed=4)
    expected = value_and_gradients(theirs.compute_loss_from_embeddings, data, labels=None)
    est, index = compopt.InfoNCEEstimator(**losses().ranking_options(scale=7.0)), torch.arange(7)
    _, *found = value_and_gradients(lambda z: est(*z, index, negatives=(z[0], index)), data)
    torch.testing.assert_close([est.metrics["info_nce"], *found], expected, rtol=1e-6, atol=1e-9, check_dtype=False)


# -- a guide -----------------------------------------------------------------------------------------------------

STRATEGIES = pytest.mark.parametrize(
    "margin", [("absolute", 0.1), ("absolute", 0.0), ("absolute", -0.1), ("relative", 0.05), ("relative", 0.0)]
)


def gist(model, guide, columns=3, **options):
    """Return their loss: GISTEmbedLoss, or CachedGISTEmbedLoss for more than three columns."""
    from sentence_transformers.sentence_transformer.losses import CachedGISTEmbedLoss, GISTEmbedLoss

    options |= {"contrast_anchors": False, "contrast_positives": False}
    return CachedGISTEmbedLoss(model, guide, **options) if columns > 3 else GISTEmbedLoss(model, guide, **options)


class Given(Columns):
    """A model whose embeddings are one of its inputs times a weight; models of the same batch read different inputs."""

    max_seq_length = 8

    def __init__(self, name):
        super().__init__()
        self.name = name
        self.tokenizer = encoder().tokenizer
        self.weight = torch.nn.Parameter(torch.ones(5 if name == "x" else 4, dtype=torch.float64))

    def __getitem__(self, at):
        return self  # no StaticEmbedding

    def forward(self, inputs):
        return {"sentence_embedding": inputs[self.name] * self.weight}


def guided_inputs(columns, batch=7):
    pairs = zip(columns_of(columns, 5, seed=1), columns_of(columns, 4, seed=2), strict=True)
    return [{"x": x[:batch], "guide": guide[:batch]} for x, guide in pairs]


def guided_pair(kind, columns, batch=7, **options):
    """Return value, gradient of the model's weight, and value in evaluation, for our loss and for theirs."""
    found = []
    for build in (lambda *models, **o: loss_of(None, models[0], kind, guide=models[1], **o), gist):
        model, guide = Given("x"), Given("guide")
        more = {"mini_batch_size": 3} if kind.startswith("Cached") or (build is gist and columns > 3) else {}
        loss = build(
            model, guide, **options, **more, **({"columns": max(columns, 4 if more else 0)} if build is gist else {})
        )
        with torch.no_grad():
            evaluated = loss(guided_inputs(columns, batch), None)
        value = loss(guided_inputs(columns, batch), None)
        value.backward()
        assert guide.weight.grad is None
        found.append([value.detach(), model.weight.grad, evaluated])
    return found


@KINDS
@pytest.mark.parametrize("columns", [2, 3, 4])
@STRATEGIES
def test_the_guided_loss_is_theirs(margin, columns, kind):
    """Compare value and gradients, and the value in evaluation; with two negatives theirs is the cached loss."""
    options = {"margin_strategy": margin[0], "margin": margin[1], "temperature": 0.05}
    ours, theirs = guided_pair(kind, columns, **options)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-9)


def guided_on_two_ranks(group, columns, options):
    """Return value and gradients of this rank's half, by our loss and by GISTEmbedLoss, both gathered."""
    found, half = [], len(columns[0]["x"]) // 2
    for build in (lambda *models, **o: loss_of(None, models[0], guide=models[1], **o), gist):
        inputs = [{key: z[dist.get_rank() * half :][:half] for key, z in column.items()} for column in columns]
        leaves = [column["x"].requires_grad_() for column in inputs]
        value = build(Given("x"), Given("guide"), gather_across_devices=True, **options)(inputs, None)
        value.backward()
        found.append([value.detach(), *(leaf.grad for leaf in leaves)])
    return found


@pytest.mark.slow
@pytest.mark.distributed
def test_the_guided_loss_on_two_ranks():
    """If gathered, ours and theirs are that of the whole batch."""
    options = {"temperature": 0.05, "margin": 0.1}
    columns = guided_inputs(3, batch=6)
    leaves = [column["x"].requires_grad_() for column in columns]
    whole = gist(Given("x"), Given("guide"), **options)([dict(column) for column in columns], None)
    whole.backward()
    ours, theirs = zip(*the_pool(2, 60).run(guided_on_two_ranks, 2, guided_inputs(3, batch=6), options), strict=True)
    for rank, (_, *found) in enumerate(ours):
        expected = [2 * leaf.grad[3 * rank :][:3] for leaf in leaves]
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)
    assert all(value == pytest.approx(whole.item(), abs=1e-9) for value, *_ in ours)
    assert torch.stack([value for value, *_ in theirs]).mean().item() == pytest.approx(whole.item(), abs=1e-9)


@KINDS
@pytest.mark.parametrize("columns", [2, 3])
def test_a_last_batch_of_one_sample_has_their_guided_loss(columns, kind):
    ours, theirs = guided_pair(kind, columns, batch=1, margin=0.0)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-9)


@KINDS
@pytest.mark.parametrize("other", [False, True])
def test_a_guide_with_other_tokens_reads_the_texts(other, kind):
    from recipes.text import small_model, tokenizer_of

    torch.manual_seed(1)
    words = ["omega", "sigma", *WORDS] if other else WORDS
    guide = small_model(tokenizer_of(words * 2, words=64, length=16), width=32, layers=1).double()
    results = []
    for build in (lambda *models, **options: loss_of(None, models[0], kind, guide=models[1], **options), gist):
        loss = build(encoder().double(), guide, margin=0.05)
        loss(embed(loss.model, (texts(0), texts(1), texts(2)), range(BATCH)), None).backward()
        results.append(gradients(loss.model))
    assert (loss.must_retokenize, loss_of(None, guide=guide)._tokenizer is not None) == (other, other)
    torch.testing.assert_close(*results, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("batch", [1, 5])
def test_embeddings_of_a_guide_that_are_missing(batch):
    loss = losses().EstimatorLoss(Columns(), guide=Columns())
    with pytest.raises(ValueError, match="guides is missing, each column's embeddings by the guide"):
        loss.compute_loss_from_embeddings([column[:batch] for column in columns_of(2, 5, seed=7)])


def test_a_guide_beside_an_estimator_with_rows():
    options = losses().guided_options(temperature=0.05, margin=0.05)
    est, model, guide = compopt.SogCLREstimator(N, **options), Given("x"), Given("guide")
    loss = losses().EstimatorLoss(model, est, guide=guide)
    value = loss(guided_inputs(3), torch.arange(7))
    columns = guided_inputs(3)
    z1, z2, extra = (column["x"] for column in columns)
    other = compopt.SogCLREstimator(N, **options)
    bound = other.pairs.bind(guide=[c["guide"] for c in columns])
    assert torch.equal(value, other(z1, z2, torch.arange(7), negatives=extra, pairs=bound))
    value.backward()
    est.step()
    assert est.t == 1 and est.read(torch.arange(N))["count"].sum() == 7
    with torch.no_grad():
        assert loss(guided_inputs(3)) == their_loss(False).compute_loss_from_embeddings([z1, z2, extra], None)


def test_what_a_guide_refuses():
    guide, est = Given("guide"), compopt.InfoNCEEstimator(**losses().guided_options())
    with pytest.raises(ValueError, match="margin must be left out without guide="):
        loss_of(None, margin=0.1)
    with pytest.raises(
        ValueError, match="hardness_mode, scale must be left out beside guide=, which has temperature, ma"
    ):
        loss_of(None, guide=guide, scale=20.0, hardness_mode=None)
    with pytest.raises(ValueError, match="guide is NoneType|guide is None; build it with"):
        loss_of(est)
    with pytest.raises(ValueError, match="est has pairs=None and guide is Given"):
        loss_of(learned(), guide=guide)
    with pytest.raises(ValueError, match="margin_strategy must be one of"):
        loss_of(None, guide=guide, margin_strategy="both")
    with pytest.raises(ValueError, match=r"margin must be in \[0, 1\)"):
        losses().guided_options(margin_strategy="relative", margin=1.0)
    loss = loss_of(None, guide=guide, temperature=0.02)
    assert loss.get_config_dict() == {
        "guide": guide, "temperature": 0.02, "margin_strategy": "absolute", "margin": 0.0,
        "gather_across_devices": False,
    }  # fmt: skip
    with pytest.raises(AttributeError, match="scale=3.0 is an option of a loss without guide="):
        loss.scale = 3.0


def test_the_defaults_of_the_guided_loss_are_theirs():
    from sentence_transformers.sentence_transformer.losses import GISTEmbedLoss

    ours, known = (inspect.signature(each).parameters for each in (losses().guided_options, GISTEmbedLoss))
    assert {name: p.default for name, p in ours.items()} == {name: known[name].default for name in ours}
    others = {"model", "guide", "gather_across_devices", "contrast_anchors", "contrast_positives"}
    assert set(known) - set(ours) == others
