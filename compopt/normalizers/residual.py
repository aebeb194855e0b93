"""Network predictions corrected, per sample, by a moving average of the ratio of batch estimate and prediction."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.nn.functional import l1_loss

from compopt import checks
from compopt import functional as F
from compopt.checks.values import Range
from compopt.estimator.component import Call, Estimate, Normalizer, Setting
from compopt.estimator.groups import GroupSpec, Hyper, SampleGroups
from compopt.normalizers.network import check_ring
from compopt.normalizers.neural import NeuralNormalizer
from compopt.stores.layout import Column

Prediction = Literal["before", "after"]
FirstVisit = Literal["one", "ratio"]


class ResidualNormalizer(Normalizer):
    r"""Network prediction times a moving average of the ratio of the batch estimate and the prediction.

    .. math::
        r_i \leftarrow (1 - \gamma)\, r_i + \gamma\, (\epsilon + \hat g_i)\, e^{-\alpha_i^{net}}, \qquad
        \alpha_i = \alpha_i^{net} + \log r_i

    The network follows the drift of the encoders, and the row stores the part that the network cannot represent:

    * ``r_i`` contains the batch's own estimate, so that no anchor's weights sum to more than ``1 / gamma``
      (``2 / gamma`` if two views share a row);
    * with ``prediction="before"`` the network predicts before it learns from the batch, independently of the batch's
      estimate;
    * with ``through_alpha=True`` of the network the remaining weight, ``1 - sum_j w_ij``, is assigned to the
      prototypes: a control variate, which does not change the expected gradient of an anchor. The gradient of a learned
      temperature includes it, too.

    The network may be constant: ``NeuralNormalizer(dim, prototypes, updates=0, restart_every=1, through_alpha=True)``
    is the queue of the newest features, with one product per direction and step; :class:`~compopt.ResidualEstimator`
    uses it.

    Args:
        neural: the network; it becomes part of this normalizer.
        n: number of samples, or a list of sample groups; ``None`` keeps nothing per sample, and ``r_i`` starts from 1
            at every visit.
        gamma: in (0, 1]; weight of the newest ratio. 1 keeps no history.
        prediction: ``"before"``: predict before the batch enters the queue and updates the network (for the very first
            batch: after its features entered the queue). ``"after"``: predict after the updates, which is biased
            towards the batch's estimate.
        first: ratio before a sample's first visit. ``"one"``: 1, so that the network's prediction has weight
            ``1 - gamma``; ``"ratio"``: the first ratio itself, so that the batch's estimate replaces the prediction.

    Hyper-parameters: ``gamma``, which may differ between sample groups, and those of the network.

    State, per sample: ``log_ratio`` (in nats, 0 before the first visit) and the number of visits, one each per
    direction (bimodal), or one shared by both views (unimodal: the mean ratio of the views); and that of the network.

    Metrics and communication: those of the network, see :class:`~compopt.NeuralNormalizer`.

    Raises:
        TypeError: neural is not a :class:`~compopt.NeuralNormalizer`.
        ValueError: gamma outside (0, 1], an unknown option, a network that is already part of an estimator or has its
            own ``n``.

    References:
        This combination is ours. The network is that of NeuCLIP, the average that of SogCLR, the queue that of MoCo (He
        et al., CVPR 2020) and cross-batch memory (Wang et al., CVPR 2020), where its features are further negatives.

    Example:
        >>> import torch, compopt
        >>> queue = compopt.NeuralNormalizer(16, prototypes=64, updates=0, restart_every=1, through_alpha=True)
        >>> normalizer = compopt.ResidualNormalizer(queue, n=1000, gamma=0.5)
        >>> est = compopt.ContrastiveEstimator(normalizer, compopt.FixedTemperature(0.07))
        >>> z1, z2 = torch.randn(2, 8, 16, requires_grad=True).unbind()
        >>> est(z1, z2, torch.arange(8)).backward()
        >>> est.step()
    """

    state_grows = True  # by the optimizer's tensors, at the first step

    def __init__(
        self,
        neural: NeuralNormalizer,
        n: GroupSpec | None,
        gamma: float = 0.5,
        prediction: Prediction = "before",
        first: FirstVisit = "one",
    ) -> None:
        if not isinstance(neural, NeuralNormalizer):
            raise TypeError(f"neural must be a NeuralNormalizer, got {type(neural).__name__}")
        checks.one_of("prediction", prediction, get_args(Prediction))
        checks.one_of("first", first, get_args(FirstVisit))
        neural.check_free()
        if neural.own_groups:
            raise ValueError("n of the network has no effect here: give it to the ResidualNormalizer")
        neural.keep_edits()
        self.neural, self.prediction, self.first, self.remembers = neural, prediction, first, n is not None
        super().__init__(n, {"gamma": gamma, **neural.own_defaults})

    def check(self, group: Mapping[str, Any]) -> None:
        checks.unit_interval("gamma", group["gamma"], "; it is the weight of the newest ratio, and 1 keeps no history")
        self.neural.check(group)

    def columns(self, directions: int, dtype: torch.dtype) -> list[Column]:
        return [Column("log_ratio", directions, dtype, reduce="log_mean_exp")] if self.remembers else []

    def estimate(self, call: Call) -> Estimate:
        network = self.neural.learn_from(call, predict_first=self.prediction == "before")
        log_ratio = network.target - network.alpha
        if call.unimodal and self.remembers:
            log_ratio = F.mean_of_views(call.pairs.of_other_view(log_ratio))
        gamma = call.hyper("gamma")
        if self.remembers:
            first = call.unseen("log_ratio") if self.first == "ratio" else None
            log_ratio = F.moving_average(call.rows["log_ratio"], log_ratio, gamma, first)
        else:  # every visit starts from a ratio of 1
            log_ratio = F.moving_average(torch.zeros_like(log_ratio), log_ratio, gamma, None)
        alpha = network.alpha + log_ratio
        return Estimate(
            alpha,
            proposals={"log_ratio": log_ratio} if self.remembers else {},
            outside_wh=network.outside_wh(alpha) if self.neural.through_alpha and call.pairs.moments else None,
            through_alpha=partial(network.through_alpha, alpha, call.batch.own) if self.neural.through_alpha else None,
            metrics={"network_gap": partial(l1_loss, network.target, network.alpha)},
        )

    def stored(
        self, rows: Mapping[str, Tensor], features: tuple[Tensor, Tensor], tau: float | Tensor, hyper: Hyper
    ) -> Tensor:
        network = self.neural.stored(rows, features, tau, hyper)
        return network + rows["log_ratio"] if self.remembers else network

    def structure(self) -> dict[str, Any]:
        return {**self.neural.structure(), "prediction": self.prediction, "first": self.first}

    def described(self) -> dict[str, Any]:
        return {**self.neural.described(), "prediction": self.prediction, "first": self.first}

    def shared_options(self) -> dict[str, Any]:
        return self.neural.shared_options()

    def joined(self, groups: SampleGroups, setting: Setting) -> None:
        super().joined(groups, setting)
        self.neural.joined(groups, setting)

    def belong(self, owner: object) -> None:
        super().belong(owner)
        self.neural.belong(owner)

    @property
    def has_state(self) -> bool:
        return self.neural.has_state

    @property
    def split_state(self) -> bool:
        return self.neural.split_state

    @property
    def _pending_state(self) -> dict[str, Tensor] | None:
        return self.neural._pending_state

    @_pending_state.setter
    def _pending_state(self, state: dict[str, Tensor] | None) -> None:
        self.neural._pending_state = state

    def commit_state(self, found_inf: Tensor | None) -> None:
        self.neural.commit_state(found_inf)

    def move(self, device: torch.device) -> None:
        self.neural.move(device)

    def saved_state(self) -> dict[str, Tensor]:
        return self.neural.saved_state()

    def expected_state(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return self.neural.expected_state(state)

    def state_values(self, names: Iterable[str]) -> dict[str, Range]:
        return self.neural.state_values(names)

    def check_state(self, state: Mapping[str, Tensor]) -> None:
        super().check_state(state)
        check_ring(state)

    def restore_state(self, state: Mapping[str, Tensor]) -> None:
        self.neural.restore_state(state)
