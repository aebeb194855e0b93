"""Random calls, commits and edits of every estimator, compared with its float64 reference in ``tests/reference``.

A trial creates an estimator and its reference (the twin) and makes a few calls. A call is valid at first
(:class:`Given`); functions modify it and return the expected outcome (``AGREE`` with the twin, ``REFUSE``, a loss of
``NAN``, or ``EITHER``). A :class:`Trial` carries out the calls and raises :class:`Wrong` at the first difference.
"""

from __future__ import annotations

import ast
import copy
import functools
import random
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import compopt
from benchmarks.fuzz_damage import digest
from tests import database
from tests.helpers import asked, features, make
from tests.reference import FixedReference
from tests.reference.pairs import may_be_negative

AGREE, REFUSE, NAN, EITHER = "agree", "refuse", "nan", "either"
N, KINDS = 9, ("bimodal", "unimodal", "forward")
CONTEXTS = ("eval", "no_grad", "inference", "autocast", "errors", "gradients")  # besides "train"
OUTCOMES = ("calls", "refused", "agreed", "nan", "uncompared")
LIBRARY = str(Path(compopt.__file__).parent)
CLEAR = (ValueError, TypeError, IndexError, RuntimeError)
# Tolerance of a result relative to the largest entry of the twin's, by the dtype of the features.
TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3, torch.float16: 1e-3, torch.bfloat16: 1e-3}
ROUNDING = {torch.float64: 0.0, torch.float32: 0.0, torch.float16: 2e-3, torch.bfloat16: 1e-2}  # for gradients


class Wrong(Exception):
    """Finding of a trial: kind of the call, what is wrong, and details."""


class HookError(Exception):
    """Error raised by a function of the caller, which must propagate unchanged."""


def raising(*args: Any) -> None:
    raise HookError


# -- a call and its changes ----------------------------------------------------------------------------------------


@dataclass
class Given:
    """Arguments of one call, and properties of its estimator.

    Attributes:
        rng: random generator of the changes.
        args: arguments by name.
        n: number of rows, or ``None``.
        bimodal: whether the two modalities may have separate indices.
        directions: number of directions with anchors.
        learns: whether the estimator learns its temperatures itself.
        network: whether the estimator has a network, which fixes the dimension of the features.
        encodes: whether Markov chains may request features through ``encode``.
        closed: whether candidates beyond those of the batch are refused.
        context: ``"train"`` or one of ``CONTEXTS``; in ``"errors"`` warnings are errors, ``"gradients"`` calls
            ``feature_gradients``.
        table: features of all samples, for ``encode``.
    """

    rng: random.Random
    args: dict[str, Any]
    n: int | None
    bimodal: bool
    directions: int
    learns: bool
    network: bool
    encodes: bool
    closed: bool
    context: str = "train"
    table: Tensor | None = None

    def size(self) -> int:
        return len(self.args["z1"])

    def side(self) -> str:
        return self.rng.choice(["z1", "z2"])

    def both(self, change: Callable[[Tensor], Tensor]) -> None:
        """Apply a change to both features and to ``extra``, which must match them."""
        for name in ("z1", "z2", "extra"):
            if name in self.args:
                self.args[name] = change(self.args[name])

    def integers(self, high: int, count: int | None = None) -> Tensor:
        many = range(self.size() if count is None else count)
        return torch.tensor([self.rng.randrange(high) for _ in many], dtype=torch.int64)

    def replace(self, name: str, position: int, value: Any) -> None:
        """Replace the value at one position of an argument."""
        changed = self.args[name].clone()
        changed[divmod(position, changed.shape[1]) if changed.dim() == 2 else position] = value
        self.args[name] = changed

    def generator(self) -> torch.Generator:
        """Return a torch generator that is seeded by the trial's generator."""
        return torch.Generator().manual_seed(self.rng.randrange(1 << 30))


Change = Callable[[Given], "str | None"]  # None: it does not apply
TAKEN: list[Change] = []  # changes that an estimator accepts
SPOILED: list[Change] = []  # changes that it must refuse, or for which the loss must be NaN


def taken(change: Change) -> Change:
    TAKEN.append(change)
    return change


def spoiled(change: Change) -> Change:
    SPOILED.append(change)
    return change


@taken
def other_memory(given: Given) -> str:
    """Store the same features in another layout: transposed, every second column of a wider tensor, a negated view."""
    layouts = (
        lambda z: z.t().contiguous().t(),
        lambda z: z.repeat_interleave(2, dim=1)[:, ::2],
        lambda z: torch._neg_view(-z),
    )
    given.both(given.rng.choice(layouts))
    return AGREE


