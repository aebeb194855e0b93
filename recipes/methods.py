"""The methods a recipe can train with: one entry each, hyper-parameters and their defaults included."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import compopt
from compopt import schedules
from recipes.models import DIM

BIMODAL, UNIMODAL = "bimodal", "unimodal"

# Every hyper-parameter that some method takes: its type and what it means.
HYPERPARAMETERS: dict[str, tuple[Callable[[str], Any], str]] = {
    "tau": (float, "temperature; the initial one where it is learned"),
    "gamma": (float, "weight of the newest estimate in the moving average"),
    "gamma_min": (float, "value that a decaying gamma reaches"),
    "gamma_decay": (float, "fraction of the run over which gamma decays to --gamma-min"),
    "reference": (str, "what stored estimates are relative to: none (SogCLR) or positive (iSogCLR)"),
    "rho": (float, "how strongly learned temperatures are held up"),
    "tau_lr": (float, "step size of learned temperatures"),
    "tau_min": (float, "smallest learned temperature"),
    "tau_max": (float, "largest learned temperature"),
    "length": (int, "past samples whose features are kept"),
    "prototypes": (int, "prototypes of the network"),
    "network_lr": (float, "step size of the network's AdaGrad"),
    "updates": (int, "steps of the network per batch"),
    "restart_every": (int, "commits between restarts of the network; 0: never"),
    "through_alpha": (int, "1: the gradient through the predicted normalizers reaches the encoders too"),
    "prediction": (str, "the network that a residual corrects: before or after it has met the batch"),
    "first": (str, "a sample's first visit: one, the network is believed as at any other; ratio, the batch is"),
    "burn_in": (float, "proposals to a chain before its visits count: a number, or a fraction of them below 1"),
    "proposals": (str, "what chains are proposed: pool, independent draws; sweep, every negative once"),
    "encode": (int, "1: samples outside the batch at which chains stay are encoded again; 0: such visits are dropped"),
    "rescore": (int, "1: they are encoded before the chains move, so that no similarity is stale"),
    "group": (int, "1: samples with the same caption are not each other's negatives"),
    "memory": (int, "1: keep each sample's residual; 0: start from none at every visit"),
}

# What every method takes where samples have captions.
COMMON: dict[str, Any] = {"group": 0}


@dataclass(frozen=True)
class Method:
    """A method: how to build its estimator, and its default hyper-parameters.

    Attributes:
        title: name for tables and pictures.
        build: ``(n, mode, o) -> estimator``; ``o`` has one attribute per hyper-parameter, ``batch_size``, and
            ``placement``: offload, offload_dir, shard.
        defaults: hyper-parameters of the method and their values in bimodal mode.
        unimodal: values that differ in unimodal mode.
    """

    title: str
    build: Callable[[int, str, SimpleNamespace], compopt.ContrastiveEstimator]
    defaults: Mapping[str, Any]
    unimodal: Mapping[str, Any] = field(default_factory=dict)

    def options(self, mode: str, given: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Defaults for ``mode`` with the ``given`` values on top; a name the method lacks raises ValueError."""
        common = COMMON if mode == BIMODAL else {}
        values = {**common, **self.defaults, **(self.unimodal if mode == UNIMODAL else {})}
        for name, value in (given or {}).items():
            if name not in values:
                raise ValueError(f"{self.title} has no {name!r}; it takes {', '.join(values)}")
            values[name] = value
        return values


def _fastclip(version: str, title: str, **learned: float) -> Method:
    """FastCLIP v0 to v3 differ in the temperature only; all of them decay gamma along a cosine."""

    def build(n: int, mode: str, o: SimpleNamespace) -> compopt.ContrastiveEstimator:
        options = {"lr" if name == "tau_lr" else name: getattr(o, name) for name in learned}
        return compopt.FastCLIPEstimator(n, version=version, gamma=1.0, tau=o.tau, mode=mode, **options, **o.placement)

    return Method(title, build, {"tau": 0.05, "gamma_min": 0.2, "gamma_decay": 0.5, **learned})


def _network(o: SimpleNamespace) -> compopt.NeuralNormalizer:
    return compopt.NeuralNormalizer(
        DIM,
        prototypes=o.prototypes,
        lr=o.network_lr,
        updates=o.updates,
        restart_every=o.restart_every or None,
        through_alpha=bool(o.through_alpha),
    )


def _neuclip(n: int, mode: str, o: SimpleNamespace) -> compopt.ContrastiveEstimator:
    return compopt.ContrastiveEstimator(_network(o), compopt.FixedTemperature(o.tau), mode=mode, **o.placement)


def _residual(n: int, mode: str, o: SimpleNamespace) -> compopt.ContrastiveEstimator:
    samples = n if o.memory else None
    normalizer = compopt.ResidualNormalizer(_network(o), samples, gamma=o.gamma, prediction=o.prediction, first=o.first)
    return compopt.ContrastiveEstimator(normalizer, compopt.FixedTemperature(o.tau), mode=mode, **o.placement)


def _emc2(n: int, mode: str, o: SimpleNamespace) -> compopt.ContrastiveEstimator:
    return compopt.EMC2Estimator(
        n,
        burn_in=o.burn_in if o.burn_in < 1 else round(o.burn_in),
        tau=o.tau,
        proposals=o.proposals,
        rescore=bool(o.rescore),
        mode=mode,
        **o.placement,
    )


