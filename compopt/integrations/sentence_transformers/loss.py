"""A loss for the trainer that calls an estimator."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch
from sentence_transformers.base.losses.merged_forward import embed_columns
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from torch import Tensor, nn

from compopt import checks
from compopt.contrastive import ContrastiveEstimator
from compopt.integrations.sentence_transformers.rows import LabelReader
from compopt.module import as_module

UNCOMMITTED = 3  # updates without a commit, until a warning
_BOTH: dict[str, Any] = {"directions": ("query_to_doc", "doc_to_query"), "partition_mode": "per_direction"}


class EstimatorLoss(nn.Module):
    """An estimator in the place of ``MultipleNegativesRankingLoss``.

    The columns are (anchor, positive) or (anchor, positive, negative, ...): anchors are ``z1``, positives ``z2``, and
    negatives, if there are any, ``extra``: candidates of every anchor. The loss of sentence-transformers has anchors
    in one direction: give the estimator ``directions="forward"`` for the same.

    The label column has the rows, see :func:`add_index`: integers ``i``; or ``[i, j]``, where ``j`` is the row of the
    positive, by which equal positives are never each other's negatives; or ``[i, j, k, ...]`` with those of the
    negatives too. An estimator that keeps nothing per sample needs no label column. Where no gradient is wanted
    (evaluation), indices of another data set mean nothing: the value is that of ``MultipleNegativesRankingLoss``.

    Every step needs a commit, and checkpoints need the rows: add :class:`EstimatorCallback` to the trainer.

    Args:
        model: the ``SentenceTransformer``.
        est: the estimator, built after the training arguments, which make the process group. Under ``MatryoshkaLoss``
            one for each dimension, ``{256: est, 64: est2}``: their normalizers differ. One without rows may serve all.
        eval_scale: ``scale`` of the loss in evaluation.

    Raises:
        TypeError: ``est`` is no contrastive estimator; the labels are no integers.
        ValueError: no second column; no label column where there are rows; as many labels per sample as fit neither
            pairs nor columns; a dimension without an estimator; a loss around this one that calls it several times
            with one batch (``AdaptiveLayerLoss``), where there are rows.

    Warns:
        UserWarning: three updates without a commit; labels that look like classes.

    State and communication: as of the estimator.

    In a trainer::

        est = compopt.SogCLREstimator(n=len(data), tau=0.05, directions="forward")
        trainer = SentenceTransformerTrainer(model, args, add_index(data), loss=EstimatorLoss(model, est))
        trainer.add_callback(EstimatorCallback(est, trainer))

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
    """

    def __init__(
        self,
        model: nn.Module,
        est: ContrastiveEstimator | Mapping[int, ContrastiveEstimator],
        eval_scale: float = 20.0,
    ) -> None:
        super().__init__()
        self.model = model
        checks.positive("eval_scale", eval_scale)
        self.eval_scale = eval_scale
        self._dimensions = list(est) if isinstance(est, Mapping) else None
        estimators = list(est.values()) if isinstance(est, Mapping) else [est]
        if not estimators:
            raise ValueError("est is an empty mapping; give it an estimator for each dimension")
        for each in estimators:
            if not isinstance(each, ContrastiveEstimator):
                raise TypeError(f"est must be a contrastive estimator, got {type(each).__name__}")
        self.estimators = nn.ModuleList(as_module(each, state=False) for each in estimators)  # devices, parameters
        self._read_labels = LabelReader()
        self._batches: dict[int, Tensor | None] = {}  # labels that came last, by dimension
        self._uncommitted = 0

    def forward(self, sentence_features: Iterable[dict[str, Any]], labels: Tensor | None = None) -> Tensor:
        """The loss of a batch of tokenised columns, 0-d.

        Args:
            sentence_features: tokens of each column, ``B`` texts.
            labels: the label column, ``(B,)`` or ``(B, k)`` integers; see the class.
        """
        return self._loss(embed_columns(self.model, sentence_features), labels)

    def _loss(self, embeddings: list[Tensor], labels: Tensor | None) -> Tensor:
        if len(embeddings) < 2:
            raise ValueError("the data set needs two columns of text or more, (anchor, positive, negative, ...)")
        z1, z2, *negatives = embeddings
        if not torch.is_grad_enabled():
            both = _BOTH if self._all[0].directions == "both" else {}
            theirs: Any = MultipleNegativesRankingLoss(cast(Any, self.model), scale=self.eval_scale, **both)
            return theirs.compute_loss_from_embeddings(embeddings, labels)
        est = self._estimator(z1.shape[1])
        self._look_around(est, z1.shape[1], labels)
        needed = None if est.n is None else f"{type(est).__name__} has rows for n={est.n} samples"
        rows = self._read_labels(labels, len(z1), len(embeddings), needed)
        given: dict[str, Any] = dict(zip(("index", "index2"), rows, strict=False))
        if negatives:
            given["extra"] = torch.cat(negatives)
            if len(rows) > 2:
                given["extra_index"] = torch.cat(rows[2:])
        return est(z1, z2, **given)

    def _look_around(self, est: ContrastiveEstimator, dimension: int, labels: Tensor | None) -> None:
        """Refuse a second call with one batch; warn where updates pass and nobody commits."""
        seen, self._batches[dimension] = self._batches.get(dimension), labels
        if not est.pending or any(p.grad is not None for p in self.model.parameters()):
            return
        if labels is not None and labels is seen and est.n is not None:
            raise ValueError(
                "this loss is called twice with one batch, by AdaptiveLayerLoss or the like: layers would share rows; "
                "take an estimator without rows"
            )
        if est._attachments.listening() is not None:
            return
        self._uncommitted += 1  # gradients went, deposits did not
        if self._uncommitted == UNCOMMITTED:
            warnings.warn(
                f"{self._uncommitted} updates have passed, and nobody commits what {type(est).__name__} proposes: its "
                f"rows stay as they were; trainer.add_callback(EstimatorCallback(est, trainer)) before train()",
                stacklevel=5,
            )

    @property
    def _all(self) -> list[ContrastiveEstimator]:
        return [cast(ContrastiveEstimator, module.est) for module in self.estimators]

    def _estimator(self, dimension: int) -> ContrastiveEstimator:
        """That of an embedding dimension; ``MatryoshkaLoss`` calls this loss with several."""
        if self._dimensions is not None:
            if dimension not in self._dimensions:
                raise ValueError(f"no estimator for dimension {dimension}; there are {sorted(self._dimensions)}")
            return self._all[self._dimensions.index(dimension)]
        (est,) = self._all
        built = est.normalizer.structure().get("dim")  # a memory's, as of recommended: of one size
        seen = next(iter(self._batches), dimension) if built is None else built
        if dimension != seen and (built is not None or est.n is not None):
            raise ValueError(
                f"embeddings have {dimension} dimensions and {'had' if built is None else 'the estimator is for'} "
                f"{seen}; under MatryoshkaLoss give every dimension an estimator of its own, EstimatorLoss(model, "
                f"{{{seen}: est, {dimension}: ...}}), for example {{d: compopt.recommended(d) for d in dims}}"
            )
        return est

    def get_config_dict(self) -> dict[str, Any]:
        """Estimators with their hyper-parameters, for the model card."""
        described = [
            {
                "estimator": type(est).__name__,
                "directions": est.directions,
                "sample_groups": [dict(group) for group in est.sample_groups],
            }
            for est in self._all
        ]
        if self._dimensions is None:
            return described[0]
        return {"estimators": dict(zip(self._dimensions, described, strict=True))}
