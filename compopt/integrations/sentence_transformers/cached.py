"""The same with a gradient cache."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
from sentence_transformers.base.losses.gradcache import CachedLossMixin, has_static_embedding_input
from torch import Tensor, nn

from compopt import checks
from compopt.contrastive import ContrastiveEstimator
from compopt.integrations.sentence_transformers.loss import EstimatorLoss


class CachedEstimatorLoss(CachedLossMixin, EstimatorLoss):
    """:class:`EstimatorLoss` with a gradient cache: the whole batch is negatives, in the memory of a mini-batch.

    Every text is encoded twice, as by ``CachedMultipleNegativesRankingLoss``: for the loss, and for its gradient.

    Args:
        model, est, eval_scale, index_labels: as there; so are state, communication and warnings.
        mini_batch_size: texts that are encoded at a time.
        mini_batch_num_tokens: if given, mini-batches have so many tokens instead.
        show_progress_bar: of the mini-batches.

    Raises:
        ValueError: the model has a ``StaticEmbedding``, whose inputs cannot be cut into mini-batches; whatever
            :class:`EstimatorLoss` raises.

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
    """

    def __init__(
        self,
        model: nn.Module,
        est: ContrastiveEstimator | Mapping[int, ContrastiveEstimator],
        mini_batch_size: int = 32,
        mini_batch_num_tokens: int | None = None,
        eval_scale: float = 20.0,
        show_progress_bar: bool = False,
        index_labels: bool = False,
    ) -> None:
        super().__init__(model, est, eval_scale, index_labels)
        if has_static_embedding_input(model):
            raise ValueError("inputs of a StaticEmbedding cannot be cut into mini-batches; use EstimatorLoss")
        self.mini_batch_size = checks.count("mini_batch_size", mini_batch_size)
        tokens = mini_batch_num_tokens
        self.mini_batch_num_tokens = None if tokens is None else checks.count("mini_batch_num_tokens", tokens)
        self.show_progress_bar = show_progress_bar
        self._owed: list[tuple[nn.Parameter, Tensor]] = []

    def forward(self, sentence_features: Iterable[dict[str, Any]], labels: Tensor | None = None) -> Tensor:
        self._owed = []
        loss = self.forward_cached(sentence_features, labels)
        if self._owed:
            loss.register_hook(partial(_pay, self._owed))
        return loss

    def calculate_loss(
        self, reps: list[list[Tensor]], labels: Tensor | None = None, *, with_backward: bool = False
    ) -> Tensor:
        """The loss of the whole batch, and its gradient in the cached embeddings: the part that the mixin calls.

        Args:
            reps: embeddings of each column by mini-batch, ``(b, d)`` each.
            labels: as of :meth:`forward`.
            with_backward: leave gradients in ``reps``, and return the loss without its graph.
        """
        loss = self.compute_loss_from_embeddings([torch.cat(column) for column in reps], labels)
        if not with_backward:
            return loss
        weight = _weight(vars(self).get("calculate_loss"), reps[0][0].shape[1])
        leaves = [embedding for column in reps for embedding in column]
        learned = [p for p in self.estimators.parameters() if p.requires_grad]
        gradients = torch.autograd.grad(loss, [*leaves, *learned], allow_unused=True)
        for leaf, gradient in zip(leaves, gradients, strict=False):
            leaf.grad = gradient
        for parameter, gradient in zip(learned, gradients[len(leaves) :], strict=True):
            if gradient is not None:  # another dimension's
                self._owed.append((parameter, weight * gradient))
        return loss.detach()


def _weight(decorator: Any, dimension: int) -> float:
    """What ``MatryoshkaLoss``, which has decorated ``calculate_loss``, multiplies the loss by afterwards."""
    if decorator is None:
        return 1.0
    return float(dict(zip(decorator.matryoshka_dims, decorator.matryoshka_weights, strict=True))[dimension])


def _pay(owed: list[tuple[nn.Parameter, Tensor]], scale: Tensor) -> None:
    """Gradients of learned temperatures, once it is known how the trainer scales the loss."""
    for parameter, gradient in owed:
        gradient = gradient * scale
        parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
