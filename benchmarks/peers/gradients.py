"""Compare our gradients with those of other packages, for the same method and after a resume.

    python -m benchmarks.peers.gradients    # writes benchmarks/results/peers_gradients.md

*Twins*: both packages get the same features and settings at every visit, so that the comparison includes the state
that each has accumulated. Both are also compared with ours in float64.

*Resume*: a loss with state is trained for a few visits, its ``state_dict()`` is loaded into a new one, and both get the
same batch. LibAUC's maintainers advise pickling the whole loss (LibAUC's issue 64), which is measured too.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import compopt
from benchmarks.peers import losses, packages
from benchmarks.report import environment, finish, table

N, TAU, GAMMA = 512, 0.1, 0.5  # number of samples, and hyper-parameters of the losses
BATCH, DIM, VISITS, BEFORE = 64, 128, 10, 6
MILD, LOW = {"tau_min": 0.01, "tau_max": 0.5}, {"tau_min": 0.005, "tau_max": 0.05}
Call = Callable[[Any, Tensor, Tensor, Tensor], Tensor]  # (object with the state, z1, z2, index) -> loss
Build = Callable[[], Any]


def features(batch: int, dim: int, visit: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return z1, z2 and the index of the whole batch; visits differ slightly, as in training."""
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(2, batch, dim, generator=generator, dtype=torch.float64)
    drift = torch.randn(2, batch, dim, generator=generator.manual_seed(visit + 1), dtype=torch.float64)
    z1, z2 = F.normalize(base + 0.3 * drift, dim=2).float()
    return z1, z2, torch.randperm(N, generator=generator.manual_seed(0))[:batch]


def relative(found: np.ndarray, wanted: np.ndarray) -> float:
    """Return the norm of the difference, divided by the norm of ``wanted``."""
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


def rescaled(found: np.ndarray, wanted: np.ndarray) -> tuple[float, float]:
    """Return the factor that best scales ``found`` to ``wanted``, and the remaining error, which affects Adam."""
    factor = float((found * wanted).sum() / np.square(found).sum())
    return factor, relative(factor * found, wanted)


def estimator_call(est: compopt.ContrastiveEstimator, z1: Tensor, z2: Tensor, index: Tensor) -> Tensor:
    loss = est(z1, z2, index)
    est.step()
    return loss


def plain_call(loss: Any, z1: Tensor, z2: Tensor, index: Tensor) -> Tensor:
    return loss(z1, z2, index)


def gradient(loss: Any, call: Call, visit: int, dtype: torch.dtype = torch.float32) -> np.ndarray:
    """Return both feature gradients of one visit."""
    z1, z2, index = features(BATCH, DIM, visit)
    a, b = (z.to(dtype).clone().requires_grad_() for z in (z1, z2))
    call(loss, a, b, index).backward()
    return torch.cat([a.grad, torch.zeros_like(b) if b.grad is None else b.grad]).double().numpy()


# -- twins ---------------------------------------------------------------------------------------------------------


def _sogclr(**options: Any) -> Build:
    return lambda: compopt.SogCLREstimator(N, gamma=GAMMA, tau=TAU, **options)


def _isogclr(tau: float, rho: float, **bounds: float) -> Build:
    return lambda: compopt.ISogCLREstimator(N, gamma=GAMMA, rho=rho, tau_init=tau, lr=0.01, **bounds)


def _gcl(tau: float, rho: float, **bounds: float) -> Build:
    return lambda: losses.gcl_bimodal(N, tau, GAMMA, individual=True, rho=rho, eta=0.01, **bounds)


TWINS: dict[str, tuple[Build, Build]] = {
    "InfoNCE, CLIP's; open_clip ClipLoss": (lambda: compopt.InfoNCEEstimator(TAU), lambda: losses.clip(TAU)),
    "the same; sentence-transformers Cached...RankingLoss": (
        lambda: compopt.InfoNCEEstimator(TAU),
        lambda: losses.cached_ranking(TAU),
    ),
    "InfoNCE, two views; metric-learning NTXentLoss": (
        lambda: compopt.InfoNCEEstimator(TAU, mode="unimodal"),
        lambda: losses.nt_xent(TAU),
    ),
    "the same; metric-learning SupConLoss": (
        lambda: compopt.InfoNCEEstimator(TAU, mode="unimodal"),
        lambda: losses.sup_con(TAU),
    ),
    'SogCLR, `reference="positive"`; LibAUC GCLoss_v2': (
        _sogclr(reference="positive"),
        lambda: losses.gcl_bimodal(N, TAU, GAMMA),
    ),
    'SogCLR, `reference="none"` (the paper\'s); the same': (_sogclr(), lambda: losses.gcl_bimodal(N, TAU, GAMMA)),
    "SogCLR, two views; LibAUC GCLoss_v1": (_sogclr(mode="unimodal"), lambda: losses.gcl_unimodal(N, TAU, GAMMA)),
    "iSogCLR, tau 0.1 within 0.01 to 0.5, rho 1; GCLoss_v2, individual": (
        _isogclr(0.1, 1.0, **MILD),
        _gcl(0.1, 1.0, **MILD),
    ),
    "iSogCLR, tau 0.03 within 0.005 to 0.05, rho 3; the same": (_isogclr(0.03, 3.0, **LOW), _gcl(0.03, 3.0, **LOW)),
    "with `max_grad=1e6`; the same": (_isogclr(0.03, 3.0, **LOW, max_grad=1e6), _gcl(0.03, 3.0, **LOW)),
}


