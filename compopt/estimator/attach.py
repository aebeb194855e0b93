"""Hooks that commit after each real update of a (wrapped) torch optimizer, and warnings when a loop never commits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol, cast
from weakref import WeakMethod, WeakSet, ref

import numpy as np
import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from compopt.checks.context import STATE_MAKERS, called_from, outside_of_graphs, warn
from compopt.estimator.entry import FAMILIES, Entry, check_entry, warn_unclaimed_entries

Commit = Callable[[Tensor | None], None]

UPDATES = 3  # model updates by other optimizers than the attached ones, without a commit, before a warning
# Calls without a commit before a warning, if no update is observed (an optimizer may run no hooks). The number of calls
# must also reach WINDOWS times the longest window so far, since gradient accumulation may be long.
CALLS, WINDOWS = 256, 8
POSITIONS, BATCHES = 100, 2  # calls with index 0 .. B - 1 before a warning; minimum size of the data set in batches


class HasOptimizer(Protocol):
    """Protocol of wrappers and engines that keep an optimizer in ``.optimizer``."""

    @property
    def optimizer(self) -> torch.optim.Optimizer | HasOptimizer:  # not Any, which every nn.Module would satisfy
        """Wrapped optimizer, or another wrapper."""


def unwrap(optimizer: Any) -> torch.optim.Optimizer:
    """Follow ``.optimizer`` through wrappers and engines to the first object that runs all hooks."""
    for each in _chain(optimizer):
        # Proxies (Lightning's) show the tables of the optimizer in them; other wrappers have tables for step() only.
        # torch marks the step() that runs hooks.
        tables = [getattr(each, f"_optimizer_{family}_hooks", None) for family in ("step_post", *FAMILIES)]
        if getattr(getattr(type(each), "step", None), "hooked", False) and all(isinstance(x, dict) for x in tables):
            return cast(torch.optim.Optimizer, each)
    raise TypeError(
        f"attach() needs a torch optimizer, or a wrapper that keeps one in .optimizer; got "
        f"{type(optimizer).__name__}. Attach the optimizer inside it, or call est.step() after each real update"
    )


def _chain(optimizer: Any) -> Iterator[Any]:
    """Yield the object, then the object that it wraps, and so on; stop at a cycle."""
    seen: list[Any] = []
    while optimizer is not None and not any(optimizer is other for other in seen):
        seen.append(optimizer)
        yield optimizer
        optimizer = getattr(optimizer, "optimizer", None)


class Attached:
    """Hook of an optimizer that commits an estimator's deposits after each ``optimizer.step()``.

    ``commit(found_inf)`` gets the tensor that ``GradScaler`` sets on a fused optimizer, because the step hook of a
    fused optimizer also runs on skipped steps; otherwise ``None``. All references are weak: an optimizer must not keep
    an estimator alive.
    """

    def __init__(self, given: Any, inner: torch.optim.Optimizer, commit: Commit) -> None:
        self.kind, self.optimizer, self._commit = type(inner).__name__, ref(inner), WeakMethod(commit)
        # DeepSpeed's engine counts the updates that it skips, and runs no hook for them.
        engine = next((each for each in _chain(given) if isinstance(getattr(each, "skipped_steps", None), int)), None)
        self.engine: ref[Any] | None = None if engine is None else ref(engine)
        self.skipped: int = 0 if engine is None else engine.skipped_steps
        clips = getattr(engine, "gradient_clipping", None)
        self.threshold = float(clips()) if callable(clips) else 0.0  # of the norm at which the engine clips gradients
        # A loop may call only the base_optimizer of a wrapping optimizer (SAM). The hook is therefore registered on
        # both; if both run, the second one finds nothing to commit.
        base = getattr(getattr(inner, "base_optimizer", None), "_optimizer_step_post_hooks", None)
        tables: list[Any] = [inner._optimizer_step_post_hooks, *([base] if isinstance(base, dict) else [])]
        loading: Any = inner._optimizer_load_state_dict_pre_hooks
        self.handle = RemovableHandle(tables[0], extra_dict=[*tables[1:], loading])
        for table in tables:
            table[self.handle.id] = self.hook
        loading[self.handle.id] = warn_unclaimed_entries

    @outside_of_graphs
    def hook(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Commit after a step."""
        commit = self._commit()
        # torch.distributed.checkpoint calls step() to create the state of a new optimizer; this is not an update.
        if commit is not None and not called_from(STATE_MAKERS):
            commit(getattr(optimizer, "found_inf", None))

    def live_optimizer(self) -> torch.optim.Optimizer | None:
        """Return the optimizer if it is alive and still has the hook; otherwise ``None``."""
        optimizer = self.optimizer()
        hooked = optimizer is not None and self.handle.id in optimizer._optimizer_step_post_hooks
        return optimizer if hooked else None