@taken
def shared_memory(given: Given) -> str | None:
    """Expand one row to all samples of one side, with a stride of 0, or pass the same tensor for both sides."""
    if given.network:
        return None  # the gradients of its prototypes are rounding errors, which AdaGrad scales to full steps
    name = given.side()
    if given.rng.random() < 0.5:
        given.args[name] = given.args[name][:1].expand(given.size(), -1)
    else:
        given.args["z2"] = given.args["z1"]
    return AGREE


@taken
def scaled(given: Given) -> str:
    factor = given.rng.choice([1e-3, 1e3])
    given.both(lambda z: z * factor)
    return AGREE


@taken
def other_index(given: Given) -> str:
    """Pass the same index in a random integer dtype and with a stride of 3."""
    dtype = given.rng.choice([torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8])
    given.args["index"] = given.args["index"].to(dtype).repeat_interleave(3)[::3]
    return AGREE


@taken
def repeated(given: Given) -> str | None:
    """Put one sample into the batch twice."""
    if given.size() < 3 or len(set(given.args["index"].tolist())) < 3:
        return None
    given.replace("index", 0, given.args["index"][1])
    return AGREE


@taken
def second_index(given: Given) -> str | None:
    if not given.bimodal:
        return None
    given.args["index2"] = torch.randperm(given.n or 20, generator=given.generator())[: given.size()]
    return REFUSE if "encode" in given.args else AGREE


@taken
def labels(given: Given) -> str:
    """Pass labels; two samples share a class if the batch has more than two, sometimes all do."""
    names = list(range(given.size()))
    names[0] = names[-1] if given.size() > 2 else names[0]
    names = [7] * given.size() if given.rng.random() < 0.2 else names
    given.args["labels"] = torch.tensor(names) - given.rng.randrange(3)
    return AGREE


@taken
def extra(given: Given) -> str:
    """Pass up to three extra candidates, sometimes with positions."""
    z, count = given.args["z1"], given.rng.randrange(4)
    given.args["extra"] = torch.randn(count, z.shape[1], generator=given.generator(), dtype=torch.float64).to(z.dtype)
    if given.rng.random() < 0.5 and given.args["index"] is not None:
        given.args["extra_index"] = given.integers(given.n or 20, count)
    return REFUSE if given.encodes or given.closed else AGREE


@taken
def tau(given: Given) -> str:
    """Pass temperatures of a random shape."""
    shape = given.rng.choice([None, (), (given.size(),), (given.size(), 1), (given.size(), given.directions)])
    value: Any = given.rng.uniform(0.1, 0.6)
    if shape is not None:
        spread = torch.rand(shape, generator=given.generator(), dtype=torch.float64) * 0.5 + 0.1
        value = spread.to(given.rng.choice([torch.float64, torch.float32, torch.float16]))
    given.args["tau"] = value
    return REFUSE if given.learns else AGREE


@taken
def encode(given: Given) -> str | None:
    """Pass a function that returns features of samples outside the batch."""
    if not given.encodes:
        return None
    if "index2" in given.args:
        given.args["encode"] = lambda positions: None
        return REFUSE
    z = given.args["z1"]
    pair = torch.randn(2, given.n or 1, z.shape[1], generator=given.generator(), dtype=torch.float64).to(z.dtype)
    given.table = pair
    if given.bimodal:
        given.args["encode"] = lambda positions: (pair[0][positions], pair[1][positions])
    else:
        given.args["encode"] = lambda positions: pair[0][positions]
    return AGREE


@taken
def elsewhere(given: Given) -> str:
    """Make the call in another mode of the estimator or of torch."""
    given.context = given.rng.choice(CONTEXTS)
    return AGREE


