r"""Networks that predict log-partitions from features: prototypes under a log-sum-exp, or a perceptron.

Letters (shapes): ``D`` networks (one per direction of anchors; 1 in unimodal mode, shared by both views), ``P``
anchors of each, ``d`` their dimension, ``m`` prototypes or hidden units. A network maps unit features ``e_i`` to

.. math:: \ell_i \approx \log \tfrac{1}{n} \sum_j e^{s_{ij}/\tau_i}

so that ``l_i - s_ii / tau_i`` is the log-normalizer. Gradients are written out: the two matrix products of an update
are all that it costs, and nothing is recorded by autograd.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import normalize

from compopt.distributed.ranks import Part, Ranks
from compopt.functional import Scalar
from compopt.kernel.features import NORM_MIN
from compopt.kernel.pairs import MASKED, MAX_UNSHIFTED_SCALE


class Sweep(ABC):
    """One batch of anchors before a network whose parameters change.

    Args:
        features: unit features of the anchors, ``(D, P, d)``.
        scale: ``1 / tau``, a number, or of each anchor, ``(D, P)``.

    Attributes:
        log_count: what :meth:`predict` leaves out.
    """

    log_count: Scalar = 0.0

    def __init__(self, features: Tensor, scale: Scalar) -> None:
        self.features, self.scale = features, scale

    @abstractmethod
    def predict(self, parameters: Sequence[Tensor]) -> Tensor:
        """``l_i + log_count``, with log-partitions ``l_i``, ``(D, P)``."""

    @abstractmethod
    def gradients(self, weight: Tensor) -> list[Tensor]:
        """Gradients of ``sum_i weight_i l_i`` with respect to the parameters of the last :meth:`predict`.

        Uses up what that kept; the result is overwritten by the next call.
        """

    @abstractmethod
    def feature_gradients(self, weight: Tensor) -> Tensor:
        """The same with respect to the features, ``(D, P, d)``; call it before :meth:`gradients`."""


class PrototypeSweep(Sweep):
    r"""``l_i = log 1/m sum_j exp(<e_i, W_j / |W_j|> / tau_i)`` over the active prototypes of all ranks (eq. 10, 11).

    Args:
        features, scale: see :class:`Sweep`.
        active: which of this rank's prototypes take part, ``(m_k,)``.
        log_count: logarithm of how many do on all ranks, 0-d.
        bounded: known on the host: no exponent is beyond what needs a maximum.
        ranks: hold ``m / K`` prototypes each.

    Communicates: :meth:`predict` and :meth:`partition` one all-reduce of ``D P`` doubles, :meth:`feature_gradients` one
    of ``D P d``.
    """

    def __init__(
        self, features: Tensor, scale: Scalar, active: Tensor, log_count: Tensor, bounded: bool, ranks: Ranks
    ) -> None:
        super().__init__(features, scale)
        self.bounded, self.ranks, self.log_count = bounded, ranks, log_count
        self._queries = features * (scale.unsqueeze(2) if isinstance(scale, Tensor) else scale)
        self._bias = active.log().clamp_(min=MASKED).to(features.dtype).expand(len(features), 1, -1)
        # work space, which the operation that fills it first makes
        self._logits: Tensor | None = None
        self._e: Tensor | None = None
        self._gradient: Tensor | None = None

    def predict(self, parameters: Sequence[Tensor]) -> Tensor:
        if self.bounded:
            return self.partition(parameters).log()
        logits = self._compare(parameters)
        top = logits.amax(2)
        self._e = torch.sub(logits, top.unsqueeze(2), out=self._e).exp_()
        total = self._e.sum(2)
        log_total = total.log().add_(top)
        # e_ij share_i are the softmax weights over all ranks
        if self.ranks.size == 1:
            self._share = total.reciprocal()
        else:  # of which some may have no active prototype
            log_total = self.ranks.log_sum_exp(log_total, self._centre())
            self._share = (top - log_total).exp_()
        return log_total

    def partition(self, parameters: Sequence[Tensor]) -> Tensor:
        """:meth:`predict` without its logarithm, where exponents are bounded; for :meth:`gradients_by_partition`."""
        self._e = torch.exp(self._compare(parameters), out=self._e)
        self._total = self.ranks.sum_in_doubles(self._e.sum(2))
        return self._total

    def _compare(self, parameters: Sequence[Tensor]) -> Tensor:
        """``<e_i, W_j / |W_j|> / tau_i``, far below all that occurs where a prototype is not active."""
        (self._weights,) = parameters
        norm = torch.linalg.vector_norm(self._weights, dim=2).unsqueeze(1)
        # a prototype of no length has no direction: its cosine is 0 and it does not learn
        self._norm = torch.threshold_(norm, NORM_MIN, torch.inf)
        products = torch.bmm(self._queries, self._weights.mT, out=self._logits)
        # columns rather than prototypes are divided by |W_j|, here and below: a batch is narrower than a feature
        self._logits = torch.addcdiv(self._bias, products, self._norm, out=products)
        return self._logits

    def _centre(self) -> Tensor:
        """Half of ``1 / tau``, ``(D, P)``."""
        half = self.scale / 2
        return half if isinstance(half, Tensor) else self.features.new_full(self.features.shape[:2], half)

    def _by_partition(self, weight: Tensor) -> Tensor:
        """What takes ``e_ij`` to ``weight_i softmax_ij``."""
        return weight / self._total if self.bounded else weight * self._share

    def gradients(self, weight: Tensor) -> list[Tensor]:
        return self.gradients_by_partition(self._by_partition(weight))

    def gradients_by_partition(self, quotient: Tensor) -> list[Tensor]:
        r""":meth:`gradients` of the weights ``quotient_i partition_i``.

        With ``q = weight_i softmax_ij / tau_i``: ``(sum_i q_ij (e_i - cos_ij W_j / |W_j|)) / |W_j|``.
        """
        assert self._logits is not None and self._e is not None
        e = self._e.div_(self._norm)
        along = torch.bmm(quotient.unsqueeze(1), self._logits.mul_(e)).div_(self._norm)  # sum_i q_ij cos_ij / |W_j|^2
        self._gradient = torch.bmm(e.mT, self._queries * quotient.unsqueeze(2), out=self._gradient)
        return [self._gradient.addcmul_(along.mT, self._weights, value=-1)]

    def feature_gradients(self, weight: Tensor) -> Tensor:
        assert self._e is not None
        factor = self._by_partition(weight * self.scale)
        return self.ranks.sum(torch.bmm(self._e / self._norm, self._weights).mul_(factor.unsqueeze(2)))


class PerceptronSweep(Sweep):
    r"""``l_i = 1/tau_i (b + sum_k v_k relu(<w_k, e_i> + c_k))``: AmorLIP's kind of network (Tables 14 to 16).

    The factor ``1 / tau`` makes the output a soft maximum of similarities, of one size for every temperature. Every
    rank computes the whole network.
    """

    def predict(self, parameters: Sequence[Tensor]) -> Tensor:
        self._parameters = parameters
        w, c, v, b = parameters
        self._hidden = torch.baddbmm(c.unsqueeze(1), self.features, w.mT).relu_()
        return (torch.bmm(self._hidden, v.unsqueeze(2)).squeeze(2) + b) * self.scale

    def gradients(self, weight: Tensor) -> list[Tensor]:
        weight = (weight * self.scale).unsqueeze(2)
        back = self._back(weight)
        return [
            torch.bmm(back.mT, self.features),
            back.sum(1),
            torch.bmm(self._hidden.mT, weight).squeeze(2),
            weight.sum(1),
        ]

    def _back(self, weight: Tensor) -> Tensor:
        """Gradient with respect to the hidden units before the threshold, ``(D, P, m)``."""
        return weight * self._parameters[2].unsqueeze(1) * (self._hidden > 0)

    def feature_gradients(self, weight: Tensor) -> Tensor:
        return torch.bmm(self._back((weight * self.scale).unsqueeze(2)), self._parameters[0])


class Network(ABC):
    """An architecture: the names and first values of its parameters, and how it meets a batch.

    Args:
        networks: ``D``.
        dim: ``d``.
        width: ``m``.
        ranks: who share the work.
    """

    names: tuple[str, ...]
    restarts: bool  # whether features can stand for its parameters

    def __init__(self, networks: int, dim: int, width: int, ranks: Ranks) -> None:
        self.networks, self.dim, self.width, self.ranks = networks, dim, width, ranks

    @abstractmethod
    def initial(self, dtype: torch.dtype, seed: int) -> list[Tensor]:
        """Parameters before the first batch (this rank's part of them)."""

    def seeded(self, dtype: torch.dtype, seed: int) -> list[Tensor]:
        """Parameters of a network that is used before any features are known."""
        return self.initial(dtype, seed)

    @abstractmethod
    def sweep(self, features: Tensor, scale: Scalar, active: Tensor, bounded: bool) -> Sweep:
        """Meet a batch; ``active``: the prototypes that are in use, ``(m,)``."""


class Prototypes(Network):
    """``m`` prototypes per network, split over the ranks."""

    names = ("prototypes",)
    restarts = True

    @property
    def part(self) -> Part:
        """The prototypes of this rank."""
        return self.ranks.part(self.width)

    def initial(self, dtype: torch.dtype, seed: int) -> list[Tensor]:
        return [torch.zeros(self.networks, self.part.size, self.dim, dtype=dtype, device="cpu")]

    def seeded(self, dtype: torch.dtype, seed: int) -> list[Tensor]:
        """Uniform on the sphere, the same for any number of ranks."""
        generator = torch.Generator().manual_seed(seed)
        shape = (self.networks, self.width, self.dim)
        drawn = torch.randn(shape, dtype=torch.float64, generator=generator, device="cpu")
        return [self.part.of(normalize(drawn, dim=2), dim=1).to(dtype)]

    def sweep(self, features: Tensor, scale: Scalar, active: Tensor, bounded: bool) -> Sweep:
        log_count = active.sum(dtype=features.dtype).log_()
        return PrototypeSweep(features, scale, self.part.of(active), log_count, bounded, self.ranks)


class Perceptron(Network):
    """One hidden layer of ``m`` units, replicated on every rank, with torch's default initialisation."""

    names = ("hidden_weight", "hidden_bias", "out_weight", "out_bias")
    restarts = False

    def initial(self, dtype: torch.dtype, seed: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(seed)
        shapes = ((self.width, self.dim), (self.width,), (self.width,), (1,))
        bounds = (self.dim, self.dim, self.width, self.width)
        drawn = [
            torch.rand(self.networks, *shape, dtype=torch.float64, generator=generator, device="cpu")
            for shape in shapes
        ]
        return [((2 * value - 1) / bound**0.5).to(dtype) for value, bound in zip(drawn, bounds, strict=True)]

    def sweep(self, features: Tensor, scale: Scalar, active: Tensor, bounded: bool) -> Sweep:
        return PerceptronSweep(features, scale)


def is_bounded(tau: float | Tensor) -> bool:
    """Whether cosines divided by ``tau`` can be exponentiated as they are, known on the host."""
    return isinstance(tau, float) and 1 / tau <= MAX_UNSHIFTED_SCALE


ARCHITECTURES: dict[str, type[Network]] = {"prototype": Prototypes, "mlp": Perceptron}
