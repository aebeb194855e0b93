"""``save`` and ``load``: checkpoints of tables that are larger than memory."""

from compopt.checkpoint.loading import load
from compopt.checkpoint.saving import save
from compopt.estimator.save_handle import SaveHandle

__all__ = ["SaveHandle", "load", "save"]
