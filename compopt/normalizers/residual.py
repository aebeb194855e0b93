"""A network that is current, corrected by what each sample's visits showed it to miss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from compopt import checks
from compopt import functional as F
from compopt.component import Call, Estimate, Normalizer
from compopt.groups import GroupSpec, Hyper, SampleGroups, parse
from compopt.normalizers.neural import NeuralNormalizer
from compopt.rows import Column

PREDICTIONS = ("before", "after")
FIRST_VISITS = ("one", "ratio")


class ResidualNormalizer(Normalizer):
    """Being studied."""

    def __init__(
        self,
        neural: NeuralNormalizer,
        n: GroupSpec,
        gamma: float = 0.8,
        prediction: str = "before",
        first: str = "one",
        doubt: float = 0.0,
    ) -> None:
        if not isinstance(neural, NeuralNormalizer):
            raise TypeError(f"neural must be a NeuralNormalizer, got {type(neural).__name__}")
        checks.one_of("prediction", prediction, PREDICTIONS)
        checks.one_of("first", first, FIRST_VISITS)
        neural.check_free()
        self.neural, self.prediction, self.first = neural, prediction, first
        super().__init__(parse(n), {"gamma": gamma, "doubt": doubt, **neural.own_defaults})

    def check(self, group: Mapping[str, Any]) -> None:
        checks.unit_interval("gamma", group["gamma"], "; it is the weight of the newest ratio, and 1 keeps no history")
        checks.non_negative("doubt", group["doubt"])
        self.neural.check(group)

    def columns(self, directions: int, dtype: torch.dtype) -> list[Column]:
        return [Column("log_ratio", directions, dtype, reduce="log_mean_exp")]

    def estimate(self, call: Call) -> Estimate:
        training = self.neural.learn_from(call, look_first=self.prediction == "before")
        prediction = training.before or training.after()
        network = prediction.alpha
        log_g = F.add_eps(call.pairs.log_ghat, call.hyper("eps"))
        log_ratio = log_g - network
        if call.unimodal:
            log_ratio = F.mean_of_views(log_ratio)
        visits = call.count.to(log_ratio.dtype) + 1
        gamma = call.hyper("gamma")
        doubt = call.hyper("doubt")
        first = call.count == 0 if self.first == "ratio" else torch.zeros_like(call.count, dtype=torch.bool)
        if not isinstance(doubt, float) or doubt > 0:
            gamma = torch.clamp(1 / (visits + doubt), min=gamma)
        new = F.moving_average(call.rows["log_ratio"], log_ratio, gamma, first=first)
        alpha = network + new
        return Estimate(
            alpha,
            {"log_ratio": new},
            through_alpha=prediction.through_alpha(alpha),
            metrics={"network_gap": (log_g - network).abs().mean()},
        )

    def stored(
        self, rows: Mapping[str, Tensor], features: tuple[Tensor, Tensor], tau: float | Tensor, hyper: Hyper
    ) -> Tensor:
        return self.neural.stored(rows, features, tau, hyper) + rows["log_ratio"]

    # -- the network's state is this part's --------------------------------------------------------------------

    def structure(self) -> dict[str, Any]:
        return {**self.neural.structure(), "prediction": self.prediction, "first": self.first}

    def joined(self, groups: SampleGroups, owner: Any) -> None:
        super().joined(groups, owner)
        self.neural.joined(groups, owner)

    @property
    def has_pending_state(self) -> bool:
        return self.neural.has_pending_state

    def promote(self, found_inf: Tensor | None) -> None:
        self.neural.promote(found_inf)

    def forget(self) -> None:
        self.neural.forget()

    def move(self, device: torch.device) -> None:
        self.neural.move(device)

    def saved_state(self) -> dict[str, Tensor]:
        return self.neural.saved_state()

    def check_state(self, state: Mapping[str, Tensor]) -> None:
        self.neural.check_state(state)

    def restore_state(self, state: Mapping[str, Tensor]) -> None:
        self.neural.restore_state(state)
