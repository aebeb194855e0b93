"""Trace one training step: the files of the library that it enters, the lines of their functions, and the calls.

    python -m benchmarks.path                          # tables by file of SogCLR and InfoNCE
    python -m benchmarks.path iSogCLR "FastCLIP v3"    # of others, by the names in benchmarks/operations.py
    python -m benchmarks.path --total                  # one line for each estimator

A step is a call, its backward pass and ``optimizer.step()`` with the estimator attached, with B = 64, d = 128, both
directions, one rank, and rows on the device. It is step number 9, when everything is allocated, and nothing warns for
the first time. ``sys.settrace`` reports every call of a Python function.

* *files*: files of ``compopt/`` with a function that is called.
* *functions*: different functions, methods, lambdas and comprehensions.
* *lines*: lines of these functions with their signatures, without docstrings and empty lines. A line of two functions
  counts once. Lines that the step does not execute count too, since a reader must find that out.
* *calls*: calls of these functions; continuing a generator is one. Functions that Python generates, such as the
  constructors of dataclasses, are in no file, and do not count. The step runs in a thread of its own, since the number
  of calls grows with the depth of the stack, through which some checks walk.
"""

from __future__ import annotations

import argparse
import ast
import os
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

import compopt
from benchmarks.kernel import batch
from benchmarks.operations import DIM, ESTIMATORS, STEPS, B
from benchmarks.report import table

LIBRARY = Path(compopt.__file__).parent
FOLDER = f"{LIBRARY}{os.sep}"


@dataclass
class Part:
    """Share of one file, or of all files, in a step: functions entered, numbers of their lines, number of calls."""

    functions: int = 0
    lines: set[int] = field(default_factory=set)
    calls: int = 0


def path(name: str) -> dict[str, Part]:
    """Return the part of each file of the library in one steady step of an estimator, the largest part first."""
    with ThreadPoolExecutor(1) as thread:
        calls = thread.submit(steady_step, name).result()
    parts: dict[str, Part] = {}
    for code, count in calls.items():
        part = parts.setdefault(Path(code.co_filename).relative_to(LIBRARY).as_posix(), Part())
        part.functions += 1
        part.lines |= lines(code)
        part.calls += count
    return dict(sorted(parts.items(), key=lambda item: -len(item[1].lines)))


def steady_step(name: str) -> Counter[CodeType]:
    """Return the number of calls of each function of the library in the last of some steps."""
    est = ESTIMATORS[name]()
    weight = torch.nn.Parameter(torch.eye(DIM))
    optimizer = torch.optim.SGD([weight], lr=0.01)
    est.attach(optimizer)
    for t in range(STEPS):
        z1, z2, index = batch(B, DIM, seed=t)
        z1, z2 = z1 @ weight, z2 @ weight
        with Calls() as entered:
            est(z1, z2, index).backward()
            optimizer.step()
        optimizer.zero_grad()
    return entered.calls


def totals(parts: dict[str, Part]) -> tuple[int, int, int]:
    """Return the numbers of files, lines and calls."""
    return len(parts), sum(len(part.lines) for part in parts.values()), sum(part.calls for part in parts.values())


class Calls:
    """Context that counts the calls of the library's functions by code object."""

    def __init__(self) -> None:
        self.calls: Counter[CodeType] = Counter()

    def __enter__(self) -> Calls:
        sys.settrace(self._count)
        return self

    def __exit__(self, *error: object) -> None:
        sys.settrace(None)

    def _count(self, frame: FrameType, event: str, argument: Any) -> None:
        if frame.f_code.co_filename.startswith(FOLDER):
            self.calls[frame.f_code] += 1


def lines(code: CodeType) -> set[int]:
    """Return the numbers of the lines of a function."""
    return functions(code.co_filename)[code.co_name, code.co_firstlineno]


@cache
def functions(file: str) -> dict[tuple[str, int], set[int]]:
    """Return the numbers of the lines of every function in a file, without its docstring and without empty lines.

    The keys are the name of the code object and its first line, which is that of the first decorator.
    """
    text = Path(file).read_text()
    filled = {number for number, line in enumerate(text.splitlines(), 1) if line.strip()}
    found: dict[tuple[str, int], set[int]] = {}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            start = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            own = spanned(node, start) & filled
            if ast.get_docstring(node) is not None:
                own -= spanned(node.body[0])
            found[node.name, start] = own
        elif name := EXPRESSIONS.get(type(node)):
            assert isinstance(node, ast.expr)
            found.setdefault((name, node.lineno), set()).update(spanned(node))
    return found


def spanned(node: ast.stmt | ast.expr, start: int | None = None) -> set[int]:
    """Return the numbers of the lines of a node."""
    assert node.end_lineno is not None
    return set(range(start or node.lineno, node.end_lineno + 1))


EXPRESSIONS = {
    ast.Lambda: "<lambda>",
    ast.GeneratorExp: "<genexpr>",
    ast.ListComp: "<listcomp>",
    ast.SetComp: "<setcomp>",
    ast.DictComp: "<dictcomp>",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="estimators, by their names in benchmarks/operations.py")
    parser.add_argument("--total", action="store_true", help="print one line for each estimator")
    args = parser.parse_args()
    names = args.names or (list(ESTIMATORS) if args.total else ["SogCLR", "InfoNCE"])
    found = {name: path(name) for name in names}
    rows = [[name, *map(str, totals(parts))] for name, parts in found.items()]
    print(table(["estimator", "files", "lines", "calls"], rows))
    for name, parts in () if args.total else found.items():
        rows = [[file, str(part.functions), str(len(part.lines)), str(part.calls)] for file, part in parts.items()]
        print(f"\n{name}\n{table(['file', 'functions', 'lines', 'calls'], rows)}")


if __name__ == "__main__":
    main()
