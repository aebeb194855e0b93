"""Tokenizer and two small encoders with features of equal width, which train on two CPU cores in seconds."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from itertools import chain, pairwise
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

DIM = 128  # width of the features
PAD = 0  # padding token


class Tokenizer:
    """Tokenizer for Unicode names: one token per frequent word, one per letter of rare words.

    The vocabulary is built from captions in sorted order, so that equal captions give equal tokens on every machine.

    A word (split at spaces and hyphens) that occurs in at least ``min_count`` captions is one token. Any other word,
    including unseen ones, is spelled, with its first letter marked as the beginning of a word.
    """

    def __init__(self, captions: Sequence[str], min_count: int = 2, length: int = 16) -> None:
        counts = Counter(word for caption in captions for word in set(_words(caption)))
        letters = sorted({letter for word in counts for letter in word})
        words = sorted(word for word, count in counts.items() if count >= min_count)
        entries = [*words, *(f"^{letter}" for letter in letters), *(f"+{letter}" for letter in letters)]
        self.length = length
        self.vocabulary = {entry: position for position, entry in enumerate(entries, start=PAD + 1)}

    def __len__(self) -> int:
        return len(self.vocabulary) + 1

    def __call__(self, captions: Sequence[str]) -> Tensor:
        """Return tokens, (len(captions), length) int64."""
        table = torch.full((len(captions), self.length), PAD)
        for row, caption in zip(table, captions, strict=True):
            tokens = [token for word in _words(caption) for token in self._tokens(word)][: self.length]
            row[: len(tokens)] = torch.tensor(tokens)
        return table

    def _tokens(self, word: str) -> list[int]:
        if word in self.vocabulary:
            return [self.vocabulary[word]]
        spelled = [f"^{word[0]}", *(f"+{letter}" for letter in word[1:])]
        return [self.vocabulary[entry] for entry in spelled if entry in self.vocabulary]


def _words(caption: str) -> list[str]:
    return [word for word in re.split(r"[ -]", caption) if word]


def finite(part: Any) -> Any:
    """Return a model (or another part of a training, unchecked); exit if one of its weights is NaN or infinite."""
    if isinstance(part, nn.Module) and not all(weight.isfinite().all() for weight in part.parameters()):
        raise SystemExit("the weights are not finite: a batch gave NaN; training stops, and they are not saved")
    return part


def pixels(images: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Convert uint8 images (B, H, W) or (B, C, H, W) to floats in [0, 1], (B, C, H, W); keep values of floats."""
    images = images.unsqueeze(1) if images.ndim == 3 else images
    return images.to(dtype) if images.is_floating_point() else images.to(dtype) / 255


class ImageTower(nn.Module):
    """Convolutions with stride 2, from square images (see :func:`pixels`) to features (B, dim), not normalised."""

    def __init__(self, dim: int = DIM, width: int = 32, channels: int = 1, size: int = 32) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *_stage(channels, width, kernel=5),
            *_stage(width, 2 * width),
            *_stage(2 * width, 4 * width),  # an eighth of each side
            nn.Flatten(),
            nn.Linear(4 * width * math.ceil(size / 8) ** 2, dim),
        )
        self.to(memory_format=torch.channels_last)

    def forward(self, images: Tensor) -> Tensor:
        images = pixels(images, self.body[0].weight.dtype)
        return self.body(images.contiguous(memory_format=torch.channels_last))


