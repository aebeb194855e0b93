"""Inputs of a tower by sample: columns, packed tokens, patches of images, and budgets of micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from compopt import checks

Take = Callable[[Sequence[int]], Any]  # positions of samples -> their inputs
Split = Callable[[Any], Sequence[Any]]

# Names in the batches of transformers and its processors.
CUMULATIVE = "cu_seqlens", "cu_seq_lens_q", "cu_seq_lens_k"
LONGEST = "max_seqlen", "max_length_q", "max_length_k"
GRIDS = {"pixel_values": ("image_grid_thw", 1), "pixel_values_videos": ("video_grid_thw", 2)}  # and the type of tokens
CHANNELS = 3
VISUAL = ("pixel", "image", "video")  # beginnings of the names of tensors that no mask of tokens describes


@dataclass(frozen=True)
class TokenBudget:
    r"""Size of micro-batches in tokens or pixels, for :func:`compopt.gradient_cache`.

    Example:
        >>> import torch, compopt
        >>> texts = {"input_ids": torch.tensor([[5, 0, 0], [5, 6, 7], [5, 6, 0]])}
        >>> texts["attention_mask"] = (texts["input_ids"] > 0).long()
        >>> table, sizes = torch.nn.Embedding(8, 4), []
        >>> def encode(table, part):
        ...     sizes.append(tuple(part["input_ids"].shape))
        ...     return (table(part["input_ids"]) * part["attention_mask"][..., None]).sum(1)
        >>> est, towers, budget = compopt.InfoNCEEstimator(), (table, table), compopt.TokenBudget(4)
        >>> loss = compopt.gradient_cache(est, towers, (texts, texts), encode=encode, micro_batch_size=budget)
        >>> sizes[:2]
        [(1, 3), (2, 2)]

    The samples of a batch are sorted by their number of tokens :math:`\ell`, and divided into micro-batches :math:`m`
    with

    .. math:: |m| \, \max_{i \in m} \ell_i \le \text{tokens}, \qquad \sum_{i \in m} p_i \le \text{pixels}

    A sample that exceeds the budget has a micro-batch of its own. Micro-batches with the longest samples come first, so
    that a budget that is too large for the memory fails at once. The features are returned to the order of the batch.

    With ``tokens``, a mapping with an ``attention_mask`` ``(b, T)`` is cut to the columns that the micro-batch uses, in
    all tensors whose first two dimensions are ``(b, T)``, and in integers whose last two are; not in those whose name
    begins with ``pixel``, ``image`` or ``video``. The features must not depend on padding: divide the
    texts of SigLIP, whose feature is that of the last column, by samples, and give ``position_ids`` to a model with
    absolute positions and padding on the left.

    Args:
        tokens: largest number of tokens in a micro-batch, with padding.
        pixels: largest number of pixels in a micro-batch: values of ``pixel_values`` and ``pixel_values_videos``,
            divided by 3 channels.
        lengths: function that returns the numbers of tokens of the samples for the inputs of a tower, ``(inputs) ->
            [12, 7, 31]``. ``None``: the sum of ``attention_mask``, or the number of ``input_ids``.

    Raises:
        TypeError, ValueError: neither ``tokens`` nor ``pixels`` is given, or one of them is no positive integer. A
            call also raises if the inputs contain no lengths, or if a tower does not return the same number of features
            for every sample.
    """

    tokens: int | None = None
    _: KW_ONLY
    pixels: int | None = None
    lengths: Callable[[Any], Sequence[int]] | None = None

    def __post_init__(self) -> None:
        if self.tokens is None and self.pixels is None:
            raise ValueError("TokenBudget needs tokens, pixels, or both")
        for name in ("tokens", "pixels"):
            if getattr(self, name) is not None:
                checks.positive_int(name, getattr(self, name))

    def groups(self, inputs: Any, samples: Sequence[Any]) -> list[list[int]]:
        """Return the positions of the samples of each micro-batch, for all inputs and those of each sample."""
        tokens, pixels = self._tokens(inputs, samples), [pixels_of(sample) for sample in samples]
        order = sorted(range(len(samples)), key=lambda i: (-tokens[i], -pixels[i]))
        found: list[list[int]] = []
        for i in order:
            if found and self._fits([*found[-1], i], tokens, pixels):
                found[-1].append(i)
            else:
                found.append([i])
        return found

    def _tokens(self, inputs: Any, samples: Sequence[Any]) -> Sequence[int]:
        if self.lengths is not None:
            given = list(self.lengths(inputs))
            if len(given) != len(samples):
                raise ValueError(f"lengths must return one number per sample, {len(samples)}, got {len(given)}")
            return given
        if self.tokens is None or not samples:  # a rank may have no samples
            return [0] * len(samples)
        found = [tokens_of(sample) for sample in samples]
        if any(count is None for count in found):
            raise ValueError("the inputs have neither attention_mask nor input_ids: give TokenBudget(lengths=...)")
        return torch.stack([count for count in found if count is not None]).tolist()  # one transfer from the device

    def _fits(self, group: list[int], tokens: Sequence[int], pixels: Sequence[int]) -> bool:
        padded, seen = len(group) * tokens[group[0]], sum(pixels[i] for i in group)
        return (self.tokens is None or padded <= self.tokens) and (self.pixels is None or seen <= self.pixels)


Sizes = int | TokenBudget


def micro_batches(inputs: Any, size: Sizes, split: Split | None) -> tuple[list[Any], list[int], list[int] | None]:
    """Divide inputs into micro-batches; return these, their numbers of samples, and the order of all samples.

    The order is ``None`` if the samples are in the order of the batch.
    """
    count, take = by_sample(inputs, split)
    if isinstance(size, TokenBudget):
        groups: list[Sequence[int]] = [*size.groups(inputs, [take([i]) for i in range(count)])] or [range(0)]
        parts = [take(group) if size.tokens is None else without_padding(take(group)) for group in groups]
        return parts, [len(group) for group in groups], [i for group in groups for i in group]
    most = checks.positive_int("micro_batch_size", size)
    chunks = [range(start, min(start + most, count)) for start in range(0, max(1, count), most)]
    return [take(chunk) for chunk in chunks], [len(chunk) for chunk in chunks], None


# -- samples of inputs ------------------------------------------------------------------------------------------------


def by_sample(inputs: Any, split: Split | None) -> tuple[int, Take]:
    """Return the number of samples, and a function that takes the inputs of the samples at given positions."""
    if split is not None:
        samples = list(split(inputs))
        return len(samples), lambda chosen: joined([samples[i] for i in chosen])
    counts: set[int] = set()
    take = _columns(inputs, counts)
    if len(counts) != 1:
        raise ValueError(
            f"inputs must have one entry per sample in every tensor and list, got lengths {counts or 0}; "
            f"give split=, a function that returns the inputs of each sample"
        )
    return counts.pop(), take


def _columns(inputs: Any, counts: set[int]) -> Take:
    """Return the function of :func:`by_sample`; add the numbers of samples of all tensors and lists to ``counts``."""
    if isinstance(inputs, Mapping):
        packed = _packed(inputs, counts)
        takes = {key: packed.get(key) or _columns(value, counts) for key, value in inputs.items()}
        return lambda chosen: {key: take(chosen) for key, take in takes.items()}
    if isinstance(inputs, tuple):
        parts = [_columns(value, counts) for value in inputs]
        return lambda chosen: _tuple(inputs, (take(chosen) for take in parts))
    if isinstance(inputs, list):
        counts.add(len(inputs))
        return lambda chosen: [inputs[i] for i in chosen]
    if isinstance(inputs, Tensor) and inputs.dim() > 0:
        counts.add(len(inputs))
        return lambda chosen: _rows(inputs, chosen)
    return lambda chosen: inputs


def _tuple(like: Any, values: Iterable[Any]) -> Any:
    """Return a tuple, or a named tuple, of the type of another one."""
    return like._make(values) if hasattr(like, "_make") else tuple(values)


def _rows(value: Tensor, chosen: Sequence[int]) -> Tensor:
    return value[chosen.start : chosen.stop] if isinstance(chosen, range) else value[list(chosen)]


def _spans(value: Any, lengths: Sequence[int], dim: int = 0, nothing: Any = ()) -> Take:
    """Return a function that takes samples out of a tensor whose dimension ``dim`` contains one after the other."""
    starts = [0, *accumulate(lengths)]

    def take(chosen: Sequence[int]) -> Any:
        if nothing is None and not any(lengths[i] for i in chosen):
            return None
        if isinstance(chosen, range):  # a view
            return value.narrow(dim, starts[chosen.start], starts[chosen.stop] - starts[chosen.start])
        return torch.cat([value.narrow(dim, starts[i], lengths[i]) for i in chosen], dim)

    return take


def _packed(inputs: Mapping[str, Any], counts: set[int]) -> dict[str, Take]:
    """Return functions for the entries that contain several values per sample, one sample after another."""
    tokens, takes = _token_lengths(inputs), {}
    if tokens is not None:
        counts.add(len(tokens))
        takes = {key: take for key, value in inputs.items() if (take := _of_tokens(key, value, tokens)) is not None}
    for key, (grid, kind) in GRIDS.items():
        if isinstance(inputs.get(key), Tensor) and isinstance(inputs.get(grid), Tensor):
            patches = inputs[grid].prod(-1).tolist()
            if sum(patches) == len(inputs[key]):
                images = _images(inputs, patches, kind, tokens)
                counts.add(len(images))
                ends = [0, *accumulate(images)]
                # samples without images have None, as processors return it
                takes[key] = _spans(inputs[key], [sum(patches[a:b]) for a, b in pairwise(ends)], nothing=None)
                takes[grid] = _spans(inputs[grid], images, nothing=None)
    return takes


def _token_lengths(inputs: Mapping[str, Any]) -> list[int] | None:
    """Return the numbers of tokens of samples that follow one another without padding; ``None`` for other inputs."""
    ends = next((inputs[key] for key in CUMULATIVE if isinstance(inputs.get(key), Tensor)), None)
    if ends is not None:
        return ends.diff().tolist()
    positions = inputs.get("position_ids")
    if "attention_mask" in inputs or not isinstance(positions, Tensor) or positions.shape[:-1] != (1,):
        return None
    starts = [*(positions[0] == 0).nonzero()[:, 0].tolist(), positions.shape[1]]
    return [b - a for a, b in pairwise([0, *starts[1:]])]


def _of_tokens(key: str, value: Any, lengths: Sequence[int]) -> Take | None:
    """Return the function for one entry of a mapping with packed tokens; ``None`` for one entry per sample."""
    total = sum(lengths)
    if key in CUMULATIVE:
        return lambda chosen: value.new_tensor([0, *accumulate(lengths[i] for i in chosen)])
    if key in LONGEST:
        longest: Take = lambda chosen: max((lengths[i] for i in chosen), default=0)  # noqa: E731
        return (lambda chosen: value.new_tensor(longest(chosen))) if isinstance(value, Tensor) else longest
    if not isinstance(value, Tensor) or value.dim() == 0:
        return None
    if key == "seq_idx":  # the number of the sample of each token
        return lambda chosen: torch.cat([value.new_full((1, lengths[i]), at) for at, i in enumerate(chosen)], 1)
    for dim, shape in ((1, value.shape[:2]), (value.dim() - 1, value.shape[-2:])):
        if shape == (1, total):
            return _spans(value, lengths, dim)
    return _spans(value, lengths) if len(value) == total else None


def _images(inputs: Mapping[str, Any], patches: list[int], kind: int, tokens: list[int] | None) -> list[int]:
    """Return the number of images of each sample.

    A processor marks the tokens of images, whose number is that of the patches divided by a constant. Without marks
    each sample has one image.
    """
    marks = inputs.get("mm_token_type_ids")
    if marks is None:
        return [1] * len(patches)
    marked = marks == kind
    seen = marked.sum(1) if tokens is None else torch.stack([part.sum() for part in marked.view(-1).split(tokens)])
    own = seen.tolist()
    ends = {end: at for at, end in enumerate(accumulate(patches, initial=0))}
    merged = sum(patches) // max(sum(own), 1)  # patches per token
    bounds = [ends.get(end * merged) for end in accumulate(own, initial=0)]
    if None in bounds:
        raise ValueError(
            f"mm_token_type_ids marks {own} tokens per sample, which do not match images of {patches} patches; "
            f"give split=, a function that returns the inputs of each sample"
        )
    return [b - a for a, b in pairwise(bound for bound in bounds if bound is not None)]


def joined(samples: Sequence[Any]) -> Any:
    """Join the inputs of samples: tensors and lists one after another, other values from the first sample."""
    first = samples[0]
    if isinstance(first, Mapping):  # a sample without images may lack their entries
        keys = dict.fromkeys(key for sample in samples for key in sample)
        return {key: joined([sample[key] for sample in samples if key in sample]) for key in keys}
    if isinstance(first, tuple):
        return _tuple(first, (joined(column) for column in zip(*samples, strict=True)))
    if isinstance(first, list):
        return [entry for sample in samples for entry in sample]
    return torch.cat(list(samples)) if isinstance(first, Tensor) and first.dim() > 0 else first


# -- lengths ----------------------------------------------------------------------------------------------------------


def _mappings(inputs: Any) -> list[Mapping[str, Any]]:
    """Return all mappings of the inputs, at any depth."""
    if isinstance(inputs, Mapping):
        return [inputs, *(found for value in inputs.values() for found in _mappings(value))]
    return [found for value in inputs for found in _mappings(value)] if isinstance(inputs, tuple) else []


def tokens_of(sample: Any) -> Tensor | None:
    """Return the number of tokens of a sample, 0-d, or ``None``."""
    found = []
    for inputs in _mappings(sample):
        ids = inputs.get("input_ids")
        if "attention_mask" in inputs:
            found.append(inputs["attention_mask"].sum())
        elif isinstance(ids, Tensor):
            found.append(torch.tensor(ids.numel(), device=ids.device))
    return torch.stack(found).sum() if found else None


def pixels_of(sample: Any) -> int:
    """Return the number of pixels of a sample."""
    values = [inputs[key] for inputs in _mappings(sample) for key in GRIDS if isinstance(inputs.get(key), Tensor)]
    return sum(value.numel() for value in values) // CHANNELS


def without_padding(inputs: Any) -> Any:
    """Cut tensors of tokens to the columns that their ``attention_mask`` uses."""
    if isinstance(inputs, tuple):
        return _tuple(inputs, map(without_padding, inputs))
    if not isinstance(inputs, Mapping):
        return inputs
    mask = inputs.get("attention_mask")
    if not isinstance(mask, Tensor) or mask.dim() != 2 or not mask.any():
        return {key: without_padding(value) for key, value in inputs.items()}
    used = mask.any(0).nonzero()[:, 0]
    start, length = int(used[0]), int(used[-1] - used[0]) + 1

    def cut(key: Any, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return without_padding(value)
        if str(key).startswith(VISUAL):
            return value
        if value.shape[:2] == mask.shape:
            return value.narrow(1, start, length)
        positions = not value.is_floating_point() and value.shape[-2:] == mask.shape  # (3, b, T), of Qwen2-VL
        return value.narrow(-1, start, length) if positions else value

    return {key: cut(key, value) for key, value in inputs.items()}