class Attachments:
    """Optimizers that commit an estimator's deposits, and one-time warnings about mistakes in the training loop.

    The mistakes are a loop without commits, because ``step()`` never runs or another optimizer than the attached one
    updates the model, and positions in the batch as index. No check waits for a device.

    Attributes:
        stepped: by the id of each optimizer that may have the model (see :meth:`record_step`), whether it has stepped
            since the last call; ``None``: model updates are not counted.
        unsure_of_positions: every index so far equals the positions in its batch.
    """

    def __init__(self) -> None:
        self._attached: dict[int, Attached] = {}  # by the optimizer's id
        self._updates = 0  # model updates since the first call of this window
        self.stepped: dict[int, bool] | None = None
        self._longest, self._calls = 0, 0  # calls in the longest committed window, and in the present one
        self._warned_pending = False
        self.unsure_of_positions, self._positions = True, 0  # _positions: calls with batch positions so far
        self.counting = False  # an attached engine counts the updates that it skips

    def add(self, optimizer: Any, commit: Commit, carried: Any = None, multiplied: bool = False) -> RemovableHandle:
        """Attach once, see :meth:`Estimator.attach`; the optimizer saves ``carried``; tau may multiply the loss."""
        inner = unwrap(optimizer)
        if carried is not None:
            check_entry(carried, [*_chain(optimizer)], inner)
        attached = self._attached.get(id(inner))
        if attached is None or attached.live_optimizer() is not inner:
            attached = self._attached[id(inner)] = Attached(optimizer, inner, commit)
            self.counting |= attached.engine is not None
            self._updates, self.stepped = 0, None  # updates before this one was attached say nothing about it
            if multiplied and attached.threshold:
                warn(
                    f"DeepSpeed clips gradients at norm {attached.threshold} (default: 1), and multiply_tau=True scales"
                    f' them by tau: set "gradient_clipping" to 0.0, or to tau times the threshold of a cross-entropy'
                )
        if carried is not None and attached.handle.id not in inner._optimizer_state_dict_post_hooks:
            Entry(carried, inner, attached.handle)
        return attached.handle

    def skipped(self) -> bool:
        """Return whether an engine has skipped an update since the last call of this method."""
        found = False
        for each in self._attached.values():  # every counter must be read
            if each.engine is not None and (engine := each.engine()) is not None:
                found |= engine.skipped_steps > each.skipped
                each.skipped = int(engine.skipped_steps)
        return found

    def attached_name(self) -> str | None:
        """Return the class name of an optimizer that is alive and has the hook, or ``None``."""
        return next((each.kind for each in self._attached.values() if each.live_optimizer() is not None), None)

    def lost_name(self) -> str | None:
        """Return the class name of the last attached optimizer if no attached optimizer is alive; else ``None``."""
        alive = any(each.optimizer() is not None for each in self._attached.values())
        return None if alive else next((each.kind for each in reversed(self._attached.values())), None)

    # -- no commit ---------------------------------------------------------------------------------------------

    def end_window(self, window: int = 0) -> None:
        """Record the commit of a window of ``window`` calls; 0: that all calls were dropped."""
        self._longest, self._calls = max(self._longest, window), 0
        self._updates, self.stepped = 0, None

    def count_pending(self, calls: int) -> None:
        """Warn once if so many calls wait for a commit that the loop must lack one."""
        self._calls = calls
        if self._warned_pending:
            return
        if calls == 1:  # a loop that calls step() itself may commit late
            by_hand = self._longest > 0 and self.lost_name() is None
            watched = not by_hand and self.attached_name() is None
            self._updates, self.stepped = 0, None
        else:  # in a window of usual length, the attached optimizer is expected to step
            watched = self.stepped is None and calls > self._longest and self.attached_name() is not None
        if watched:
            self._watch()
        if self.stepped:
            self._count()
        if calls >= max(CALLS, WINDOWS * self._longest) or self._updates >= UPDATES:
            self._warn_pending(calls, "")

    def _count(self) -> None:
        """Count an update if all optimizers have stepped, since it is not known which one has the model."""
        known = dict(self.stepped or {})  # another thread may change it
        if known and all(known.values()):
            self._updates += 1
            self.stepped = dict.fromkeys(known, False)

    def record_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Record a step of an optimizer, unless it trains no model, or no parameter of the attached ones."""
        stepped = self.stepped  # read once: another thread may commit and set it to None meanwhile
        if stepped is None or not any(p.requires_grad for p in _parameters(optimizer)):  # NeuCLIP's updates need none
            return
        attached = [each.live_optimizer() for each in self._attached.values()]
        own = {id(p) for each in attached if each is not None for p in _parameters(each)}
        if not own or not own.isdisjoint(map(id, _parameters(optimizer))):
            stepped[id(optimizer)] = True

    def check_before_save(self, t: int) -> None:
        """Warn once if calls have deposited, and nothing was ever committed or another optimizer updates the model."""
        self._count()
        calls = self._calls  # 0 for a part, whose container counts the calls
        if (t == 0 or self._updates) and calls > 1 and not self._warned_pending:
            self._warn_pending(calls, "; what is saved has none of them")

    def _warn_pending(self, calls: int, harm: str) -> None:
        self._warned_pending = True
        meanwhile = f" in {self._updates} update{'s' * (self._updates > 1)} of the model" if self._updates else ""
        fact = f"{calls} calls have deposited{meanwhile} and none was committed{harm}: "
        if (gone := self.lost_name()) is not None:
            remedy = f"the {gone} that est.attach() was given is gone; attach the optimizer that took its place"
        elif (silent := self.attached_name()) is not None:
            remedy = (
                f"the attached {silent} has not run step() meanwhile; attach the optimizer whose step() updates the "
                f"model (after deepspeed.initialize or prepare), or call est.step() after each update"
            )
        else:
            remedy = (
                "call est.step() after optimizer.step(), or est.attach(optimizer); the trainers of transformers, "
                "sentence-transformers and Lightning need the EstimatorCallback of compopt.integrations"
            )
        warn(fact + remedy)

    def _watch(self) -> None:
        """Count updates of the model, by the steps of all optimizers of the process."""
        self.stepped = {}
        _watching.add(self)
        if not _hooks:  # one global hook, never removed: another thread may be running it
            _hooks.append(register_optimizer_step_post_hook(_note))

    # -- batch positions ---------------------------------------------------------------------------------------

    def check_positions(self, index: Tensor, n: int | None, remembered: bool) -> None:
        """Warn if every index ``(b,)`` so far equals the positions in the batch.

        ``n`` is the number of rows, or ``None``; ``remembered``: samples of earlier batches are known by their index.
        """
        if len(index) == 0:
            return
        large = remembered if n is None else n >= BATCHES * len(index)  # without n the size of the data set is unknown
        possible = large and index.device.type == "cpu" and int(index[-1]) == len(index) - 1
        self.unsure_of_positions = possible and np.array_equal(index.numpy(), np.arange(len(index)))
        self._positions += 1
        if not self.unsure_of_positions or self._positions < POSITIONS:
            return
        self.unsure_of_positions = False
        harm = f"all samples share {len(index)} rows" if n else f"a part of the memory is taken for these {len(index)}"
        warn(
            f"index was 0 .. {len(index) - 1} in each of the first {POSITIONS} calls{f', while n={n}' if n else ''}: "
            f"these look like positions in the batch, and {harm}; pass positions in the data set, see "
            f"compopt.data.Indexed{'' if n else ', or none where no sample repeats'}"
        )


_watching: WeakSet[Attachments] = WeakSet()
_hooks: list[Any] = []


@outside_of_graphs
def _note(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for attachments in tuple(_watching):
        attachments.record_step(optimizer)


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]
