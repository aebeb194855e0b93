"""Text retrieval on WordNet: losses of sentence-transformers and estimators, with the trainer of that package.

    python -m benchmarks.studies.text tune --wordnet FOLDER    # each arm's learning rate, then its scale
    python -m benchmarks.studies.text final --wordnet FOLDER   # the best setting on three other seeds
    python -m benchmarks.studies.text report                   # results/text.md

FOLDER contains WordNet 3.0's files ``data.noun``, ``data.verb``, ``data.adj`` and ``data.adv``, as in Debian's package
wordnet-base.  All arms train one small transformer from scratch on pairs of the words of a synset and its definition.
It is evaluated by retrieval of the definitions of held-out words, each among 1,000.  Settings are chosen on validation
pairs; only the final runs use the test pairs.  Each finished run is a line of ``results/text.jsonl`` and is not run
again.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import compopt
from benchmarks.report import RESULTS, mean_spread, table
from benchmarks.studies.search import SEEDS, Arm, Job, Results, Search, main, provenance, settings
from recipes import cache
from recipes.text import TextPairs, load, small_model, tokenizer_of

BATCHES = (16, 64, 256)
EPOCHS, PAIRS, POOL = 4, 12_288, 1_000
HELD_OUT = 4 * POOL  # for validation, and as many for the test
RATES, SCALES = (2e-3, 4e-3, 8e-3, 1.6e-2), (5.0, 10.0, 20.0, 40.0)
# Further values for losses whose best value was at an end of the grid.
MORE_RATES = {"MNRL": (3.2e-2,), "Residual": (3.2e-2,)}
MORE_SCALES = {"MNRL": (2.5,), "iSogCLR": (2.5,)}

# loss -> initial settings in addition to learning rate and scale
LOSSES: dict[str, dict[str, Any]] = {
    "MNRL": {},
    "Cached MNRL": {},
    "DCL": {},
    "SogCLR": {"gamma": 0.8},
    "iSogCLR": {"gamma": 0.8, "rho": 2.0},
    "Residual": {},
    "Memory": {},
}
VARIED = ("MNRL", "DCL", "SogCLR", "iSogCLR", "Residual")


@dataclass(frozen=True, kw_only=True)
class TextArm(Arm):
    """A loss on a data set.

    Attributes:
        loss: one of ``LOSSES``.
        batch: pairs per step.
        hard: whether the data have a mined negative for every anchor.
        each: whether every word of a synset forms a pair with its definition, so that definitions repeat.
        told: whether equal words and equal definitions are excluded from each other's negatives.
    """

    loss: str
    batch: int = 64
    hard: bool = False
    each: bool = False
    told: bool = False


def _arm(loss: str, batch: int) -> TextArm:
    first = {"lr": 4e-3, "scale": 20.0, **LOSSES[loss]}
    if loss == "Cached MNRL":  # the same gradient
        return TextArm(loss=loss, batch=batch, after=f"MNRL, {batch}")
    rates, scales = RATES + MORE_RATES.get(loss, ()), MORE_SCALES.get(loss, ()) + SCALES
    return TextArm(loss=loss, batch=batch, first=first, grids={"lr": rates, "scale": scales})


def _varied(loss: str, **options: Any) -> TextArm:
    return TextArm(loss=loss, after=f"{loss}, 64", **options)


ARMS: Mapping[str, TextArm] = {
    **{f"{loss}, {batch}": _arm(loss, batch) for batch in BATCHES for loss in LOSSES},
    **{f"{loss}, hard negatives": _varied(loss, hard=True) for loss in VARIED},
    **{f"{loss}, repeated": _varied(loss, each=True) for loss in VARIED},
    **{f"{loss}, repeated and told": _varied(loss, each=True, told=True) for loss in VARIED},
}


def score(result: dict[str, Any]) -> float:
    """Return recall at 10 of the validation pairs, which varies less than recall at 1."""
    return result["metrics"]["validation/recall@10"]


STUDY = Search(ARMS, RESULTS / "text.jsonl", score)


# -- one run -------------------------------------------------------------------------------------------------------


ESTIMATORS: dict[str, Callable[..., compopt.ContrastiveEstimator]] = {
    "DCL": lambda n, dim, tau: compopt.DCLEstimator(tau=tau, directions="forward"),
    "SogCLR": lambda n, dim, tau, **options: compopt.SogCLREstimator(n, tau=tau, directions="forward", **options),
    "iSogCLR": lambda n, dim, tau, **options: compopt.ISogCLREstimator(
        n, tau_init=tau, directions="forward", **options
    ),
    "Memory": lambda n, dim, tau: compopt.MemoryEstimator(dim, tau=tau, directions="forward"),
}


def estimator(loss: str, n: int, dim: int, options: dict[str, Any]) -> compopt.ContrastiveEstimator:
    """Return an estimator with anchors in one direction, as in MNRL; ``scale`` is the inverse temperature."""
    if loss not in ESTIMATORS:
        raise ValueError(f"{loss!r} ran with compopt.ResidualEstimator of commit 95c7f8b6")
    return ESTIMATORS[loss](n, dim, 1 / options["scale"], **{name: options[name] for name in LOSSES[loss]})


def loss_of(arm: TextArm, model: Any, n: int, options: dict[str, Any]) -> torch.nn.Module:
    """Return a loss of sentence-transformers, or ``EstimatorLoss`` with an estimator."""
    from sentence_transformers.sentence_transformer import losses

    from compopt.integrations.sentence_transformers import EstimatorLoss

    if arm.loss == "MNRL":
        return losses.MultipleNegativesRankingLoss(model, scale=options["scale"])
    if arm.loss == "Cached MNRL":
        return losses.CachedMultipleNegativesRankingLoss(model, scale=options["scale"], mini_batch_size=64)
    return EstimatorLoss(model, estimator(arm.loss, n, model.get_embedding_dimension(), options))


def training_data(arm: TextArm, pairs: TextPairs) -> Any:
    """Return a data set with anchors, positives, with ``hard`` negatives, and for an estimator the label column."""
    from datasets import Dataset

    from compopt.integrations.sentence_transformers import add_index

    columns = {
        "anchor": [pairs.queries[at] for at in pairs.train],
        "positive": [pairs.documents[at] for at in pairs.train],
    }
    if arm.hard:
        columns["negative"] = [columns["positive"][at] for at in mined(columns["positive"])]
    data = Dataset.from_dict(columns)
    if "MNRL" in arm.loss:
        return data
    return add_index(data, **({"anchors": "anchor", "positives": "positive"} if arm.told else {}))


def mined(texts: list[str]) -> np.ndarray:
    """Return, for each text, the position of the most similar different text (tf-idf)."""
    path, key = cache.file(None, "text_negatives.npz"), str(len(texts)) + texts[0] + texts[-1]
    return cache.read_or_make(path, key, ["nearest"], lambda: {"nearest": _nearest(texts)})["nearest"]


def _nearest(texts: list[str]) -> np.ndarray:
    from sklearn.feature_extraction.text import TfidfVectorizer

    vectors = TfidfVectorizer(sublinear_tf=True, stop_words="english").fit_transform(texts)
    number = {text: at for at, text in enumerate(dict.fromkeys(texts))}
    same = np.array([number[text] for text in texts])
    nearest = []
    for first in range(0, len(texts), 1024):
        similar = (vectors[first : first + 1024] @ vectors.T).toarray()
        similar[same[first : first + 1024, None] == same] = -1.0
        nearest.append(similar.argmax(axis=1))
    return np.concatenate(nearest)


def train(job: Job, pairs: TextPairs, folder: str) -> tuple[Any, float]:
    """Train; return the model and the seconds of training."""
    from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments

    from compopt.integrations.sentence_transformers import EstimatorCallback

    arm = ARMS[job.arm]
    torch.manual_seed(job.seed)
    model = small_model(tokenizer_of([*pairs.queries, *pairs.documents], length=24), layers=1)
    data = training_data(arm, pairs)
    args = SentenceTransformerTrainingArguments(
        folder, num_train_epochs=EPOCHS, per_device_train_batch_size=arm.batch, learning_rate=job.options["lr"],
        warmup_steps=0.1, weight_decay=0.01, max_grad_norm=0.0, seed=job.seed, dataloader_drop_last=True,
        batch_sampler="no_duplicates" if arm.told and arm.loss == "MNRL" else "batch_sampler",
        save_strategy="no", logging_strategy="no", report_to="none", disable_tqdm=True, use_cpu=True,
    )  # fmt: skip
    loss = loss_of(arm, model, len(data), job.options)
    trainer = SentenceTransformerTrainer(model, args, train_dataset=data, loss=loss)
    if "MNRL" not in arm.loss:
        trainer.add_callback(EstimatorCallback(loss.estimators[0].est, trainer))
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))  # the trainer's libraries change it
    started = time.perf_counter()
    trainer.train()
    return model, time.perf_counter() - started


def evaluate(model: Any, pairs: TextPairs, at: np.ndarray) -> dict[str, float]:
    """Return recall and mean reciprocal rank of each pair's definition among those of its pool."""
    texts = [[column[i] for i in at] for column in (pairs.queries, pairs.documents)]
    z1, z2 = (model.encode(each, convert_to_tensor=True, normalize_embeddings=True) for each in texts)
    scores = z1.view(-1, POOL, z1.shape[1]) @ z2.view(-1, POOL, z2.shape[1]).mT
    own = scores.diagonal(dim1=1, dim2=2).unsqueeze(2)
    rank = (scores > own).sum(2).flatten() + 1.0
    found = {f"recall@{k}": (rank <= k).float().mean() for k in (1, 10)} | {"mrr": rank.reciprocal().mean()}
    return {name: round(float(value), 6) for name, value in found.items()}


