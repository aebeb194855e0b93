"""Methods that the experiments compare: presets of the library, with the hyper-parameters of the command line."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import compopt
from compopt import schedules
from compopt.presets.published import SETTINGS
from recipes.models import DIM

BIMODAL, UNIMODAL = "bimodal", "unimodal"

# Hyper-parameters of the methods: type and meaning.
HYPERPARAMETERS: dict[str, tuple[Callable[[str], Any], str]] = {
    "tau": (float, "temperature; the initial one where it is learned"),
    "gamma": (float, "weight of the newest estimate in the moving average"),
    "gamma_min": (float, "value that a decaying gamma reaches"),
    "gamma_decay": (float, "fraction of the run over which gamma decays to --gamma-min"),
    "reference": (str, "what stored estimates are relative to: none (SogCLR) or positive (iSogCLR)"),
    "rho": (float, "how strongly learned temperatures are held up"),
    "parametrization": (str, "what a learned temperature of all samples moves: linear (tau) or log (log(1/tau))"),
    "tau_lr": (float, "step size of learned temperatures"),
    "tau_min": (float, "smallest learned temperature"),
    "tau_max": (float, "largest learned temperature"),
    "length": (int, "past samples whose features are kept"),
    "prototypes": (int, "prototypes of the network"),
    "network_lr": (float, "step size of the network's AdaGrad"),
    "updates": (int, "steps of the network per batch"),
    "restart_every": (int, "commits between restarts of the network"),
    "through_alpha": (
        lambda word: word == "1",
        "1: the gradient through the predicted normalizers reaches the encoders too",
    ),
    "burn_in": (float, "proposals to a chain before its visits count, as a fraction of them"),
    "draws": (int, "proposals to a chain in a batch, drawn from the whole data set"),
    "encode": (int, "1: samples outside the batch at which chains stay are encoded again; 0: such visits are dropped"),
    "group": (int, "1: samples with the same caption are not each other's negatives"),
}
IN_THE_LOOP = ("group", "encode", "gamma_min", "gamma_decay")  # read by the training loop, not by the estimator


@dataclass(frozen=True)
class Method:
    """Preset of the library, with the hyper-parameters that the command line can change.

    Defaults are those of the preset, also by mode.

    Attributes:
        title: name for tables and pictures.
        preset: function that builds the estimator.
        takes: hyper-parameters of the preset.
        defaults: values that are used without being given: those of the training loop, or of a paper's experiment.
        sizes: arguments of the preset among ``n`` and ``dim``.
        renamed: hyper-parameter -> the preset's name for it.
    """

    title: str
    preset: Callable[..., compopt.ContrastiveEstimator]
    takes: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    sizes: tuple[str, ...] = ("n",)
    renamed: Mapping[str, str] = field(default_factory=dict)

    def known(self, mode: str) -> list[str]:
        """Return the names of all hyper-parameters in ``mode``."""
        return [*dict.fromkeys((*self.options(mode), *self.takes))]

    def options(self, mode: str, given: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return the values that are not left to the preset: those of ``defaults``, updated by ``given``."""
        return {**({"group": 0} if mode == BIMODAL else {}), **self.defaults, **(given or {})}


DECAY = {"gamma_min": schedules.GAMMA_MIN, "gamma_decay": schedules.GAMMA_DECAY}  # of FastCLIP
_TAU = ("tau",)
_DUAL = ("tau", "rho", "tau_lr", "tau_min", "tau_max")


def _fastclip(version: str, *takes: str) -> Method:
    """Return a version of FastCLIP; v0 to v3 differ only in the temperature, and all decay gamma along a cosine."""
    preset = partial(compopt.FastCLIPEstimator, version=version)
    return Method(f"FastCLIP {version}", preset, takes or _TAU, DECAY, renamed={"tau_lr": "lr"})


