"""The contract of every estimator, and the parts it is composed of."""

from compopt.estimator.base import Estimator

__all__ = ["Estimator"]
