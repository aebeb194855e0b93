"""Encoders with their micro-batches."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from compopt import accelerator
from compopt.distributed.ranks import Ranks
from compopt.gradient_cache.inputs import Sizes, split
from compopt.gradient_cache.replay import kept, random_state, replayed
from compopt.gradient_cache.wrappers import wrappers_in
from compopt.kernel.features import working_dtype

Encode = Callable[[Any, Any], Any]
BatchNorm = Literal["refuse", "update_once"]
BATCH_NORMS = nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm


class Column:
    """One output of a tower over all micro-batches: features ``(..., b, d)``, or a 0-d temperature."""

    def __init__(self, pieces: list[Tensor], trained: bool) -> None:
        self.is_tau = pieces[0].dim() == 0
        self.sizes = [1 if self.is_tau else piece.shape[-2] for piece in pieces]
        whole = pieces[0] if self.is_tau else torch.cat(pieces, dim=-2)
        # gradients stay in full precision until a scaler has multiplied them
        self.leaf = whole.to(working_dtype(whole.dtype), copy=self.is_tau).requires_grad_(trained)
        self.gradient: Tensor | None = None

    def gradient_of(self, number: int, like: Tensor) -> Tensor:
        """Return the gradient of a micro-batch; zeros for one that pads this rank to the largest number."""
        if self.gradient is None or number >= len(self.sizes):
            return torch.zeros_like(like, dtype=self.leaf.dtype)
        if self.is_tau:  # all micro-batches have the same temperature: each gets a share
            return self.gradient / len(self.sizes)
        return self.gradient.split(self.sizes, dim=-2)[number]


@dataclass
class Tower:
    """An encoder with its micro-batches.

    Attributes:
        model: the encoder, as it was given.
        encode: how it is called, if that was given.
        inputs: those of the whole batch.
        size: samples per micro-batch.
        module: what ``model`` is, or is a method of, if that is known.
        parts: inputs of the micro-batches.
        trained: it is encoded again, for gradients.
        wrappers: the modules in it that reduce gradients.
        count: number of its micro-batches, with those that only keep other ranks company.
        devices: accelerators that may draw random numbers.
    """

    model: Any
    encode: Encode | None
    inputs: Any
    size: Sizes

    def __post_init__(self) -> None:
        self.module = _module_of(self.model)
        parameters = self.parameters()
        self.trained = torch.is_grad_enabled() and (self.module is None or any(p.requires_grad for p in parameters))
        self.wrappers = wrappers_in(self.module) if self.module is not None else []
        self.split()
        here = accelerator.available()
        found = {p.device for p in parameters if p.device.type not in ("cpu", "meta")}
        self.devices = sorted(found or ({accelerator.here(here)} if here else ()), key=str)
        self.columns: list[Column] = []
        self.statistics: list[Tensor] = []

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters of the module, if that is known."""
        return [] if self.module is None else list(self.module.parameters())

    def split(self) -> None:
        """Cut the inputs into micro-batches."""
        self.parts = split(self.inputs, self.size)
        self.count = len(self.parts)

    def call(self, part: Any) -> list[Tensor]:
        """Return the outputs of a micro-batch."""
        return outputs_of(self.model, self.encode, part)

    def _part(self, number: int) -> Any:
        return self.parts[min(number, len(self.parts) - 1)]

    def encode_all(self) -> list[Column]:
        """Encode all micro-batches without a graph, and note the random state of each."""
        self._states, made = [], []
        # what has no trainable parameter makes no graph, unless it uses a prompt, or inputs, that learn
        frozen = torch.is_grad_enabled() and not self.trained
        for number in range(self.count):
            self._states.append(random_state(self.devices))
            more = number >= len(self.parts)  # pads this rank to the largest number of micro-batches
            with torch.set_grad_enabled(frozen), kept(self.statistics if more else ()):
                outputs = self.call(self._part(number))
            self.trained |= any(z.requires_grad for z in outputs)
            made.append([z.detach() for z in outputs])
        pieces = zip(*made[: len(self.parts)], strict=True)
        self.columns = [Column(list(column), self.trained) for column in pieces]
        return self.columns

    def encode_again(self, number: int) -> list[tuple[Tensor, Tensor]]:
        """Encode a micro-batch with a graph; return pairs of its outputs and their gradients."""
        with replayed(self._states[number], self.devices):
            outputs = self.call(self._part(number))
        return [(z, column.gradient_of(number, z)) for z, column in zip(outputs, self.columns, strict=True)]


