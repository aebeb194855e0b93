"""Compare non-contrastive losses with LibAUC's: gradients, a resume, time per step, and the metric after training.

    python -m benchmarks.peers.compositional    # writes benchmarks/results/peers_compositional.md

Both packages get the same scores, labels and batches. LibAUC's moving averages start at 0 and ours at the first value;
therefore LibAUC uses ``gamma = 1`` here at the first visit of every sample.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from sklearn.datasets import make_classification
from sklearn.metrics import average_precision_score, roc_auc_score
from torch import Tensor

from benchmarks.peers import packages
from benchmarks.peers.gradients import relative, rescaled
from benchmarks.report import environment, finish, table
from compopt import losses

N, BATCH, VISITS = 512, 64, 10
GAMMA, MARGIN, TAU, TAU_POSITIVE, MAX_FPR, LR = 0.5, 0.8, 0.7, 1.3, 0.3, 0.1
Build = Callable[[int], Any]

TWINS: dict[str, tuple[Build, Build]] = {
    "average precision; APLoss": (
        lambda n: losses.AveragePrecisionLoss(n, GAMMA, MARGIN),
        lambda n: _auc("APLoss", n, gamma=GAMMA, margin=MARGIN),
    ),
    "one-way partial AUC, KL; pAUC_DRO_Loss": (
        lambda n: losses.PartialAUCLoss(n, GAMMA, TAU, MARGIN),
        lambda n: _auc("pAUC_DRO_Loss", n, gamma=GAMMA, margin=MARGIN, Lambda=TAU),
    ),
    "two-way partial AUC, KL; tpAUC_KL_Loss": (
        lambda n: losses.TwoWayPartialAUCLoss(n, GAMMA, TAU, TAU_POSITIVE, MARGIN),
        lambda n: _auc("tpAUC_KL_Loss", n, tau=TAU_POSITIVE, Lambda=TAU, gammas=(GAMMA, GAMMA), margin=MARGIN),
    ),
    "one-way partial AUC, CVaR; pAUC_CVaR_Loss": (
        lambda n: losses.CVaRPartialAUCLoss(n, MAX_FPR, LR, MARGIN),
        lambda n: _auc("pAUC_CVaR_Loss", n, pos_len=n, beta=MAX_FPR, eta=LR, margin=MARGIN),
    ),
}


RANKINGS: dict[str, tuple[Build, Build]] = {
    "NDCG; NDCGLoss": (lambda n: losses.NDCGLoss(n, GAMMA, MARGIN), lambda n: _ndcg(n)),
}
QUERIES, ITEMS, RELEVANT = 16, 20, 4  # queries of a batch; items per query; number of first items that are relevant


def _ndcg(n: int) -> Any:
    class Ndcg(packages.libauc("ranking").NDCGLoss):  # type: ignore[misc]
        """LibAUC's loss with the arguments of ours."""

        def forward(self, scores: Tensor, relevance: Tensor, index: Tensor) -> Tensor:
            gain = (2.0**relevance - 1).sort(1, descending=True).values
            ideal = (gain / torch.arange(2.0, ITEMS + 2).log2()).sum(1)
            one = {"user_id": torch.arange(QUERIES), "num_pos_items": torch.ones(QUERIES), "ideal_dcg": ideal}
            return super().forward(scores, {"rating": relevance, "user_item_id": index, **one})

    options = {"num_user": QUERIES, "num_item": ITEMS, "num_pos": RELEVANT, "device": torch.device("cpu")}
    return packages.quiet(Ndcg, N=n, gamma0=GAMMA, margin=MARGIN, **options)


