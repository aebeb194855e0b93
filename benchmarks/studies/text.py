"""Text retrieval: the losses of sentence-transformers and the estimators, under its own trainer, on WordNet.

    python -m benchmarks.studies.text tune --wordnet FOLDER    # each arm's learning rate, then its scale
    python -m benchmarks.studies.text final --wordnet FOLDER   # the best setting on three other seeds
    python -m benchmarks.studies.text report                   # results/text.md and .png

FOLDER has WordNet 3.0's files ``data.noun``, ``data.verb``, ``data.adj`` and ``data.adv``, as Debian's package
wordnet-base has them.  All arms train one small transformer from scratch, words of a synset against its definition;
it is judged by how well it finds the definitions of words that it was not trained on, each among 1,000.  Settings are
chosen on validation pairs; the test pairs are seen by the final runs alone.  Each finished run is a line of
``results/text.jsonl``; it is not run again.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

import compopt
from benchmarks.studies.command import parser, stamp
from benchmarks.studies.search import SEEDS, Job
from benchmarks.studies.text_arms import ARMS, EPOCHS, HELD_OUT, LOSSES, PAIRS, POOL, STUDY, TextArm
from benchmarks.studies.text_report import write
from recipes import cache
from recipes.text import TextPairs, load, small_model, tokenizer_of

ESTIMATORS: dict[str, Callable[..., compopt.ContrastiveEstimator]] = {
    "DCL": lambda n, dim, tau: compopt.DCLEstimator(tau=tau, directions="forward"),
    "SogCLR": lambda n, dim, tau, **options: compopt.SogCLREstimator(n, tau=tau, directions="forward", **options),
    "iSogCLR": lambda n, dim, tau, **options: compopt.ISogCLREstimator(
        n, tau_init=tau, directions="forward", **options
    ),
    "Memory": lambda n, dim, tau: compopt.MemoryEstimator(dim, tau=tau, directions="forward"),
    "Residual": lambda n, dim, tau: compopt.ResidualEstimator(dim, tau=tau, directions="forward"),
}


def estimator(loss: str, n: int, dim: int, options: dict[str, Any]) -> compopt.ContrastiveEstimator:
    """Anchors in one direction, as their loss has it; ``scale`` is the reciprocal of the temperature."""
    return ESTIMATORS[loss](n, dim, 1 / options["scale"], **{name: options[name] for name in LOSSES[loss]})


def loss_of(arm: TextArm, model: Any, n: int, options: dict[str, Any]) -> torch.nn.Module:
    """Theirs, or ours around an estimator."""
    from sentence_transformers.sentence_transformer import losses

    from compopt.integrations.sentence_transformers import EstimatorLoss

    if arm.loss == "MNRL":
        return losses.MultipleNegativesRankingLoss(model, scale=options["scale"])
    if arm.loss == "Cached MNRL":
        return losses.CachedMultipleNegativesRankingLoss(model, scale=options["scale"], mini_batch_size=64)
    return EstimatorLoss(model, estimator(arm.loss, n, model.get_embedding_dimension(), options))


# -- data ----------------------------------------------------------------------------------------------------------


def training_data(arm: TextArm, pairs: TextPairs) -> Any:
    """Columns anchor, positive, perhaps negative; and for an estimator the label column."""
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
    """For each text another one, not equal to it, with the most similar words (tf-idf)."""
    from sklearn.feature_extraction.text import TfidfVectorizer

    path, key = cache.file(None, "text_negatives.npz"), str(len(texts)) + texts[0] + texts[-1]
    if (stored := cache.read(path, key, ["nearest"])) is not None:
        return stored["nearest"]
    vectors = TfidfVectorizer(sublinear_tf=True, stop_words="english").fit_transform(texts)
    number = {text: at for at, text in enumerate(dict.fromkeys(texts))}
    same = np.array([number[text] for text in texts])
    nearest = []
    for first in range(0, len(texts), 1024):
        similar = (vectors[first : first + 1024] @ vectors.T).toarray()
        similar[same[first : first + 1024, None] == same] = -1.0
        nearest.append(similar.argmax(axis=1))
    cache.write(path, key, {"nearest": np.concatenate(nearest)})
    return np.concatenate(nearest)


# -- one run -------------------------------------------------------------------------------------------------------


def train(job: Job, pairs: TextPairs, threads: int, folder: str) -> tuple[Any, float]:
    """The model, and the seconds of training."""
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
    torch.set_num_threads(threads)
    started = time.perf_counter()
    trainer.train()
    return model, time.perf_counter() - started


def evaluate(model: Any, pairs: TextPairs, at: np.ndarray) -> dict[str, float]:
    """Recall and mean reciprocal rank of each pair's definition among those of its pool."""
    texts = [[column[i] for i in at] for column in (pairs.queries, pairs.documents)]
    z1, z2 = (model.encode(each, convert_to_tensor=True, normalize_embeddings=True) for each in texts)
    scores = z1.view(-1, POOL, z1.shape[1]) @ z2.view(-1, POOL, z2.shape[1]).mT
    own = scores.diagonal(dim1=1, dim2=2).unsqueeze(2)
    rank = (scores > own).sum(2).flatten() + 1.0
    found = {f"recall@{k}": (rank <= k).float().mean() for k in (1, 10)} | {"mrr": rank.reciprocal().mean()}
    return {name: round(float(value), 6) for name, value in found.items()}


def run_one(job: Job, wordnet: Path, threads: int) -> dict[str, Any]:
    """Train and evaluate, in this process."""
    import sentence_transformers

    torch.set_num_threads(threads)
    pairs = load(wordnet, HELD_OUT, PAIRS, ARMS[job.arm].each)
    with tempfile.TemporaryDirectory() as folder:
        model, seconds = train(job, pairs, threads, folder)
    tests = {"validation": pairs.validation} if job.seed not in SEEDS else {"test": pairs.test}
    metrics = {
        f"{name}/{key}": value for name, at in tests.items() for key, value in evaluate(model, pairs, at).items()
    }
    return {
        "job": asdict(job),
        "metrics": metrics,
        "seconds": round(seconds, 1),
        **stamp(),
        "sentence_transformers": sentence_transformers.__version__,
    }


def main(argv: Sequence[str] | None = None) -> None:
    root = parser("benchmarks.studies.text", __doc__, STUDY.path)
    root.add_argument("--wordnet", type=Path, help="folder of WordNet's files")
    root.add_argument("--arms", nargs="+", choices=tuple(ARMS), default=tuple(ARMS), metavar="ARM")
    args = root.parse_args(argv)
    if args.command == "report":
        write(STUDY.finished(args.results))
    elif args.wordnet is None:
        root.error("--wordnet FOLDER")
    elif args.command == "run-one":
        print(json.dumps(run_one(Job(**json.loads(args.job)), args.wordnet, args.threads)))
    else:
        where = "benchmarks.studies.text", ["--wordnet", str(args.wordnet)]
        STUDY.carry_out(args.arms, *where, args.command == "final", args.workers, args.threads, args.results)
        for arm in args.arms:
            print(arm, STUDY.best(arm, STUDY.finished(args.results)))


if __name__ == "__main__":
    main()
