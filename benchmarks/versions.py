"""Run the daily tests on several versions of Python and torch: the oldest of both, and each newer Python.

    python -m benchmarks.versions                                # all of VERSIONS, for those Pythons that are installed
    python -m benchmarks.versions --only 3.10:2.4.0 --keep       # one; its environment stays

Each pair gets a separate environment, into which pip installs torch from the package index. The CUDA build of torch
takes 5 GB; the environment is removed unless ``--keep`` is given. The installed optional packages are those of the
samplers and the recipes. Tests of other packages are skipped; those of the pages run only in ``make test``.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.report import RESULTS, ROOT, environment, finish, stored, table

VERSIONS = ("3.10:2.4.0", "3.11:2.4.0", "3.12:2.13.0", "3.13:2.13.0")
PACKAGES = """numpy safetensors fsspec scipy scikit-learn pillow matplotlib tqdm accelerate
    pytest pytest-timeout pytest-xdist hypothesis sybil webdataset setuptools<81""".split()
DAILY = "not full and not launch and not slow"
NOT_HERE = ("test_docs.py", "test_page_blocks.py", "test_pages.py", "test_packaging.py")  # pages, and all adapters
ABOUT = """Results of the daily tests (`python -m benchmarks.versions`), without the tests of the pages and of trainers
that are not installed in these environments. Tests of features that a version of torch lacks are skipped:
`torch.distributed.checkpoint` with parts of rows needs 2.5, and `fully_shard` of FSDP2 needs 2.6."""


def run(python: str, torch: str, folder: Path, workers: int) -> dict[str, Any]:
    """Make an environment and run the daily tests in it."""
    own = str(folder / "bin" / "python")
    if not Path(own).exists():
        subprocess.run([python, "-m", "venv", folder], check=True)
    pip = [own, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, f"torch=={torch}", *PACKAGES], check=True)
    ignored = [f"--ignore=tests/{name}" for name in NOT_HERE]
    options = ["-q", "-m", DAILY, "-n", str(workers), "--dist", "worksteal", "-p", "no:cacheprovider", "-rf", *ignored]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([own, "-m", "pytest", *options], cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True)
    print(done.stdout)
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.M)
    counts = re.findall(r"(\d+) (passed|failed|skipped|errors?)", done.stdout.strip().splitlines()[-1])
    return {"failed": failed, **{f"{kind}_count": int(number) for number, kind in counts}}


def executable(version: str) -> str | None:
    """Return a Python of this version, from the path or from pyenv."""
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    found = [shutil.which(f"python{version}"), *sorted(map(str, root.glob(f"versions/{version}.*/bin/python")))]
    return next((path for path in found if path), None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=VERSIONS, metavar="PYTHON:TORCH")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="folder of the environments")
    parser.add_argument("--keep", action="store_true", help="keep the environments")
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    env, results = environment(), stored("versions")["results"] if (RESULTS / "versions.json").exists() else {}
    for version, torch in (pair.split(":") for pair in args.only):
        if (python := executable(version)) is None:
            print(f"python{version} is not installed")
            continue
        folder = args.folder / f"compopt-{version}-{torch}"
        results[f"{version}:{torch}"] = run(python, torch, folder, args.workers)
        if not args.keep:
            shutil.rmtree(folder)
    rows = []
    for pair, got in sorted(results.items()):
        counts = [str(got.get(f"{kind}_count", 0)) for kind in ("passed", "skipped")]
        rows.append([*pair.split(":"), *counts, ", ".join(got["failed"]) or "none"])
    page = table(["Python", "torch", "passed", "skipped", "failed"], rows, "llrrl")
    finish("versions", "Versions of Python and torch", env, [ABOUT, page], results)


if __name__ == "__main__":
    main()
