"""Public interface for new methods: the estimator base class, its subclasses and the types that they use."""

from compopt.estimator.base import Estimator, Form
from compopt.estimator.container import Container
from compopt.estimator.groups import GroupSpec, Hyper
from compopt.estimator.parts import Call, Estimate, Normalizer, Temperature
from compopt.stores.rows import Column

__all__ = [
    "Call",
    "Column",
    "Container",
    "Estimate",
    "Estimator",
    "Form",
    "GroupSpec",
    "Hyper",
    "Normalizer",
    "Temperature",
]
