"""Paths of the checkout, which a diff names in full, without the machine's part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from docutils import nodes

ROOT = str(Path(__file__).resolve().parent.parent.parent) + "/"


def shorten(app: Any, doctree: nodes.document) -> None:
    for block in doctree.findall(nodes.literal_block):
        if ROOT in block.rawsource:
            block.rawsource = block.rawsource.replace(ROOT, "")
            block.children = [nodes.Text(block.rawsource)]


def setup(app: Any) -> dict[str, bool]:
    app.connect("doctree-read", shorten)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
