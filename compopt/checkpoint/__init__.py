"""``save`` and ``load``: checkpoints of tables that are larger than memory."""

from compopt.checkpoint.saving import load, save

__all__ = ["load", "save"]
