"""The loss of an update: of one batch, or of the window of batches that ``--accum-freq`` makes."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor, nn

from compopt.contrastive import ContrastiveEstimator
from compopt.kernel.features import with_gradients


class Window:
    r"""Calls of the estimator, one for each update of the model.

    open_clip accumulates by features: it encodes ``k`` batches without a graph, then each of them again, and asks for
    the loss ``k`` times, of all features of the window with the graph of one batch. The estimator is called the first
    time only, with the whole window. Its gradient is handed to autograd as it is: what a loss is asked for with the
    graph of batch ``j`` takes the part of the gradient that is this batch's, so that the ``k`` backward passes give the
    gradient of the window once, and its samples are deposited once.

    Args:
        batches: ``k``.
        tau_of_model: the temperature is ``1 / logit_scale``, learned with the model.

    Attributes:
        est: the estimator; set when the data are known.
        indices: of the batches that were taken from the loader since the last update; empty without an index.
        updates: windows since the epoch began.
    """

    def __init__(self, batches: int, tau_of_model: bool) -> None:
        self.batches, self.tau_of_model = batches, tau_of_model
        self.est: ContrastiveEstimator | None = None
        self.indices: deque[Tensor] = deque()
        self.begin()

    def begin(self) -> None:
        """Forget an unfinished window: a new epoch begins."""
        self.updates, self._asked = 0, 0
        self._value: Tensor | None = None
        self._gradients: tuple[Tensor, ...] = ()
        self.indices.clear()

    def loss(self, z1: Tensor, z2: Tensor, scale: Tensor) -> Tensor:
        """What open_clip's loss is asked for.

        Args:
            z1, z2: features of the window, ``(k B, d)``.
            scale: the model's ``1/tau``, one number.

        Returns:
            0-d; the estimated objective of the window, each time.
        """
        if self.batches == 1:
            value = self._estimate(z1, z2, scale)
            self.updates += 1
            return value
        inputs = (z1, z2, scale) if self.tau_of_model else (z1, z2)
        if self._asked == 0:
            self._look(inputs, scale)
        assert self._value is not None  # _look sets it
        self._asked += 1
        if self._asked == self.batches:
            self._asked, self.updates = 0, self.updates + 1
        pairs = zip(inputs, self._gradients, strict=True)
        return with_gradients(self._value, [(z, g) for z, g in pairs if z.requires_grad])

    def _look(self, inputs: tuple[Tensor, ...], scale: Tensor) -> None:
        """Value and gradients of the whole window; in float32, since a scaler multiplies them later."""
        with torch.enable_grad():
            leaves = [z.detach().to(torch.promote_types(z.dtype, torch.float32)).requires_grad_() for z in inputs]
            value = self._estimate(leaves[0], leaves[1], leaves[2] if self.tau_of_model else scale)
            gradients = list(torch.autograd.grad(value, leaves))
        if self.tau_of_model:  # each of the k passes brings the scale along
            gradients[2] = gradients[2] / self.batches
        self._value, self._gradients = value.detach(), tuple(gradients)

    def _estimate(self, z1: Tensor, z2: Tensor, scale: Tensor) -> Tensor:
        if self.est is None:
            raise RuntimeError("the loss was asked for before open_clip made its data; there is no estimator yet")
        index = None
        if self.indices:
            index = torch.cat([self.indices.popleft() for _ in range(self.batches)])
        tau = 1 / scale.float().reshape(()) if self.tau_of_model else None
        return self.est(z1, z2, index, tau=tau)


class EstimatorLoss(nn.Module):
    """What open_clip takes for its loss; it has no parameters.

    Args:
        window: who knows the estimator.
    """

    def __init__(self, window: Window) -> None:
        super().__init__()
        self.window = window

    @torch.compiler.disable
    def forward(
        self, image_features: Tensor, text_features: Tensor, logit_scale: Tensor, output_dict: bool = False
    ) -> dict[str, Tensor] | Tensor:
        """The loss, under the name that open_clip's has."""
        loss = self.window.loss(image_features, text_features, logit_scale)
        return {"contrastive_loss": loss} if output_dict else loss

    def extra_repr(self) -> str:
        return repr(self.window.est)


def temperature(est: ContrastiveEstimator) -> float | None:
    """The temperature to show in the model's scale: a constant; a learned one's median over the last batch.

    Before the first batch it is the initial one, and after a resume nothing: the checkpoint's scale stays.
    """
    group: Any = est.sample_groups[0]
    if not est.temperature.learns:
        return float(group["tau"])
    median = est.metrics.get("tau_median")
    if median is not None:
        return median.item()
    return float(group["tau_init"]) if est.t == 0 else None