def twin(name: str) -> list[str]:
    """Return the factor and the errors of the first and last visit, and the largest error of each against float64."""

    def visits(build: Build, call: Call, dtype: torch.dtype = torch.float32) -> list[np.ndarray]:
        loss = build()
        return [gradient(loss, call, visit, dtype) for visit in range(VISITS)]

    ours, theirs = TWINS[name]
    exact, own = visits(ours, estimator_call, torch.float64), visits(ours, estimator_call)
    other = visits(theirs, plain_call)
    pairs = [rescaled(a, b) for a, b in zip(own, other, strict=True)]
    worst = [max(rescaled(a, b)[1] for a, b in zip(found, exact, strict=True)) for found in (own, other)]
    return [name, f"{pairs[0][0]:.4g}", *(f"{error:.1e}" for error in (pairs[0][1], pairs[-1][1], *worst))]


# -- resume --------------------------------------------------------------------------------------------------------


def _normalized_call(loss: Any, z1: Tensor, z2: Tensor, index: Tensor) -> Tensor:
    return loss(F.normalize(z1, dim=1), F.normalize(z2, dim=1), index)[0]


def _memory_call(loss: Any, z1: Tensor, z2: Tensor, index: Tensor) -> Tensor:
    enqueue = torch.arange(2 * len(z1)) >= len(z1)
    return loss(torch.cat([z1, z2]), index.repeat(2), enqueue_mask=enqueue)


def _cross_batch() -> Any:
    package = packages.metric_learning()
    return package.CrossBatchMemory(package.NTXentLoss(temperature=TAU), DIM, memory_size=4 * BATCH)


STATEFUL: dict[str, tuple[Build, Call]] = {
    "compopt SogCLR": (_sogclr(), estimator_call),
    "compopt iSogCLR": (_isogclr(TAU, 1.0, **MILD), estimator_call),
    "compopt NeuCLIP": (
        lambda: compopt.NeuCLIPEstimator(DIM, tau=TAU, prototypes=256, learn_tau=False, through_alpha=False),
        estimator_call,
    ),
    "compopt EMC2": (lambda: compopt.EMC2Estimator(N, tau=TAU, burn_in=0.5), estimator_call),
    "LibAUC GCLoss_v2": (lambda: losses.gcl_bimodal_object(N, TAU, GAMMA), _normalized_call),
    "LibAUC GCLoss_v2, individual": (
        lambda: losses.gcl_bimodal_object(N, TAU, GAMMA, individual=True),
        _normalized_call,
    ),
    "LibAUC GCLoss_v1": (lambda: losses.gcl_unimodal(N, TAU, GAMMA), plain_call),
    "LibAUC GCLoss_v1, individual": (lambda: losses.gcl_unimodal(N, TAU, GAMMA, individual=True), plain_call),
    "metric-learning CrossBatchMemory": (_cross_batch, _memory_call),
}


def resumed(name: str) -> list[str]:
    """Return factor and error of the next gradient after a resume, and its error after pickling the whole object."""
    build, call = STATEFUL[name]
    torch.manual_seed(0)
    loss, again = build(), build()
    for visit in range(BEFORE):
        gradient(loss, call, visit)
    again.load_state_dict(_stored(loss.state_dict()))
    whole = _stored(loss)
    if hasattr(loss, "adjust_gamma"):  # all three are then in an epoch after the first
        for each in (loss, again, whole):
            packages.quiet(each.adjust_gamma, 1)
    wanted = gradient(loss, call, BEFORE)
    factor, error = rescaled(gradient(again, call, BEFORE), wanted)
    try:
        pickled = f"{rescaled(gradient(whole, call, BEFORE), wanted)[1]:.1e}"
    except RuntimeError as refused:  # LibAUC's GCLoss_v1 keeps a graph in its table
        pickled = f"fails: {str(refused).splitlines()[0]}"
    return [name, f"{factor:.3g}", f"{error:.1e}", pickled]


def _stored(value: Any) -> Any:
    """Return a copy of a value, made by ``torch.save`` and ``torch.load``."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def main() -> None:
    torch.set_num_threads(1)
    env = {**environment(), **packages.versions()}
    twins, after = [twin(name) for name in TWINS], [resumed(name) for name in STATEFUL]
    head = ["ours; theirs", "factor", "first visit", f"visit {VISITS}", "ours to float64", "theirs to float64"]
    parts = [
        f"Relative error of the gradient after multiplication by the best common factor, B = {BATCH}, d = {DIM}. Such "
        "a factor does not change the updates of Adam. For example, losses of LibAUC sum over B - 1 negatives where "
        "the equations average.",
        table(head, twins),
        f"## After a resume\n\nError of the next gradient after {BEFORE} visits and a resume.",
        table(["", "factor", "error with state_dict()", "whole object pickled"], after),
    ]
    finish("peers_gradients", "Gradients compared with other packages", env, parts, {"twins": twins, "resumed": after})


if __name__ == "__main__":
    main()
