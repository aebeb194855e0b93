"""Gradient cache: encode without a graph, call the estimator once, encode each micro-batch again with a graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor

from compopt import checks
from compopt.checks.context import outside_of_graphs
from compopt.checks.inputs import split_negatives
from compopt.contrastive import ContrastiveEstimator
from compopt.distributed.collectives import doing
from compopt.distributed.handshake import NULL_CONTEXT
from compopt.distributed.ranks import Ranks
from compopt.distributed.wrappers import (
    TrainingStep,
    check_reduced,
    current_step,
    gathers,
    run_backward,
    without_reduction,
)
from compopt.gradient_cache.inputs import Sizes, Split
from compopt.gradient_cache.towers import Encode, Output, Tower, new_towers, restored_buffers
from compopt.kernel.features import with_gradients
from compopt.pairs import BoundPolicy, PairPolicy

LIST_REMEDY = "a list has one entry per sample, so that several inputs, [images, texts], must be a tuple"


@outside_of_graphs
def gradient_cache(
    est: ContrastiveEstimator,
    model: Any,
    batch: Any,
    index: Tensor | None = None,
    *,
    micro_batch_size: Sizes | Sequence[Sizes],
    split: Split | Sequence[Split | None] | None = None,
    encode: Encode | None = None,
    backward: Callable[[Tensor], Any] | None = None,
    reduce: bool = True,
    batch_norm: Literal["refuse", "update_once"] = "refuse",
    index2: Tensor | None = None,
    labels: Tensor | None = None,
    tau: Tensor | float | None = None,
    negatives: Tensor | tuple[Tensor, Tensor] | None = None,
    keys: Sequence[Tensor] | None = None,
    pairs: PairPolicy | BoundPolicy | None = None,
) -> Tensor:
    r"""Compute the gradients of a large batch in micro-batches, with the negatives of the whole batch.

    Example:
        >>> import torch, compopt
        >>> est, model = compopt.DCLEstimator(), torch.nn.Linear(8, 4)
        >>> texts, images, index = torch.randn(64, 8), torch.randn(64, 8), torch.arange(64)
        >>> loss = compopt.gradient_cache(est, (model, model), (texts, images), index, micro_batch_size=16)
        >>> tuple(model.weight.grad.shape)
        (4, 8)

    .. math::
        \frac{\partial L}{\partial \theta} = \sum_{\text{micro-batches } m}
        \frac{\partial L}{\partial z_m} \frac{\partial z_m}{\partial \theta}

    The batch is encoded in micro-batches without a graph. The estimator is called once on all features, which yields
    :math:`\partial L / \partial z`. Each micro-batch is then encoded again with a graph and back-propagated. The memory
    is that of one micro-batch and of the features; the additional time is that of one forward pass. The gradients are
    those of ``backward(est(*model(batch), index))`` in the same framework, including those of
    :meth:`~compopt.Estimator.parameters`, and are stored where the framework's step expects them. Call that step
    afterwards.

    Both passes draw the same random numbers, so that dropout masks agree; afterwards the generators are in the state
    after the first pass. Training mode, autocast, activation checkpointing and compilation of the model are not
    changed. The model's own generators, ``random`` and ``numpy`` are not replayed. A forward pass must not change its
    inputs; buffers that it changes, other than running statistics, are changed twice.

    After an error in the second pass, gradients are incomplete. The deposits of this call and of other calls since the
    last commit are then discarded: call ``optimizer.zero_grad()`` and repeat the whole window.

    *Frameworks* are detected from the modules of ``model``. ``DistributedDataParallel`` and FSDP2 reduce gradients in
    the last micro-batch only. For a DeepSpeed engine the call has one accumulation boundary; ZeRO 2 and 3 reduce in
    every micro-batch by design. Ranks with fewer micro-batches encode their last one again, with zero gradients, until
    all ranks have run the same number: parameters that are gathered in every pass (FSDP2, ZeRO 3) require that. The
    padding costs no time, since the other ranks are still encoding. The estimator's process group must contain all
    ranks of the wrapper.

    Args:
        est: the estimator. Its rows are deposited once.
        model: maps the batch to features. Or two towers, which encode one part of ``batch`` each, to ``z1`` and
            ``z2``; or three, where the third encodes further candidates, ``negatives``. A tower may be any callable;
            wrappers and frozen parameters are detected in modules and their methods. A tower is encoded only once if
            none of its parameters requires a gradient.
        batch: the inputs; a tuple or list of inputs for towers. A tuple is passed as ``model(*part)``, a mapping as
            ``model(**part)``, anything else as ``model(part)``. Tensors (along their first dimension) and lists (of
            texts, for example) have one entry per sample, at any depth of tuples and mappings; all other values
            (numbers, strings, 0-d tensors, ``None``) are passed to every micro-batch. In mappings two forms of
            transformers are recognised: patches of images of several sizes (``pixel_values`` or
            ``pixel_values_videos`` with ``image_grid_thw`` or ``video_grid_thw``; one image per sample unless
            ``mm_token_type_ids`` says otherwise), and texts without padding, one after another (``cu_seqlens``,
            ``cu_seq_lens_q``, or ``position_ids`` that start again at 0).
        index, index2, labels, tau, negatives, keys, pairs: as in a call of ``est``, for the whole batch. Gradients of
            ``tau`` and ``negatives`` are accumulated with the last micro-batch. If the model returns ``negatives``,
            ``(None, positions)`` gives their positions.
        micro_batch_size: samples per micro-batch, or a :class:`~compopt.TokenBudget`. For towers also a sequence of one
            per tower.
        split: function that divides inputs of another form by sample, ``(inputs) -> [inputs of sample 0, ...]``. The
            inputs of a micro-batch are those of its samples, with tensors and lists joined along their first
            dimension. For towers also a sequence with one function or ``None`` per tower.
        encode: function that encodes, ``encode(model, part) -> outputs``; with towers it is called for each of them.
            Outputs are ``(z1, z2)`` or ``(z1, z2, negatives)``. A 0-d last output is ``tau``, as ``1 / scale`` of a
            CLIP model; it may require a gradient.
        backward: function that replaces ``loss.backward()``, for example ``accelerator.backward`` or
            ``lambda loss: scaler.scale(loss).backward()``; called once per micro-batch with a tensor that has the value
            of the loss. ``None``: ``loss.backward()``, or that of the DeepSpeed engine.
        reduce: ``False`` in all but the last of several calls for one update. Not needed for calls inside DDP's
            ``no_sync`` or with DeepSpeed's ``gradient_accumulation_steps``. Under FSDP2 use it instead of
            ``set_requires_gradient_sync``, which this function calls itself and leaves at ``True``.
        batch_norm: treatment of layers with running statistics in training mode. ``"refuse"``: raise an error.
            ``"update_once"``: the first pass updates the statistics, once per micro-batch; each micro-batch is
            normalised by its own statistics, so that the gradients differ from those of the whole batch.

    Returns:
        The loss, 0-d and detached. Under ``torch.no_grad()`` only the loss is computed.

    State and communication: as in a call of ``est``. With a wrapper and several ranks additionally a gather of one
    small object, and the collectives of the wrapper.

    Raises:
        TypeError: outputs are not tensors; ``batch`` or ``micro_batch_size`` does not match the towers.
        ValueError: inputs have several lengths; sizes do not sum up to the number of samples; batch normalisation, see
            above; nothing requires a gradient; features from ``encode`` of a sampler require one; or raised by the call
            of ``est``.
        RuntimeError: DDP still waits for parameters that the last micro-batch did not use and requires
            ``find_unused_parameters=True``. Another rank refused its arguments, or its model raised in the first pass
            (except under FSDP2 and ZeRO 3, where the other ranks wait for parameters until the group's timeout).

    Source: Gao et al., Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup, RepL4NLP 2021, for
    losses without state and one device.
    """
    if not isinstance(est, ContrastiveEstimator):
        raise TypeError(f"est must be a contrastive estimator, got {type(est).__name__}")
    with est._guard():  # an error in the arguments is reported to the other ranks
        checks.one_of("batch_norm", batch_norm, ("refuse", "update_once"))
        checks.flag("reduce", reduce)
        step = _step_of(backward, reduce)
        _check_list(model, batch, index)
        given, positions = split_negatives(negatives)
        towers = new_towers(model, batch, micro_batch_size, split, encode, batch_norm == "update_once")
    with doing("compopt.gradient_cache()", est.t):
        pad(est._ranks, towers)
    # Where every pass gathers parameters, the other ranks wait in a pass, and a message would wait for them.
    alone = any(gathers(wrapper) for tower in towers for wrapper in tower.wrappers)
    with NULL_CONTEXT if alone else est._guard():
        outputs = [output for tower in towers for output in tower.encode_all()]
        z1, z2, further, tau = _arguments(outputs, given, tau)
        _check_samples(towers[0], z1)
    torch.clear_autocast_cache()  # weights that were cast without a graph would have none in the second pass
    negatives = further if positions is None else (further, positions)
    with _without_a_graph(est.normalizer):
        loss = est(z1, z2, index, index2=index2, labels=labels, tau=tau, negatives=negatives, keys=keys, pairs=pairs)
    if torch.is_grad_enabled():
        others = [x for x in (tau, further, *est._differentiated()) if isinstance(x, Tensor)]
        try:
            back_propagate(loss.detach(), towers, _differentiate(step.scale * loss, outputs, others), step)
        except BaseException:
            est.discard()  # the gradients of this window are incomplete
            raise
    return loss.detach()


@contextmanager
def _without_a_graph(normalizer: Any) -> Iterator[None]:
    """Refuse features of ``encode`` that require a gradient, which the second pass would not give them."""
    if (encode := getattr(normalizer, "encode", None)) is None:
        yield
        return

    def checked(index: Tensor) -> Any:
        made = encode(index)
        if any(isinstance(z, Tensor) and z.requires_grad for z in ([made] if isinstance(made, Tensor) else made)):
            raise ValueError(
                "encode returned features that require a gradient, which the gradient cache does not pass on; let it "
                "read a bank, or encode under torch.no_grad(), which is a bias; or call the estimator without the cache"
            )
        return made

    normalizer.encode = checked
    try:
        yield
    finally:
        normalizer.encode = encode


def _step_of(backward: Callable[[Tensor], Any] | None, reduce: bool) -> TrainingStep:
    found = current_step()
    if found is None:
        return TrainingStep(backward, reduce)
    if backward is not None or not reduce:
        raise ValueError("the trainer around this call (GradientCacheMixin) sets backward and reduce; leave both out")
    return found


def pad(ranks: Ranks, towers: list[Tower]) -> None:
    """Set the number of passes of every rank to the largest number of micro-batches of any rank."""
    if ranks.size > 1 and any(tower.wrappers for tower in towers):
        everyone = ranks.gather_objects([tower.count for tower in towers])
        for tower, counts in zip(towers, zip(*everyone, strict=True), strict=True):
            tower.count = max(counts)


def _arguments(outputs: list[Output], negatives: Tensor | None, tau: Any) -> tuple[Tensor, Tensor, Any, Any]:
    """Return ``z1, z2``, the features of ``negatives``, and ``tau``, from the outputs in order and the arguments."""
    features = [output.leaf for output in outputs if not output.is_tau]
    temperatures = [output.leaf for output in outputs if output.is_tau]
    if not 2 <= len(features) <= 3 or len(temperatures) > 1:
        raise ValueError(f"model must return z1, z2 and perhaps negatives and tau, got {len(outputs)} outputs")
    for name, made, given in (("tau", temperatures, tau), ("negatives", features[2:], negatives)):
        if made and given is not None:
            raise ValueError(f"{name} is returned by model and passed as {name}=; pass one of them only")
    z1, z2, *further = features
    return z1, z2, further[0] if further else negatives, temperatures[0] if temperatures else tau


def _check_list(model: Any, batch: Any, index: Tensor | None) -> None:
    """Raise if the inputs of a model are a list of columns, as default data loaders return."""
    if isinstance(model, tuple | list) or not isinstance(batch, list) or index is None:
        return
    if len(batch) != len(index) and all(isinstance(x, Tensor) and x.shape[:1] == index.shape for x in batch):
        raise ValueError(
            f"batch is a list of {len(batch)} tensors of {len(index)} samples; {LIST_REMEDY}: tuple(batch)"
        )


def _check_samples(tower: Tower, z1: Tensor) -> None:
    samples = sum(tower.samples)
    if z1.shape[-2] != samples:
        raise ValueError(f"z1 has {z1.shape[-2]} rows for inputs of {samples} samples; {LIST_REMEDY}")


def _differentiate(loss: Tensor, outputs: list[Output], others: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Set the gradients of the outputs; return pairs of the other tensors and their gradients."""
    leaves = {id(x): x for x in (*(output.leaf for output in outputs), *others) if x.requires_grad}
    found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True) if leaves else ()
    gradients = dict(zip(leaves, found, strict=True))
    for output in outputs:
        output.gradient = gradients.pop(id(output.leaf), None)
    return [(leaves[key], gradient) for key, gradient in gradients.items() if gradient is not None]


