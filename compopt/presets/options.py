"""Options that presets pass on to ContrastiveEstimator, defined once for type checkers."""

from __future__ import annotations

from compopt.checks import Directions, Mode
from compopt.estimator.options import PlacementOptions
from compopt.kernel.triton.choice import Backend
from compopt.pairs import PairPolicy


class CommonOptions(PlacementOptions, total=False):
    """Keywords of :class:`~compopt.ContrastiveEstimator` that every preset accepts, for type checkers."""

    mode: Mode
    directions: Directions
    normalize: bool
    chunk_size: int | None
    pairs: PairPolicy | None
    backend: Backend


class Options(CommonOptions, total=False):
    """Keywords of presets that let the user choose the form of the objective."""

    multiply_tau: bool
