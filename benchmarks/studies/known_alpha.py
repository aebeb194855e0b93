"""Log-normalizers that are known before the sweep over similarities: their effect on recall and on the gradient.

    python -m benchmarks.studies.known_alpha tune  --wordnet FOLDER   # learning rates at batch 64
    python -m benchmarks.studies.known_alpha final --wordnet FOLDER   # three other seeds, test half
    python -m benchmarks.studies.known_alpha report                   # results/known_alpha.md

A kernel that knows every ``alpha_i`` before it computes ``s_ij`` needs only one sweep for the loss and its gradients,
with three matrix products instead of the four of the fused kernel. The study measures only the error, with the current
implementation:

- ``last visit``: the row of a moving average before the update with this batch (eq. 10 of SogCLR). A first visit has no
  row and uses the batch's own estimate.
- ``last visit, scaled``: the same, with all weights of a batch divided by their mean sum, which a kernel knows after
  its sweep.
- ``queue``: a memory whose normalizer is that of its queue alone, as if the batch were distributed like the queue.
- ``queue, last visit``: the same, with the row of the last visit as the batch's part.
- ``before``: the prediction of NeuCLIP's network before it learns from the batch.
- ``bounded``: every weight is bounded by 1, which exact weights never exceed; a kernel can do this in its sweep.
- ``saturated``: the weight ``w`` is replaced by ``w / (1 + w)``.
- ``quarter``: DCL with the normalizer of a quarter of the batch, which costs a quarter of a product more.

Data, FOLDER, encoders and training are those of ``benchmarks.studies.default`` with fewer samples. Each finished run is
a line of ``results/known_alpha.jsonl`` and is not run again. There are 175 runs of 8 to 20 seconds of one core.
"""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any, cast

import torch
from torch import Tensor, nn

import compopt
from benchmarks.report import RESULTS, mean_spread, table
from benchmarks.studies.default.tasks import DIM, Glyphs, Task, Words
from benchmarks.studies.default.training import Setting, how, train
from benchmarks.studies.search import SEEDS, Arm, Job, Results, Search, by_seed, difference, main, provenance, settings
from benchmarks.studies.state.gradients import gradient_errors
from compopt import functional as F
from compopt.estimator.component import Call, Estimate
from compopt.estimator.groups import Hyper
from compopt.normalizers.network import NetworkBatch, Prediction
from recipes import batches

DATA = ("glyphs", "words")
PAIRS, PASSES, TAU, GAMMA = 8192, 4, 0.07, 0.8
RATES, LARGE_RATE = (4e-3, 1.2e-2), 1.6e-2  # at batch 64 (the second is near the best of the baselines) and 256
PROTOTYPES, RESTART_EVERY, PART = 1024, 100, 4
EVERY = 16  # calls between two comparisons of a known alpha with the updated one
PROBED, REPEATS = (1.5, 3.5), 4  # passes after which the exact gradient is compared, and batches of each sample
USUAL = (0.5, 2.0)  # range in which the weight sum of an anchor counts as near 1


# -- normalizers ---------------------------------------------------------------------------------------------------


class Average(compopt.MovingAverageEstimator):
    """Moving average that returns ``alpha`` from before the batch, unless ``known`` is False.

    Args:
        n: number of samples.
        reference: reference of the moving average.
        known: whether alpha is that of the last visit.
        scaled: whether all weights are divided by their mean sum.
    """

    def __init__(self, n: int, reference: Any, known: bool, scaled: bool = False) -> None:
        super().__init__(n, GAMMA, reference)
        self.known, self.scaled, self.outer_positive = known, scaled, reference == "none"

    def estimate(self, call: Call) -> Estimate:
        updated = super().estimate(call)
        alpha = updated.alpha
        if self.known:
            new = updated.proposals["log_u"]
            alpha = alpha - new + torch.where(call.unseen("log_u"), new, call.rows["log_u"])
            if self.scaled:
                alpha = alpha + call.pairs.sum_weights(alpha).mean().log()
        self.used, self.sums = alpha, call.pairs.sum_weights(alpha)
        return replace(updated, alpha=alpha)


