"""`make gpu` on the pretend accelerator: every part runs, and the page names the device."""

import json
import subprocess
import sys

import pytest

from benchmarks.report import ROOT


@pytest.mark.slow
def test_every_part_runs_on_the_pretend_accelerator(tmp_path):
    command = [sys.executable, "-m", "benchmarks.gpu", "--pretend", "--output", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    page, found = (tmp_path / "gpu.md").read_text(), json.loads((tmp_path / "gpu.json").read_text())["results"]
    assert "| device | a pretend accelerator on the CPU" in page and "## Left out\n\nNothing." in page
    assert all(not r["waits"] and r["recorded"] for r in found["trace"])
    assert all("failed" not in cell for r in found["losses"] for cell in r["rows"].values())
    assert all(" passed" in r["summary"] and not r["failed"] for r in found["tests"])
