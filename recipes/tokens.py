"""Tokens for Unicode names: frequent words whole, rare words letter by letter."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

PAD = 0


class Tokenizer:
    """Vocabulary built from captions, in sorted order, so that equal captions give equal tokens anywhere.

    A word (split at spaces and hyphens) that occurs in at least ``min_count`` captions is one token; any other is
    spelled, its first letter marked as the beginning of a word, so that unseen words can be read too.

    Args:
        captions: the distinct captions.
        min_count: captions a word must occur in to become a token.
        length: tokens per caption; shorter ones are padded with 0, longer ones cut.
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
        """(len(captions), length) int64 tokens."""
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
