"""The other packages' losses, imported beside a torch without CUDA."""

from __future__ import annotations

import contextlib
import importlib
import io
from importlib.metadata import version
from typing import Any

import torch

NAMES = ("libauc", "open_clip_torch", "pytorch-metric-learning", "sentence-transformers")
# torchvision's wheel is built for CUDA; beside a CPU torch its operators are missing, and their names are asked for
OPERATORS = """nms qnms roi_align _roi_align_backward roi_pool _roi_pool_backward ps_roi_align _ps_roi_align_backward
ps_roi_pool _ps_roi_pool_backward deform_conv2d _deform_conv2d_backward"""
_library = None


def declare_operators() -> None:
    """Give torchvision the names that it asks for, where its operators are missing."""
    global _library
    if _library is None and not torch.cuda.is_available():
        _library = torch.library.Library("torchvision", "DEF")
        for name in OPERATORS.split():
            _library.define(f"{name}(Tensor a) -> Tensor")


def versions() -> dict[str, str]:
    """The packages' versions."""
    return {name: version(name) for name in NAMES}


def libauc(module: str = "contrastive") -> Any:
    """``libauc.losses.contrastive``, or another module of its losses."""
    declare_operators()
    return importlib.import_module(f"libauc.losses.{module}")


def gcl_bimodal(n: int, **options: Any) -> Any:
    """LibAUC's ``GCLoss_v2`` over ``n`` samples."""
    return quiet(libauc().GCLoss_v2, N=n, **options)


def open_clip() -> Any:
    """``open_clip.loss``."""
    declare_operators()
    from open_clip import loss

    return loss


def metric_learning() -> Any:
    """``pytorch_metric_learning.losses``."""
    from pytorch_metric_learning import losses

    return losses


def sentence_losses() -> Any:
    """``sentence_transformers.sentence_transformer.losses``."""
    declare_operators()
    from sentence_transformers.sentence_transformer import losses

    return losses


def quiet(build: Any, *args: Any, **kwargs: Any) -> Any:
    """Call something that prints, without its output."""
    with contextlib.redirect_stdout(io.StringIO()):
        return build(*args, **kwargs)
