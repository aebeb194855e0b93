"""CLIP on icons: open_clip's trainer, the same with our adapter, and our recipe with each estimator.

    .venv-clip/bin/python -m recipes.make_shards --data icons --limit 20480 --out data/icons
    .venv-clip/bin/python -m benchmarks.studies.icons tune    # each arm's learning rate, then its other settings
    .venv-clip/bin/python -m benchmarks.studies.icons final   # the best setting on three other seeds
    .venv-clip/bin/python -m benchmarks.studies.icons report  # results/icons.md and .png

All arms train one open_clip model (``recipes/clip/icons.json``) on the same shards, and clip-benchmark evaluates
their ``epoch_K.pt``.  Settings are chosen by retrieval in the validation families; the test families are seen by the
final runs alone.  Each finished run is a line of ``results/icons.jsonl``; it is not run again.  ``make test-clip``
makes the environment.
"""

from __future__ import annotations

import json
import logging
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.studies.command import parser, stamp
from benchmarks.studies.icons_arms import ARMS, BATCH, EPOCHS, STUDY
from benchmarks.studies.icons_report import write
from benchmarks.studies.search import SEEDS, Job

MODEL = Path("recipes/clip/icons.json")
TESTS = {  # name -> task of clip-benchmark, its flags
    "validation": ("zeroshot_retrieval", ["--recall_k", "1", "10"]),
    "retrieval": ("zeroshot_retrieval", ["--recall_k", "1", "10"]),
    "zeroshot": ("zeroshot_classification", []),
}


# -- one run -------------------------------------------------------------------------------------------------------


def train(job: Job, shards: Path, out: Path) -> Path:
    """Run the trainer of the job's arm; returns its last checkpoint."""
    sizes = json.loads((shards / "sizes.json").read_text())
    if ARMS[job.arm].trainer == "recipe":
        return _recipe(job, shards, out)
    steps = -(-sum(sizes.values()) // BATCH) * EPOCHS
    theirs = [
        *("--model", MODEL.stem, "--train-data", str(shards / f"{{{min(sizes)[:-4]}..{max(sizes)[:-4]}}}.tar")),
        *("--dataset-type", "webdataset", "--train-num-samples", str(sum(sizes.values())), "--workers", "1"),
        *("--batch-size", str(BATCH), "--epochs", str(EPOCHS), "--lr", str(job.options["lr"]), "--wd", "0.1"),
        *("--beta1", "0.9", "--beta2", "0.98", "--eps", "1e-6", "--warmup", str(round(0.05 * steps))),
        *("--precision", "fp32", "--device", "cpu", "--seed", str(job.seed), "--log-every-n-steps", "10"),
        *("--logs", str(out), "--name", "run", "--save-frequency", str(EPOCHS), "--zeroshot-frequency", "0"),
    ]
    if ARMS[job.arm].trainer == "open_clip":
        from open_clip_train.main import main

        main(theirs)
    else:
        from compopt.integrations.open_clip import main as adapted

        adapted(["--estimator", "clip", "--", *theirs])
    return out / "run" / "checkpoints" / f"epoch_{EPOCHS}.pt"


def _recipe(job: Job, shards: Path, out: Path) -> Path:
    from recipes.clip_webdataset import main

    options = {name: value for name, value in job.options.items() if name not in ("lr", "scale")}
    settings = [f"{name}={value}" for name, value in options.items()]
    learn = ["--learn-scale"] if "tau" not in options and "tau_init" not in options else []
    main(
        [
            *("--shards", str(shards), "--model", str(MODEL), "--estimator", ARMS[job.arm].estimator, *learn),
            *(["--set", *settings] if settings else []),
            *("--epochs", str(EPOCHS), "--batch-size", str(BATCH), "--lr", str(job.options["lr"])),
            *("--seed", str(job.seed), "--workers", "1", "--output", str(out), "--log-every", "100", "--quiet"),
        ]
    )
    return out / f"epoch_{EPOCHS}.pt"


def evaluate(checkpoint: Path, data: Path, tests: Iterable[str], out: Path) -> dict[str, float]:
    """clip-benchmark's figures of a checkpoint: ``test/metric``."""
    from clip_benchmark.cli import main

    found = {}
    for name in tests:
        task, flags = TESTS[name]
        target = out / f"{name}.json"
        sys.argv = [
            *("clip_benchmark", "eval", "--model", MODEL.stem, "--pretrained", str(checkpoint), "--task", task),
            *("--dataset", f"wds/{name}", "--dataset_root", str(data / "benchmark" / name), "--output", str(target)),
            *("--no_amp", "--num_workers", "0", "--quiet", *flags),
        ]
        main()
        metrics = json.loads(target.read_text())["metrics"]
        found |= {f"{name}/{metric}": round(value, 6) for metric, value in metrics.items() if value is not None}
    return found


class Curve(logging.Handler):
    """Losses that open_clip logs, every ten steps."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        for name in ("Contrastive_loss: ", "Loss: "):
            if text.startswith("Train Epoch") and name in text:
                self.losses.append(float(text.split(name)[1].split()[0]))
                return


def run_one(job: Job, data: Path, threads: int) -> dict[str, Any]:
    """Train and evaluate, in this process."""
    import open_clip

    torch.set_num_threads(threads)
    open_clip.add_model_config(MODEL)
    curve, started = Curve(), time.perf_counter()
    logging.getLogger().addHandler(curve)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = train(job, data / "train", Path(folder))
        seconds = time.perf_counter() - started
        logging.getLogger().removeHandler(curve)
        tests = ["validation"] if job.seed not in SEEDS else list(TESTS)
        metrics = evaluate(checkpoint, data, tests, Path(folder))
        state = torch.load(checkpoint, map_location="cpu", weights_only=False)["state_dict"]
        scale = {name: value for name, value in state.items() if name.endswith("logit_scale")}.popitem()[1]
    return {
        "job": asdict(job),
        "metrics": metrics,
        "curve": curve.losses,
        "scale": round(float(scale.exp()), 3),
        "seconds": round(seconds, 1),
        **stamp(),
        "open_clip": open_clip.__version__,
    }


def main(argv: Sequence[str] | None = None) -> None:
    root = parser("benchmarks.studies.icons", __doc__, STUDY.path)
    root.add_argument("--data", type=Path, default=Path("data/icons"), help="folder that make_shards wrote")
    root.add_argument("--arms", nargs="+", choices=tuple(ARMS), default=tuple(ARMS))
    args = root.parse_args(argv)
    if args.command == "run-one":
        print(json.dumps(run_one(Job(**json.loads(args.job)), args.data, args.threads)))
    elif args.command == "report":
        write(STUDY.finished(args.results))
    else:
        where = "benchmarks.studies.icons", ["--data", str(args.data)]
        STUDY.carry_out(args.arms, *where, args.command == "final", args.workers, args.threads, args.results)
        for arm in args.arms:
            print(arm, STUDY.best(arm, STUDY.finished(args.results)))


if __name__ == "__main__":
    main()
