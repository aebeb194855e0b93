"""Result page of the measurements on an accelerator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.gpu.losses import CLIP, PRODUCTS, clip_loss
from benchmarks.machine import MIB
from benchmarks.report import heading, spread, table


def page(env: dict[str, Any], results: dict[str, Any]) -> str:
    """Return the page with all sections for which there are results."""
    parts = ["Values are medians (first to third quartile). Peaks are the device memory that one call adds."]
    losses = [*results.get("losses", []), *results.get("largest", [])]
    sections = {tests: "tests", trace: "trace", accuracy: "errors", fused: "fused", steps: "steps", rows: "rows"}
    for write, name in sections.items():
        if results.get(name):
            parts += write(results[name])
    if losses:
        parts += loss_table(losses)
    left_out = "\n".join(f"- {what}" for what in results.get("left_out", []))
    parts += ["## Left out", left_out or "Nothing."]
    return "\n\n".join(["\n".join(heading("Measurements on an accelerator", env)).rstrip(), *parts])


def tests(found: Sequence[dict[str, Any]]) -> list[str]:
    body = [[r["file"], r["summary"], "; ".join(r["failed"]) or "-"] for r in found]
    return ["## Tests marked `accelerator`", table(["file", "summary", "failed"], body, "l")]


def trace(found: Sequence[dict[str, Any]]) -> list[str]:
    """Return the section of launches per step and of calls that waited."""
    body = []
    for r in found:
        waits = ", ".join(f"{name} x {count}" for name, count in r["waits"].items())
        nothing = "none" if r["recorded"] else "the profiler recorded no runtime call of the device"
        body.append([r["name"], f"{r['launches']:.0f}", waits or nothing])
    size = f"B = {found[0]['B']}, d = {found[0]['d']}"
    head = ["estimator", "launches per step", "waits of the training threads"]
    about = f"Calls in a profiler trace of steps with {size} and prefetched rows."
    return ["## Calls that wait for the device", about, table(head, body, "lrl")]


def accuracy(found: Sequence[dict[str, Any]]) -> list[str]:
    names = list(found[0]["rows"])
    body = [[r["precision"], *(f"{r['rows'][name]:.1e}" for name in names)] for r in found]
    about = f"Relative error of both feature gradients compared with float64, B = {found[0]['B']:,}."
    return ["## Errors of gradients", about, table(["products in", *names], body)]


def peak(cell: dict[str, Any]) -> str:
    return "-" if cell.get("peak") is None else f"{cell['peak'] / MIB:,.0f}"


def loss_table(found: Sequence[dict[str, Any]]) -> list[str]:
    """Return the section of time and memory of a loss with its gradients."""
    body = []
    for r in found:
        for name, cell in r["rows"].items():
            line = [f"{r['B']:,}", r["precision"], name]
            if "failed" in cell:
                body.append([*line, cell["failed"], "-", "-", "-"])
                continue
            bases = [r["rows"].get(base, {}).get("seconds") for base in (PRODUCTS, CLIP)]
            ratios = [f"{cell['seconds'][1] / base[1]:.2f} x" if base else "-" for base in bases]
            body.append([*line, spread(cell["seconds"], 2, 1e-3), *ratios, peak(cell)])
    head = ["B", "products in", "", "ms", f"ratio to {PRODUCTS}", f"ratio to {CLIP}", "peak, MiB"]
    return ["## Loss and gradients", f"Time in milliseconds. *{CLIP}* is {clip_loss()[0]}.", table(head, body, "rllr")]


def fused(found: dict[str, Any]) -> list[str]:
    """Return the section of time, memory and errors of the fused kernel and other losses."""
    body = []
    for r in found["times"]:
        for name, cell in r["rows"].items():
            time = cell["failed"] if "failed" in cell else spread(cell["seconds"], 2, 1e-3)
            body.append([f"{r['B']:,}", str(r["d"]), r["precision"], name, time, peak(cell)])
    head = ["B", "d", "products in", "", "ms", "peak, MiB"]
    about = "Loss and gradients for float32 features. *triton* and *contrastive_sums* use the fused kernel."
    names = list(found["errors"][0]["rows"])
    errors = [[r["precision"], *(f"{r['rows'][name]:.1e}" for name in names)] for r in found["errors"]]
    exact = f"Relative error of both feature gradients compared with float64, B = {found['errors'][0]['B']:,}."
    return ["## Fused kernel", about, table(head, body, "rrllr"), exact, table(["products in", *names], errors)]


def steps(found: dict[str, Any]) -> list[str]:
    base, body = found["rows"].get("no loss (a sum)", {}).get("seconds"), []
    for name, cell in found["rows"].items():
        if "failed" in cell:
            body.append([name, cell["failed"], "-", "-"])
        else:
            added = f"{1e3 * (cell['seconds'][1] - base[1]):+.2f}" if base else "-"
            body.append([name, spread(cell["seconds"], 2, 1e-3), added, peak(cell)])
    about = f"Encoders with the shapes of ViT-B/32, bf16, AdamW, B = {found['B']}, n = {found['n']:,}."
    return ["## Training step", about, table(["loss", "ms", "added, ms", "peak, MiB"], body)]


def rows(found: Sequence[dict[str, Any]]) -> list[str]:
    """Return the section of the time that rows add to a step."""
    body = []
    for r in found:
        added = [f"{1e3 * (r[kind][1] - r['bare'][1]):+.3f}" for kind in ("rows", "rows, prefetched")]
        body.append([r["offload"], spread(r["bare"], 2, 1e-3), *added, spread(r["thread"], 3, 1e-3)])
    about = (
        f"Each step reads and commits {found[0]['size']:,} rows during work of the device, n = {found[0]['n']:,}. "
        "*Thread*: time that these calls take in the training thread, with prefetch."
    )
    return ["## Rows", about, table(["rows", "work, ms", "added, ms", "added with prefetch, ms", "thread, ms"], body)]
