"""What is lost when a run is stopped and resumed by way of ``state_dict()``.

    python -m benchmarks.history.peers.resume    # writes results/peers_resume.md, .json and .png (a quarter of an hour)

First the next gradient: every loss that keeps something is trained for a few visits, its ``state_dict()`` is loaded
into a new one, and both see the same batch. Then SogCLR and iSogCLR on glyphs, LibAUC's and ours, undisturbed and
stopped after the first of two epochs: model, optimizer, schedule and data order come back exactly in all of them, so
that only what the loss keeps can differ. LibAUC's documentation does not show a resume; its maintainers, asked for one
(LibAUC's issue 64), advise to pickle the whole loss, which is measured too.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import compopt
from benchmarks.history.peers import curves, losses, packages
from benchmarks.history.peers.curves import STOPPED, WHOLE, Case
from benchmarks.history.peers.gradients import GAMMA, TAU, N, features, rescaled
from benchmarks.saved import HISTORY, save
from recipes import methods
from recipes.report import heading, table

METHODS = ("sogclr", "libauc-sogclr", "isogclr", "libauc-isogclr")
BATCH, DIM, VISITS = 64, 128, 6
Loss = Callable[[Any, Tensor, Tensor, Tensor], Tensor]  # (what keeps the state, z1, z2, index) -> loss


def _est(est: compopt.ContrastiveEstimator, z1: Tensor, z2: Tensor, index: Tensor) -> Tensor:
    loss = est(z1, z2, index)
    est.step()
    return loss


def _gcl_bimodal(loss: Any, z1: Tensor, z2: Tensor, index: Tensor) -> Tensor:
    return loss(F.normalize(z1, dim=1), F.normalize(z2, dim=1), index)[0]


def _gcl_unimodal(loss: Any, z1: Tensor, z2: Tensor, index: Tensor) -> Tensor:
    return loss(z1, z2, index)


def _memory(loss: Any, z1: Tensor, z2: Tensor, index: Tensor) -> Tensor:
    enqueue = torch.arange(2 * len(z1)) >= len(z1)
    return loss(torch.cat([z1, z2]), index.repeat(2), enqueue_mask=enqueue)


def _cross_batch() -> Any:
    package = packages.metric_learning()
    return package.CrossBatchMemory(package.NTXentLoss(temperature=TAU), DIM, memory_size=4 * BATCH)


STATEFUL: dict[str, tuple[Callable[[], Any], Loss]] = {
    "compopt SogCLR": (lambda: compopt.SogCLREstimator(N, GAMMA, tau=TAU), _est),
    "compopt iSogCLR": (
        lambda: compopt.ISogCLREstimator(N, GAMMA, rho=1.0, tau_init=TAU, tau_min=0.01, tau_max=0.5),
        _est,
    ),
    "compopt NeuCLIP": (lambda: compopt.NeuCLIPEstimator(DIM, tau=TAU, prototypes=256), _est),
    "compopt EMC2": (lambda: compopt.EMC2Estimator(N, tau=TAU, burn_in=0.5), _est),
    "LibAUC GCLoss_v2": (lambda: losses.gcl_bimodal_object(N, TAU, GAMMA), _gcl_bimodal),
    "LibAUC GCLoss_v2, individual": (
        lambda: losses.gcl_bimodal_object(N, TAU, GAMMA, individual=True),
        _gcl_bimodal,
    ),
    "LibAUC GCLoss_v1": (lambda: losses.gcl_unimodal(N, TAU, GAMMA), _gcl_unimodal),
    "LibAUC GCLoss_v1, individual": (lambda: losses.gcl_unimodal(N, TAU, GAMMA, individual=True), _gcl_unimodal),
    "metric-learning CrossBatchMemory": (_cross_batch, _memory),
}


def next_gradient(name: str) -> dict[str, Any]:
    """Compare the next gradient after a resume with that of the undisturbed loss.

    The result has the relative error, the factor that was taken out, how many tensors ``state_dict()`` kept, and the
    error where the whole object was pickled instead.
    """
    build, call = STATEFUL[name]
    torch.manual_seed(0)
    loss = build()
    for visit in range(VISITS):
        _gradient(loss, call, visit)
    resumed = build()
    resumed.load_state_dict(_stored(loss.state_dict()))
    both = [loss, resumed, _stored(loss)]
    if hasattr(loss, "adjust_gamma"):  # as in an epoch after the first, in which all are then
        for each in both:
            packages.quiet(each.adjust_gamma, 1)
    wanted, found = (_gradient(each, call, VISITS).numpy() for each in both[:2])
    factor, error = rescaled(found, wanted)
    try:
        pickled = f"{rescaled(_gradient(both[2], call, VISITS).numpy(), wanted)[1]:.1e}"
    except RuntimeError as refused:  # LibAUC's GCLoss_v1 keeps a graph in its table
        pickled = f"fails: {str(refused).splitlines()[0]}"
    kept = len(_tensors(loss.state_dict()))
    return {"name": name, "tensors": kept, "factor": factor, "error": error, "pickled": pickled}


def _stored(value: Any) -> Any:
    """Save a value to a file in memory, and load it."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def _gradient(loss: Any, call: Loss, visit: int) -> Tensor:
    z1, z2, index = features(BATCH, DIM, visit)
    a, b = z1.clone().requires_grad_(), z2.clone().requires_grad_()
    call(loss, a, b, index).backward()
    return torch.cat([a.grad, torch.zeros_like(b) if b.grad is None else b.grad])


