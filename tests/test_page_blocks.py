"""Run every Python block of every page. A page is one program: its blocks share their names.

Setup that readers do not need is in an invisible block of the page, an HTML comment that begins with
``<!--- invisible-code-block: python``. Pages that need a package which is not installed are skipped.

python -m tests.test_page_blocks PAGE    # runs one page
"""

from __future__ import annotations

import doctest
import importlib.util
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from tests.launching import environment

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", ROOT / "benchmarks" / "README.md", *(ROOT / "docs").rglob("*.md")])
# packages that a page needs beyond those of the library and the recipes
NEEDS = {
    "docs/beyond_contrast.md": ("sklearn",),
    "docs/coming_from/index.md": ("libauc", "lightly", "pytorch_metric_learning"),
    "docs/guides/accelerate.md": ("accelerate", "deepspeed"),
    "docs/guides/gradient_cache.md": ("accelerate", "transformers"),
    "docs/guides/own_data.md": ("onnxruntime", "onnxscript"),
    "docs/guides/sentence_transformers.md": ("sentence_transformers", "datasets"),
    "docs/guides/transformers.md": ("transformers", "accelerate", "lightning"),
    "docs/open_clip.md": ("open_clip",),
    "docs/shards.md": ("webdataset",),
}


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def written(page: Path) -> int:
    """Return the number of visible Python blocks."""
    return len(re.findall(r"^```python$", page.read_text(), re.M))


# pages that create process groups, start workers or change process-wide state
OF_THEIR_OWN = {*NEEDS, *(f"docs/guides/{page}.md" for page in ("momentum", "pairs", "ranks", "torch"))}
WITH_CODE = [page for page in PAGES if written(page)]


def examples(page: Path):
    from sybil import Sybil
    from sybil.parsers.myst import PythonCodeBlockParser, SkipParser

    parsers = [PythonCodeBlockParser(doctest_optionflags=doctest.ELLIPSIS), SkipParser()]
    return list(Sybil(parsers=parsers, path=str(page.parent)).parse(page).examples())


def run(page: Path) -> None:
    found = examples(page)
    assert len(found) >= written(page)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", category=DeprecationWarning, module=r"<string>|.*\.md")  # code of a page
        for example in found:
            example.evaluate()


@pytest.mark.slow
@pytest.mark.parametrize("page", WITH_CODE, ids=name)
def test_the_blocks_of_a_page_run(page, tmp_path, monkeypatch, request):
    pytest.importorskip("sybil")
    if missing := [package for package in NEEDS.get(name(page), ()) if not importlib.util.find_spec(package)]:
        pytest.skip(f"needs {missing}")
    monkeypatch.setenv("COMPOPT_CACHE", str(ROOT / ".cache"))
    monkeypatch.chdir(tmp_path)
    if "deepspeed" in NEEDS.get(name(page), ()):
        request.getfixturevalue("deepspeed_compiled")
    if name(page) in OF_THEIR_OWN:
        command = [sys.executable, "-m", "tests.test_page_blocks", name(page)]
        done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    else:
        run(page)


def test_what_a_page_needs_is_said_of_pages_that_exist():
    assert {ROOT / page for page in NEEDS} <= set(WITH_CODE)


if __name__ == "__main__":
    run(ROOT / sys.argv[1])
