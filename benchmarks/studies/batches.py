"""Batches by spectral clustering: are they harder than random ones, and what do they cost?

    python -m benchmarks.studies.batches            # both, writes benchmarks/results/batches.md and .png (half an hour)
    python -m benchmarks.studies.batches --quick    # small, printed only

Features are those of a model that has trained on glyphs with random batches for so many epochs (0: as initialised).
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from benchmarks.saved import RESULTS, save
from compopt.samplers import OrderedBatchSampler, SpectralBatchSampler
from compopt.samplers.pairs import batch_losses
from recipes import glyphs, methods, plots
from recipes.config import Config, Control
from recipes.engine import Run
from recipes.report import environment, heading, quartiles, spread, table
from recipes.tasks import GlyphNames

BATCH, GROUP, TAU = 32, 40, 0.07
SIZES = (6_800, 13_600, 27_200, 54_000)
LOSSES = f"""InfoNCE of one epoch's batches in nats, tau {TAU}, B = {BATCH}: median, quartiles. *Twins* are samples
whose batch has another one with the same caption, a false negative; `labels=` deals captions to different groups."""
TIMES = f"""Seconds to form an epoch's batches, B = {BATCH}, k = {GROUP}, d = 128, random features in clusters; `OSGD`
weighs 1,500 candidates. *Training* is the same model's epoch without any sampler."""
HIDDEN = """Seconds of the epochs of one training run on all cores, in parentheses what of them the loop waited for its
batches: the first epoch's are random, those of others are formed when they begin."""


def trained(epochs: int, limit: int, seed: int) -> tuple[Run, float]:
    """Train with random batches; the run, and its seconds per epoch."""
    task = GlyphNames(glyphs.load(None), split_seed=0, limit=limit)
    options = methods.METHODS["infonce"].options(task.mode, {"tau": TAU})
    run = Run(task, Config("infonce", options, BATCH, max(1, epochs), seed=seed), Control(eval_every=0))
    if epochs:
        started = time.perf_counter()
        run.train()
        return run, (time.perf_counter() - started) / epochs
    return run, float("nan")


