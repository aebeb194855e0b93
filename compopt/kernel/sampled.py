"""Pair weights that are no function of a log-normalizer."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from compopt.functional import Scalar


class SampledPairs(ABC):
    """Weights ``w_ij`` that a sampler decided, in place of ``exp(h_ij / tau_i - alpha_i) / |N_i|``.

    Attributes:
        sum_wh: ``sum_j w_ij h_ij`` of every anchor of the (global) batch, ``(B, A)``: what a temperature's gradient
            needs.
    """

    sum_wh: Tensor

    @abstractmethod
    def gradients(self, coefficient: Scalar) -> Tensor:
        r"""``sum over directions and anchors i of coefficient_i (sum_j w_ij grad s_ij - grad s_ii)``.

        With several ranks collective. Gradients of features that are not in the batch go where those came from.

        Args:
            coefficient: factor of each anchor, a number or broadcastable to ``(B, A)``.

        Returns:
            Gradients with respect to this process's ``z1`` and ``z2``, ``(2, b, d)``.
        """