METHODS: dict[str, Method] = {
    "recommended": Method("recommended", compopt.recommended, _TAU, sizes=("n", "dim")),
    "infonce": Method("InfoNCE", compopt.InfoNCEEstimator, _TAU, sizes=()),
    # decoupled contrastive learning (Yeh et al., ECCV 2022): the positive is not in the denominator
    "infonce-no-positive": Method("DCL", compopt.DCLEstimator, _TAU, sizes=()),
    "clip": Method(
        "CLIP (learned temperature)",
        partial(compopt.InfoNCEEstimator, learn_tau=True, multiply_tau=False),
        _TAU,
        sizes=(),
    ),
    "sogclr": Method("SogCLR", compopt.SogCLREstimator, ("tau", "gamma", "reference")),
    "isogclr": Method(
        "iSogCLR",
        compopt.ISogCLREstimator,
        ("gamma", "reference", *_DUAL),
        renamed={"tau": "tau_init", "tau_lr": "lr"},
    ),
    "fastclip-v0": _fastclip("v0", "parametrization", *(name for name in _DUAL if name != "rho")),
    "fastclip-v1": _fastclip("v1"),
    "fastclip-v2": _fastclip("v2", *_DUAL),
    "fastclip-v3": _fastclip("v3", "parametrization", *_DUAL),
    "neuclip": Method(
        "NeuCLIP",
        compopt.NeuCLIPEstimator,
        ("tau", "prototypes", "network_lr", "updates", "restart_every", "through_alpha"),
        sizes=("dim",),
        renamed={"network_lr": "lr"},
    ),
    "memory": Method("Memory", compopt.MemoryEstimator, ("tau", "length"), sizes=("dim",)),
    "emc2": Method("EMC2", compopt.EMC2Estimator, ("tau", "burn_in"), {"encode": 0}),
    # encodes up to B (draws + 1) samples per direction and step
    "emc2-dataset": Method(
        "EMC2, Algorithm 1",
        partial(compopt.EMC2Estimator, proposals="dataset"),
        ("tau", "burn_in", "draws"),
        {"encode": 1},
    ),
}


_KINDS = {"sogclr": "SogCLR", "isogclr": "ISogCLR", "fastclip": "FastCLIP", "neuclip": "NeuCLIP", "emc2": "EMC2"}


def _published(name: str, scale: str) -> Method:
    """Return a preset with the settings of a paper's experiment, which take effect in both modes."""
    found, kind = compopt.presets.settings(name, scale), name.partition("-")[0]
    options = {key: value for key, value in found.items() if key != "mode"}
    shared = {key: value for key, value in found.training.items() if key in DECAY}
    decays = {**DECAY, **found.schedule, **shared} if kind == "fastclip" else {}
    preset = getattr(compopt, f"{_KINDS[kind]}Estimator")
    return Method(f"{name}:{scale}", preset, (), options | decays, sizes=("dim",) if kind == "neuclip" else ("n",))


# the experiments of the papers, as NAME:SCALE of compopt.presets.settings; osgd and spectral choose batches
PUBLISHED = {
    f"{name}:{scale}": _published(name, scale)
    for name, scales in SETTINGS.items()
    if name.partition("-")[0] in _KINDS
    for scale in scales
}


def method_of(name: str) -> Method:
    """Return a method of the table, or one with published settings."""
    return METHODS.get(name) or PUBLISHED[name]


def title_of(name: str, options: Mapping[str, Any]) -> str:
    """Return the title of a method, with the options that are not the defaults, such as ``NeuCLIP, prototypes 256``."""
    method = method_of(name)
    unchanged = method.options(BIMODAL).items()
    given = [f"{key} {value}" for key, value in options.items() if (key, value) not in unchanged]
    return ", ".join((method.title, *given))


def build(
    name: str,
    n: int,
    mode: str,
    options: Mapping[str, Any],
    placement: Mapping[str, Any] | None = None,
    batch_size: int | None = None,
    dim: int = DIM,
) -> compopt.ContrastiveEstimator:
    """Return the estimator of method ``name``."""
    method = method_of(name)
    given: dict[str, Any] = {size: value for size, value in (("n", n), ("dim", dim)) if size in method.sizes}
    given |= {method.renamed.get(key, key): value for key, value in options.items() if key not in IN_THE_LOOP}
    given |= {"batch_size": batch_size} if name == "recommended" else dict(placement or {})
    return method.preset(**given, mode=mode)


def build_schedule(
    est: compopt.ContrastiveEstimator, options: Mapping[str, Any], total_steps: int
) -> schedules.Schedule | None:
    """Return the gamma schedule of a method that has one (option ``gamma_min``), to be stepped at every commit."""
    if "gamma_min" not in options:
        return None
    decay_steps = max(1, round(options["gamma_decay"] * total_steps))
    return schedules.CosineGamma(est, decay_steps, gamma_min=options["gamma_min"])
