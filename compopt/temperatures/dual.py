"""Temperatures as dual variables of a KL-constrained objective: iSogCLR, FastCLIP."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from compopt import accelerator, checks
from compopt import functional as F
from compopt.estimator.call import Call, Setting
from compopt.estimator.component import Temperature
from compopt.estimator.groups import GroupSpec, Hyper, SampleGroups
from compopt.stores.layout import Column

# iSogCLR, appendix C, and its authors' code (max_grad)
DEFAULTS_BY_MODE: dict[str, dict[str, float]] = {
    "unimodal": {"tau_init": 0.7, "tau_min": 0.05, "tau_max": 1.0, "rho": 0.3, "max_grad": 3.0},
    "bimodal": {"tau_init": 0.01, "tau_min": 0.005, "tau_max": 0.5, "rho": 6.0, "max_grad": 5.0},
}
MODES = ("individual", "global")
OPTIMIZERS = ("momentum", "adam")


class TemperatureDual(Temperature):
    r"""Each sample's ``tau_i`` is the multiplier of a KL constraint on its pair weights, learned on the side.

    .. math::
        G(\tau_i) &= \alpha_i + \rho - \sum_j w_{ij} h_{ij} / \tau_i \qquad\text{clipped to } \pm\text{max\_grad}\\
        m_i &\leftarrow (1 - \beta)\, m_i + \beta\, G(\tau_i), \qquad
        \tau_i \leftarrow \Pi_{[\tau_{min}, \tau_{max}]}\, (\tau_i - \text{lr}\; m_i)

    With a normalizer of ``reference="none"`` (SogCLR) the positive has weight 1, and ``G`` gains
    ``(1 - sum_j w_ij) s_ii / tau_i``. With a :class:`~compopt.NeuralNormalizer` it gains
    ``exp(-alpha_i) (eps + ghat_i) - 1`` (eq. 12 of NeuCLIP). With ``multiply_tau=False`` it is
    ``-sum_j w_ij h_ij / tau_i^2``.

    A sample with many near neighbours gets a larger ``tau`` (flatter weights), an isolated one a smaller.

    Args:
        n: number of samples, or a list of sample groups; ``None`` is enough for ``mode="global"``.
        rho: radius of the constraint, >= 0. With weights that sum to one, ``G >= rho - log |N_i|``: a rho above
            ``log |N_i|`` can only push every ``tau`` to ``tau_min`` (a warning says so once).
        lr: step size; the 1/n of the paper's eq. 13 is folded into it.
        tau_init, tau_min, tau_max, max_grad: ``None`` is filled by mode: unimodal 0.7, 0.05, 1, 3 and bimodal
            0.01, 0.005, 0.5, 5 (rho: 0.3 and 6).
        mode: ``"individual"``, a ``tau`` per sample (and direction, in bimodal mode); ``"global"``, one
            ``tau`` that follows the mean of ``G`` over the batch (FastCLIP v3). A global dual takes its
            hyper-parameters other than rho from the first sample group.
        optimizer: ``"momentum"`` as above, ``m`` starting at 0; or ``"adam"`` with ``betas``, whose bias is
            corrected by the row's own number of visits.
        beta: weight of the newest gradient in ``m``, in (0, 1].
        betas: of Adam, each in [0, 1).

    Hyper-parameters: ``rho``, ``lr``, ``tau_init``, ``tau_min``, ``tau_max``, ``max_grad``, ``beta``, ``betas``; they
    may differ between sample groups.

    State: individual, per sample ``tau``, ``tau_exp_avg`` (``m``) and, with Adam, ``tau_exp_avg_sq``, ``(n, 2)`` or
    ``(n, 1)`` each in the rows' dtype; a row never visited shows ``tau_init``. Global: ``tau``, ``exp_avg``, with Adam
    ``exp_avg_sq``, and the number of ``updates``, 0-d float64. In unimodal mode both views share a row and ``G`` is
    their mean.

    Communicates: nothing of its own.

    Raises:
        ValueError: rho < 0, lr < 0, tau_min <= 0, tau_min > tau_max, tau_init outside them, bad beta or option; no
            ``n`` for individual temperatures.
        TypeError: a hyper-parameter that is no number, or ``betas`` that are no pair.

    Warns:
        UserWarning: at a call, once: rho is not below ``log |N_i|`` of its batch.

    References:
        Qiu et al., iSogCLR, ICML 2023, eq. 12-14, Algorithms 1 and 2; Wei et al., FastCLIP, 2024 (global).

    Example:
        >>> import torch, compopt
        >>> tau = compopt.TemperatureDual(n=100, rho=1.0, lr=0.01, tau_init=0.07)
        >>> est = compopt.ContrastiveEstimator(compopt.MovingAverageEstimator(n=100, reference="positive"), tau)
        >>> z1, z2 = torch.randn(2, 16, 8, requires_grad=True).unbind()
        >>> est(z1, z2, torch.arange(16)).backward()
        >>> est.step()
        >>> rows = est.read(torch.tensor([0, 50]))["tau"]  # (2, 2): a sample's two directions
        >>> bool((rows[0] != rows[1]).all()), rows[1].tolist() == [rows[1, 0].item()] * 2
        (True, True)
    """

    def __init__(
        self,
        n: GroupSpec | None,
        rho: float | None = None,
        lr: float = 1e-2,
        tau_init: float | None = None,
        tau_min: float | None = None,
        tau_max: float | None = None,
        max_grad: float | None = None,
        mode: str = "individual",
        optimizer: str = "momentum",
        beta: float = 0.9,
        betas: tuple[float, float] = (0.9, 0.999),
    ) -> None:
        checks.one_of("mode", mode, MODES)
        checks.one_of("optimizer", optimizer, OPTIMIZERS)
        if n is None and mode == "individual":
            raise ValueError("n is None; individual temperatures need the number of samples")
        self.mode, self.optimizer = mode, optimizer
        super().__init__(
            n,
            {
                "rho": rho,
                "lr": lr,
                "tau_init": tau_init,
                "tau_min": tau_min,
                "tau_max": tau_max,
                "max_grad": max_grad,
                "beta": beta,
                "betas": betas,
            },
        )

    def described(self) -> dict[str, Any]:
        tau = self.state.get("tau")
        return {"tau": f"{'one per sample' if tau is None else format(tau.item(), '.6g')} (learned)"}

    def check(self, group: Mapping[str, Any]) -> None:
        given = {key: value for key, value in group.items() if value is not None}
        for key in ("tau_init", "tau_min", "tau_max", "max_grad"):
            if key in given:
                checks.positive(key, given[key])
        if "rho" in given:
            checks.non_negative("rho", given["rho"])
        checks.non_negative("lr", group["lr"])
        checks.unit_interval("beta", group["beta"], "; it is the weight of the newest gradient")
        betas = group["betas"]
        if not isinstance(betas, tuple | list) or len(betas) != 2:
            raise TypeError(f"betas must be a pair of numbers, got {betas!r}")
        checks.decay("betas[0]", betas[0])
        checks.decay("betas[1]", betas[1])
        low, high = given.get("tau_min", 0.0), given.get("tau_max", float("inf"))
        if low > high:
            raise ValueError(f"tau_min must not exceed tau_max, got tau_min={low!r} and tau_max={high!r}")
        if not low <= given.get("tau_init", low) <= high:
            raise ValueError(
                f"tau_init must lie in [tau_min, tau_max] = [{low!r}, {high!r}], got {given['tau_init']!r}"
            )

    def fill(self, group: dict[str, Any], mode: str) -> None:
        filled = DEFAULTS_BY_MODE["unimodal" if mode == "unimodal" else "bimodal"]
        unset = group["tau_init"] is None
        group.update({key: value for key, value in filled.items() if group[key] is None})
        if unset:  # stay inside bounds the user narrowed
            group["tau_init"] = min(max(group["tau_init"], group["tau_min"]), group["tau_max"])
        self.check(group)

    def joined(self, groups: SampleGroups, setting: Setting) -> None:
        super().joined(groups, setting)
        if self.mode == "individual":
            return
        tau = groups.groups[0]["tau_init"]
        names = ("exp_avg", "exp_avg_sq") if self.optimizer == "adam" else ("exp_avg",)
        # float64: one number, and its steps may be far below float32's resolution of tau
        self.state = {name: torch.zeros((), dtype=torch.float64, device="cpu") for name in (*names, "updates")}
        self.state["tau"] = torch.tensor(tau, dtype=torch.float64, device="cpu")

    @property
    def tau(self) -> Tensor:
        """The committed global temperature, 0-d float64, once this is a part of an estimator.

        Raises:
            AttributeError: temperatures are individual, which are rows; this is no part of an estimator yet.
        """
        if self.mode != "global":
            raise AttributeError("individual temperatures are rows: est.read(index)['tau']")
        if "tau" not in self.state:
            raise AttributeError("there is no temperature yet: make this a part of an estimator first")
        return self.state["tau"]

    @property
    def learns(self) -> bool:
        return True

    def columns(self, directions: int, dtype: torch.dtype) -> list[Column]:
        if self.mode == "global":
            return []
        names = ("tau_exp_avg", "tau_exp_avg_sq") if self.optimizer == "adam" else ("tau_exp_avg",)
        return [
            Column("tau", directions, dtype, initial="tau_init"),
            *(Column(name, directions, dtype) for name in names),
        ]

    def value(self, rows: Mapping[str, Tensor], hyper: Hyper, training: bool) -> float | Tensor:
        return self.working_state(training)["tau"] if self.mode == "global" else rows["tau"]

    def rho(self, hyper: Hyper) -> Any:
        return hyper("rho")

    def update(self, call: Call, gradient: Tensor) -> dict[str, Tensor]:
        if self.mode == "global":
            self._update_global(call.hyper, gradient.mean(dtype=accelerator.widest(gradient.device)))
            return {}
        if call.unimodal:
            gradient = gradient.mean(dim=1, keepdim=True)
        rows = call.rows
        second = rows.get("tau_exp_avg_sq")
        tau, m, v = self._move(
            call.hyper, rows["tau"], gradient, rows["tau_exp_avg"], second, lambda: call.count.to(gradient.dtype) + 1
        )
        proposals = {"tau": tau, "tau_exp_avg": m}
        return proposals if v is None else {**proposals, "tau_exp_avg_sq": v}

    def _update_global(self, hyper: Hyper, gradient: Tensor) -> None:
        state = self.working_state(True)
        updates = state["updates"] + 1
        tau, m, v = self._move(
            hyper.of_first_group(), state["tau"], gradient, state["exp_avg"], state.get("exp_avg_sq"), lambda: updates
        )
        second = {} if v is None else {"exp_avg_sq": v}
        self.deposit_state(tau=tau, exp_avg=m, updates=updates, **second)

    def _move(
        self, hyper: Hyper, tau: Tensor, gradient: Tensor, m: Tensor, v: Tensor | None, visits: Callable[[], Tensor]
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """One step of the rule on any shape: new ``tau``, ``m`` and ``v``."""
        limit = hyper("max_grad")
        gradient = F.clip(gradient.to(m.dtype), -limit, limit)
        if v is None:
            m = F.momentum(m, gradient, hyper("beta"))
            moved = F.minus_product(tau, m, hyper("lr"))
        else:
            betas = (hyper("betas", 0), hyper("betas", 1))
            moved, m, v = F.adam(tau, m, v, gradient, visits(), hyper("lr"), betas)
        return F.clip(moved, hyper("tau_min"), hyper("tau_max")), m, v
