"""Moving averages of each sample's normalizer: SogCLR, iSogCLR, FastCLIP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor
from typing_extensions import Unpack

from compopt import checks
from compopt import functional as F
from compopt.batch import Batch
from compopt.checks.context import outside_of_graphs, refuse_derivatives, warn
from compopt.checks.inputs import check_values, check_vector
from compopt.checks.values import equal
from compopt.estimator.groups import GroupSpec, Hyper, as_groups
from compopt.estimator.options import PlacementOptions, takes_options
from compopt.estimator.parts import Call, Estimate, Normalizer
from compopt.functional import Scalar
from compopt.pairs import PairPolicy
from compopt.stores.rows import Column

Reference = Literal["none", "positive"]
# Factor of s_ii / tau inside the stored value: eq. 9 of SogCLR uses s_ij, iSogCLR and NeuCLIP use h_ij.
REFERENCES = {"none": 1.0, "positive": 0.0}


class MovingAverageEstimator(Normalizer):
    r"""Moving average of each sample's normalizer, stored as a logarithm.

    Example:
        >>> import torch, compopt
        >>> u = compopt.MovingAverageEstimator(n=100, gamma=0.5)
        >>> index = torch.tensor([3, 7])
        >>> u.update(torch.tensor([0.0, 1.0]), index).tolist()  # a first visit takes log g itself
        [0.0, 1.0]
        >>> u.step()

    .. math::
        u_i \leftarrow (1 - \gamma)\, u_i + \gamma\, (\epsilon + g_i), \qquad
        \alpha_i = \log u_i - \tfrac{s_{ii}}{\tau_i}\,[\text{reference is "none"}]

    ``reference="none"``: ``g_i = mean_j exp(s_ij / tau)``; the positive is in the outer function,
    ``-s_ii + tau log u_i``, and its weight in the gradient is 1.
    ``reference="positive"``: ``g_i = mean_j exp((s_ij - s_ii) / tau)``; the positive's weight is ``sum_j w_ij``. The
    stored value then depends on old values of ``s_ii``. It is too large while ``s_ii`` grows, and all weights are too
    small.

    ===========================================  ==============  =========================================
    paper                                        ``reference``   gradient of an anchor, with ``multiply_tau``
    ===========================================  ==============  =========================================
    SogCLR, eq. 9, 10 (both modes)               ``"none"``      ``-grad s_ii + sum_j w_ij grad s_ij``
    iSogCLR, eq. 11-14; FastCLIP; NeuCLIP eq. 3  ``"positive"``  ``sum_j w_ij (grad s_ij - grad s_ii)``
    ===========================================  ==============  =========================================

    In a :class:`~compopt.ContrastiveEstimator` this class is a normalizer. Used alone, it estimates the inner functions
    of a finite-sum compositional objective ``1/n sum_i f(g_i(w))``, see :meth:`update` and
    :func:`compopt.compositional_loss`; :class:`compopt.losses.InnerAverage` is for inner values that may be zero or
    negative.

    Args:
        n: number of samples, or a list of sample groups.
        gamma: in (0, 1]; weight of the newest value. 1 keeps no history.
        reference: ``"none"`` (SogCLR eq. 9) or ``"positive"`` (iSogCLR eq. 11-12, NeuCLIP eq. 3, FastCLIP).
        eps: added to ``g`` at every visit, including the first.
        process_group, offload, offload_dir, shard, dtype: placement and dtype of its own, see
            :class:`~compopt.Estimator`.

    Hyper-parameters, which may differ between sample groups: ``gamma``, ``eps``, and ``reference``, which is fixed
    after the first call.

    State, per sample: ``log_u`` (in nats, in the rows' dtype) and the number of visits (int32), one each per direction
    (bimodal), or one shared by both views (unimodal: ``g_i`` is the mean of the two, objective V2); when used alone,
    one value and one number of visits. The first visit sets ``log(eps + g)``.

    Communicates: in an estimator nothing itself; used alone see :meth:`update`.

    .. note::
        Eq. 10 of SogCLR divides by the previous ``u``. This class divides by the updated one, as eq. 4 of NeuCLIP and
        all public code; this bounds every weight by ``1 / gamma`` times the batch softmax. Section 4 of SogCLR prints
        one positive term for both directions, but its objective has two; this class follows the objective.

    Raises:
        ValueError: gamma outside (0, 1], eps < 0, an unknown reference.
        TypeError: a hyper-parameter that is not a number.

    Warns:
        UserWarning: the first call after a load has another temperature than the loaded averages.

    References:
        Yuan et al., SogCLR, ICML 2022, eq. 9, Algorithm 1; Qiu et al., iSogCLR, ICML 2023, eq. 12; Wei et al., NeuCLIP,
        eq. 3 and 4.
    """

    of_rows = ("reference",)
    _loaded = False  # the temperature of loaded rows was not compared yet

    @takes_options(Normalizer, PlacementOptions)
    def __init__(
        self,
        n: GroupSpec,
        gamma: float = 0.9,
        reference: Reference = "none",
        eps: float = 0.0,
        **placement: Unpack[PlacementOptions],
    ) -> None:
        super().__init__(as_groups(n), {"gamma": gamma, "reference": reference, "eps": eps}, **placement)

    def check(self, group: Mapping[str, Any]) -> None:
        checks.unit_interval("gamma", group["gamma"], "; it is the weight of the newest value, and 1 keeps no history")
        checks.non_negative("eps", group["eps"])
        checks.one_of("reference", group["reference"], REFERENCES)

    def check_load(self, state: Mapping[str, Any]) -> None:
        if "tau" in state.get("notes", {}):
            checks.positive("tau in the notes of the checkpoint", state["notes"]["tau"])
        own = [group["reference"] for group in self._groups]
        given = [group.get("reference") for group in state["sample_groups"] if isinstance(group, Mapping)]
        if not equal(own, given):
            raise ValueError(
                f"reference differs: the rows are of {given}, this estimator has {own}, whose log_u is another "
                f"quantity; build it with reference={given[0]!r}"
            )

    def check_pairs(self, policy: PairPolicy) -> None:
        """Accept every policy."""

    def columns(self, directions: int, dtype: torch.dtype) -> list[Column]:
        return [Column("log_u", directions, dtype, "log_mean_exp")]

    def estimate(self, call: Call) -> Estimate:
        pairs, hyper = call.pairs, call.hyper
        if call.training:
            self._note_temperature(call.tau)
        inside = hyper.choose("reference", REFERENCES)
        log_g = pairs.log_inner(inside)
        if call.unimodal:
            log_g = F.mean_of_views(pairs.of_other_view(log_g))
        log_g = F.add_eps(log_g, hyper("eps"))
        log_u = F.moving_average(call.rows["log_u"], log_g, hyper("gamma"), first=call.unseen)
        # the positive has weight 1 if s_ii is in the outer function (SogCLR, eq. 10), sum_j w_ij if it is in h_ij
        alpha = log_u
        weight: Scalar | None = None
        if isinstance(inside, Tensor):
            alpha = log_u + inside * pairs.minus_logit
            weight = torch.where(inside > 0, 1.0, pairs.sum_weights(alpha.expand_as(pairs.positive)))
        elif inside:
            alpha, weight = log_u + pairs.minus_logit, 1.0
        return Estimate(alpha, proposals={"log_u": log_u}, positive_weight=weight)

    def _note_temperature(self, tau: float | Tensor) -> None:
        """Save the temperature of the averages, and warn if rows were loaded that were averaged at another one."""
        before, fixed = self.notes.get("tau"), tau if isinstance(tau, float) else None
        if self._loaded and before is not None and _differs(tau, before):
            warn(
                f"the loaded rows were averaged at tau={before:.6g}, this call has "
                f"{'one per sample' if fixed is None else f'tau={fixed:.6g}'}, for which log u means something else; "
                f"the averages follow within a few visits"
            )
        self._loaded = False
        self._pending_notes = {} if fixed is None else {"tau": fixed}

    def restore_state(self, state: Mapping[str, Tensor]) -> None:
        super().restore_state(state)
        self._loaded = True

    def stored(
        self, rows: Mapping[str, Tensor], features: tuple[Tensor, Tensor], tau: float | Tensor, hyper: Hyper
    ) -> Tensor:
        positive = torch.linalg.vecdot(*features).unsqueeze(1)
        return rows["log_u"] - hyper.choose("reference", REFERENCES) * positive / tau

    @outside_of_graphs
    def update(self, log_g: Tensor, index: Tensor) -> Tensor:
        """Update the averages with a batch of inner values, and return them.

        In training mode with gradients enabled the new rows are deposited until :meth:`step`; otherwise nothing is
        deposited. Rows must have one value per sample: not in a bimodal estimator with both directions.

        Args:
            log_g: ``log g_i`` of the batch in nats (with several ranks, of this rank's part of it), ``(B,)``, floating
                point; no gradient is propagated.
            index: data-set positions, ``(B,)`` integers, preferably on the CPU.

        Returns:
            ``log u_i`` after the update, ``(B,)``, without a graph; float64 if ``log_g`` or the rows are, else float32.

        Raises:
            RuntimeError: a transform of ``torch.func``, or a checkpointed function.
            TypeError: ``log_g`` is not a floating-point tensor, ``index`` does not contain integers.
            ValueError: shapes other than ``(B,)``, or another B.
            IndexError: an index outside ``0 .. n - 1``.

        Communicates, with several ranks: as :class:`~compopt.ContrastiveEstimator`, with one float per sample.
        """
        with self._guard():
            self._check_one_value()
            refuse_derivatives(("log_g", log_g))
            values = {"log_g": check_values("log_g", log_g, "(B,)", 1)[:, None]}
            keys = {"index": check_vector("index", index, len(log_g))}
        batch = self._read(keys, values)
        log_u = self._average(batch.values["log_g"], batch)
        with self._rollback_on_error():
            if batch.depositing:
                self._deposit(batch, {"log_u": log_u})
            return batch.nan_if_bad(log_u)[batch.own].view(log_g.shape)

    def _average(self, log_g: Tensor, batch: Batch) -> Tensor:
        """Return updated averages of the batch over all ranks, ``(B, 1)``, without depositing them."""
        hyper, read = self._hyper(batch), batch.of()
        log_g = F.add_eps(log_g.to(batch.dtype), hyper("eps"))
        return F.moving_average(read.columns["log_u"], log_g, hyper("gamma"), read.unseen)


def _differs(tau: float | Tensor, loaded: float) -> bool:
    """Return whether temperatures differ from a number by more than a per cent; unknown for those on a device."""
    if isinstance(tau, Tensor):
        return tau.device.type != "cpu" or bool(((tau - loaded).abs() > 0.01 * loaded).any())
    return abs(tau - loaded) > 0.01 * loaded
