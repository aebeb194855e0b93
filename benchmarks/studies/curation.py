"""Study of curation by rows: how well rows separate wrong pairs, and the gain from leaving these out.

    python -m benchmarks.studies.curation run [--data glyphs icons words faces] [--wordnet FOLDER]
    python -m benchmarks.studies.curation report   # results/curation.md

Each run of ``run`` that results/curation.jsonl lacks is trained, in 20 to 60 s of one core. ``FOLDER`` contains
WordNet's files; ``words`` needs it. A share of the training pairs is made wrong: ``shuffled`` pairs have the second
side (caption, definition, second face) of each other, ``boilerplate`` pairs all have one of four captions, and
``duplicated`` pairs are copies of other pairs, drawn with replacement. All arms but one see the same number of
samples. They train DCL or the default (``compopt.recommended``), the latter with a ``ScoreKeeper``:

- ``DCL``, ``default``: all pairs.
- ``twice as long``: the default on all pairs for twice as many epochs, the cost of the arms with a second training.
- ``during``: from the third epoch on, ``ScoredSampler`` leaves out the suspects of the rows. The rows of two epochs
  give their number; one in 20 of them is drawn again.
- ``informative``: as ``during``, but each epoch from the third on contains only half of the other samples, drawn with
  a preference for low scores; ``informative, reference``: for scores below those of the first run's last rows.
- ``rows, 1 epoch`` and ``rows``: a second training without the suspects of the first run's rows after one epoch (as
  many as there are wrong pairs, since one epoch is too short to estimate the number) or after the last (as many as
  the rows gave after two epochs).
- ``similarity``: the same number of pairs, those with the lowest cosine similarity by the trained model, which needs
  a further pass over the data.
- ``duplicates``: without the pairs that ``curation.duplicates`` finds to be copies, in the features of the trained
  model, both sides together; ``duplicated`` pairs only.
- ``oracle``: without the wrong pairs.
- ``iSogCLR``: iSogCLR on all pairs, whose rows have a log-normalizer and a temperature per sample.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import islice, product
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from scipy.stats import spearmanr
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import cross_val_predict
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import Tensor

import compopt
from benchmarks.report import RESULTS, append_run, mean_spread, paired, read_runs, table
from benchmarks.studies.default.tasks import DIM, Faces, Icons, Words
from benchmarks.studies.search import SEEDS, provenance, stamp
from compopt import curation
from compopt.samplers import ScoredSampler
from recipes import glyphs
from recipes.tasks import GlyphNames

PAIRS, BATCH, EPOCHS = 16_384, 64, 4
SHARES = (0.0, 0.1, 0.2, 0.4)
NOISES = ("shuffled", "boilerplate", "duplicated")
WARM_UP = 2  # epochs on all pairs, after which the rows say how many are wrong
NOTHING = torch.zeros(0, dtype=torch.int64)
TEMPERATURES = "iSogCLR"
LONGER = "twice as long"
INFORMATIVE, REFERENCE, DRAWN = "informative", "informative, reference", 0.5
COPIES = "duplicates"
FILTERED = ("rows, 1 epoch", "rows", "similarity", COPIES, "oracle")  # arms with a second training
ARMS = ("DCL", "default", LONGER, "during", INFORMATIVE, REFERENCE, *FILTERED, TEMPERATURES)
ONLY_WITH_WRONG = (COPIES, "oracle", TEMPERATURES)  # arms of data with wrong pairs
PATH = RESULTS / "curation.jsonl"


class Data(NamedTuple):
    """Loader of a data set and its settings of training."""

    load: Callable[[Path | None], Any]
    dim: int = DIM
    lr: float = 8e-3  # the rule of the study of the default at this batch size
    measure: str = "recall"


DATA = {
    "glyphs": Data(lambda wordnet: GlyphNames(glyphs.load(None), limit=PAIRS), GlyphNames.dim, 2e-3, "r1"),
    "icons": Data(lambda wordnet: Icons("test", limit=PAIRS)),
    "words": Data(lambda wordnet: Words("test", wordnet, limit=PAIRS)),
    "faces": Data(lambda wordnet: Faces("test")),
}


@dataclass(frozen=True)
class Case:
    """One data set with wrong pairs of one kind, and one seed."""

    data: str = "glyphs"
    noise: str = "shuffled"
    share: float = 0.0
    seed: int = 0

    @classmethod
    def of(cls, run: dict[str, Any]) -> Case:
        """Return the case of a finished run."""
        return cls(*(run.get(name, getattr(cls, name)) for name in ("data", "noise", "share", "seed")))


class Noisy:
    """A data set whose sample ``i`` has the first side of sample ``first[i]`` and the second side of ``second[i]``.

    Attributes:
        wrong: samples whose sides have different captions, or the copies, ``(n,)``.
    """

    def __init__(self, case: Case, wordnet: Path | None) -> None:
        self.data = DATA[case.data]
        self.task = self.data.load(wordnet)
        self.n, self.mode = self.task.n, self.task.mode
        # another seed than that of the samplers, which would draw the chosen samples first in the first epoch
        chosen = torch.randperm(self.n, generator=torch.Generator().manual_seed(1000 + case.seed))
        chosen, kept = chosen.tensor_split([round(case.share * self.n)])
        self.first, self.second = torch.arange(self.n), torch.arange(self.n)
        if case.noise == "duplicated":
            copied = torch.randint(len(kept), chosen.shape, generator=torch.Generator().manual_seed(2000 + case.seed))
            self.first[chosen] = self.second[chosen] = kept[copied]
            self.wrong = self.first != torch.arange(self.n)
            return
        others = chosen.roll(1)
        self.second[chosen] = others if case.noise == "shuffled" else others[torch.arange(len(chosen)) % 4]
        group = self.task.group
        self.wrong = group[self.second] != group

    def inputs(self, index: Tensor, draws: torch.Generator) -> tuple[Tensor, Tensor]:
        return self.task.inputs(self.first[index], draws)[0], self.task.inputs(self.second[index], draws)[1]

    def features(self, model: torch.nn.Module) -> tuple[Tensor, Tensor]:
        """Return the normalised features of both sides by a trained model, ``(n, d)`` each."""
        with torch.no_grad():
            z1, z2 = map(F.normalize, self.task.training_features(model))
        return z1[self.first], z2[self.second]

    def score(self, model: torch.nn.Module) -> dict[str, float]:
        """Return measures on held-out samples, whose pairs are all right."""
        return self.task.evaluate(model) if isinstance(self.task, GlyphNames) else self.task.score(model)

    def with_temperatures(self) -> compopt.ContrastiveEstimator:
        bounds = {"tau_min": 0.01, "tau_max": 0.5} if self.mode == "bimodal" else {"tau_min": 0.05, "tau_max": 1.0}
        tau, rho = (0.08, 2.5) if self.mode == "bimodal" else (0.2, 0.3)  # tuned on glyphs; not tuned
        return compopt.ISogCLREstimator(self.n, 0.8, rho, 0.01, tau, **bounds, beta=0.9, mode=self.mode)

    def default(self) -> compopt.ContrastiveEstimator:
        return compopt.recommended(self.data.dim, self.n, BATCH, mode=self.mode, candidates=None)

    def keeper(self, est: compopt.ContrastiveEstimator) -> compopt.ScoreKeeper:
        """Return the keeper of an estimator's scores."""
        keeper = compopt.ScoreKeeper(self.n)
        keeper.attach(est)
        return keeper


