"""Calls of every estimator at random: does each end in a clear refusal that changes nothing, or in the twin's numbers?"""

from __future__ import annotations

import ast
import copy
import functools
import random
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import compopt
from benchmarks import fuzz_changes as changes
from benchmarks.fuzz_changes import AGREE, EITHER, NAN, REFUSE, Given, HookError
from benchmarks.fuzz_damage import digest
from tests import database
from tests.helpers import features, make
from tests.reference import FixedReference

N, KINDS = 9, ("bimodal", "unimodal", "forward")
LIBRARY = str(Path(compopt.__file__).parent)
CLEAR = (ValueError, TypeError, IndexError, RuntimeError)
WRONG = (
    "unclear error",
    "state changed",
    "not refused",
    "refused wrongly",
    "other numbers",
    "loss not NaN",
    "program failed",
)
# How far a result may be from the twin's, relative to the largest entry, by the dtype of the features.
TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3, torch.float16: 1e-3, torch.bfloat16: 1e-3}
ROUNDING = {torch.float64: 0.0, torch.float32: 0.0, torch.float16: 2e-3, torch.bfloat16: 1e-2}  # of gradients


class Wrong(Exception):
    """A trial has found something."""


@dataclass
class Count:
    """What became of the calls of one kind."""

    calls: int = 0
    refused: int = 0
    agreed: int = 0
    nan: int = 0
    uncompared: int = 0
    wrong: dict[str, int] = field(default_factory=lambda: dict.fromkeys(WRONG, 0))


class CallTau(FixedReference):
    """The temperatures of one call, in the order in which the twin asks for them: by direction, then by sample."""

    def __init__(self, tau: float | Tensor, batch: int, directions: int) -> None:
        spread = torch.as_tensor(tau, dtype=torch.float64).detach()
        spread = spread[:, None] if spread.dim() == 1 else spread
        self.values: Iterator[float] = iter(spread.expand(batch, directions).t().reshape(-1).tolist())

    def value(self, ref: Any, row: int, column: int) -> float:
        return next(self.values)


@functools.cache
def raises(path: str) -> list[tuple[int, int]]:
    """Lines of a file that are part of a ``raise``."""
    nodes = ast.walk(ast.parse(Path(path).read_text()))
    return [(node.lineno, node.end_lineno or node.lineno) for node in nodes if isinstance(node, ast.Raise)]


def is_clear(error: BaseException) -> bool:
    """Whether the library itself raised it, by a ``raise`` of its own, as an error that its contract names."""
    if isinstance(error, Warning):  # where warnings are errors
        return True
    frame = traceback.extract_tb(error.__traceback__)[-1]
    mine = frame.filename.startswith(LIBRARY) and any(a <= (frame.lineno or 0) <= b for a, b in raises(frame.filename))
    return mine and type(error) in CLEAR and len(str(error)) > 10


def fingerprint(est: compopt.ContrastiveEstimator) -> tuple[str, int, str]:
    """Every bit of the state, committed and pending."""
    later = copy.deepcopy(est)
    later.step()
    return digest(est), est.pending, digest(later)


