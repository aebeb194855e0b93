"""Conversion of options of sentence-transformers losses to options of estimators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypedDict, cast

from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from sentence_transformers.util import cos_sim, dot_score
from torch import Tensor
from typing_extensions import Unpack

from compopt import checks
from compopt.pairs import Also, FalseNegatives, Hardness, PairPolicy


class RankingOptions(TypedDict, total=False):
    """Keywords of ``MultipleNegativesRankingLoss``."""

    scale: float
    similarity_fct: Callable[[Tensor, Tensor], Tensor]
    gather_across_devices: bool
    directions: tuple[Literal["query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc"], ...]
    partition_mode: Literal["joint", "per_direction"]
    hardness_mode: Literal["in_batch_negatives", "hard_negatives", "all_negatives"] | None
    hardness_strength: float


class GuidedOptions(TypedDict, total=False):
    """Keywords of ``GISTEmbedLoss``, except its models and ``gather_across_devices``."""

    temperature: float
    margin_strategy: Literal["absolute", "relative"]
    margin: float
    contrast_anchors: bool
    contrast_positives: bool


class LossOptions(RankingOptions, GuidedOptions, total=False):
    """Keywords of both losses."""


# candidates with a hardness weight; "others" excludes the anchor's own mined negatives
_HARDER: dict[str, Literal["mined", "others"]] = {"in_batch_negatives": "others", "hard_negatives": "mined"}
_ALSO: dict[str, Also] = {
    "query_to_query": "query_to_query",
    "doc_to_query": "document_to_query",
    "doc_to_doc": "document_to_every_document",
}


def ranking_options(**options: Unpack[RankingOptions]) -> dict[str, Any]:
    """Convert options of ``MultipleNegativesRankingLoss`` to options of estimators.

    ``scale`` becomes ``tau=1/scale``; additional ``directions`` of one softmax and ``hardness_strength`` become a
    :class:`~compopt.PairPolicy`; one softmax for each direction becomes ``directions="both"``.

    Args:
        **options: ``scale``, ``similarity_fct``, ``directions``, ``partition_mode``, ``hardness_mode`` and
            ``hardness_strength``, with the defaults of sentence-transformers. ``dot_score`` becomes
            ``normalize=False``. ``gather_across_devices`` has no effect: see the ``process_group`` of estimators.

    Returns:
        ``tau``, ``directions``, ``multiply_tau``, ``normalize`` and ``pairs``, keywords of the presets that have both
        ``tau`` and ``multiply_tau``. The gradient of an :class:`~compopt.InfoNCEEstimator` with them is that of the
        ranking loss.

    Raises:
        ValueError: a value is refused by sentence-transformers; hardness is combined with one softmax per direction;
            ``similarity_fct`` is neither ``cos_sim`` nor ``dot_score``.

    Example:
        >>> import compopt
        >>> from compopt.integrations.sentence_transformers import ranking_options
        >>> options = ranking_options(scale=50.0, hardness_mode="all_negatives", hardness_strength=5.0)
        >>> options["tau"], options["pairs"]
        (0.02, PairPolicy(hardness=5.0))
        >>> est = compopt.SogCLREstimator(n=1000, **options)
    """
    loss = MultipleNegativesRankingLoss(cast(Any, None), **options)
    if loss.similarity_fct not in (cos_sim, dot_score):
        named = getattr(loss.similarity_fct, "__qualname__", type(loss.similarity_fct).__name__)
        raise ValueError(
            f"similarity_fct={named} is nothing that estimators compute; take cos_sim or dot_score of "
            f"sentence_transformers.util, or EstimatorLoss without an estimator, or give the estimator the matrix of "
            f"similarities (docs/guides/similarities.md)"
        )
    first, *others = by_direction(loss)
    if others:
        raise ValueError(
            f"hardness_strength={options['hardness_strength']} weights the direction query_to_doc alone, and an "
            f"estimator both; use partition_mode='joint', or EstimatorLoss without an estimator"
        )
    return first


def guided_options(
    temperature: float = 0.01,
    margin_strategy: Literal["absolute", "relative"] = "absolute",
    margin: float = 0.0,
    contrast_anchors: bool = True,
    contrast_positives: bool = True,
) -> dict[str, Any]:
    """Convert options of ``GISTEmbedLoss``, with the same defaults, to options of estimators.

    Args:
        temperature: ``tau``.
        margin_strategy, margin: candidates above a threshold are not negatives. With the guide's similarity ``s`` of
            the positive, the threshold is ``s - margin`` (``"absolute"``) or ``s - margin |s|`` (``"relative"``).
        contrast_anchors, contrast_positives: add the similarities between anchors, and between positives, to the
            softmax of an anchor.

    Returns:
        ``tau``, ``directions``, ``multiply_tau`` and ``pairs``, keywords of the presets with both ``tau`` and
        ``multiply_tau``, for :class:`EstimatorLoss` with ``guide=``.

    Raises:
        TypeError, ValueError: a value has the wrong type or is out of range; a relative margin is outside [0, 1).

    Example:
        >>> import compopt
        >>> from compopt.integrations.sentence_transformers import guided_options
        >>> guided_options(margin=0.1, contrast_anchors=False, contrast_positives=False)["pairs"]
        PairPolicy(false_negatives=-0.1, guided=True)
        >>> est = compopt.SogCLREstimator(n=1000, **guided_options(temperature=0.05))
    """
    checks.positive("temperature", temperature)
    checks.one_of("margin_strategy", margin_strategy, ("absolute", "relative"))
    checks.flag("contrast_anchors", contrast_anchors)
    checks.flag("contrast_positives", contrast_positives)
    threshold: FalseNegatives = 0.0 - checks.number("margin", margin)
    if margin_strategy == "relative":
        checks.decay("margin", margin)
        threshold = ("relative", 1 - margin)
    kinds: dict[Also, bool] = {"query_to_query": contrast_anchors, "document_to_document": contrast_positives}
    also = tuple(kind for kind, contrasted in kinds.items() if contrasted)
    policy = PairPolicy(false_negatives=threshold, guided=True, also=also)
    return {"tau": temperature, "directions": "forward", "multiply_tau": False, "pairs": policy}


def by_direction(loss: MultipleNegativesRankingLoss) -> list[dict[str, Any]]:
    """Return the options of one estimator, or of one per direction if only the first direction has weights."""
    both = loss.partition_mode == "per_direction" and "doc_to_query" in loss.directions
    hardness: Hardness | None = None
    if loss.hardness_mode is not None and loss.hardness_strength:
        kind = _HARDER.get(loss.hardness_mode)
        hardness = loss.hardness_strength if kind is None else (kind, loss.hardness_strength)
    also = () if both else tuple(kind for name, kind in _ALSO.items() if name in loss.directions)
    options = {
        "tau": 1 / loss.scale,
        "directions": "both" if both and not hardness else "forward",
        "multiply_tau": False,
        "normalize": loss.similarity_fct is cos_sim,
        "pairs": PairPolicy(also=also, hardness=hardness) if also or hardness else None,
    }
    return [options, {**options, "pairs": None}] if both and hardness else [options]
