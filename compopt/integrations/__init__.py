"""Adapters for training frameworks; each module is imported at its first use.

``est.attach(optimizer)`` suffices for plain torch, DDP, FSDP2 and DeepSpeed engines. These modules handle events that
no hook of the optimizer can observe, and checkpoints of frameworks that would contain the rows of one rank only:

- :mod:`compopt.integrations.amp`: a ``GradScaler`` that skips an update without calling the optimizer.
- :mod:`compopt.integrations.accelerate`: ``attach``, ``register_for_checkpointing``.
- :mod:`compopt.integrations.deepspeed`: ``save_checkpoint``, ``load_checkpoint``.
- :mod:`compopt.integrations.dcp`: ``Stateful`` for ``torch.distributed.checkpoint``.
- :mod:`compopt.integrations.transformers`: ``EstimatorCallback``, ``GradientCacheMixin`` for the ``Trainer``.
- :mod:`compopt.integrations.lightning`: ``EstimatorCallback`` for the ``Trainer`` of Lightning.
- :mod:`compopt.integrations.sentence_transformers`: losses for its trainer, and ``add_index`` for its data sets.
- :mod:`compopt.integrations.open_clip`: open_clip's own trainer with an estimator, as a command.
"""

from __future__ import annotations

import importlib
from typing import Any

_MODULES = "accelerate amp dcp deepspeed lightning open_clip sentence_transformers transformers".split()


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; there are {', '.join(_MODULES)}")
    try:
        return importlib.import_module(f"{__name__}.{name}")
    except ImportError as error:
        raise AttributeError(f"{__name__}.{name} cannot be imported: {error}") from error


def __dir__() -> list[str]:
    return _MODULES
