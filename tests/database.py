"""Every estimator configuration the generic tests run over; a new method is one new entry.

`build(mode, n, dtype, tau, gamma)` makes the library object, `twin(mode, n, tau, gamma)` its naive reference.
Duals start at tau and move a few percent per step, between bounds that are sometimes reached.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

import compopt
from tests.reference import (
    BatchReference,
    DualReference,
    FixedReference,
    GlobalDualReference,
    MCMCReference,
    MemoryReference,
    MovingAverageReference,
    NeuralReference,
    Reference,
    ResidualReference,
)

MODES = ("bimodal", "unimodal")


@dataclass(frozen=True)
class EstimatorInfo:
    """One configuration: how to build it, how to build its twin, and what it keeps."""

    name: str
    build: Callable  # (mode, n, dtype, tau, gamma, **options) -> estimator
    twin: Callable  # (mode, n, tau, gamma) -> Reference
    columns: tuple[str, ...] = ()  # row columns that `read` returns besides count
    tau_leaf: Callable | None = None  # (estimator) -> the tensor whose .grad is the temperature's gradient
    tau_chain: Callable = lambda tau: 1.0  # d tau / d leaf
    global_tau: bool = False
    min_tau: float = 0.0
    exact_at_gamma_1: bool = True  # gamma = 1, batch = data set: the gradient of the global objective
    views: str = "averaged"  # which unimodal objective it estimates
    network: bool = False  # whether a network learns from every batch
    restarts: bool = False  # whether what it does depends on the number of commits
    draws: bool = False  # whether it draws: from the number of commits, of calls since, and places in the batch

    def __str__(self):
        return self.name

    @property
    def has_rows(self) -> bool:
        """Whether anything is committed per sample."""
        return bool(self.columns)

    @property
    def has_state(self) -> bool:
        """Whether a step changes anything."""
        return self.has_rows or self.global_tau or self.network


def dual_options(tau: float) -> dict:
    """Hyper-parameters of a dual that starts at tau and visibly moves."""
    return {"rho": 0.4, "lr": 0.04 * tau, "tau_init": tau, "tau_min": 0.8 * tau, "tau_max": 1.1 * tau, "max_grad": 2.5}


def group(n, tau, gamma, **more) -> list[dict]:
    """The reference's single sample group."""
    return [{"n": n, "tau": tau, "gamma": gamma, **dual_options(tau), **more}]


def leaf(tau, dtype):
    """A temperature that requires grad."""
    return torch.tensor(tau, dtype=dtype, requires_grad=True)


# stateless ----------------------------------------------------------------------------------------


def infonce(name, include_positive, multiply_tau):
    """InfoNCEEstimator with a constant tau."""
    return EstimatorInfo(
        name,
        lambda mode, n, dtype, tau, gamma, **o: compopt.InfoNCEEstimator(
            tau=tau, include_positive=include_positive, mode=mode, multiply_tau=multiply_tau, dtype=dtype, **o
        ),
        lambda mode, n, tau, gamma: Reference(
            group(n, tau, gamma), BatchReference(include_positive), FixedReference(), mode, multiply_tau
        ),
        exact_at_gamma_1=not include_positive and multiply_tau,
        views="separate",
    )


def dcl(learn_tau):
    """DCLEstimator."""
    return EstimatorInfo(
        "dcl" + ("-learned" if learn_tau else ""),
        lambda mode, n, dtype, tau, gamma, **o: compopt.DCLEstimator(tau, learn_tau, mode=mode, dtype=dtype, **o),
        lambda mode, n, tau, gamma: Reference(group(n, tau, gamma), BatchReference(False), FixedReference(), mode),
        tau_leaf=(lambda est: list(est.parameters())[0]) if learn_tau else None,
        tau_chain=lambda tau: -tau,
        min_tau=0.011 if learn_tau else 0.0,
        exact_at_gamma_1=not learn_tau,  # a learned one is clamped
        views="separate",
    )