def train(
    task: Noisy,
    est: compopt.ContrastiveEstimator,
    seed: int,
    sampler: Iterable[int],
    epochs: int = EPOCHS,
) -> torch.nn.Module:
    """Train on as many batches as ``epochs`` passes over all samples; the sampler gives one pass after another."""
    torch.manual_seed(seed)
    model, draws = task.task.model(), torch.Generator().manual_seed(seed)
    steps = epochs * (task.n // BATCH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=task.data.lr, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, task.data.lr, steps)
    est.attach(optimizer)
    for index in islice(endless(sampler), steps):
        z1, z2 = model(*task.inputs(index, draws))
        est(z1, z2, index).backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return model.eval()


def endless(sampler: Iterable[int]) -> Iterator[Tensor]:
    """Yield full batches of one pass after another."""
    while True:
        yield from (batch for batch in torch.tensor(list(sampler)).split(BATCH) if len(batch) == BATCH)


class Rest:
    """Random passes over all samples but some; ``between`` is called when a pass begins, with its number."""

    def __init__(self, n: int, out: Tensor, seed: int, between: Callable[[int], None] = lambda number: None) -> None:
        mask = torch.ones(n, dtype=torch.bool)
        mask[out] = False
        self.samples, self.between, self.number = mask.nonzero().flatten(), between, 0
        self.draws = torch.Generator().manual_seed(seed)

    def __iter__(self) -> Iterator[int]:
        self.between(self.number)
        self.number += 1
        return iter(self.samples[torch.randperm(len(self.samples), generator=self.draws)].tolist())


def auroc(score: Tensor, wrong: Tensor) -> float:
    """Return the probability that a wrong pair has a lower score than a right one; NaN without wrong ones."""
    return float(roc_auc_score(wrong.numpy(), -score.nan_to_num(0).numpy())) if wrong.any() else float("nan")


class FirstRun:
    """The default on all pairs, with its rows after every epoch."""

    def __init__(self, task: Noisy, seed: int) -> None:
        self.wrong, self.rows = task.wrong, list[curation.Scores]()
        est = task.default()
        self.keeper = task.keeper(est)
        self.model = train(task, est, seed, Rest(task.n, NOTHING, seed, self._look))
        self._look(EPOCHS)
        self.features = task.features(self.model)
        self.similarity = torch.linalg.vecdot(*self.features)

    def _look(self, number: int) -> None:
        if number:
            self.rows.append(curation.scores(self.keeper))

    def facts(self) -> dict[str, Any]:
        return {
            "auroc": [auroc(rows.score, self.wrong) for rows in self.rows],
            "share_of_rows": [curation.wrong_share(rows) for rows in self.rows],
            "auroc_similarity": auroc(self.similarity, self.wrong),
        }

    def suspects(self, arm: str) -> Tensor:
        """Return what an arm that trains anew leaves out."""
        if arm == "oracle":
            return self.wrong.nonzero().flatten()
        if arm == COPIES:
            labels = curation.duplicates(torch.cat(self.features, 1))
            return (labels != torch.arange(len(labels))).nonzero().flatten()
        if arm == "rows, 1 epoch":
            return curation.suspects(self.rows[0], float(self.wrong.float().mean()))
        last = curation.suspects(self.rows[-1], curation.wrong_share(self.rows[WARM_UP - 1]))
        return last if arm == "rows" else torch.argsort(self.similarity, stable=True)[: len(last)]


def run(case: Case, arms: tuple[str, ...], wordnet: Path | None) -> None:
    """Train these arms on one case, and append their results."""
    task, seed = Noisy(case, wordnet), case.seed
    first: FirstRun | None = None
    for arm in arms:
        started, facts = time.perf_counter(), {}
        if arm in ("default", REFERENCE, *FILTERED):
            first = first or FirstRun(task, seed)
        if arm == "default":
            assert first is not None
            model, facts = first.model, first.facts()
        elif arm == LONGER:
            every = Rest(task.n, NOTHING, seed)
            model = train(task, task.default(), seed, every, epochs=2 * EPOCHS)
        elif arm in ("during", INFORMATIVE, REFERENCE):
            drawn = {} if arm == "during" else {"drawn": DRAWN}
            if arm == REFERENCE:
                drawn["reference"] = first.rows[-1]
            sampler = ScoredSampler(task.keeper(est := task.default()), WARM_UP, seed=seed, **drawn)
            model = train(task, est, seed, sampler)
            facts = _left_out(task, sampler.left_out)
        elif arm == TEMPERATURES:
            model = train(task, est := task.with_temperatures(), seed, Rest(task.n, NOTHING, seed))
            facts = of_temperatures(est.read(torch.arange(task.n)), task.wrong)
        else:
            est = compopt.DCLEstimator(0.07, mode=task.mode) if arm == "DCL" else task.default()
            out = NOTHING if first is None or arm == "DCL" else first.suspects(arm)
            facts = _left_out(task, out)
            model = train(task, est, seed, Rest(task.n, out, seed))
        result = {**asdict(case), "arm": arm, "n": task.n, "metrics": task.score(model), **facts}
        append_run(PATH, result | {"seconds": round(time.perf_counter() - started, 1), **stamp()})
        print(json.dumps(result), flush=True)


def of_temperatures(rows: dict[str, Tensor], wrong: Tensor) -> dict[str, float]:
    """Return how well log-normalizers, temperatures and both separate wrong pairs, and their rank correlation."""
    log_u, tau = (rows[name].double().mean(1) for name in ("log_u", "tau"))
    both = torch.stack([log_u, tau, tau.log(), log_u * tau], 1).numpy()
    model = make_pipeline(StandardScaler(), LogisticRegression())
    joint = cross_val_predict(model, both, wrong.numpy(), cv=5, method="decision_function")
    return {
        "auroc_log_u": auroc(-log_u, wrong),
        "auroc_tau": auroc(-tau, wrong),
        "auroc_both": auroc(-torch.from_numpy(joint), wrong),
        "correlation": float(spearmanr(log_u.numpy(), tau.numpy()).statistic),
    }


def _left_out(task: Noisy, out: Tensor) -> dict[str, int]:
    return {"left_out": len(out), "wrong_left_out": int(task.wrong[out].sum())}


# -- the page ------------------------------------------------------------------------------------------------------

ABOUT = (
    f"At most {PAIRS:,} training pairs (faces: 6,167), batch {BATCH}, {EPOCHS} epochs, AdamW with one cycle at "
    "0.008 (glyphs: 0.002, encoders twice as wide); recall on held-out samples, whose pairs are right, in per "
    "cent: glyphs R@1 from image to name, words and faces R@1, icons accuracy among 500 names. Mean ± standard "
    f"deviation of the seeds {', '.join(map(str, SEEDS))}; the gain over the default, paired by seed, ± its standard "
    f"error; *recovered* is the gain as a share of what the noise costs the default. `{LONGER}` trains for "
    f"{2 * EPOCHS} epochs. Nothing was tuned. Until 001d3252 the study had arms with a weight per pair from the rows, "
    "which gained 1.3 points on average over the cases of the overview."
)
WITH_TEMPERATURES = (
    'iSogCLR with `reference="positive"`, after the last epoch: AUROC of the log-normalizers, of the temperatures '
    "(below 0.5: wrong pairs have lower ones), and of a logistic regression on both, with their product and the "
    "logarithm of the temperature, by five-fold cross-validation; rank correlation of log-normalizer and temperature."
)
OVERVIEW = (
    "Shuffled pairs. *AUROC, 1 epoch*: of the rows after one epoch; *cost*: recall of the default without wrong pairs "
    "minus that with them; other columns: gain over the default on all pairs."
)
SHOWN = ("during", "rows", "similarity", "oracle")
COLUMNS = ["wrong", "arm", "recall", "gain", "recovered, %", "left out, %", "of these wrong, %", "seeds"]


def page() -> str:
    runs = read_runs(PATH)
    parts = ["# Wrong pairs: detection by rows", provenance(runs, "benchmarks/studies/curation.py"), ABOUT]
    parts += ["## Overview", OVERVIEW, summary()]
    for data in DATA:
        for noise in NOISES:
            if any((Case.of(run).data, Case.of(run).noise) == (data, noise) for run in runs):
                parts += section(runs, data, noise)
    parts += ["## Temperatures per sample", WITH_TEMPERATURES, temperatures(runs)]
    return "\n\n".join(parts)


def summary() -> str:
    """Return a table of the gains with shuffled pairs, by data set and share of wrong pairs, and of their means."""
    runs, body = read_runs(PATH), []
    means: dict[str, list[float]] = {arm: [] for arm in SHOWN}
    for data, share in product(DATA, SHARES[1:]):
        by = {arm: of(runs, Case(data, NOISES[0], share), arm) for arm in ("default", *SHOWN)}
        recall = {arm: {seed: 100 * run["metrics"][DATA[data].measure] for seed, run in by[arm].items()} for arm in by}
        clean = [100 * run["metrics"][DATA[data].measure] for run in of(runs, Case(data), "default").values()]
        cells = []
        for arm, own in means.items():
            gains = [value - recall["default"][seed] for seed, value in recall[arm].items()]
            cells.append(paired(gains))
            own.append(mean(gains))
        cost = mean(clean) - mean(recall["default"].values())
        epoch = mean_spread([run["auroc"][0] for run in by["default"].values()], digits=2)
        body.append([data, f"{share:.0%}", epoch, f"{cost:.1f}", *cells])
    body.append(
        ["mean", "", "", f"{mean(float(line[3]) for line in body):.1f}", *(f"{mean(m):+.2f}" for m in means.values())]
    )
    return table(["", "wrong", "AUROC, 1 epoch", "cost", *SHOWN], body, "ll" + "r" * (2 + len(SHOWN)))


def section(runs: list[dict[str, Any]], data: str, noise: str) -> list[str]:
    """Return the heading and both tables of one data set and kind of noise."""
    by = {share: {arm: of(runs, Case(data, noise, share), arm) for arm in ARMS} for share in SHARES}
    by[0.0] = {arm: of(runs, Case(data), arm) for arm in ARMS}  # no noise of any kind
    told = [row for share, arms in by.items() for row in telling(share, list(arms["default"].values()))]
    gains = [
        gained(DATA[data].measure, share, arm, found, arms["default"], by[0.0]["default"])
        for share, arms in by.items()
        for arm, found in arms.items()
        if found
    ]
    epochs = [f"after epoch {k + 1}" for k in range(EPOCHS)]
    return [
        f"## {data.capitalize()}, {noise}",
        table(["wrong", "", *epochs, "trained model's similarity"], told, "llrrrrr"),
        table(COLUMNS, gains, "llrrrrrr"),
    ]


def temperatures(runs: list[dict[str, Any]]) -> str:
    """Return the table of what the temperatures of iSogCLR say about wrong pairs."""
    names, body = ("auroc_log_u", "auroc_tau", "auroc_both", "correlation"), []
    for data, noise, share in product(DATA, NOISES, SHARES):
        found = of(runs, Case(data, noise, share), TEMPERATURES).values()
        if found:
            values = [mean_spread([run[name] for run in found], digits=3) for name in names]
            body.append([data, noise, f"{share:.0%}", *values, str(len(found))])
    head = ["data", "noise", "wrong", "log-normalizers", "temperatures", "both", "correlation", "seeds"]
    return table(head, body, "lll" + "r" * 5)


def of(runs: list[dict[str, Any]], case: Case, arm: str) -> dict[int, dict[str, Any]]:
    """Return the runs of one arm by seed."""
    found = {run["seed"]: run for run in runs if run["arm"] == arm and replace(Case.of(run), seed=0) == case}
    return {seed: run for seed, run in found.items() if seed in SEEDS}


def telling(share: float, firsts: list[dict[str, Any]]) -> list[list[str]]:
    """Return the lines of one share in the first table."""
    if not firsts:
        return []
    shares = [mean_spread([run["share_of_rows"][k] for run in firsts], 100) for k in range(EPOCHS)]
    lines = [[f"{share:.0%}", "estimated share of wrong pairs, %", *shares, ""]]
    if share:
        found = [mean_spread([run["auroc"][k] for run in firsts], digits=3) for k in range(EPOCHS)]
        similarity = mean_spread([run["auroc_similarity"] for run in firsts], digits=3)
        lines.insert(0, [f"{share:.0%}", "AUROC of the rows", *found, similarity])
    return lines


def gained(
    measure: str,
    share: float,
    arm: str,
    found: dict[int, dict[str, Any]],
    base: dict[int, dict[str, Any]],
    clean: dict[int, dict[str, Any]],
) -> list[str]:
    """Return the line of one arm in the second table."""
    recall = {seed: run["metrics"][measure] for seed, run in found.items()}
    gains = {seed: value - base[seed]["metrics"][measure] for seed, value in recall.items() if seed in base}
    gain = paired([100 * value for value in gains.values()]) if arm != "default" and len(gains) > 1 else ""
    costs = {seed: clean[seed]["metrics"][measure] - base[seed]["metrics"][measure] for seed in gains if seed in clean}
    costly = share and min(costs.values(), default=0) > 0  # else there is nothing to recover
    recovered = mean_spread([gains[seed] / cost for seed, cost in costs.items()], 100) if costly else ""
    out = [run for run in found.values() if run.get("left_out")]
    left = mean_spread([run["left_out"] / run.get("n", PAIRS) for run in out], 100)
    right = mean_spread([run["wrong_left_out"] / run["left_out"] for run in out], 100)
    found_by_rows = ["" if arm == "default" else recovered, left, right]
    return [f"{share:.0%}", arm, mean_spread(list(recall.values()), 100), gain, *found_by_rows, str(len(found))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("run", "report"))
    parser.add_argument("--data", nargs="+", default=("glyphs",), choices=DATA)
    parser.add_argument("--noise", default=NOISES[0], choices=NOISES)
    parser.add_argument("--shares", type=float, nargs="+", default=SHARES)
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--arms", nargs="+", default=ARMS, choices=ARMS)
    parser.add_argument("--wordnet", type=Path, help="folder of WordNet's files, for words")
    options = parser.parse_args()
    if options.command == "report":
        PATH.with_suffix(".md").write_text(page() + "\n")
        return
    torch.set_num_threads(1)
    for seed, share, data in product(options.seeds, options.shares, options.data):
        case = Case(data, options.noise if share else NOISES[0], share, seed)
        done = {each["arm"] for each in read_runs(PATH) if Case.of(each) == case}
        arms = [arm for arm in options.arms if arm not in done and (share or arm not in ONLY_WITH_WRONG)]
        run(case, tuple(arms), options.wordnet)


if __name__ == "__main__":
    main()
