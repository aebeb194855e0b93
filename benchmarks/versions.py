"""Which versions of Python and torch the daily tests pass on: the oldest of both, and each newer Python.

    python -m benchmarks.versions                                # all of VERSIONS, for those Pythons that are installed
    python -m benchmarks.versions --only 3.10:2.4.0 --keep       # one; its environment stays

Each pair gets an environment of its own, into which pip installs torch as the index has it.  Where that is the build
for CUDA it takes 5 GB, which go again unless ``--keep``.  Of the optional packages there are those of the samplers, the
recipes and remote directories.  Tests of the others skip; those of the pages run in ``make test`` alone.  Writes
``results/versions.md``.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import RESULTS, ROOT, environment, heading, save, table

VERSIONS = ("3.10:2.4.0", "3.11:2.4.0", "3.12:2.13.0", "3.13:2.13.0")
PACKAGES = """numpy safetensors fsspec scipy scikit-learn pillow matplotlib tqdm accelerate
    pytest pytest-timeout pytest-xdist hypothesis sybil webdataset setuptools<81""".split()
DAILY = "not full and not launch and not slow"
NOT_HERE = ("test_docs.py", "test_page_blocks.py", "test_pages.py", "test_packaging.py")  # pages, and every adapter


def run(python: str, torch: str, folder: Path, workers: int) -> dict[str, Any]:
    """Make an environment and run the daily tests in it."""
    if not (folder / "bin" / "python").exists():
        subprocess.run([python, "-m", "venv", folder], check=True)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, f"torch=={torch}", *PACKAGES], check=True)
    ignored = [f"--ignore=tests/{name}" for name in NOT_HERE]
    options = ["-q", "-m", DAILY, "-n", str(workers), "--dist", "worksteal", "-p", "no:cacheprovider", "-rf", *ignored]
    command = [str(folder / "bin" / "python"), "-m", "pytest", *options]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        print(line, end="", flush=True)
        lines.append(line)
    process.wait()
    return {
        "failed": [line.split()[1] for line in lines if line.startswith(("FAILED ", "ERROR "))],
        **counts(lines[-1]),
    }


def counts(line: str) -> dict[str, int]:
    """What pytest's last line counts."""
    return {f"{kind}_count": int(number) for number, kind in re.findall(r"(\d+) (passed|failed|skipped|errors?)", line)}


def installed(versions: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """Those whose Python is on the path or among pyenv's, with its executable."""
    for pair in versions:
        version, torch = pair.split(":")
        found = shutil.which(f"python{version}") or _of_pyenv(version)
        if found is None:
            print(f"python{version} is not installed")
        else:
            yield version, torch, found


def _of_pyenv(version: str) -> str | None:
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    found = sorted(root.glob(f"versions/{version}.*/bin/python"))
    return str(found[-1]) if found else None


def write(results: dict[str, Any]) -> None:
    """``results/versions.md``."""
    env = environment()
    rows = [
        [
            *pair.split(":"),
            str(got.get("passed_count", 0)),
            str(got.get("skipped_count", 0)),
            ", ".join(got["failed"]) or "none",
        ]
        for pair, got in sorted(results.items())
    ]
    lines = [
        *heading("Versions of Python and torch", env),
        "The daily tests (`python -m benchmarks.versions`), without those of pages and of trainers that are not "
        "installed there. Tests skip what a torch does not have: `torch.distributed.checkpoint` with parts of rows "
        "needs 2.5, FSDP2's `fully_shard` 2.6.",
        "",
        table(["Python", "torch", "passed", "skipped", "failed"], rows, "llrrl"),
    ]
    save("versions", "\n".join(lines), env, results)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.versions", description=__doc__)
    parser.add_argument("--only", nargs="+", default=VERSIONS, metavar="PYTHON:TORCH")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="of the environments")
    parser.add_argument("--keep", action="store_true", help="the environments")
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    path = RESULTS / "versions.json"
    results = json.loads(path.read_text())["results"] if path.exists() else {}
    for version, torch, python in installed(args.only):
        folder = args.folder / f"compopt-{version}-{torch}"
        results[f"{version}:{torch}"] = run(python, torch, folder, args.workers)
        write(results)
        if not args.keep:
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