def clip_learned(multiply_tau):
    """CLIP: log(1/tau) is a parameter of the user's optimizer."""
    return EstimatorInfo(
        "clip-learned" + ("-multiplied" if multiply_tau else ""),
        lambda mode, n, dtype, tau, gamma, **o: compopt.InfoNCEEstimator(
            tau=tau, learn_tau=True, mode=mode, multiply_tau=multiply_tau, dtype=dtype, **o
        ),
        lambda mode, n, tau, gamma: Reference(
            group(n, tau, gamma), BatchReference(True), FixedReference(), mode, multiply_tau
        ),
        tau_leaf=lambda est: list(est.parameters())[0],
        tau_chain=lambda tau: -tau,
        min_tau=0.011,  # tau is clamped to >= 0.01 at use
        exact_at_gamma_1=False,
    )


def batch_tensor_tau(include_positive):
    """BatchNormalizer x a tensor tau that requires grad."""

    def build(mode, n, dtype, tau, gamma, **o):
        tau = leaf(tau, dtype)
        est = compopt.ContrastiveEstimator(
            compopt.BatchNormalizer(include_positive=include_positive),
            compopt.FixedTemperature(tau),
            mode=mode,
            dtype=dtype,
            **o,
        )
        est.tau_leaf_for_tests = tau
        return est

    return EstimatorInfo(
        f"batch-tensor-tau-{'with' if include_positive else 'no'}-positive",
        build,
        lambda mode, n, tau, gamma: Reference(
            group(n, tau, gamma), BatchReference(include_positive), FixedReference(), mode
        ),
        tau_leaf=lambda est: est.tau_leaf_for_tests,
        exact_at_gamma_1=not include_positive,
        views="separate",
    )


# moving averages ----------------------------------------------------------------------------------


def sogclr(name, reference="none", eps=0.0, multiply_tau=True):
    """SogCLREstimator."""
    return EstimatorInfo(
        name,
        lambda mode, n, dtype, tau, gamma, **o: compopt.SogCLREstimator(
            n,
            gamma=gamma,
            tau=tau,
            reference=reference,
            eps=eps,
            mode=mode,
            multiply_tau=multiply_tau,
            dtype=dtype,
            **o,
        ),
        lambda mode, n, tau, gamma: Reference(
            group(n, tau, gamma), MovingAverageReference(reference, eps), FixedReference(), mode, multiply_tau
        ),
        columns=("log_u",),
        exact_at_gamma_1=eps == 0.0 and multiply_tau,
    )


def sogclr_tensor_tau(reference, multiply_tau):
    """MovingAverageEstimator x a tensor tau that requires grad."""

    def build(mode, n, dtype, tau, gamma, **o):
        tau = leaf(tau, dtype)
        est = compopt.ContrastiveEstimator(
            compopt.MovingAverageEstimator(n, gamma=gamma, reference=reference),
            compopt.FixedTemperature(tau),
            mode=mode,
            multiply_tau=multiply_tau,
            dtype=dtype,
            **o,
        )
        est.tau_leaf_for_tests = tau
        return est

    return EstimatorInfo(
        f"moving-average-{reference}-tensor-tau" + ("" if multiply_tau else "-not-multiplied"),
        build,
        lambda mode, n, tau, gamma: Reference(
            group(n, tau, gamma), MovingAverageReference(reference), FixedReference(), mode, multiply_tau
        ),
        columns=("log_u",),
        tau_leaf=lambda est: est.tau_leaf_for_tests,
        exact_at_gamma_1=multiply_tau,
    )


# duals --------------------------------------------------------------------------------------------

MOMENTUM_COLUMNS = ("log_u", "tau", "tau_exp_avg")
ADAM_COLUMNS = (*MOMENTUM_COLUMNS, "tau_exp_avg_sq")


