"""Where ours and another package implement the same method: are the gradients the same, and the training curves?

    python -m benchmarks.history.peers.twins    # writes results/peers_twins.md, .json and .png (a quarter of an hour)

First gradients: both see the same features at the same settings, visit after visit; the state each has kept by then is
part of the comparison. Both are also compared with ours in float64. Then training on glyphs (``curves.py``), both from
the same weights over the same batches. Rounding alone makes two runs part: the yardstick is ours against ours with the
similarity matrix summed in another order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

import compopt
from benchmarks.history.peers import curves, losses
from benchmarks.history.peers.curves import ROUNDED, WHOLE, Case
from benchmarks.history.peers.gradients import GAMMA, TAU, N, features, rescaled
from benchmarks.saved import HISTORY, save
from recipes import methods
from recipes.report import heading, table

BATCH, DIM, VISITS = 64, 128, 10
PAIRS = {"clip": "open_clip-clip", "sogclr": "libauc-sogclr", "isogclr": "libauc-isogclr"}  # the curves'
MILD, LOW = {"tau_min": 0.01, "tau_max": 0.5}, {"tau_min": 0.005, "tau_max": 0.05}
Call = Callable[[Tensor, Tensor, Tensor], None]


def _ours(make: Callable[..., compopt.ContrastiveEstimator], **options: Any) -> Callable[[], Call]:
    def build() -> Call:
        est = make(**options)

        def call(z1: Tensor, z2: Tensor, index: Tensor) -> None:
            est(z1, z2, index).backward()
            est.step()

        return call

    return build


def _theirs(make: Callable[..., losses.Loss], *args: Any, **options: Any) -> Callable[[], Call]:
    def build() -> Call:
        loss = make(*args, **options)
        return lambda z1, z2, index: loss(z1, z2, index).backward()

    return build


def _sogclr(**options: Any) -> Callable[[], Call]:
    return _ours(compopt.SogCLREstimator, n=N, gamma=GAMMA, tau=TAU, **options)


def _isogclr(tau: float, rho: float, **bounds: float) -> Callable[[], Call]:
    return _ours(compopt.ISogCLREstimator, n=N, gamma=GAMMA, rho=rho, tau_init=tau, lr=0.01, **bounds)


def _gcl(tau: float, rho: float, **bounds: float) -> Callable[[], Call]:
    return _theirs(losses.gcl_bimodal, N, tau, GAMMA, individual=True, rho=rho, eta=0.01, **bounds)


TWINS: dict[str, tuple[Callable[[], Call], Callable[[], Call]]] = {
    "InfoNCE, CLIP's; open_clip ClipLoss": (_ours(compopt.InfoNCEEstimator, tau=TAU), _theirs(losses.clip, TAU)),
    "the same; sentence-transformers Cached...RankingLoss": (
        _ours(compopt.InfoNCEEstimator, tau=TAU),
        _theirs(losses.cached_ranking, TAU),
    ),
    "InfoNCE, two views; metric-learning NTXentLoss": (
        _ours(compopt.InfoNCEEstimator, tau=TAU, mode="unimodal"),
        _theirs(losses.nt_xent, TAU),
    ),
    "the same; metric-learning SupConLoss": (
        _ours(compopt.InfoNCEEstimator, tau=TAU, mode="unimodal"),
        _theirs(losses.sup_con, TAU),
    ),
    'SogCLR, `reference="positive"`; LibAUC GCLoss_v2': (
        _sogclr(reference="positive"),
        _theirs(losses.gcl_bimodal, N, TAU, GAMMA),
    ),
    'SogCLR, `reference="none"` (the paper\'s); the same': (_sogclr(), _theirs(losses.gcl_bimodal, N, TAU, GAMMA)),
    "SogCLR, two views; LibAUC GCLoss_v1": (
        _sogclr(mode="unimodal"),
        _theirs(losses.gcl_unimodal, N, TAU, GAMMA),
    ),
    "iSogCLR, tau 0.1 within 0.01 to 0.5, rho 1; GCLoss_v2, individual": (
        _isogclr(0.1, 1.0, **MILD),
        _gcl(0.1, 1.0, **MILD),
    ),
    "iSogCLR, tau 0.03 within 0.005 to 0.05, rho 3; the same": (
        _isogclr(0.03, 3.0, **LOW),
        _gcl(0.03, 3.0, **LOW),
    ),
    "with `max_grad=1e6`; the same": (_isogclr(0.03, 3.0, **LOW, max_grad=1e6), _gcl(0.03, 3.0, **LOW)),
}


def gradients(build: Callable[[], Call], dtype: torch.dtype = torch.float32) -> list[np.ndarray]:
    """The gradients of every visit."""
    call, found = build(), []
    for visit in range(VISITS):
        z1, z2, index = features(BATCH, DIM, visit)
        a, b = z1.to(dtype).requires_grad_(), z2.to(dtype).requires_grad_()
        call(a, b, index)
        assert a.grad is not None
        assert b.grad is not None
        found.append(torch.cat([a.grad, b.grad]).double().numpy())
    return found


def compare(name: str) -> dict[str, Any]:
    """Compare a pair: the errors of the first and of the last visit, and the worst against float64."""
    ours, theirs = TWINS[name]
    exact, own, other = gradients(ours, torch.float64), gradients(ours), gradients(theirs)
    pairs = [rescaled(a, b) for a, b in zip(own, other, strict=True)]
    worst = {
        side: max(rescaled(a, b)[1] for a, b in zip(found, exact, strict=True))
        for side, found in (("ours", own), ("theirs", other))
    }
    return {"name": name, "factor": pairs[0][0], "first": pairs[0][1], "last": pairs[-1][1], "exact": worst}


def training(seeds: list[int], workers: int, limit: int) -> tuple[list[dict[str, Any]], dict[Case, list], str]:
    """Train the pairs: R@1 and the gaps of the curves, to theirs and to ours rounded otherwise; curves; commits."""
    cases = [Case(m, WHOLE, seed, limit) for pair in PAIRS.items() for m in pair for seed in seeds]
    cases += [Case(m, ROUNDED, seed, limit) for m in PAIRS for seed in seeds]
    runs = curves.collected(cases, workers)
    found = []
    for ours, theirs in PAIRS.items():
        three = [[runs[Case(*what, seed, limit)] for seed in seeds] for what in _three(ours, theirs)]
        r1 = [[100 * curve[-1]["r1"] for curve in each] for each in three]
        gaps = [[100 * curves.gap(a, b, "r1") for a, b in zip(three[0], each, strict=True)] for each in three[1:]]
        found.append({"name": ours, "r1": r1, "gap": gaps})
    return found, runs, curves.commits(cases)


def _three(ours: str, theirs: str) -> list[tuple[str, str]]:
    return [(ours, WHOLE), (theirs, WHOLE), (ours, ROUNDED)]


def lines(twins: list[dict[str, Any]], found: list[dict[str, Any]]) -> list[str]:
    """Both tables."""
    cells = [
        [t["name"], f"{t['factor']:.4g}"] + [f"{e:.1e}" for e in (t["first"], t["last"], *t["exact"].values())]
        for t in twins
    ]
    head = [
        "ours; theirs",
        "factor",
        "first visit",
        f"visit {VISITS}",
        "ours to ours in float64",
        "theirs to ours in float64",
    ]
    body = []
    for f in found:
        r1 = [" ".join(f"{value:.1f}" for value in values) for values in f["r1"]]
        gaps = [" ".join(f"{value:.1f}" for value in values) for values in f["gap"]]
        body.append([methods.METHODS[f["name"]].title, *r1, *gaps])
    titles = ["", "R@1 ours", "theirs", "ours, summed in another order", "largest gap to theirs", "to the other order"]
    return [
        f"Relative error of the gradient after the best common factor, B = {BATCH}, d = {DIM}. A factor is what an",
        "optimizer as Adam does not notice: LibAUC's sums over B - 1 negatives where the equations average.",
        "",
        table(head, cells),
        "",
        "Training, R@1 image to name in percent at the end by seed, and the largest gap of the curves, looked at every",
        f"{curves.EVERY} steps.",
        "",
        table(titles, body),
        "",
    ]


def panels(runs: dict[Case, list], seed: int) -> list[list[tuple]]:
    """The curves of one seed, a panel for each method."""
    found = []
    for ours, theirs in PAIRS.items():
        labels = (methods.METHODS[ours].title, methods.METHODS[theirs].title, "ours, other order")
        three = zip(labels, ("-", "--", ":"), (4, 5, 0), _three(ours, theirs), strict=True)
        found.append([(label, style, colour, runs[Case(*what, seed)]) for label, style, colour, what in three])
    return found


def main() -> None:
    args, env = curves.begin(__doc__)
    twins = [compare(name) for name in TWINS]
    found, runs, commits = training(args.seeds, args.workers, args.limit)
    text = "\n".join(
        [*heading("The same method twice: ours and the other packages'", env), *lines(twins, found), commits]
    )
    print(text)
    if not args.limit:
        save("peers_twins", text, env, {"gradients": twins, "runs": found}, HISTORY)
        curves.draw(panels(runs, args.seeds[0]), HISTORY / "peers_twins.png")


if __name__ == "__main__":
    main()
