"""Register the pretend device with torch: the kernels of factories, the module ``torch.pretend``, autocast."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils import backend_registration

from compopt.checks import values
from tests.pretend import memory, streams, tensor
from tests.pretend.ledger import LEDGER

NAME = "pretend"
# Factories that torch implements by an empty tensor and a kernel that resizes it, which a wrapper cannot follow.
RESIZING = (
    "arange", "arange.start", "arange.start_step", "eye", "eye.m", "linspace", "randperm", "randperm.generator",
    "tril_indices", "triu_indices",
)  # fmt: skip
_kept: list[Any] = []  # registrations last as long as these objects


class Module:
    """``torch.pretend`` of a device like MPS: neither streams nor pinned memory."""

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def set_device(self, device: Any) -> None:
        pass

    def manual_seed(self, seed: int) -> None:
        pass

    def manual_seed_all(self, seed: int) -> None:
        pass

    def get_rng_state(self, device: Any = None) -> Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: Tensor, device: Any = None) -> None:
        pass

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]

    def synchronize(self, device: Any = None) -> None:
        LEDGER.wait("synchronize")
        with streams.LOCK:
            for stream in list(streams.STREAMS):
                stream.record_event().pass_by()

    def empty_cache(self) -> None:
        pass

    def memory_allocated(self, device: Any = None) -> int:
        return memory.Memory.allocated

    def max_memory_allocated(self, device: Any = None) -> int:
        return memory.Memory.peak

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        memory.Memory.peak = memory.Memory.allocated


class ModuleWithStreams(Module):
    """``torch.pretend`` of a device like CUDA."""

    Stream, Event = streams.Stream, streams.Event
    stream, current_stream = staticmethod(streams.stream), staticmethod(streams.current_stream)

    def default_stream(self, device: Any = None) -> streams.Stream:
        return streams.DEFAULT

    @contextlib.contextmanager
    def device(self, device: Any) -> Iterator[None]:
        del device
        yield


def install(like: str = "cuda") -> torch.device:
    """Make the pretend device this process's accelerator; a second call does nothing."""
    if _kept:
        return tensor.device()
    module = Module() if like == "mps" else ModuleWithStreams()
    backend_registration._setup_privateuseone_for_python_backend(NAME, module)
    if like == "mps":
        tensor.lacking.update({torch.float64, torch.complex128})
    else:
        memory.patch_torch()
    _register_factories()
    _register_autocast()
    torch.__future__.set_swap_module_params_on_conversion(True)  # module.to(): tensors of another class
    _accept_in_checkpoints()
    return tensor.device()


def _accept_in_checkpoints() -> None:
    """Let checkpoints accept the wrapper tensors; tensors of a real device are plain."""
    dense = values.dense

    def accepting(what: str, value: Any, like: Any = None) -> None:
        dense(what, value, value if isinstance(value, tensor.PretendTensor) else like)

    values.dense = accepting


def _register_factories() -> None:
    """Register kernels that create tensors, on which all factories are built. Unlike a mode, they serve any thread."""
    library = torch.library.Library("aten", "IMPL")
    _kept.append(library)

    def empty(size: Any, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None,
              memory_format: Any = None) -> Tensor:  # fmt: skip
        dtype = dtype or torch.get_default_dtype()
        with streams.LOCK:
            return tensor.PretendTensor(torch.empty(size, dtype=dtype, device="cpu", memory_format=memory_format))

    def empty_strided(size: Any, stride: Any, dtype: Any = None, layout: Any = None, device: Any = None,
                      pin_memory: Any = None) -> Tensor:  # fmt: skip
        dtype = dtype or torch.get_default_dtype()
        with streams.LOCK:
            return tensor.PretendTensor(torch.empty_strided(size, stride, dtype=dtype, device="cpu"))

    def copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
        with streams.LOCK:
            return tensor.copy(target, source, not non_blocking)

    def made(operation: Any) -> Any:
        def make(*args: Any, **kwargs: Any) -> Tensor:
            LEDGER.operation(operation._schema.name.removeprefix("aten::"))
            with streams.LOCK:
                return tensor.PretendTensor(operation(*args, **{**kwargs, "device": "cpu"}))

        return make

    for name, kernel in (("empty.memory_format", empty), ("empty_strided", empty_strided), ("_copy_from", copy_from)):
        library.impl(name, kernel, "PrivateUse1")
    for name in RESIZING:
        packet, _, overload = name.partition(".")
        library.impl(name, made(getattr(getattr(torch.ops.aten, packet), overload or "default")), "PrivateUse1")


def _register_autocast() -> None:
    """Register autocast: products run in half precision, all other operations unchanged."""
    everything = torch.library.Library("_", "IMPL")
    everything.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    products = torch.library.Library("aten", "IMPL")
    _kept.extend([everything, products])

    def lower(x: Any) -> Any:
        wanted = isinstance(x, Tensor) and x.is_floating_point() and x.device.type == NAME
        return x.to(torch.get_autocast_dtype(NAME)) if wanted else x

    def cast(operation: Any) -> Any:
        def run(*args: Any) -> Any:
            with torch.autocast(NAME, enabled=False):
                return operation(*map(lower, args))

        return run

    for name in ("mm", "bmm", "matmul", "linear", "addmm"):
        products.impl(name, cast(getattr(torch.ops.aten, name).default), "AutocastPrivateUse1")
