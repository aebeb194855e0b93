"""Import the losses of other packages with a torch build without CUDA."""

from __future__ import annotations

import contextlib
import importlib
import io
from importlib.metadata import version
from typing import Any

import torch

NAMES = ("libauc", "open_clip_torch", "pytorch-metric-learning", "sentence-transformers")
# torchvision's wheel is built for CUDA; with a CPU build of torch its operators are missing, but it needs their names
OPERATORS = """nms qnms roi_align _roi_align_backward roi_pool _roi_pool_backward ps_roi_align _ps_roi_align_backward
ps_roi_pool _ps_roi_pool_backward deform_conv2d _deform_conv2d_backward"""
_library = None


def declare_operators() -> None:
    """Declare the names of torchvision's operators if torch has no CUDA."""
    global _library
    if _library is None and not torch.cuda.is_available():
        _library = torch.library.Library("torchvision", "DEF")
        for name in OPERATORS.split():
            _library.define(f"{name}(Tensor a) -> Tensor")


def versions() -> dict[str, str]:
    """Return the versions of the packages."""
    return {name: version(name) for name in NAMES}


def libauc(module: str = "contrastive") -> Any:
    """Return ``libauc.losses.contrastive``, or another module of its losses."""
    declare_operators()
    return importlib.import_module(f"libauc.losses.{module}")


def gcl_bimodal(n: int, **options: Any) -> Any:
    """Return LibAUC's ``GCLoss_v2`` for ``n`` samples."""
    return quiet(libauc().GCLoss_v2, N=n, **options)


def open_clip() -> Any:
    """Return ``open_clip.loss``."""
    declare_operators()
    from open_clip import loss

    return loss


def metric_learning() -> Any:
    """Return ``pytorch_metric_learning.losses``."""
    from pytorch_metric_learning import losses

    return losses


def sentence_losses() -> Any:
    """Return ``sentence_transformers.sentence_transformer.losses``."""
    declare_operators()
    from sentence_transformers.sentence_transformer import losses

    return losses


def quiet(build: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a function without its printed output."""
    with contextlib.redirect_stdout(io.StringIO()):
        return build(*args, **kwargs)