def isogclr(name, optimizer="momentum", reference="positive", multiply_tau=True, beta=0.9):
    """ISogCLREstimator."""
    return EstimatorInfo(
        name,
        lambda mode, n, dtype, tau, gamma, **o: compopt.ISogCLREstimator(
            n,
            gamma=gamma,
            **dual_options(tau),
            optimizer=optimizer,
            beta=beta,
            reference=reference,
            mode=mode,
            multiply_tau=multiply_tau,
            dtype=dtype,
            **o,
        ),
        lambda mode, n, tau, gamma: Reference(
            group(n, tau, gamma), MovingAverageReference(reference), DualReference(optimizer, beta), mode, multiply_tau
        ),
        columns=MOMENTUM_COLUMNS if optimizer == "momentum" else ADAM_COLUMNS,
        exact_at_gamma_1=False,
    )


def batch_dual(name, include_positive, optimizer):
    """BatchNormalizer x an individual dual: rows without log_u."""
    return EstimatorInfo(
        name,
        lambda mode, n, dtype, tau, gamma, **o: compopt.ContrastiveEstimator(
            compopt.BatchNormalizer(include_positive=include_positive),
            compopt.TemperatureDual(n, **dual_options(tau), optimizer=optimizer, betas=(0.8, 0.95)),
            mode=mode,
            dtype=dtype,
            **o,
        ),
        lambda mode, n, tau, gamma: Reference(
            group(n, tau, gamma), BatchReference(include_positive), DualReference(optimizer, 0.9, (0.8, 0.95)), mode
        ),
        columns=("tau", "tau_exp_avg") + (("tau_exp_avg_sq",) if optimizer == "adam" else ()),
        exact_at_gamma_1=False,
    )


def global_dual(name, optimizer, normalizer="moving-average", multiply_tau=True):
    """One tau for all samples."""
    stateful = normalizer == "moving-average"

    def build(mode, n, dtype, tau, gamma, **o):
        dual = compopt.TemperatureDual(n, **dual_options(tau), mode="global", optimizer=optimizer, beta=0.7)
        average = compopt.MovingAverageEstimator(n, gamma=gamma, reference="positive", eps=1e-14)
        return compopt.ContrastiveEstimator(
            average if stateful else compopt.BatchNormalizer(),
            dual,
            mode=mode,
            multiply_tau=multiply_tau,
            dtype=dtype,
            **o,
        )

    return EstimatorInfo(
        name,
        build,
        lambda mode, n, tau, gamma: Reference(
            group(n, tau, gamma),
            MovingAverageReference("positive", 1e-14) if stateful else BatchReference(),
            GlobalDualReference(tau, optimizer, 0.7),
            mode,
            multiply_tau,
        ),
        columns=("log_u",) if stateful else (),
        global_tau=True,
        exact_at_gamma_1=False,
    )


# networks -----------------------------------------------------------------------------------------

DIM = 4  # of the features that the generic tests make


def neural(name, dual=None, multiply_tau=True, prototypes=6, **network):
    """NeuralNormalizer x a temperature: fixed, individual, or global."""
    network = {"lr": 0.2, "updates": 3, "restart_every": 3, **network}

    def build(mode, n, dtype, tau, gamma, **o):
        duals = {
            "individual": lambda: compopt.TemperatureDual(n, **dual_options(tau)),
            "global": lambda: compopt.TemperatureDual(None, **dual_options(tau), mode="global", beta=0.7),
        }
        return compopt.ContrastiveEstimator(
            compopt.NeuralNormalizer(DIM, prototypes, **network),
            duals[dual]() if dual else compopt.FixedTemperature(tau),
            mode=mode,
            multiply_tau=multiply_tau,
            dtype=dtype,
            **o,
        )

    def twin(mode, n, tau, gamma):
        temperature = {
            None: FixedReference,
            "individual": lambda: DualReference("momentum", 0.9),
            "global": lambda: GlobalDualReference(tau, "momentum", 0.7),
        }
        return Reference(
            group(n, tau, gamma),
            NeuralReference(DIM, prototypes, **network),
            temperature[dual](),
            mode,
            multiply_tau,
        )

    return EstimatorInfo(
        name,
        build,
        twin,
        columns=MOMENTUM_COLUMNS[1:] if dual == "individual" else (),
        global_tau=dual == "global",
        min_tau=0.07,  # below, gradients that cancel to rounding steer the network
        exact_at_gamma_1=False,
        views="separate",
        network=True,
        restarts=network["restart_every"] is not None,
    )


