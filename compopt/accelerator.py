"""Streams, events, pinned memory and number formats of a device beside the CPU.

Three kinds of devices exist here.

- The CPU: nothing is ever under way.
- Devices with streams: CUDA and ROCm (``torch.cuda``), XPU, and any other whose module under ``torch`` has them, also
  that of a backend outside torch. Copies go through pinned memory, and nothing waits.
- Devices without streams, such as MPS: copies are ordinary ones. A copy to the host waits.
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
    """Return the module of a device with streams; ``None`` for the CPU and for devices without any."""
    if device.type in ("cpu", "meta"):
        return None
    module = getattr(torch, device.type, None)
    return module if all(hasattr(module, name) for name in _NEEDED) else None


def has_streams(device: torch.device) -> bool:
    """Return True if copies to and from a device can run beside its computations."""
    return _streams(device) is not None


def available() -> torch.device | None:
    """Return the kind of accelerator that this process can use, if any."""
    accelerator = getattr(torch, "accelerator", None)
    if accelerator is None:  # before torch 2.6
        return torch.device("cuda") if torch.cuda.is_available() else None
    return accelerator.current_accelerator() if accelerator.is_available() else None


def pins() -> bool:
    """Return True if this process pins host memory that a device copies from and to."""
    device = available()
    return device is not None and has_streams(device)


def here(device: torch.device) -> torch.device:
    """Give a device its number: another thread may have another current device."""
    module = _streams(device)
    if module is None or device.index is not None:
        return device
    return torch.device(device.type, module.current_device())


# -- streams and events ---------------------------------------------------------------------------------------------


def new_stream(device: torch.device) -> Any:
    """Make a stream beside the current one; ``None`` where there are no streams."""
    module = _streams(device)
    return None if module is None else module.Stream(device)


def current_stream(device: torch.device) -> Any:
    """Return the stream to which this thread gives a device's work; ``None`` where there are no streams."""
    module = _streams(device)
    return None if module is None else module.current_stream(device)


@contextlib.contextmanager
def current(device: torch.device, stream: Any = None) -> Iterator[None]:
    """Make a device and one of its streams this thread's current ones."""
    module = _streams(device)
    if module is None:
        yield
        return
    with module.device(device), contextlib.nullcontext() if stream is None else module.stream(stream):
        yield


def wait_stream(stream: Any, device: torch.device) -> None:
    """Let a stream wait for what the current one has been given so far."""
    stream.wait_stream(_streams(device).current_stream(device))


def event(device: torch.device) -> Any:
    """Record what the current stream has been given so far, to wait for or to query; ``None`` without streams."""
    module = _streams(device)
    if module is None:
        return None
    recorded = module.Event()
    recorded.record(module.current_stream(device))
    return recorded


def wait_event(recorded: Any, device: torch.device, tensors: Sequence[Tensor] = ()) -> None:
    """Let the current stream wait for an event, and use tensors that another stream made."""
    if recorded is None:
        return
    stream = _streams(device).current_stream(device)
    stream.wait_event(recorded)
    for tensor in tensors:
        tensor.record_stream(stream)


def synchronize(device: torch.device) -> None:
    """Wait for everything that a device was given."""
    if device.type not in ("cpu", "meta"):
        module = getattr(torch, device.type)
        module.synchronize(device) if has_streams(device) else module.synchronize()


# -- copies ---------------------------------------------------------------------------------------------------------


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Move a tensor to a device; one on the host goes through pinned memory, without waiting for it."""
    if tensor.device.type == "cpu" and has_streams(device):
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def to_host(tensor: Tensor) -> Tensor:
    """Start copying a tensor to the host on the current stream; it is there after an :func:`event` of that stream.

    From a device without streams it is there at once.
    """
    if not has_streams(tensor.device):
        return tensor.cpu()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


# -- number formats -------------------------------------------------------------------------------------------------


def supports(device: torch.device, dtype: torch.dtype) -> bool:
    """Return True if a device has a number format. MPS and some XPUs have neither float64 nor complex128."""
    return device.type in ("cpu", "cuda", "meta") or _computes(device, dtype)


@functools.cache  # asked of a device once: a format that it lacks stays lacking
def _computes(device: torch.device, dtype: torch.dtype) -> bool:
    try:
        torch.zeros(1, dtype=dtype, device=device).add_(1)
    except (TypeError, RuntimeError):  # what MPS and XPU raise
        return False
    return True


def widest(device: torch.device) -> torch.dtype:
    """Return the most exact floating-point dtype of a device."""
    return torch.float64 if supports(device, torch.float64) else torch.float32


def state_to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Move state to another device, in single precision where that has no double."""
    if tensor.device == device:
        return tensor
    if tensor.dtype == torch.float64:
        return tensor.to(device, widest(device))
    return tensor.to(device)
