"""Losses for the ``SentenceTransformerTrainer`` that call an estimator."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping
from functools import lru_cache, partial
from inspect import signature
from typing import Any, cast

import torch
import torch.distributed as dist
from sentence_transformers.base.losses.gradcache import CachedLossMixin, _minibatch_ranges, has_static_embedding_input
from sentence_transformers.base.losses.merged_forward import embed_columns
from sentence_transformers.sentence_transformer.losses import GISTEmbedLoss, MultipleNegativesRankingLoss
from sentence_transformers.util import batch_to_device, cos_sim, dot_score, get_world_size, is_dist_initialized
from torch import Tensor, nn
from torch.nn.functional import normalize
from typing_extensions import Unpack

from compopt import checks
from compopt.checks.inputs import INTEGERS
from compopt.contrastive import ContrastiveEstimator
from compopt.distributed.ranks import ProcessGroup, Ranks
from compopt.distributed.wrappers import TrainingStep, current_step
from compopt.estimator.options import takes_options
from compopt.gradient_cache.cache import back_propagate, pad
from compopt.gradient_cache.towers import Tower
from compopt.integrations.sentence_transformers.options import (
    LossOptions,
    RankingOptions,
    estimator_options,
    guided_options,
)
from compopt.kernel.features import with_gradients
from compopt.module import as_module
from compopt.objective import Summary
from compopt.pairs import PairPolicy
from compopt.presets import InfoNCEEstimator

ADD_INDEX = "compopt.integrations.sentence_transformers.add_index"
CHECKED_BATCHES = 8  # number of batches for which labels are checked for classes
GATHER = "gather_across_devices"
READ = {*RankingOptions.__annotations__, "temperature", "citation"}  # attributes of the sentence-transformers loss
BOTH: RankingOptions = {"directions": ("query_to_doc", "doc_to_query"), "partition_mode": "per_direction"}
GUIDED = {name: p.default for name, p in signature(guided_options).parameters.items()}


@lru_cache(maxsize=1)
def _this_rank(world: ProcessGroup) -> ProcessGroup:
    """Return a process group with only this rank."""
    return dist.new_group([dist.get_rank(world)], use_local_synchronization=True)


class EstimatorLoss(nn.Module):
    """Loss that replaces ``MultipleNegativesRankingLoss`` by an estimator.

    Example:
        >>> import torch, compopt
        >>> from compopt.integrations.sentence_transformers import EstimatorLoss
        >>> class Model(torch.nn.Linear):  # what a SentenceTransformer does with the inputs of a column
        ...     def forward(self, inputs):
        ...         return {"sentence_embedding": super().forward(inputs["x"])}
        >>> model, est = Model(4, 4), compopt.SogCLREstimator(n=100, directions="forward")
        >>> loss = EstimatorLoss(model, est)
        >>> questions, answers = {"x": torch.randn(8, 4)}, {"x": torch.randn(8, 4)}
        >>> loss([questions, answers], labels=torch.arange(8)).backward()
        >>> est.step()
        >>> est.t
        1
        >>> theirs = EstimatorLoss(model, scale=50.0, hardness_mode="all_negatives", hardness_strength=5.0)
        >>> theirs([questions, answers]).backward()
        >>> guided = EstimatorLoss(model, guide=Model(4, 3), margin_strategy="relative", margin=0.05)
        >>> guided([questions, answers]).backward()

    Without an estimator this class has the value and gradients of that loss with the options that estimators have
    (:func:`ranking_options`), computed in closed form without an autograd graph of the similarities.
    ``SogCLREstimator(n, **ranking_options(...))`` adds rows to these options.

    The columns are (anchor, positive) or (anchor, positive, negative, ...): anchors are ``z1``, positives ``z2``, and
    negatives, if any, ``negatives``, candidates of every anchor. The loss of sentence-transformers has anchors in one
    direction: build the estimator with ``directions="forward"`` to obtain the same.

    The label column contains the rows, see :func:`add_index`: integers ``i``; or ``[i, j]``, where ``j`` is the row of
    the positive, so that equal positives are never each other's negatives; or ``[i, j, k, ...]`` with the rows of the
    negatives too. An estimator without rows requires no label column and ignores its values, which may be classes or
    scores; with ``index_labels=True`` the rows are used to exclude equal samples from each other's negatives. Without
    gradients (evaluation) the value is that of ``MultipleNegativesRankingLoss``, since the rows of another data set
    have no meaning.

    With ``guide=``, a model that is not trained, candidates are not negatives if the guide finds them more similar to
    the anchor than the positive. Without an estimator the value and gradients are those of
    ``GISTEmbedLoss(contrast_anchors=False, contrast_positives=False)``, also in evaluation; any estimator may be used,
    ``SogCLREstimator(n, **guided_options(...))``.

    Add :class:`EstimatorCallback` to the trainer, which commits after every step and saves the rows in checkpoints.

    Args:
        model: the ``SentenceTransformer``.
        est: the estimator, built after the training arguments, which create the process group. Under ``MatryoshkaLoss``
            one per dimension, ``{256: est, 64: est2}``, since their normalizers differ; an estimator without rows may
            be shared by all dimensions. ``None``: an :class:`~compopt.InfoNCEEstimator` with the options.
        eval_scale: ``scale`` of the loss in evaluation, if there is an estimator.
        index_labels: read the rows in the label column also for an estimator without rows.
        guide: model with the same inputs as ``model``; if their tokenizers differ, texts are decoded and tokenized
            again. An estimator must have ``PairPolicy(guided=True)``.
        **options: without an estimator, options of ``MultipleNegativesRankingLoss``, see :func:`ranking_options`, or
            with a guide those of :func:`guided_options`. The former can be read and assigned as attributes. With
            ``gather_across_devices`` the value is the mean over the anchors of all ranks, not only of this rank.
            With a ``similarity_fct`` other than ``cos_sim`` and ``dot_score`` sentence-transformers computes the loss.

    Raises:
        AttributeError: an option is assigned to a loss with an estimator.
        TypeError: ``est`` is not a contrastive estimator; the labels are not integers.
        IndexError: the label column contains rows beyond those of the estimator.
        ValueError: options are given with an estimator, belong to the other loss, or are refused by
            sentence-transformers or :func:`ranking_options`; ``guide`` is given for an estimator without ``guided``, or
            missing with it; there is no second column; an estimator with rows has no label column; a batch has one
            label; the number of labels per sample matches neither pairs nor columns; a dimension has no estimator; an
            enclosing loss calls this one several times with one batch (``AdaptiveLayerLoss``) for an estimator with
            rows; ``index_labels`` with a custom ``similarity_fct``.

    Warns:
        UserWarning: labels appear to be classes; an estimator without rows ignores several integers per sample, the
            rows of equal texts; or by the estimator.

    State and communication: those of the estimator.

    In a trainer::

        est = compopt.SogCLREstimator(n=len(data), tau=0.05, directions="forward")
        trainer = SentenceTransformerTrainer(model, args, add_index(data), loss=EstimatorLoss(model, est))
        trainer.add_callback(EstimatorCallback(est, trainer))
    """

    @takes_options((MultipleNegativesRankingLoss, GISTEmbedLoss), LossOptions)
    def __init__(
        self,
        model: nn.Module,
        est: ContrastiveEstimator | Mapping[int, ContrastiveEstimator] | None = None,
        eval_scale: float = 20.0,
        index_labels: bool = False,
        guide: nn.Module | None = None,
        **options: Unpack[LossOptions],
    ) -> None:
        super().__init__()
        checks.positive("eval_scale", eval_scale)
        checks.flag("index_labels", index_labels)
        self.model, self.eval_scale, self.index_labels = model, eval_scale, index_labels
        self.guide = guide
        self._tokenizer = None if guide is None else _other_tokenizer(model, guide)
        self._by_dimension = _checked(est, guide)
        ranking: dict[str, Any] = {**options}
        guided = {name: ranking.pop(name) for name in GUIDED if name in ranking}
        self._guided: dict[str, Any] = {}  # options of GISTEmbedLoss
        if self._by_dimension:
            if options:
                raise ValueError(
                    f"{', '.join(options)} must be left out beside est=, which has such options itself; build the "
                    f"estimator with **ranking_options(...), or leave est= out"
                )
            both = any(each.directions == "both" for each in self._by_dimension.values())
            ranking = {**(BOTH if both else {}), "scale": eval_scale}
        elif guide is not None:
            if others := ranking.keys() - {GATHER}:
                known = ", ".join(GUIDED)
                raise ValueError(f"{', '.join(sorted(others))} must be left out beside guide=, which has {known}")
            self._guided = {**GUIDED, **guided}
            ranking["scale"] = 1 / guided_options(**self._guided)["tau"]
        elif guided:
            raise ValueError(
                f"{', '.join(guided)} must be left out without guide=, the model that finds false negatives"
            )
        # holds the options, and is used in evaluation; model cards would report an attribute named ``loss``
        self.ranking = MultipleNegativesRankingLoss(cast(Any, None), **ranking)
        estimator_options(self.ranking)  # raises for options that estimators do not have
        self._accepted = self._options()
        modules = (as_module(each, state=False) for each in self._by_dimension.values())
        self.estimators = nn.ModuleList(modules)  # for changes of device, and for parameters of the trainer's optimizer
        self._checked_batches = 0
        self._latest: dict[int, Tensor | None] = {}  # labels of the latest call, by dimension

    def __getattr__(self, name: str) -> Any:
        if name in READ and not self._by_dimension and not self._guided:
            return getattr(self.ranking, name)
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in READ:
            super().__setattr__(name, value)
        elif self._by_dimension:
            raise AttributeError(
                f"{name}={value!r} is an option of a loss without est=; change the estimator, or eval_scale for the "
                f"loss in evaluation"
            )
        elif self._guided:
            raise AttributeError(f"{name}={value!r} is an option of a loss without guide=; build another loss")
        else:
            setattr(self.ranking, name, value)

    def forward(self, sentence_features: Iterable[dict[str, Any]], labels: Tensor | None = None) -> Tensor:
        """Compute the loss of tokenised columns of ``B`` texts, 0-d; ``labels`` are ``(B,)`` or ``(B, k)`` integers."""
        columns = list(sentence_features)
        guides = self._embed_by_guide(columns)
        return self.compute_loss_from_embeddings(embed_columns(self.model, columns), labels, guides)

    def compute_loss_from_embeddings(
        self, embeddings: list[Tensor], labels: Tensor | None = None, guides: list[Tensor] | None = None
    ) -> Tensor:
        """Compute the loss of embeddings, ``(B, d)`` per column, 0-d; ``SpladeLoss`` calls this with its embeddings.

        ``guides`` are the guide's embeddings, ``(B, g)`` per column.
        """
        if len(embeddings) < 2:
            raise ValueError("the data set needs two columns of text or more, (anchor, positive, negative, ...)")
        if torch.is_grad_enabled() and self._by_dimension:
            return self._call(self._estimator(embeddings[0].shape[1]), embeddings, labels, guides)
        if torch.is_grad_enabled() or self._guided:
            return self._ranking(embeddings, labels, guides)
        if self._by_dimension:
            self.ranking.scale = self.eval_scale  # eval_scale may have been assigned
        return self.ranking.compute_loss_from_embeddings(embeddings, cast(Any, labels))

    def _embed_by_guide(self, columns: list[dict[str, Any]]) -> list[Tensor] | None:
        """Return the guide's embeddings of each column; called first, since the model changes its inputs."""
        if self.guide is None:
            return None
        with torch.no_grad():
            return self._guides(self.guide, [self._inputs_of_guide(self.guide, dict(column)) for column in columns])

    def _guides(self, guide: nn.Module, columns: list[dict[str, Any]]) -> list[Tensor]:
        return embed_columns(guide, columns)

    def _inputs_of_guide(self, guide: Any, column: dict[str, Any]) -> dict[str, Any]:
        """Return a column's inputs for the guide; texts are tokenized again if the tokenizers differ."""
        if self._tokenizer is None:
            return column
        tokens = column["input_ids"]
        if "cu_seq_lens_q" in column:  # concatenated texts in one row
            tokens = tokens[0].split(column["cu_seq_lens_q"].diff().tolist())
        texts = self._tokenizer.batch_decode(tokens, skip_special_tokens=True)
        return batch_to_device(guide.preprocess(texts), guide.device)

    def _options(self) -> dict[str, Any]:
        return {name: getattr(self.ranking, name) for name in RankingOptions.__annotations__}

    def _ranking(self, embeddings: list[Tensor], labels: Tensor | None, guides: list[Tensor] | None) -> Tensor:
        """Compute the loss with the options, which may have changed since the last call."""
        loss = self.ranking
        if (options := self._options()) != self._accepted:
            MultipleNegativesRankingLoss(cast(Any, None), **options)  # raises for invalid values that were assigned
            self._accepted = options
        given = guided_options(**self._guided) if self._guided else estimator_options(loss)
        alone = not loss.gather_across_devices or get_world_size() == 1
        other = loss.similarity_fct not in (cos_sim, dot_score)
        if other and self.index_labels:
            raise ValueError("index_labels=True needs similarity_fct=cos_sim or dot_score of sentence_transformers")
        single = alone and len(embeddings[0]) == 1  # an estimator refuses a last batch of one sample
        if self._guided:
            if guides is None:
                raise ValueError("guides is missing, each column's embeddings by the guide; call the loss with inputs")
            if single:
                return _of_one_sample(embeddings, guides, given["pairs"], given["tau"])
        if single or other:
            return loss.compute_loss_from_embeddings(embeddings, cast(Any, labels))
        group = _this_rank(cast(ProcessGroup, dist.group.WORLD)) if alone and is_dist_initialized() else None
        est = InfoNCEEstimator(**given, process_group=group)
        value = self._call(est, embeddings, labels, guides)
        summary = cast(Summary, est._last)  # metrics would compute all metrics
        # the value is that for a sum over candidates, not for their mean
        return value + (summary.cross_entropy().mean() - value).detach()

    def _call(
        self,
        est: ContrastiveEstimator,
        embeddings: list[Tensor],
        labels: Tensor | None,
        guides: list[Tensor] | None = None,
    ) -> Tensor:
        """Call an estimator with the columns and the rows in the labels."""
        z1, z2, *negatives = embeddings
        self._refuse_second_call(est, z1.shape[1], labels)
        rows = self._rows(est, labels, len(z1), len(embeddings))
        given: dict[str, Any] = dict(zip(("index", "index2"), rows, strict=False))
        if negatives:
            further = torch.cat(negatives)
            given["negatives"] = (further, torch.cat(rows[2:])) if len(rows) > 2 else further
        if guides is not None:
            assert est.pairs is not None  # _checked()
            seen = [*guides[:2], *([torch.cat(guides[2:])] if negatives else [])]
            given["pairs"] = est.pairs.bind(guide=seen)
        try:
            return est(z1, z2, **given)
        except (IndexError, ValueError) as error:
            if rows and str(error).startswith(("index", "negatives[1]")):
                raise type(error)(f"the label column must hold the rows of the samples (add_index): {error}") from error
            raise

    def _estimator(self, dimension: int) -> ContrastiveEstimator:
        if None not in self._by_dimension:
            if dimension not in self._by_dimension:
                raise ValueError(f"no estimator for dimension {dimension}; there are {sorted(self._by_dimension)}")
            return self._by_dimension[dimension]
        est = self._by_dimension[None]
        built = est.normalizer.structure().get("dim")  # a memory has features of one dimension
        seen = next(iter(self._latest), dimension) if built is None else built
        if dimension != seen and (built is not None or est.n is not None):
            raise ValueError(
                f"embeddings have {dimension} dimensions and {'had' if built is None else 'the estimator is for'} "
                f"{seen}; under MatryoshkaLoss give every dimension an estimator of its own, EstimatorLoss(model, "
                f"{{{seen}: est, {dimension}: ...}}), for example {{d: compopt.recommended(d) for d in dims}}"
            )
        return est

    def _refuse_second_call(self, est: ContrastiveEstimator, dimension: int, labels: Tensor | None) -> None:
        """Raise for a second call with one batch before any backward pass: layers would share rows."""
        seen, self._latest[dimension] = self._latest.get(dimension), labels
        again = est.n is not None and est.pending and labels is not None and labels is seen
        if again and all(p.grad is None for p in self.model.parameters()):
            raise ValueError(
                "this loss is called twice with one batch, by AdaptiveLayerLoss or the like: layers would share rows; "
                "take an estimator without rows"
            )

    def _rows(self, est: ContrastiveEstimator, labels: Tensor | None, batch: int, columns: int) -> list[Tensor]:
        """Return the rows in the label column, by text column; an empty list if labels are not used."""
        if est.n is None and not self.index_labels:
            self._warn_about_ignored_rows(labels)
            return []
        needed = "index_labels is True" if est.n is None else f"{type(est).__name__} has rows for n={est.n} samples"
        if labels is None:
            raise ValueError(
                f"{needed}, and the data set has no label column with the rows of its samples; see {ADD_INDEX}"
            )
        if labels.is_floating_point() or labels.dtype == torch.bool:
            raise TypeError(
                f"{needed}: the label column must hold the rows of the samples, integers, got {labels.dtype}; give the "
                f"scores or classes another name, and see {ADD_INDEX}"
            )
        rows = list(labels.reshape(batch, -1).unbind(1))
        if len(rows) not in (1, 2, columns):
            raise ValueError(
                f"{len(rows)} labels per sample and {columns} columns of text; give the row of the sample, or those "
                f"of anchor and positive, or one for every column"
            )
        if self._checked_batches < CHECKED_BATCHES:  # unique() is too slow for every step
            self._checked_batches += 1
            different = len(rows[0].unique())
            if batch >= 8 and 2 * different < batch:
                self._checked_batches = CHECKED_BATCHES
                warnings.warn(
                    f"a batch of {batch} samples has {different} different labels, and equal ones are one sample; the "
                    f"label column must hold each sample's row (add_index), not its class",
                    stacklevel=5,
                )
        return rows

    def _warn_about_ignored_rows(self, labels: Tensor | None) -> None:
        """Warn once about several integers per sample, the form of the duplicates that :func:`add_index` declares."""
        if self._checked_batches == CHECKED_BATCHES or labels is None:
            return
        if labels.dim() == 2 and labels.dtype in INTEGERS:
            self._checked_batches = CHECKED_BATCHES
            warnings.warn(
                f"the label column has {labels.shape[1]} integers per sample, as add_index writes for equal texts, and "
                f"this loss, which has no rows, ignores them: equal texts are negatives of each other; pass "
                f"index_labels=True to the loss, or remove the column",
                stacklevel=6,
            )

    def get_config_dict(self) -> dict[str, Any]:
        """Return the options, or the estimators with their hyper-parameters, for the model card."""
        if self._guided:
            return {"guide": self.guide, **self._guided, GATHER: self.ranking.gather_across_devices}
        if not self._by_dimension:
            return self.ranking.get_config_dict()
        described = {
            dimension: {
                "estimator": type(est).__name__,
                "directions": est.directions,
                "sample_groups": [dict(group) for group in est.sample_groups],
            }
            for dimension, est in self._by_dimension.items()
        }
        return described.get(None, {"estimators": described})


