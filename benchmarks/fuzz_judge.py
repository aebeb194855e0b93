"""An estimator beside its twin: is what it did right?"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

import compopt
from benchmarks.fuzz_damage import digest
from benchmarks.fuzz_given import AGREE, NAN, REFUSE, Given
from tests.database import EstimatorInfo
from tests.reference import FixedReference, Reference
from tests.reference.pairs import may_be_negative

# How far a result may be from the twin's, relative to the largest entry, by the dtype of the features.
TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3, torch.float16: 1e-3, torch.bfloat16: 1e-3}
ROUNDING = {torch.float64: 0.0, torch.float32: 0.0, torch.float16: 2e-3, torch.bfloat16: 1e-2}  # of gradients


class Wrong(Exception):
    """A trial has found something."""


class CallTau(FixedReference):
    """The temperatures of one call, in the order in which the twin asks for them: by direction, then by sample."""

    def __init__(self, tau: float | Tensor, batch: int, directions: int) -> None:
        spread = torch.as_tensor(tau, dtype=torch.float64).detach()
        spread = spread[:, None] if spread.dim() == 1 else spread
        self.values: Iterator[float] = iter(spread.expand(batch, directions).t().reshape(-1).tolist())

    def value(self, ref: Any, row: int, column: int) -> float:
        return next(self.values)


def fingerprint(est: compopt.ContrastiveEstimator) -> tuple[str, int, str]:
    """Every bit of the state, committed and pending."""
    later = copy.deepcopy(est)
    later.step()
    return digest(est), est.pending, digest(later)


def bits(state: Any) -> Any:
    """Tensors in dicts and lists as their bytes."""
    if isinstance(state, Tensor):
        return state.detach().reshape(-1).contiguous().view(torch.uint8).tolist()
    if isinstance(state, dict):
        return {name: bits(value) for name, value in state.items()}
    return [bits(value) for value in state]


class Judge:
    """An estimator with its twin.

    Attributes:
        info: what it is.
        n: its rows.
        dtype: of the features.
        compared: the twin can tell.
        done: the twin knows no more.
        names: changes of the last call.
    """

    info: EstimatorInfo
    est: compopt.ContrastiveEstimator
    ref: Reference
    mode: str
    n: int
    dtype: torch.dtype
    slack: float
    compared: bool
    done = False
    tell: Callable[[str, str], None]

    def __init__(self) -> None:
        self.names: list[str] = []

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

    def judge_refusal(
        self, kind: str, error: Exception | None, before: Any, expected: str | None, what: str = ""
    ) -> None:
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
        """Rows that a bad feature surely reaches: all, or where anchors have rows of their own those of its sample."""
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
        if given.context in ("train", "autocast", "errors", "gradients", "eval"):
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
                self.near(
                    kind,
                    "gradient of tau",
                    tau.grad,
                    torch.tensor(self.ref.tau_grad, dtype=torch.float64),
                    slack,
                    slack,
                )
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
        keys = [None if args.get(name) is None else args[name].tolist() for name in ("index", "index2", "group")]
        every = range(given.size())
        if not all(any(may_be_negative(i, j, *keys) for j in every) for i in every):
            return None
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
