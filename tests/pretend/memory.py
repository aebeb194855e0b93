"""Memory of the pretend device, and which host memory is pinned."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from tests.pretend.ledger import LEDGER
from tests.pretend.streams import LOCK, Stream, current_stream


class Memory:
    """One allocation; tensors that are views of each other share it, and it is freed with the last of them.

    Attributes:
        owner: the stream that it was allocated on, whose next work may reuse it.
        written: stream and number of the latest work that wrote it.
        used: by stream, the number of the latest work that read or wrote it.
        recorded: streams that it was recorded for.
    """

    allocated = peak = 0  # bytes, of all

    def __init__(self, inner: Tensor) -> None:
        self._inner = inner  # the data, which late copies may hold longer
        self.owner = current_stream()
        self.written: tuple[Stream, int] = (self.owner, 0)
        self.used: dict[Stream, int] = {}
        self.recorded: set[Stream] = set()
        Memory.allocated += inner.untyped_storage().nbytes()
        Memory.peak = max(Memory.peak, Memory.allocated)

    @staticmethod
    def of(inner: Tensor) -> Memory:
        """Return the memory of a tensor's data; a new one for new data."""
        storage: Any = inner.untyped_storage()
        known = getattr(storage, "memory", None)
        found = known() if known else None
        if found is None:
            found = Memory(inner)
            storage.memory = weakref.ref(found)
        return found

    def read(self, stream: Stream, number: int) -> bool:
        """Record a read by a stream; return False if the data may not be written yet."""
        self.used[stream] = number
        return stream.comes_after(*self.written)

    def write(self, stream: Stream, number: int) -> bool:
        """Record a write by a stream; return False if another stream may still use the memory."""
        in_time = [stream.comes_after(*pair) for pair in [*self.used.items(), self.written]]
        self.used[stream], self.written = number, (stream, number)
        return all(in_time)

    def __del__(self) -> None:
        if LOCK is None:  # the interpreter is ending
            return
        with LOCK:
            Memory.allocated -= self._inner.untyped_storage().nbytes()
            for stream, number in self.used.items():
                known = max(self.owner.after.get(stream, 0), stream.done)
                if stream is not self.owner and stream not in self.recorded and known < number:
                    LEDGER.race("freed while another stream uses it")
                    poison(self._inner.new_empty(0).set_(self._inner.untyped_storage()))


def poison(tensor: Tensor) -> None:
    """Fill a tensor with NaN or -1, in place of the values that a device may show before a result is complete."""
    tensor.fill_(float("nan") if tensor.is_floating_point() or tensor.is_complex() else -1)


def pin(tensor: Tensor) -> Tensor:
    """Flag host memory as pinned."""
    storage: Any = tensor.untyped_storage()
    storage.pinned = True
    return tensor


def is_pinned(tensor: Tensor) -> bool:
    return getattr(tensor.untyped_storage(), "pinned", False)


def patch_torch() -> None:
    """Replace torch's functions for pinned memory by ones that set a flag; the real ones need an allocator in C++."""

    def factory(make: Any) -> Any:
        def made(*args: Any, pin_memory: bool = False, **options: Any) -> Tensor:
            tensor = make(*args, **options)
            return pin(tensor) if pin_memory else tensor

        return made

    for name in ("empty", "zeros", "ones", "full", "empty_like", "zeros_like", "empty_strided"):
        setattr(torch, name, factory(getattr(torch, name)))

    def pin_memory(tensor: Tensor, device: Any = None) -> Tensor:
        if tensor.device.type != "cpu":
            raise RuntimeError(f"cannot pin a tensor of {tensor.device}")
        return tensor if is_pinned(tensor) else pin(tensor.clone())

    def asked(tensor: Tensor, device: Any = None) -> bool:
        return tensor.device.type == "cpu" and is_pinned(tensor)

    torch.Tensor.pin_memory = pin_memory  # type: ignore[assignment,method-assign]
    torch.Tensor.is_pinned = asked  # type: ignore[assignment,method-assign]