class Memory(compopt.MemoryNormalizer):
    """Memory whose normalizer is known before the batch's similarities, unless ``known`` is False.

    Args:
        n: number of samples.
        known: whether alpha is that of the queue.
        rows: whether the batch's part of alpha is a moving average of each sample, if it was visited before.
    """

    def __init__(self, n: int, known: bool, rows: bool = False) -> None:
        super().__init__(DIM)
        self.known, self.log_u = known, torch.full((n, 2), torch.nan) if rows else None
        self.frozen = False  # whether rows are kept unchanged

    def estimate(self, call: Call) -> Estimate:
        updated = super().estimate(call)
        assert updated.weight_alpha is not None and updated.through_alpha is not None
        more = self._known_sum(call, updated) if self.known else torch.zeros_like(updated.alpha)
        self.used, self.sums = updated.weight_alpha + more, more.neg().exp()
        return replace(
            updated,
            alpha=updated.alpha + more,
            weight_alpha=self.used,
            through_alpha=lambda slope, gradient: updated.through_alpha(slope * more.neg().exp(), gradient),
        )

    def _known_sum(self, call: Call, updated: Estimate) -> Tensor:
        """Return the logarithm of the known sum over batch and queue, minus that of the exact sum, ``(B, A)``."""
        pairs = call.pairs
        share = 1 - pairs.sum_weights(updated.weight_alpha)  # of the queue
        filled = 1 - (updated.alpha - updated.weight_alpha).exp()  # of the candidates that are in the queue
        known = share / filled
        if self.log_u is not None:
            index = call.batch.keys["index"]
            last = self.log_u[index]
            known = torch.where(last.isnan(), known, share + (last - updated.weight_alpha).exp())
            if call.training and not self.frozen:
                self.log_u[index] = F.moving_average(last, pairs.log_ghat, GAMMA, first=last.isnan())
        return torch.where((share > 1e-6) & (filled > 1e-6), known.log(), 0.0)  # the first batches have no queue


class Network(compopt.NeuralNormalizer):
    """NeuCLIP's network, which predicts before it learns from the batch, unless ``known`` is False."""

    def __init__(self, known: bool) -> None:
        super().__init__(DIM, PROTOTYPES, restart_every=RESTART_EVERY, through_alpha=True)
        self.known = known

    def estimate(self, call: Call) -> Estimate:
        found = super().estimate(call)
        self.sums = call.pairs.sum_weights(found.alpha)
        return found

    def _learn(self, batch: NetworkBatch, hyper: Hyper, t: int, training: bool, *more: Any) -> Prediction:
        before, learned = self.working_state(training), super()._learn(batch, hyper, t, training, *more)
        if self.known and before["queue_place"][1] > 0:  # else there is nothing to predict with
            return Prediction(batch, before)
        return learned


class Part(compopt.BatchNormalizer):
    """Normalizer over the first candidates of the batch without an anchor's positive, unless ``known`` is False."""

    known = True

    def estimate(self, call: Call) -> Estimate:
        alpha = self._of_part(call) if self.known else super().estimate(call).alpha
        self.used, self.sums = alpha, call.pairs.sum_weights(alpha)
        return Estimate(alpha)

    def _of_part(self, call: Call) -> Tensor:
        z = torch.stack(call.batch.features)
        few = z.shape[1] // PART
        itself = torch.eye(z.shape[1], few, dtype=torch.bool)
        logits = (z @ z.flip(0)[:, :few].mT / call.tau).masked_fill(itself, -math.inf).logsumexp(2)
        return logits.T - call.pairs.positive / call.tau - (few - itself.sum(1, keepdim=True)).log()


class Bounded(compopt.ContrastiveEstimator):
    """Estimator whose weights of pairs are bounded by 1 while its alpha is a known one.

    Exact weights never exceed 1. A kernel that has a pair's weight can bound it in the same sweep; here the gradient of
    the excess is subtracted.

    Args:
        saturated: whether to use ``w / (1 + w)`` instead of ``min(w, 1)``: alpha then represents the sum over the other
            pairs, to which the pair itself is added.
    """

    def __init__(self, *parts: Any, saturated: bool = False) -> None:
        super().__init__(*parts)
        self.saturated = saturated

    def __call__(self, z1: Tensor, z2: Any = None, index: Any = None, *args: Any, **given: Any) -> Tensor:
        loss = super().__call__(z1, z2, index, *args, **given)
        normalizer: Any = self.normalizer
        if not normalizer.known:
            return loss
        z, above = [torch.nn.functional.normalize(side) for side in (z1, z2)], torch.zeros(())
        for own, other, alpha in zip(z, z[::-1], normalizer.used.T, strict=True):
            s = own @ other.T
            h = s - s.diagonal()[:, None]
            weight = (h.detach() / TAU - alpha[:, None]).exp().fill_diagonal_(0) / (len(s) - 1)
            pulled = s if getattr(normalizer, "outer_positive", False) else h
            excess = weight.square() / (1 + weight) if self.saturated else (weight - 1).clamp(min=0)
            above = above + (excess * pulled).sum() / (2 * len(s))
        return loss - (above - above.detach())


