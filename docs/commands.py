"""Run the shell commands of README and of the pages, and write benchmarks/results/commands.md.

python docs/commands.py [--seconds 120]    # in a fresh clone, after `make docs test-clip`
python docs/commands.py --only "make test" "*by_feature*"    # repeats some commands

A command that is still running after ``--seconds`` (targets of make: fifteen minutes) is stopped, with its processes,
and reported as such. Commands that the log has are not run again. Commands that have placeholders or need other
machines or a GPU are listed with the reason, and not run. The pages of open_clip use the environment of
`make test-clip`.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOG = ROOT / "benchmarks" / "results" / "commands.md"
FENCE = re.compile(r"^```(\w*).*?\n(.*?)^```", re.S | re.M)
INLINE = re.compile(r"`((?:make [a-z]|python -m |python docs/)[^`\n]*)`")
PROGRAMS = ("make", "python", "pip", "torchrun", "accelerate", "clip_benchmark", "find", "cp", "sbatch")
OPEN_CLIP = ("docs/clip.md", "docs/open_clip.md")
TARGET = 900  # seconds that a target of make may take
NOT_RUN = {  # pattern of a command -> reason
    r"\.\.\.|NAME|\bDIR\b|PATTERN|^make [A-Z]|=N\b|\bFOLDER\b": "abbreviated",
    r"HOST|/shared|sbatch|nproc_per_node 8": "several machines or GPUs",
    r"ViT-B-32": "needs a data set or a model that is not in a registry",
    r"^make gpu$|benchmarks.gpu$": "needs an accelerator",
    r"global_step100|torch_extensions": "a step of another program; tests/deepspeed runs it",
    r"test-full|make bench|make clean|benchmarks\.versions|fixtures\.make": "long, or changes the checkout",
    r"benchmarks\.studies": "a study of hours",
    r"docs/commands\.py": "this script",
    r"^python -m (recipes\.clip_trainer|compopt\.integrations\.open_clip)$": "the name of a program",
    r"^pip install (torch|torchao|open_clip_torch webdataset)\b": "the environment has it",
}


def pages() -> list[Path]:
    """Return README and the pages, in the order in which they are run."""
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def commands() -> Iterator[tuple[str, str]]:
    """Yield each command once, with the first page that shows it: those of code blocks, then those in the text."""
    seen = set()
    for page in pages():
        text, found = page.read_text(), []
        for language, block in FENCE.findall(text):
            if language in ("", "bash", "console"):
                lines = re.sub(r" *\\\n\s*", " ", block).splitlines()
                found += [re.sub(r"\s+#.*$", "", line).strip() for line in lines]
        found += [" ".join(command.split()) for command in INLINE.findall(FENCE.sub("", text))]
        for command in found:
            words = [word for word in command.split() if not re.match(r"[A-Z_0-9]+=", word)]
            if len(words) > 1 and words[0] in PROGRAMS and command not in seen:
                seen.add(command)
                yield command, page.relative_to(ROOT).as_posix()


def reason(command: str) -> str:
    """Return why a command is not run here, or an empty string."""
    return next((why for pattern, why in NOT_RUN.items() if re.search(pattern, command)), "")


def run(command: str, page: str, seconds: float) -> str:
    """Run a command and return its outcome."""
    seconds = TARGET if command.startswith("make ") else seconds
    env = ROOT / (".venv-clip" if page in OPEN_CLIP else ".venv") / "bin"
    variables = {**os.environ, "PATH": f"{env}:{ROOT / '.venv/bin'}:{os.environ['PATH']}", "DS_ACCELERATOR": "cpu"}
    if re.search("pictures|photos", command):
        prepare()
    began = time.monotonic()
    process = subprocess.Popen(
        ["bash", "-c", command],
        cwd=ROOT,
        env=variables,
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        said, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        said, _ = process.communicate()
        return f"runs; stopped after {seconds:.0f} s"
    if process.returncode:
        print(said[-2000:], file=sys.stderr)
        return f"**failed** with {process.returncode}"
    return f"{time.monotonic() - began:.0f} s"


def prepare() -> None:
    """Make the folders that the pages take as given: pictures with texts, and pictures in folders of classes."""
    from PIL import Image

    from recipes import glyphs

    data = glyphs.load()
    for at in range(0, 8000, 25):
        name = data.names[data.caption[at]]
        for folder in (ROOT / "pictures", ROOT / "photos" / name.split()[0]):
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(data.images[at].numpy()).save(folder / f"{at:05d}.png")
        (ROOT / "pictures" / f"{at:05d}.txt").write_text(name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--only", nargs="+", default=[], metavar="PATTERN", help="repeat some commands")
    args = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    outcomes = logged()
    for command, page in commands():
        if any(fnmatch(command, pattern) for pattern in args.only) if args.only else command not in outcomes:
            outcomes[command] = f"not run: {why}" if (why := reason(command)) else run(command, page, args.seconds)
            print(f"{outcomes[command]:40s} {command}", flush=True)
            write(outcomes, args.seconds)


def write(outcomes: dict[str, str], seconds: float) -> None:
    """Write the log."""
    from benchmarks.report import environment, machine, table

    env = environment()
    about = (
        f"`python docs/commands.py` in a fresh clone with a fresh environment: {machine(env)}, Python {env['python']}, "
        f"torch {env['torch']}, commit {env['commit']}. A command that still runs after {seconds:.0f} s (targets of "
        f"make: {TARGET} s) is stopped. Commit and limit are those of the last run; lines of earlier runs are kept."
    )
    rows = [[f"`{command}`", page, outcomes[command]] for command, page in commands() if command in outcomes]
    parts = ["# The commands of README and of the pages", about, table(["command", "page", "outcome"], rows, "l")]
    LOG.write_text("\n\n".join(parts) + "\n")


def logged() -> dict[str, str]:
    """Return the outcomes in the log by command."""
    lines = LOG.read_text().splitlines() if LOG.exists() else []
    return {cells[0][1:-1]: cells[2] for line in lines if len(cells := line[2:-2].split(" | ")) == 3}


if __name__ == "__main__":
    main()
