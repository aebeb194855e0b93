"""Bias and variance of every method's gradient at one point: what decides how near each can come to a stationary one.

The weights of the problem of ``emc2_convergence`` are trained for a while and then stand still, while each method goes
on: its rows and chains settle, and its gradients are averaged and compared with the exact one::

    python -m benchmarks.studies.emc2_frozen       # some ten minutes with two processes

With step size ``a`` the squared gradient norm that SGD ends with is about ``bias^2 + a L variance / 2`` (``L``: how
fast the gradient changes), so that a method without bias wins once ``a`` is small enough, and not before. In the
paper's units, as there.
"""

from __future__ import annotations

import argparse
import multiprocessing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from benchmarks.studies.emc2_convergence import BY_NAME, Problem, Setting
from benchmarks.studies.emc2_report import title
from recipes import glyphs
from recipes.report import environment, heading, table

# With weights that stand still a stored score is a fresh one, and what burn-in leaves out is as good as what it keeps
CHOSEN = [name for name in BY_NAME if name not in ("EMC2, no burn-in", "EMC2, burn-in 0.5, rescored")]
CHUNK, SINGLE = 200, 500
Job = tuple[str, int, int, int]  # contender, batch size, steps before the weights stand still, calls


def trained(problem: Problem, steps: int) -> None:
    """Train the weights for so many steps against all negatives."""
    optimizer = torch.optim.SGD(problem.model.parameters(), lr=problem.setting.lr / problem.setting.tau)
    for _ in range(steps):
        optimizer.zero_grad()
        problem.all_negatives(problem.batch()).backward()
        optimizer.step()


def gradient(problem: Problem) -> Tensor:
    """Take the gradient that backward has added up, ``(p,)`` float64, in the paper's units, and clear it."""
    weights = list(problem.model.parameters())
    found = torch.cat([weight.grad.double().flatten() for weight in weights if weight.grad is not None])
    problem.model.zero_grad()
    return found / problem.setting.tau


def measure(job: Job) -> dict[str, Any]:
    """Compare one contender's gradients with the exact one; in the first third of the calls it settles."""
    name, batch_size, steps, calls = job
    torch.set_num_threads(1)
    contender, setting = BY_NAME[name], Setting(batch_size=batch_size)
    problem = Problem(setting)
    trained(problem, steps)
    loss, exact = problem.exact()
    est = contender.build(setting.n, setting.tau, setting.seed) if contender.build else None

    def error(count: int) -> Tensor:
        """The error of the mean over so many calls."""
        problem.model.zero_grad()
        total = torch.zeros_like(exact)
        for call in range(count):
            problem.estimate(contender, est, problem.batch()).backward()
            if est is not None:
                est.step()
            if call % CHUNK == CHUNK - 1 or call == count - 1:  # float32 sums of no more than so many
                total += gradient(problem)
        return total / count - exact

    error(calls // 3)
    first, second = error(calls // 3), error(calls // 3)
    bias = float(first @ second)  # noise of the halves is independent, up to chains that cross the middle
    square = sum(float(error(1).square().sum()) for _ in range(SINGLE)) / SINGLE
    return {
        **{"name": name, "batch_size": batch_size, "steps": steps, "calls": calls, "loss": loss},
        **{"exact": float(exact.square().sum()), "bias": bias, "variance": square - max(0.0, bias)},
    }


def results_table(results: Sequence[dict[str, Any]]) -> str:
    """A row per contender and batch size."""
    head = ["batch", "method", "squared bias", "of the exact gradient's square", "variance"]
    body = [
        [str(r["batch_size"]), title(r["name"]), f"{r['bias']:.1e}", f"{100 * r['bias'] / r['exact']:.1f} %"]
        + [f"{r['variance']:.1f}"]
        for r in results
    ]
    return table(head, body, "rlr")


def main(argv: Sequence[str] | None = None) -> None:
    """Measure every contender; write a table."""
    parser = argparse.ArgumentParser("python -m benchmarks.studies.emc2_frozen", description=__doc__.split("::")[0])
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[4, 32])
    parser.add_argument("--steps", type=int, default=2_000, help="before the weights stand still")
    parser.add_argument("--visits", type=int, default=480, help="calls per sample; chains settle in a third of them")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--output-dir", type=Path, default=Path("runs/emc2_convergence"))
    args, env = parser.parse_args(argv), environment()
    calls = {size: args.visits * Setting.n // size for size in args.batch_sizes}
    jobs = [(name, size, args.steps, max(15_000, calls[size])) for size in args.batch_sizes for name in CHOSEN]
    glyphs.load(None)  # rendered once, before the workers want it
    with multiprocessing.get_context("spawn").Pool(args.workers) as pool:
        results = list(tqdm(pool.imap(measure, jobs), total=len(jobs), unit="run"))
    counts = " and ".join(f"{job[3]:,} calls at batch {job[1]}" for job in jobs[:: len(CHOSEN)])
    note = f"After {args.steps:,} steps; {counts}, of which the first third does not count."
    text = [*heading("Bias and variance of the gradient at one point", env), note, "", results_table(results), ""]
    args.output_dir.mkdir(parents=True, exist_ok=True)
    path = args.output_dir / "emc2_frozen.md"
    path.write_text("\n".join(text))
    print(results_table(results), f"wrote {path}", sep="\n\n")


if __name__ == "__main__":
    main()
