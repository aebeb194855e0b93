"""Selection of plain torch or the kernels in Triton, and of the precision of their products."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Literal, get_args

import torch
from torch import Tensor

Backend = Literal["auto", "torch", "triton"]
Precision = Literal["tf32", "bf16", "tf32x3", "ieee"]
BACKENDS, PRECISIONS = get_args(Backend), get_args(Precision)
AUTO = "torch"  # the backend for "auto"; no GPU has run the kernels yet; `make gpu` measures them
SWITCH = "COMPOPT_TRITON"  # environment variable; the value 0 disables the kernels
# In bfloat16 the relative error of the gradient is 4e-3 at tau 0.07 and 6e-3 at this tau. The error of a sum is up to
# 0.03 nats at this tau, and 0.2 at tau 0.005 (benchmarks/results/fused.md).
BF16_MIN_TAU = 0.02

_log = logging.getLogger(__name__)


def reason_for_torch(backend: Backend, z: Tensor, argument: str | None = None) -> str | None:
    """Return the reason to use plain torch for a call, or ``None`` for the kernels in Triton; logged at debug level.

    ``z`` are features in the dtype of the computation; ``argument`` is one of the call that the kernels do not support.
    """
    reason = _reason(AUTO if backend == "auto" else backend, z, argument)
    if not torch.compiler.is_compiling():  # a graph cannot log
        _log.debug("pairs: %s", "the kernels in Triton" if reason is None else f"plain torch, since {reason}")
    return reason


def _reason(backend: str, z: Tensor, argument: str | None) -> str | None:
    if backend == "torch":
        return "the backend is torch"
    if os.environ.get(SWITCH) == "0":
        return f"{SWITCH} is 0"
    if not _installed():
        return "Triton is not installed"
    if not (z.is_cuda or interpreted()):
        return f"the features are on {z.device.type}"
    if z.is_cuda and torch.version.hip is None and torch.cuda.get_device_capability(z.device) < (8, 0):
        return "the device is older than compute capability 8.0"
    if z.dtype == torch.float64:
        return "the features are float64"
    if argument is not None:
        return f"the call has {argument}"
    return None


@functools.cache
def _installed() -> bool:
    return find_spec("triton") is not None


def interpreted() -> bool:
    """Return whether Triton's interpreter runs the kernels, on the CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def precision_of(tau: float | Tensor) -> Precision:
    """Return TF32, or bfloat16 if ``torch.set_float32_matmul_precision("medium")`` allows it and ``tau`` is large."""
    allowed = isinstance(tau, float) and tau >= BF16_MIN_TAU  # reading the value of a tensor may synchronise
    return "bf16" if allowed and _float32_precision() == "medium" else "tf32"


def _float32_precision() -> str:
    """Return the allowed precision of float32 products: ``"highest"``, ``"high"`` or ``"medium"``."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # torch.backends.cuda.matmul.fp32_precision alone allows TF32, and the older setting differs
        return "high"


@contextlib.contextmanager
def tf32_allowed() -> Iterator[None]:
    """Allow TF32 in float32 products, as in the Triton kernels; changes a setting of the process and restores it."""
    if _float32_precision() != "highest":
        yield
        return
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision("highest")
