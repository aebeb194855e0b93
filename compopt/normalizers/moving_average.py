"""Moving averages of each sample's normalizer: SogCLR, iSogCLR, FastCLIP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from compopt import checks
from compopt import functional as F
from compopt.batch import COUNT, Batch
from compopt.checks.context import outside_of_graphs, refuse_transforms
from compopt.checks.inputs import check_values, check_vector
from compopt.estimator.call import Call, Estimate
from compopt.estimator.component import Normalizer, Temperature
from compopt.estimator.groups import GroupSpec, Hyper, as_groups
from compopt.estimator.options import PlacementOptions, takes_options
from compopt.functional import Scalar
from compopt.stores.layout import Column

if TYPE_CHECKING:
    from typing_extensions import Unpack

Reference = Literal["none", "positive"]
# Factor of s_ii / tau inside the stored value: eq. 9 of SogCLR keeps s_ij, iSogCLR and NeuCLIP h_ij.
REFERENCES = {"none": 1.0, "positive": 0.0}
# Column of each domain, and how several proposals for a row become one value.
DOMAINS = {"log": ("log_u", "log_mean_exp"), "linear": ("u", "mean")}


class MovingAverageEstimator(Normalizer):
    r"""Moving average ``u_i`` of the inner function of each sample, kept as ``log u_i``.

    .. math::
        u_i \leftarrow (1 - \gamma)\, u_i + \gamma\, (\epsilon + g_i), \qquad
        \alpha_i = \log u_i - \tfrac{s_{ii}}{\tau_i}\,[\text{reference is "none"}]

    ``reference="none"``: ``g_i = mean_j exp(s_ij / tau)``; the positive is in the outer function,
    ``-s_ii + tau log u_i``, and its weight in the gradient is 1.
    ``reference="positive"``: ``g_i = mean_j exp((s_ij - s_ii) / tau)``; the positive's weight is ``sum_j w_ij``. Every
    stored value then remembers an old positive, is too large while positives align, and shrinks all weights.

    ===========================================  ==============  =========================================
    paper                                        ``reference``   gradient of an anchor, with ``multiply_tau``
    ===========================================  ==============  =========================================
    SogCLR, eq. 9, 10 (both modes)               ``"none"``      ``-grad s_ii + sum_j w_ij grad s_ij``
    iSogCLR, eq. 11-14; FastCLIP; NeuCLIP eq. 3  ``"positive"``  ``sum_j w_ij (grad s_ij - grad s_ii)``
    ===========================================  ==============  =========================================

    As part of a :class:`~compopt.ContrastiveEstimator` it is a normalizer. Alone it serves any finite-sum
    compositional objective ``1/n sum_i f(g_i(w))``, see :meth:`update` and :func:`compopt.compositional_loss`.

    Args:
        n: number of samples, or a list of sample groups.
        gamma: in (0, 1]; the weight of the newest value. 1 keeps no history.
        reference: ``"none"`` (SogCLR eq. 9) or ``"positive"`` (iSogCLR eq. 11-12, NeuCLIP eq. 3, FastCLIP).
        eps: added to ``g`` at every visit, the first included.
        domain: ``"log"`` stores ``log u_i``; ``"linear"`` stores ``u_i``, for inner values that may be zero or negative
            (used alone only).
        process_group, offload, offload_dir, shard, dtype: placement when used alone, see
            :class:`~compopt.estimator.Component`.

    Hyper-parameters, which may differ between sample groups: ``gamma``, ``reference``, ``eps``.

    State, per sample: ``log_u`` (in nats, in the rows' dtype; ``u`` with ``domain="linear"``) and the number of visits
    (int32), one each per direction (bimodal), or one shared by all views (unimodal: ``g_i`` is the mean of their pairs,
    objective V2). A row never visited takes ``log(eps + g)`` itself. As a part it communicates nothing of its own;
    alone see :meth:`update`.

    .. note::
        Eq. 10 of SogCLR divides by the previous ``u``; eq. 4 of NeuCLIP and all public code by the updated one, as
        here; it also bounds every weight by ``1 / gamma`` of the batch softmax. Section 4 of SogCLR prints one positive
        term for both directions where its objective has two; the objective is followed.

    Raises:
        ValueError: gamma outside (0, 1], eps < 0, an unknown reference; as a part, a placement of its own.
        TypeError: a hyper-parameter that is no number.
        MemoryError: at the first use alone, where the rows do not fit; name a placement.
        RuntimeError: as a part, a method is called that only the owner has, such as ``update`` or ``step``.

    References:
        Yuan et al., SogCLR, ICML 2022, eq. 9, Algorithm 1; Qiu et al., iSogCLR, ICML 2023, eq. 12; Wei et al., NeuCLIP,
        eq. 3 and 4.

    Example:
        >>> import torch, compopt
        >>> u = compopt.MovingAverageEstimator(n=100, gamma=0.5)
        >>> index = torch.tensor([3, 7])
        >>> u.update(torch.tensor([0.0, 1.0]), index).tolist()  # a first visit takes log g itself
        [0.0, 1.0]
        >>> u.step()
    """

    @takes_options(Normalizer, PlacementOptions)
    def __init__(
        self,
        n: GroupSpec,
        gamma: float = 0.9,
        reference: Reference = "none",
        eps: float = 0.0,
        *,
        domain: Literal["log", "linear"] = "log",
        **placement: Unpack[PlacementOptions],
    ) -> None:
        checks.one_of("domain", domain, DOMAINS)
        self.domain = domain
        super().__init__(as_groups(n), {"gamma": gamma, "reference": reference, "eps": eps}, **placement)

    def check(self, group: Mapping[str, Any]) -> None:
        checks.unit_interval("gamma", group["gamma"], "; it is the weight of the newest value, and 1 keeps no history")
        checks.non_negative("eps", group["eps"])
        checks.one_of("reference", group["reference"], REFERENCES)

    def structure(self) -> dict[str, Any]:
        return {} if self.domain == "log" else {"domain": self.domain}  # checkpoints of before have none

    def check_free(self) -> None:
        super().check_free()
        if self.domain == "linear":
            raise ValueError('domain="linear" serves losses of your own; as normalizer it needs domain="log"')

    def meaning(self) -> dict[str, Any]:
        temperature = self._beside()
        return {} if temperature is None else {"tau": temperature.constants()}

    def _beside(self) -> Temperature | None:
        temperature = getattr(self.owner, "temperature", None)
        return temperature if isinstance(temperature, Temperature) else None

    def check_meaning(self, state: Mapping[str, Any]) -> None:
        own = [group["reference"] for group in self.sample_groups]
        given = [group["reference"] for group in state["sample_groups"]]
        if own != given:
            raise ValueError(
                f"reference differs: the rows are of {given}, this estimator has {own}, whose log_u is another "
                f"quantity; build it with reference={given[0]!r}"
            )
        temperature = self._beside()
        if temperature is not None and "tau" in state.get("meaning", {}):
            temperature.check_same(state["meaning"]["tau"], state["rows"][COUNT])

    def columns(self, directions: int, dtype: torch.dtype) -> list[Column]:
        name, reduce = DOMAINS[self.domain]
        return [Column(name, directions, dtype, reduce)]

    def estimate(self, call: Call) -> Estimate:
        pairs, hyper = call.pairs, call.hyper
        inside = hyper.choose("reference", REFERENCES)
        shift = None if isinstance(inside, float) and inside == 0 else inside * pairs.positive / call.tau
        log_g = pairs.log_ghat if shift is None else pairs.log_ghat + shift
        if call.unimodal:
            log_g = F.mean_of_views(pairs.of_other_view(log_g))
        log_g = F.add_eps(log_g, hyper("eps"))
        log_u = F.moving_average(call.rows["log_u"], log_g, hyper("gamma"), first=call.unseen("log_u"))
        alpha = log_u if shift is None else log_u - shift
        # the positive has weight 1 where s_ii is in the outer function (SogCLR, eq. 10), sum_j w_ij where it is in h_ij
        positive_weight: Scalar | None
        if isinstance(inside, float):
            positive_weight = 1.0 if inside else None
        else:
            positive_weight = torch.where(inside > 0, 1.0, pairs.sum_weights(alpha.expand_as(pairs.positive)))
        return Estimate(alpha, proposals={"log_u": log_u}, positive_weight=positive_weight)

    def stored(
        self, rows: Mapping[str, Tensor], features: tuple[Tensor, Tensor], tau: float | Tensor, hyper: Hyper
    ) -> Tensor:
        positive = torch.linalg.vecdot(*features).unsqueeze(1)
        return rows["log_u"] - hyper.choose("reference", REFERENCES) * positive / tau

    @outside_of_graphs
    def update(self, log_g: Tensor, index: Tensor) -> Tensor:
        """Fold a batch of inner values into the rows and return the updated averages.

        In training mode with gradients enabled the new rows are deposited and wait for :meth:`step`; otherwise
        nothing is. With ``domain="linear"`` arguments and results are ``g_i`` and ``u_i`` themselves, of any sign.

        Args:
            log_g: ``log g_i`` of the batch in nats (with several ranks, of this rank's part of it), ``(B,)``, floating
                point; no gradient flows through it.
            index: data-set positions, ``(B,)`` integers, best on the CPU.

        Returns:
            ``log u_i`` after the update, ``(B,)``, without a graph; float64 if ``log_g`` or the rows are, else float32.

        Raises:
            RuntimeError: this object is part of a ``ContrastiveEstimator``, which updates it; a transform of
                ``torch.func``, or a checkpointed function.
            TypeError: ``log_g`` is no floating-point tensor, ``index`` holds no integers.
            ValueError: shapes other than ``(B,)``, or another B.
            IndexError: an index outside ``0 .. n - 1``.

        Communicates, with several ranks: as :class:`~compopt.ContrastiveEstimator`, with one float per sample.
        """
        log_u, batch = self._average(log_g, index)
        self._deposit_average(log_u, batch)
        return batch.nan_if_bad(log_u[:, 0])[batch.own]

    def _average(self, log_g: Tensor, index: Tensor) -> tuple[Tensor, Batch]:
        """Return updated averages of the batch over all ranks, ``(B, 1)``; nothing is deposited yet."""
        refuse_transforms()
        with self._engine.handshake.guard():
            log_g = check_values("log_g", log_g, "(B,)", 1)
            keys = {"index": check_vector("index", index, len(log_g))}
        batch = self._read(keys, {"log_g": log_g})
        hyper = self._engine.groups.hyper(self.role, batch.rows, batch.dtype)
        new, gamma, eps = batch.values["log_g"].to(batch.dtype)[:, None], hyper("gamma"), hyper("eps")
        if self.domain == "linear":
            return torch.where(batch.unseen("u"), new + eps, torch.lerp(batch.columns["u"], new + eps, gamma)), batch
        return F.moving_average(batch.columns["log_u"], F.add_eps(new, eps), gamma, first=batch.unseen("log_u")), batch

    def _deposit_average(self, log_u: Tensor, batch: Batch) -> None:
        if batch.depositing:
            self._deposit(batch, {DOMAINS[self.domain][0]: log_u})
