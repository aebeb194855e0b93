"""Every estimator configuration that the generic tests run over; a new method needs one new entry.

`build(mode, n, dtype, tau, gamma)` makes the library object, `twin(mode, n, tau, gamma)` its naive reference.
Duals start at tau and move a few percent per step, between bounds that are sometimes reached.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

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
    PolicyReference,
    Reference,
    SigmoidReference,
)

MODES = ("bimodal", "unimodal")


@dataclass(frozen=True)
class EstimatorInfo:
    """One configuration: how to build the estimator and its twin, and its properties."""

    name: str
    build: Callable  # (mode, n, dtype, tau, gamma, **options) -> estimator
    twin: Callable  # (mode, n, tau, gamma) -> Reference
    columns: tuple[str, ...] = ()  # row columns that `read` returns besides count
    tau_leaf: Callable | None = None  # (estimator) -> the tensor whose .grad is the temperature's gradient
    tau_chain: Callable = lambda tau: 1.0  # d tau / d leaf
    global_tau: bool = False
    min_tau: float = 0.0
    network: bool = False  # whether a network learns from every batch
    restarts: bool = False  # whether its results depend on the number of commits
    takes_extra: bool = True  # whether extra= may be further candidates
    has_policy: bool = False  # whether it has a policy of pairs
    draws: bool = False  # whether it draws: from the number of commits, of calls since, and positions in the batch

    def __str__(self):
        return self.name

    @property
    def has_rows(self) -> bool:
        """Return whether anything is committed per sample."""
        return bool(self.columns)

    @property
    def has_state(self) -> bool:
        """Return whether a step changes anything."""
        return self.has_rows or self.global_tau or self.network


def dual_options(tau: float) -> dict:
    """Return hyper-parameters of a dual that starts at tau and changes noticeably."""
    return {"rho": 0.4, "lr": 0.04 * tau, "tau_init": tau, "tau_min": 0.8 * tau, "tau_max": 1.1 * tau, "max_grad": 2.5}


def group(n, tau, gamma, **more) -> list[dict]:
    """Return the reference's single sample group."""
    return [{"n": n, "tau": tau, "gamma": gamma, **dual_options(tau), **more}]


def log_inverse(est):
    """Return the learned log(1/tau)."""
    return est.temperature.log_inverse


LEARNED = {"tau_leaf": log_inverse, "tau_chain": lambda tau: -tau, "min_tau": 0.011}  # clamped to >= 0.01 at use


def preset(make, name, normalizer, temperature=FixedReference, multiply_tau=True, **facts):
    """Return the entry of a preset and the twin of its parts; `make(n, tau, gamma)` returns preset and arguments."""

    def build(mode, n, dtype, tau, gamma, **o):
        kind, options = make(n, tau, gamma)
        return kind(**options, mode=mode, dtype=dtype, **o)

    def twin(mode, n, tau, gamma):
        return Reference(group(n, tau, gamma), normalizer(), temperature(), mode, multiply_tau)

    return EstimatorInfo(name, build, twin, **facts)


def composed(
    name,
    normalizer,
    twin,
    dual=None,
    multiply_tau=True,
    columns=(),
    optimizer="momentum",
    options=None,
    with_n=True,
    **facts,
):
    """Return the entry of `normalizer(n, gamma)` with a temperature: fixed, individual, or global."""
    options = {"optimizer": optimizer, **(options or {})}

    def temperature(n, tau):
        if dual is None:
            return compopt.FixedTemperature(tau)
        return compopt.TemperatureDual(n if with_n else None, mode=dual, **dual_options(tau), **options)

    def temperature_twin(tau):
        if dual is None:
            return FixedReference()
        return DualReference(**options) if dual == "individual" else GlobalDualReference(tau, **options)

    def build(mode, n, dtype, tau, gamma, **o):
        own = normalizer(n, gamma), temperature(n, tau)
        return compopt.ContrastiveEstimator(*own, mode=mode, multiply_tau=multiply_tau, dtype=dtype, **o)

    def reference(mode, n, tau, gamma):
        return Reference(group(n, tau, gamma), twin(), temperature_twin(tau), mode, multiply_tau)

    if dual == "individual":
        columns += ("tau", "tau_exp_avg") + (("tau_exp_avg_sq",) if optimizer == "adam" else ())
    facts = {"global_tau": dual == "global", **facts}
    return EstimatorInfo(name, build, reference, columns=columns, **facts)


def tensor_tau(name, normalizer, twin, multiply_tau=True, **facts):
    """Return an entry with a tensor temperature that requires grad."""

    def build(mode, n, dtype, tau, gamma, **o):
        tau = torch.tensor(tau, dtype=dtype, requires_grad=True)
        own = normalizer(n, gamma), compopt.FixedTemperature(tau)
        est = compopt.ContrastiveEstimator(*own, mode=mode, multiply_tau=multiply_tau, dtype=dtype, **o)
        est.tau_leaf_for_tests = tau
        return est

    return EstimatorInfo(
        name,
        build,
        lambda mode, n, tau, gamma: Reference(group(n, tau, gamma), twin(), FixedReference(), mode, multiply_tau),
        tau_leaf=lambda est: est.tau_leaf_for_tests,
        **facts,
    )