class _MiniBatches(CachedLossMixin):
    """Mini-batches of a model that is not trained."""

    show_progress_bar = False

    def __init__(self, model: nn.Module, mini_batch_size: int, mini_batch_num_tokens: int | None) -> None:
        self.model, self.mini_batch_size, self.mini_batch_num_tokens = model, mini_batch_size, mini_batch_num_tokens


# MatryoshkaLoss decorates the calculate_loss of the mixin, which also splits flattened texts and images.
class CachedEstimatorLoss(CachedLossMixin, EstimatorLoss):
    """Loss with a gradient cache: negatives of the whole batch in the memory of a mini-batch.

    Example:
        >>> import torch, compopt
        >>> from compopt.integrations.sentence_transformers import CachedEstimatorLoss
        >>> class Model(torch.nn.Sequential):  # what a SentenceTransformer does with the inputs of a column
        ...     def forward(self, inputs):
        ...         return {"sentence_embedding": super().forward(inputs["input_ids"])}
        >>> est = compopt.DCLEstimator(tau=0.05, directions="forward")
        >>> loss = CachedEstimatorLoss(Model(torch.nn.Linear(4, 4)), est, mini_batch_size=2)
        >>> questions, answers = {"input_ids": torch.randn(8, 4)}, {"input_ids": torch.randn(8, 4)}
        >>> loss([questions, answers]).backward()

    Every text is encoded twice, as in ``CachedMultipleNegativesRankingLoss``: for the loss, and for its gradient. The
    gradient cache is that of sentence-transformers (one process, ``DistributedDataParallel``), or, in a trainer with
    :class:`~compopt.integrations.transformers.GradientCacheMixin`, :func:`compopt.gradient_cache` (also FSDP2 and
    DeepSpeed)::

        class CachedTrainer(GradientCacheMixin, SentenceTransformerTrainer):
            pass

    Args:
        model, est, eval_scale, index_labels, guide: see :class:`EstimatorLoss`, also for state, communication and
            warnings.
        **options: see :class:`EstimatorLoss`.
        mini_batch_size: number of texts per mini-batch.
        mini_batch_num_tokens: number of tokens per mini-batch; replaces ``mini_batch_size``.
        show_progress_bar: show the progress of the mini-batches.

    Raises:
        ValueError: the inputs of the model cannot be split into mini-batches (``StaticEmbedding``); or raised by
            :class:`EstimatorLoss`.
    """

    @takes_options((MultipleNegativesRankingLoss, GISTEmbedLoss), LossOptions)
    def __init__(
        self,
        model: nn.Module,
        est: ContrastiveEstimator | Mapping[int, ContrastiveEstimator] | None = None,
        mini_batch_size: int = 32,
        mini_batch_num_tokens: int | None = None,
        eval_scale: float = 20.0,
        show_progress_bar: bool = False,
        index_labels: bool = False,
        guide: nn.Module | None = None,
        **options: Unpack[LossOptions],
    ) -> None:
        super().__init__(model, est, eval_scale, index_labels, guide, **options)
        if has_static_embedding_input(model):
            raise ValueError("inputs of a StaticEmbedding cannot be cut into mini-batches; use EstimatorLoss")
        self.mini_batch_size = checks.positive_int("mini_batch_size", mini_batch_size)
        if mini_batch_num_tokens is not None:
            checks.positive_int("mini_batch_num_tokens", mini_batch_num_tokens)
        self.mini_batch_num_tokens, self.show_progress_bar = mini_batch_num_tokens, show_progress_bar
        self._learned: list[tuple[Tensor, Tensor]] = []  # parameters outside the model, and their gradients
        self._seen: list[Tensor] | None = None  # the guide's embeddings during the call

    def get_config_dict(self) -> dict[str, Any]:
        cached = {name: getattr(self, name) for name in ("mini_batch_size", "mini_batch_num_tokens")}
        return {**super().get_config_dict(), **cached}

    def forward(self, sentence_features: Iterable[dict[str, Any]], labels: Tensor | None = None) -> Tensor:
        columns = list(sentence_features)
        self._learned, self._seen = [], self._embed_by_guide(columns)
        step = current_step()
        if step is not None and torch.is_grad_enabled():
            return self._back_propagate(columns, labels, step)
        loss = self.forward_cached(columns, labels)
        self._seen = None
        return with_gradients(loss.detach().clone(), [(loss, torch.ones_like(loss)), *self._learned])

    def _back_propagate(self, columns: list[dict[str, Any]], labels: Tensor | None, step: TrainingStep) -> Tensor:
        """Compute the loss and accumulate its gradients by the engine of :func:`compopt.gradient_cache`."""
        towers = [self._tower(column) for column in columns]
        pad(next((est._ranks for est in self._by_dimension.values()), Ranks()), towers)
        outputs = [output for tower in towers for output in tower.encode_all()]
        try:
            loss = self.calculate_loss([[output.leaf] for output in outputs], labels, with_backward=True)
            for output in outputs:
                output.gradient = None if output.leaf.grad is None else step.scale * output.leaf.grad
            back_propagate(loss, towers, [(p, step.scale * g) for p, g in self._learned], step)
        except BaseException:
            for est in self._by_dimension.values():
                est.discard()  # the gradients of this window are incomplete
            raise
        finally:
            self._seen = None
        return loss

    def _tower(self, column: dict[str, Any]) -> Tower:
        """Return the model with the ranges of samples that the mixin encodes at a time."""

        def encode(_: Any, chosen: list[tuple[int, int]]) -> Tensor:
            (begin, end), graph = chosen[0], torch.is_grad_enabled()
            return self.embed_minibatch(dict(column), begin, end, with_grad=graph, copy_random_state=False)[0]

        ranges = _minibatch_ranges(column, self.mini_batch_size, self.mini_batch_num_tokens)
        return Tower(self.model, encode, ranges, 1, None)

    def _guides(self, guide: nn.Module, columns: list[dict[str, Any]]) -> list[Tensor]:
        batches = _MiniBatches(guide, self.mini_batch_size, self.mini_batch_num_tokens)
        each = partial(batches.embed_minibatch_iter, with_grad=False, copy_random_state=False)
        return [torch.cat([embedded for embedded, _ in each(column)]) for column in columns]

    def calculate_loss(
        self, reps: list[list[Tensor]], labels: Tensor | None = None, *, with_backward: bool = False
    ) -> Tensor:
        """Compute the loss of ``reps``, lists of mini-batches of embeddings ``(b, d)`` per column, for the mixin.

        With ``with_backward``, store gradients in ``reps`` and return the loss without its graph.
        """
        loss = self.compute_loss_from_embeddings([torch.cat(column) for column in reps], labels, self._seen)
        if not with_backward:
            return loss
        # autograd.grad instead of backward: the gradients of parameters of estimators and of a similarity_fct are
        # accumulated in the trainer's backward pass, which includes the scale of the loss
        leaves = [embedding for column in reps for embedding in column]
        learned = [p for part in (self.estimators, self.ranking) for p in part.parameters() if p.requires_grad]
        gradients = torch.autograd.grad(loss, [*leaves, *learned], allow_unused=True)
        for leaf, gradient in zip(leaves, gradients, strict=False):
            leaf.grad = gradient
        # MatryoshkaLoss decorates calculate_loss on the instance, and multiplies its result by a weight afterwards
        matryoshka, weight = vars(self).get("calculate_loss"), 1.0
        if matryoshka is not None:
            weights = dict(zip(matryoshka.matryoshka_dims, matryoshka.matryoshka_weights, strict=True))
            weight = float(weights[leaves[0].shape[1]])
        pairs = zip(learned, gradients[len(leaves) :], strict=True)
        self._learned += [(p, weight * g) for p, g in pairs if g is not None]  # None: parameter of another dimension
        return loss.detach()