# Changes that make features invalid; the first 15 must also be refused when made on both sides.
NOT_FEATURES: tuple[Callable[[Tensor], Any], ...] = (
    *(lambda z: z.long(), lambda z: z > 0, lambda z: z.to(torch.complex64), lambda z: z.to(torch.float8_e5m2)),
    *(lambda z: z.tolist(), lambda z: z.detach().double().resolve_neg().numpy(), lambda z: None, lambda z: 1.0),
    *(lambda z: "z", lambda z: z[0], lambda z: z[None], lambda z: z.sum(), lambda z: z[:, :0]),
    *(lambda z: z.to_sparse(), lambda z: z.to("meta"), lambda z: z[:-1], lambda z: torch.cat([z, z])),
    *(lambda z: z[:, :-1], lambda z: z.to(torch.float64 if z.dtype != torch.float64 else torch.float32)),
)
NOT_POSITIONS: tuple[Callable[[Tensor], Any], ...] = (
    *(lambda i: i.float(), lambda i: i.double(), lambda i: i > 0, lambda i: i.to(torch.complex64)),
    *(lambda i: i.to(torch.uint16), lambda i: i.tolist(), lambda i: i.numpy(), lambda i: 3, lambda i: "index"),
    *(lambda i: i[:-1], lambda i: torch.cat([i, i]), lambda i: i[:, None], lambda i: i[None], lambda i: i[0]),
    *(lambda i: i.to("meta"), lambda i: i.to_sparse()),
)
NOT_TAU: tuple[Callable[[int], Any], ...] = (
    *(lambda size, value=value: value for value in (0.0, -0.1, float("nan"), float("inf"), True, "0.1", 0.1j)),
    *(lambda size: [0.1] * size, lambda size: np.full(size, 0.1), lambda size: torch.tensor(0.0)),
    *(lambda size: torch.tensor(float("nan")), lambda size: torch.full((size,), float("inf"))),
    *(lambda size: torch.full((size, 1), -0.1), lambda size: torch.ones(size, dtype=torch.int64)),
    *(lambda size: torch.ones(size, dtype=torch.complex64), lambda size: torch.full((size + 1,), 0.1)),
    *(lambda size: torch.full((size, 3), 0.1), lambda size: torch.full((1, size, 1), 0.1)),
    *(lambda size: torch.full((size,), 0.1, device="meta"), lambda size: torch.full((size,), 0.1).to_sparse()),
)
BAD_VALUES = (float("nan"), float("inf"), float("-inf"))
FAR = (-1, -(1 << 63), (1 << 63) - 1, 1 << 31, 1 << 32)
TINY = 5  # smaller values fit into every integer dtype


@spoiled
def bad_features(given: Given) -> str:
    """Replace one side by a value that is not a matrix of features that matches the other side."""
    name = given.side()
    given.args[name] = given.rng.choice(NOT_FEATURES)(given.args[name])
    return REFUSE


@spoiled
def bad_both(given: Given) -> str:
    """Replace both sides by values that are not matrices of features of at least two samples."""
    change, before = given.rng.choice([*NOT_FEATURES[:15], lambda z: z[:0], lambda z: z[:1]]), given.size()
    for name in ("z1", "z2"):
        given.args[name] = change(given.args[name])
    z = given.args["z1"]
    if isinstance(z, Tensor) and z.dim() == 2 and z.layout == torch.strided and given.size() < before:
        given.args["index"] = None if given.args["index"] is None else given.args["index"][: given.size()]
    return REFUSE


@spoiled
def bad_dimension(given: Given) -> str | None:
    """Pass features whose dimension differs from that of the network."""
    if not given.network:
        return None
    given.both(lambda z: z.repeat(1, 2))
    return REFUSE


@spoiled
def no_index(given: Given) -> str | None:
    if given.network and given.n is None:
        return None  # a memory distinguishes the internal numbers of samples without an index
    given.args["index"] = None
    told = "extra_index" not in given.args or "index2" in given.args  # extra_index has positions of the second modality
    return AGREE if given.n is None and told else REFUSE


@spoiled
def out_of_range(given: Given) -> str | None:
    """Pass a position that is out of range."""
    if given.n is None or given.args["index"] is None:
        return None
    name = given.rng.choice([name for name in ("index", "index2") if name in given.args])
    given.args[name] = given.args[name].long()
    given.replace(name, given.rng.randrange(given.size()), given.rng.choice([given.n, given.n + 1, *FAR]))
    return EITHER if name == "index2" and given.directions == 1 else REFUSE


@spoiled
def extra_out_of_range(given: Given) -> str | None:
    """Pass an extra candidate whose position is out of range."""
    if given.n is None or given.encodes or "index2" in given.args:
        return None
    given.args["extra"] = torch.ones(2, given.args["z1"].shape[1], dtype=given.args["z1"].dtype)
    given.args["extra_index"] = torch.tensor([0, given.rng.choice([given.n, *FAR])])
    return REFUSE


@spoiled
def bad_positions(given: Given) -> str | None:
    """Replace positions or labels by a value of an invalid type or shape."""
    name = given.rng.choice(["index", "index", "index2", "labels"])
    if name == "index2" and not given.bimodal:
        return None
    value = given.integers(TINY) if given.args.get(name) is None else given.args[name]
    given.args[name] = given.rng.choice(NOT_POSITIONS)(value)
    return REFUSE


@spoiled
def bad_extra(given: Given) -> str:
    """Pass invalid extra candidates, or positions of extra candidates that are invalid or missing."""
    z = given.args["z1"]
    given.args["extra"] = given.rng.choice([*NOT_FEATURES[:6], *NOT_FEATURES[7:15], *NOT_FEATURES[17:]])(z)
    if given.rng.random() < 0.3:
        given.args["extra"] = given.rng.choice([None, z])
        given.args["extra_index"] = given.rng.choice(NOT_POSITIONS)(given.integers(TINY))
    return REFUSE