class Trial:
    """One estimator with its twin, and a few calls."""

    def __init__(self, seed: int, number: int, tell: Callable[[str, str], None]) -> None:
        self.rng, self.tell = random.Random(f"{seed}:{number}"), tell
        rng = self.rng
        simple = [info for info in database.DATABASE if not info.network]
        self.info = rng.choice(simple if rng.random() < 0.8 else database.DATABASE)
        kinds = KINDS[: 2 if self.info.name.startswith("clip") else 3]
        self.mode, self.dim, self.n = rng.choice(kinds), database.DIM, N
        exact = rng.random() < 0.6
        rows = torch.float64 if exact else torch.float32
        self.dtype = rows if exact else rng.choice([torch.float32, torch.float16, torch.bfloat16, torch.float32])
        self.est, self.ref = make(self.info, self.mode, N, rows, rng.choice([0.1, 0.2, 0.5]), rng.choice([0.3, 0.9, 1.0]))
        if self.est.n is None:
            self.ref.groups[0]["n"] = 1 << 63
        self.draws = torch.Generator().manual_seed(rng.randrange(1 << 30))
        # What draws or trains amplifies rounding: in lower precision it has no twin.
        self.slack = 100.0 if self.info.network else 1.0  # its updates amplify
        self.compared = exact or not (self.info.draws or self.info.network)
        self.done = False
        self.names: list[str] = []

    def run(self) -> None:
        """A few calls, commits and edits, and the rows at the end."""
        for _ in range(self.rng.randint(1, 4)):
            action = self.rng.choices(
                [self.call, self.commit, self.discard, self.edit, self.spoil_groups, self.hook, self.append],
                [20, 3, 1, 1, 2, 1, 1],
            )[0]
            action()
            if self.done:
                return
        self.commit()

    # -- what is between calls -------------------------------------------------------------------------------------

    def commit(self) -> None:
        self.est.step()
        self.ref.step()
        self.compare_rows("commit")

    def compare_rows(self, kind: str) -> None:
        """All rows are those of the twin."""
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
            want = self.twin_row(i, c)
            for name in self.info.columns:
                at = f"{name} of row {i}, column {c}"
                self.near(kind, at, rows[name][i, c], torch.tensor(want[name], dtype=torch.float64), rtol, rtol)

    def twin_row(self, row: int, column: int) -> dict[str, float]:
        """What the twin has in one place; it is asked for all columns, of which some may never have been seen."""
        alone = copy.copy(self.ref)
        alone.rows = {key: {row: {c: held[row].get(column) for c in range(2)}} for key, held in self.ref.rows.items()}
        return {name: values[0] for name, values in alone.read(row).items()}

    def discard(self) -> None:
        self.est.discard()
        self.ref.discard()

    def edit(self) -> None:
        """Another hyper-parameter, within reason."""
        groups = self.est.sample_groups
        position = self.rng.randrange(len(groups))
        for key, value in (("gamma", 0.5), ("tau", 0.3), ("rho", 0.2), ("max_grad", 1.0)):
            if key in groups[position] and self.rng.random() < 0.5:
                groups[position][key] = self.ref.groups[position][key] = value

    def append(self) -> None:
        """Another data set."""
        before = fingerprint(self.est)
        count = self.rng.choice([3, 0, -1, 1.5, "3", None, True])
        error = self.attempt("add_sample_group", lambda: self.est.add_sample_group({"n": count}))
        legal = count == 3 and self.est.n is not None
        self.judge_refusal("add_sample_group", error, before, None if legal and error is None else REFUSE)
        if error is None and legal:
            self.ref.groups.append({**self.ref.groups[0], **self.est.sample_groups[-1]})
            self.n += count

    def hook(self) -> None:
        """A hook of the caller that fails before or after a commit."""
        before, pending = fingerprint(self.est), self.est.pending
        early = self.rng.random() < 0.5
        register = self.est.register_step_pre_hook if early else self.est.register_step_post_hook
        handle = register(changes.raising)
        try:
            self.est.step()
        except HookError:
            if not pending:
                raise Wrong("hook", "program failed", "called with nothing pending") from None
        finally:
            handle.remove()
        self.count("hook", "refused" if pending else "agreed")
        if (pending and early) or not pending:
            self.same("hook", before)
        else:
            self.ref.step()
            self.compare_rows("hook")

    def spoil_groups(self) -> None:
        """A hyper-parameter that is none: the next call must refuse it, and forget it when it is mended."""
        group = self.rng.choice(self.est.sample_groups)
        given, kept = self.given(), dict(group)
        if not kept:
            return
        before, key = fingerprint(self.est), self.rng.choice(sorted(kept))
        value = self.rng.choice([*changes.REFUSED_VALUES, *changes.EXTREME_VALUES])
        if isinstance(kept[key], int) and isinstance(value, int) and value > 9:
            return  # a number of updates that would never end
        group[key] = value
        expected = REFUSE if any(value is one for one in changes.REFUSED_VALUES) else EITHER
        shape = self.rng.random()
        if shape < 0.1:
            del group[key]
            expected = REFUSE
        elif shape < 0.2:
            group[key] = kept[key]
            group["unknown"] = 1
            expected = REFUSE
        what = f"sample_groups {key}={value!r:.40}"
        error = self.attempt(what, lambda: self.est(**given.args))
        if error is None and expected is EITHER:  # a value that it takes: nothing to compare with
            self.attempt_end("sample_groups")
            return
        group.clear()
        group.update(kept)
        self.judge_refusal("sample_groups", error, before, expected, what)

    # -- calls -----------------------------------------------------------------------------------------------------

    def given(self) -> Given:
        """A call that is right."""
        batch = self.rng.randint(2, 4)
        z1, z2 = features(batch, self.dim, self.rng.randrange(1 << 30), dtype=self.dtype)
        index = torch.randperm(self.n, generator=self.draws)[:batch]
        modes = (self.mode != "unimodal", 1 if self.mode == "forward" else 2)
        learns, draws = self.est.temperature.learns, self.info.draws
        known = (self.est.n, *modes, learns, self.info.network, draws)
        return Given(self.rng, {"z1": z1, "z2": z2, "index": index}, *known)

    def call(self) -> None:
        """A call with some changes, judged by what must come of them."""
        given, made, expected = self.given(), ["unchanged"], AGREE
        several = self.rng.choices([0, 1, 2, 3], [1, 3, 3, 2])[0]
        for change in self.rng.sample(changes.TAKEN, several):
            verdict = change(given)
            if verdict:
                made.append(change.__name__)
            if verdict == REFUSE:
                expected = REFUSE
                break
        if expected == AGREE and self.rng.random() < 0.45:
            change = self.rng.choice(changes.SPOILED)
            verdict = change(given)
            if verdict:
                made.append(change.__name__)
                expected = verdict
        self.names = made
        self.make_call(given, made[-1], expected)

    def make_call(self, given: Given, kind: str, expected: str) -> None:
        depositing = given.context in ("train", "autocast", "errors")
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
        loss = found[0]
        if expected == NAN:
            self.judge_nan(kind, given, loss, before)
        elif expected == EITHER:
            self.attempt_end(kind)
        else:
            self.judge_numbers(kind, given, leaves, loss, depositing)

    def enter(self, given: Given, leaves: dict[str, Any]) -> Tensor:
        """Call in the mode that is asked for, and go backward."""
        with ExitStack() as stack:
            if given.context == "no_grad":
                stack.enter_context(torch.no_grad())
            elif given.context == "inference":
                stack.enter_context(torch.inference_mode())
            elif given.context == "autocast":
                stack.enter_context(torch.autocast("cpu", dtype=torch.bfloat16))
            elif given.context == "errors":
                stack.enter_context(warnings.catch_warnings())
                warnings.simplefilter("error")
            self.est.train(given.context != "eval")
            stack.callback(self.est.train)
            loss = self.est(**{**given.args, **leaves})
        if loss.requires_grad:
            for parameter in self.parameters():
                parameter.grad = None
            loss.backward()
        return loss.detach()

    def parameters(self) -> list[Tensor]:
        """Temperatures that somebody else learns."""
        return [] if self.info.tau_leaf is None else [self.info.tau_leaf(self.est)]

    def attempt(self, kind: str, action: Callable[[], object]) -> Exception | None:
        """Do it; an error that is not clear is told, the caller's own comes through."""
        try:
            action()
        except HookError as error:
            return error
        except Exception as error:
            if not is_clear(error):
                where = traceback.extract_tb(error.__traceback__)[-1]
                what = f"{kind}: {type(error).__name__}: {str(error)[:300]} ({Path(where.filename).name}:{where.lineno})"
                raise Wrong(kind.split()[0], "unclear error", what) from error
            return error
        return None

    # -- judgement -------------------------------------------------------------------------------------------------

    def judge_refusal(self, kind: str, error: Exception | None, before: Any, expected: str | None, what: str = "") -> None:
        """It was refused, and should have been, and changed nothing."""
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
        """No bit has changed."""
        if before is not None and fingerprint(self.est) != before:
            raise Wrong(kind, "state changed", what)

    def judge_nan(self, kind: str, given: Given, loss: Tensor, before: Any) -> None:
        """The loss shows it, and the next commit keeps the rows that a bad feature reaches, and all that is no row."""
        if bool(loss.isfinite()):
            raise Wrong(kind, "loss not NaN", f"{loss.item()}")
        self.count(kind, "nan")
        self.done = True
        if before[1]:  # what was pending before is committed, or not; no row may be spoiled
            self.est.step()
        else:
            state = self.est.state_dict()
            self.est.step()
            after = self.est.state_dict()
            reached = self.reached(given)
            kept = [{name: rows[reached] for name, rows in part["rows"].items()} for part in (state, after)]
            extras = [part["extra"] if reached.numel() else {} for part in (state, after)]
            if bits([kept[0], extras[0]]) != bits([kept[1], extras[1]]):
                raise Wrong(kind, "state changed", "rows of a bad batch")
        rows = self.est.state_dict()["rows"]
        if not all(bool(values.isfinite().all()) for values in rows.values()):
            raise Wrong(kind, "state changed", "rows are not finite")

    def reached(self, given: Given) -> Tensor:
        """Rows that a bad feature surely reaches: all, but where directions have rows of their own those of its sample."""
        good = [torch.linalg.vector_norm(given.args[name], dim=1).isfinite() for name in ("z1", "z2")]
        good[0] &= good[1]
        index = given.args["index"]
        if index is None or good[0].all():  # it is in extra: anchors that are not its negatives go on
            return torch.arange(0)
        if self.mode != "forward" and not {"index2", "extra", "labels", "group"} & set(given.args):
            return torch.arange(self.n)
        other = given.args.get("index2", index)
        visited = set(index[good[0]].tolist()) | set(other[good[0]].tolist())
        return torch.tensor(sorted(set(index[~good[0]].tolist()) - visited - set(other.tolist())), dtype=torch.int64)

    def attempt_end(self, kind: str) -> None:
        """What no twin can tell: the state must be writable, and the trial ends."""
        self.done = True
        self.attempt(kind, self.est.step)
        self.count(kind, "uncompared")

    def judge_numbers(self, kind: str, given: Given, leaves: dict[str, Any], loss: Tensor, depositing: bool) -> None:
        """Loss and gradients are the twin's."""
        want = self.twin(given, depositing) if self.compared else None
        if want is None:
            if not bool(loss.isfinite()) and len(set(self.names) & {"labels", "second_index", "extreme_tau"}) == 0:
                raise Wrong(kind, "other numbers", f"loss {loss.item()}")
            self.count(kind, "uncompared")
            self.done = self.compared
            return
        rtol = TOLERANCE[self.dtype if self.est.dtype == torch.float64 else torch.float32]
        self.near(kind, "loss", loss, want[0], rtol, 1e-3 if rtol > 1e-6 else 1e-9)
        if given.context in ("train", "autocast", "errors", "eval"):
            names = [name for name in ("z1", "z2", "extra") if name in leaves]
            largest = max(float(g.abs().max()) for g in want[1:] if g.numel())
            shortest = min(float(given.args[name].double().norm(dim=1).min()) for name in ("z1", "z2"))
            floor = rtol * 1e-2 / shortest + 1e-6 * (self.dtype == torch.float16)  # of what cancels or underflows
            for name, expected in zip(names, want[1:], strict=True):
                gradient = leaves[name].grad
                rough = rtol + ROUNDING[self.dtype]
                self.near(kind, f"gradient of {name}", gradient, expected, rough, rough * largest + floor)
            tau = leaves.get("tau")
            if isinstance(tau, Tensor) and tau.dim() == 0:
                slack = ROUNDING.get(tau.dtype, 0.0) + max(rtol, 1e-5 if tau.dtype == torch.float32 else 0.0)
                self.near(kind, "gradient of tau", tau.grad, torch.tensor(self.ref.tau_grad, dtype=torch.float64), slack, slack)
        self.count(kind, "agreed")

    def near(self, kind: str, what: str, got: Tensor | None, want: Tensor, rtol: float, atol: float) -> None:
        """Two results are alike."""
        rtol, atol = rtol * self.slack, atol * self.slack
        if got is None or not torch.allclose(got.double(), want.double(), rtol=rtol, atol=atol):
            raise Wrong(kind, "other numbers", f"{what}: got {got}, want {want}, {rtol} {atol}")

    def twin(self, given: Given, depositing: bool) -> tuple[Tensor, ...] | None:
        """What the reference says; ``None`` where an anchor has no negative at all, which it does not know."""
        args = {name: value for name, value in given.args.items() if name not in ("tau", "encode", "labels")}
        args["group"] = given.args.get("labels", given.args.get("group"))
        if args["index"] is None:
            args["index"] = torch.arange(given.size())
        if given.table is not None:
            unit = torch.nn.functional.normalize(given.table.double(), dim=-1)
            args["encode"] = lambda s: (unit[0][s], unit[1][s] if given.bimodal else unit[0][s])
        own = self.ref.temperature
        if given.args.get("tau") is not None:
            self.ref.temperature = CallTau(given.args["tau"], given.size(), given.directions)
        elif self.info.tau_leaf is not None and own.tau is None:
            self.ref.temperature = FixedReference(self.ref.groups[0]["tau"])
        elif self.info.global_tau:  # a window goes on with the temperature that is pending
            own.read_pending, own.count_deposits = depositing, True
        try:
            return self.ref.forward(**args, train=depositing)
        except (ValueError, ZeroDivisionError, IndexError, RuntimeError):
            return None
        finally:
            self.ref.temperature = own

    def count(self, kind: str, outcome: str) -> None:
        self.tell(kind, outcome)