def _other_tokenizer(model: Any, guide: Any) -> Any:
    """Return the model's tokenizer if the guide has another vocabulary or a shorter maximum; else ``None``."""
    own, other = (getattr(each, "tokenizer", None) for each in (model, guide))
    if own is None or other is None:
        return None
    longest = [getattr(each, "max_seq_length", None) or math.inf for each in (model, guide)]
    return own if own.get_vocab() != other.get_vocab() or longest[1] < longest[0] else None


def _of_one_sample(embeddings: list[Tensor], guides: list[Tensor], policy: PairPolicy, tau: float) -> Tensor:
    """Compute the guided loss of one sample with its own negatives; an estimator requires two samples."""
    (anchor, *others), (seen_by, *seen) = (normalize(torch.cat(columns), dim=1) for columns in (embeddings, guides))
    similar = torch.stack(seen) @ seen_by
    false = similar > cast(Tensor, policy.threshold(similar[0]))
    false[0] = False
    return -(torch.stack(others) @ anchor / tau).masked_fill(false, -torch.inf).log_softmax(0)[0]


def _checked(
    est: ContrastiveEstimator | Mapping[int, ContrastiveEstimator] | None, guide: nn.Module | None
) -> dict[Any, ContrastiveEstimator]:
    """Return estimators by dimension; the key ``None`` stands for any dimension."""
    if isinstance(est, Mapping) and not est:
        raise ValueError("est is an empty mapping; give it an estimator for each dimension")
    every: dict[Any, Any] = {} if est is None else dict(est) if isinstance(est, Mapping) else {None: est}
    for each in every.values():
        if not isinstance(each, ContrastiveEstimator):
            raise TypeError(f"est must be a contrastive estimator, got {type(each).__name__}")
        guided = each.pairs is not None and each.pairs.guided
        if guided != (guide is not None):
            raise ValueError(
                f"est has pairs={each.pairs} and guide is {None if guide is None else type(guide).__name__}; build it "
                f"with **guided_options(...), or PairPolicy(guided=True, ...), and give this loss guide=, or neither"
            )
    return every