@spoiled
def bad_tau(given: Given) -> str:
    given.args["tau"] = given.rng.choice(NOT_TAU)(given.size())
    return REFUSE


@spoiled
def extreme_tau(given: Given) -> str:
    value = given.rng.choice([1e-300, 1e-30, 1e-8, 1e-4, 1e8, 1e30, 1e300])
    given.args["tau"] = given.rng.choice([value, torch.tensor(value, dtype=torch.float64)])
    return REFUSE if given.learns else EITHER


@spoiled
def one_sample(given: Given) -> str | None:
    """Give all samples of the batch the same index."""
    if "index2" in given.args:
        return None
    given.args["index"] = torch.full((given.size(),), given.rng.randrange(TINY))
    return REFUSE


@spoiled
def index2_of_views(given: Given) -> str | None:
    """Pass a second index if there is no second modality."""
    if given.bimodal:
        return None
    given.args["index2"] = given.integers(TINY)
    return REFUSE


@spoiled
def bad_encode(given: Given) -> str | None:
    """Pass an ``encode`` that is invalid, raises, or returns invalid values; the chains may never call it."""
    z = given.args["z1"]
    d = z.shape[1]
    wrong = [
        *(raising, 7, lambda at: None, lambda at: "features", lambda at: z[:0], lambda at: (z.long(), z.long())),
        lambda at: (torch.ones(len(at), d, dtype=z.dtype), None),
        lambda at: [torch.full((len(at), d), float("nan"), dtype=z.dtype)] * 2,
        lambda at: [torch.ones(len(at), d, dtype=torch.int64)] * 2,
        lambda at: [torch.ones(len(at), d, device="meta")] * 2,
    ]
    if not given.encodes:
        return None
    given.args["encode"] = given.rng.choice(wrong)
    return EITHER if "index2" not in given.args and given.args["encode"] != 7 else REFUSE


@spoiled
def not_finite(given: Given) -> str | None:
    """Set one value to NaN or infinity, or to a finite value for which the norm of the row overflows."""
    if given.rng.random() < 0.5:
        name = given.rng.choice([name for name in ("z1", "z2", "extra") if len(given.args.get(name, ()))])
        value = given.rng.choice(BAD_VALUES)
    else:
        name, dtype = given.side(), given.args["z1"].dtype
        if dtype == torch.float16:
            return None
        value = 1e200 if dtype == torch.float64 else 1e30
    given.replace(name, given.rng.randrange(given.args[name].numel()), value)
    return NAN


@spoiled
def without_direction(given: Given) -> str:
    """Scale a row to zero or almost zero, or pass an inference tensor, which autograd cannot save."""
    name, row = given.side(), given.rng.randrange(given.size())
    if given.rng.random() < 0.5:
        with torch.inference_mode():
            given.args[name] = given.args[name].clone()
    else:
        given.args[name] = given.args[name].clone()
        given.args[name][row] *= given.rng.choice([0.0, 1e-30, 1e-45])
    return EITHER


# invalid values and extreme values of hyper-parameters
REFUSED_VALUES = (
    *(float("nan"), "x", b"x", {}, object(), 1j, [1.0, 2.0, 3.0], lambda: 0, np.ones(3), torch.ones(3)),
    *(torch.tensor(float("nan")), torch.ones((), device="meta"), torch.ones(1, 1)),
)
EXTREME_VALUES = (float("inf"), float("-inf"), -1, 0, 1e300, -1e300, 1 << 70, None, True, torch.tensor(2), (1, 2))


# -- judging -------------------------------------------------------------------------------------------------------


@functools.cache
def raises(path: str) -> list[tuple[int, int]]:
    """Return the line ranges of all ``raise`` statements of a file."""
    nodes = ast.walk(ast.parse(Path(path).read_text()))
    return [(node.lineno, node.end_lineno or node.lineno) for node in nodes if isinstance(node, ast.Raise)]


def is_clear(error: BaseException) -> bool:
    """Return whether a ``raise`` statement of the library raised the error, with a documented type and a message."""
    if isinstance(error, Warning):  # where warnings are errors
        return True
    frame = traceback.extract_tb(error.__traceback__)[-1]
    mine = frame.filename.startswith(LIBRARY) and any(a <= (frame.lineno or 0) <= b for a, b in raises(frame.filename))
    return mine and type(error) in CLEAR and len(str(error)) > 10


def fingerprint(est: compopt.ContrastiveEstimator) -> tuple[str, int, str]:
    """Return a digest of the state, the number of pending calls, and a digest of the state after a commit."""
    later = copy.deepcopy(est)
    later.step()
    return digest(est), est.pending, digest(later)


def leaf(value: Any) -> Any:
    """Return a floating-point tensor as a leaf of autograd's graph with the same strides; other values unchanged."""
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.is_meta or value.is_inference():
        return value
    return value.detach().requires_grad_()


