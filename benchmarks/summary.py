"""The table of README's section on other packages, from the result files.

python -m benchmarks.summary            # rewrites it
python -m benchmarks.summary --check    # fails if README says something else
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from benchmarks.machine import RESULTS, ROOT, table

BEGIN, END = "<!-- python -m benchmarks.summary -->", "<!-- end -->"
COMPARED = ("peers_speed", "peers_quality", "peers_twins", "peers_ranks", "peers_resume", "peers_rows", "scaling")
BATCH, LARGE, SAMPLES = 8192, 32768, 10**8
CHUNKED = "compopt SogCLR, chunk_size=512"
CACHED = "sentence-transformers Cached...Loss"
HEAD = ["", "compopt", "open_clip", "LibAUC", "others"]


def results(name: str) -> Any:
    """Of one script."""
    return json.loads((RESULTS / f"{name}.json").read_text())["results"]


def speed() -> Iterable[list[str]]:
    """Time of a loss with its gradients, and memory."""
    by_size = {r["batch"]: r["rows"] for r in results("peers_speed") if r["suite"] == "bimodal"}
    for B in (1024, BATCH):
        rows = by_size[B]
        times = {name: f"{row['ratio']['products'][1]:.1f} x" for name, row in rows.items()}
        yield [
            f"loss and gradients, B = {B:,}: time, of three bare products",
            f"{times['compopt SogCLR']}; chunked {times[CHUNKED]}",
            f"ClipLoss {times['open_clip ClipLoss']}, SigLipLoss {times['open_clip SigLipLoss']}",
            f"GCLoss_v2 {times['LibAUC GCLoss_v2']}",
            f"sentence-transformers {times[CACHED]}",
        ]
    peak = {name: f"{row['peak'] / 2**20:,.0f}" for name, row in by_size[BATCH].items() if row["peak"]}
    yield [
        f"the same, B = {BATCH:,}: peak memory, MiB",
        f"{peak['compopt SogCLR']}; chunked {peak[CHUNKED]}",
        f"{peak['open_clip ClipLoss']}, {peak['open_clip SigLipLoss']}",
        peak["LibAUC GCLoss_v2"],
        f"sentence-transformers {peak[CACHED]}",
    ]
    large = by_size[LARGE]
    yield [
        f"the same, B = {LARGE:,}, chunked: seconds, MiB",
        f"{large[CHUNKED]['seconds'][1]:.0f}, {large[CHUNKED]['peak'] / 2**20:,.0f}",
        "",
        "",
        f"sentence-transformers {large[CACHED]['seconds'][1]:.0f}, {large[CACHED]['peak'] / 2**20:,.0f}",
    ]


def quality() -> Iterable[list[str]]:
    """R@1 at equal budget."""
    found = results("peers_quality")
    for size in (32, 64, 256):
        own = {one["name"]: statistics.mean(one["r1"]) for one in found if one["batch"] == size}
        yield [
            f"glyphs, batch {size}: R@1, %",
            f"control **{own['InfoNCE without the positive']:.1f}**, SogCLR {own['SogCLR']:.1f}, "
            f"iSogCLR {own['iSogCLR, reference none']:.1f}, Residual **{own['Residual']:.1f}**",
            f"ClipLoss {own['open_clip ClipLoss']:.1f}, SigLipLoss {own['open_clip SigLipLoss']:.1f}",
            f"SogCLR {own['LibAUC SogCLR (GCLoss_v2)']:.1f}, iSogCLR {own['LibAUC iSogCLR (GCLoss_v2)']:.1f}",
            "",
        ]


def ranks() -> Iterable[list[str]]:
    """The gradient on four ranks, and traffic."""
    found = {r["name"]: r for r in results("peers_ranks") if r["ranks"] == 4}
    error = {name: f"{r['error']:.0e}" for name, r in found.items()}
    size = {name: f"{r['bytes'] / 64:,.0f}" for name, r in found.items()}
    full = "open_clip ClipLoss, local_loss, gather_with_grad"
    own, xbm = "compopt SogCLR", "metric-learning NTXentLoss"
    texts = [
        ("gradient on 4 ranks against one: relative error", error),
        ("bytes that a rank sends then, per sample (d = 128)", size),
    ]
    for text, values in texts:
        yield [
            text,
            values[own],
            f"default {values['open_clip ClipLoss']}, local_loss and gather_with_grad {values[full]}",
            f"GCLoss_v2 {values['LibAUC GCLoss_v2']}, v1 {values['LibAUC GCLoss_v1']}",
            f"metric-learning {values[xbm]}, sentence-transformers {values[CACHED]}",
        ]


def resume() -> Iterable[list[str]]:
    """What a resumed run differs in."""
    content = results("peers_resume")
    error = {one["name"]: f"{one['error']:.2g}" for one in content["gradients"]}
    runs = {one["name"]: one for one in content["runs"]}
    yield [
        "next gradient after a resume: relative error",
        error["compopt SogCLR"],
        "keeps nothing",
        f"SogCLR {error['LibAUC GCLoss_v2']}, iSogCLR {error['LibAUC GCLoss_v2, individual']}",
        f"CrossBatchMemory {error['metric-learning CrossBatchMemory']}",
    ]

    def change(name: str) -> str:
        one = runs[name]
        return f"{statistics.mean(one['resumed']) - statistics.mean(one['undisturbed']):+.1f}"

    yield [
        "R@1 of the resumed run, points: SogCLR, iSogCLR",
        f"{change('sogclr')}, {change('isogclr')}",
        "",
        f"{change('libauc-sogclr')}, {change('libauc-isogclr')}",
        "",
    ]


def rows() -> Iterable[list[str]]:
    """Tables of 1e8 rows, and of 1e9 on 64 ranks."""
    found = {r["name"]: r for r in results("peers_rows")["steps"] if r["n"] == SAMPLES}

    def cell(name: str) -> str:
        one = found[name]
        return f"{one['resident'] / 2**20:,.0f} MiB, {statistics.median(one['ms']):.1f} ms, {one['construction']:.2g} s"

    yield [
        "1e8 samples: resident, a step (B = 256), construction; SogCLR",
        cell("compopt SogCLR"),
        "keeps nothing",
        cell("LibAUC GCLoss_v2"),
        "",
    ]
    paper = results("scaling")
    held = paper["memory"]["rows, shard=True"] / 2**20
    yield [
        "1e9 samples, 64 ranks: rows of a rank (computed)",
        f"{held:,.0f} MiB",
        "keeps nothing",
        f"{paper['theirs'] / 2**30:.1f} GiB",
        "",
    ]


def summary() -> str:
    """Ours and the other packages, question by question."""
    body = [row for part in (speed, quality, ranks, resume, rows) for row in part()]
    return _markdown(HEAD, body)


def provenance() -> str:
    """Where, when and with what each of the compared results was measured."""
    body = []
    for name in COMPARED:
        env = json.loads((RESULTS / f"{name}.json").read_text())["environment"]
        machine = f"{env['cpu']}, {env['cores']} cores, {env['memory, GiB']} GiB; {env['threads']} threads"
        versions = f"Python {env['python']}, torch {env['torch']}"
        link = f"[{name}.md](results/{name}.md)"
        body.append([link, machine, versions, env["commit"], env["date"], f"`{env['command']}`"])
    return _markdown(["result", "hardware", "versions", "commit", "date", "command"], body)


def _markdown(head: list[str], body: list[list[str]]) -> str:
    return "\n".join(table(head, body)).replace("|---:", "|---").strip()


PAGES: dict[Path, Callable[[], str]] = {ROOT / "README.md": summary, ROOT / "benchmarks" / "README.md": provenance}


def shown(page: Path) -> tuple[str, str, str]:
    """A page's text before its table, the table, and the text after it."""
    before, rest = page.read_text().split(BEGIN)
    inside, after = rest.split(END)
    return before, inside.strip(), after


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing, fail if a page is out of date")
    check = parser.parse_args().check
    for page, build in PAGES.items():
        before, inside, after = shown(page)
        wanted = build()
        if check and inside != wanted:
            raise SystemExit(f"the table in {page.relative_to(ROOT)} is out of date: python -m benchmarks.summary")
        if not check:
            page.write_text(f"{before}{BEGIN}\n{wanted}\n{END}{after}")


if __name__ == "__main__":
    main()
