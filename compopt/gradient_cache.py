"""Gradient cache: the gradients of a large batch in the memory of a micro-batch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from compopt import accelerator, checks
from compopt.checks.context import outside_of_graphs
from compopt.contrastive import ContrastiveEstimator
from compopt.distributed.collectives import doing
from compopt.kernel.features import with_gradients, working_dtype
from compopt.pairs import PairPolicy

Encode = Callable[[Any, Any], Any]
Sizes = int | Callable[[Any], Sequence[int]]
BatchNorm = Literal["refuse", "update_once"]
BATCH_NORMS = nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm


@outside_of_graphs
def gradient_cache(
    est: ContrastiveEstimator,
    model: Any,
    batch: Any,
    index: Tensor | None = None,
    index2: Tensor | None = None,
    *,
    micro_batch_size: Sizes | Sequence[Sizes],
    encode: Encode | None = None,
    backward: Callable[[Tensor], Any] | None = None,
    reduce: bool = True,
    batch_norm: BatchNorm = "refuse",
    group: Tensor | None = None,
    tau: Tensor | float | None = None,
    labels: Tensor | None = None,
    extra: Tensor | None = None,
    extra_index: Tensor | None = None,
    anchors: int | None = None,
    guide: Sequence[Tensor] | None = None,
    within: Tensor | tuple[Tensor, Tensor] | None = None,
    teacher: Tensor | Sequence[Tensor] | None = None,
    prior: Tensor | None = None,
    pairs: PairPolicy | None = None,
) -> Tensor:
    r"""Compute the gradients of ``est(*model(batch), index)`` in micro-batches; every sample is a negative of all.

    .. math::
        \frac{\partial L}{\partial \theta} = \sum_{\text{micro-batches } m}
        \frac{\partial L}{\partial z_m} \frac{\partial z_m}{\partial \theta}

    The batch is encoded in micro-batches without a graph; the estimator is called once, on all features, and gives
    :math:`\partial L / \partial z`; each micro-batch is encoded again, with a graph, and back-propagated. The memory is
    that of one micro-batch and of the features; the time is that of one more forward pass. Gradients are those of
    ``backward(est(*model(batch), index))`` in the same framework, and lie where its step expects them, those of
    :meth:`~compopt.Estimator.parameters` too. Call the framework's step afterwards.

    Both passes draw the same random numbers, so that dropout drops the same; afterwards the generators are where the
    first pass left them. Training mode, autocast, activation checkpointing and compilation of the model are left
    as they are. Generators of the model's own, ``random`` and ``numpy`` are not replayed. A forward pass must not
    change its inputs; buffers other than running statistics that it changes are changed twice.

    *Frameworks* are told from the modules of ``model``. ``DistributedDataParallel`` and FSDP2 reduce gradients in the
    last micro-batch alone. A DeepSpeed engine sees one accumulation boundary; ZeRO 2 and 3 reduce in every micro-batch
    by design. Ranks with fewer micro-batches encode their last one again, with gradients of zero, until all have the
    same number: parameters that are gathered in every pass (FSDP2, ZeRO 3) need that. It costs no time,
    since the other ranks are still encoding. The estimator's process group must contain all ranks of the wrapper.

    Args:
        est: the estimator. Its rows are deposited once.
        model: maps the batch to features. Or two towers, which encode one part of ``batch`` each, to ``z1`` and
            ``z2``; or three, where the third encodes further candidates, to ``extra``. A tower may be any callable;
            wrappers and frozen parameters are found in modules and their methods. A tower none of whose parameters
            requires a gradient is encoded once.
        batch: the inputs; a tuple, or a list, for towers. A tuple is passed as ``model(*part)``, a mapping as
            ``model(**part)``, anything else as ``model(part)``. Tensors, along their first dimension,
            and lists, of texts for example, have one entry per sample, at any depth of tuples and mappings; the rest
            (numbers, strings, 0-d tensors, ``None``) goes to every micro-batch.
        index, index2, group, tau, labels, extra, extra_index, anchors, guide, within, teacher, prior, pairs: as in a
            call of ``est``, of the whole batch. A ``tau`` or ``extra`` that requires a gradient gets it, with the last
            micro-batch.
        micro_batch_size: samples per micro-batch. Or a function that returns the sizes of all micro-batches for given
            inputs, ``(inputs) -> [8, 8, 3]``: a budget of tokens. For towers also one of these for each.
        encode: any other way to encode, ``encode(model, part) -> outputs``; with towers, for each of them. Outputs are
            ``(z1, z2)``, ``(z1, z2, extra)``, or one tensor of views, ``(V, b, d)``; a last one that is 0-d is
            ``tau``, such as ``1 / scale`` of a CLIP model, which may require a gradient.
        backward: what takes the place of ``loss.backward()``, for example ``accelerator.backward`` or
            ``lambda loss: scaler.scale(loss).backward()``; called once per micro-batch, with a tensor of the loss's
            value. ``None``: ``loss.backward()``, or that of the DeepSpeed engine.
        reduce: ``False`` in all but the last of several calls for one update. Calls inside DDP's ``no_sync`` and
            DeepSpeed's own ``gradient_accumulation_steps`` do not need it. Under FSDP2 use it instead of
            ``set_requires_gradient_sync``, which this function sets itself and leaves at ``True``.
        batch_norm: for layers with running statistics in training mode. ``"refuse"``: raise. ``"update_once"``: the
            first pass updates them, once per micro-batch; a micro-batch is normalised by its own statistics, so that
            the gradients are not those of the whole batch.

    Returns:
        The loss, 0-d and detached. Under ``torch.no_grad()`` nothing else is done.

    State and communication: as a call of ``est``; with a wrapper and several ranks a gather of one small object, and
    what the wrapper communicates.

    Raises:
        TypeError: outputs that are no tensors; towers without a ``batch`` or ``micro_batch_size`` to match.
        ValueError: inputs of several lengths; sizes that do not sum up to it; batch normalisation, see above; nothing
            that requires a gradient; whatever a call raises.

    Source: Gao et al., Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup, RepL4NLP 2021, for
    losses without state and one device.

    Example:
        >>> import torch, compopt
        >>> est, model = compopt.DCLEstimator(), torch.nn.Linear(8, 4)
        >>> texts, images, index = torch.randn(64, 8), torch.randn(64, 8), torch.arange(64)
        >>> loss = compopt.gradient_cache(est, (model, model), (texts, images), index, micro_batch_size=16)
        >>> tuple(model.weight.grad.shape)
        (4, 8)
    """
    if not isinstance(est, ContrastiveEstimator):
        raise TypeError(f"est must be a contrastive estimator, got {type(est).__name__}")
    checks.one_of("batch_norm", batch_norm, ("refuse", "update_once"))
    checks.flag("reduce", reduce)
    with est._engine.handshake.guard():  # other ranks do not wait for one that refuses its arguments
        towers = _towers(model, batch, micro_batch_size, encode)
        statistics = _running_statistics(towers, batch_norm)
    _pad(est, towers)
    features, further, temperature = _arrange([column for tower in towers for column in tower.encode()])
    _check_samples(towers[0], features[0])
    torch.clear_autocast_cache()  # weights that were cast without a graph would have none in the second pass
    tau, extra = _either("tau", temperature, tau), _either("extra", further, extra)
    z1, z2 = features[0], features[1] if features[1:] else None
    call = functools.partial(est, z1, z2, index, index2, group, tau=tau, labels=labels, anchors=anchors)
    call = functools.partial(call, guide=guide, within=within, teacher=teacher, prior=prior, pairs=pairs)
    loss: Tensor = call(extra=extra, extra_index=extra_index)
    if torch.is_grad_enabled():
        others = [x for x in (tau, extra, *est.parameters()) if isinstance(x, Tensor)]
        with _kept(statistics):
            _back_propagate(loss, towers, others, backward, reduce)
    return loss.detach()


def _back_propagate(
    loss: Tensor,
    towers: list[_Tower],
    others: list[Tensor],
    backward: Callable[[Tensor], Any] | None,
    reduce: bool,
) -> None:
    """Give all micro-batches, and with the last one other tensors, their gradients."""
    shared = _differentiate(loss, [column for tower in towers for column in tower.columns], others)
    jobs = [(tower, number) for tower in towers if tower.trained for number in range(tower.count)]
    final = {wrapper: k for k, (tower, _) in enumerate(jobs) for wrapper in tower.wrappers}
    ran = False
    for k, (tower, number) in enumerate(jobs):
        held = [wrapper for wrapper in tower.wrappers if not reduce or final[wrapper] != k]
        with _without_reduction(held):
            pairs = [*tower.encode_again(number), *(shared if k + 1 == len(jobs) else ())]
            ran |= _backward(with_gradients(loss.detach().clone(), pairs), tower.wrappers, held, backward)
    if not jobs:
        ran = _backward(with_gradients(loss.detach().clone(), shared), [], [], backward)
    if not ran:
        raise ValueError("nothing requires a gradient: no parameter of model, nor tau, extra, or est.parameters()")


def _differentiate(loss: Tensor, columns: list[_Column], others: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Give columns their gradients; return pairs of the other tensors and theirs."""
    columns = [column for column in columns if column.leaf.requires_grad]
    own = {id(column.leaf) for column in columns}
    others = [x for x in others if x.requires_grad and id(x) not in own]
    leaves = [*(column.leaf for column in columns), *others]
    gradients = torch.autograd.grad(loss, leaves, allow_unused=True) if leaves else ()
    for column, gradient in zip(columns, gradients, strict=False):
        column.gradient = gradient
    return [(x, g) for x, g in zip(others, gradients[len(columns) :], strict=True) if g is not None]