def _tensors(state: Any) -> list[Tensor]:
    if isinstance(state, Tensor):
        return [state]
    entries = state.values() if isinstance(state, dict) else state if isinstance(state, list | tuple) else ()
    return [tensor for entry in entries for tensor in _tensors(entry)]


def lines(runs: dict[Case, list[dict[str, float]]], seeds: list[int], limit: int) -> tuple[str, list[dict]]:
    """R@1 at the end, and how far the resumed run is from the other on the way."""
    rows, found = [], []
    for method in METHODS:
        whole, stopped = ([runs[Case(method, how, seed, limit)] for seed in seeds] for how in (WHOLE, STOPPED))
        r1 = [[100 * curve[-1]["r1"] for curve in each] for each in (whole, stopped)]
        gaps = [max(curves.gap(a, b, field) for a, b in zip(whole, stopped, strict=True)) for field in ("loss", "r1")]
        cells = [" ".join(f"{value:.1f}" for value in values) for values in r1]
        rows.append([methods.METHODS[method].title, *cells, f"{gaps[0]:.3g}", f"{100 * gaps[1]:.1f}"])
        found.append({"name": method, "undisturbed": r1[0], "resumed": r1[1], "loss": gaps[0], "r1": gaps[1]})
    head = ["", "R@1 undisturbed (%)", "R@1 resumed (%)", "largest difference of the loss", "of R@1, points"]
    return table(head, rows), found


def panels(runs: dict[Case, list], seed: int) -> list[list[tuple]]:
    """The curves of one seed: LibAUC's and ours, undisturbed and resumed."""

    def entry(number: int, method: str, how: str) -> tuple:
        label = methods.METHODS[method].title + ", resumed" * (how == STOPPED)
        return label, "-" if how == WHOLE else ":", 4 + number, runs[Case(method, how, seed)]

    pairs = (METHODS[:2], METHODS[2:])
    return [[entry(*one, how) for one in enumerate(pair) for how in (WHOLE, STOPPED)] for pair in pairs]


def main() -> None:
    args, env = curves.begin(__doc__)
    gradients = [next_gradient(name) for name in STATEFUL]
    cases = [
        Case(method, how, seed, args.limit) for method in METHODS for how in (WHOLE, STOPPED) for seed in args.seeds
    ]
    runs = curves.collected(cases, args.workers)
    body, found = lines(runs, args.seeds, args.limit)
    kept = [[g["name"], str(g["tensors"]), f"{g['factor']:.3g}", f"{g['error']:.1e}", g["pickled"]] for g in gradients]
    text = "\n".join(
        [
            *heading("Stopped and resumed", env),
            f"The next gradient after a resume, B = {BATCH}, d = {DIM}, {VISITS} visits before: relative error",
            "after the best common factor, which an optimizer as Adam does not notice.",
            "",
            table(["", "tensors in state_dict()", "factor", "error", "whole object pickled"], kept),
            "",
            f"Glyphs, batch {curves.BATCH}, two epochs, stopped after the first; seeds {args.seeds}, in this order.",
            curves.commits(cases),
            "",
            body,
        ]
    )
    print(text)
    if not args.limit:
        save("peers_resume", text, env, {"gradients": gradients, "runs": found}, HISTORY)
        curves.draw(panels(runs, args.seeds[0]), HISTORY / "peers_resume.png")


if __name__ == "__main__":
    main()
