"""The house: which room may import which, read from the imports themselves."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import compopt
import compopt.contrastive

LIBRARY = Path(__file__).parent.parent / "compopt"
# From the ground up. A room imports rooms of lower floors, and no others.
FLOORS = [
    {"batch", "checks", "functional", "rng"},
    {"distributed", "data"},
    {"kernel", "stores"},
    {"estimator"},
    {"checkpoint", "module", "negatives", "objective", "samplers", "schedules", "temperatures"},
    {"integrations", "normalizers"},
    {"compositional", "contrastive"},
    {"diagnostics", "presets"},
]
# Packages that are optional; imported inside a function, where they are used.
OPTIONAL = {"accelerate", "deepspeed", "safetensors", "scipy", "sklearn", "threadpoolctl", "tqdm", "transformers"}
MODULES = sorted(path for path in LIBRARY.rglob("*.py") if path != LIBRARY / "__init__.py")


def module(path: Path) -> str:
    """``compopt.kernel.local`` of its file."""
    parts = path.relative_to(LIBRARY.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


NAMES = {module(path) for path in MODULES}


def imports(path: Path) -> Iterator[tuple[str, bool]]:
    """What a module imports, one name each, and whether that is inside a function."""

    def walk(node: ast.AST, inside: bool) -> Iterator[tuple[str, bool]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ImportFrom) and child.module:
                for alias in child.names:
                    full = f"{child.module}.{alias.name}"
                    yield (full if full in NAMES else child.module), inside
            elif isinstance(child, ast.Import):
                for alias in child.names:
                    yield alias.name, inside
            yield from walk(child, inside or isinstance(child, ast.FunctionDef))

    yield from walk(ast.parse(path.read_text()), False)


def room(name: str) -> str:
    return name.split(".")[1]


def floor(name: str) -> int:
    return next(number for number, rooms in enumerate(FLOORS) if name in rooms)


def test_every_room_has_a_floor():
    assert {room(name) for name in NAMES} == set().union(*FLOORS)


@pytest.mark.parametrize("path", MODULES, ids=module)
def test_rooms_import_downwards(path):
    """Type-only imports count: they are dependences too."""
    here = room(module(path))
    for name, _ in imports(path):
        if name.startswith("compopt.") and room(name) != here:
            assert floor(room(name)) < floor(here), f"{module(path)} imports {name}, which is not below it"


def test_no_circles_between_modules():
    """Not inside a room either."""
    below = {module(p): {n for n, _ in imports(p) if n in NAMES and n != module(p)} for p in MODULES}
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join((*path[path.index(name) :], name))
        if name not in done:
            for other in sorted(below[name]):
                visit(other, (*path, name))
            done.add(name)

    for name in sorted(below):
        visit(name, ())


@pytest.mark.parametrize("path", MODULES, ids=module)
def test_only_optional_packages_are_imported_inside_functions(path):
    inside = {name.split(".")[0] for name, nested in imports(path) if nested}
    assert inside <= OPTIONAL


def qualified_calls(run) -> list[str]:
    """Functions of the library that ``run`` calls, in order: ``Class.function`` with the name of each base class."""
    called = []

    def record(frame, event, argument):
        if event != "call" or not frame.f_code.co_filename.startswith(str(LIBRARY)):
            return
        name, owner = frame.f_code.co_name, frame.f_locals.get("self")
        called.extend([name] if owner is None else [f"{base.__name__}.{name}" for base in type(owner).__mro__])

    sys.setprofile(record)
    try:
        run()
    finally:
        sys.setprofile(None)
    return called


def test_the_index_goes_the_way_that_the_module_describes():
    listed = re.findall(r"^(\d+)\. ``([\w.]+)``", compopt.contrastive.__doc__, flags=re.M)
    assert [int(number) for number, _ in listed] == list(range(1, len(listed) + 1))
    assert len(listed) <= 15
    est = compopt.SogCLREstimator(n=10)
    z1, z2 = torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(0)).unbind()

    def one_step():
        est(z1.requires_grad_(), z2, torch.arange(4)).backward()
        est.step()

    called = iter(qualified_calls(one_step))
    for _, name in listed:
        assert name in called, f"{name} was not called, or not after those before it"  # an iterator: in this order
