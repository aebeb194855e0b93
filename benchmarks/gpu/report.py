"""The page of what was measured."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.gpu.losses import CLIP, PRODUCTS, clip_loss
from benchmarks.report import heading, spread, table

MIB = 2**20
Results = dict[str, Any]


def page(env: dict[str, Any], results: Results) -> str:
    lines = heading("On an accelerator", env)
    lines += ["Medians (first to third quartile). Peaks are what one call adds to the device's memory.", ""]
    for write in (tests, trace, accuracy, losses, steps, rows):
        lines += list(write(results))
    left_out = results.get("left_out", [])
    lines += ["## Left out", "", *([f"- {what}" for what in left_out] or ["Nothing."]), ""]
    return "\n".join(lines)


def tests(results: Results) -> Iterator[str]:
    if body := [[r["file"], r["summary"], "; ".join(r["failed"]) or "-"] for r in results.get("tests", [])]:
        yield from ("## The marked tests", "", table(["file", "summary", "failed"], body, "l"), "")


def trace(results: Results) -> Iterator[str]:
    """Launches per step, and what waited."""
    found = results.get("trace", [])
    if not found:
        return
    body = []
    for r in found:
        waits = ", ".join(f"{name} x {count}" for name, count in r["waits"].items())
        nothing = "none" if r["recorded"] else "the profiler recorded no call of the device's runtime"
        body.append([r["name"], f"{r['launches']:.0f}", waits or nothing])
    size = f"B = {found[0]['B']}, d = {found[0]['d']}"
    yield from ("## Calls that wait", "", f"In a profiler's trace of steps with {size}, rows prefetched.", "")
    yield from (table(["estimator", "launches per step", "waits of the training threads"], body, "lrl"), "")


def accuracy(results: Results) -> Iterator[str]:
    found = results.get("errors", [])
    if not found:
        return
    names = list(found[0]["rows"])
    body = [[r["precision"], *(f"{r['rows'][name]['gradient']:.1e}" for name in names)] for r in found]
    yield from (
        "## Exactness",
        "",
        f"Relative error of both feature gradients, B = {found[0]['B']:,}, against float64.",
        "",
    )
    yield from (table(["products in", *names], body), "")


def losses(results: Results) -> Iterator[str]:
    """Time and memory of a loss with its gradients."""
    found = [*results.get("losses", []), *results.get("largest", [])]
    if not found:
        return
    yield from ("## Loss and gradients", "", f"Milliseconds; *{CLIP}* is {clip_loss()[0]}.", "")
    head = ["B", "products in", "", "ms", f"of {PRODUCTS}", f"of {CLIP}", "peak, MiB"]
    body = []
    for r in found:
        for name, cell in r["rows"].items():
            body.append([f"{r['B']:,}", r["precision"], name, *cells(cell, r["rows"])])
    yield from (table(head, body, "rll" + "r"), "")


def cells(cell: dict[str, Any], rows: dict[str, Any]) -> list[str]:
    if "failed" in cell:
        return [cell["failed"], "-", "-", "-"]
    ratios = []
    for base in (PRODUCTS, CLIP):
        other = rows.get(base, {})
        ratios.append(f"{cell['seconds'][1] / other['seconds'][1]:.2f} x" if "seconds" in other else "-")
    peak = cell.get("peak")
    return [spread(cell["seconds"], 2, 1e-3), *ratios, "-" if peak is None else f"{peak / MIB:,.0f}"]


def steps(results: Results) -> Iterator[str]:
    found = results.get("steps", {})
    if not found:
        return
    rows_, base = found["rows"], found["rows"].get("no loss (a sum)", {})
    body = []
    for name, cell in rows_.items():
        if "failed" in cell or "failed" in base or not base:
            body.append(
                [name, cell.get("failed", spread(cell["seconds"], 2, 1e-3) if "seconds" in cell else "-"), "-", "-"]
            )
            continue
        added = 1e3 * (cell["seconds"][1] - base["seconds"][1])
        peak = "-" if cell.get("peak") is None else f"{cell['peak'] / MIB:,.0f}"
        body.append([name, spread(cell["seconds"], 2, 1e-3), f"{added:+.2f}", peak])
    yield from (
        "## A training step",
        "",
        f"Towers of ViT-B/32's shapes, bf16, AdamW, B = {found['B']}, n = {found['n']:,}.",
        "",
    )
    yield from (table(["loss", "ms", "added, ms", "peak, MiB"], body), "")


def rows(results: Results) -> Iterator[str]:
    """What rows add to a step."""
    found = results.get("rows", [])
    if not found:
        return
    body = []
    for r in found:
        added = [1e3 * (r[kind][1] - r["bare"][1]) for kind in ("rows", "rows, prefetched")]
        body.append(
            [r["offload"], spread(r["bare"], 2, 1e-3), *(f"{x:+.3f}" for x in added), spread(r["thread"], 3, 1e-3)]
        )
    size = f"{found[0]['size']:,} rows of 16 bytes, n = {found[0]['n']:,}"
    yield from ("## Rows", "", f"A step of work that reads and commits {size}. *Thread*: what the calls take of the")
    yield from ("training thread's time, with prefetch.", "")
    yield from (table(["rows", "work, ms", "added, ms", "added with prefetch, ms", "thread, ms"], body), "")
