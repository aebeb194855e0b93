"""Published hyper-parameters from papers and their code: defaults by mode, and the settings of their experiments."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from compopt import checks
from compopt.schedules import GAMMA_DECAY, GAMMA_MIN


def by_mode(given: float | None, options: Mapping[str, Any], bimodal: float, unimodal: float) -> float:
    """Return the ``given`` hyper-parameter, or the default for the ``mode`` in a preset's options if it is ``None``."""
    if given is not None:
        return given
    return unimodal if options.get("mode") == "unimodal" else bimodal


def as_logarithm(parametrization: str, switch: bool = True) -> dict[str, Any]:
    """Return the arguments of ``TemperatureDual`` for a learned global temperature as in FastCLIP's code."""
    slows = switch and parametrization == "log"
    return {"parametrization": parametrization, "lr_switch": (0.03, 1 / 3) if slows else None}


_EMPTY: Mapping[str, Any] = MappingProxyType({})


class Settings(dict[str, Any]):
    """Keyword arguments of a preset, or of a sampler of batches, for one published experiment.

    Attributes:
        source: section, table or code that states the values.
        schedule: keyword arguments of :class:`~compopt.schedules.CosineGamma` other than ``decay_steps``; empty if
            gamma is constant or, for FastCLIP on DFN, not published: use the default of ``gamma_min`` and half of the
            run there, as the recipes do, since the preset's gamma of 1 keeps no history.
        training: what the paper or its code states about the training: ``optimizer``, ``batch_size`` (of all ranks),
            ``lr``, ``weight_decay``, ``warmup_epochs`` or ``warmup_steps``, ``epochs`` or ``samples``, and for FastCLIP
            ``gamma_decay``, ``decay_steps`` of the schedule as a share of all steps. Where the paper compares several
            values, the largest run.
    """

    def __init__(
        self,
        arguments: Mapping[str, Any],
        source: str,
        schedule: Mapping[str, float] = _EMPTY,
        training: Mapping[str, Any] = _EMPTY,
    ) -> None:
        super().__init__(arguments)
        self.source, self.schedule, self.training = source, dict(schedule), dict(training)


_VIT = (0.9, 0.98)  # betas of FastCLIP's code if the image encoder is a transformer
_README = "authors' code, README"
_FALLS = {"gamma_min": GAMMA_MIN}


def _training(optimizer: str, batch_size: int, lr: float, weight_decay: float, **more: float) -> dict[str, Any]:
    given = {"optimizer": optimizer, "batch_size": batch_size, "lr": lr, "weight_decay": weight_decay}
    return {**given, **more}


# FastCLIP and NeuCLIP: Tables 1 and 3 of the NeuCLIP paper
_CLIP: dict[str, dict[str, Any]] = {
    "cc3m": _training("adamw", 1024, 1e-3, 0.1, warmup_steps=10_000, samples=100_000_000),
    "cc12m": _training("adamw", 2048, 4e-4, 0.1, warmup_steps=10_000, samples=300_000_000),
    "dfn-14m": _training("adamw", 4096, 5e-4, 0.2, warmup_steps=500, samples=320_000_000),
    "dfn-192m": _training("adamw", 5120, 3.125e-4, 0.2, warmup_steps=500, samples=1_300_000_000),
    "dfn-1b": _training("adamw", 5120, 3.125e-4, 0.2, warmup_steps=500, samples=3_000_000_000),
}
_FALLING = {scale: {**_CLIP[scale], "gamma_decay": GAMMA_DECAY} for scale in ("cc3m", "cc12m")}  # authors' code, README
# SogCLR, section 5.1: the rate is 0.075 sqrt(batch size); section 5.2
_IMAGENET = _training("lars", 512, 0.075 * 512**0.5, 1e-6, warmup_epochs=10, epochs=800)
_IMAGENET_PAIRS = _training("adamw", 256, 1e-3, 0.1, warmup_steps=1000, epochs=60)
# iSogCLR, section 5
_CIFAR = _training("lars", 128, 0.8, 1e-4, warmup_epochs=10, epochs=400)
_CC3M = _training("adamw", 512, 2e-4, 0.02, warmup_steps=1000, epochs=30)
# mini-batch optimisation, appendix D
_CHOSEN = {"optimizer": "lars", "batch_size": 32, "warmup_epochs": 10, "epochs": 100}


