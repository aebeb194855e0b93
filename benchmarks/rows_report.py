"""The page that ``benchmarks/rows.py`` writes about what it measured."""

from __future__ import annotations

import argparse

from recipes.report import heading, spread, table

COLD_BATCHES = 20  # batches of a table that was never touched before

ABOUT = """\
A batch is {batch} random rows of 16 bytes (SogCLR, both directions: log u and count). Each cell is the median (first
to third quartile) in microseconds. *First touch*: {cold} batches of a table never touched before; on disk each row
is then a hole in a sparse file. *Warm*: a fixed pool of {pool} batches, visited before and written, in a cycle; its
pages are in memory, its rows mostly not in the processor's caches. On disk at n = 1e9 the pool has a million pages
of 4 KiB, which the kernel keeps writing back: a scatter then marks most of its pages as changed anew, in the writer
thread. *Evicted*: pages of the pool, written to the disk and dropped from memory before. `gather` and `scatter` are
the store's, in the calling thread. `fetch`, `prefetch`, `take`, `commit` are what the training thread pays in a loop
with {work} ms of matrix products between them, in which the reader and writer threads work beside it. Memory is what
the process has at the end beyond what it had before the table: anonymous, and pages of the file."""

STEP_ABOUT = """\
A step is {work} ms of matrix products in the training thread, then reading {batch} rows, then committing them, in a
table that is warm as above. Contenders run round-robin, {steps} steps each, and a difference is taken to the bare
products of the same round."""

TRAINING_ABOUT = (
    "A whole training step of SogCLR, about 20 ms, against the same step with its rows beside the features."
)


US = {"digits": 0, "unit": 1e-6}  # microseconds


def title(result: dict) -> str:
    return f"{result['offload']}, n = {result['n']:,}"


def report(env: dict, args: argparse.Namespace, results: dict) -> str:
    lines = heading("Rows: reading and committing, by placement and size", env)
    lines += [ABOUT.format(batch=args.batch, cold=COLD_BATCHES, pool=args.pool, work=args.work), ""]
    tables = results["tables"]
    names = list(dict.fromkeys(name for r in tables for name in r["seconds"]))
    lines += ["## One table, microseconds", ""]
    body = [[n, *(spread(r["seconds"][n], **US) if n in r["seconds"] else "" for r in tables)] for n in names]
    body += [["creation", *(f"{r['create'] / 1e-6:,.0f}" for r in tables)]]
    body += [[f"{k}, MiB", *(f"{r['memory'][k] / 2**20:,.0f}" for r in tables)] for k in ("RssAnon", "RssFile")]
    lines += [table(["", *map(title, tables)], body), ""]
    if results["steps"]:
        lines += ["## What a step pays, microseconds", ""]
        lines += [STEP_ABOUT.format(batch=args.batch, work=args.step, steps=args.steps), ""]
        lines += [step_table(results["steps"]), ""]
    if results["training"]:
        lines += [
            "## What a step of SogCLR pays, microseconds",
            "",
            TRAINING_ABOUT,
            "",
            step_table(results["training"]),
            "",
        ]
    lines += ["## Rows against columns, microseconds", "", "Four float32 per sample, in memory that was written.", ""]
    head = ["n", "rows: gather", "scatter", "columns: gather", "scatter", "columns / rows"]
    kinds = ["rows, gather", "rows, scatter", "columns, gather", "columns, scatter"]
    body = [
        [f"{r['n']:,}", *(spread(r["seconds"][k], **US) for k in kinds), spread(r["columns to rows"])]
        for r in results["layouts"]
    ]
    return "\n".join([*lines, table(head, body)])


def step_table(results: list[dict]) -> str:
    """What a step takes and what rows add to it, a row per placement."""
    names = list(results[0]["step"])
    return table(["", *names], [[title(r), *(spread(r["step"][n], **US) for n in names)] for r in results])