def _backward(value: Tensor, wrappers: list[Any], held: list[Any], backward: Callable[[Tensor], Any] | None) -> bool:
    """Back-propagate a micro-batch by the framework's own method; return False if it has no graph."""
    if not value.requires_grad:  # a callable without a module, whose outputs need no gradient
        return False
    engine = next((wrapper for wrapper in wrappers if hasattr(wrapper, BOUNDARY)), None)
    if engine is not None and (backward is None or engine in held):
        backward = engine.backward  # accelerate's would also take the step
    (backward or Tensor.backward)(value)
    return True


# -- towers and micro-batches ------------------------------------------------------------------------------------------


class _Column:
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
class _Tower:
    """An encoder with its micro-batches.

    Attributes:
        call: from the inputs of a micro-batch to outputs.
        module: what ``call`` runs, if that is known.
        parts: inputs of the micro-batches.
        trained: it is encoded again, for gradients.
        wrappers: the modules in it that reduce gradients.
        count: number of its micro-batches, with those that only keep other ranks company.
        devices: accelerators that may draw random numbers.
    """

    call: Callable[[Any], list[Tensor]]
    module: nn.Module | None
    parts: list[Any]

    def __post_init__(self) -> None:
        parameters = list(self.module.parameters()) if self.module is not None else []
        self.trained = torch.is_grad_enabled() and (self.module is None or any(p.requires_grad for p in parameters))
        self.wrappers = _wrappers(self.module) if self.module is not None else []
        self.count = len(self.parts)
        here = accelerator.available()
        found = {p.device for p in parameters if p.device.type not in ("cpu", "meta")}
        self.devices = sorted(found or ({accelerator.here(here)} if here else ()), key=str)
        self.columns: list[_Column] = []
        self.statistics: list[Tensor] = []

    def _part(self, number: int) -> Any:
        return self.parts[min(number, len(self.parts) - 1)]

    def encode(self) -> list[_Column]:
        """Encode all micro-batches without a graph, and note the random state of each."""
        self._states, made = [], []
        # what has no trainable parameter makes no graph, unless it uses a prompt, or inputs, that learn
        frozen = torch.is_grad_enabled() and not self.trained
        for number in range(self.count):
            self._states.append(_random_state(self.devices))
            more = number >= len(self.parts)  # pads this rank to the largest number of micro-batches
            with torch.set_grad_enabled(frozen), _kept(self.statistics if more else ()):
                outputs = self.call(self._part(number))
            self.trained |= any(z.requires_grad for z in outputs)
            made.append([z.detach() for z in outputs])
        pieces = zip(*made[: len(self.parts)], strict=True)
        self.columns = [_Column(list(column), self.trained) for column in pieces]
        return self.columns

    def encode_again(self, number: int) -> list[tuple[Tensor, Tensor]]:
        """Encode a micro-batch with a graph; return pairs of its outputs and their gradients."""
        with _replayed(self._states[number], self.devices):
            outputs = self.call(self._part(number))
        return [(z, column.gradient_of(number, z)) for z, column in zip(outputs, self.columns, strict=True)]