def residual(name, dual=False, prototypes=15, network=None, remembers=True, **options):
    """ResidualNormalizer x a fixed or individual temperature."""
    network = {"lr": 0.2, "updates": 2, "restart_every": 4, **(network or {})}

    def build(mode, n, dtype, tau, gamma, **o):
        return compopt.ContrastiveEstimator(
            compopt.ResidualNormalizer(
                compopt.NeuralNormalizer(DIM, prototypes, **network), n if remembers else None, gamma=gamma, **options
            ),
            compopt.TemperatureDual(n, **dual_options(tau)) if dual else compopt.FixedTemperature(tau),
            mode=mode,
            dtype=dtype,
            **o,
        )

    return EstimatorInfo(
        name,
        build,
        lambda mode, n, tau, gamma: Reference(
            group(n, tau, gamma),
            ResidualReference(NeuralReference(DIM, prototypes, **network), remembers=remembers, **options),
            DualReference("momentum", 0.9) if dual else FixedReference(),
            mode,
        ),
        columns=(("log_ratio",) if remembers else ()) + (MOMENTUM_COLUMNS[1:] if dual else ()),
        min_tau=0.07,
        exact_at_gamma_1=False,
        views="separate",
        network=True,
        restarts=True,
    )


def memory(name, length, dual=None, multiply_tau=True):
    """MemoryNormalizer x a fixed, individual or global temperature."""
    temperature = {"individual": lambda tau: DualReference("momentum", 0.9), None: lambda tau: FixedReference()}
    temperature["global"] = lambda tau: GlobalDualReference(tau, "momentum", 0.9)

    def build(mode, n, dtype, tau, gamma, **o):
        own = compopt.TemperatureDual(n, mode=dual, **dual_options(tau)) if dual else compopt.FixedTemperature(tau)
        normalizer = compopt.MemoryNormalizer(DIM, length)
        return compopt.ContrastiveEstimator(normalizer, own, mode=mode, dtype=dtype, multiply_tau=multiply_tau, **o)

    return EstimatorInfo(
        name,
        build,
        lambda mode, n, tau, gamma: Reference(
            group(n, tau, gamma), MemoryReference(length), temperature[dual](tau), mode, multiply_tau
        ),
        columns=MOMENTUM_COLUMNS[1:] if dual == "individual" else (),
        global_tau=dual == "global",
        exact_at_gamma_1=False,
        views="separate",
        network=True,
    )


def emc2(name, dual=None, multiply_tau=True, **options):
    """MCMCNegativeSampler x a fixed, individual or global temperature."""

    def build(mode, n, dtype, tau, gamma, **o):
        temperature = compopt.FixedTemperature(tau)
        if dual:
            temperature = compopt.TemperatureDual(n, mode=dual, **dual_options(tau))
        return compopt.ContrastiveEstimator(
            compopt.MCMCNegativeSampler(n, **options),
            temperature,
            mode=mode,
            dtype=dtype,
            multiply_tau=multiply_tau,
            **o,
        )

    def twin(tau):
        if dual is None:
            return FixedReference()
        return DualReference("momentum", 0.9) if dual == "individual" else GlobalDualReference(tau, "momentum", 0.9)

    return EstimatorInfo(
        name,
        build,
        lambda mode, n, tau, gamma: Reference(
            group(n, tau, gamma),
            MCMCReference(**options),
            twin(tau),
            mode,
            multiply_tau,
        ),
        columns=("chain", "score") + (MOMENTUM_COLUMNS[1:] if dual == "individual" else ()),
        global_tau=dual == "global",
        exact_at_gamma_1=False,
        views="separate",
        draws=True,
    )


