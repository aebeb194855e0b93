"""Count the torch operations of one training step at a small batch; on an accelerator each is a kernel launch.

    python -m benchmarks.operations                    # writes benchmarks/results/operations.md
    python -m benchmarks.operations --record FILE      # counts of this commit, for the next line
    python -m benchmarks.operations --before FILE      # them too, in a column of their own
    python -m benchmarks.operations --quick            # printed only

A step is a call, its backward pass and ``est.step()``, with B = 64, d = 128, both directions, after some earlier steps.
All operations that ``torch`` dispatches are counted, including allocations, except views, which compute nothing.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import compopt
from benchmarks.contenders import TAU, cross_entropy_both_ways
from benchmarks.kernel import batch
from benchmarks.report import environment, finish, table

B, DIM, PROTOTYPES, STEPS = 64, 128, 256, 9
N = 4 * B  # rows are revisited
RECOMMENDED = "`recommended`"
ESTIMATORS: dict[str, Callable[[], compopt.ContrastiveEstimator]] = {
    "InfoNCE": lambda: compopt.InfoNCEEstimator(TAU),
    "DCL": lambda: compopt.DCLEstimator(TAU),
    "SogCLR": lambda: compopt.SogCLREstimator(N, tau=TAU),
    "iSogCLR": lambda: compopt.ISogCLREstimator(N, tau_init=TAU, rho=1.0),
    "Memory": lambda: compopt.MemoryEstimator(DIM, PROTOTYPES, tau=TAU),
    RECOMMENDED: lambda: compopt.recommended(DIM),
    "FastCLIP v3": lambda: compopt.FastCLIPEstimator(N, version="v3", tau=TAU, rho=1.0),
    "EMC2": lambda: compopt.EMC2Estimator(N),
    "NeuCLIP, 10 updates": lambda: compopt.NeuCLIPEstimator(
        DIM, tau=TAU, prototypes=PROTOTYPES, learn_tau=False, through_alpha=False
    ),
}
REFERENCE = "`F.cross_entropy` both ways"
# Target numbers of operations.
GOALS = {
    "InfoNCE": 36,
    "SogCLR": 46,
    "iSogCLR": 80,
    RECOMMENDED: 60,
    "FastCLIP v3": 100,
    "EMC2": 200,
    "NeuCLIP, 10 updates": 250,
}
ABOUT = f"""Number of operations that torch dispatches in one training step of the estimator alone: a call, its backward
pass and `est.step()`. B = {B}, d = {DIM}, n = {N}, float32, both directions, step number {STEPS}; networks and the
first memory have {PROTOTYPES} prototypes. The memory of `recommended` has 128 samples, none of them in the batch, as
within an epoch; in the first memory some are, which takes a mask. Allocations are counted. Views are not counted,
because they compute nothing. {REFERENCE} includes the normalization of the features. Four operations of iSogCLR and
FastCLIP v3, which set very small exponentials to zero, run on a CPU only."""


class Operations(TorchDispatchMode):
    """Dispatch mode that counts the operations in its context.

    Attributes:
        count: operations so far, without views.
    """

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.namespace == "aten" and not _is_view(func)
        return func(*args, **(kwargs or {}))


def _is_view(func: Any) -> bool:
    """Return whether an operation only returns aliases of its arguments."""
    aliases = [value.alias_info for value in func._schema.returns]
    return bool(aliases) and all(alias is not None and not alias.is_write for alias in aliases)


def operations(make: Callable[[], compopt.ContrastiveEstimator] | None) -> int:
    """Return the number of operations of one step; without an estimator, of cross-entropy."""
    est = None if make is None else make()
    loss = cross_entropy_both_ways if est is None else est
    for t in range(STEPS):
        z1, z2, index = batch(B, DIM, seed=t)
        z1.requires_grad_(), z2.requires_grad_()
        if make is ESTIMATORS[RECOMMENDED]:
            index += t * N
        with Operations() as counted:
            loss(z1, z2, index).backward()
            if est is not None:
                est.step()
    return counted.count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", type=Path, metavar="FILE", help="write only the counts to this file")
    parser.add_argument("--before", type=Path, metavar="FILE", help="file with the counts of an earlier commit")
    parser.add_argument("--quick", action="store_true", help="print the results and write no files")
    args = parser.parse_args()
    torch.set_num_threads(1)
    counts = {REFERENCE: operations(None)} | {name: operations(make) for name, make in ESTIMATORS.items()}
    if args.record:
        args.record.write_text(json.dumps(counts))
        return
    env, before = environment(), json.loads(args.before.read_text()) if args.before else {}
    head = ["", *(["before"] if before else []), "operations", "goal"]
    body = []
    for name, count in counts.items():
        former = [str(before.get(name, ""))] if before else []
        body.append([name, *former, str(count), str(GOALS.get(name, ""))])
    results = {"before": before, "after": counts}
    finish("operations", "Operations of a training step", env, [ABOUT, table(head, body)], results, args.quick)


if __name__ == "__main__":
    main()
