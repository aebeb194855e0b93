"""Streams, events, pinned memory and dtypes of accelerators.

The library distinguishes three kinds of devices.

- The CPU: all operations are synchronous.
- Devices with streams: CUDA and ROCm (``torch.cuda``), XPU, and any other device with a module under ``torch`` that
  provides streams, including backends outside torch. Copies go through pinned memory and are asynchronous.
- Devices without streams, such as MPS: ordinary copies. A copy to the host is synchronous.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

_NEEDED = ("Event", "Stream", "current_device", "current_stream", "device", "stream", "synchronize")


def _streams(device: torch.device) -> Any:
    """Return the ``torch`` module of a device with streams; ``None`` for the CPU and for devices without streams."""
    if device.type in ("cpu", "meta"):
        return None
    module = getattr(torch, device.type, None)
    return module if all(hasattr(module, name) for name in _NEEDED) else None


def has_streams(device: torch.device) -> bool:
    """Return True if copies to and from a device can overlap its computations."""
    return _streams(device) is not None


def available() -> torch.device | None:
    """Return the type of accelerator that this process can use, or ``None``."""
    accelerator = getattr(torch, "accelerator", None)
    if accelerator is None:  # before torch 2.6
        return torch.device("cuda") if torch.cuda.is_available() else None
    return accelerator.current_accelerator() if accelerator.is_available() else None


def pins() -> bool:
    """Return True if this process pins host memory for copies from and to its accelerator."""
    device = available()
    return device is not None and has_streams(device)


def here(device: torch.device) -> torch.device:
    """Return the device with an explicit index, since another thread may have another current device."""
    module = _streams(device)
    if module is None or device.index is not None:
        return device
    return torch.device(device.type, module.current_device())


# -- streams and events ---------------------------------------------------------------------------------------------


def new_stream(device: torch.device) -> Any:
    """Create a stream on a device; ``None`` for a device without streams."""
    module = _streams(device)
    return None if module is None else module.Stream(device)


def current_stream(device: torch.device) -> Any:
    """Return the current stream of this thread on a device; ``None`` for a device without streams."""
    module = _streams(device)
    return None if module is None else module.current_stream(device)


@contextlib.contextmanager
def current(device: torch.device, stream: Any = None) -> Iterator[None]:
    """Make a device and one of its streams current in this thread."""
    module = _streams(device)
    if module is None:
        yield
        return
    with module.device(device), contextlib.nullcontext() if stream is None else module.stream(stream):
        yield


def wait_stream(stream: Any, device: torch.device) -> None:
    """Make a stream wait for all work enqueued so far on the current stream."""
    stream.wait_stream(_streams(device).current_stream(device))


def event(device: torch.device) -> Any:
    """Record an event on the current stream, to wait for or to query; ``None`` for a device without streams."""
    module = _streams(device)
    if module is None:
        return None
    recorded = module.Event()
    recorded.record(module.current_stream(device))
    return recorded


def wait_event(recorded: Any, device: torch.device, tensors: Sequence[Tensor] = ()) -> None:
    """Make the current stream wait for an event, and mark tensors of another stream as used on the current one."""
    if recorded is None:
        return
    stream = _streams(device).current_stream(device)
    stream.wait_event(recorded)
    for tensor in tensors:
        tensor.record_stream(stream)


def synchronize(device: torch.device) -> None:
    """Wait until a device has finished all enqueued work."""
    if device.type not in ("cpu", "meta"):
        module = getattr(torch, device.type)
        module.synchronize(device) if has_streams(device) else module.synchronize()


# -- copies ---------------------------------------------------------------------------------------------------------


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Move a tensor to a device; from the host to a device with streams through pinned memory, asynchronously."""
    if tensor.device == device:
        return tensor
    if tensor.device.type == "cpu" and has_streams(device):
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def to_host(tensor: Tensor) -> Tensor:
    """Start copying a tensor to the host on the current stream; an :func:`event` of that stream marks its completion.

    A copy from a device without streams is synchronous.
    """
    if not has_streams(tensor.device):
        return tensor.cpu()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


# -- dtypes ---------------------------------------------------------------------------------------------------------


def supports(device: torch.device, dtype: torch.dtype) -> bool:
    """Return True if a device supports a dtype. MPS and some XPUs support neither float64 nor complex128."""
    return device.type in ("cpu", "cuda", "meta") or _computes(device, dtype)


@functools.cache  # the support of a dtype by a device does not change
def _computes(device: torch.device, dtype: torch.dtype) -> bool:
    try:
        torch.zeros(1, dtype=dtype, device=device).add_(1)
    except (TypeError, RuntimeError):  # what MPS and XPU raise
        return False
    return True


def widest(device: torch.device) -> torch.dtype:
    """Return the widest floating-point dtype that a device supports."""
    return torch.float64 if supports(device, torch.float64) else torch.float32


def state_to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Move state to another device; float64 becomes float32 if the device does not support float64."""
    if tensor.device == device:
        return tensor
    if tensor.dtype == torch.float64:
        return tensor.to(device, widest(device))
    return tensor.to(device)
