"""The samples outside the batch at which chains were left."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from compopt.distributed.ranks import Ranks
from compopt.kernel.features import Encoder


class Outside:
    """Stored samples of the own chains, their similarities and, if the user encodes them, their features.

    Args:
        sample, score: as the rows have them, ``(b, D)``.
        anchors: own features by direction, ``(b, d)`` each.
        encoder: gives features of other samples, or ``None``.
        ranks: with more than one the encoder runs in every call, so that all of them run it equally often.

    Attributes:
        sample: ``(b, A)``.
        score: similarity that the walks see, ``(b, A)``.
        fresh: similarity of now where the sample was encoded, else as stored, ``(b, A)``.
        error: what the encoder raised, to be raised once the other ranks know.
    """

    def __init__(
        self, sample: Tensor, score: Tensor, anchors: Sequence[Tensor], encoder: Encoder | None, ranks: Ranks
    ) -> None:
        self.sample, self.score = (rows.expand(-1, len(anchors)) for rows in (sample, score))
        self.fresh = self.score
        self.error: Exception | None = None
        self._anchors, self._encoder, self._ranks = anchors, encoder, ranks
        self._features: tuple[Tensor, Tensor] | None = None
        self._place: Tensor  # of each sample among the features, once there are any

    @property
    def encoded(self) -> bool:
        """Whether visits to these samples have features, so that they count."""
        return self._encoder is not None

    def encode(self, needed: Tensor, spare: Tensor) -> None:
        """One call for the samples of some anchors, each sample once.

        Args:
            needed: ``(b, A)``.
            spare: a sample of the batch, ``(1,)``, for a rank that needs none.
        """
        assert self._encoder is not None
        names, place = torch.unique(self.sample[needed], return_inverse=True)
        if not len(names):
            if self._ranks.size == 1:
                return
            names = spare
        self._features = self._call(names.cpu())
        self._place = torch.zeros_like(self.sample).masked_scatter_(needed, place)
        fresh = [torch.linalg.vecdot(x, feature) for x, feature, _ in self._pairs()]
        self.fresh = torch.where(needed, torch.stack(fresh, dim=1), self.score)

    def _call(self, names: Tensor) -> tuple[Tensor, Tensor]:
        assert self._encoder is not None
        try:
            return self._encoder(names)
        except Exception as error:
            if self._ranks.size == 1:
                raise
            self.error = error  # the others wait for this rank, which tells them
            nothing = self._anchors[0].new_zeros(len(names), self._anchors[0].shape[1])
            return nothing, nothing

    def _pairs(self) -> list[tuple[Tensor, Tensor, Tensor]]:
        """By direction: anchors, the features of their stored samples, and where these come from."""
        assert self._features is not None
        features = self._features[: len(self._anchors)]
        by_direction = zip(self._anchors, features, self._place.unbind(1), strict=True)
        return [(x, feature[place], place) for x, feature, place in by_direction]

    def add_gradients(self, of_anchors: Sequence[Tensor], weights: Tensor) -> None:
        """Gradients of ``sum weights_i s_i`` with respect to both sides of these pairs; ``weights`` ``(b, A)``."""
        if self._features is None or self._encoder is None:
            return
        received = [torch.zeros_like(feature) for feature in self._features]
        for direction, (x, feature, place) in enumerate(self._pairs()):
            weight = weights[:, direction, None]
            of_anchors[direction].addcmul_(weight, feature)
            received[direction].index_add_(0, place, weight * x)
        self._encoder.receive((received[0], received[1]))