# the batch ----------------------------------------------------------------------------------------


def infonce(name, include_positive, multiply_tau, learn_tau=False, candidates=None):
    """InfoNCEEstimator; with learn_tau, log(1/tau) is a parameter of the user's optimizer."""
    options = {"include_positive": include_positive, "multiply_tau": multiply_tau, "learn_tau": learn_tau}
    options["candidates"] = candidates
    return preset(
        lambda n, tau, gamma: (compopt.InfoNCEEstimator, {"tau": tau, **options}),
        name,
        lambda: BatchReference(include_positive, candidates),
        multiply_tau=multiply_tau,
        **(LEARNED if learn_tau else {}),
    )


def dcl(learn_tau):
    """DCLEstimator."""
    return preset(
        lambda n, tau, gamma: (compopt.DCLEstimator, {"tau": tau, "learn_tau": learn_tau}),
        "dcl" + ("-learned" if learn_tau else ""),
        lambda: BatchReference(False),
        **(LEARNED if learn_tau else {}),
    )


def siglip(learn):
    """SigLIPEstimator."""
    return preset(
        lambda n, tau, gamma: (compopt.SigLIPEstimator, {"tau": tau, "bias": -2.0, "learn": learn}),
        "siglip" + ("-learned" if learn else ""),
        lambda: SigmoidReference(-2.0),
        multiply_tau=False,
        takes_extra=False,
        **(LEARNED if learn else {}),
    )


def batch_tensor_tau(include_positive):
    """BatchNormalizer x a tensor tau."""
    return tensor_tau(
        f"batch-tensor-tau-{'with' if include_positive else 'no'}-positive",
        lambda n, gamma: compopt.BatchNormalizer(include_positive=include_positive),
        lambda: BatchReference(include_positive),
    )


def batch_dual(name, include_positive, optimizer):
    """BatchNormalizer x an individual dual: rows without a log_u column."""
    return composed(
        name,
        lambda n, gamma: compopt.BatchNormalizer(include_positive=include_positive),
        lambda: BatchReference(include_positive),
        dual="individual",
        optimizer=optimizer,
        options={"betas": (0.8, 0.95)},
    )


# moving averages ----------------------------------------------------------------------------------


def sogclr(name, reference="none", eps=0.0, multiply_tau=True):
    """SogCLREstimator."""
    options = {"reference": reference, "eps": eps, "multiply_tau": multiply_tau}
    return preset(
        lambda n, tau, gamma: (compopt.SogCLREstimator, {"n": n, "gamma": gamma, "tau": tau, **options}),
        name,
        lambda: MovingAverageReference(reference, eps),
        multiply_tau=multiply_tau,
        columns=("log_u",),
    )


def sogclr_tensor_tau(reference, multiply_tau):
    """MovingAverageEstimator x a tensor tau."""
    return tensor_tau(
        f"moving-average-{reference}-tensor-tau" + ("" if multiply_tau else "-not-multiplied"),
        lambda n, gamma: compopt.MovingAverageEstimator(n, gamma=gamma, reference=reference),
        lambda: MovingAverageReference(reference),
        multiply_tau,
        columns=("log_u",),
    )


def isogclr(name, optimizer="momentum", reference="positive", multiply_tau=True, beta=0.9):
    """ISogCLREstimator."""
    options = {"optimizer": optimizer, "beta": beta, "reference": reference, "multiply_tau": multiply_tau}
    return preset(
        lambda n, tau, gamma: (compopt.ISogCLREstimator, {"n": n, "gamma": gamma, **dual_options(tau), **options}),
        name,
        lambda: MovingAverageReference(reference),
        lambda: DualReference(optimizer, beta),
        multiply_tau,
        columns=("log_u", "tau", "tau_exp_avg") + (("tau_exp_avg_sq",) if optimizer == "adam" else ()),
    )


def global_dual(name, optimizer, normalizer="moving-average", multiply_tau=True, **options):
    """One tau for all samples."""
    stateful, average = normalizer == "moving-average", {"reference": "positive", "eps": 1e-14}
    return composed(
        name,
        lambda n, gamma: (
            compopt.MovingAverageEstimator(n, gamma=gamma, **average) if stateful else compopt.BatchNormalizer()
        ),
        lambda: MovingAverageReference(**average) if stateful else BatchReference(),
        dual="global",
        multiply_tau=multiply_tau,
        columns=("log_u",) if stateful else (),
        optimizer=optimizer,
        options={"beta": 0.7, **options},
    )


# networks, memories, chains -----------------------------------------------------------------------

DIM = 4  # dimension of the features that the generic tests make
ALONE = {"network": True}


def neural(name, dual=None, multiply_tau=True, prototypes=6, **network):
    """NeuralNormalizer."""
    network = {"lr": 0.2, "updates": 3, "restart_every": 3, **network}
    return composed(
        name,
        lambda n, gamma: compopt.NeuralNormalizer(DIM, prototypes, **network),
        lambda: NeuralReference(DIM, prototypes, **network),
        dual,
        multiply_tau,
        options={"beta": 0.7} if dual == "global" else {},
        with_n=dual != "global",
        min_tau=0.07,  # at lower tau, gradients that cancel up to rounding errors determine the network
        restarts=network["restart_every"] is not None,
        **ALONE,
    )