def _towers(model: Any, batch: Any, sizes: Any, encode: Encode | None) -> list[_Tower]:
    """Return the towers, one for a single model."""
    if not isinstance(model, (tuple, list)):
        model, batch, sizes = [model], [batch], [sizes]
    elif not isinstance(batch, (tuple, list)) or len(batch) != len(model) or len(model) > 3:
        raise TypeError(f"model has {len(model)} towers, of two or three: batch must be a tuple of as many inputs")
    sizes = sizes if isinstance(sizes, (tuple, list)) else [sizes] * len(model)
    if len(sizes) != len(model):
        raise TypeError(f"micro_batch_size must be one size or {len(model)}, one for each tower, got {sizes!r}")
    towers = []
    for own, inputs, size in zip(model, batch, sizes, strict=True):
        call = functools.partial(_outputs, own, encode)
        towers.append(_Tower(call, _module_of(own), _split(inputs, size)))
    return towers


def _module_of(call: Any) -> nn.Module | None:
    """Return the module that a callable is, or is a method of."""
    while isinstance(call, functools.partial):
        call = call.func
    call = getattr(call, "__self__", call)
    return call if isinstance(call, nn.Module) else None


def _outputs(model: Any, encode: Encode | None, part: Any) -> list[Tensor]:
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


def _arrange(columns: list[_Column]) -> tuple[list[Tensor], Tensor | None, Tensor | None]:
    """Return features, further candidates, and a temperature, from all outputs in their order."""
    features = [column.leaf for column in columns if not column.is_tau]
    temperatures = [column.leaf for column in columns if column.is_tau]
    if not 1 <= len(features) <= 3 or len(temperatures) > 1:
        raise ValueError(f"model must return z1, z2 and perhaps extra and tau, got {len(columns)} outputs")
    return features[:2], features[2] if features[2:] else None, temperatures[0] if temperatures else None


