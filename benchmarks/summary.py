"""Generate the tables of README.md, docs and benchmarks/README.md from the result files.

python -m benchmarks.summary            # rewrites them
python -m benchmarks.summary --check    # fails if the pages say something else
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path

from benchmarks.report import ROOT, stored, table
from benchmarks.small_memory import cells
from benchmarks.studies import curation, pretrained
from benchmarks.studies.default.report import first, overview, published, small_batches, variants
from benchmarks.studies.visits import __main__ as visits

BEGIN, END = "<!-- python -m benchmarks.summary -->", "<!-- end -->"
COMPARED = ("peers_speed", "peers_quality", "peers_twins", "peers_ranks", "peers_resume", "peers_rows", "scaling")
LAST = "2310a77"  # the last commit that has the scripts of finished studies


def small_memory() -> str:
    """Return a table of the gradient of a large batch in every framework, in the memory of a micro-batch."""
    forms = ("gradient cache", "own way")
    head = ["framework", "compopt: error", "MiB", "s", "its own way: error", "MiB", "s"]
    body = [
        [each["framework"], *(cell for form in forms for cell in cells(each[form]))]
        for each in stored("small_memory")["results"]
    ]
    return table(head, body)


def token_budget() -> str:
    """Return a table of micro-batches of a fixed size and of budgets of tokens."""
    head = ["micro-batch", "micro-batches", "peak, MiB", "time, s"]
    found = stored("token_budget")["results"]
    return table(head, [[each["size"], str(each["parts"]), *cells(each)[1:]] for each in found])


def provenance() -> str:
    """Return a table of machine, versions, commit and command of each of the compared results."""
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
    ROOT / "docs" / "evidence.md": (small_batches, visits.summary),
    ROOT / "docs" / "results.md": (overview, variants, published),
    ROOT / "docs" / "which.md": (pretrained.summary,),
    ROOT / "docs" / "guides" / "gradient_cache.md": (small_memory, token_budget),
    ROOT / "docs" / "guides" / "curation.md": (curation.summary,),
    ROOT / "benchmarks" / "README.md": (provenance,),
}


def shown(page: Path) -> tuple[list[str], list[str]]:
    """Return the texts of a page before, between and after its tables, and the tables."""
    parts = re.split(f"{BEGIN}|{END}", page.read_text())
    return parts[::2], [table.strip() for table in parts[1::2]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing, and fail if a page is out of date")
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