def new_towers(model: Any, batch: Any, sizes: Any, encode: Encode | None) -> list[Tower]:
    """Return the towers, one for a single model."""
    if not isinstance(model, (tuple, list)):
        model, batch, sizes = [model], [batch], [sizes]
    elif not isinstance(batch, (tuple, list)) or len(batch) != len(model) or len(model) > 3:
        raise TypeError(f"model has {len(model)} towers, of two or three: batch must be a tuple of as many inputs")
    sizes = sizes if isinstance(sizes, (tuple, list)) else [sizes] * len(model)
    if len(sizes) != len(model):
        raise TypeError(f"micro_batch_size must be one size or {len(model)}, one for each tower, got {sizes!r}")
    return [Tower(own, encode, inputs, size) for own, inputs, size in zip(model, batch, sizes, strict=True)]


def _module_of(call: Any) -> nn.Module | None:
    """Return the module that a callable is, or is a method of."""
    while isinstance(call, functools.partial):
        call = call.func
    call = getattr(call, "__self__", call)
    return call if isinstance(call, nn.Module) else None


def outputs_of(model: Any, encode: Encode | None, part: Any) -> list[Tensor]:
    """Encode a micro-batch and check the outputs."""
    made = _apply(model, part) if encode is None else encode(model, part)
    made = [made] if isinstance(made, Tensor) else made
    if not isinstance(made, (tuple, list)) or not all(isinstance(z, Tensor) for z in made):
        kinds = [type(z).__name__ for z in made] if isinstance(made, (tuple, list)) else type(made).__name__
        raise TypeError(f"features must be a tensor or a tuple of them, got {kinds}; give encode=")
    odd = next((z for z in made if z.dim() == 1), None)
    if odd is not None:
        raise ValueError(
            f"outputs must be features, (b, d) or (V, b, d), or a 0-d temperature, got shape {tuple(odd.shape)}; "
            f"squeeze() a temperature of shape (1,), and pass one per sample as tau="
        )
    if encode is None and any(z.dim() == 0 for z in made):
        raise ValueError("model returns a 0-d tensor; give encode=, which says what it is: (z1, z2), or (z1, z2, tau)")
    return list(made)


def _apply(model: Any, part: Any) -> Any:
    if isinstance(part, Mapping):
        return model(**part)
    return model(*part) if isinstance(part, tuple) else model(part)


def running_statistics(towers: Iterable[Tower], batch_norm: BatchNorm) -> list[Tensor]:
    """Return the buffers of layers that normalise by the statistics of their inputs and keep running ones."""
    modules = [module for tower in towers if tower.module is not None for module in tower.module.modules()]
    layers = [m for m in modules if (m.training and _runs(m)) or (isinstance(m, BATCH_NORMS) and not _runs(m))]
    if layers and batch_norm == "refuse":
        raise ValueError(
            f"{type(layers[0]).__name__} in training mode normalises by the statistics of a micro-batch, not of the "
            f"batch, and would update its running ones twice; use group or layer normalisation, model.eval(), or "
            f'batch_norm="update_once"'
        )
    for tower in towers:
        own = set(tower.module.modules()) if tower.module is not None else set()
        tower.statistics = [buffer for layer in layers if layer in own for buffer in layer.buffers()]
    return [buffer for layer in layers for buffer in layer.buffers()]


def _runs(module: nn.Module) -> bool:
    return getattr(module, "running_mean", None) is not None


def pad(ranks: Ranks, towers: list[Tower]) -> None:
    """Let every rank encode as often as the one with the most micro-batches."""
    if ranks.size > 1 and any(tower.wrappers for tower in towers):
        everyone = ranks.gather_objects([tower.count for tower in towers])
        for tower, counts in zip(towers, zip(*everyone, strict=True), strict=True):
            tower.count = max(counts)
