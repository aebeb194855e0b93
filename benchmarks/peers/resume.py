"""What a run loses that is stopped and resumed as each package's documentation shows.

    python -m benchmarks.peers.resume    # writes results/peers_resume.md, .json and .png (ten minutes)

SogCLR and iSogCLR on glyphs, batch 64, two epochs, LibAUC's and ours, each undisturbed and stopped after the first
epoch: model, optimizer, scheduler and data order come back exactly in all of them, so that only what the loss keeps can
differ. LibAUC's documentation saves ``model.state_dict()`` and ``optimizer.state_dict()``; its loss's own is restored
too. Ours is saved and loaded as the recipe does.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.kernel import RESULTS
from benchmarks.machine import environment, heading, table
from benchmarks.peers import foreign, packages
from recipes import glyphs, methods
from recipes.engine import Config, Control, Run
from recipes.tasks import GlyphNames

SETTINGS: dict[str, dict[str, Any]] = {
    "sogclr": {"tau": 0.08, "gamma": 0.5},
    "libauc-sogclr": {"tau": 0.08, "gamma": 0.5},
    "isogclr": {"tau": 0.08, "gamma": 0.5, "rho": 1.0, "tau_lr": 0.002},
    "libauc-isogclr": {"tau": 0.08, "gamma": 0.5, "rho": 1.0, "tau_lr": 0.002},
}


def curve(run: Run) -> list[dict[str, float]]:
    """Loss and R@1 on the way."""
    return [{"step": r["step"], "loss": r["loss"], "r1": r["r1"]} for r in run.history if "r1" in r]


def trained(method: str, task: GlyphNames, stopped: bool, every: int, seed: int) -> list[dict[str, float]]:
    """One run of two epochs, undisturbed or stopped after the first."""
    options = methods.METHODS[method].options(task.mode, SETTINGS[method])
    config = Config(method, options, 64, 2, seed=seed, data=task.description)
    half = task.n // config.batch_size

    def interrupt(run: Run) -> None:
        if stopped and run.step == half and isinstance(run.est, foreign.LibAUC):
            run.est.resume()

    if not stopped or method.startswith("libauc"):
        return curve(Run(task, config, Control(eval_every=every, on_step=interrupt)).train())
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder)
        Run(task, config, Control(eval_every=every, max_steps=half, checkpoint=checkpoint)).train()
        return curve(Run(task, config, Control(eval_every=every, checkpoint=checkpoint, resume=True)).train())


def lines(results: list[dict[str, Any]]) -> list[str]:
    """R@1 at the end, and how far the resumed run is from the other on the way."""
    rows = []
    for method in SETTINGS:
        whole, resumed = ([r["curve"] for r in results if (r["method"], r["stopped"]) == (method, s)] for s in (0, 1))
        r1 = [[100 * c[-1]["r1"] for c in curves] for curves in (whole, resumed)]
        gap = max(
            abs(a["loss"] - b["loss"]) for x, y in zip(whole, resumed, strict=True) for a, b in zip(x, y, strict=True)
        )
        cells = [" ".join(f"{value:.1f}" for value in values) for values in r1]
        rows.append([methods.METHODS[method].title, *cells, f"{gap:.3g}"])
    return table(["", "R@1 undisturbed (%)", "R@1 resumed (%)", "largest difference of the loss"], rows)


def draw(results: list[dict[str, Any]], path: Path) -> None:
    """The curves of the first seed."""
    from recipes import plots

    with plots.plt.rc_context(plots.STYLE):
        figure, axes = plots.new_figure(11, 4, 1, 2)
        for axis, field in zip(axes[0], ("loss", "r1"), strict=True):
            for number, method in enumerate(SETTINGS):
                for stopped in (0, 1):
                    found = next(r for r in results if (r["method"], r["stopped"]) == (method, stopped))["curve"]
                    style = {"color": plots.COLOURS[number], "linestyle": "--" if stopped else "-"}
                    label = methods.METHODS[method].title + (", resumed" if stopped else "")
                    axis.plot([c["step"] for c in found], [c[field] for c in found], label=label, **style)
            axis.set(xlabel="steps", title={"loss": "training loss", "r1": "R@1 image to name"}[field])
        axes[0][1].legend(fontsize=8)
        plots.save_figure(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--every", type=int, default=50, help="steps between measures")
    parser.add_argument("--limit", type=int, default=0, help="training pairs; 0: all")
    args = parser.parse_args()
    torch.set_num_threads(1)
    foreign.register()
    env = {**environment(), **packages.versions()}
    task = GlyphNames(glyphs.load(None), split_seed=0, limit=args.limit)
    results = [
        {
            "method": method,
            "stopped": stopped,
            "seed": seed,
            "curve": trained(method, task, bool(stopped), args.every, seed),
        }
        for seed in args.seeds
        for method in SETTINGS
        for stopped in (0, 1)
    ]
    text = "\n".join([*heading("Stopped and resumed", env), *lines(results)])
    print(text)
    if not args.limit:
        (RESULTS / "peers_resume.md").write_text(text)
        (RESULTS / "peers_resume.json").write_text(json.dumps({"environment": env, "results": results}) + "\n")
        draw(results, RESULTS / "peers_resume.png")


if __name__ == "__main__":
    main()
