"""Tables in README.md, docs and benchmarks/README.md match the result files."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import summary


@pytest.mark.slow
@pytest.mark.parametrize("page", summary.PAGES, ids=lambda page: str(page.relative_to(summary.ROOT)))
def test_tables_are_those_of_the_results(page: Path) -> None:
    assert summary.shown(page)[1] == [build() for build in summary.PAGES[page]], "run python -m benchmarks.summary"
