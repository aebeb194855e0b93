"""Conversion of options of sentence-transformers losses to options of estimators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypedDict, cast

from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from sentence_transformers.util import cos_sim, dot_score
from torch import Tensor
from typing_extensions import Unpack

from compopt import checks
from compopt.pairs import FalseNegatives, PairPolicy


class RankingOptions(TypedDict, total=False):
    """Keywords of ``MultipleNegativesRankingLoss``, with the values that an estimator computes."""

    scale: float
    similarity_fct: Callable[[Tensor, Tensor], Tensor]
    gather_across_devices: bool
    directions: tuple[Literal["query_to_doc", "doc_to_query"], ...]
    partition_mode: Literal["joint", "per_direction"]
    hardness_mode: Literal["all_negatives"] | None
    hardness_strength: float


class GuidedOptions(TypedDict, total=False):
    """Keywords of ``GISTEmbedLoss`` that :func:`guided_options` converts."""

    temperature: float
    margin_strategy: Literal["absolute", "relative"]
    margin: float


class LossOptions(RankingOptions, GuidedOptions, total=False):
    """Keywords of both losses."""


def ranking_options(**options: Unpack[RankingOptions]) -> dict[str, Any]:
    """Convert options of ``MultipleNegativesRankingLoss`` to options of estimators.

    Example:
        >>> import compopt
        >>> from compopt.integrations.sentence_transformers import ranking_options
        >>> options = ranking_options(scale=50.0, hardness_mode="all_negatives", hardness_strength=5.0)
        >>> options["tau"], options["pairs"]
        (0.02, PairPolicy(hardness=5.0))
        >>> est = compopt.SogCLREstimator(n=1000, **options)

    Args:
        **options: options with the defaults of sentence-transformers. ``scale`` becomes ``tau=1/scale``. ``dot_score``
            as ``similarity_fct`` becomes ``normalize=False``. ``directions=("query_to_doc", "doc_to_query")`` with
            ``partition_mode="per_direction"`` becomes ``directions="both"``, ``("query_to_doc",)`` ``"forward"``.
            ``hardness_mode="all_negatives"`` becomes ``PairPolicy(hardness=hardness_strength)``.
            ``gather_across_devices`` has no effect: see the ``process_group`` of estimators.

    Returns:
        ``tau``, ``directions``, ``multiply_tau``, ``normalize`` and ``pairs``, keywords of the presets that have both
        ``tau`` and ``multiply_tau``. The gradient of an :class:`~compopt.InfoNCEEstimator` with them is that of the
        ranking loss.

    Raises:
        ValueError: a value is refused by sentence-transformers; other ``directions``, or both in one softmax; another
            ``hardness_mode``, or a hardness with both directions; another ``similarity_fct``.
    """
    loss = MultipleNegativesRankingLoss(cast(Any, None), **options)
    if loss.similarity_fct not in (cos_sim, dot_score):
        named = getattr(loss.similarity_fct, "__qualname__", type(loss.similarity_fct).__name__)
        raise ValueError(
            f"similarity_fct={named} is nothing that estimators compute; take cos_sim or dot_score of "
            f"sentence_transformers.util, or EstimatorLoss without an estimator, or give the estimator the matrix of "
            f"similarities (docs/guides/pairs.md)"
        )
    return estimator_options(loss)


def guided_options(
    temperature: float = 0.01,
    margin_strategy: Literal["absolute", "relative"] = "absolute",
    margin: float = 0.0,
) -> dict[str, Any]:
    """Convert options of ``GISTEmbedLoss``, with the same defaults, to options of estimators.

    Example:
        >>> import compopt
        >>> from compopt.integrations.sentence_transformers import guided_options
        >>> guided_options(margin=0.1)["pairs"]
        PairPolicy(false_negatives=-0.1, guided=True)
        >>> est = compopt.SogCLREstimator(n=1000, **guided_options(temperature=0.05))

    The loss is ``GISTEmbedLoss(contrast_anchors=False, contrast_positives=False)``: the candidates are documents.

    Args:
        temperature: ``tau``.
        margin_strategy, margin: candidates above a threshold are not negatives. With the guide's similarity ``s`` of
            the positive, the threshold is ``s - margin`` (``"absolute"``) or ``s - margin |s|`` (``"relative"``).

    Returns:
        ``tau``, ``directions``, ``multiply_tau`` and ``pairs``, keywords of the presets with both ``tau`` and
        ``multiply_tau``, for :class:`EstimatorLoss` with ``guide=``.

    Raises:
        TypeError, ValueError: a value has the wrong type or is out of range; a relative margin is outside [0, 1).
    """
    checks.positive("temperature", temperature)
    checks.one_of("margin_strategy", margin_strategy, ("absolute", "relative"))
    threshold: FalseNegatives = 0.0 - checks.number("margin", margin)
    if margin_strategy == "relative":
        checks.decay("margin", margin)
        threshold = ("relative", 1 - margin)
    policy = PairPolicy(false_negatives=threshold, guided=True)
    return {"tau": temperature, "directions": "forward", "multiply_tau": False, "pairs": policy}


def estimator_options(loss: MultipleNegativesRankingLoss) -> dict[str, Any]:
    """Return the options of the estimator that computes the loss, or raise an error if there is none."""
    both = set(loss.directions) == {"query_to_doc", "doc_to_query"} and loss.partition_mode == "per_direction"
    if not both and set(loss.directions) != {"query_to_doc"}:
        raise ValueError(
            f"directions={loss.directions} with partition_mode={loss.partition_mode!r} are not those of an estimator; "
            f"use MultipleNegativesRankingLoss itself, or, for queries among the candidates of queries, "
            f"est(z1, z2, index, negatives=(z1, index)) in a loop"
        )
    hardness = loss.hardness_strength if loss.hardness_mode is not None else 0.0
    if hardness and (both or loss.hardness_mode != "all_negatives"):
        raise ValueError(
            f"hardness_mode={loss.hardness_mode!r} with directions={loss.directions} weights some candidates only, and "
            f'an estimator all; use MultipleNegativesRankingLoss itself, or "all_negatives" with ("query_to_doc",)'
        )
    return {
        "tau": 1 / loss.scale,
        "directions": "both" if both else "forward",
        "multiply_tau": False,
        "normalize": loss.similarity_fct is cos_sim,
        "pairs": PairPolicy(hardness=hardness) if hardness else None,
    }