def _isogclr(
    mode: str, values: tuple[float, ...], bounds: tuple[float, ...], source: str, training: Mapping[str, Any] = _EMPTY
) -> Settings:
    """Return settings of iSogCLR.

    ``values`` are gamma, rho, lr, beta; ``bounds`` are tau_init, tau_min, tau_max and optionally max_grad.
    """
    names = ("gamma", "rho", "lr", "beta", "tau_init", "tau_min", "tau_max", "max_grad")
    # the authors' unimodal code uses s_ij, the paper h_ij
    start = {"mode": mode, "reference": "none" if mode == "unimodal" else "positive"}
    return Settings({**start, **dict(zip(names, (*values, *bounds), strict=False))}, source, training=training)


def _neuclip(rho: float, tau_lr: float, scale: str) -> Settings:
    network = {"prototypes": 4096, "lr": 1.0, "updates": 10, "restart_every": 500}
    learned = {"learn_tau": True, "through_alpha": True, "rho": rho, "tau_lr": tau_lr}
    return Settings({**network, **learned}, "Tables 3 and 4, Algorithm 1", training=_CLIP[scale])


def _emc2(
    beta: float, burn_in: int, optimizer: str, batch_size: int, lr: float, weight_decay: float, **more: float
) -> Settings:
    training = _training(optimizer, batch_size, lr, weight_decay, **more)
    run = {"mode": "unimodal", "tau": 1 / beta, "burn_in": burn_in, "proposals": "sweep"}
    return Settings(run, "Table 3, section 4.1; tau is 1 / beta", training=training)