NETWORK = {"prototypes": 1024, "network_lr": 1.0}

# Bimodal values of infonce, infonce-no-positive, clip, sogclr, isogclr and fastclip-v3: the best of their grids on
# glyphs at batch 64 (benchmarks/results/glyphs.md). Unimodal values were not tuned.
METHODS: dict[str, Method] = {
    # nothing to choose, and nothing per sample that could lie elsewhere
    "recommended": Method(
        "recommended", lambda n, mode, o: compopt.recommended(DIM, n, batch_size=o.batch_size, mode=mode), {}
    ),
    "infonce": Method(
        "InfoNCE",
        lambda n, mode, o: compopt.InfoNCEEstimator(tau=o.tau, include_positive=True, mode=mode, **o.placement),
        {"tau": 0.12},
        unimodal={"tau": 0.1},
    ),
    # decoupled contrastive learning (Yeh et al., ECCV 2022): the positive is not in the denominator
    "infonce-no-positive": Method(
        "DCL",
        lambda n, mode, o: compopt.DCLEstimator(tau=o.tau, mode=mode, **o.placement),
        {"tau": 0.05},
        unimodal={"tau": 0.1},
    ),
    "clip": Method(
        "CLIP (learned temperature)",
        lambda n, mode, o: compopt.InfoNCEEstimator(
            tau=o.tau, learn_tau=True, multiply_tau=False, mode=mode, **o.placement
        ),
        {"tau": 0.18},
        unimodal={"tau": 0.1},
    ),
    "sogclr": Method(
        "SogCLR",
        lambda n, mode, o: compopt.SogCLREstimator(
            n, gamma=o.gamma, tau=o.tau, reference=o.reference, mode=mode, **o.placement
        ),
        {"tau": 0.08, "gamma": 0.5, "reference": "none"},
        unimodal={"tau": 0.1},
    ),
    "isogclr": Method(
        "iSogCLR",
        lambda n, mode, o: compopt.ISogCLREstimator(
            n,
            gamma=o.gamma,
            rho=o.rho,
            lr=o.tau_lr,
            tau_init=o.tau,
            tau_min=o.tau_min,
            tau_max=o.tau_max,
            reference=o.reference,
            mode=mode,
            **o.placement,
        ),
        {
            **{"tau": 0.08, "gamma": 0.8, "reference": "none"},
            **{"rho": 2.5, "tau_lr": 0.01, "tau_min": 0.01, "tau_max": 0.5},
        },
        unimodal={"tau": 0.2, "rho": 0.3, "tau_min": 0.05, "tau_max": 1.0},
    ),
    "fastclip-v0": _fastclip("v0", "FastCLIP v0", tau_lr=0.001),
    "fastclip-v1": _fastclip("v1", "FastCLIP v1"),
    "fastclip-v2": _fastclip("v2", "FastCLIP v2", rho=2.0, tau_lr=0.01),
    "fastclip-v3": _fastclip("v3", "FastCLIP v3", rho=1.0, tau_lr=0.0001),
    "neuclip": Method(
        "NeuCLIP", _neuclip, {"tau": 0.07, **NETWORK, "updates": 10, "restart_every": 100, "through_alpha": 0}
    ),
    # prototypes that are the newest features themselves
    "residual": Method(
        "Residual",
        _residual,
        {
            **{"tau": 0.07, "gamma": 0.5, "memory": 1, "prediction": "before", "first": "one"},
            **{**NETWORK, "updates": 0, "restart_every": 1, "through_alpha": 1},
        },
    ),
    "memory": Method(
        "Memory",
        lambda n, mode, o: compopt.MemoryEstimator(DIM, o.length, o.tau, mode=mode, **o.placement),
        {"tau": 0.07, "length": 128},
    ),
    "emc2": Method(
        "EMC2", _emc2, {"tau": 0.1, "burn_in": 0.5, "proposals": "pool", "encode": 0, "rescore": 0}, {"tau": 0.2}
    ),
}


def build(
    name: str,
    n: int,
    mode: str,
    options: Mapping[str, Any],
    placement: Mapping[str, Any] | None = None,
    batch_size: int | None = None,
) -> compopt.ContrastiveEstimator:
    """Return the estimator of method ``name``.

    Args:
        name: a key of ``METHODS``.
        n: number of samples.
        mode: ``"bimodal"`` or ``"unimodal"``.
        options: the method's hyper-parameters.
        placement: where its rows live.
        batch_size: samples of a call on all ranks, for a method that depends on it.
    """
    return METHODS[name].build(n, mode, SimpleNamespace(**options, placement=placement or {}, batch_size=batch_size))


def build_schedule(
    est: compopt.ContrastiveEstimator, options: Mapping[str, Any], total_steps: int
) -> schedules.Schedule | None:
    """The gamma schedule of a method that has one (``gamma_min`` among its options), to be stepped per commit."""
    if "gamma_min" not in options:
        return None
    decay_steps = max(1, round(options["gamma_decay"] * total_steps))
    return schedules.CosineGamma(est, decay_steps, gamma_min=options["gamma_min"])
