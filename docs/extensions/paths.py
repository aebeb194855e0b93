"""Paths of the checkout: a diff names them without the machine's part, and in docstrings those of pages are links."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from docutils import nodes

ROOT = str(Path(__file__).resolve().parent.parent.parent) + "/"


def shorten(app: Any, doctree: nodes.document) -> None:
    for block in doctree.findall(nodes.literal_block):
        if ROOT in block.rawsource:
            block.rawsource = block.rawsource.replace(ROOT, "")
            block.children = [nodes.Text(block.rawsource)]


def link(app: Any, what: str, name: str, value: Any, options: Any, lines: list[str]) -> None:
    """Turn ``docs/which.md`` in a docstring into a link to the page; a page that does not exist is a warning."""
    for at, line in enumerate(lines):
        lines[at] = re.sub(r"``((?:docs|benchmarks)/[\w/]+)\.md``", r":doc:`\1.md </\1>`", line)


def setup(app: Any) -> dict[str, bool]:
    app.connect("doctree-read", shorten)
    app.connect("autodoc-process-docstring", link)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
