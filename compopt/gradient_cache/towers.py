"""Encoders with their micro-batches: split inputs, replayed random numbers, gradients per micro-batch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from compopt import accelerator, checks
from compopt.kernel.features import working_dtype

Encode = Callable[[Any, Any], Any]
Sizes = int | Callable[[Any], Sequence[int]]
BATCH_NORMS = nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm
BOUNDARY = "set_gradient_accumulation_boundary"  # of DeepSpeed's engine
SYNC = "set_requires_gradient_sync"  # of FSDP2


class Output:
    """One output of a tower over all micro-batches: features ``(..., b, d)``, or a 0-d temperature."""

    def __init__(self, pieces: Sequence[Tensor], trained: bool) -> None:
        self.is_tau = pieces[0].dim() == 0
        self.sizes = [1 if self.is_tau else piece.shape[-2] for piece in pieces]
        whole = pieces[0] if self.is_tau else torch.cat(list(pieces), dim=-2)
        # gradients stay in full precision until a scaler has multiplied them
        self.leaf = whole.to(working_dtype(whole.dtype), copy=self.is_tau).requires_grad_(trained)
        self.gradient: Tensor | None = None

    def gradient_of(self, number: int, like: Tensor) -> Tensor:
        """Return the gradient of a micro-batch; zeros for a padding micro-batch."""
        if self.gradient is None or number >= len(self.sizes):
            return torch.zeros_like(like, dtype=self.leaf.dtype)
        if self.is_tau:  # all micro-batches have the same temperature: each gets a share
            return self.gradient / len(self.sizes)
        return self.gradient.split(self.sizes, dim=-2)[number]


class Tower:
    """An encoder with its micro-batches.

    Args:
        model: the encoder, as passed by the user.
        encode: function that calls the encoder; ``None``: call ``model`` itself.
        inputs: inputs of the whole batch.
        size: samples per micro-batch.

    Attributes:
        parts: inputs of the micro-batches.
        trained: the tower is encoded a second time, for gradients.
        wrappers: modules inside the encoder that reduce gradients.
        count: number of passes: micro-batches and padding.
        devices: accelerators that may draw random numbers.
        normalising, statistics: layers that normalise by the statistics of their inputs, and their buffers.
    """

    def __init__(self, model: Any, encode: Encode | None, inputs: Any, size: Sizes) -> None:
        self.model, self.encode = model, encode
        module = _module_of(model)
        parameters = [] if module is None else list(module.parameters())
        self.trained = torch.is_grad_enabled() and (module is None or any(p.requires_grad for p in parameters))
        self.wrappers = [] if module is None else wrappers_in(module)
        self.parts = split(inputs, size)
        self.count = len(self.parts)
        here = accelerator.available()
        found = {p.device for p in parameters if p.device.type not in ("cpu", "meta")}
        self.devices = sorted(found or ({accelerator.here(here)} if here else ()), key=str)
        self.encoded: list[Output] = []
        modules = () if module is None else module.modules()
        self.normalising = [module for module in modules if _uses_statistics(module)]
        self.statistics = [buffer for layer in self.normalising for buffer in layer.buffers()]

    def outputs(self, number: int) -> list[Tensor]:
        """Encode a micro-batch; padding micro-batches repeat the last one."""
        return outputs_of(self.model, self.encode, self.parts[min(number, len(self.parts) - 1)])

    def encode_all(self) -> list[Output]:
        """Encode all micro-batches without a graph, and store the random state of each."""
        self._states, made = [], []
        # a tower without trainable parameters makes a graph only for inputs, or prompts, that require a gradient
        frozen = torch.is_grad_enabled() and not self.trained
        for number in range(self.count):
            self._states.append(random_state(self.devices))
            pads = number >= len(self.parts)
            with torch.set_grad_enabled(frozen), kept(self.statistics if pads else ()):
                outputs = self.outputs(number)
            self.trained |= any(z.requires_grad for z in outputs)
            made.append([z.detach() for z in outputs])
        self.encoded = [Output(pieces, self.trained) for pieces in zip(*made[: len(self.parts)], strict=True)]
        return self.encoded

    def encode_again(self, number: int) -> list[tuple[Tensor, Tensor]]:
        """Encode a micro-batch with a graph; return pairs of its outputs and their gradients."""
        with replayed(self._states[number], self.devices):
            outputs = self.outputs(number)
        return [(z, output.gradient_of(number, z)) for z, output in zip(outputs, self.encoded, strict=True)]


def new_towers(model: Any, batch: Any, sizes: Any, encode: Encode | None, update_once: bool) -> list[Tower]:
    """Return the towers, one for a single model; refuse batch normalisation unless ``update_once`` is set."""
    if not isinstance(model, tuple | list):
        model, batch, sizes = [model], [batch], [sizes]
    elif not isinstance(batch, tuple | list) or len(batch) != len(model) or len(model) > 3:
        raise TypeError(f"model has {len(model)} towers, of two or three: batch must be a tuple of as many inputs")
    sizes = sizes if isinstance(sizes, tuple | list) else [sizes] * len(model)
    if len(sizes) != len(model):
        raise TypeError(f"micro_batch_size must be one size or {len(model)}, one for each tower, got {sizes!r}")
    towers = [Tower(own, encode, inputs, size) for own, inputs, size in zip(model, batch, sizes, strict=True)]
    layer = next((layer for tower in towers for layer in tower.normalising), None)
    if layer is not None and not update_once:
        raise ValueError(
            f"{type(layer).__name__} in training mode normalises by the statistics of a micro-batch, not of the batch, "
            f"and would update its running ones twice; use group or layer normalisation, model.eval(), or "
            f'batch_norm="update_once"'
        )
    return towers


def _module_of(call: Any) -> nn.Module | None:
    """Return the module that a callable is, or is a method of."""
    while isinstance(call, functools.partial):
        call = call.func
    call = getattr(call, "__self__", call)
    return call if isinstance(call, nn.Module) else None


def _uses_statistics(module: nn.Module) -> bool:
    keeps = getattr(module, "running_mean", None) is not None
    return module.training if keeps else isinstance(module, BATCH_NORMS)


def wrappers_in(module: nn.Module) -> list[Any]:
    """Return the outermost modules that reduce gradients between ranks."""
    if any(hasattr(module, name) for name in (BOUNDARY, SYNC, "no_sync")):
        return [module]
    return [wrapper for child in module.children() for wrapper in wrappers_in(child)]


# -- inputs ---------------------------------------------------------------------------------------------------------


def _map(function: Callable[[Any], Any], inputs: Any) -> Any:
    """Apply a function to every tensor and list with an entry per sample, at any depth of the inputs."""
    if isinstance(inputs, Mapping):
        return {key: _map(function, value) for key, value in inputs.items()}
    if isinstance(inputs, tuple):
        made = [_map(function, value) for value in inputs]
        return type(inputs)(*made) if hasattr(inputs, "_fields") else tuple(made)
    return function(inputs) if isinstance(inputs, list) or (isinstance(inputs, Tensor) and inputs.dim() > 0) else inputs


def lengths(inputs: Any) -> set[int]:
    """Return the set of lengths of all tensors and lists."""
    found: list[Tensor | list[Any]] = []
    _map(found.append, inputs)
    return {len(column) for column in found}


def split(inputs: Any, size: Sizes) -> list[Any]:
    """Split inputs into micro-batches."""
    found = lengths(inputs)
    if len(found) != 1:
        raise ValueError(f"inputs must have one entry per sample in every tensor and list, got lengths {found or 0}")
    (length,) = found
    if callable(size) and length > 0:
        sizes = [checks.count("micro_batch_size", one) for one in size(inputs)]
        if sum(sizes) != length:
            raise ValueError(f"micro_batch_size must return sizes that sum up to {length} samples, got {sizes}")
    else:
        most = 1 if callable(size) else checks.count("micro_batch_size", size)
        sizes = [min(most, length - start) for start in range(0, length, most)] or [0]
    ends = accumulate(sizes)
    return [_map(itemgetter(slice(end - size, end)), inputs) for size, end in zip(sizes, ends, strict=True)]


# -- outputs --------------------------------------------------------------------------------------------------------


def outputs_of(model: Any, encode: Encode | None, part: Any) -> list[Tensor]:
    """Encode a micro-batch and check the outputs."""
    if encode is not None:
        made = encode(model, part)
    elif isinstance(part, Mapping):
        made = model(**part)
    else:
        made = model(*part) if isinstance(part, tuple) else model(part)
    made = [made] if isinstance(made, Tensor) else made
    if not isinstance(made, tuple | list) or not all(isinstance(z, Tensor) for z in made):
        kinds = [type(z).__name__ for z in made] if isinstance(made, tuple | list) else type(made).__name__
        raise TypeError(f"features must be a tensor or a tuple of them, got {kinds}; give encode=")
    odd = next((z for z in made if z.dim() == 1), None)
    if odd is not None:
        raise ValueError(
            f"outputs must be features, (b, d), or a 0-d temperature, got shape {tuple(odd.shape)}; "
            f"squeeze() a temperature of shape (1,), and pass one per sample as tau="
        )
    if encode is None and any(z.dim() == 0 for z in made):
        raise ValueError("model returns a 0-d tensor; give encode=, which says what it is: (z1, z2), or (z1, z2, tau)")
    return list(made)


# -- the same random numbers and buffers in two passes ---------------------------------------------------------------


def random_state(devices: Sequence[torch.device]) -> list[Tensor]:
    """Return the states of the generators of the CPU and of devices."""
    return [torch.get_rng_state(), *(getattr(torch, device.type).get_rng_state(device) for device in devices)]


@contextmanager
def replayed(states: list[Tensor], devices: Sequence[torch.device]) -> Iterator[None]:
    """Set the generators to given states inside the context, and restore the current states afterwards."""
    kind = {"device_type": devices[0].type} if devices else {}
    with torch.random.fork_rng(devices, **kind):
        torch.set_rng_state(states[0])
        for device, state in zip(devices, states[1:], strict=True):
            getattr(torch, device.type).set_rng_state(state, device)
        yield


@contextmanager
def kept(buffers: Iterable[Tensor]) -> Iterator[None]:
    """Restore the current values of buffers on exit."""
    values = [(buffer, buffer.clone()) for buffer in buffers]
    try:
        yield
    finally:
        for buffer, value in values:
            buffer.copy_(value)
