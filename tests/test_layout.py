"""Layers of the library: allowed imports between its top-level modules ("rooms"), checked in the source."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

LIBRARY = Path(__file__).parent.parent / "compopt"
# From the lowest floor to the highest. A room may import only rooms of lower floors.
FLOORS = [
    {"accelerator", "batch", "checks", "files", "functional", "rng"},
    {"distributed", "data", "pairs"},
    {"kernel", "stores"},
    {"estimator"},
    {"arguments", "checkpoint", "module", "momentum"} | {"negatives", "objective", "schedules", "temperatures"},
    {"normalizers"},
    {"contrastive"},
    {"curation", "diagnostics", "gradient_cache", "losses", "presets", "testing"},
    {"integrations", "samplers"},
]
# Optional packages, which are imported inside the functions that use them. Callbacks of trainers derive from classes of
# such packages and import them at the top; no other module imports these callbacks.
OPTIONAL = {"accelerate", "deepspeed", "open_clip", "open_clip_train", "safetensors", "scipy", "sklearn"}
OPTIONAL |= {"pyarrow", "sentence_transformers", "threadpoolctl", "tqdm", "transformers"}
# Modules in the language of an optional package, which they import at the top; they are imported inside functions.
OPTIONAL_MODULES = {"compopt.kernel.triton.language"}
# Modules that import nothing of the library but each other, and may be imported by every room.
BELOW_ALL = {f"compopt.kernel.triton.{name}" for name in ("choice", "language", "sweep")}
MODULES = sorted(path for path in LIBRARY.rglob("*.py") if path != LIBRARY / "__init__.py")


def module(path: Path) -> str:
    """Return the name of the module in a file, such as ``compopt.kernel.local``."""
    parts = path.relative_to(LIBRARY.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


NAMES = {module(path) for path in MODULES}


@cache
def imports(source: str) -> list[tuple[str, bool]]:
    """Return the names that a module imports, and whether inside a function; relative ones begin with a dot."""

    def walk(node: ast.AST, inside: bool) -> Iterator[tuple[str, bool]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ImportFrom):
                for alias in child.names:
                    full = f"{child.module}.{alias.name}"
                    yield ("." * child.level + (full if full in NAMES else child.module or "")), inside
            elif isinstance(child, ast.Import):
                for alias in child.names:
                    yield alias.name, inside
            yield from walk(child, inside or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda))

    return list(walk(ast.parse(source), False))


def refused(source: str, here: str) -> list[str]:
    """Return imports forbidden for a module in room ``here``: upwards, of the whole package, relative, by name."""
    found = []
    for name, _ in imports(source):
        other_room = name.startswith("compopt.") and name not in BELOW_ALL and room(name) != here
        upwards = other_room and floor(room(name)) >= floor(here)
        by_name = name == "importlib" and floor(here) < len(FLOORS) - 1  # the top floor has nothing above it
        if upwards or by_name or name == "compopt" or name.startswith("."):
            found.append(name)
    return found


def room(name: str) -> str:
    return name.split(".")[1]


def floor(name: str) -> int:
    return next(number for number, rooms in enumerate(FLOORS) if name in rooms)


def test_every_room_has_a_floor():
    assert {room(name) for name in NAMES} == set().union(*FLOORS)


def test_rooms_import_downwards():
    """Type-only imports count as dependencies too."""
    upwards = {module(path): refused(path.read_text(), room(module(path))) for path in MODULES}
    assert {name: found for name, found in upwards.items() if found} == {}
    for path in MODULES:
        if module(path) in BELOW_ALL:
            assert {n for n, _ in imports(path.read_text()) if n.startswith("compopt.")} <= BELOW_ALL, path


def test_the_page_lists_rooms_in_the_order_of_their_floors():
    listed = re.findall(r"^    (\w+)(?:/|\.py) ", (LIBRARY.parent / "docs" / "architecture.md").read_text(), flags=re.M)
    place = {name: number for number, name in enumerate(listed)}
    assert set(listed) == set().union(*FLOORS)
    for path in MODULES:
        here = room(module(path))
        for name, _ in imports(path.read_text()):
            if name.startswith("compopt.") and name not in BELOW_ALL and room(name) != here:
                assert place[here] < place[room(name)], f"{here} imports {name}, which the page has above it"


def test_no_circles_between_modules():
    """Circular imports inside a room are not allowed either."""
    below = {module(p): {n for n, _ in imports(p.read_text()) if n in NAMES and n != module(p)} for p in MODULES}
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join((*path[path.index(name) :], name))
        if name not in done:
            for other in sorted(below[name]):
                visit(other, (*path, name))
            done.add(name)

    for name in sorted(below):
        visit(name, ())


def test_only_optional_packages_are_imported_inside_functions():
    for path in MODULES:
        inside = {name for name, nested in imports(path.read_text()) if nested} - OPTIONAL_MODULES
        assert {name.split(".")[0] for name in inside} <= OPTIONAL, module(path)