class CallTau(FixedReference):
    """Temperatures of one call, in the order in which the twin reads them: by direction, then by sample."""

    def __init__(self, tau: float | Tensor, batch: int, directions: int) -> None:
        spread = torch.as_tensor(tau, dtype=torch.float64).detach()
        spread = spread[:, None] if spread.dim() == 1 else spread
        self.values: Iterator[float] = iter(spread.expand(batch, directions).t().reshape(-1).tolist())

    def value(self, ref: Any, row: int, column: int) -> float:
        return next(self.values)


class Trial:
    """One estimator with its twin, and a few random calls, commits and edits.

    Args:
        seed, number: seed of all random draws.
        counts: numbers of calls by their last change and their outcome, updated in place.
    """

    def __init__(self, seed: int, number: int, counts: dict[str, Counter[str]]) -> None:
        self.rng, self.counts, self.done = random.Random(f"{seed}:{number}"), counts, False
        rng = self.rng
        simple = [info for info in database.DATABASE if not info.network]
        self.info = rng.choice(simple if rng.random() < 0.8 else database.DATABASE)
        self.mode, self.n = rng.choice(KINDS[: 2 if self.info.name.startswith("clip") else 3]), N
        exact = rng.random() < 0.6
        rows = torch.float64 if exact else torch.float32
        self.dtype = rows if exact else rng.choice([torch.float32, torch.float16, torch.bfloat16, torch.float32])
        hyper = rng.choice([0.1, 0.2, 0.5]), rng.choice([0.3, 0.9, 1.0])
        self.est, self.ref = make(self.info, self.mode, N, rows, *hyper)
        if self.est.n is None:
            self.ref.groups[0]["n"] = 1 << 63
        self.draws = torch.Generator().manual_seed(rng.randrange(1 << 30))
        # Sampling and training amplify rounding errors: they are not compared in lower precision.
        self.slack = 100.0 if self.info.network else 1.0
        self.compared = exact or not (self.info.draws or self.info.network)
        self.names: list[str] = []  # changes of the last call

    def run(self) -> None:
        """Carry out a few actions and compare the rows at the end."""
        actions = {self.call: 20, self.commit: 3, self.discard: 1, self.edit: 1, self.spoil_groups: 2}
        actions |= {self.hook: 1, self.append: 1}
        for _ in range(self.rng.randint(1, 4)):
            self.rng.choices(list(actions), list(actions.values()))[0]()
            if self.done:
                return
        self.commit()

    def count(self, kind: str, outcome: str) -> None:
        self.counts.setdefault(kind, Counter()).update(["calls", outcome])

    # actions

    def commit(self) -> None:
        self.est.step()
        self.ref.step()
        self.compare_rows("commit")

    def discard(self) -> None:
        self.est.discard()
        self.ref.discard()

    def edit(self) -> None:
        """Change hyper-parameters to other valid values."""
        groups = self.est.sample_groups
        position = self.rng.randrange(len(groups))
        for key, value in (("gamma", 0.5), ("tau", 0.3), ("rho", 0.2), ("max_grad", 1.0)):
            if key in groups[position] and self.rng.random() < 0.5:
                groups[position][key] = self.ref.groups[position][key] = value

    def append(self) -> None:
        """Add a sample group, often of an invalid size."""
        before, count = fingerprint(self.est), self.rng.choice([3, 0, -1, 1.5, "3", None, True])
        error = self.attempt("add_sample_group", lambda: self.est.add_sample_group({"n": count}))
        legal = count == 3 and self.est.n is not None and error is None
        self.judge_refusal("add_sample_group", error, before, None if legal else REFUSE)
        if legal:
            self.ref.groups.append({**self.ref.groups[0], **self.est.sample_groups[-1]})
            self.n += count

    def hook(self) -> None:
        """Register a hook that raises before or after a commit."""
        before, pending, early = fingerprint(self.est), self.est.pending, self.rng.random() < 0.5
        register = self.est.register_step_pre_hook if early else self.est.register_step_post_hook
        handle = register(raising)
        try:
            self.est.step()
        except HookError:
            if not pending:
                raise Wrong("hook", "program failed", "called with nothing pending") from None
        finally:
            handle.remove()
        self.count("hook", "refused" if pending else "agreed")
        if early or not pending:
            self.same("hook", before)
        else:
            self.ref.step()
            self.compare_rows("hook")

    def spoil_groups(self) -> None:
        """Set an invalid or extreme hyper-parameter; a refused edit must change nothing."""
        group = self.rng.choice(self.est.sample_groups)
        kept = dict(group)
        if not kept:
            return
        before, key = fingerprint(self.est), self.rng.choice(sorted(kept))
        value = self.rng.choice([*REFUSED_VALUES, *EXTREME_VALUES])
        if isinstance(kept[key], int) and isinstance(value, int) and value > 9:
            return  # so many updates would take too long
        what, shape = f"sample_groups {key}={value!r:.40}", self.rng.random()
        expected = REFUSE if shape < 0.2 or any(value is one for one in REFUSED_VALUES) else EITHER
        new = {key: value, "unknown": 1} if shape < 0.1 else {key: value}
        error = self.attempt(what, (lambda: group.pop(key)) if 0.1 <= shape < 0.2 else (lambda: group.update(new)))
        if error is not None or expected is REFUSE:
            self.judge_refusal("sample_groups", error, before, expected, what)
            return
        self.attempt(what, lambda: self.est(**self.asked(self.given().args)))
        self.end("sample_groups")  # an accepted value: nothing to compare with

    def given(self) -> Given:
        """Return a valid call."""
        batch = self.rng.randint(2, 4)
        z1, z2 = features(batch, database.DIM, self.rng.randrange(1 << 30), dtype=self.dtype)
        index = torch.randperm(self.n, generator=self.draws)[:batch]
        modes = (self.mode != "unimodal", 1 if self.mode == "forward" else 2)
        closed = isinstance(self.est.normalizer, compopt.SigmoidNormalizer)
        known = (self.est.n, *modes, self.est.temperature.learns, self.info.network, self.info.draws, closed)
        return Given(self.rng, {"z1": z1, "z2": z2, "index": index}, *known)

    def call(self) -> None:
        """Make a call with some changes and check its outcome."""
        given, self.names, expected = self.given(), ["unchanged"], AGREE
        changes = self.rng.sample(TAKEN, self.rng.choices([0, 1, 2, 3], [1, 3, 3, 2])[0])
        if self.rng.random() < 0.45:
            changes.append(self.rng.choice(SPOILED))
        for change in changes:
            if verdict := change(given):
                self.names.append(change.__name__)
                expected = verdict
            if expected == REFUSE:
                break
        kind, depositing = self.names[-1], given.context in ("train", "autocast", "errors", "gradients")
        unsure = expected != AGREE or not depositing or given.context == "errors"
        before = fingerprint(self.est) if unsure else None
        leaves = {name: leaf(given.args[name]) for name in ("z1", "z2", "extra", "tau") if name in given.args}
        found: list[Tensor] = []
        error = self.attempt(kind, lambda: found.append(self.enter(given, leaves)))
        if error is not None:
            mild = given.context == "errors" and isinstance(error, Warning)
            self.judge_refusal(kind, error, before, EITHER if mild else expected)
            return
        if expected == REFUSE:
            raise Wrong(kind, "not refused", "")
        if not depositing:
            self.same(kind, before)
        if expected == NAN:
            self.judge_nan(kind, given, found[0], before)
        elif expected == EITHER:
            self.end(kind)
        else:
            self.judge_numbers(kind, given, leaves, found[0], depositing)

    def enter(self, given: Given, leaves: dict[str, Any]) -> Tensor:
        """Call the estimator in the given context and run the backward pass."""
        modes = {
            "no_grad": torch.no_grad,
            "inference": torch.inference_mode,
            "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
            "errors": warnings.catch_warnings,
        }
        with ExitStack() as stack:
            if given.context in modes:
                stack.enter_context(modes[given.context]())
            if given.context == "errors":
                warnings.simplefilter("error")
            self.est.train(given.context != "eval")
            stack.callback(self.est.train)
            if given.context == "gradients" and "encode" not in given.args:
                loss, *gradients = self.est.feature_gradients(**self.asked(given.args))
                names = [name for name in ("z1", "z2", "extra") if name in leaves]
                for name, gradient in zip(names, gradients, strict=True):
                    leaves[name].grad = gradient
                leaves.pop("tau", None)
                return loss
            loss = self.est(**self.asked({**given.args, **leaves}))
        if loss.requires_grad:
            if self.info.tau_leaf is not None:  # a temperature that the user's optimizer learns
                self.info.tau_leaf(self.est).grad = None
            loss.backward()
        return loss.detach()

    def asked(self, args: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of a call from their parts, and give the sampler its ``encode``."""
        sampler = hasattr(self.est.normalizer, "encode")
        parts = {name: value for name, value in args.items() if name != "encode"}
        return asked(self.est, **parts, **({"encode": args.get("encode")} if sampler else {}))

    def attempt(self, kind: str, action: Callable[[], object]) -> Exception | None:
        """Run an action and return its error, if any; raise :class:`Wrong` if the error is not clear."""
        try:
            action()
        except HookError as error:
            return error
        except Exception as error:
            if not is_clear(error):
                at = traceback.extract_tb(error.__traceback__)[-1]
                place = f"({Path(at.filename).name}:{at.lineno})"
                what = f"{kind}: {type(error).__name__}: {str(error)[:300]} {place}"
                raise Wrong(kind.split()[0], "unclear error", what) from error
            return error
        return None

    def end(self, kind: str) -> None:
        """Commit and end the trial, as the twin does not cover the following states."""
        self.done = True
        self.attempt(kind, self.est.step)
        self.count(kind, "uncompared")

    # checks

    def judge_refusal(
        self, kind: str, error: Exception | None, before: Any, expected: str | None, what: str = ""
    ) -> None:
        """Check that the call was refused only if expected, and that a refusal left the state unchanged."""
        if error is None:
            if expected == REFUSE:
                raise Wrong(kind, "not refused", what)
            self.count(kind, "agreed")
            return
        if expected in (AGREE, NAN, None):
            raise Wrong(kind, "refused wrongly", f"{type(error).__name__}: {error}"[:300])
        self.same(kind, before, what)
        self.count(kind, "refused")

    def same(self, kind: str, before: Any, what: str = "") -> None:
        """Check that no bit of the state has changed."""
        if before is not None and fingerprint(self.est) != before:
            raise Wrong(kind, "state changed", what)

    def judge_nan(self, kind: str, given: Given, loss: Tensor, before: Any) -> None:
        """Check that the loss is not finite and that the next commit keeps all affected rows and the other state."""
        if bool(loss.isfinite()):
            raise Wrong(kind, "loss not NaN", f"{loss.item()}")
        self.count(kind, "nan")
        self.done = True
        state = self.est.state_dict()
        self.est.step()
        after = self.est.state_dict()
        if not before[1]:  # earlier pending rows may or may not be committed
            reached = self.reached(given)
            pairs = []
            for name, own in state["parts"].items():
                new = after["parts"][name]
                pairs += [(rows[reached], new["rows"][key][reached]) for key, rows in own["rows"].items()]
                if reached.numel():
                    pairs += [(value, new["state"][key]) for key, value in own["state"].items()]
            if not all(torch.equal(one, other) for one, other in pairs):
                raise Wrong(kind, "state changed", "rows of a bad batch")
        rows = [values for own in after["parts"].values() for values in own["rows"].values()]
        if not all(bool(values.isfinite().all()) for values in rows):
            raise Wrong(kind, "state changed", "rows are not finite")

    def reached(self, given: Given) -> Tensor:
        """Return the rows that a bad feature certainly affects: all rows, or only those of its own sample."""
        good = torch.linalg.vector_norm(given.args["z1"], dim=1).isfinite()
        good &= torch.linalg.vector_norm(given.args["z2"], dim=1).isfinite()
        index = given.args["index"]
        if index is None or good.all():  # the value is in extra: anchors of which it is no negative are committed
            return torch.arange(0)
        if self.mode != "forward" and not {"index2", "extra", "labels"} & set(given.args):
            return torch.arange(self.n)
        other = given.args.get("index2", index)
        visited = set(index[good].tolist()) | set(other.tolist())
        return torch.tensor(sorted(set(index[~good].tolist()) - visited), dtype=torch.int64)

    def judge_numbers(self, kind: str, given: Given, leaves: dict[str, Any], loss: Tensor, depositing: bool) -> None:
        """Check that loss and gradients agree with the twin's."""
        want = self.twin(given, depositing) if self.compared else None
        if want is None:
            if not bool(loss.isfinite()) and not set(self.names) & {"labels", "second_index", "extreme_tau"}:
                raise Wrong(kind, "other numbers", f"loss {loss.item()}")
            self.count(kind, "uncompared")
            self.done = self.compared
            return
        rtol = TOLERANCE[self.dtype if self.est.dtype == torch.float64 else torch.float32]
        self.near(kind, "loss", loss, want[0], rtol, 1e-3 if rtol > 1e-6 else 1e-9)
        if given.context not in ("no_grad", "inference"):
            names = [name for name in ("z1", "z2", "extra") if name in leaves]
            largest = max(float(g.abs().max()) for g in want[1:] if g.numel())
            shortest = min(float(given.args[name].double().norm(dim=1).min()) for name in ("z1", "z2"))
            floor = rtol * 1e-2 / shortest + 1e-6 * (self.dtype == torch.float16)  # for cancellation and underflow
            rough = rtol + ROUNDING[self.dtype]
            for name, expected in zip(names, want[1:], strict=True):
                self.near(kind, f"gradient of {name}", leaves[name].grad, expected, rough, rough * largest + floor)
            tau = leaves.get("tau")
            if isinstance(tau, Tensor) and tau.dim() == 0:
                slack = ROUNDING.get(tau.dtype, 0.0) + max(rtol, 1e-5 if tau.dtype == torch.float32 else 0.0)
                exact = torch.tensor(self.ref.tau_grad, dtype=torch.float64)
                self.near(kind, "gradient of tau", tau.grad, exact, slack, slack)
        self.count(kind, "agreed")

    def near(self, kind: str, what: str, got: Tensor | None, want: Tensor, rtol: float, atol: float) -> None:
        """Check that two results agree within the tolerances."""
        rtol, atol = rtol * self.slack, atol * self.slack
        if got is None or not torch.allclose(got.double(), want.double(), rtol=rtol, atol=atol):
            raise Wrong(kind, "other numbers", f"{what}: got {got}, want {want}, {rtol} {atol}")

    def compare_rows(self, kind: str) -> None:
        """Check that all rows agree with the twin's."""
        if not self.compared:
            return
        rtol = TOLERANCE[self.est.dtype]
        if self.info.global_tau:
            tau = torch.tensor(self.ref.temperature.tau, dtype=torch.float64)
            self.near(kind, "tau of all", self.est.temperature.tau, tau, rtol, rtol)
        if not self.info.has_rows:
            return
        rows = self.est.read(torch.arange(self.n))
        visits = torch.tensor([[self.ref.visits(i, c) for c in range(self.ref.columns)] for i in range(self.n)])
        self.near(kind, "count", rows["count"], visits.amax(1), 0, 0)
        for i, c in visits.nonzero().tolist():
            alone = copy.copy(self.ref)  # read() needs all columns, some of which may never have been visited
            alone.rows = {key: {i: {k: held[i].get(c) for k in range(2)}} for key, held in self.ref.rows.items()}
            want = {name: values[0] for name, values in alone.read(i).items()}
            for name in self.info.columns:
                at, exact = f"{name} of row {i}, column {c}", torch.tensor(want[name], dtype=torch.float64)
                self.near(kind, at, rows[name][i, c], exact, rtol, rtol)

    def twin(self, given: Given, depositing: bool) -> tuple[Tensor, ...] | None:
        """Return loss and gradients of the twin; ``None`` if it raises or an anchor has no negative."""
        args = {name: value for name, value in given.args.items() if name not in ("tau", "encode")}
        if args["index"] is None:
            args["index"] = torch.arange(given.size())
        if given.table is not None:
            unit = torch.nn.functional.normalize(given.table.double(), dim=-1)
            args["encode"] = lambda s: (unit[0][s], unit[1][s] if given.bimodal else unit[0][s])
        keys = [None if args.get(name) is None else args[name].tolist() for name in ("index", "index2", "labels")]
        every = range(given.size())
        if not all(any(may_be_negative(i, j, *keys) for j in every) for i in every):
            return None
        own = self.ref.temperature
        if given.args.get("tau") is not None:
            self.ref.temperature = CallTau(given.args["tau"], given.size(), given.directions)
        elif self.info.tau_leaf is not None and own.tau is None:
            self.ref.temperature = FixedReference(self.ref.groups[0]["tau"])
        try:
            found = self.ref.forward(**args, train=depositing)
            return found if all(self.ref.weights) else None  # a policy may leave an anchor without negatives
        except (ValueError, ZeroDivisionError, IndexError, RuntimeError):
            return None
        finally:
            self.ref.temperature = own


def one(seed: int, number: int, counts: dict[str, Counter[str]]) -> tuple[str, str, str] | None:
    """Run one trial and return what went wrong, if anything."""
    trial: Trial | None = None  # the constructor may fail
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trial = Trial(seed, number, counts)
            trial.run()
    except Wrong as found:
        kind, what, text = found.args
        text = f"{trial.info} {trial.mode} {trial.dtype} {trial.names}: {text}" if trial else text
    except Exception as error:
        kind, what, text = "trial", "program failed", "".join(traceback.format_exception(error))[-1500:]
    else:
        return None
    counts.setdefault(kind, Counter()).update(["calls", "wrong"])
    return kind, what, text


def calls(seed: int, count: int, only: int | None = None, seconds: float = float("inf")) -> dict[str, Any]:
    """Run trials up to ``count`` or the time limit, and return counts and findings."""
    started, findings, done = time.perf_counter(), [], 0
    counts: dict[str, Counter[str]] = {}
    for number in range(count) if only is None else [only]:
        if time.perf_counter() - started > seconds:
            break
        found = one(seed, number, counts)
        done += 1
        if found is not None:
            findings.append([number, *found])
    spent = round(time.perf_counter() - started, 1)
    by_kind = {kind: dict(counts[kind]) for kind in sorted(counts)}
    return {"seed": seed, "trials": done, "counts": by_kind, "findings": findings, "seconds": spent}
