"""Mutations of a source file, which `benchmarks/mutants.py` applies to the library one at a time.

A mutation replaces one expression or statement; the rest of the file keeps its text and its line numbers. Code that
cannot change a result is not mutated: docstrings, annotations, error messages, decorators, `__repr__`.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

FLIPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Add,
    ast.Mod: ast.Add, ast.MatMult: ast.Mult, ast.Pow: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
    ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip
# functions and the ones that could be written by mistake in their place
NAMES = {
    "min": "max", "amin": "amax", "minimum": "maximum", "argmin": "argmax", "clamp_min": "clamp_max",
    "any": "all", "zeros": "ones", "zeros_like": "ones_like", "sum": "mean", "exp": "log", "cos": "sin",
    "logaddexp": "maximum", "scatter_add_": "scatter_", "index_add_": "index_copy_",
}  # fmt: skip
NAMES |= {other: name for name, other in NAMES.items()}
SYMMETRIC = {"equal", "isinstance", "maximum", "minimum", "max", "min", "logaddexp"}  # no change, or a crash
SILENT = ("__repr__", "__str__", "extra_repr", "_repr", "__del__")  # no effect on results


@dataclass(frozen=True)
class Mutation:
    """One change of one file: the bytes from `start` to `end` become `after`."""

    path: str  # relative to the checkout
    function: str
    line: int
    kind: str
    before: str
    after: str
    start: int
    end: int
    digest: str  # of the unchanged file

    @property
    def key(self) -> str:
        """Unique identifier of this mutation of this version of the file."""
        return f"{self.path}:{self.start}:{self.kind}:{self.after}:{self.digest}"

    def apply(self, source: bytes) -> bytes:
        """Return the source with this mutation."""
        return source[: self.start] + self.after.encode() + source[self.end :]


def is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or isinstance(node, ast.Constant) and isinstance(node.value, str)


def of_expression(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Yield (kind, replacement) for one expression."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        yield "comparison", ast.Compare(node.left, [FLIPS[type(node.ops[0])]()], node.comparators)
    elif isinstance(node, ast.BinOp) and type(node.op) in FLIPS and not (is_text(node.left) or is_text(node.right)):
        yield "arithmetic", ast.BinOp(node.left, FLIPS[type(node.op)](), node.right)
    elif isinstance(node, ast.BoolOp):
        yield "and/or", ast.BoolOp(FLIPS[type(node.op)](), node.values)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
        yield "sign", node.operand
    elif isinstance(node, ast.IfExp):
        yield "branches", ast.IfExp(node.test, node.orelse, node.body)
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield "constant", ast.Constant(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        yield "constant", ast.Constant({0: 1, 1: 0}.get(node.value, node.value + 1))
    elif isinstance(node, ast.Call):
        yield from of_call(node)


def of_call(node: ast.Call) -> Iterator[tuple[str, ast.AST]]:
    """Yield mutations of a call: another function, two swapped arguments, a dropped keyword."""
    if isinstance(node.func, ast.Attribute) and node.func.attr in NAMES:
        other = ast.Attribute(node.func.value, NAMES[node.func.attr], ast.Load())
        yield "function", ast.Call(other, node.args, node.keywords)
    elif isinstance(node.func, ast.Name) and node.func.id in NAMES:
        yield "function", ast.Call(ast.Name(NAMES[node.func.id], ast.Load()), node.args, node.keywords)
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", None)
    if len(node.args) >= 2 and name not in SYMMETRIC:
        first, second = node.args[:2]
        if not isinstance(second, ast.Starred) and ast.dump(first) != ast.dump(second):
            yield "arguments", ast.Call(node.func, [second, first, *node.args[2:]], node.keywords)
    if node.keywords and node.keywords[-1].arg not in (None, "strict"):  # zip's strict is only a check
        yield "keyword", ast.Call(node.func, node.args, node.keywords[:-1])


def of_statement(node: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield (kind, replacement source) for one statement, which may span several lines."""
    writes = isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute | ast.Subscript)
    calls = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    if writes or calls or isinstance(node, ast.AugAssign | ast.Raise | ast.Break | ast.Continue):
        yield "statement", "pass"
    elif isinstance(node, ast.Return) and node.value is not None and not isinstance(node.value, ast.Constant):
        yield "return", "return None"


def is_typing(test: ast.AST) -> bool:
    return isinstance(test, ast.Name) and test.id == "TYPE_CHECKING"


def visited(node: ast.AST, function: str = "") -> Iterator[tuple[ast.AST, str]]:
    """Yield every node that may be mutated, with the qualified name of the function or class that contains it."""
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "decorator_list", "bases", "format_spec", "type_params"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or isinstance(child, ast.JoinedStr | ast.Import | ast.ImportFrom):
                continue
            if isinstance(child, ast.If) and is_typing(child.test):
                continue
            name = function
            if isinstance(child, ast.FunctionDef | ast.ClassDef):
                if child.name in SILENT:
                    continue
                name = f"{function}.{child.name}".lstrip(".")
            yield child, name
            if not isinstance(child, ast.Raise):  # a message is not mutated; the whole statement may be removed
                yield from visited(child, name)


def mutations(path: Path, root: Path) -> list[Mutation]:
    """Return all mutations of a file, in source order."""
    source = path.read_bytes()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found = []

    def add(node: ast.AST, function: str, kind: str, after: str) -> None:
        start, end = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
        before = " ".join(source[start:end].decode().split())
        after += "\n" * (node.end_lineno - node.lineno) if after in ("pass", "return None") else ""
        digest = hashlib.sha256(source).hexdigest()[:12]
        name = path.relative_to(root).as_posix()
        found.append(Mutation(name, function, node.lineno, kind, before, after, start, end, digest))

    for node, function in visited(ast.parse(source)):
        if not function:
            continue  # module level: mostly string constants
        for kind, text in of_statement(node):
            add(node, function, kind, text)
        for kind, changed in of_expression(node):
            add(node, function, kind, f"({ast.unparse(ast.fix_missing_locations(changed))})")
    return [mutation for mutation in found if compiles(mutation, source)]


def compiles(mutation: Mutation, source: bytes) -> bool:
    """Return whether the mutated source parses and differs; parentheses are invalid e.g. in a `del` statement."""
    try:
        tree = ast.parse(mutation.apply(source))
    except SyntaxError:
        return False
    return ast.dump(tree) != ast.dump(ast.parse(source))
