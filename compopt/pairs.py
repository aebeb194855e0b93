"""Policies of pairs: which candidates are negatives of an anchor, and with which weight they enter its sums."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal, cast, get_args

from torch import Tensor

from compopt import checks

FalseNegatives = float | tuple[Literal["relative"], float]
Hardness = float | tuple[float, float] | tuple[Literal["mined", "others"], float]
Importance = Literal["plain", "normalized", "differentiated"]
Prior = float | Literal["given"]
Positives = Literal["own", "labels"]
SoftTargets = float | Literal["classes"]
Also = Literal["query_to_query", "document_to_query", "document_to_document", "document_to_every_document"]


@dataclass(frozen=True, kw_only=True, repr=False)
class PairPolicy:
    r"""Selection of the pairs that an estimator contrasts, with log-weights ``b_ij``; passed as ``pairs=``.

    .. math::
        \log \hat g_i = \log \tfrac{1}{|N_i|} \sum_{j \in N_i} e^{h_{ij}/\tau_i + b_{ij}}, \qquad
        w_{ij} = \tfrac{1}{|N_i|}\, e^{h_{ij}/\tau_i + b_{ij} - \alpha_i}

    ``N_i`` is the set of candidates that the options keep, and ``|N_i|`` its size; ``b_ij`` is held constant, like the
    weights. Most options can be combined with each other, with ``index2``, ``labels`` and ``extra``, and with all
    normalizers and temperatures; the exceptions are listed below. A normalizer then stores the weighted mean over the
    candidates that are kept: ``log_u``, the ratio and the network's target are computed from ``ghat`` above, and the
    policy also selects and weights the queue of :class:`~compopt.MemoryNormalizer`. It does not apply to the prototypes
    of a network.

    Args:
        false_negatives: threshold above which a candidate is too similar to be a negative and is left out, for the
            anchors whose threshold it exceeds. A margin ``m``: candidates with ``s_ij > s_ii + m`` (GISTEmbed's margin
            is ``-m``). ``("relative", r)``: candidates with ``s_ij > s_ii - (1 - r) |s_ii|`` (NV-Retriever uses
            ``r = 0.95``). A copy of the positive has ``s_ij = s_ii`` up to rounding: a margin slightly below 0 leaves
            it out. With more than two views ``s_ii`` is the mean over an anchor's positives.
        guided: find false negatives by similarities of the ``guide=`` features instead of the estimator's own features.
        spare_extra: never treat the further candidates ``extra=`` as false negatives.
        hardness: ``beta`` of ``b_ij = beta s_ij``, >= 0; increases the weight of hard negatives (HCL's ``beta`` is
            ``beta / tau`` here). A pair ``(beta, beta_extra)``: for the candidates of the batch and for ``extra=``.
            ``("mined", beta)``: for the anchor's own further candidates only; ``("others", beta)``: for all other
            candidates. ``extra=`` must then have ``k B`` rows, of which the rows ``i``, ``B + i``, ... belong to anchor
            ``i`` (the columns of mined negatives, one after the other).
        importance: ``"plain"``: the weights above (LLaVE). ``"normalized"``: divided by their mean over ``N_i``, held
            constant. ``"differentiated"``: divided, and the gradient passes through the weights (HCL's code).
        prior: ``pi`` in (0, 1), the share of negatives that are in fact positives. The debiased estimate
            ``max((ghat_i - pi) / (1 - pi), exp((-1 - s_ii) / tau_i))`` replaces ``ghat_i``. ``"given"``: every call
            passes a value per sample, for example ``prior=table[index]`` with the share of its class. Where the
            estimate is at its floor (the second term), its gradient with respect to the negatives is zero. A loss
            without the positive in the denominator (:class:`~compopt.DCLEstimator`) then only attracts positives; use
            :class:`~compopt.InfoNCEEstimator` with a prior.
        mises_fisher: ``sigma`` > 0: the weight of the positive is
            ``2 - exp(s_ii / sigma) / mean_k exp(s_kk / sigma)``, held constant, with the mean over the batch (DCLW).
        positives: ``"own"``: the other modality of a sample, or each of its other views. ``"labels"``: all samples with
            the anchor's ``labels=``, in all views, are its positives, with equal weights, and remain candidates
            (SupCon, the form with the sum outside the logarithm).
        inside: with ``positives="labels"``: ``tau log mean_p exp(s_ip / tau)`` over the positives replaces the mean of
            ``s_ip`` (SupCon, the form with the sum inside the logarithm). Requires a temperature that is not learned.
        targets: the positive is the expectation of ``s_ij`` under weights that ``teacher=`` defines, and all samples
            are candidates. A number is the temperature of a softmax over the teacher's similarities; ``"classes"``:
            weights proportional to inner products of rows of soft labels. Here, and with ``positives="labels"``,
            further candidates (``extra=``) have weight 0 in the positive: they are negatives.
        also: further matrices of similarities that enter the sums of the anchors of ``directions="forward"``, where
            ``z1`` are queries and ``z2`` documents: ``"query_to_query"``, ``"document_to_document"`` (both without the
            sample itself) and ``"document_to_query"``, which counts the positive once more (GTE).
            ``"document_to_every_document"``: ``z2`` and the ``extra=`` of other anchors, with ``k B`` rows as above.
            One threshold per anchor decides about false negatives in all matrices; ``hardness``, and ``extra`` in the
            other cases, apply to the queries' similarities to documents only.
        within: ``True``: the candidates of an anchor are the samples with the same key in ``within=``, for example
            those of its data set or language.

    The options are part of ``repr(est)`` and of checkpoints; loading a checkpoint with other options raises an error.
    With several ranks, arguments that the options require (keys, priors, features of other models) are gathered with
    the features.

    *At a call* ``pairs=`` replaces the policy of the constructor, for a threshold or a hardness that follows a
    schedule, or for batches of several kinds. ``PairPolicy()`` selects and weights nothing. Rows then estimate the
    average over a sample's calls, each with its own policy. Checkpoints do not contain policies of calls. Whether a
    memory keeps keys for ``within`` is fixed by the constructor.

    Raises:
        TypeError, ValueError: a value of another type or out of range; options that require others (``guided`` and
            ``spare_extra`` need ``false_negatives``, ``importance`` needs one ``hardness``) or exclude them
            (``positives`` and ``targets`` can be combined with ``within`` only).
        ValueError: with an estimator whose negatives are drawn (EMC2); ``guided``, ``importance``, ``prior`` or
            ``mises_fisher`` with a memory; ``hardness``, ``prior`` or ``mises_fisher`` with a
            :class:`~compopt.NeuralNormalizer` (NeuCLIP), whose prototypes have no such terms; ``positives`` or
            ``targets`` with a network, a memory or ``include_positive=True``; ``also`` without
            ``directions="forward"``; ``prior`` without ``normalize``; ``inside`` with a temperature that is learned.
            At a call: an argument that an option requires is missing (``guide``, ``within``, ``teacher``, ``prior``,
            ``labels``), or passed without the option; with a memory, a ``within`` that differs from the constructor's.

    References:
        Solatorio, GISTEmbed, 2024 (thresholds by a guide); Moreira et al., NV-Retriever, 2024 (relative thresholds);
        Li et al., GTE, 2023, eq. 4, and Zhang et al., Qwen3 Embedding, 2025, eq. 1 (further similarities);
        Khosla et al., Supervised Contrastive Learning (SupCon), NeurIPS 2020, eq. 2 and 3;
        Robinson et al., Contrastive Learning with Hard Negative Samples (HCL), ICLR 2021, section 3; Lan et al., LLaVE,
        2025, eq. 5 (detached weights ``exp(beta s_ij)``); Schechter Vera et al., EmbeddingGemma, 2025 (of the mined
        negatives); Chuang et al., Debiased Contrastive Learning, NeurIPS 2020; Yeh et al., Decoupled Contrastive
        Learning, ECCV 2022, eq. 6 (DCLW).

    Example:
        >>> import torch, compopt
        >>> policy = compopt.PairPolicy(false_negatives=-0.05, hardness=5.0)
        >>> policy
        PairPolicy(false_negatives=-0.05, hardness=5.0)
        >>> est = compopt.DCLEstimator(tau=0.1, pairs=policy)
        >>> est(*torch.randn(2, 8, 4, requires_grad=True)).backward()
    """

    false_negatives: FalseNegatives | None = None
    guided: bool = False
    spare_extra: bool = False
    hardness: Hardness | None = None
    importance: Importance = "plain"
    prior: Prior | None = None
    mises_fisher: float | None = None
    positives: Positives = "own"
    inside: bool = False
    targets: SoftTargets | None = None
    also: tuple[Also, ...] = ()
    within: bool | None = None

    def __post_init__(self) -> None:
        for name in ("guided", "spare_extra", "inside"):
            checks.flag(name, getattr(self, name))
        if self.within is not None:
            checks.flag("within", self.within)
        _check_false_negatives(self.false_negatives)
        for name in ("guided", "spare_extra"):
            if getattr(self, name) and self.false_negatives is None:
                raise ValueError(f"{name}=True says how false negatives are found; give false_negatives= too")
        self._check_weights()
        self._check_also()
        self._check_positives()
        self._check_expected()
        self._normalize()

    def _normalize(self) -> None:
        """Give equal policies equal values: they are compared by their ``repr`` in checkpoints and between ranks."""
        first, second = self.strengths
        hardness = float(first) if first == second and not self.owned else _plain(self.hardness)
        values = {
            "false_negatives": _plain(self.false_negatives),
            "hardness": hardness if first or second else None,
            "prior": _plain(self.prior),
            "mises_fisher": _plain(self.mises_fisher),
            "targets": _plain(self.targets),
            "also": tuple(kind for kind in get_args(Also) if kind in self.also),
            "within": self.within or None,
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)  # frozen

    def _check_weights(self) -> None:
        for strength in self.strengths:
            checks.non_negative("hardness", strength)
        checks.one_of("importance", self.importance, get_args(Importance))
        one = self.strengths[0] > 0 and self.strengths[0] == self.strengths[1] and not self.also
        if self.importance != "plain" and not one:
            raise ValueError(
                f"importance={self.importance!r} divides by the mean of one kind of weights; give one hardness > 0 for "
                f"all candidates, and no also=, got hardness={self.hardness!r}"
            )
        if isinstance(self.prior, str):
            checks.one_of("prior", self.prior, ("given",))
        elif self.prior is not None and not 0 < checks.number("prior", self.prior) < 1:
            raise ValueError(f"prior must be in (0, 1), got {self.prior!r}; it is a share of the negatives")
        if self.mises_fisher is not None:
            checks.positive("mises_fisher", self.mises_fisher)

    def _check_also(self) -> None:
        for kind in self.also if isinstance(self.also, tuple) else ():
            checks.one_of("also", kind, get_args(Also))
        if not isinstance(self.also, tuple) or len(set(self.also)) < len(self.also):
            raise ValueError(f"also must be a tuple of different names, got {self.also!r}")
        if {"document_to_document", "document_to_every_document"} <= set(self.also):
            raise ValueError(f"also={self.also!r} has documents against documents twice; drop 'document_to_document'")

    def _check_positives(self) -> None:
        checks.one_of("positives", self.positives, get_args(Positives))
        if isinstance(self.targets, str):
            checks.one_of("targets", self.targets, ("classes",))
        elif self.targets is not None:
            checks.positive("targets", self.targets)
        if self.inside and self.positives != "labels":
            raise ValueError('inside=True says how several positives are summed; give positives="labels" too')

    def _check_expected(self) -> None:
        """Refuse options that need a single positive per anchor if the positive is an expectation."""
        if self.targets is not None and self.positives != "own":
            raise ValueError(
                f"targets={self.targets!r} and positives={self.positives!r} both say what is positive; drop one"
            )
        options = ("false_negatives", "hardness", "prior", "mises_fisher")
        given = [name for name in options if getattr(self, name) is not None] + ["also"] * bool(self.also)
        if self.expects and given:
            raise ValueError(
                f"{given[0]}={getattr(self, given[0])!r} is for an anchor's one positive, and with targets= or "
                f'positives="labels" all samples are; leave one of them out'
            )

    def __repr__(self) -> str:
        options = ((field, getattr(self, field.name)) for field in fields(self))
        return f"PairPolicy({', '.join(f'{f.name}={value!r}' for f, value in options if value != f.default)})"

    @property
    def expects(self) -> bool:
        """Return whether the positive of an anchor is an expectation over candidates."""
        return self.targets is not None or self.positives != "own"

    @property
    def asks(self) -> set[str]:
        """Names of the arguments that each call must pass."""
        options = {"guide": self.guided, "within": self.within}
        options |= {"teacher": self.targets is not None, "prior": self.prior == "given"}
        return {name for name, asked in options.items() if asked}

    @property
    def selects(self) -> bool:
        """Return whether the policy leaves pairs out or weights them."""
        return self.false_negatives is not None or any((*self.strengths, self.within, self.also))

    @property
    def owned(self) -> bool:
        """Return whether an anchor's own further candidates have another hardness than those of other anchors."""
        return isinstance(self.hardness, tuple) and self.hardness[:1] in (("mined",), ("others",))

    @property
    def asks_for_owners(self) -> bool:
        """Return whether ``extra=`` must have ``k B`` rows, so that every row belongs to a known anchor."""
        return self.owned or "document_to_every_document" in self.also

    @property
    def strengths(self) -> tuple[float, float]:
        """Hardness of the batch's candidates and of ``extra`` (:attr:`owned`: of the anchor's own); 0 if not set."""
        if not isinstance(self.hardness, tuple):
            return (0.0, 0.0) if self.hardness is None else (self.hardness, self.hardness)
        if len(self.hardness) != 2 or any(isinstance(value, str) for value in self.hardness[int(self.owned) :]):
            raise ValueError(
                f"hardness must be a number or (of the batch, of extra), or a number with whose it is, "
                f'("mined", number) or ("others", number), got {self.hardness!r}'
            )
        first, second = self.hardness
        if self.owned:
            return (0.0, second) if first == "mined" else (second, 0.0)
        return cast(float, first), second

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


NO_POLICY = PairPolicy()
