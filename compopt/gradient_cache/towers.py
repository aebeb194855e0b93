"""Encoders with their micro-batches: outputs, replayed random numbers, gradients per micro-batch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from compopt import accelerator
from compopt.distributed.wrappers import wrappers_in
from compopt.gradient_cache.inputs import Sizes, Split, micro_batches
from compopt.kernel.features import working_dtype

Encode = Callable[[Any, Any], Any]
BATCH_NORMS = nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm


class Output:
    """One output of a tower over all micro-batches: features ``(..., b, d)``, or a 0-d temperature.

    Args:
        pieces: the output of each micro-batch, detached.
        trained: the output receives a gradient.
        samples: number of samples of each micro-batch.
        order: positions in the batch of the samples, one micro-batch after another; ``None``: those of the batch.
    """

    def __init__(
        self, pieces: Sequence[Tensor], trained: bool, samples: Sequence[int], order: Sequence[int] | None
    ) -> None:
        self.is_tau = pieces[0].dim() == 0
        self.sizes = [1 if self.is_tau else piece.shape[-2] for piece in pieces]
        whole = pieces[0] if self.is_tau else torch.cat(list(pieces), dim=-2)
        self.rows: Tensor | None = None
        if order is not None and not self.is_tau:
            self.rows = rows_in_order(order, samples, self.sizes, whole.device)
            whole = whole.index_select(-2, self.rows.argsort())
        # gradients stay in full precision until a scaler has multiplied them
        self.leaf = whole.to(working_dtype(whole.dtype), copy=self.is_tau).requires_grad_(trained)
        self.gradient: Tensor | None = None

    def gradient_of(self, number: int, like: Tensor) -> Tensor:
        """Return the gradient of a micro-batch; zeros for a padding micro-batch."""
        if self.gradient is None or number >= len(self.sizes):
            return torch.zeros_like(like, dtype=self.leaf.dtype)
        if self.is_tau:  # all micro-batches have the same temperature: each gets a share
            return self.gradient / len(self.sizes)
        gradient = self.gradient if self.rows is None else self.gradient.index_select(-2, self.rows)
        return gradient.split(self.sizes, dim=-2)[number]


def rows_in_order(order: Sequence[int], samples: Sequence[int], rows: Sequence[int], device: torch.device) -> Tensor:
    """Return the positions in the batch of the rows of all micro-batches, with the same number of rows per sample."""
    each = sum(rows) // max(sum(samples), 1)
    if list(rows) != [each * count for count in samples]:
        raise ValueError(
            f"micro-batches of {list(samples)} samples have {list(rows)} features; TokenBudget sorts samples, which "
            f"requires the same number of features for each: give a number of samples instead"
        )
    return (torch.tensor(order, device=device)[:, None] * each + torch.arange(each, device=device)).flatten()


class Tower:
    """An encoder with its micro-batches.

    Args:
        model: the encoder, as passed by the user.
        encode: function that calls the encoder; ``None``: call ``model`` itself.
        inputs: inputs of the whole batch.
        size: samples per micro-batch.
        split: function that divides the inputs by sample, if they have another form than columns.

    Attributes:
        parts: inputs of the micro-batches.
        samples, order: number of samples of each; positions in the batch of all, if these are sorted.
        trained: the tower is encoded a second time, for gradients.
        wrappers: modules inside the encoder that reduce gradients.
        count: number of passes: micro-batches and padding.
        devices: accelerators that may draw random numbers.
        normalising, statistics: layers that normalise by the statistics of their inputs, and their buffers.
    """

    def __init__(self, model: Any, encode: Encode | None, inputs: Any, size: Sizes, split: Split | None) -> None:
        self.model, self.encode = model, encode
        module = _module_of(model)
        parameters = [] if module is None else list(module.parameters())
        self.trained = torch.is_grad_enabled() and (module is None or any(p.requires_grad for p in parameters))
        self.wrappers = [] if module is None else wrappers_in(module)
        self.parts, self.samples, self.order = micro_batches(inputs, size, split)
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
            with torch.set_grad_enabled(frozen), restored_buffers(self.statistics if pads else ()):
                outputs = self.outputs(number)
            self.trained |= any(z.requires_grad for z in outputs)
            made.append([z.detach() for z in outputs])
        pieces = zip(*made[: len(self.parts)], strict=True)
        self.encoded = [Output(piece, self.trained, self.samples, self.order) for piece in pieces]
        return self.encoded

    def encode_again(self, number: int) -> list[tuple[Tensor, Tensor]]:
        """Encode a micro-batch with a graph; return pairs of its outputs and their gradients."""
        with replayed(self._states[number], self.devices):
            outputs = self.outputs(number)
        return [(z, output.gradient_of(number, z)) for z, output in zip(outputs, self.encoded, strict=True)]


def new_towers(
    model: Any, batch: Any, sizes: Any, splits: Any, encode: Encode | None, update_once: bool
) -> list[Tower]:
    """Return the towers, one for a single model; refuse batch normalisation unless ``update_once`` is set."""
    if not isinstance(model, tuple | list):
        model, batch, sizes, splits = [model], [batch], [sizes], [splits]
    elif not isinstance(batch, tuple | list) or len(batch) != len(model) or len(model) > 3:
        raise TypeError(f"model has {len(model)} towers, of two or three: batch must be a tuple of as many inputs")
    sizes, splits = (x if isinstance(x, tuple | list) else [x] * len(model) for x in (sizes, splits))
    for name, kind, given in (("micro_batch_size", "size", sizes), ("split", "function", splits)):
        if len(given) != len(model):
            raise TypeError(f"{name} must be one {kind} or {len(model)}, one for each tower, got {given!r}")
    columns = zip(model, batch, sizes, splits, strict=True)
    towers = [Tower(own, encode, inputs, size, split) for own, inputs, size, split in columns]
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
def restored_buffers(buffers: Iterable[Tensor]) -> Iterator[None]:
    """Restore the current values of buffers on exit."""
    values = [(buffer, buffer.clone()) for buffer in buffers]
    try:
        yield
    finally:
        for buffer, value in values:
            buffer.copy_(value)
