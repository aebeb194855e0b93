"""The methods a recipe can train with: one entry each, hyper-parameters and their defaults included."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import compopt
from compopt import schedules

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
}


@dataclass(frozen=True)
class Method:
    """How to build an estimator, and with what by default.

    Attributes:
        title: name for tables and pictures.
        build: ``(n, mode, o) -> estimator``; ``o`` has one attribute per hyper-parameter, and
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
        values = {**self.defaults, **(self.unimodal if mode == UNIMODAL else {})}
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


# Bimodal values of infonce, infonce-no-positive, clip, sogclr, isogclr and fastclip-v3: the best of their grids on
# glyphs at batch 64 (benchmarks/results/glyphs.md). Unimodal values were not tuned.
METHODS: dict[str, Method] = {
    "infonce": Method(
        "InfoNCE",
        lambda n, mode, o: compopt.InfoNCEEstimator(tau=o.tau, include_positive=True, mode=mode, **o.placement),
        {"tau": 0.12},
        unimodal={"tau": 0.1},
    ),
    "infonce-no-positive": Method(
        "InfoNCE without the positive",
        lambda n, mode, o: compopt.InfoNCEEstimator(tau=o.tau, include_positive=False, mode=mode, **o.placement),
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
}


def build(
    name: str, n: int, mode: str, options: Mapping[str, Any], placement: Mapping[str, Any] | None = None
) -> compopt.ContrastiveEstimator:
    """The estimator of method ``name`` over ``n`` samples; ``placement``: where its rows live."""
    return METHODS[name].build(n, mode, SimpleNamespace(**options, placement=placement or {}))


def build_schedule(
    est: compopt.ContrastiveEstimator, options: Mapping[str, Any], total_steps: int
) -> schedules.Schedule | None:
    """The gamma schedule of a method that has one (``gamma_min`` among its options), to be stepped per commit."""
    if "gamma_min" not in options:
        return None
    decay_steps = max(1, round(options["gamma_decay"] * total_steps))
    return schedules.CosineGamma(est, decay_steps, gamma_min=options["gamma_min"])
