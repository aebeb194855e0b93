"""The settings that the study of normalizers compares, and their runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.studies.jobs import FINAL_SEEDS, FINAL_SPLIT, Job

CHECKPOINTS = 5
TAU = 0.07


@dataclass(frozen=True)
class Cell:
    """One setting of a study and its runs, which differ in the seed.

    Attributes:
        study: ``errors``, ``ablation`` or ``residual``.
        table: the table of the study that it belongs to.
        name: its line there.
        jobs: one per seed.
    """

    study: str
    table: str
    name: str
    jobs: tuple[Job, ...]


def _cell(study: str, table: str, name: str, job: Job, seeds: Sequence[int] = FINAL_SEEDS) -> Cell:
    return Cell(study, table, name, tuple(replace(job, seed=seed, split=FINAL_SPLIT) for seed in seeds))


QUEUE = {"updates": 0, "restart_every": 1}
# As the paper has them but for the number of prototypes; one temperature for all, since errors depend on it.
ESTIMATES: dict[str, tuple[str, dict[str, Any]]] = {
    "batch (OpenCLIP without the positive)": ("infonce-no-positive", {}),
    "moving average, reference positive (FastCLIP)": ("sogclr", {"gamma": 0.8, "reference": "positive"}),
    "moving average, reference none (SogCLR)": ("sogclr", {"gamma": 0.8, "reference": "none"}),
    "network (NeuCLIP)": ("neuclip", {"restart_every": 500}),
    "queue alone": ("neuclip", QUEUE),
    "residual, gamma 0.5": ("residual", {"gamma": 0.5}),
    "residual, gamma 0.05": ("residual", {"gamma": 0.05}),
}
# (title, batch, epochs, pairs); the same number of samples is seen
SETTINGS = [("n = 51k, batch 256", 256, 2, 0), ("n = 51k, batch 64", 64, 2, 0), ("n = 5.1k, batch 64", 64, 20, 5139)]


def errors() -> Iterator[Cell]:
    """Figure 2c: squared error of the stored log-normalizers at five checkpoints."""
    for title, batch, epochs, limit in SETTINGS:
        for name, (method, options) in ESTIMATES.items():
            job = Job(method, {"tau": TAU, **options}, batch, epochs, limit=limit, errors=CHECKPOINTS)
            yield _cell("errors", title, name, job, FINAL_SEEDS[:1])


def ablation() -> Iterator[Cell]:
    """Tables 14 to 19: 16,384 pairs, two epochs, batch 64, one thing changed at a time."""
    tables: dict[str, dict[str, dict[str, Any]]] = {
        "Objective and architecture": {
            "unified, prototypes": {},
            "separate, prototypes": {"objective": "separate"},
            "unified, mlp, lr 0.01": {"architecture": "mlp", "network_lr": 0.01},
            "unified, mlp, lr 0.001": {"architecture": "mlp", "network_lr": 0.001},
            "separate, mlp, lr 0.01": {"architecture": "mlp", "objective": "separate", "network_lr": 0.01},
            "separate, mlp, lr 0.001": {"architecture": "mlp", "objective": "separate", "network_lr": 0.001},
        },
        "Commits between restarts": {str(r or "never"): {"restart_every": r} for r in (20, 100, 250, 0)},
        "Updates per batch": {str(u): {"updates": u} for u in (0, 1, 5, 10, 20)},
        "Prototypes": {str(m): {"prototypes": m} for m in (256, 1024, 4096)},
        "Step size": {str(lr): {"network_lr": lr} for lr in (0.01, 0.1, 1.0)},
        "Gradient through alpha": {"off": {}, "on": {"through_alpha": 1}},
    }
    for table, lines in tables.items():
        for name, changed in lines.items():
            options = {"tau": TAU, "restart_every": 100, **changed}
            yield _cell("ablation", table, name, Job("neuclip", options, limit=16384, errors=1))
    for method, name in (("infonce-no-positive", "no network"), ("sogclr", "SogCLR")):
        yield _cell("ablation", "For comparison", name, Job(method, {"tau": TAU}, limit=16384, errors=1))


def residual() -> Iterator[Cell]:
    """The options of the residual normalizer: 8,192 pairs, four epochs, batch 16, one thing changed at a time."""
    tables: dict[str, dict[str, dict[str, Any]]] = {
        "Gain": {f"gamma {g}": {"gamma": g} for g in (0.1, 0.3, 0.5, 0.7, 0.9)},
        "Gradient through alpha": {"on": {}, "off": {"through_alpha": 0}},
        "Prediction": {"before the batch": {}, "after": {"prediction": "after"}},
        "First visit": {"the network believed": {}, "the batch believed": {"first": "ratio"}},
        "Memory per sample": {"a row per sample": {}, "none": {"memory": 0}},
        "Network": {
            "queue of 256": {"prototypes": 256},
            "queue of 1024": {},
            "queue of 4096": {"prototypes": 4096},
            "NeuCLIP's": {"updates": 10, "restart_every": 100},
            "NeuCLIP's, lr 0.1": {"updates": 10, "restart_every": 100, "network_lr": 0.1},
        },
    }
    for table, lines in tables.items():
        for name, changed in lines.items():
            yield _small(table, name, "residual", changed)
    table = "For comparison"
    yield _small(table, "queue alone, no residual, gradient through alpha", "neuclip", {**QUEUE, "through_alpha": 1})
    yield _small(table, "queue alone, no residual", "neuclip", QUEUE)
    for tau in (0.05, 0.07, 0.1):
        yield _small(table, f"stateless control, tau {tau}", "infonce-no-positive", {"tau": tau})
    yield _small(table, "SogCLR, gamma 0.5", "sogclr", {"gamma": 0.5})


def _small(table: str, name: str, method: str, changed: dict[str, Any]) -> Cell:
    options = {"tau": TAU, **changed}
    return _cell("residual", table, name, Job(method, options, 16, 4, limit=8192, errors=1))


STUDIES = {"errors": errors, "ablation": ablation, "residual": residual}