def back_propagate(value: Tensor, towers: list[Tower], shared: list[tuple[Tensor, Tensor]], step: TrainingStep) -> None:
    """Back-propagate all micro-batches; the last one also accumulates the gradients of the other tensors.

    Args:
        value: the loss, 0-d, without a graph.
        towers: towers whose outputs have their gradients.
        shared: pairs of other tensors and their gradients.
        step: the backward pass.

    Raises:
        ValueError: nothing requires a gradient.
    """
    jobs = [(tower, number) for tower in towers if tower.trained for number in range(tower.count)]
    final = {wrapper: k for k, (tower, _) in enumerate(jobs) for wrapper in tower.wrappers}
    ran = False
    with restored_buffers(buffer for tower in towers for buffer in tower.statistics):
        for k, (tower, number) in enumerate(jobs):
            held = [wrapper for wrapper in tower.wrappers if not step.reduce or final[wrapper] != k]
            with without_reduction(held):
                pairs = [*tower.encode_again(number), *(shared if k + 1 == len(jobs) else ())]
                ran |= run_backward(with_gradients(value.clone(), pairs), tower.wrappers, held, step.backward)
        check_reduced(final if step.reduce else ())
        if not jobs:
            ran = run_backward(with_gradients(value.clone(), shared), [], [], step.backward)
    if not ran:
        raise ValueError("nothing requires a gradient: no parameter of model, nor tau, negatives, or est.parameters()")
