"""Training runs whose curves are compared: ours and another package's at one setting, whole or stopped on the way.

Batch 64 on glyphs, two epochs; the same encoders, initial weights, batches and optimizer for the same seed, so that two
curves of one seed differ by the loss alone. Each finished run is a line of ``results/peers_curves.jsonl``, and is not
repeated.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from benchmarks.history.peers import foreign, packages
from benchmarks.saved import HISTORY, append_run, read_runs
from recipes import glyphs, methods, plots
from recipes.config import Config, Control
from recipes.engine import Run
from recipes.report import environment
from recipes.tasks import GlyphNames

FILE = HISTORY / "peers_curves.jsonl"
WHOLE, STOPPED, ROUNDED = "undisturbed", "stopped", "summed in another order"
CHUNK = 16  # rows of the similarity matrix at a time: the same sums, rounded otherwise
BATCH, EPOCHS, EVERY = 64, 2, 50

_SOGCLR = {"tau": 0.08, "gamma": 0.5}
_ISOGCLR = {**_SOGCLR, "rho": 1.0, "tau_lr": 0.002}
SETTINGS: dict[str, dict[str, Any]] = {
    "clip": {"tau": 0.12},
    "open_clip-clip": {"tau": 0.12},
    "sogclr": {**_SOGCLR, "reference": "positive"},
    "libauc-sogclr": _SOGCLR,
    "isogclr": {**_ISOGCLR, "reference": "positive"},
    "libauc-isogclr": _ISOGCLR,
}


@dataclass(frozen=True)
class Case:
    """One training run: its method, how it went on, its seed."""

    method: str
    how: str
    seed: int
    limit: int = 0  # training pairs; 0: all

    @property
    def key(self) -> str:
        return json.dumps([asdict(self), SETTINGS[self.method], BATCH, EPOCHS, EVERY], sort_keys=True)


def commits(cases: Sequence[Case], file: Path = FILE) -> str:
    """Say how many runs there are, and at which commits they were made."""
    keys = {case.key for case in cases}
    found = dict.fromkeys(record["commit"] for record in read_runs(file) if record["key"] in keys)
    return f"Training runs: {len(keys)}, a thread each, of commit {', '.join(found)}."


def collected(cases: Sequence[Case], workers: int = 2, file: Path = FILE) -> dict[Case, list[dict[str, float]]]:
    """The curve of every case: steps, loss, R@1. A case that is not in the file is run, and added unless limited."""
    known = {record["key"]: record["curve"] for record in read_runs(file)}
    missing = [case for case in cases if case.key not in known]
    facts = environment()
    facts = {name: facts[name] for name in ("commit", "date", "torch")}
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        futures = {pool.submit(trained, case): case for case in missing}
        for future in tqdm(as_completed(futures), total=len(missing), unit="run", disable=not missing):
            case, curve = futures[future], future.result()
            known[case.key] = curve
            if not case.limit:
                append_run(file, {"key": case.key, "curve": curve, **facts})
    return {case: known[case.key] for case in cases}


def trained(case: Case) -> list[dict[str, float]]:
    """Train, in this process."""
    foreign.register()
    task = GlyphNames(glyphs.load(None), split_seed=0, limit=case.limit)
    options = methods.METHODS[case.method].options(task.mode, SETTINGS[case.method])
    config = Config(case.method, options, BATCH, EPOCHS, seed=case.seed, data=task.description)
    half = task.n // BATCH  # one epoch
    if case.how == STOPPED and not case.method.startswith("libauc"):
        return _saved_and_loaded(task, config, half)

    def interrupt(run: Run) -> None:
        if case.how == STOPPED and run.step == half:
            assert isinstance(run.est, foreign.LibAUC)
            run.est.resume()

    run = Run(task, config, Control(eval_every=EVERY, on_step=interrupt))
    run.est.chunk_size = CHUNK if case.how == ROUNDED else None
    return _curve(run.train())


def _saved_and_loaded(task: GlyphNames, config: Config, half: int) -> list[dict[str, float]]:
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder)
        Run(task, config, Control(eval_every=EVERY, max_steps=half, checkpoint=checkpoint)).train()
        return _curve(Run(task, config, Control(eval_every=EVERY, checkpoint=checkpoint, resume=True)).train())


def _curve(run: Run) -> list[dict[str, float]]:
    return [{"step": r["step"], "loss": r["loss"], "r1": r["r1"]} for r in run.history if "r1" in r]


def gap(a: list[dict[str, float]], b: list[dict[str, float]], field: str) -> float:
    """The largest difference of two curves on the way."""
    return max(abs(x[field] - y[field]) for x, y in zip(a, b, strict=True))


def begin(description: str | None) -> tuple[argparse.Namespace, dict[str, Any]]:
    """Parse the options of a script that compares curves; its arguments, and the machine's description."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--limit", type=int, default=0, help="training pairs, printed only; 0: all")
    args = parser.parse_args()
    torch.set_num_threads(1)
    foreign.register()
    return args, {**environment(), **packages.versions()}


def draw(panels: Sequence[Sequence[tuple[str, str, int, list[dict[str, float]]]]], path: Path) -> None:
    """R@1 against steps: a panel for each list of (label, line style, number of a colour, curve)."""
    with plots.plt.rc_context(plots.STYLE):
        figure, axes = plots.new_figure(4.5 * len(panels), 4, 1, len(panels))
        for axis, panel in zip(axes[0], panels, strict=True):
            for label, style, colour, curve in panel:
                steps, r1 = [c["step"] for c in curve], [100 * c["r1"] for c in curve]
                axis.plot(steps, r1, style, label=label, color=plots.COLOURS[colour])
            axis.set(xlabel="steps", title="R@1 image to name, %")
            axis.legend(fontsize=8)
        plots.save_figure(figure, path)