def run_one(job: Job, wordnet: Path | None) -> dict[str, Any]:
    """Train and evaluate, in this process."""
    import sentence_transformers

    pairs = load(wordnet, HELD_OUT, PAIRS, ARMS[job.arm].each)
    with tempfile.TemporaryDirectory() as folder:
        model, seconds = train(job, pairs, folder)
    part, at = ("test", pairs.test) if job.final else ("validation", pairs.validation)
    metrics = {f"{part}/{key}": value for key, value in evaluate(model, pairs, at).items()}
    version = sentence_transformers.__version__
    return {"metrics": metrics, "seconds": round(seconds, 1), "sentence_transformers": version}


# -- the page ------------------------------------------------------------------------------------------------------

VARIANTS = {
    "pairs": "{loss}, 64",
    "with a hard negative": "{loss}, hard negatives",
    "repeated texts": "{loss}, repeated",
    "repeated texts, excluded": "{loss}, repeated and told",
}
METRICS = {"R@1": "test/recall@1", "R@10": "test/recall@10", "Mean reciprocal rank": "test/mrr"}


def page(results: Results) -> str:
    """Return the page of the finished runs."""
    finals = STUDY.finals(results)

    def cells(rows: Sequence[str], names: Sequence[str], metric: str) -> list[list[str]]:
        return [[loss, *(_cell(finals.get(name.format(loss=loss), []), metric) for name in names)] for loss in rows]

    about = (
        f"A small transformer (one layer of width 64, 24 tokens) is trained from scratch on {PAIRS:,} pairs of the "
        f"words of a WordNet 3.0 synset and its definition, for {EPOCHS} epochs, with the trainer of "
        f"sentence-transformers and anchors in one direction. The test retrieves the definitions of 4,000 other "
        f"synsets, each among {POOL:,}. Values are in per cent: mean ± standard deviation of the seeds "
        f"{', '.join(map(str, SEEDS))}. The learning rate and then the scale (1 / temperature) are chosen on another "
        f"4,000 synsets with another seed, for each loss at each batch size. `Cached MNRL` has the same gradient as "
        f"`MNRL` and uses its settings."
    )
    repeated = (
        "R@1 at batch 64, with the settings that were chosen for the pairs. *Hard negative*: for every anchor, the "
        "different definition that is most similar to its own (tf-idf). *Repeated texts*: every word of a synset forms "
        "a pair with its definition, so that definitions and words repeat. *Excluded*: equal texts are not negatives "
        "of each other, by `add_index(data, anchors=, positives=)`, or by the sampler `no_duplicates` for MNRL."
    )
    by_batch = {f"batch {batch}": f"{{loss}}, {batch}" for batch in BATCHES}
    parts = [
        "# Text retrieval with sentence-transformers",
        provenance(list(results.values()), "benchmarks/studies/text.py", ["sentence_transformers"]),
        about,
    ]
    for title, name in METRICS.items():
        parts += [f"## {title}", table(["", *by_batch], cells(list(LOSSES), list(by_batch.values()), name))]
    parts += ["## Hard negatives and repeated texts", repeated]
    parts.append(table(["", *VARIANTS], cells(VARIED, list(VARIANTS.values()), "test/recall@1")))
    chosen = "R@10 of the validation pairs in per cent. The chosen settings are bold."
    return "\n\n".join([*parts, settings(STUDY, results, chosen, "R@10", 1)])


def _cell(runs: list[dict[str, Any]], metric: str) -> str:
    told = mean_spread([run["metrics"][metric] for run in runs], 100, 1)
    return told if len(runs) in (0, len(SEEDS)) else f"{told} ({len(runs)})"


if __name__ == "__main__":
    main(STUDY, "benchmarks.studies.text", __doc__, run_one, page)