def _check_samples(tower: _Tower, z1: Tensor) -> None:
    samples = sum(length for part in tower.parts for length in _lengths(part))
    if z1.shape[-2] != samples:
        raise ValueError(
            f"z1 has {z1.shape[-2]} rows for inputs of {samples} samples; a list has one entry per sample, so that "
            f"several inputs, [images, texts], must be a tuple"
        )


def _either(name: str, made: Tensor | None, given: Any) -> Any:
    if made is not None and given is not None:
        raise ValueError(f"{name} comes from model and as {name}=; give one of them")
    return given if made is None else made


# -- inputs ------------------------------------------------------------------------------------------------------------


def _cut(inputs: Any, at: slice) -> Any:
    """Return the samples of a micro-batch."""
    if isinstance(inputs, Mapping):
        return {key: _cut(value, at) for key, value in inputs.items()}
    if isinstance(inputs, tuple):
        made = (_cut(value, at) for value in inputs)
        return type(inputs)(*made) if hasattr(inputs, "_fields") else tuple(made)
    return inputs[at] if _is_column(inputs) else inputs


def _is_column(inputs: Any) -> bool:
    """Return True for what has an entry per sample."""
    return isinstance(inputs, list) or (isinstance(inputs, Tensor) and inputs.dim() > 0)


def _lengths(inputs: Any) -> set[int]:
    """Return the numbers of samples that tensors and lists have."""
    if isinstance(inputs, Mapping):
        inputs = tuple(inputs.values())
    if isinstance(inputs, tuple):
        return set().union(*map(_lengths, inputs))
    return {len(inputs)} if _is_column(inputs) else set()


