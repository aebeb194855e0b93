"""Policies of pairs: which candidates are negatives of an anchor, and with which weight they enter its sums."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, NamedTuple

from torch import Tensor

from compopt import checks
from compopt.functional import Scalar

# Similarity of entries that are not pairs. Finite, so that 0 * MASKED is 0 and not NaN; far below any s / tau.
MASKED = -1e30
FalseNegatives = float | tuple[Literal["relative"], float]


@dataclass(frozen=True, kw_only=True, repr=False)
class PairPolicy:
    r"""Selection and weights of the pairs that an estimator contrasts; passed as ``pairs=``.

    Example:
        >>> import torch, compopt
        >>> policy = compopt.PairPolicy(false_negatives=-0.05, hardness=5.0)
        >>> policy
        PairPolicy(false_negatives=-0.05, hardness=5.0)
        >>> est = compopt.DCLEstimator(tau=0.1, pairs=policy)
        >>> est(*torch.randn(2, 8, 4, requires_grad=True)).backward()

    .. math::
        \log \hat g_i = \log \tfrac{1}{|N_i|} \sum_{j \in N_i} e^{h_{ij}/\tau_i + b_{ij}}, \qquad
        w_{ij} = \tfrac{1}{|N_i|}\, e^{h_{ij}/\tau_i + b_{ij} - \alpha_i}

    ``N_i`` is the set of candidates that the options keep, and ``|N_i|`` its size; ``b_ij`` is held constant, like the
    weights. The options can be combined with each other, with ``index2``, ``labels`` and ``negatives``, and with all
    normalizers and temperatures, except as listed below. A normalizer then stores the weighted mean over the
    candidates that are kept: ``log_u`` and the network's target are computed from ``ghat`` above, and the policy also
    selects and weights the queue of :class:`~compopt.MemoryNormalizer`. It does not apply to the prototypes of a
    network.

    Args:
        false_negatives: threshold above which a candidate is too similar to be a negative and is left out, for the
            anchors whose threshold it exceeds. A margin ``m``: candidates with ``s_ij > s_ii + m`` (GISTEmbed's margin
            is ``-m``). ``("relative", r)``: candidates with ``s_ij > s_ii - (1 - r) |s_ii|`` (NV-Retriever uses
            ``r = 0.95``). A copy of the positive has ``s_ij = s_ii`` up to rounding: a margin slightly below 0 leaves
            it out.
        guided: find false negatives by similarities of a guide's features instead of the estimator's own features;
            each call then needs :meth:`bind`.
        spare_negatives: never treat the further candidates ``negatives=`` as false negatives.
        hardness: ``beta`` of ``b_ij = beta s_ij``, >= 0; increases the weight of hard negatives.
        within: the candidates of an anchor are the samples with the same key, for example those of its data set or
            language; each call then needs :meth:`bind`.

    The options are part of ``repr(est)`` and of checkpoints; loading a checkpoint with other options raises an error.
    With several ranks, arguments that the options require (keys, features of the guide) are gathered with the features.

    *At a call* ``pairs=`` replaces the policy of the constructor, for a threshold or a hardness that follows a
    schedule, or for batches of several kinds. ``PairPolicy()`` selects and weights nothing. Rows then estimate the
    average over a sample's calls, each with its own policy. Checkpoints do not contain policies of calls. Whether a
    memory keeps keys for ``within`` is fixed by the constructor.

    Raises:
        TypeError, ValueError: a value of another type or out of range; ``guided`` or ``spare_negatives`` without
            ``false_negatives``.
        ValueError: with an estimator whose negatives are drawn (EMC2); ``guided`` with a memory; ``hardness`` with a
            :class:`~compopt.NeuralNormalizer` (NeuCLIP), whose prototypes have no such term. At a call: a
            policy with ``guided`` or ``within`` that is not bound; with a memory, a ``within`` that differs from the
            constructor's.

    References:
        Solatorio, GISTEmbed, 2024 (thresholds by a guide); Moreira et al., NV-Retriever, 2024 (relative thresholds);
        Lan et al., LLaVE, 2025, eq. 5 (detached weights ``exp(beta s_ij)``).
    """

    false_negatives: FalseNegatives | None = None
    guided: bool = False
    spare_negatives: bool = False
    hardness: float | None = None
    within: bool = False

    def __post_init__(self) -> None:
        for name in ("guided", "spare_negatives", "within"):
            checks.flag(name, getattr(self, name))
        _check_false_negatives(self.false_negatives)
        for name in ("guided", "spare_negatives"):
            if getattr(self, name) and self.false_negatives is None:
                raise ValueError(f"{name}=True says how false negatives are found; give false_negatives= too")
        if self.hardness is not None:
            checks.non_negative("hardness", self.hardness)
        # equal policies have equal values: they are compared by their ``repr`` in checkpoints and between ranks
        for name in ("false_negatives", "hardness"):
            object.__setattr__(self, name, _plain(getattr(self, name)))  # frozen
        if self.hardness == 0:
            object.__setattr__(self, "hardness", None)

    def __repr__(self) -> str:
        options = ((field, getattr(self, field.name)) for field in fields(self))
        return f"PairPolicy({', '.join(f'{f.name}={value!r}' for f, value in options if value != f.default)})"

    def bind(
        self, *, guide: Sequence[Tensor] | None = None, within: Tensor | tuple[Tensor, Tensor] | None = None
    ) -> BoundPolicy:
        """Return this policy with the tensors of one batch, for ``est(..., pairs=policy.bind(...))``.

        Args:
            guide: with ``guided``: features of another model, ``(B, g)`` for ``z1`` and for ``z2``, and ``(M, g)`` for
                ``negatives`` unless these are spared; no graph.
            within: with ``within``: keys ``(B,)``, integers; with ``negatives`` a pair, the second with the keys of
                ``negatives``, ``(M,)``.

        Raises:
            ValueError: a tensor for an option that the policy has not, or none for one that it has.

        Example:
            >>> import torch, compopt
            >>> policy, est = compopt.PairPolicy(within=True), compopt.DCLEstimator(tau=0.1)
            >>> z1, z2 = torch.randn(2, 8, 4, requires_grad=True)
            >>> est(z1, z2, pairs=policy.bind(within=torch.arange(8) // 4)).backward()
        """
        for name, option, value in (("guide", "guided", guide), ("within", "within", within)):
            if getattr(self, option) == (value is None):
                state = f"is missing, which {self} needs" if value is None else f"has no effect without {option}=True"
                raise ValueError(f"{name}= of PairPolicy.bind {state}")
        return BoundPolicy(self, guide, within)

    def threshold(self, positive: Tensor) -> Tensor | None:
        """Return the similarity above which a candidate is a false negative, from ``s_ii``, or ``None``."""
        if self.false_negatives is None:
            return None
        if isinstance(self.false_negatives, tuple):
            return relative_threshold(positive, self.false_negatives[1])
        return positive + self.false_negatives


def _plain(value: Any) -> Any:
    """Convert numbers, including those of numpy, to Python floats."""
    if isinstance(value, tuple):
        return tuple(_plain(item) for item in value)
    return value if value is None or isinstance(value, str) else float(value)


def relative_threshold(positive: Tensor, ratio: float) -> Tensor:
    """Return ``s_ii - (1 - r) |s_ii|``, which is ``r s_ii`` if positive (NV-Retriever, section 3.2: TopK-PercPos).

    ``|s_ii|`` keeps the threshold below ``s_ii`` if that is negative, as in GISTEmbedLoss of sentence-transformers.
    """
    return positive - (1 - ratio) * positive.abs()


def _check_false_negatives(value: FalseNegatives | None) -> None:
    """Raise an error unless the value is a margin or ``("relative", r)``."""
    if not isinstance(value, tuple):
        if value is not None:
            checks.number("false_negatives", value)
        return
    if len(value) != 2 or value[0] != "relative":
        raise ValueError(f'false_negatives must be a margin or ("relative", r), got {value!r}')
    checks.unit_interval("false_negatives[1]", value[1], "; it is the share of the positive's similarity")


class BoundPolicy(NamedTuple):
    """Policy of pairs with the tensors of one batch, the result of :meth:`PairPolicy.bind`."""

    policy: PairPolicy
    guide: Sequence[Tensor] | None
    within: Tensor | tuple[Tensor, Tensor] | None


NO_POLICY = PairPolicy()


class Axis(NamedTuple):
    """Data of a policy for the features along the rows or the columns of a matrix of similarities.

    Attributes:
        guide: features of the guide, ``(Q, g)``, or ``None``.
        key: keys ``within=``; pairs with different keys are excluded, ``(Q,)``, or ``None``.
        inside: number of features of the batch, which come first; the others are further candidates.
    """

    guide: Tensor | None
    key: Tensor | None
    inside: int

    def part(self, start: int, stop: int) -> Axis:
        """Return the part with the features ``start`` to ``stop``."""
        guide, key = (None if value is None else value[start:stop] for value in self[:2])
        return Axis(guide, key, min(max(0, self.inside - start), stop - start))


class Selection(NamedTuple):
    """Policy of one matrix of similarities.

    Attributes:
        policy: the options.
        rows, columns: data of the two axes.
        thresholds: thresholds of the anchors along the rows, ``(P, 1)``, and along the columns, ``(Q,)``; ``None``
            without the option ``false_negatives``, or for an axis without anchors.
    """

    policy: PairPolicy
    rows: Axis
    columns: Axis
    thresholds: tuple[Tensor | None, Tensor | None]

    def logits(self, s: Tensor, start: int, dim: int, scale: Scalar) -> Tensor:
        """Return ``s_ij + tau_i b_ij`` of a block, :data:`MASKED` for entries that are not pairs.

        Args:
            s: similarities of the rows from ``start`` on, masked for equal samples; not modified.
            start: first row of the block.
            dim: axis of the candidates; 1: the rows are anchors, 0: the columns are anchors.
            scale: ``1 / tau`` of the anchors, broadcastable to ``s``.
        """
        stop = start + s.shape[0]
        rows, (by_row, by_column) = self.rows.part(start, stop), self.thresholds
        candidates = self.columns if dim == 1 else rows
        threshold = by_column if dim == 0 else None if by_row is None else by_row[start:stop]
        hardness = self.policy.hardness
        result = s.clone() if hardness is None else s * (hardness / scale + 1)
        if threshold is not None:
            seen = s
            if rows.guide is not None and self.columns.guide is not None:
                seen = rows.guide @ self.columns.guide.T
                result += 0 * seen  # NaN for a guide that is not finite, whose comparison would be False
            found = seen > threshold
            if self.policy.spare_negatives:
                found.narrow(dim, candidates.inside, s.shape[dim] - candidates.inside).fill_(False)
            result.masked_fill_(found, MASKED)
        if rows.key is not None and self.columns.key is not None:
            result.masked_fill_(rows.key[:, None] != self.columns.key, MASKED)
        return result
