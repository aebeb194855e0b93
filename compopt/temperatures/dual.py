"""Temperatures as dual variables of a KL-constrained objective: iSogCLR, FastCLIP."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from typing_extensions import Unpack

from compopt import accelerator, checks
from compopt import functional as F
from compopt.batch import Rows
from compopt.checks.context import outside_of_graphs, refuse_derivatives, warn
from compopt.checks.inputs import check_values
from compopt.estimator.base import Form
from compopt.estimator.groups import GroupSpec, Hyper
from compopt.estimator.options import PlacementOptions, takes_options
from compopt.estimator.parts import Call, Temperature
from compopt.stores.rows import Column

# tau_init, tau_min (the paper's tau_0) and rho: iSogCLR, sections 6.1 and 6.2. tau_max and max_grad: its authors' code
# (LibAUC uses other tau_max, 0.7 and 0.05). The paper bounds tau from above only in its analysis (Lemma 1), without a
# value.
DEFAULTS_BY_MODE: dict[str, dict[str, float]] = {
    "unimodal": {"tau_init": 0.7, "tau_min": 0.05, "tau_max": 1.0, "rho": 0.3, "max_grad": 3.0},
    "bimodal": {"tau_init": 0.01, "tau_min": 0.005, "tau_max": 1.0, "rho": 6.0, "max_grad": 5.0},
}
Scope = Literal["individual", "global"]
Rule = Literal["momentum", "adam"]
Parametrization = Literal["linear", "log"]
# Names of the moments in the state of a global temperature: moments of the derivative by tau -> by log(tau).
LOG_NAMES = {"exp_avg": "log_exp_avg", "exp_avg_sq": "log_exp_avg_sq"}
OTHER = {**LOG_NAMES, **{log: name for name, log in LOG_NAMES.items()}}
POWERS = {"exp_avg": 1, "exp_avg_sq": 2, "log_exp_avg": 1, "log_exp_avg_sq": 2}  # of the derivative in each moment


def _check_pair(name: str, value: Any) -> None:
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise TypeError(f"{name} must be a pair of numbers, got {value!r}")


def _check_individual(n: Any, parametrization: str, lr_switch: Any) -> None:
    """Refuse options that individual temperatures do not support."""
    if n is None:
        raise ValueError("n is None; individual temperatures need the number of samples")
    for name, value, usual in (("parametrization", parametrization, "linear"), ("lr_switch", lr_switch, None)):
        if value != usual:
            raise ValueError(f'{name}={value!r} needs mode="global"; individual temperatures take {usual!r}')


class TemperatureDual(Temperature):
    r"""Learned temperatures, one per sample or one for all: multipliers of a KL constraint.

    Example:
        >>> import torch, compopt
        >>> tau = compopt.TemperatureDual(n=100, rho=1.0, lr=0.01, tau_init=0.07)
        >>> u = compopt.MovingAverageEstimator(n=100, reference="positive")
        >>> est = compopt.ContrastiveEstimator(u, tau)
        >>> z1, z2 = torch.randn(2, 16, 8, requires_grad=True).unbind()
        >>> est(z1, z2, torch.arange(16)).backward()
        >>> est.step()
        >>> tuple(est.read(torch.arange(3))["tau"].shape)  # a sample's two directions
        (3, 2)

    .. math::
        G(\tau_i) &= \alpha_i + \rho - \sum_j w_{ij} h_{ij} / \tau_i \qquad\text{clipped to } \pm\text{max\_grad}\\
        m_i &\leftarrow (1 - \beta)\, m_i + \beta\, G(\tau_i), \qquad
        \tau_i \leftarrow \Pi_{[\tau_{min}, \tau_{max}]}\, (\tau_i - \text{lr}\; m_i)

    With a normalizer of ``reference="none"`` (SogCLR) the positive has weight 1, and ``G`` has the additional term
    ``(1 - sum_j w_ij) s_ii / tau_i``. With a :class:`~compopt.NeuralNormalizer` the additional term is
    ``exp(-alpha_i) (eps + ghat_i) - 1`` (eq. 12 of NeuCLIP), and with ``through_alpha`` the sum includes prototypes.
    With ``multiply_tau=False``, ``G = -sum_j w_ij h_ij / tau_i^2``.

    ``parametrization="log"`` updates ``log(1/tau)``, as FastCLIP's authors do, so that ``lr`` is a relative step:

    .. math::
        m \leftarrow (1 - \beta)\, m + \beta\, \tau\, G(\tau), \qquad
        \tau \leftarrow \Pi_{[\tau_{min}, \tau_{max}]}\, (\tau\, e^{-\text{lr}\; m})

    With Adam the steps are those of ``torch.optim.AdamW([log(1/tau)], weight_decay=0)``. At a temperature of 0.07 a
    linear step with the same ``lr`` is ``1 / 0.07`` times as large.

    Used alone, it updates a temperature, or another positive dual variable, per sample in any objective, see
    :meth:`update`. A sample with many near neighbours gets a larger ``tau`` (flatter weights), an isolated one a
    smaller ``tau``. Eq. 13 of iSogCLR uses the previous moving average in ``G``; here ``alpha_i`` and ``w_ij`` are
    computed from the updated one, as in its authors' code.

    Args:
        n: number of samples, or a list of sample groups; may be ``None`` for ``mode="global"``.
        rho: radius of the constraint, >= 0. With weights that sum to one, ``G >= rho - log |N_i|``: a rho above
            ``log |N_i|`` only pushes every ``tau`` to ``tau_min`` (with a warning, once).
        lr: step size; includes the factor 1/n of the paper's eq. 13.
        tau_init, tau_min, tau_max, max_grad: initial value, bounds, and bound of ``G``. ``None``: a default that
            depends on the mode, 0.7, 0.05, 1, 3 (unimodal) or 0.01, 0.005, 1, 5 (bimodal; rho: 0.3 and 6), from
            iSogCLR, sections 6.1 and 6.2, and its authors' code. With ``parametrization="log"`` a ``max_grad`` of
            ``None`` is no bound.
        mode: ``"individual"``: a ``tau`` per sample (and direction, in bimodal mode). ``"global"``: one
            ``tau``, updated with the mean of ``G`` over the batch (FastCLIP v3); its hyper-parameters other than rho
            are those of the first sample group.
        optimizer: ``"momentum"`` as above, with ``m`` initially 0; or ``"adam"`` with ``betas``, with the bias
            corrected by the row's own number of visits.
        beta: weight of the newest gradient in ``m``, in (0, 1].
        betas: decay rates of Adam, each in [0, 1).
        parametrization: ``"linear"`` or ``"log"``, see above; ``"log"`` requires ``mode="global"``.
        lr_switch: a pair ``(at, factor)``, for ``mode="global"``: while ``tau <= at`` the step size is ``factor lr``.
            FastCLIP's authors use ``(0.03, 1/3)``. It is not saved in checkpoints.
        process_group, offload, offload_dir, shard, dtype: placement and dtype of its own, see
            :class:`~compopt.Estimator`.

    Hyper-parameters: ``rho``, ``lr``, ``tau_init``, ``tau_min``, ``tau_max``, ``max_grad``, ``beta``, ``betas``; they
    may differ between sample groups.

    State: individual, per sample ``tau``, ``tau_exp_avg`` (``m``) and, with Adam, ``tau_exp_avg_sq``, ``(n, 2)`` or
    ``(n, 1)`` each in the rows' dtype; a row that was never visited contains ``tau_init``. Global: ``tau``,
    ``exp_avg``, with Adam ``exp_avg_sq``, and the number of ``updates``, 0-d float64. In unimodal mode both views share
    a row and ``G`` is their mean. With ``parametrization="log"`` the moments are ``log_exp_avg`` and
    ``log_exp_avg_sq``. A checkpoint of the other parametrization is converted: ``tau`` is kept, and moments are scaled
    by powers of ``tau`` (1 and 2, or -1 and -2), as if ``tau`` had been constant while they were averaged.
    Hyper-parameters, including ``lr``, are loaded from the checkpoint.

    Communicates: in an estimator nothing itself; used alone see :meth:`update`.

    Raises:
        ValueError: rho < 0, lr < 0, tau_min <= 0, tau_min > tau_max, tau_init outside the bounds, an invalid beta or
            option; no ``n`` for individual temperatures, or an option that they do not support.
        TypeError: a hyper-parameter that is not a number, ``betas`` or ``lr_switch`` that is not a pair.

    References:
        Qiu et al., iSogCLR, ICML 2023, eq. 12-14, Algorithms 1 and 2; Wei et al., FastCLIP, 2024 (global), and
        its code: the logarithm and the switch.
    """

    learns = True

    @takes_options(Temperature, PlacementOptions)
    def __init__(
        self,
        n: GroupSpec | None,
        rho: float | None = None,
        lr: float = 1e-2,
        tau_init: float | None = None,
        tau_min: float | None = None,
        tau_max: float | None = None,
        max_grad: float | None = None,
        mode: Scope = "individual",
        optimizer: Rule = "momentum",
        beta: float = 0.9,
        betas: tuple[float, float] = (0.9, 0.999),
        parametrization: Parametrization = "linear",
        lr_switch: tuple[float, float] | None = None,
        **placement: Unpack[PlacementOptions],
    ) -> None:
        checks.one_of("mode", mode, get_args(Scope))
        checks.one_of("optimizer", optimizer, get_args(Rule))
        checks.one_of("parametrization", parametrization, get_args(Parametrization))
        if mode == "individual":
            _check_individual(n, parametrization, lr_switch)
        if lr_switch is not None:
            _check_pair("lr_switch", lr_switch)
            checks.positive("lr_switch[0]", lr_switch[0])
            checks.non_negative("lr_switch[1]", lr_switch[1])
        self.mode, self.optimizer = mode, optimizer
        self.parametrization, self.lr_switch = parametrization, lr_switch
        self._moments = ("exp_avg", "exp_avg_sq") if optimizer == "adam" else ("exp_avg",)
        self._log = parametrization == "log"
        self._warned = False  # about a rho that is too large
        self._names = [LOG_NAMES[name] if self._log else name for name in self._moments]  # in the state
        defaults = {"tau_init": tau_init, "tau_min": tau_min, "tau_max": tau_max, "max_grad": max_grad}
        super().__init__(n, {"rho": rho, "lr": lr, **defaults, "beta": beta, "betas": betas}, **placement)

    def described(self) -> dict[str, Any]:
        log = {"parametrization": "log"} if self._log else {}
        if "tau" not in self.state:
            return {"tau": "learned, one per sample" if self.mode == "individual" else "learned, one for all", **log}
        return {"tau": f"{self.state['tau'].item():.6g} (learned)", **log}

    def shared_options(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("optimizer", "parametrization", "lr_switch")}

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
        _check_pair("betas", betas)
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
        filled = dict(DEFAULTS_BY_MODE["unimodal" if mode == "unimodal" else "bimodal"])
        if self._log:
            del filled["max_grad"]
        unset = group["tau_init"] is None
        group.update({key: value for key, value in filled.items() if group[key] is None})
        if unset:  # keep the default inside bounds that the user narrowed
            group["tau_init"] = min(max(group["tau_init"], group["tau_min"]), group["tau_max"])
        self.check(group)

    def setup(self, form: Form) -> None:
        if self.mode == "individual":
            return
        # float64, since steps may be far below the resolution of tau in float32
        start = {**dict.fromkeys((*self._names, "updates"), 0.0), "tau": self._groups[0]["tau_init"]}
        self.state = {name: torch.tensor(x, dtype=torch.float64, device="cpu") for name, x in start.items()}

    @property
    def tau(self) -> Tensor:
        """Copy of the committed global temperature, 0-d float64.

        Raises:
            AttributeError: temperatures are individual; they are stored in rows.
        """
        if self.mode != "global":
            raise AttributeError("individual temperatures are rows: est.read(index)['tau']")
        self._ensure_form()  # creates the state
        return self.state["tau"].clone()

    def constants(self) -> list[float] | None:
        return [float(self.tau)] * len(self._groups) if self.mode == "global" else None

    def columns(self, directions: int, dtype: torch.dtype) -> list[Column]:
        if self.mode == "global":
            return []
        return [
            Column("tau", directions, dtype, initial="tau_init"),
            *(Column(f"tau_{name}", directions, dtype) for name in self._moments),
        ]

    def saved_state(self) -> dict[str, Tensor]:
        """Return the state in float64, also from a device without float64."""
        return {name: v if v.dtype == torch.float64 else v.cpu().double() for name, v in super().saved_state().items()}

    def expected_state(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        own = super().expected_state(state)
        other = {OTHER.get(name, name): value for name, value in own.items()}
        return other if other.keys() == state.keys() else own

    def restore_state(self, state: Mapping[str, Tensor]) -> None:
        if state.keys() != self.state.keys():  # the other parametrization: d/dlog(tau) = tau d/dtau
            tau = state["tau"]
            unit = tau if self._log else 1 / tau
            state = {OTHER.get(name, name): value * unit ** POWERS.get(name, 0) for name, value in state.items()}
        super().restore_state(state)

    def temperatures(self, rows: Mapping[str, Tensor], hyper: Hyper, training: bool) -> float | Tensor:
        return self.working_state(training)["tau"] if self.mode == "global" else rows["tau"]

    def rho(self, hyper: Hyper) -> Any:
        return hyper("rho")

    def look_at_negatives(self, least: int) -> None:
        if self._warned:
            return
        largest, limit = max(group.get("rho") or 0.0 for group in self._groups), math.log(least)
        if largest >= limit:
            self._warned = True
            warn(
                f"rho={largest} is not below log|N_i|={limit:.2f} of this batch: the KL constraint can never bind "
                f"and every tau is pushed to tau_min; use a smaller rho or a larger batch"
            )

    def proposals(self, call: Call, gradient: Tensor) -> dict[str, Tensor]:
        if self.mode == "global":
            self.deposit_state(**self._moved_state(call.hyper, gradient))
            return {}
        if call.unimodal:
            gradient = gradient.mean(dim=1, keepdim=True)
        return self._moved_rows(call.read, call.hyper, gradient)

    def _moved_rows(self, read: Rows, hyper: Hyper, gradient: Tensor) -> dict[str, Tensor]:
        steps = read.count.to(gradient.dtype) + 1 if self.optimizer == "adam" else None
        return self._move(hyper, read.columns, [f"tau_{name}" for name in self._moments], gradient, steps)

    def _moved_state(self, hyper: Hyper, gradient: Tensor) -> dict[str, Tensor]:
        state, mean = self.working_state(True), gradient.mean(dtype=accelerator.widest(gradient.device))
        updates = state["updates"] + 1
        return {**self._move(hyper.of_first_group(), state, self._names, mean, updates), "updates": updates}

    def _move(
        self, hyper: Hyper, old: Mapping[str, Tensor], names: Sequence[str], gradient: Tensor, steps: Tensor | None
    ) -> dict[str, Tensor]:
        """Return ``tau`` and its moments, with the keys ``names``, after a step."""
        tau, moments, limit = old["tau"], [old[name] for name in names], hyper("max_grad")
        gradient = gradient.to(tau.dtype)
        if limit is not None:  # clipped before m is updated, as in the code of iSogCLR's authors
            gradient = F.clip(gradient, -limit, limit)
        start, gradient = (tau.log(), tau * gradient) if self._log else (tau, gradient)
        end, *moments = self._step(hyper, start, moments, gradient, steps, self._rate(hyper("lr"), tau))
        tau = F.clip(end.exp() if self._log else end, hyper("tau_min"), hyper("tau_max"))
        return {"tau": tau, **dict(zip(names, moments, strict=True))}

    def _rate(self, lr: Any, tau: Tensor) -> Any:
        """Return the step size at a temperature."""
        if self.lr_switch is None:
            return lr
        at, factor = self.lr_switch
        return torch.full_like(tau, lr).masked_fill(tau <= at, lr * factor)  # no synchronisation

    def _step(
        self, hyper: Hyper, x: Tensor, moments: Sequence[Tensor], gradient: Tensor, steps: Tensor | None, lr: Any
    ) -> Sequence[Tensor]:
        """Return ``x`` and its moments after a step of the optimizer, before the projection."""
        if self.optimizer == "adam" and steps is not None:
            m, v = moments
            return F.adam(x, m, v, gradient, steps, lr, (hyper("betas", 0), hyper("betas", 1)))
        m = F.momentum(moments[0], gradient, hyper("beta"))
        return F.minus_product(x, m, lr), m

    @outside_of_graphs
    def update(self, gradient: Tensor, index: Tensor | None = None) -> Tensor:
        r"""Take one step of projected momentum or Adam on a given gradient, and return the new temperatures.

        .. math::
            m_i \leftarrow (1 - \beta)\, m_i + \beta\, \text{clip}(g_i), \qquad
            \tau_i \leftarrow \Pi_{[\tau_{min}, \tau_{max}]}\, (\tau_i - \text{lr}\; m_i)

        See the class for ``parametrization="log"``. In training mode with gradients enabled the result is deposited
        until :meth:`step`. A sample keeps its temperature if its gradient is not finite. Used alone, bounds that were
        not passed are those of bimodal mode. Rows must have one value per sample: not in a bimodal estimator with both
        directions.

        Args:
            gradient: complete derivative of the objective with respect to each ``tau_i`` (rho is not added;
                ``max_grad`` clips it), ``(B,)`` or ``(B, 1)``, floating point; with several ranks, for this rank's
                samples. A global dual uses the mean over all ranks.
            index: data-set positions, ``(B,)`` integers; not needed by a global dual.

        Returns:
            The proposed ``tau``, in the shape of ``gradient``, without a graph; 0-d for a global dual.

        Raises:
            TypeError, ValueError, IndexError: as in :meth:`MovingAverageEstimator.update`.

        Communicates, with several ranks: as :class:`~compopt.ContrastiveEstimator`, with one float per sample.
        """
        refuse_derivatives()
        with self._guard():
            if self.mode == "individual":
                self._check_one_value()
            column = isinstance(gradient, Tensor) and gradient.dim() == 2
            flat = check_values("gradient", gradient.squeeze(1) if column else gradient, "(B,) or (B, 1)", 1)
            keys = {"index": self._index(index, len(flat))}
        batch = self._read(keys, {"gradient": flat})
        hyper = self._hyper(batch)
        wanted = batch.values["gradient"].to(batch.dtype)[:, None]
        wanted = torch.where(wanted.isfinite(), wanted, torch.nan)
        if self.mode == "global" and not len(wanted):
            raise ValueError("gradient is empty on every rank; skip such a batch: a global dual takes its mean")
        with self._rollback_on_error():
            if self.mode == "global":
                moved = self._moved_state(hyper, wanted)
                if batch.depositing:
                    self.deposit_state(**moved)
                    self._deposit(batch, {})
                return moved["tau"].clone()
            moved = self._moved_rows(batch.of(), hyper, wanted)
            if batch.depositing:
                self._deposit(batch, moved)
            return batch.nan_if_bad(moved["tau"])[batch.own].view(gradient.shape)

    def value(self, index: Tensor | None = None) -> Tensor:
        """Return committed temperatures; ``tau_init`` for samples that were never visited.

        Args:
            index: data-set positions, ``(B,)`` integers; not needed by a global dual.

        Returns:
            ``(B,)``; of an estimator's temperature ``(B, D)``; 0-d for a global dual.

        Communicates: nothing; with shards, as :meth:`read`.
        """
        if self.mode == "global":
            return self.tau
        if index is None:
            raise TypeError("index is None; individual temperatures need data-set positions")
        tau = self.read(index)["tau"]
        return tau[:, 0] if self._ensure_form().mode == "single" else tau