def _stage(inputs: int, outputs: int, kernel: int = 3) -> tuple[nn.Module, ...]:
    """Halve each side: convolution, batch norm, ReLU."""
    convolution = nn.Conv2d(inputs, outputs, kernel, stride=2, padding=kernel // 2, bias=False)
    return convolution, BatchNorm(outputs), nn.ReLU()


class SumOfRanks(torch.autograd.Function):
    """Sum over all ranks, of values in the forward pass and of gradients in the backward pass."""

    @staticmethod
    def forward(ctx, values: Tensor) -> Tensor:
        total = values.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        total = gradient.clone()
        dist.all_reduce(total)
        return total


class BatchNorm(nn.BatchNorm2d):
    """Batch norm of images (B, C, H, W) or features (B, C) over all ranks, with the same result on K ranks as on one.

    torch's ``SyncBatchNorm`` supports only GPUs. On one rank the result is bit for bit that of torch.
    """

    def _check_input_dim(self, x: Tensor) -> None:
        """Accept features too, which ``nn.BatchNorm2d`` refuses."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or not dist.is_initialized() or dist.get_world_size() == 1:
            return super().forward(x)
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        over = [axis for axis in range(x.ndim) if axis != 1]
        moments = torch.stack([wide.mean(over), wide.square().mean(over)])
        mean, square = SumOfRanks.apply(moments) / dist.get_world_size()  # ranks have the same number of images
        variance = (square - mean.square()).clamp(min=0)
        self._remember(mean.detach(), variance.detach(), x.numel() // x.shape[1] * dist.get_world_size())
        scale = (variance + self.eps).rsqrt() * self.weight
        shift = self.bias - mean * scale
        per_channel = (-1, *[1] * (x.ndim - 2))
        return (wide * scale.view(per_channel) + shift.view(per_channel)).to(x.dtype)

    def _remember(self, mean: Tensor, variance: Tensor, count: int) -> None:
        self.num_batches_tracked += 1
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), self.momentum)
        unbiased = variance * count / max(1, count - 1)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), self.momentum)


class TextTower(nn.Module):
    """Pre-norm transformer block and mean over tokens: (B, L) int64 tokens (0 = padding) -> (B, dim)."""

    def __init__(self, vocabulary: int, length: int, dim: int = DIM, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.token = nn.Embedding(vocabulary, dim, padding_idx=PAD)
        self.position = nn.Parameter(0.02 * torch.randn(length, dim))
        self.norm_attention, self.norm_mlp, self.norm_out = (nn.LayerNorm(dim) for _ in range(3))
        self.qkv = nn.Linear(dim, 3 * dim)
        self.mix = nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))
        self.head = nn.Linear(dim, dim)

    def forward(self, tokens: Tensor) -> Tensor:
        keep = tokens != PAD
        x = self.token(tokens) + self.position
        x = x + self._attention(self.norm_attention(x), keep)
        x = x + self.mlp(self.norm_mlp(x))
        x = self.norm_out(x) * keep.unsqueeze(-1)
        return self.head(x.sum(1) / keep.sum(1, keepdim=True).clamp(min=1))

    def _attention(self, x: Tensor, keep: Tensor) -> Tensor:
        batch, length, dim = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=keep[:, None, None, :])
        return self.mix(mixed.transpose(1, 2).reshape(batch, length, dim))


class TwoTowers(nn.Module):
    """Pair of encoders, as in CLIP."""

    def __init__(self, vocabulary: int, length: int, dim: int = DIM, channels: int = 1, size: int = 32) -> None:
        super().__init__()
        self.image = ImageTower(dim, channels=channels, size=size)
        self.text = TextTower(vocabulary, length, dim)

    def forward(self, images: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Encode both sides in one call, since distributed wrappers expect one forward per backward."""
        return self.image(images), self.text(tokens)


class Projected(nn.Module):
    """SimCLR's encoder: :attr:`image` returns the features before the head, :meth:`project` those after it.

    Args:
        channels: channels of the images.
        head: widths of the head's layers, the last of which is the feature dimension of the loss; every layer except
            the last ends in batch norm and ReLU. ``(8192, 8192, 8192)`` is the head of iSogCLR's experiments.
        dim: width of the features before the head.
    """

    def __init__(self, channels: int = 1, head: Sequence[int] = (DIM,), dim: int = DIM) -> None:
        super().__init__()
        self.image = ImageTower(dim, channels=channels)
        hidden = [_hidden(*widths) for widths in pairwise((dim, *head[:-1]))]
        self.projection = nn.Sequential(nn.ReLU(), *chain(*hidden), nn.Linear((dim, *head)[-2], head[-1]))

    def project(self, images: Tensor) -> Tensor:
        return self.projection(self.image(images))

    def forward(self, *views: Tensor) -> tuple[Tensor, ...]:
        """Encode all views, (B, ...) each, as one batch."""
        return self.project(torch.cat(views)).chunk(len(views))


def _hidden(inputs: int, outputs: int) -> tuple[nn.Module, ...]:
    return nn.Linear(inputs, outputs, bias=False), BatchNorm(outputs), nn.ReLU()
