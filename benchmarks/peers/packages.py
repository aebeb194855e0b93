"""Import the losses of other packages."""

from __future__ import annotations

import contextlib
import importlib
import io
from importlib.metadata import version
from typing import Any

NAMES = ("libauc", "open_clip_torch", "pytorch-metric-learning", "sentence-transformers")


def versions() -> dict[str, str]:
    """Return the versions of the packages."""
    return {name: version(name) for name in NAMES}


def libauc(module: str = "contrastive") -> Any:
    """Return ``libauc.losses.contrastive``, or another module of its losses."""
    return importlib.import_module(f"libauc.losses.{module}")


def gcl_bimodal(n: int, **options: Any) -> Any:
    """Return LibAUC's ``GCLoss_v2`` for ``n`` samples."""
    return quiet(libauc().GCLoss_v2, N=n, **options)


def open_clip() -> Any:
    """Return ``open_clip.loss``."""
    from open_clip import loss

    return loss


def metric_learning() -> Any:
    """Return ``pytorch_metric_learning.losses``."""
    from pytorch_metric_learning import losses

    return losses


def lightly() -> Any:
    """Return ``lightly.loss``."""
    from lightly import loss

    return loss


def sentence_losses() -> Any:
    """Return ``sentence_transformers.sentence_transformer.losses``."""
    from sentence_transformers.sentence_transformer import losses

    return losses


def quiet(build: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a function without its printed output."""
    with contextlib.redirect_stdout(io.StringIO()):
        return build(*args, **kwargs)
