"""Presets without rows: InfoNCE (SimCLR, CLIP), DCL, SigLIP, a memory; and a recommendation."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from typing_extensions import Unpack

from compopt import checks
from compopt.contrastive import ContrastiveEstimator
from compopt.distributed.ranks import ProcessGroup
from compopt.estimator.options import takes_options
from compopt.kernel.triton.choice import Backend
from compopt.normalizers import BatchNormalizer, MemoryNormalizer, SigmoidNormalizer
from compopt.pairs import PairPolicy
from compopt.presets.options import CommonOptions, Options
from compopt.presets.published import by_mode
from compopt.temperatures import FixedTemperature

LENGTH, MOMENTUM_LENGTH = 128, 512  # samples in the memory: of features of the model, of momentum features
LARGE = 1024  # for batches of this size or more, LENGTH further negatives make little difference
CANDIDATES = 1000  # among which the positive counts: benchmarks/results/default.md and pretrained.md
TAU, UNIMODAL_TAU = 0.07, 0.1


def _temperature(tau: float | Tensor | None, learn: bool, options: Options) -> FixedTemperature:
    """Return the temperature of InfoNCE and DCL; both have the same defaults, so that they can be compared."""
    shared = by_mode(None, options, TAU, UNIMODAL_TAU) if tau is None else tau
    return FixedTemperature(shared, learn, options.get("dtype", torch.float32))


class InfoNCEEstimator(ContrastiveEstimator):
    r"""Stateless baseline: SimCLR, InfoNCE, and CLIP with ``learn_tau=True, multiply_tau=False``.

    Example:
        >>> import torch, compopt
        >>> est = compopt.InfoNCEEstimator(tau=0.1)
        >>> est(*torch.randn(2, 4, 8, requires_grad=True)).backward()

    .. math:: \alpha_i = \log \tfrac{1}{|N_i|} \Bigl([1 +] \sum_{j \in N_i} e^{h_{ij}/\tau}\Bigr)

    Args:
        tau: temperature, a number or a 0-d tensor; ``None``: 0.1 in unimodal mode (SimCLR's, according to section 5.1
            of SogCLR), 0.07 in bimodal mode (CLIP's, section 5.2).
        include_positive: keep the positive in the denominator (the usual loss). ``False`` is decoupled contrastive
            learning, :class:`~compopt.DCLEstimator`, the baseline for stateful methods.
        learn_tau: learn ``log(1/tau)``; pass ``est.parameters()`` to the optimizer, and ``multiply_tau=False``, without
            which the gradient only raises ``tau``.
        candidates: number of negatives of which those of the batch are taken as a sample; ``None``: their number.
            See :class:`~compopt.BatchNormalizer`.
        **options: see :class:`~compopt.ContrastiveEstimator`, also for calls, communication and errors.

    State: none per sample, so that ``index`` is optional if no sample repeats.

    References:
        van den Oord et al., 2018; Chen et al., SimCLR, 2020; Radford et al., CLIP, 2021.
    """

    @takes_options(ContrastiveEstimator, Options)
    def __init__(
        self,
        tau: float | Tensor | None = None,
        include_positive: bool = True,
        learn_tau: bool = False,
        candidates: int | None = None,
        **options: Unpack[Options],
    ) -> None:
        temperature = _temperature(tau, learn_tau, options)
        super().__init__(BatchNormalizer(include_positive, candidates), temperature, **options)


class DCLEstimator(ContrastiveEstimator):
    r"""Decoupled contrastive learning: the positive pair is left out of the denominator.

    Example:
        >>> import torch, compopt
        >>> est = compopt.DCLEstimator(tau=0.1)
        >>> est(*torch.randn(2, 4, 8, requires_grad=True)).backward()

    .. math::
        -s_{ii} + \tau \log \tfrac{1}{|N_i|} \sum_{j \in N_i} e^{s_{ij}/\tau}, \qquad
        w_{ij} = \frac{e^{s_{ij}/\tau}}{\sum_{k \in N_i} e^{s_{ik}/\tau}}

    With the positive in the denominator, all weights of an anchor shrink once its positive is easy, and the more so the
    fewer negatives the batch contains; without the positive the weights sum to one. This loss is the baseline against
    which stateful methods should be compared. Equivalent to ``InfoNCEEstimator(include_positive=False)``.

    Args:
        tau: temperature, a number or a 0-d tensor; ``None``: 0.1 in unimodal mode (SimCLR's, according to section 5.1
            of SogCLR), 0.07 in bimodal mode (CLIP's, section 5.2).
        learn_tau: learn ``log(1/tau)``; pass ``est.parameters()`` to the optimizer, and ``multiply_tau=False``, without
            which the gradient only raises ``tau``.
        **options: see :class:`~compopt.ContrastiveEstimator`, also for calls, communication and errors.

    State: none per sample, so that ``index`` is optional if no sample repeats.

    References:
        Yeh et al., Decoupled Contrastive Learning, ECCV 2022.
    """

    @takes_options(ContrastiveEstimator, Options)
    def __init__(self, tau: float | Tensor | None = None, learn_tau: bool = False, **options: Unpack[Options]) -> None:
        temperature = _temperature(tau, learn_tau, options)
        super().__init__(BatchNormalizer(include_positive=False), temperature, **options)


class SigLIPEstimator(ContrastiveEstimator):
    r"""Pairwise sigmoid loss (SigLIP): a binary classification per pair instead of a softmax.

    Example:
        >>> import torch, compopt
        >>> est = compopt.SigLIPEstimator()
        >>> est(*torch.randn(2, 4, 8, requires_grad=True)).backward()
        >>> [p.item() for p in est.parameters()]
        [-10.0, 2.3025851249694824]

    .. math::
        -\frac{1}{B} \sum_{i, j} \log \sigma\bigl(y_{ij} (s_{ij} / \tau + b)\bigr), \qquad
        y_{ij} = 1 \text{ for the positive, else } -1

    In bimodal mode both directions have the same terms: ``directions="forward"`` computes the same value and gradients
    at a lower cost. See :class:`~compopt.SigmoidNormalizer`.

    Args:
        tau: initial temperature, ``1 / t`` of the paper.
        bias: initial value of ``b``.
        learn: learn ``log(1/tau)`` and ``b``; pass ``est.parameters()`` to the optimizer.
        **options: see :class:`~compopt.ContrastiveEstimator`, also for calls, communication and errors.
            With ``mode="unimodal"`` both views of the other samples are negatives.

    State: the two parameters; none per sample, so that ``index`` is optional if no sample repeats.

    References:
        Zhai et al., Sigmoid Loss for Language Image Pre-Training, ICCV 2023, Algorithm 1 (initial values too).
    """

    @takes_options(ContrastiveEstimator, CommonOptions)
    def __init__(
        self, tau: float = 0.1, bias: float = -10.0, learn: bool = True, **options: Unpack[CommonOptions]
    ) -> None:
        dtype = options.get("dtype", torch.float32)
        super().__init__(
            SigmoidNormalizer(bias, learn, dtype), FixedTemperature(tau, learn, dtype), multiply_tau=False, **options
        )


class MemoryEstimator(ContrastiveEstimator):
    r"""DCL with a queue: negatives from the batch and from past batches, corrected for drift.

    Example:
        >>> import torch, compopt
        >>> est = compopt.MemoryEstimator(dim=16, length=64)
        >>> z1, z2 = torch.randn(2, 8, 16, requires_grad=True).unbind()
        >>> est(z1, z2, torch.arange(8)).backward()
        >>> est.step()

    .. math::
        \nabla F_i = \sum_{j \in N_i} w_{ij} \nabla h_{ij} + \sum_q w_{iq} \nabla_{z_i} h_{iq}, \qquad
        w \propto e^{h / \tau}, \quad \sum_j w_{ij} + \sum_q w_{iq} = 1

    The second sum has a gradient with respect to the anchor only. :class:`~compopt.MemoryNormalizer` describes the
    queue, its motivation and the sources.

    Args:
        dim: dimension of the features.
        length: number of samples in the queue.
        tau: temperature, a number or a 0-d tensor. ``benchmarks/results/default.md`` was measured at 0.07.
        momentum, candidates: see :class:`~compopt.MemoryNormalizer`.
        **options: see :class:`~compopt.ContrastiveEstimator`, also for calls, communication and errors.

    State: the queue, ``(2, length, dim)``, and three integers and a flag per slot; none per sample, so that ``index``
    is optional if no sample repeats within a batch or the queue, as it does if a batch is evaluated twice per step.
    """

    @takes_options(ContrastiveEstimator, Options)
    def __init__(
        self,
        dim: int,
        length: int = 128,
        tau: float | Tensor = 0.07,
        momentum: bool = False,
        candidates: int | None = None,
        **options: Unpack[Options],
    ) -> None:
        temperature = FixedTemperature(tau, dtype=options.get("dtype", torch.float32))
        super().__init__(MemoryNormalizer(dim, length, momentum, candidates), temperature, **options)


def recommended(
    dim: int,
    n: int | None = None,
    batch_size: int | None = None,
    mode: Literal["bimodal", "unimodal"] = "bimodal",
    directions: Literal["both", "forward"] = "both",
    chunk_size: int | None = None,
    process_group: ProcessGroup | None = None,
    pairs: PairPolicy | None = None,
    momentum: bool = False,
    backend: Backend = "auto",
    tau: float | Tensor = TAU,
    multiply_tau: bool = True,
    candidates: int | None = CANDIDATES,
) -> ContrastiveEstimator:
    """Return the recommended estimator; only the learning rate has to be tuned.

    Example:
        >>> import compopt
        >>> type(compopt.recommended(512, batch_size=64)).__name__
        'MemoryEstimator'
        >>> type(compopt.recommended(512, batch_size=4096)).__name__
        'InfoNCEEstimator'

    A :class:`~compopt.MemoryEstimator` of 128 samples at temperature 0.07; for calls of 1,024 samples or more, and
    with ``directions="forward"``, an :class:`~compopt.InfoNCEEstimator`. Nothing is kept per sample. ``docs/which.md``
    gives the reasons.

    The positive is in the denominator, as one of 1,000 candidates. An anchor whose positive ranks first among that many
    candidates, as for nearly all anchors of a pretrained encoder, has a small weight; an anchor whose positive only
    ranks first in its batch keeps a large one. ``candidates=None`` leaves the positive out. The weights of an anchor
    then sum to one, whatever the rank of its positive.
    From scratch that is sometimes up to a point better; a pretrained encoder may become worse than it was
    (``benchmarks/results/pretrained.md``).

    With ``momentum=True`` the memory is used at all batch sizes and has 512 samples, since features of a momentum
    encoder change more slowly. ``docs/guides/momentum.md`` has its learning rate, its gain and its cost: a third more
    forward passes and a second copy of the weights.

    Args:
        dim: dimension of the features.
        n: number of training samples, if known. The memory contains at most a quarter of the data set. ``n`` and
            ``batch_size`` decide what is built: to resume from a checkpoint, pass the same values as before.
        batch_size: number of samples of a call over all ranks; with gradient accumulation, of one micro-batch.
            ``None``: unknown, assumed to be small.
        mode: ``"bimodal"`` or ``"unimodal"``.
        directions, chunk_size, process_group, pairs, backend, multiply_tau: see
            :class:`~compopt.ContrastiveEstimator`.
        momentum: require ``keys=`` from a :class:`~compopt.MomentumEncoder` in every call; a call without
            them raises a ``ValueError``. The default ``decay`` of that encoder is meant for it. Not supported with
            ``directions="forward"``, where the encoder of the candidates would not be trained.
        tau: temperature, a number or a 0-d tensor.
        candidates: count the positive in the denominator, as one of so many candidates and itself. See
            :class:`~compopt.BatchNormalizer`. ``None``: do not; in one direction and for large batches the estimator is
            then a :class:`~compopt.DCLEstimator`.

    Returns:
        The estimator. This function communicates nothing; for the calls see the class of the estimator.

    Raises:
        ValueError: dim, n or batch_size < 1, an unknown mode, ``momentum`` with ``directions="forward"``, a policy of
            pairs that the estimator refuses.
        TypeError: dim, n or batch_size is not an integer.
    """
    checks.positive_int("dim", dim)
    checks.flag("momentum", momentum)
    length = MOMENTUM_LENGTH if momentum else LENGTH
    length = length if n is None else max(1, min(length, checks.positive_int("n", n) // 4))
    large = batch_size is not None and checks.positive_int("batch_size", batch_size) >= LARGE
    if momentum and directions == "forward":
        raise ValueError(
            'momentum=True with directions="forward" would train the encoder of z1 alone; leave directions out, or '
            "build compopt.MemoryEstimator if z1 and z2 come from one encoder"
        )
    options: Options = {
        "mode": mode,
        "directions": directions,
        "chunk_size": chunk_size,
        "process_group": process_group,
        "pairs": pairs,
        "backend": backend,
        "multiply_tau": multiply_tau,
    }
    if momentum or not (large or directions == "forward"):
        return MemoryEstimator(dim, length, tau, momentum, candidates, **options)
    if candidates is None:
        return DCLEstimator(tau, **options)
    return InfoNCEEstimator(tau, candidates=candidates, **options)
