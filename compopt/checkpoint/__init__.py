"""Checkpoints of tables that may be larger than memory: ``save`` and ``load``."""

from compopt.checkpoint.loading import load
from compopt.checkpoint.saving import save
from compopt.estimator.save_handle import SaveHandle

__all__ = ["SaveHandle", "load", "save"]
