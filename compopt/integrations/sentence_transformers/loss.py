"""A loss for the trainer that calls an estimator."""

from __future__ import annotations

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

_BOTH: dict[str, Any] = {"directions": ("query_to_doc", "doc_to_query"), "partition_mode": "per_direction"}


class EstimatorLoss(nn.Module):
    """An estimator in the place of ``MultipleNegativesRankingLoss``.

    The columns are (anchor, positive) or (anchor, positive, negative, ...): anchors are ``z1``, positives ``z2``, and
    negatives, if there are any, ``extra``: candidates of every anchor. The loss of sentence-transformers has anchors
    in one direction: give the estimator ``directions="forward"`` for the same.

    The label column has the rows, see :func:`add_index`: integers ``i``; or ``[i, j]``, where ``j`` is the row of the
    positive, by which equal positives are never each other's negatives; or ``[i, j, k, ...]`` with those of the
    negatives too. An estimator without rows needs no label column and ignores one, which may hold classes or scores;
    with ``index_labels=True`` it reads the rows as well, so that equal ones are never each other's negatives. Where no
    gradient is wanted (evaluation), indices of another data set mean nothing: the value is that of
    ``MultipleNegativesRankingLoss``.

    Every step needs a commit, and checkpoints need the rows: add :class:`EstimatorCallback` to the trainer.

    Args:
        model: the ``SentenceTransformer``.
        est: the estimator, built after the training arguments, which make the process group. Under ``MatryoshkaLoss``
            one for each dimension, ``{256: est, 64: est2}``: their normalizers differ. One without rows may serve all.
        eval_scale: ``scale`` of the loss in evaluation.
        index_labels: read the rows in the label column for an estimator without rows too.

    Raises:
        TypeError: ``est`` is no contrastive estimator; the labels are no integers.
        IndexError: the label column has rows beyond those of the estimator.
        ValueError: no second column; no label column where there are rows; one label for a whole batch; as many labels
            per sample as fit neither pairs nor columns; a dimension without an estimator; a loss around this one that
            calls it several times with one batch (``AdaptiveLayerLoss``), where there are rows.

    Warns:
        UserWarning: labels that look like classes; what the estimator warns of.

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
        index_labels: bool = False,
    ) -> None:
        super().__init__()
        self.model = model
        checks.positive("eval_scale", eval_scale)
        checks.flag("index_labels", index_labels)
        self.eval_scale, self.index_labels = eval_scale, index_labels
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

    def forward(self, sentence_features: Iterable[dict[str, Any]], labels: Tensor | None = None) -> Tensor:
        """The loss of a batch of tokenised columns, 0-d.

        Args:
            sentence_features: tokens of each column, ``B`` texts.
            labels: the label column, ``(B,)`` or ``(B, k)`` integers; see the class.
        """
        return self.compute_loss_from_embeddings(embed_columns(self.model, sentence_features), labels)

    def compute_loss_from_embeddings(self, embeddings: list[Tensor], labels: Tensor | None = None) -> Tensor:
        """The loss of embeddings that a loss around this one has computed (``SpladeLoss``), 0-d.

        Args:
            embeddings: of each column, ``(B, d)``.
            labels: as of :meth:`forward`.
        """
        if len(embeddings) < 2:
            raise ValueError("the data set needs two columns of text or more, (anchor, positive, negative, ...)")
        z1, z2, *negatives = embeddings
        if not torch.is_grad_enabled():
            both = _BOTH if self._all[0].directions == "both" else {}
            theirs: Any = MultipleNegativesRankingLoss(cast(Any, self.model), scale=self.eval_scale, **both)
            return theirs.compute_loss_from_embeddings(embeddings, labels)
        est = self._estimator(z1.shape[1])
        self._refuse_second_call(est, z1.shape[1], labels)
        rows = self._rows(est, labels, embeddings)
        given: dict[str, Any] = dict(zip(("index", "index2"), rows, strict=False))
        if negatives:
            given["extra"] = torch.cat(negatives)
            if len(rows) > 2:
                given["extra_index"] = torch.cat(rows[2:])
        try:
            return est(z1, z2, **given)
        except (IndexError, ValueError) as error:
            if rows and str(error).startswith(("index", "extra_index")):
                raise type(error)(f"the label column must hold the rows of the samples (add_index): {error}") from error
            raise

    def _rows(self, est: ContrastiveEstimator, labels: Tensor | None, embeddings: list[Tensor]) -> list[Tensor]:
        """Rows in the label column by column of text, as many as there are; none where it means something else."""
        if est.n is not None:
            needed = f"{type(est).__name__} has rows for n={est.n} samples"
        elif self.index_labels:
            needed = "index_labels is True"
        else:
            return []
        return self._read_labels(labels, len(embeddings[0]), len(embeddings), needed)

    def _refuse_second_call(self, est: ContrastiveEstimator, dimension: int, labels: Tensor | None) -> None:
        """Layers that one batch goes through would share rows."""
        seen, self._batches[dimension] = self._batches.get(dimension), labels
        if est.n is None or not est.pending or labels is None or labels is not seen:
            return
        if all(p.grad is None for p in self.model.parameters()):
            raise ValueError(
                "this loss is called twice with one batch, by AdaptiveLayerLoss or the like: layers would share rows; "
                "take an estimator without rows"
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
