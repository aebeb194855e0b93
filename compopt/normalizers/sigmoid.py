"""Pairwise sigmoid loss: the weight of a pair does not depend on other pairs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, softplus

from compopt import checks
from compopt.batch import Batch
from compopt.distributed.ranks import Ranks
from compopt.estimator.groups import Hyper
from compopt.estimator.parts import Call, Estimate, Normalizer, Temperature
from compopt.functional import Scalar
from compopt.kernel.block import same_sample
from compopt.kernel.pairs import Pairs, SampledPairs, effective_number, pull_positives, scale_of
from compopt.pairs import NO_POLICY, PairPolicy

BLOCK_ROWS = 1024  # rows of a block if chunk_size is None


class SigmoidPairs(SampledPairs):
    r"""Weights ``w_ij`` of negatives and ``p_i`` of positives under the pairwise sigmoid loss.

    .. math::
        \alpha_i = \sum_{j \in N_i} \log(1 + e^{s_{ij} / \tau_i + b}) + \log(1 + e^{-s_{ii} / \tau_i - b}), \qquad
        w_{ij} = \sigma(s_{ij} / \tau_i + b), \quad p_i = \sigma(-s_{ii} / \tau_i - b)

    Since no weight depends on another pair, blocks are computed once for the sums and once for the gradients, and are
    not kept.

    Args:
        pairs: statistics of the batch, which define the pairs and ``s_ii``.
        batch: the samples of all ranks.
        tau: temperatures, a number or broadcastable to ``(B, a)``.
        bias: ``b``, a number or broadcastable to ``(B, a)``.
        chunk_size: rows per block.
        ranks: the ranks.

    Attributes:
        alpha: losses of the anchors, ``(B, A)``.
        slope: derivative of ``alpha`` with respect to ``b``, ``(B, A)``.
        total, squares: sums of ``w_ij`` and of ``w_ij^2`` of this process's anchors, ``(b, a)``; for a metric.

    Communicates: one all-gather of ``3 a`` floats per sample, at construction.
    """

    serves = False

    def __init__(
        self,
        pairs: Pairs,
        batch: Batch,
        tau: Scalar,
        bias: Scalar,
        chunk_size: int | None,
        ranks: Ranks,
    ) -> None:
        self._pairs, self._z, self._own = pairs, batch.views, batch.own
        self._rows = chunk_size or BLOCK_ROWS
        self._scale = self._of_anchors(scale_of(tau, self._z, self._z.shape[1], pairs.directions))
        self._bias = self._of_anchors(bias)
        sums = torch.stack([self._sums(view) for view in range(pairs.directions)], dim=1)
        self.total, self.squares = sums[:, :, 1], sums[:, :, 3]
        per_anchor = ranks.gather([sums[:, :, :3]], batch.sizes)[0].unbind(2)
        losses, weights, weighted = per_anchor
        logits = pairs.positive * self._scale + self._bias
        self._pull = torch.sigmoid(-logits)
        self.alpha = losses - logsigmoid(logits)
        self.slope = weights - self._pull
        self.sum_wh = weighted - self._pull * pairs.positive

    def _of_anchors(self, value: Scalar) -> Tensor:
        """Expand a number or a tensor to ``(B, a)``."""
        shape = self._z.shape[1], self._pairs.directions
        return value.to(self._z).expand(shape) if isinstance(value, Tensor) else self._z.new_full(shape, value)

    def _others(self, view: int) -> Sequence[int]:
        """Return the views of the candidates of a view."""
        return range(len(self._z)) if self._pairs.unimodal else (1 - view,)

    def _blocks(self, view: int) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
        """Yield rows of this rank's anchors of a view, candidates, similarities, and a mask of excluded pairs."""
        y = self._z.flatten(0, 1) if self._pairs.unimodal else self._z[1 - view]
        mine, theirs = self._pairs.names((view,)), self._pairs.names(self._others(view))
        for start in range(self._own.start, self._own.stop, self._rows):
            rows = slice(start, min(start + self._rows, self._own.stop))
            yield rows, y, self._z[view, rows] @ y.T, same_sample([key[rows] for key in mine], theirs)

    def _sums(self, view: int) -> Tensor:
        """Return sums of losses, ``w_ij``, ``w_ij s_ij``, ``w_ij^2`` over the negatives of own anchors, ``(b, 4)``."""
        found = [self._z.new_empty(0, 4)]
        for rows, _, s, same in self._blocks(view):
            logits = s * self._scale[rows, view, None] + self._bias[rows, view, None]
            weights = torch.sigmoid(logits).masked_fill_(same, 0)
            losses = softplus(logits).masked_fill_(same, 0)
            sums = losses.sum(1), weights.sum(1), (weights * s).sum(1), weights.square().sum(1)
            found.append(torch.stack(sums, dim=1))
        return torch.cat(found)

    def gradients(self, coefficient: Scalar) -> Tensor:
        coefficient = self._pairs.factor(coefficient) * torch.ones_like(self._pull)
        gradient = torch.zeros_like(self._z[:, self._own])
        for view in range(len(gradient)):
            for rows, y, s, same in self._blocks(view):
                a = self._weighted(s, view, rows, coefficient).masked_fill_(same, 0)
                gradient[view, rows.start - self._own.start : rows.stop - self._own.start] = a @ y
        pull_positives(gradient, self._z[:, self._own], (coefficient * self._pull)[self._own], self._pairs.directions)
        return gradient

    def _weighted(self, s: Tensor, view: int, rows: slice, coefficient: Tensor) -> Tensor:
        """Return ``c_i w_ij + c_j w_ji`` of a block; a term is left out if its side of the block has no anchors."""
        values, directions = torch.stack([self._scale, self._bias, coefficient]), self._pairs.directions
        total = torch.zeros_like(s)
        if view < directions:
            scale, bias, c = values[:, rows, view, None]
            total += c * torch.sigmoid(s * scale + bias)
        of_others = zip(self._others(view), s.split(len(coefficient), 1), total.split(len(coefficient), 1), strict=True)
        for other, theirs, part in of_others:
            if other < directions:
                scale, bias, c = values[:, :, other]
                part += c * torch.sigmoid(theirs * scale + bias)
        return total