def rankings(visit: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return scores, relevance and indices of pairs, drawn like those of :func:`batch`."""
    scores = batch(visit, QUERIES * ITEMS)[0].view(QUERIES, ITEMS)
    pair = torch.arange(QUERIES * ITEMS).view(QUERIES, ITEMS)
    return scores, torch.arange(ITEMS).lt(RELEVANT) * (1 + pair % 3), pair


def _auc(name: str, n: int, **options: Any) -> Any:
    return packages.quiet(getattr(packages.libauc("auc"), name), data_len=n, device=torch.device("cpu"), **options)


def batch(visit: int, size: int = BATCH) -> tuple[Tensor, Tensor, Tensor]:
    """Return scores, labels and index; each visit has the same samples with slightly different scores."""
    generator = torch.Generator().manual_seed(0)
    index = torch.randperm(max(N, size), generator=generator)[:size]
    base, labels = torch.randn(size, generator=generator), (torch.arange(size) % 8 == 0).long()
    return base + 0.3 * torch.randn(size, generator=generator.manual_seed(visit + 1)), labels, index


def gradient(loss: Any, given: tuple[Tensor, Tensor, Tensor]) -> np.ndarray:
    """Make one call, commit it, and return its gradient."""
    scores, labels, index = given
    scores = scores.clone().requires_grad_()
    loss(scores, labels, index).backward()
    if hasattr(loss, "step"):
        loss.step()
    return scores.grad.double().numpy()


def set_gamma(loss: Any, gamma: float) -> None:
    """Set LibAUC's weight of the newest value; our averages start with the first value without this."""
    for name in ("gamma", "gamma0", "gamma1"):
        if hasattr(loss, name):
            setattr(loss, name, gamma)


def started(name: str) -> tuple[Any, Any, list[float]]:
    """Return both losses after some visits, and the relative error of the gradient at each visit."""
    ours, theirs = (build(N) for build in (TWINS | RANKINGS)[name])
    given, found = rankings if name in RANKINGS else batch, []
    for visit in range(VISITS):
        set_gamma(theirs, 1.0 if visit == 0 else GAMMA)
        found.append(relative(gradient(ours, given(visit)), gradient(theirs, given(visit))))
    return ours, theirs, found


def twin(name: str) -> list[str]:
    """Return the errors at the first and the last visit, and those after a resume of each loss."""
    ours, theirs, found = started(name)
    given = (rankings if name in RANKINGS else batch)(VISITS)
    row = [name, f"{found[0]:.1e}", f"{found[-1]:.1e}"]
    for loss, build in zip((ours, theirs), (TWINS | RANKINGS)[name], strict=True):
        again = build(N)
        again.load_state_dict(loss.state_dict())
        factor, error = rescaled(gradient(again, given), gradient(loss, given))
        row += [f"{factor:.3g}", f"{error:.1e}"]
    return row


def milliseconds(loss: Any, size: int, repeats: int = 200) -> float:
    """Return the median time of a call with its backward pass and commit."""
    given, times = batch(0, size), []
    for _ in range(repeats):
        start = time.perf_counter()
        gradient(loss, given)
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times[repeats // 10 :])


def speed(name: str, sizes: tuple[int, ...] = (64, 512)) -> list[str]:
    """Return the times of both losses by batch size."""
    return [name, *(f"{milliseconds(build(max(N, size)), size):.2f}" for size in sizes for build in TWINS[name])]


# -- training ------------------------------------------------------------------------------------------------------

TRAIN, EPOCHS, SEEDS, POSITIVES = 3000, 15, 3, 0.02


def trained(loss: Any, seed: int) -> tuple[float, float]:
    """Train; return average precision, and partial AUC to a false positive rate of 0.1, on held-out samples."""
    x, y = make_classification(
        4 * TRAIN, 30, n_informative=8, weights=[1 - POSITIVES], flip_y=0, class_sep=0.6, random_state=seed
    )
    x, y = torch.from_numpy(x).float(), torch.from_numpy(y)
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(30, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    positive, negative = (torch.nonzero(y[:TRAIN] == k)[:, 0] for k in (1, 0))
    for _ in range(EPOCHS * TRAIN // BATCH):
        index = torch.cat(
            [positive[torch.randint(len(positive), (16,))], negative[torch.randint(len(negative), (48,))]]
        )
        value = loss(model(x[index])[:, 0].sigmoid(), y[index], index)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        if hasattr(loss, "step"):
            loss.step()
    with torch.no_grad():
        scores, truth = model(x[TRAIN:])[:, 0].numpy(), y[TRAIN:].numpy()
    return average_precision_score(truth, scores), roc_auc_score(truth, scores, max_fpr=0.1)


def entropy(scores: Tensor, labels: Tensor, index: Tensor) -> Tensor:
    """Return the cross-entropy, for training on the same batches."""
    return torch.nn.functional.binary_cross_entropy(scores, labels.float())


def spread(values: list[float]) -> str:
    return f"{statistics.mean(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def quality(name: str, build: Build) -> list[str]:
    """Return the mean and the range over seeds of both metrics."""
    found = [trained(build(TRAIN), seed) for seed in range(SEEDS)]
    return [name, *(spread([each[k] for each in found]) for k in (0, 1))]


def main() -> None:
    torch.set_num_threads(1)
    env = {**environment(), "libauc": packages.version("libauc")}
    twins, times = [twin(name) for name in TWINS | RANKINGS], [speed(name) for name in TWINS]
    metrics = [quality("cross-entropy", lambda n: entropy)]
    for name, (ours, theirs) in TWINS.items():
        here, there = name.split("; ")
        metrics += [quality(f"compopt, {here}", ours), quality(f"LibAUC, {there}", theirs)]
    head = ["ours; theirs", "first visit", f"visit {VISITS}", "ours: factor", "error", "theirs: factor", "error"]
    parts = [
        f"Relative error between the gradients of both packages, B = {BATCH} with {BATCH // 8} positives. The other "
        "columns compare the next gradient after a resume by `state_dict()` and `load_state_dict()` with that without "
        "a resume: the best common factor, and the error after multiplication by it.",
        table(head, twins),
        "## Time\n\nMilliseconds of a call, its backward pass and its commit, with one thread.",
        table(["", "B = 64", "LibAUC", "B = 512", "LibAUC"], times),
        f"## Metrics after training\n\nThe data are {TRAIN:,} samples of `make_classification` with {POSITIVES:.0%} "
        f"positives; each batch of {BATCH} has 16 positives. The model is trained on sigmoid scores for {EPOCHS} "
        f"epochs of Adam, without tuning. Values are the mean and the range over {SEEDS} seeds on {3 * TRAIN:,} other "
        "samples.",
        table(["loss", "average precision", "partial AUC, false positive rate up to 0.1"], metrics),
    ]
    finish(
        "peers_compositional",
        "Non-contrastive losses compared with LibAUC",
        env,
        parts,
        {"twins": twins, "times": times, "metrics": metrics},
    )


if __name__ == "__main__":
    main()
