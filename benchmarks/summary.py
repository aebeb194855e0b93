"""Tables of README.md, docs and benchmarks/README.md, from the result files.

python -m benchmarks.summary            # rewrites them
python -m benchmarks.summary --check    # fails if the pages say something else
"""

from __future__ import annotations

import argparse
import re
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from benchmarks.report import ROOT, mean_spread, stored, table
from benchmarks.studies.default.report import first, overview, small_batch, small_sets, variants

BEGIN, END = "<!-- python -m benchmarks.summary -->", "<!-- end -->"
COMPARED = ("peers_speed", "peers_quality", "peers_twins", "peers_ranks", "peers_resume", "peers_rows", "scaling")
BATCH, LARGE, SAMPLES = 8192, 32768, 10**8
CHUNKED = "compopt SogCLR, chunk_size=512"
CACHED = "sentence-transformers Cached...Loss"
LAST = "2310a77"  # the last commit that has the scripts of finished studies
HEAD = ["", "compopt", "open_clip", "LibAUC", "others"]


def results(name: str) -> Any:
    """Figures of one result file."""
    return stored(name)["results"]


def speed() -> Iterable[list[str]]:
    """Time of a loss with its gradients, and memory."""
    by_size = {r["batch"]: r["rows"] for r in results("peers_speed") if r["suite"] == "bimodal" and not r.get("kept")}

    def time(rows: dict[str, Any], name: str) -> str:
        return f"{rows[name]['ratio']['products'][1]:.1f} x" if name in rows else "-"

    def memory(rows: dict[str, Any], name: str) -> str:
        return f"{rows[name]['peak'] / 2**20:,.0f}" if name in rows else "-"

    for B, text, value in (
        (1024, "time, of three bare products", time),
        (BATCH, "time, of three bare products", time),
        (BATCH, "peak memory, MiB", memory),
    ):
        rows = by_size[B]
        yield [
            f"loss and gradients, B = {B:,}: {text}",
            f"SogCLR {value(rows, 'compopt SogCLR')}, chunked {value(rows, CHUNKED)}",
            f"ClipLoss {value(rows, 'open_clip ClipLoss')}, SigLipLoss {value(rows, 'open_clip SigLipLoss')}",
            f"GCLoss_v2 {value(rows, 'LibAUC GCLoss_v2')}",
            f"sentence-transformers {value(rows, CACHED)}",
        ]
    rows = by_size[LARGE]
    both = [f"{rows[name]['seconds'][1]:.0f}, {memory(rows, name)}" for name in (CHUNKED, CACHED)]
    text = f"loss and gradients, B = {LARGE:,}, chunked: seconds, MiB"
    yield [text, both[0], "", "", f"sentence-transformers {both[1]}"]


def quality() -> Iterable[list[str]]:
    """R@1 at equal budget, mean ± standard deviation."""
    found = results("peers_quality")
    for size in (32, 64, 256):
        r1 = {one["name"]: mean_spread(one["r1"]) for one in found if one["batch"] == size}
        yield [
            f"glyphs, batch {size}: R@1, %",
            f"DCL {r1['DCL']}, CLIP {r1['CLIP (learned temperature)']}, "
            f'SogCLR {r1["SogCLR"]}, with `reference="positive"` {r1["SogCLR, reference positive"]}, '
            f"Residual {r1['Residual']}",
            f"ClipLoss {r1['open_clip ClipLoss']}, SigLipLoss {r1['open_clip SigLipLoss']}",
            f"SogCLR (relative to the positive) {r1['LibAUC SogCLR (GCLoss_v2)']}, "
            f"iSogCLR {r1['LibAUC iSogCLR (GCLoss_v2)']}",
            "",
        ]


def ranks() -> Iterable[list[str]]:
    """The gradient on four ranks, and traffic."""
    found = {r["name"]: r for r in results("peers_ranks") if r["ranks"] == 4}

    def direction(name: str) -> str:
        return f"{found[name]['rescaled']:.0e}" + f" (times {1 / found[name]['scale']:.2g})" * (
            found[name]["error"] > 1e-4
        )

    def size(name: str) -> str:
        return f"{found[name]['bytes_per_sample']:,.0f}"

    full = "open_clip ClipLoss, local_loss, gather_with_grad"
    texts = [
        ("gradient on 4 ranks against one: relative error (after a common factor)", direction),
        ("bytes that a rank sends then, per sample (d = 128)", size),
    ]
    for text, value in texts:
        local = value("open_clip ClipLoss, local_loss")
        yield [
            text,
            value("compopt SogCLR"),
            f"default {value('open_clip ClipLoss')}, local_loss {local}, and gather_with_grad {value(full)}",
            f"GCLoss_v2 {value('LibAUC GCLoss_v2')}, v1 {value('LibAUC GCLoss_v1')}",
            f"metric-learning {value('metric-learning NTXentLoss')}, sentence-transformers {value(CACHED)}",
        ]