# -- arms ----------------------------------------------------------------------------------------------------------

Build = Callable[[int], compopt.Normalizer]
LOSSES: Mapping[str, Build] = {
    "InfoNCE": lambda n: compopt.BatchNormalizer(include_positive=True),
    "DCL": lambda n: compopt.BatchNormalizer(),
    "DCL, quarter": lambda n: Part(),
    "SogCLR": lambda n: Average(n, "none", known=False),
    "SogCLR, last visit": lambda n: Average(n, "none", known=True),
    "SogCLR, last visit, scaled": lambda n: Average(n, "none", known=True, scaled=True),
    "SogCLR, positive": lambda n: Average(n, "positive", known=False),
    "SogCLR, positive, last visit": lambda n: Average(n, "positive", known=True),
    "recommended": lambda n: Memory(n, known=False),
    "recommended, queue": lambda n: Memory(n, known=True),
    "recommended, queue, last visit": lambda n: Memory(n, known=True, rows=True),
    "DCL, quarter, bounded": lambda n: Part(),
    "SogCLR, last visit, bounded": lambda n: Average(n, "none", known=True),
    "recommended, queue, bounded": lambda n: Memory(n, known=True),
    "recommended, queue, saturated": lambda n: Memory(n, known=True),
    "NeuCLIP": lambda n: Network(known=False),
    "NeuCLIP, before": lambda n: Network(known=True),
}
# loss -> the loss that it is compared with
TODAY = {
    "DCL, quarter": "DCL",
    "SogCLR, last visit": "SogCLR",
    "SogCLR, last visit, scaled": "SogCLR",
    "SogCLR, positive, last visit": "SogCLR, positive",
    "recommended, queue": "recommended",
    "recommended, queue, last visit": "recommended",
    "DCL, quarter, bounded": "DCL",
    "SogCLR, last visit, bounded": "SogCLR",
    "recommended, queue, bounded": "recommended",
    "recommended, queue, saturated": "recommended",
    "NeuCLIP, before": "NeuCLIP",
}
# smaller selections of losses for words and for batch 256
FEWER = tuple(loss for loss in LOSSES if loss != "InfoNCE" and not loss.startswith("SogCLR, positive"))
AT_256 = (
    *("DCL", "DCL, quarter", "DCL, quarter, bounded", "SogCLR", "SogCLR, last visit, scaled"),
    *("recommended", "recommended, queue", "recommended, queue, bounded", "recommended, queue, saturated"),
)


@dataclass(frozen=True, kw_only=True)
class KnownArm(Arm):
    """A loss on a data set at a batch size."""

    data: str
    batch: int
    loss: str


def _arms() -> dict[str, KnownArm]:
    rates = {loss: RATES if loss in TODAY else RATES[1:] for loss in LOSSES}
    glyphs = [KnownArm(data="glyphs", batch=64, loss=loss, grids={"lr": rates[loss]}) for loss in LOSSES]
    words = [KnownArm(data="words", batch=64, loss=loss, after=f"glyphs, 64: {loss}") for loss in FEWER]
    large = [KnownArm(data=data, batch=256, loss=loss, first={"lr": LARGE_RATE}) for data in DATA for loss in AT_256]
    return {f"{arm.data}, {arm.batch}: {arm.loss}": arm for arm in (*glyphs, *words, *large)}


ARMS: Mapping[str, KnownArm] = _arms()


def score(result: dict[str, Any]) -> float:
    """Return recall on the validation half."""
    return result["metrics"]["validation/recall"]


STUDY = Search(ARMS, RESULTS / "known_alpha.jsonl", score)


# -- one run -------------------------------------------------------------------------------------------------------


