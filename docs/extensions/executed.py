"""Pages that say ``executed: true`` in their front matter: the build runs their Python and shows what it prints.

A page is one program: its blocks share their names, and run in a folder of their own. An exception is a warning, and
``make docs`` makes warnings errors.

Each of these pages, and of :data:`NOTEBOOKS`, can be downloaded as a notebook.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import tempfile
import traceback
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.util import logging

NOTEBOOKS = ("guides/own_data",)
SETUP = "invisible-code-block: python"
logger = logging.getLogger(__name__)
count = 0


def run(blocks: list[nodes.literal_block], page: str) -> None:
    """Execute the blocks of one page, and put what each prints behind it."""
    global count
    names: dict[str, Any] = {"__name__": "__page__"}
    for block in blocks:
        printed = io.StringIO()
        try:
            with contextlib.redirect_stdout(printed):
                exec(compile(block.astext(), f"{page}:{block.line}", "exec"), names)
        except Exception:
            logger.warning("a block of the page fails:\n%s", traceback.format_exc(), location=block)
            return
        count += 1
        if printed.getvalue():
            output = nodes.literal_block(printed.getvalue(), printed.getvalue(), language="text", classes=["output"])
            block.parent.insert(block.parent.index(block) + 1, output)


def notebook(page: str) -> dict[str, Any]:
    """A Markdown page as a notebook without outputs: its Python blocks are cells, and so is the text between them.

    The blocks that the page does not show are cells too, so that the notebook is a complete program.
    """
    page = re.sub(rf"^<!---\s*{SETUP}\n(.*?)^-->\n", r"```python\n\1```\n", page, flags=re.S | re.M)
    page = re.sub(r"\A---.*?---\n|<!---.*?-->", "", page, flags=re.S)
    cells = []
    for at, part in enumerate(re.split(r"^```python\n(.*?)^```\n", page, flags=re.S | re.M)):
        code = {"cell_type": "code", "execution_count": None, "outputs": []} if at % 2 else {"cell_type": "markdown"}
        if part.strip():
            cells.append({**code, "metadata": {}, "source": part.strip()})
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 4}


def offer(app: Any, doctree: nodes.document) -> None:
    """Write the notebook beside the page, and link to it below the title."""
    path = Path(app.outdir) / f"{app.env.docname}.ipynb"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(notebook(Path(app.env.doc2path(app.env.docname)).read_text()), indent=1))
    link = nodes.reference("", "Download this page as a Jupyter notebook", refuri=path.name)
    next(doctree.findall(nodes.section)).insert(1, nodes.paragraph("", "", link, nodes.Text(".")))


def execute(app: Any, doctree: nodes.document) -> None:
    page = app.env.docname
    runs = app.env.metadata[page].get("executed")
    if runs or page in NOTEBOOKS:
        offer(app, doctree)
    if not runs:
        return
    blocks = [node for node in doctree.findall(nodes.literal_block) if node.get("language") == "python"]
    before = Path.cwd()
    os.environ.setdefault("COMPOPT_CACHE", str(before / ".cache"))  # data that was drawn once
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            run(blocks, page)
        finally:
            os.chdir(before)


def report(app: Any, exception: Exception | None) -> None:
    if exception is None:
        logger.info("blocks executed by this build: %d", count)


def setup(app: Any) -> dict[str, bool]:
    app.connect("doctree-read", execute)
    app.connect("build-finished", report)
    return {"parallel_read_safe": False, "parallel_write_safe": True}