class SigmoidNormalizer(Normalizer):
    r"""Pairwise sigmoid loss (SigLIP): every pair of an anchor and a candidate is a binary classification.

    Example:
        >>> import torch, compopt
        >>> sigmoid, tau = compopt.SigmoidNormalizer(bias=-2.0), compopt.FixedTemperature(0.1)
        >>> est = compopt.ContrastiveEstimator(sigmoid, tau, multiply_tau=False)
        >>> est(*torch.randn(2, 8, 4, requires_grad=True)).backward()

    .. math::
        \alpha_i = \log(1 + e^{-s_{ii} / \tau_i - b}) + \sum_{j \in N_i} \log(1 + e^{s_{ij} / \tau_i + b}), \qquad
        w_{ij} = \sigma(s_{ij} / \tau_i + b)

    The weight of the positive is ``sigma(-s_ii / tau_i - b)``. Nothing is normalised: ``alpha_i`` is the loss of all
    pairs of an anchor, and the value is the mean of ``alpha_i``. ``N_i`` contains the samples with another index and
    other labels, so that known duplicates are not negatives; an anchor without negatives contributes nothing, as with
    every normalizer. With ``multiply_tau=False`` the value is that of the paper.

    Args:
        bias: ``b``. The default -10 takes into account that few pairs of a large batch are positive.
        learn: make ``b`` a parameter, part of ``est.parameters()``, for the user's optimizer.
        dtype: dtype of that parameter.

    Hyper-parameters: ``bias``, unless it is learned.

    State: the parameter ``bias``, 0-d, with ``learn=True``. Communicates one all-gather of 3 floats per sample and
    direction; every rank receives the whole gradient of a learned bias.

    Metrics: ``effective_negatives``, from the weights ``w_ij`` of this rank's anchors.

    Cost: similarities are computed once per direction for the sums and once per view for the gradients, in blocks of
    ``chunk_size`` rows, or 1,024, whose memory is ``O(chunk_size x B)`` for ``B`` samples on all ranks.

    Raises:
        TypeError: ``bias`` is not a number, ``learn`` is neither True nor False.
        ValueError: a policy of pairs, or a :class:`~compopt.TemperatureDual`; ``negatives`` at the call.

    References:
        Zhai et al., Sigmoid Loss for Language Image Pre-Training, ICCV 2023, eq. 1 and Algorithm 1.
    """

    sums = False  # SigmoidPairs computes its own

    def __init__(self, bias: float = -10.0, learn: bool = False, dtype: torch.dtype = torch.float32) -> None:
        checks.flag("learn", learn)
        super().__init__(None, {} if learn else {"bias": bias})
        if learn:
            value = torch.tensor(checks.number("bias", bias), dtype=dtype, device="cpu")
            self.learnable = torch.nn.Module()
            self.learnable.bias = torch.nn.Parameter(value)

    @property
    def bias(self) -> torch.nn.Parameter | None:
        """Learned bias, 0-d; ``None`` if nothing is learned."""
        return None if self.learnable is None else cast(torch.nn.Parameter, self.learnable.bias)

    def described(self) -> dict[str, Any]:
        return {} if self.bias is None else {"bias": f"{self.bias.item():.6g} (learned)"}

    def check(self, group: Mapping[str, Any]) -> None:
        if "bias" in group:
            checks.number("bias", group["bias"])

    def check_negatives(self) -> None:
        raise ValueError("negatives= must be left out: SigmoidNormalizer has the batch alone as candidates")

    def check_pairs(self, policy: PairPolicy) -> None:
        if policy != NO_POLICY:
            raise ValueError(
                f"pairs={policy} weights the terms of a normalizer, and a sigmoid per pair has none; leave it out, and "
                f"pass labels= for duplicates"
            )

    def check_temperature(self, temperature: Temperature) -> None:
        if temperature.learns:
            raise ValueError(
                f"{type(temperature).__name__} requires normalised pair weights, which a SigmoidNormalizer lacks; "
                f"use FixedTemperature(learn=True)"
            )

    def estimate(self, call: Call) -> Estimate:
        batch, bias = call.batch, call.hyper("bias") if self.bias is None else self.bias
        weights = SigmoidPairs(call.pairs, batch, call.tau, bias, call.chunk_size, self._ranks)
        learned = [] if self.bias is None else [(self.bias, weights.slope)]
        effective = partial(effective_number, weights.total, weights.squares)
        return Estimate(weights.alpha, weights=weights, learned=learned, metrics={"effective_negatives": effective})

    def stored(
        self, rows: Mapping[str, Tensor], features: tuple[Tensor, Tensor], tau: float | Tensor, hyper: Hyper
    ) -> Tensor:
        raise ValueError("SigmoidNormalizer estimates no log-normalizer that could be compared with the exact one")
