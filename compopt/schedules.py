"""Schedules of hyper-parameters, with the interface of ``torch.optim.lr_scheduler``."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from compopt import checks
from compopt.checks.values import INT64_MAX, entries, integer
from compopt.estimator.base import Estimator
from compopt.estimator.groups import plain_value, write

# FastCLIP's gamma falls from 1 to GAMMA_MIN during this share of a run: README of the authors' code, CC3M and CC12M.
GAMMA_MIN, GAMMA_DECAY = 0.2, 0.5


class Schedule:
    """Schedule that sets a hyper-parameter of every sample group at each :meth:`step`.

    Example:
        >>> import compopt
        >>> est = compopt.SogCLREstimator(n=10)
        >>> schedule = compopt.schedules.Schedule(est, "gamma", lambda t: 1 / (1 + t))
        >>> schedule.step(); est.sample_groups[0]["gamma"]
        0.5

    Args:
        est: the estimator.
        key: a hyper-parameter of its groups.
        fn: function from the number of steps so far to the value.

    Attributes:
        t: number of steps so far.

    State: ``t``; the current value is in the groups. Communicates nothing.

    Raises:
        TypeError: ``est`` is not an estimator, ``fn`` is not callable, or its result cannot be a hyper-parameter.
        ValueError: the estimator has no such key, or refuses a value.
    """

    def __init__(self, est: Estimator, key: str, fn: Callable[[int], Any]) -> None:
        if not isinstance(est, Estimator):
            raise TypeError(f"est must be an estimator with sample_groups, got {type(est).__name__}")
        if not callable(fn):
            raise TypeError(f"fn must be a function of the step number, got {fn!r} of type {type(fn).__name__}")
        checks.known_keys(type(est).__name__, {key: None}, est.defaults)
        self.est, self.key, self.fn = est, key, fn
        self._move(0)

    def _move(self, t: int) -> None:
        values = [plain_value(self.key, self.fn(t)) for _ in self.est.sample_groups]
        with self.est._writing():
            pairs = zip(self.est.sample_groups, values, strict=True)
            write([change for group, value in pairs for change in group.changes({self.key: value})])
        self.t = t

    def step(self) -> None:
        """Increment ``t``, and set the value for it in all sample groups."""
        self._move(self.t + 1)

    def state_dict(self) -> dict[str, Any]:
        """Return the number of steps, ``{"t": t}``; the function is not saved."""
        return {"t": self.t}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the result of :meth:`state_dict`, and set the value for it in all sample groups.

        Raises:
            TypeError, ValueError: ``t`` is missing, negative or not an integer. Nothing is changed in these cases.
        """
        entries("state_dict", state_dict, ("t",))
        self._move(integer("t", state_dict["t"], 0, INT64_MAX))


class CosineGamma(Schedule):
    r"""Cosine schedule of ``gamma`` from 1 to ``gamma_min``.

    Example:
        >>> import compopt
        >>> est = compopt.SogCLREstimator(n=10)
        >>> schedule = compopt.schedules.CosineGamma(est, decay_steps=2, gamma_min=0.2)
        >>> gammas = [est.sample_groups[0]["gamma"]]
        >>> for _ in range(3):
        ...     schedule.step()  # beside optimizer.step()
        ...     gammas.append(round(est.sample_groups[0]["gamma"], 3))
        >>> gammas
        [1.0, 0.6, 0.2, 0.2]

    ``gamma = gamma_min + (1 - gamma_min) (1 + cos(pi min(1, t / decay_steps))) / 2``. FastCLIP's authors call
    :meth:`step` once per epoch, with ``decay_steps`` in epochs.

    Args:
        est: an estimator with the hyper-parameter ``gamma``.
        decay_steps: number of steps until ``gamma_min`` is reached; ``gamma`` is constant afterwards.
        gamma_min: final value, in (0, 1].

    Raises:
        ValueError: ``decay_steps`` < 1, ``gamma_min`` outside (0, 1], or an estimator without ``gamma``.
        TypeError: see :class:`Schedule`.

    References:
        Wei et al., FastCLIP, 2024 (used by all its versions).
    """

    def __init__(self, est: Estimator, decay_steps: int, gamma_min: float = GAMMA_MIN) -> None:
        self.decay_steps = checks.positive_int("decay_steps", decay_steps)
        checks.unit_interval("gamma_min", gamma_min)
        self.gamma_min = gamma_min
        super().__init__(est, "gamma", self._value)

    def _value(self, t: int) -> float:
        fraction = min(1.0, t / self.decay_steps)
        return self.gamma_min + (1 - self.gamma_min) * (1 + math.cos(math.pi * fraction)) / 2