SETTINGS: dict[str, dict[str, Settings]] = {
    "sogclr": {
        "imagenet": Settings(
            {"mode": "unimodal", "gamma": 0.8, "tau": 0.1}, "sections 5.1 and 5.3, Table 8", training=_IMAGENET
        ),
        "imagenet-pairs": Settings(
            {"mode": "bimodal", "tau": 0.07}, "section 5.2; gamma is tuned in 0.6 to 0.99", training=_IMAGENET_PAIRS
        ),
    },
    "isogclr": {
        "cifar100": _isogclr("unimodal", (0.8, 0.4, 0.03, 0.5), (0.1, 0.05, 1.0, 3.0), _README, _CIFAR),
        "cc3m": _isogclr("bimodal", (0.8, 6.0, 0.03, 0.9), (0.01, 0.005, 1.0, 5.0), _README, _CC3M),
        "libauc-unimodal": _isogclr("unimodal", (0.9, 0.3, 0.01, 0.9), (0.1, 0.05, 0.7), "LibAUC 2.0.1, `GCLoss_v1`"),
        "libauc-bimodal": _isogclr("bimodal", (0.9, 6.0, 0.01, 0.9), (0.01, 0.005, 0.05), "LibAUC 2.0.1, `GCLoss_v2`"),
    },
    "fastclip-v0": {
        "cc3m": Settings(
            {"version": "v0", "tau": 0.07, "lr": 1e-3}, f"{_README}; lr follows the model's", _FALLS, _FALLING["cc3m"]
        )
    },
    "fastclip-v1": {"cc3m": Settings({"version": "v1", "tau": 0.07}, _README, _FALLS, _FALLING["cc3m"])},
    "fastclip-v2": {
        "cc3m": Settings({"version": "v2", "tau": 0.03, "rho": 7.0, "lr": 0.0133}, _README, _FALLS, _FALLING["cc3m"])
    },
    "fastclip-v3": {
        "cc3m": Settings({"version": "v3", "tau": 0.07, "rho": 6.5, "lr": 2e-4}, _README, _FALLS, _FALLING["cc3m"]),
        "cc12m": Settings(
            {"version": "v3", "tau": 0.07, "rho": 8.5, "lr": 1e-4, "betas": _VIT}, _README, _FALLS, _FALLING["cc12m"]
        ),
        "laion": Settings(
            {"version": "v3", "tau": 0.07, "rho": 16.0, "lr": 5e-5, "betas": _VIT, "eps": 1e-6},
            _README,
            {"gamma_min": 0.8},
            {"gamma_decay": 1 / 3},
        ),
        "dfn-14m": Settings(
            {"version": "v3", "rho": 11.0, "lr": 6.25e-5}, "NeuCLIP, Table 3", training=_CLIP["dfn-14m"]
        ),
        "dfn-192m": Settings(
            {"version": "v3", "rho": 11.0, "lr": 3.9e-5}, "NeuCLIP, Table 3", training=_CLIP["dfn-192m"]
        ),
        "dfn-1b": Settings({"version": "v3", "rho": 11.0, "lr": 3.9e-5}, "NeuCLIP, Table 3", training=_CLIP["dfn-1b"]),
    },
    "neuclip": {
        "cc3m": _neuclip(6.5, 1.25e-4, "cc3m"),
        "cc12m": _neuclip(8.5, 5e-5, "cc12m"),
        "dfn-14m": _neuclip(11.0, 6.25e-5, "dfn-14m"),
        "dfn-192m": _neuclip(11.0, 3.9e-5, "dfn-192m"),
        "dfn-1b": _neuclip(11.0, 3.9e-5, "dfn-1b"),
    },
    "emc2": {
        "stl10-32": _emc2(14.28, 31, "adam", 32, 1e-4, 1e-4, epochs=100),  # epochs: Figure 1
        "stl10-256": _emc2(5, 255, "adam", 256, 1e-3, 1e-4),
        "imagenet100": _emc2(14.28, 255, "lars", 256, 1.2, 1e-6),
        "stl10-subset": _emc2(5, 3, "adam", 4, 1e-3, 1e-4),
    },
    "osgd": {
        "cifar100": Settings({"batch_size": 32, "candidates": 1500, "keep": 150, "tau": 0.1}, _README, training=_CHOSEN)
    },
    "spectral": {"cifar100": Settings({"batch_size": 32, "group": 40, "tau": 0.1}, _README, training=_CHOSEN)},
}


def settings(name: str, scale: str | None = None) -> Settings:
    """Return the keyword arguments of a preset for a paper's experiment.

    Example:
        >>> import compopt
        >>> laion = compopt.presets.settings("fastclip-v3", scale="laion")
        >>> laion["rho"], laion.schedule
        (16.0, {'gamma_min': 0.8})
        >>> compopt.presets.settings("neuclip", scale="dfn-14m").training["batch_size"]
        4096
        >>> est = compopt.FastCLIPEstimator(n=100, **laion)
        >>> gamma = compopt.schedules.CosineGamma(est, decay_steps=10, **laion.schedule)

    Args:
        name: ``"sogclr"``, ``"isogclr"``, ``"fastclip-v0"`` to ``"fastclip-v3"``, ``"neuclip"``, ``"emc2"``; for
            samplers of batches ``"osgd"`` (:class:`~compopt.samplers.OrderedBatchSampler`) and ``"spectral"``.
        scale: name of the experiment, usually its data set; ``None``: the first one in the table of the paper's page.

    Returns:
        A dict with the attributes ``source``, ``schedule`` (for :class:`~compopt.schedules.CosineGamma`) and
        ``training`` (optimizer, batch size, rate, weight decay, warm-up, length). ``n`` and ``dim`` are not included,
        since they depend on the data. The papers use large batches: ``rho`` must stay below ``log |N_i|`` of your
        batches.

    Raises:
        ValueError: an unknown name or scale; the message lists the known ones.
    """
    checks.one_of("name", name, SETTINGS)
    scales = SETTINGS[name]
    if scale is not None:
        checks.one_of(f"scale of {name!r}", scale, scales)
    found = scales[next(iter(scales)) if scale is None else scale]
    return Settings(found, found.source, found.schedule, found.training)
