"""Contrastive objective for each pair of several modalities."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations

import torch
from torch import Tensor

from compopt import accelerator
from compopt.checks.inputs import check_vector
from compopt.contrastive import ContrastiveEstimator
from compopt.distributed.collectives import doing
from compopt.distributed.handshake import fingerprint
from compopt.distributed.ranks import Ranks

Pair = tuple[str, str]


def pairwise(
    est: ContrastiveEstimator | Mapping[Pair, ContrastiveEstimator],
    features: Mapping[str, Tensor],
    index: Tensor | Mapping[str, Tensor] | None = None,
) -> Tensor:
    r"""Return the sum of the objectives of pairs of modalities, each over the samples that have both modalities.

    .. math:: F = \sum_{(a, b)} F_{ab}\bigl(z^a_S, z^b_S\bigr), \qquad S = S_a \cap S_b

    Args:
        est: an estimator for each pair, ``{("image", "text"): est, ("image", "audio"): est2}``, each with its own rows
            and state; only these pairs are contrasted. Or an estimator without rows and state (InfoNCE, DCL) for all
            pairs.
        features: features of each modality, ``(B, d)``, as in a call of an estimator. Pairs with a modality that is
            missing here are omitted.
        index: positions in the data set, ``(B,)``, if all modalities have the same samples. If some samples lack a
            modality, positions per modality, ``{"image": (B_a,), "audio": (B_b,)}``, for features ``(B_a, d)`` and
            ``(B_b, d)``; samples are then matched by their positions, which must be distinct within a modality of a
            rank. A pair with fewer than two samples on all ranks together is omitted.

    State: that of the estimators. Call ``attach``, :func:`~compopt.save` and :func:`~compopt.load` for each of them.

    Communicates, with K ranks: the collectives of each estimator, in the order of ``est``; all estimators have the same
    process group. All ranks must have the same modalities in the same order; a rank may have no samples of a modality,
    ``(0, d)``. One small message precedes them, and a second one if ``index`` is given per modality.

    Returns:
        0-d loss; 0 if no pair has two samples.

    Raises:
        ValueError: ``features`` contains no pair of modalities, or a modality that is in no pair; an estimator with
            rows or a state is used for several pairs; a position occurs twice; ranks have different modalities, or
            another order of them.
        KeyError: a modality has no ``index`` while others have one.
        TypeError, ValueError, IndexError: raised by the call of an estimator.

    References:
        Girdhar et al., ImageBind, CVPR 2023, eq. 1: pairs of images and each other modality.

    Example:
        >>> import torch, compopt
        >>> pairs = [("image", "text"), ("image", "audio")]
        >>> est = {pair: compopt.SogCLREstimator(n=100) for pair in pairs}
        >>> z = {name: torch.randn(8, 4, requires_grad=True) for name in ("image", "text", "audio")}
        >>> loss = compopt.pairwise(est, z, torch.arange(8))
        >>> heard = {"image": z["image"], "audio": z["audio"][:3]}  # three samples have a sound
        >>> loss = loss + compopt.pairwise(est, heard, {"image": torch.arange(8), "audio": torch.arange(3)})
        >>> loss.backward()
    """
    pairs = _pairs(est, features)
    engine = next(iter(pairs.values()))._engine
    with doing("compopt.pairwise()", engine.t):
        _refuse_different(engine.ranks, list(pairs))
    if not isinstance(index, Mapping):
        return torch.stack([each(features[a], features[b], index) for (a, b), each in pairs.items()]).sum()
    with engine.handshake.guard():  # an error is reported to the other ranks
        positions = {name: _positions(name, index, len(z)) for name, z in features.items()}
    common = {(a, b): (positions[a][:, None] == positions[b]).nonzero(as_tuple=True) for a, b in pairs}
    # two positions per rank suffice to know if all ranks together have two different ones
    some = {(a, b): positions[a][rows][:2].tolist() for (a, b), (rows, _) in common.items()}
    by_rank = engine.ranks.gather_objects(some)
    loss = torch.stack([(z.float() * 0.0).sum() for z in features.values()]).sum()  # a gradient for every encoder
    for (a, b), (rows_a, rows_b) in common.items():
        if len(set().union(*(each[a, b] for each in by_rank))) >= 2:
            loss = loss + pairs[a, b](_at(features[a], rows_a), _at(features[b], rows_b), positions[a][rows_a])
    return loss


def _refuse_different(ranks: Ranks, pairs: list[Pair]) -> None:
    """Raise on all ranks unless all have the same pairs in the same order, so that no features are mixed up."""
    if ranks.size == 1:
        return
    message = ranks.blank()
    message[1] = fingerprint(pairs)
    if len(set(ranks.open(message)[:, 1].tolist())) > 1:
        raise ValueError(
            f"the ranks have different pairs of modalities, {ranks.gather_objects(pairs)}; pass the same in the same "
            f"order, with features (0, d) where a rank has no samples"
        )


def _positions(name: str, index: Mapping[str, Tensor], count: int) -> Tensor:
    """Return the positions of the ``count`` samples of a modality, on the CPU."""
    if name not in index:
        raise KeyError(f"index has no {name!r}; give it the positions of the {count} samples of that modality")
    positions = check_vector(f"index[{name!r}]", index[name], count).cpu()
    values, times = positions.unique(return_counts=True)
    if len(values) < count:
        raise ValueError(
            f"index[{name!r}] has {values[times > 1][0]} more than once; samples are found by their positions, pass "
            f"each once"
        )
    return positions


def _at(z: Tensor, rows: Tensor) -> Tensor:
    return z[accelerator.to_device(rows, z.device)]


def _pairs(
    est: ContrastiveEstimator | Mapping[Pair, ContrastiveEstimator], features: Mapping[str, Tensor]
) -> dict[Pair, ContrastiveEstimator]:
    """Return the pairs of the modalities in ``features``, with their estimators."""
    every = est if isinstance(est, Mapping) else dict.fromkeys(combinations(features, 2), est)
    unknown = set(features).difference(*every)
    pairs = {pair: each for pair, each in every.items() if set(pair) <= set(features)}
    if unknown or not pairs:
        raise ValueError(f"features has {sorted(features)}, of which {sorted(unknown or features)} make no pair of est")
    for pair, each in pairs.items():
        if not isinstance(each, ContrastiveEstimator):
            raise TypeError(f"est must have a contrastive estimator for {pair}, got {type(each).__name__}")
        keeps = each.n is not None or any(part.state for part in each._engine.parts.values())
        if keeps and (each is est or sum(each is other for other in every.values()) > 1):
            raise ValueError(
                f"{type(each).__name__} keeps a state, which belongs to one pair of modalities; pass an estimator for "
                f"each, {{{pair}: est, ...}}"
            )
    return pairs