class Watched:
    """Estimator that records the effect of a known alpha on its weights and gradients during training.

    Args:
        est: estimator of the arm.
        task: data set.
        setting: setting of the run.
        probes: whether the gradient is also compared with the exact one.
    """

    def __init__(self, est: compopt.ContrastiveEstimator, task: Task, setting: Setting, probes: bool) -> None:
        self.est, self.normalizer = est, cast(Any, est.normalizer)
        self.task, self.setting, self.calls = task, setting, 0
        self.per_pass = task.n // setting.batch
        self.probes = {int(after * self.per_pass): after for after in PROBED} if probes else {}
        self.seen: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
        self.exact: dict[str, tuple[float, float]] = {}

    def watch(self, model: nn.Module) -> None:
        """Store the encoders, which compute features of all samples for the comparison with the exact gradient."""
        self.model: Any = model

    def __call__(self, z1: Tensor, z2: Tensor, index: Tensor) -> Tensor:
        """Return the loss of a batch."""
        if self.calls in self.probes:
            self._probe(self.probes[self.calls])
        if self.calls % EVERY == 0 and getattr(self.normalizer, "known", False):
            self._compare(z1.detach(), z2.detach(), index)
        self.calls += 1
        return self.est(z1, z2, index)

    def _compare(self, *batch: Tensor) -> None:
        """Record weight sums, and the distance from the gradient of the updated alpha, without depositing rows."""
        self.est.eval()
        known = torch.cat(self.est.feature_gradients(*batch)[1:]).flatten()
        sums, self.normalizer.known = self.normalizer.sums, False
        today = torch.cat(self.est.feature_gradients(*batch)[1:]).flatten()
        self.normalizer.known = True
        self.est.train()
        found = {
            "outside": ((sums < USUAL[0]) | (sums > USUAL[1])).float().mean(),
            "largest": sums.max(),
            "relative": (known - today).norm() / today.norm(),
            "cosine": torch.cosine_similarity(known, today, dim=0),
        }
        for name, value in found.items():
            self.seen[name][self.calls // self.per_pass].append(float(value))

    @torch.no_grad()
    def _probe(self, after: float) -> None:
        """Compare with the exact gradient on the samples that come next, whose rows are as old as in training."""
        features = self.task.training_features(copy.deepcopy(self.model))  # in training mode, as for batches
        order = _order(self.task, self.setting)
        coming = range(self.calls, int(math.ceil(after)) * self.per_pass)
        among = torch.cat([order(number) for number in coming])
        est: Any = copy.deepcopy(self.est)
        est.normalizer.frozen = True
        self.exact[f"{after:g}"] = gradient_errors(est, *features, self.setting.batch, REPEATS, among)

    def step(self) -> None:
        self.est.step()

    def parameters(self) -> list[Tensor]:
        return []

    def found(self) -> dict[str, Any]:
        """Return the means of every pass, and the errors against the exact gradient."""
        passes = {name: [_rounded(mean(values)) for values in by.values()] for name, by in self.seen.items()}
        return {"passes": passes, "exact": {after: [*map(_rounded, pair)] for after, pair in self.exact.items()}}


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


def _order(task: Task, setting: Setting) -> Any:
    return batches.build(how(setting), task.n, setting.batch, task.n // setting.batch, setting.seed)


def build(loss: str, n: int) -> compopt.ContrastiveEstimator:
    """Return a new estimator of an arm's loss."""
    parts, bound = (LOSSES[loss](n), compopt.FixedTemperature(TAU)), loss.rpartition(", ")[2]
    if bound in ("bounded", "saturated"):
        return Bounded(*parts, saturated=bound == "saturated")
    return compopt.ContrastiveEstimator(*parts)


def run_one(job: Job, wordnet: Path | None) -> dict[str, Any]:
    """Train and evaluate, in this process; on the first final seed, also compare with the exact gradient."""
    arm, part = ARMS[job.arm], "test" if job.final else "validation"
    task: Any = Glyphs(part, PAIRS) if arm.data == "glyphs" else Words(part, wordnet, PAIRS)
    setting = Setting(batch=arm.batch, lr=job.options["lr"], samples=PASSES * task.n, seed=job.seed)
    watched = Watched(build(arm.loss, task.n), task, setting, probes=job.seed == SEEDS[0])
    model, _, seconds = train(task, lambda task: watched, setting)
    metrics = {f"{part}/{name}": round(value, 6) for name, value in task.score(model).items()}
    return {"metrics": metrics, "seconds": round(seconds, 1), **watched.found()}


# -- the page ------------------------------------------------------------------------------------------------------


ABOUT = (
    f"{PAIRS:,} training pairs, {PASSES} passes, temperature {TAU}, moving averages with gamma {GAMMA}, small encoders "
    "trained from scratch. Recall is R@1 in per cent on the test half: mean ± standard deviation of the seeds. The "
    "values in brackets are differences from the same loss with the updated alpha of the current implementation: mean "
    "over the seeds ± standard error, or the difference of the only common seed. Cells are empty, and losses are left "
    "out, if they have not been run on these seeds."
)
ARE = (
    "The alpha that is known before the sweep: *last visit*: the row of the sample (at a first visit, a quarter of "
    "all visits, the estimate of the batch); *scaled*: in addition, all weights are divided by their mean sum; "
    "*queue*: the normalizer of the queue, as if the batch were distributed like the queue; *queue, last visit*: the "
    "same with the row of the sample for the part of the batch; *before*: the prediction of the network before it "
    "learns from the batch; *quarter*: the normalizer of a quarter of the batch. *Bounded*: the weight of a pair is "
    "at most 1. *Saturated*: a weight `w` is replaced by `w / (1 + w)`."
)
ERRORS = (
    f"Measured in every {EVERY}th batch of the second and of the last pass: the share of anchors whose weights add up "
    f"to less than {USUAL[0]:g} or more than {USUAL[1]:g} (before they are bounded), the mean over the batches of the "
    "largest sum, and relative error and cosine of the gradient compared with that of the updated alpha at the same "
    "weights, features and rows. *Exact*: bias and spread of the feature gradient of a sample over the batches that "
    "may contain it, relative to the exact gradient over the whole data set, after 1.5 and 3.5 passes, for the "
    "samples of the remaining batches of the pass (first seed). A memory is biased by design: features of the past "
    "affect only the gradient of the anchor."
)
CHOSEN = (
    "The settings are chosen on seed 100 by recall on the validation half of glyphs (in per cent); words use the same "
    "settings. The chosen ones are bold."
)


def page(results: Results) -> str:
    """Return the page of the finished runs."""
    finals, runs = STUDY.finals(results), list(results.values())
    parts = ["# Log-normalizers that are known before the sweep"]
    parts += [provenance(runs, "benchmarks/studies/known_alpha.py"), ABOUT, ARE]
    columns = dict.fromkeys(f"{arm.data}, {arm.batch}" for arm in ARMS.values())
    body = [[loss, *(_recall(finals, where, loss) for where in columns)] for loss in LOSSES]
    parts += [
        "## Recall",
        table(["", *columns], [line for line in body if any(line[1:])]),
        "## Weights and gradients",
        ERRORS,
    ]
    head = ["", "", "outside, %", "largest sum", "relative error", "cosine", "exact: bias", "spread"]
    lines = [_errors(arm, runs) for arm, runs in finals.items()]
    return "\n\n".join([*parts, table(head, lines, "llr"), settings(STUDY, results, CHOSEN, "validation", 1)])


def _recall(finals: Mapping[str, list[dict[str, Any]]], where: str, loss: str) -> str:
    own = by_seed(finals.get(f"{where}: {loss}", []), "test/recall")
    if not own:
        return ""
    today = by_seed(finals.get(f"{where}: {TODAY.get(loss)}", []), "test/recall")
    gaps = [own[seed] - today[seed] for seed in own if seed in today]
    gap = difference(own, today) or "".join(f"{only:+.1f}" for only in gaps)
    seeds = f", {len(own)} seed{'s' * (len(own) > 1)}"
    return mean_spread(list(own.values())) + (f" ({gap})" if gap else "") + seeds


def _errors(arm: str, runs: list[dict[str, Any]]) -> list[str]:
    where, _, loss = arm.partition(": ")
    passes = {name: [[run["passes"][name][at] for run in runs] for at in (1, -1)] for name in runs[0]["passes"]}
    scales = {"outside": (100, 0), "largest": (1, 1), "relative": (1, 2), "cosine": (1, 2)}
    cells = [
        ", ".join(f"{scale * mean(values):.{digits}f}" for values in passes.get(name, []))
        for name, (scale, digits) in scales.items()
    ]
    exact = [pair for run in runs for pair in run["exact"].values()]
    return [where, loss, *cells, *(", ".join(f"{pair[at]:.2f}" for pair in exact) for at in (0, 1))]


if __name__ == "__main__":
    main(
        STUDY,
        "benchmarks.studies.known_alpha",
        __doc__,
        run_one,
        page,
        needs_data=lambda arm: ARMS[arm].data == "words",
    )