DATABASE = [
    infonce("infonce", include_positive=True, multiply_tau=True),
    infonce("infonce-no-positive", include_positive=False, multiply_tau=True),
    infonce("infonce-not-multiplied", include_positive=True, multiply_tau=False),
    dcl(learn_tau=False),
    dcl(learn_tau=True),
    clip_learned(multiply_tau=False),
    clip_learned(multiply_tau=True),
    batch_tensor_tau(include_positive=True),
    batch_tensor_tau(include_positive=False),
    sogclr("sogclr"),
    sogclr("sogclr-positive", reference="positive"),
    sogclr("sogclr-eps", eps=0.3),
    sogclr("sogclr-positive-eps", reference="positive", eps=0.3),
    sogclr("sogclr-not-multiplied", multiply_tau=False),
    sogclr_tensor_tau("none", multiply_tau=True),
    sogclr_tensor_tau("positive", multiply_tau=False),
    isogclr("isogclr"),
    isogclr("isogclr-beta", beta=0.3),
    isogclr("isogclr-adam", optimizer="adam"),
    isogclr("isogclr-none-adam", optimizer="adam", reference="none"),
    isogclr("isogclr-not-multiplied", multiply_tau=False),
    batch_dual("batch-dual", include_positive=False, optimizer="momentum"),
    batch_dual("batch-positive-dual-adam", include_positive=True, optimizer="adam"),
    global_dual("global-dual", "momentum"),
    global_dual("global-dual-adam", "adam"),
    global_dual("global-dual-not-multiplied", "momentum", multiply_tau=False),
    global_dual("batch-global-dual", "adam", normalizer="batch"),
    neural("neural"),
    neural("neural-few", prototypes=4),
    neural("neural-queue", prototypes=15, restart_every=4, lr=1.0, updates=2),
    neural("neural-never-restarted", prototypes=15, restart_every=None),
    neural("neural-no-updates", prototypes=15, updates=0),
    neural("neural-adam-reset", optimizer=torch.optim.Adam, lr=0.02, reset_optimizer=True),
    neural("neural-through-alpha", through_alpha=True, eps=0.3),
    neural("neural-through-alpha-not-multiplied", through_alpha=True, multiply_tau=False, prototypes=15),
    neural("neural-dual", dual="individual", eps=0.01),
    neural("neural-global-dual", dual="global", prototypes=15),
    residual("residual"),
    residual("residual-after-ratio", prediction="after", first="ratio", network={"eps": 0.1}),
    residual("residual-dual", dual=True, prototypes=6),
    residual("residual-queue", network={"updates": 0, "restart_every": 1, "through_alpha": True}),
    memory("memory", length=14),
    memory("memory-shorter-than-a-batch", length=4),
    memory("memory-not-multiplied", length=14, multiply_tau=False),
    memory("memory-dual", length=9, dual="individual"),
    memory("memory-global-dual", length=9, dual="global"),
    memory("memory-global-dual-not-multiplied", length=14, dual="global", multiply_tau=False),
    emc2("emc2"),
    emc2("emc2-sweep", proposals="sweep", burn_in=0),
    emc2("emc2-not-multiplied", multiply_tau=False, burn_in=2, seed=7),
    emc2("emc2-dual", dual="individual"),
    emc2("emc2-global-dual", dual="global"),
    residual("residual-forgetful", remembers=False, network={"through_alpha": True, "eps": 0.1}),
]

BY_NAME = {info.name: info for info in DATABASE}
assert len(BY_NAME) == len(DATABASE), "names must be distinct"

STATEFUL = [info for info in DATABASE if info.has_state]
GLOBAL = [info for info in DATABASE if info.global_tau]
# what is not a row continues within a window
NO_GLOBAL = [info for info in DATABASE if not (info.global_tau or info.network)]
WITH_ROWS = [info for info in DATABASE if info.has_rows]
