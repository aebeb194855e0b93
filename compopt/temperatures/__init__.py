"""Temperatures: fixed, learned by the user's optimizer, or dual variables with their own rule."""

from compopt.temperatures.dual import TemperatureDual
from compopt.temperatures.fixed import FixedTemperature

__all__ = ["FixedTemperature", "TemperatureDual"]
