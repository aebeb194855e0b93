"""Public interface for new methods: the estimator base class, its parts and the types that they use."""

from compopt.estimator.base import Estimator
from compopt.estimator.component import Call, Component, Estimate, Normalizer, Setting, Temperature
from compopt.estimator.groups import GroupSpec, Hyper
from compopt.stores.layout import Column

__all__ = [
    "Call",
    "Column",
    "Component",
    "Estimate",
    "Estimator",
    "GroupSpec",
    "Hyper",
    "Normalizer",
    "Setting",
    "Temperature",
]