def resume() -> Iterable[list[str]]:
    """How far a resumed run is from an undisturbed one."""
    found = results("peers_resume")
    error = {one["name"]: f"{one['error']:.2g}" for one in found["gradients"]}
    runs = {one["name"]: one for one in found["runs"]}
    yield [
        "next gradient after a resume by `state_dict()`: relative error (after a common factor)",
        error["compopt SogCLR"],
        "keeps nothing",
        f"SogCLR {error['LibAUC GCLoss_v2']}, iSogCLR {error['LibAUC GCLoss_v2, individual']}",
        f"CrossBatchMemory {error['metric-learning CrossBatchMemory']}",
    ]

    def change(name: str) -> str:
        one = runs[name]
        return mean_spread([a - b for a, b in zip(one["resumed"], one["undisturbed"], strict=True)])

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
        begin = one["construction"] + one["first"]
        return f"{one['resident'] / 2**20:,.0f} MiB, {statistics.median(one['ms']):.1f} ms, {begin:.1f} s"

    yield [
        "1e8 samples, SogCLR: resident, a step (B = 256), construction and first five steps",
        cell("compopt SogCLR"),
        "keeps nothing",
        cell("LibAUC GCLoss_v2"),
        "",
    ]
    paper = results("scaling")
    held = paper["memory"]["rows"] / 2**20
    yield [
        "1e9 samples on 64 ranks: rows that a rank holds (computed)",
        f"{held:,.0f} MiB",
        "keeps nothing",
        f"{paper['theirs'] / 2**30:.1f} GiB",
        "",
    ]


def summary() -> str:
    """Ours and the other packages, question by question."""
    body = [row for part in (speed, quality, ranks, resume, rows) for row in part()]
    return table(HEAD, body, "l")


def sparse_saves() -> str:
    """Return a table of the room of checkpoints after few visits of a large table, in order and uniform."""
    body = [[line[0], line[1], line[2], line[4]] for line in stored("saving_sparse")["results"]]
    head = ["rows are visited", "the table's file, MiB", "the first checkpoint, MiB", "the second one adds, MiB"]
    return table(head, body)


def provenance() -> str:
    """Where, when and with what each of the compared results was measured."""
    body = []
    for name in COMPARED:
        env = stored(name)["environment"]
        machine = f"{env['cpu']}, {env['cores']} cores, {env['memory, GiB']} GiB; {env['threads']} threads"
        versions = f"Python {env['python']}, torch {env['torch']}"
        command = f"`{env['command']}`"
        if "history" in command:
            command = f"{command.replace('python -m ', '')} as of {LAST}"
        body.append([f"[{name}.md](results/{name}.md)", machine, versions, env["commit"], env["date"], command])
    return table(["result", "hardware", "versions", "commit", "date", "command"], body, "l")


PAGES: dict[Path, tuple[Callable[[], str], ...]] = {
    ROOT / "README.md": (first,),
    ROOT / "docs" / "which.md": (variants, small_batch, overview, small_sets),
    ROOT / "docs" / "peers.md": (summary,),
    ROOT / "docs" / "guides" / "checkpoints.md": (sparse_saves,),
    ROOT / "benchmarks" / "README.md": (provenance,),
}


def shown(page: Path) -> tuple[list[str], list[str]]:
    """A page's texts before, between and after its tables, and the tables."""
    parts = re.split(f"{BEGIN}|{END}", page.read_text())
    return parts[::2], [table.strip() for table in parts[1::2]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing, fail if a page is out of date")
    check = parser.parse_args().check
    for page, builds in PAGES.items():
        (first, *texts), tables = shown(page)
        wanted = [build() for build in builds]
        if check and tables != wanted:
            raise SystemExit(f"a table in {page.relative_to(ROOT)} is out of date: python -m benchmarks.summary")
        if not check:
            parts = zip(wanted, texts, strict=True)
            page.write_text(first + "".join(f"{BEGIN}\n{table}\n{END}{text}" for table, text in parts))


if __name__ == "__main__":
    main()