def bits(state: Any) -> Any:
    """Tensors in dicts and lists as their bytes."""
    if isinstance(state, Tensor):
        return state.detach().reshape(-1).contiguous().view(torch.uint8).tolist()
    if isinstance(state, dict):
        return {name: bits(value) for name, value in state.items()}
    return [bits(value) for value in state]


def leaf(value: Any) -> Any:
    """What autograd follows, with the strides that it had; integers and all that is no tensor as they are."""
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.is_meta or value.is_inference():
        return value
    return value.detach().requires_grad_()


def one(seed: int, number: int, counts: dict[str, Count]) -> tuple[str, str, str] | None:
    """Run one trial; what went wrong."""

    def tell(kind: str, outcome: str) -> None:
        tally = counts.setdefault(kind, Count())
        tally.calls += 1
        setattr(tally, outcome, getattr(tally, outcome) + 1)

    trial: Trial | None = None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trial = Trial(seed, number, tell)
            trial.run()
    except Wrong as found:
        kind, what, text = found.args
        text = f"{trial.info} {trial.mode} {trial.dtype} {trial.names}: {text}" if trial else text
    except Exception as error:
        kind, what, text = "trial", "program failed", "".join(traceback.format_exception(error))[-1500:]
    else:
        return None
    tally = counts.setdefault(kind, Count())
    tally.calls += 1
    tally.wrong[what] += 1
    return kind, what, text


def calls(seed: int, count: int, only: int | None = None, seconds: float = float("inf")) -> dict:
    """Run trials until there are enough or the time is over, and count."""
    started, counts, findings, done = time.perf_counter(), {}, [], 0
    for number in range(count) if only is None else [only]:
        if time.perf_counter() - started > seconds:
            break
        found = one(seed, number, counts)
        done += 1
        if found is not None:
            findings.append([number, *found])
    found_counts = {kind: asdict(counts[kind]) for kind in sorted(counts)}
    spent = round(time.perf_counter() - started, 1)
    return {"seed": seed, "trials": done, "counts": found_counts, "findings": findings, "seconds": spent}
