"""Estimators by name, and what a run asks of one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from compopt import presets
from compopt.contrastive import ContrastiveEstimator
from compopt.presets import recommended

MODEL = "model"


@dataclass(frozen=True)
class Method:
    """A preset under a name.

    Attributes:
        preset: builds the estimator.
        fixed: arguments that the name stands for.
        defaults: values of flags that differ from the preset's.
        decays: gamma falls along a cosine, for which the length of the run is known here.
    """

    preset: Callable[..., ContrastiveEstimator]
    fixed: Mapping[str, Any] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    decays: bool = False

    @property
    def parameters(self) -> dict[str, inspect.Parameter]:
        """Those of the preset."""
        return dict(inspect.signature(self.preset).parameters)

    @property
    def has_rows(self) -> bool:
        """Rows are kept for every sample, or not at all: they are no option."""
        n = self.parameters.get("n")
        return n is not None and n.default is inspect.Parameter.empty


def _fastclip(version: str) -> Method:
    return Method(presets.FastCLIPEstimator, {"version": version, "gamma": 1.0}, decays=True)


METHODS = {
    "clip": Method(presets.InfoNCEEstimator, {"multiply_tau": False}, {"tau": MODEL}),
    "dcl": Method(presets.DCLEstimator),
    "emc2": Method(presets.EMC2Estimator),
    "fastclip-v0": _fastclip("v0"),
    "fastclip-v1": _fastclip("v1"),
    "fastclip-v2": _fastclip("v2"),
    "fastclip-v3": _fastclip("v3"),
    "infonce": Method(presets.InfoNCEEstimator),
    "isogclr": Method(presets.ISogCLREstimator),
    "memory": Method(presets.MemoryEstimator),
    "neuclip": Method(presets.NeuCLIPEstimator),
    "recommended": Method(recommended),
    "residual": Method(presets.ResidualEstimator),
    "sogclr": Method(presets.SogCLREstimator),
}


@dataclass(frozen=True)
class Options:
    """What was asked for.

    Attributes:
        name: of the method.
        given: arguments of the preset that were given as flags.
        index: where rows come from: a file, ``keys:N``, ``positions``, or ``None``.
        gamma_min, gamma_decay: end of a decaying gamma, and the share of the run after which it is reached.
    """

    name: str
    given: dict[str, Any]
    index: str | None
    gamma_min: float = 0.2
    gamma_decay: float = 0.5

    @property
    def method(self) -> Method:
        """The preset."""
        return METHODS[self.name]

    @property
    def tau_of_model(self) -> bool:
        """The temperature is 1 / the model's ``logit_scale``."""
        return self.given.get("tau", self.method.defaults.get("tau")) == MODEL

    @property
    def wants_rows(self) -> bool:
        """The samples of this run need an index."""
        return self.method.has_rows or self.index is not None

    def build(
        self, n: int | None, dim: int | None, samples: int | None = None, batch_size: int | None = None
    ) -> ContrastiveEstimator:
        """Build the estimator.

        Args:
            n: number of rows, if samples have an index.
            dim: of the model's features, if it is known.
            samples: number of training samples, if it is known.
            batch_size: samples of a call on all ranks, if it is known.

        Raises:
            ValueError, TypeError: values that the preset refuses; a temperature that nobody would learn.
        """
        method, parameters = self.method, self.method.parameters
        values = {**method.fixed, **{k: v for k, v in self.given.items() if v != MODEL or k != "tau"}}
        if "batch_size" in parameters:  # what is recommended depends on both, and keeps no rows
            values |= {"n": samples if n is None else n, "batch_size": batch_size}
        elif n is not None and "n" in parameters:
            values["n"] = n
        if "dim" in parameters and "dim" not in values:
            if dim is None:
                raise ValueError(f"--dim: the size of this model's features is not known; {self.name} needs it")
            values["dim"] = dim
        est = method.preset(**values)
        if list(est.parameters()):
            raise ValueError(
                "--learn-tau: open_clip's optimizer learns what is in the model, and its scale is there already: use "
                "--tau model instead"
            )
        if self.tau_of_model and est.temperature.learns:
            raise ValueError(f"--tau model: {self.name} with these options learns temperatures of its own; give a tau")
        return est