def neural_tensor_tau(**network):
    """NeuralNormalizer x a tensor tau."""
    return tensor_tau(
        "neural-through-alpha-tensor-tau",
        lambda n, gamma: compopt.NeuralNormalizer(DIM, **network),
        lambda: NeuralReference(DIM, **network),
        min_tau=0.07,
        restarts=True,
        **ALONE,
    )


def memory(name, length, dual=None, multiply_tau=True, candidates=None):
    """MemoryNormalizer."""
    normalizer = lambda n, gamma: compopt.MemoryNormalizer(DIM, length, candidates=candidates)  # noqa: E731
    return composed(name, normalizer, lambda: MemoryReference(length, candidates), dual, multiply_tau, **ALONE)


def emc2(name, dual=None, multiply_tau=True, **options):
    """MCMCNegativeSampler."""
    return composed(
        name,
        lambda n, gamma: compopt.MCMCNegativeSampler(n, **options),
        lambda: MCMCReference(**options),
        dual,
        multiply_tau,
        columns=("chain", "score"),
        takes_extra=False,
        draws=True,
    )


# policies of pairs --------------------------------------------------------------------------------


def with_policy(info, **policy):
    """Return the entry with a policy of pairs that needs no arguments in the call."""

    def build(*args, **options):
        return info.build(*args, **options, pairs=compopt.PairPolicy(**policy))

    def twin(*args):
        ref = info.twin(*args)
        ref.policy = PolicyReference(**policy)
        return ref

    return replace(info, name=f"{info.name}-pairs", build=build, twin=twin, has_policy=True)


DATABASE = [
    infonce("infonce", include_positive=True, multiply_tau=True),
    infonce("infonce-no-positive", include_positive=False, multiply_tau=True),
    infonce("infonce-not-multiplied", include_positive=True, multiply_tau=False),
    infonce("infonce-candidates", include_positive=True, multiply_tau=True, candidates=40),
    dcl(learn_tau=False),
    dcl(learn_tau=True),
    siglip(learn=False),
    siglip(learn=True),
    infonce("clip-learned", include_positive=True, multiply_tau=False, learn_tau=True),
    infonce("clip-learned-multiplied", include_positive=True, multiply_tau=True, learn_tau=True),
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
    global_dual("global-dual-log", "momentum", parametrization="log"),
    global_dual("global-dual-log-adam", "adam", parametrization="log", lr_switch=(0.0702, 0.5)),
    neural("neural"),
    neural("neural-few", prototypes=4),
    neural("neural-queue", prototypes=15, restart_every=4, lr=1.0, updates=2),
    neural("neural-never-restarted", prototypes=15, restart_every=None),
    neural("neural-no-updates", prototypes=15, updates=0),
    neural("neural-adam", optimizer=torch.optim.Adam, lr=0.02),
    neural("neural-through-alpha", through_alpha=True, eps=0.3),
    neural("neural-through-alpha-not-multiplied", through_alpha=True, multiply_tau=False, prototypes=15),
    neural("neural-dual", dual="individual", eps=0.01),
    neural("neural-global-dual", dual="global", prototypes=15),
    neural("neural-through-alpha-dual", dual="individual", through_alpha=True, eps=0.1),
    neural("neural-through-alpha-global-dual", "global", through_alpha=True, multiply_tau=False, restart_every=None),
    neural_tensor_tau(through_alpha=True, prototypes=6, lr=0.2, updates=3, restart_every=3),
    memory("memory", length=14),
    memory("memory-shorter-than-a-batch", length=4),
    memory("memory-not-multiplied", length=14, multiply_tau=False),
    memory("memory-candidates", length=14, candidates=40),
    memory("memory-candidates-dual", length=9, dual="individual", candidates=40),
    memory("memory-dual", length=9, dual="individual"),
    memory("memory-global-dual", length=9, dual="global"),
    memory("memory-global-dual-not-multiplied", length=14, dual="global", multiply_tau=False),
    emc2("emc2"),
    emc2("emc2-sweep", proposals="sweep", burn_in=0),
    emc2("emc2-not-multiplied", multiply_tau=False, burn_in=2, seed=7),
    emc2("emc2-dual", dual="individual"),
    emc2("emc2-global-dual", dual="global"),
]
DATABASE += [
    with_policy(sogclr("sogclr"), false_negatives=0.5, hardness=1.5),
    with_policy(dcl(learn_tau=True), hardness=2.0),
    with_policy(isogclr("isogclr"), hardness=1.0),
    with_policy(memory("memory-dual", length=9, dual="individual"), false_negatives=0.6, hardness=2.0),
]

BY_NAME = {info.name: info for info in DATABASE}
assert len(BY_NAME) == len(DATABASE), "names must be distinct"

STATEFUL = [info for info in DATABASE if info.has_state]
# state that is not in rows changes with every call of a window
WITH_ROWS = [info for info in DATABASE if info.has_rows]
