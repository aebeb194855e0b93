"""Random calls, commits and edits of one estimator."""

from __future__ import annotations

import ast
import functools
import random
import traceback
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import compopt
from benchmarks import fuzz_given, fuzz_spoiled
from benchmarks.fuzz_given import AGREE, EITHER, NAN, REFUSE, Given
from benchmarks.fuzz_judge import Judge, Wrong, fingerprint
from benchmarks.fuzz_spoiled import HookError
from tests import database
from tests.helpers import features, make

N, KINDS = 9, ("bimodal", "unimodal", "forward")
LIBRARY = str(Path(compopt.__file__).parent)
CLEAR = (ValueError, TypeError, IndexError, RuntimeError)


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


def leaf(value: Any) -> Any:
    """What autograd follows, with the strides that it had; integers and all that is no tensor as they are."""
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.is_meta or value.is_inference():
        return value
    return value.detach().requires_grad_()


class Trial(Judge):
    """One estimator with its twin, and a few calls."""

    def __init__(self, seed: int, number: int, tell: Callable[[str, str], None]) -> None:
        super().__init__()
        self.rng, self.tell = random.Random(f"{seed}:{number}"), tell
        rng = self.rng
        simple = [info for info in database.DATABASE if not info.network]
        self.info = rng.choice(simple if rng.random() < 0.8 else database.DATABASE)
        kinds = KINDS[: 2 if self.info.name.startswith("clip") else 3]
        self.mode, self.dim, self.n = rng.choice(kinds), database.DIM, N
        exact = rng.random() < 0.6
        rows = torch.float64 if exact else torch.float32
        self.dtype = rows if exact else rng.choice([torch.float32, torch.float16, torch.bfloat16, torch.float32])
        self.est, self.ref = make(
            self.info, self.mode, N, rows, rng.choice([0.1, 0.2, 0.5]), rng.choice([0.3, 0.9, 1.0])
        )
        if self.est.n is None:
            self.ref.groups[0]["n"] = 1 << 63
        self.draws = torch.Generator().manual_seed(rng.randrange(1 << 30))
        # What draws or trains amplifies rounding: in lower precision it has no twin.
        self.slack = 100.0 if self.info.network else 1.0  # its updates amplify
        self.compared = exact or not (self.info.draws or self.info.network)

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

    def commit(self) -> None:
        self.est.step()
        self.ref.step()
        self.compare_rows("commit")

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
        handle = register(fuzz_spoiled.raising)
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
        value = self.rng.choice([*fuzz_spoiled.REFUSED_VALUES, *fuzz_spoiled.EXTREME_VALUES])
        if isinstance(kept[key], int) and isinstance(value, int) and value > 9:
            return  # a number of updates that would never end
        group[key] = value
        expected = REFUSE if any(value is one for one in fuzz_spoiled.REFUSED_VALUES) else EITHER
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
        for change in self.rng.sample(fuzz_given.TAKEN, several):
            verdict = change(given)
            if verdict:
                made.append(change.__name__)
            if verdict == REFUSE:
                expected = REFUSE
                break
        if expected == AGREE and self.rng.random() < 0.45:
            change = self.rng.choice(fuzz_spoiled.SPOILED)
            verdict = change(given)
            if verdict:
                made.append(change.__name__)
                expected = verdict
        self.names = made
        self.make_call(given, made[-1], expected)

    def make_call(self, given: Given, kind: str, expected: str) -> None:
        depositing = given.context in ("train", "autocast", "errors", "gradients")
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
            if given.context == "gradients" and "encode" not in given.args:
                loss, *found = self.est.feature_gradients(**given.args)
                for name, gradient in zip(
                    [name for name in ("z1", "z2", "extra") if name in leaves], found, strict=True
                ):
                    leaves[name].grad = gradient
                leaves.pop("tau", None)
                return loss
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
                what = (
                    f"{kind}: {type(error).__name__}: {str(error)[:300]} ({Path(where.filename).name}:{where.lineno})"
                )
                raise Wrong(kind.split()[0], "unclear error", what) from error
            return error
        return None

    def attempt_end(self, kind: str) -> None:
        """What no twin can tell: the state must be writable, and the trial ends."""
        self.done = True
        self.attempt(kind, self.est.step)
        self.count(kind, "uncompared")