def _split(inputs: Any, size: Sizes) -> list[Any]:
    """Cut inputs into micro-batches."""
    lengths = _lengths(inputs)
    if len(lengths) != 1:
        raise ValueError(f"inputs must have one entry per sample in every tensor and list, got lengths {lengths or 0}")
    (length,) = lengths
    if callable(size):
        sizes = [checks.count("micro_batch_size", one) for one in size(inputs)]
        if sum(sizes) != length:
            raise ValueError(f"micro_batch_size must return sizes that sum up to {length} samples, got {sizes}")
    else:
        size = checks.count("micro_batch_size", size)
        sizes = [min(size, length - start) for start in range(0, length, size)] or [0]
    starts = [sum(sizes[:k]) for k in range(len(sizes))]
    return [_cut(inputs, slice(start, start + size)) for start, size in zip(starts, sizes, strict=True)]


# -- random numbers and running statistics -----------------------------------------------------------------------------


def _random_state(devices: Sequence[torch.device]) -> list[Tensor]:
    others = (getattr(torch, device.type).get_rng_state(device) for device in devices)
    return [torch.get_rng_state(), *others]


@contextmanager
def _replayed(states: list[Tensor], devices: Sequence[torch.device]) -> Iterator[None]:
    """Draw the random numbers that followed a state, and then go on where the generators were."""
    kind = devices[0].type if devices else None
    with torch.random.fork_rng(devices, **({"device_type": kind} if kind else {})):
        torch.set_rng_state(states[0])
        for device, state in zip(devices, states[1:], strict=True):
            getattr(torch, device.type).set_rng_state(state, device)
        yield


def _running_statistics(towers: Iterable[_Tower], batch_norm: BatchNorm) -> list[Tensor]:
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


@contextmanager
def _kept(buffers: Iterable[Tensor]) -> Iterator[None]:
    """Give buffers the values back that they have now."""
    values = [(buffer, buffer.clone()) for buffer in buffers]
    try:
        yield
    finally:
        for buffer, value in values:
            buffer.copy_(value)


# -- frameworks --------------------------------------------------------------------------------------------------------

BOUNDARY = "set_gradient_accumulation_boundary"  # of DeepSpeed's engine
SYNC = "set_requires_gradient_sync"  # of FSDP2


def _wrappers(module: nn.Module) -> list[Any]:
    """Return the outermost modules that reduce gradients between ranks."""
    if any(hasattr(module, name) for name in (BOUNDARY, SYNC, "no_sync")):
        return [module]
    return [wrapper for child in module.children() for wrapper in _wrappers(child)]


@contextmanager
def _without_reduction(wrappers: Iterable[Any]) -> Iterator[None]:
    """Let gradients add up on each rank."""
    with ExitStack() as stack:
        for wrapper in wrappers:
            if hasattr(wrapper, BOUNDARY):
                before = getattr(wrapper, "_is_gradient_accumulation_boundary", None)
                stack.callback(getattr(wrapper, BOUNDARY), before)
                getattr(wrapper, BOUNDARY)(False)
            elif hasattr(wrapper, SYNC):
                stack.callback(getattr(wrapper, SYNC), True)
                getattr(wrapper, SYNC)(False)
            elif not _in_first_static_backward(wrapper):
                stack.enter_context(wrapper.no_sync())
        yield


def _in_first_static_backward(wrapper: Any) -> bool:
    """Return True before the first backward pass of DDP with ``static_graph``, which must reduce.

    What has been averaged is averaged again with the rest, and stays as it is.
    """
    return getattr(wrapper, "static_graph", False) and not wrapper._static_graph_delay_allreduce_enqueued


def _pad(est: ContrastiveEstimator, towers: list[_Tower]) -> None:
    """Let every rank encode as often as the one with the most micro-batches."""
    ranks = est._engine.ranks
    if ranks.size > 1 and any(tower.wrappers for tower in towers):
        with doing("compopt.gradient_cache()", est.t):
            everyone = ranks.gather_objects([tower.count for tower in towers])
        for tower, counts in zip(towers, zip(*everyone, strict=True), strict=True):
            tower.count = max(counts)