def samplers(n: int, labels: Tensor, seed: int) -> dict[str, Any]:
    """Build the samplers by name; the first never sees a feature."""
    common: dict[str, Any] = {"tau": TAU, "seed": seed}
    keep = min(150, n // BATCH // 10)
    return {
        "random": SpectralBatchSampler(n, BATCH, drop_last=True, **common),
        "OSGD": OrderedBatchSampler(n, BATCH, 10 * keep, keep, **common),
        "OSGD, labels": OrderedBatchSampler(n, BATCH, 10 * keep, keep, labels=labels, **common),
        "spectral": SpectralBatchSampler(n, BATCH, GROUP, drop_last=True, **common),
        "spectral, labels": SpectralBatchSampler(n, BATCH, GROUP, drop_last=True, labels=labels, **common),
        "spectral, labels, sharpness 0.25": SpectralBatchSampler(
            n, BATCH, GROUP, drop_last=True, labels=labels, sharpness=0.25, **common
        ),
    }


def losses(epochs: int, limit: int, seed: int = 0) -> dict[str, Any]:
    """Losses of the batches that each sampler makes from one model's features."""
    run, seconds = trained(epochs, limit, seed)
    with torch.no_grad():
        z1, z2 = (normalize(z, dim=1) for z in run.task.training_features(run.model.eval()))
    labels, found = run.task.group, {}
    for name, sampler in samplers(run.task.n, labels, seed).items():
        if name != "random":
            sampler.observe(torch.arange(run.task.n), z1, z2)
        batches = torch.tensor(list(sampler))
        same = labels[batches]
        twins = (same[:, :, None] == same[:, None, :]).sum(2) > 1
        values = torch.cat([batch_losses(z1[part], z2[part], TAU) for part in batches.split(64)])
        masked = torch.cat([batch_losses(z1[p], z2[p], TAU, labels[p]) for p in batches.split(64)])
        found[name] = {"losses": values.tolist(), "masked": masked.tolist(), "twins": float(twins.double().mean())}
    return {"epochs": epochs, "n": run.task.n, "seconds_per_epoch": seconds, "samplers": found}


def loss_table(results: list[dict]) -> str:
    lines = [
        [name, str(r["epochs"]), *(spread(quartiles(f[k])) for k in ("losses", "masked")), f"{100 * f['twins']:.1f} %"]
        for r in results
        for name, f in r["samplers"].items()
    ]
    return table(["batches", "epochs trained", "loss", "loss without twins as negatives", "twins"], lines)


def draw(results: list[dict], path: Path) -> None:
    """The paper's Figure 3: a histogram per model."""
    with plots.plt.rc_context(plots.STYLE):
        figure, axes = plots.new_figure(5.0 * len(results), 3.6, 1, len(results))
        for axis, r in zip(axes[0], results, strict=True):
            names = ("random", "OSGD, labels", "spectral, labels")
            for colour, name in zip(plots.COLOURS[2:], names, strict=False):
                axis.hist(r["samplers"][name]["masked"], 60, density=True, alpha=0.5, color=colour, label=name)
            axis.set(xlabel="loss of a batch (nats)", title=f"{r['epochs']} epochs trained, n = {r['n']:,}")
        axes[0, 0].set_ylabel("density of batches")
        axes[0, 0].legend()
        plots.save_figure(figure, path)


def clustered(n: int, dim: int = 128) -> tuple[Tensor, Tensor]:
    """Random features around n / 50 centres."""
    generator = torch.Generator().manual_seed(0)
    heap = torch.randint(0, max(2, n // 50), (n,), generator=generator)
    centres = torch.randn(int(heap.max()) + 1, dim, generator=generator)
    first, second = (centres[heap] + torch.randn(n, dim, generator=generator) for _ in range(2))
    return first, second


def times(sizes: tuple[int, ...], rounds: int) -> list[dict[str, Any]]:
    """Time the forming of an epoch's batches, sizes in turns."""
    found: dict[int, dict[str, list[float]]] = {n: {"spectral": [], "OSGD": []} for n in sizes}
    for seed in range(rounds):
        for n in sizes:
            made = {
                "spectral": SpectralBatchSampler(n, BATCH, GROUP, TAU, seed),
                "OSGD": OrderedBatchSampler(n, BATCH, tau=TAU, seed=seed),
            }
            for name, sampler in made.items():
                sampler.observe(torch.arange(n), *clustered(n))
                next(iter(sampler))
                found[n][name].append(sampler.metrics["plan_seconds"])
    return [{"n": n, **values} for n, values in found.items()]


def hidden(limit: int, epochs: int = 3) -> list[dict[str, Any]]:
    """Time the epochs of training with random and with spectral batches, and the loop's waits for batches."""
    task = GlyphNames(glyphs.load(None), split_seed=0, limit=limit)
    options = methods.METHODS["infonce"].options(task.mode, {"tau": TAU})
    found = []
    for kind in ("random", "spectral"):
        marks = [0.0]
        waited: list[float] = []

        def note(run: Run, marks: list[float] = marks, waited: list[float] = waited) -> None:
            if run.step % run.steps_per_epoch == 0:
                marks.append(run.seconds)
                sampler = getattr(run.batches, "sampler", None)
                waited.append(0.0 if sampler is None else sampler.metrics["wait_seconds"])

        config = Config("infonce", options, BATCH, epochs, batches={"kind": kind})
        Run(task, config, Control(eval_every=0, on_step=note)).train()
        seconds = [after - before for before, after in zip(marks, marks[1:], strict=False)]
        found.append({"batches": kind, "seconds": seconds, "waited": waited})
    return found


def hidden_table(results: list[dict]) -> str:
    epochs = range(1, len(results[0]["seconds"]) + 1)
    lines = [
        [r["batches"], *(f"{a:.1f} ({b:.1f})" for a, b in zip(r["seconds"], r["waited"], strict=True))] for r in results
    ]
    return table(["batches", *(f"epoch {epoch}" for epoch in epochs)], lines)


def time_table(results: list[dict], training: float) -> str:
    lines = []
    for r in results:
        middle = {name: statistics.median(r[name]) for name in ("spectral", "OSGD")}
        per = 1e6 * middle["spectral"] / r["n"]
        lines.append([f"{r['n']:,}", f"{middle['spectral']:.1f}", f"{per:.0f}", f"{middle['OSGD']:.2f}"])
    text = table(["n", "spectral", "microseconds per sample", "OSGD"], lines)
    return f"{text}\n\nTraining epoch of the losses' model: {training:.0f} s."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small, printed only")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--epochs", type=int, nargs="+", default=[0, 2], help="trained with random batches")
    args = parser.parse_args()
    env = environment()
    limit, sizes, rounds = (2_560, (1_280, 2_560), 1) if args.quick else (0, SIZES, args.rounds)
    found = [losses(epochs, limit) for epochs in ([1] if args.quick else args.epochs)]
    timed = times(sizes, rounds)
    beside = hidden(limit)
    training = max(found, key=lambda r: r["epochs"])["seconds_per_epoch"]
    parts = [LOSSES, "", loss_table(found), "", "## Time", "", TIMES, "", time_table(timed, training), ""]
    parts += ["## Beside training", "", HIDDEN, "", hidden_table(beside)]
    text = "\n".join([*heading("Which samples share a batch", env), *parts])
    print(text)
    if not args.quick:
        save("batches", text, env, {"losses": found, "times": timed, "beside": beside}, indent=None)
        draw(found, RESULTS / "batches.png")


if __name__ == "__main__":
    main()
