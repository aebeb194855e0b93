"""Measure the time that each estimator adds to a training step as long as that of CLIP's ViT-B/32 at batch 512."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import compopt
from benchmarks.gpu.losses import PRECISIONS, clip_loss, precision
from benchmarks.gpu.machine import Action, Machine, with_peaks


class Tower(nn.Module):
    """Transformer with the shape of one of ViT-B/32's towers, from tokens to features of dimension ``d``."""

    def __init__(self, tokens: int, width: int, heads: int, layers: int, d: int, device: torch.device) -> None:
        super().__init__()
        self.shape = tokens, width
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True, device=device
        )
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, d, device=device)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x)[:, 0])


Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def losses(n: int, d: int) -> dict[str, Any]:
    """Return the estimators, and the two losses that they are compared with."""
    theirs = clip_loss()[1]
    return {
        "no loss (a sum)": lambda z1, z2, index: z1.float().sum() * 1e-6 + z2.float().sum() * 1e-6,
        "ClipLoss": lambda z1, z2, index: theirs(z1, z2),
        "InfoNCE": compopt.InfoNCEEstimator(0.07),
        "CLIP (learned tau)": compopt.InfoNCEEstimator(0.07, learn_tau=True, multiply_tau=False),
        "DCL": compopt.DCLEstimator(0.07),
        "SogCLR": compopt.SogCLREstimator(n),
        "SogCLR, host": compopt.SogCLREstimator(n, offload="cpu"),
        "iSogCLR": compopt.ISogCLREstimator(n, rho=1.0),
        "FastCLIP v3": compopt.FastCLIPEstimator(n, "v3", rho=6.0),
        "NeuCLIP": compopt.NeuCLIPEstimator(
            d, prototypes=64 if d < 512 else 4096, learn_tau=False, through_alpha=False
        ),
        "EMC2": compopt.EMC2Estimator(n, tau=0.2),
    }


class Training:
    """Encoders, an optimizer and a batch; :meth:`step` makes one training step."""

    def __init__(self, machine: Machine) -> None:
        device, small = machine.device, machine.small
        self.B, self.d, self.n = (16, 32, 200) if small else (512, 512, 3_000_000)
        layers = 1 if small else 12
        self.image = Tower(5 if small else 50, 32 if small else 768, 2 if small else 12, layers, self.d, device)
        self.text = Tower(5 if small else 77, 32 if small else 512, 2 if small else 8, layers, self.d, device)
        self._x = [torch.randn(self.B, *tower.shape, device=device) for tower in (self.image, self.text)]
        generator = torch.Generator().manual_seed(0)
        self._index = [torch.randint(self.n, (self.B,), generator=generator) for _ in range(16)]
        # the learning rate is 0, so that every loss gets the same weights
        parameters = [*self.image.parameters(), *self.text.parameters()]
        self._optimizer = torch.optim.AdamW(parameters, lr=0.0, foreach=True)
        self._device, self._number = device, 0

    def step(self, loss: Any) -> None:
        index = self._index[self._number % len(self._index)]
        self._number += 1
        with torch.autocast(self._device.type, dtype=torch.bfloat16):
            z1, z2 = self.image(self._x[0]), self.text(self._x[1])
        loss(z1.float(), z2.float(), index).backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        if isinstance(loss, compopt.Estimator):
            loss.step()


def measure(machine: Machine, seconds: float) -> dict[str, Any]:
    """Measure the seconds and the peak memory of a step with each loss."""
    if machine.time_is_up("steps"):
        return {}
    training = Training(machine)

    def one(loss: Any) -> Action:
        return lambda: training.step(loss)

    runs = {name: one(loss) for name, loss in losses(training.n, training.d).items()}
    with precision(PRECISIONS["TF32"][0]):
        found = with_peaks(machine, runs, seconds, 3 if machine.small else 30, "steps")
    return {"B": training.B, "d": training.d, "n": training.n, "rows": found}
