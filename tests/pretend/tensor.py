"""Tensors of the pretend device, and the execution of operations."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._mode_utils import no_dispatch

from tests.pretend.ledger import LEDGER
from tests.pretend.memory import Memory, is_pinned, pin, poison
from tests.pretend.streams import LOCK, Stream, current_stream

aten = torch.ops.aten


def tensors_in(values: Any) -> list[Tensor]:
    """Return the tensors among nested arguments; torch's pytrees take several times as long."""
    if isinstance(values, Tensor):
        return [values]
    if isinstance(values, dict):
        values = values.values()
    elif not isinstance(values, (tuple, list)):
        return []
    return [tensor for value in values for tensor in tensors_in(value)]


def mapped(values: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return the same arguments with changed tensors."""
    if isinstance(values, Tensor):
        return change(values)
    if isinstance(values, dict):
        return {key: mapped(value, change) for key, value in values.items()}
    if isinstance(values, (tuple, list)):
        return type(values)(mapped(value, change) for value in values)
    return values


# Operations whose result, or whose size, the host waits for on a real device.
WAITS = {
    "_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "_unique2", "unique_dim", "bincount",
    "unique_consecutive", "multinomial", "linalg_eigh", "_linalg_eigh", "_linalg_svd", "linalg_svd",
    "_linalg_check_errors",
}  # fmt: skip
lacking: set[torch.dtype] = set()


def device() -> torch.device:
    return torch.device(torch._C._get_privateuse1_backend_name(), 0)


class PretendTensor(torch.Tensor):
    """A tensor on the pretend device, whose data are on the CPU."""

    inner: Tensor
    memory: Memory

    @staticmethod
    def __new__(cls, inner: Tensor) -> PretendTensor:
        return torch.Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=device(),
        )

    def __init__(self, inner: Tensor) -> None:
        if inner.dtype in lacking:
            raise TypeError(f"a tensor of {inner.dtype} cannot be on {device()}, which has no such numbers")
        self.inner, self.memory = inner, Memory.of(inner)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"PretendTensor({tuple(self.shape)}, {self.dtype})"

    def tolist(self) -> Any:
        return self.cpu().tolist()  # torch has none for subclasses

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        memo[id(self)] = new = self.detach().clone().requires_grad_(self.requires_grad)
        return new

    def record_stream(self, stream: Stream) -> None:
        self.memory.recorded.add(stream)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with LOCK:
            return run(func, args, kwargs or {})


def run(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run one operation."""
    name = func._schema.name.removeprefix("aten::")
    if name == "copy_":
        blocking = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
        return copy(args[0], args[1], blocking)
    target = kwargs.get("device")
    if name == "_to_copy" and target is not None and torch.device(target).type == "cpu":
        return to_host(args[0], kwargs)
    return compute(func, name, args, kwargs)


# -- copies ---------------------------------------------------------------------------------------------------------


def copy(target: Tensor, source: Tensor, blocking: bool) -> Tensor:
    """Run ``target.copy_(source)``."""
    if isinstance(target, PretendTensor) and isinstance(source, PretendTensor):
        return compute(aten.copy_.default, "copy_", (target, source), {})
    there, host = (target, source) if isinstance(target, PretendTensor) else (source, target)
    assert isinstance(there, PretendTensor)
    pinned, way = is_pinned(host), "to device" if there is target else "to host"
    LEDGER.transfer(pinned)
    stream = current_stream()
    number = stream.launch()
    in_time = there.memory.write(stream, number) if there is target else there.memory.read(stream, number)
    if not in_time:
        LEDGER.race(f"copied {way} too early")
    inner = [x.inner if isinstance(x, PretendTensor) else x for x in (target, source)]
    if way == "to device" and not blocking and not pinned:  # staged: the host may continue and change its memory
        inner[1] = source.clone()
    elif blocking or not pinned:
        LEDGER.wait(f"a blocking copy {way}" if blocking else f"a copy {way} with memory that is not pinned")
        stream.record_event().pass_by()
        inner[0].copy_(inner[1]) if in_time else poison(inner[0])
        return target
    poison(inner[0])
    if in_time:
        stream.later(functools.partial(inner[0].copy_, inner[1]))
    return target


def to_host(source: PretendTensor, kwargs: Mapping[str, Any]) -> Tensor:
    """Run ``source.to("cpu")``; with ``non_blocking=True`` torch uses pinned memory."""
    host = torch.empty_like(source.inner, dtype=kwargs.get("dtype"), device="cpu")
    waits = not kwargs.get("non_blocking", False)
    return copy(host if waits else pin(host), source, waits)


# -- everything else ------------------------------------------------------------------------------------------------


@functools.cache
def kind(func: Any) -> tuple[bool, frozenset[str]]:
    """Return whether an operation is a view, and which arguments it writes."""
    schema = func._schema
    written = frozenset(a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write)
    return not written and any(r.alias_info is not None for r in schema.returns), written


def compute(func: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run an operation on the data, as the current stream's next work."""
    check_devices(name, args, kwargs)
    view, written = kind(func)
    target = kwargs.get("device")
    stays = target is None or torch.device(target).type != "cpu"
    inner_kwargs = {**unwrapped(kwargs), **({} if target is None else {"device": "cpu"})}
    tensors = [x for x in tensors_in((args, kwargs)) if isinstance(x, PretendTensor)]
    in_time = view or use(func, args, kwargs, tensors, written)
    if not view:
        LEDGER.operation(name)
        note_wait(func, name, args, kwargs)
    result = func(*unwrapped(args), **inner_kwargs)
    known = {id(x.inner): x for x in tensors}
    if torch.Tag.inplace_view in func.tags:  # such as squeeze_: the wrapper has its own sizes
        with no_dispatch():
            func(*args, **kwargs)
    for x in tensors:
        if x.inner.shape != x.shape:
            raise NotImplementedError(f"{func} gave a tensor of {tuple(x.shape)} the shape {tuple(x.inner.shape)}")
    if not stays or not tensors_in(result):
        return result
    result = mapped(result, lambda x: known[id(x)] if id(x) in known else PretendTensor(x))
    if not view:
        mark(result, in_time)
    return result


def use(func: Any, args: Any, kwargs: Any, tensors: Sequence[PretendTensor], written: frozenset[str]) -> bool:
    """Record what the current stream's next work reads and writes; return False if some of it is not ready yet."""
    stream = current_stream()
    number, in_time = stream.launch(), True
    names = [argument.name for argument in func._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    targets = [x for name in written for x in tensors_in(given.get(name)) if isinstance(x, PretendTensor)]
    for x in tensors:
        if not x.memory.read(stream, number):
            in_time = False
            LEDGER.race(f"{func._schema.name} reads too early")
    for x in targets:
        if not x.memory.write(stream, number):
            in_time = False
            LEDGER.race(f"{func._schema.name} overwrites what is in use")
    return in_time


def mark(result: Any, in_time: bool) -> None:
    """Mark new results as written by the current stream."""
    stream = current_stream()
    for x in tensors_in(result):
        if isinstance(x, PretendTensor):
            x.memory.written = stream, stream.given
            x.memory.used[stream] = stream.given
            if not in_time:
                poison(x.inner)


def unwrapped(values: Any) -> Any:
    return mapped(values, lambda x: x.inner if isinstance(x, PretendTensor) else x)


def check_devices(name: str, args: Any, kwargs: Any) -> None:
    """Reject tensors on the host, except single numbers, and indices, which torch copies and waits for.

    Single numbers are arguments of a kernel, except in ``where``, which copies them too.
    """
    for x in tensors_in((args, kwargs)):
        if isinstance(x, PretendTensor):
            continue
        if name == "where" and not x.dim():
            LEDGER.transfer(False)
            LEDGER.wait("a number on the host")
        if x.dim():
            if not name.startswith(("index", "_index_put")):
                raise RuntimeError(f"{name}: expected all tensors to be on {device()}, got one on {x.device}")
            LEDGER.transfer(False)
            LEDGER.wait("an index on the host")


def note_wait(func: Any, name: str, args: Any, kwargs: Any) -> None:
    """Record a wait for operations that a real device makes the host wait for."""
    masks = [x for x in tensors_in(args[1:2]) if isinstance(x, Tensor) and x.dtype in (torch.bool, torch.uint8)]
    by_mask = name == "index" and bool(masks)
    by_mask |= name in ("index_put", "index_put_", "_index_put_impl_") and bool(masks) and args[2].numel() > 1
    repeats = (
        name == "repeat_interleave"
        and kwargs.get("output_size") is None
        and func is not aten.repeat_interleave.self_int
    )
    checks = name == "segment_reduce" and not kwargs.get("unsafe", False)
    if name in WAITS or by_mask or repeats or checks:
        LEDGER.wait(name)
        current_stream().record_event().pass_by()
