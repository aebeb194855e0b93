"""Random numbers that depend only on counters (seed, step, position), not on the device, rank or order of drawing.

The generator is SplitMix64 (Steele, Lea and Flood, OOPSLA 2014) on counters: a stream per chain with random access to
its elements. The bits are the same on every device, for every split of a batch over ranks, and after a resume.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_WORD = (1 << 64) - 1
_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def _signed(word: int) -> int:
    """Return the int64 with the bits of an unsigned word."""
    word &= _WORD
    return word - (1 << 64) if word >> 63 else word


def scramble(word: int) -> int:
    """Apply the finalizer of SplitMix64 to a word, on the host."""
    word &= _WORD
    word = ((word ^ (word >> 30)) * _FIRST) & _WORD
    word = ((word ^ (word >> 27)) * _SECOND) & _WORD
    return word ^ (word >> 31)


def fold(*counters: int) -> int:
    """Return 64 random bits, a function of the counters."""
    state = 0
    for counter in counters:
        state = scramble(state + counter + _GOLDEN)
    return state


def permutation(count: int, *counters: int) -> Tensor:
    """Return a random permutation, ``(count,)`` int64 on the CPU, a function of the counters."""
    return torch.randperm(count, generator=torch.Generator("cpu").manual_seed(fold(*counters) >> 1), device="cpu")


def scramble_(words: Tensor) -> Tensor:
    """Apply :func:`scramble` to an int64 tensor in place; signed products wrap around like unsigned ones."""
    shifted = torch.empty_like(words)
    for shift, factor in ((30, _FIRST), (27, _SECOND), (31, None)):
        # the shift of int64 is arithmetic; the mask removes the copies of the sign bit
        torch.bitwise_right_shift(words, shift, out=shifted).bitwise_and_((1 << (64 - shift)) - 1)
        words.bitwise_xor_(shifted)
        if factor is not None:
            words.mul_(_signed(factor))
    return words


def streams(counters: tuple[int, ...], positions: Tensor, last: Sequence[int] | None = None) -> Tensor:
    """Return a stream per position: ``(b,)`` int64 keys for :func:`bits`.

    Args:
        counters: shared by all streams, such as seed and step.
        positions: distinguish the streams, ``(b,)`` int64.
        last: values of a last counter; the result has a stream for each of them and each position,
            ``(len(last) * b,)``.
    """
    words = positions * _signed(_GOLDEN)
    if last is None:
        return scramble_(words.add_(_signed(fold(*counters))))
    return scramble_(torch.cat([words + _signed(fold(*counters, each)) for each in last]))


def bits(keys: Tensor, first: int, count: int) -> Tensor:
    """Return elements ``first`` to ``first + count - 1`` of every stream, ``(count, b)`` int64, all 64 bits random."""
    steps = torch.arange(first + 1, first + count + 1, device=keys.device) * _signed(_GOLDEN)
    return scramble_(steps[:, None] + keys)


def below(words: Tensor, bound: Tensor) -> Tensor:
    """Return uniform integers in ``[0, bound)`` from the upper halves of the words; ``bound < 2^31``."""
    return words.bitwise_right_shift(32).bitwise_and_(0xFFFFFFFF).mul_(bound).bitwise_right_shift_(32)


def uniform(words: Tensor, dtype: torch.dtype) -> Tensor:
    """Return uniform numbers in ``(0, 1]`` from the lower halves of the words."""
    return words.bitwise_and(0xFFFFFFFF).to(dtype).add_(0.5).mul_(2.0**-32)
