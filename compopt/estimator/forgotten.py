"""Warnings of mistakes in a training loop, given once each and without waiting for a device."""

from __future__ import annotations

import gc
import sys
import warnings
from collections.abc import Sequence
from typing import Any
from weakref import WeakSet

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter
from torch.optim.optimizer import register_optimizer_step_post_hook

from compopt.checks.context import outside_of_graphs
from compopt.estimator.attach import Attachments
from compopt.estimator.reader import AsyncChecks

# Updates of the model without a commit, where no attached optimizer is left that could still commit
UPDATES = 3
# Calls without a commit, where no update is seen (an optimizer may run no hooks), if that is also so many times the
# longest window so far (accumulation may be long)
PATIENCE, WINDOWS = 256, 8
# The same where no optimizer is left that could commit
PATIENCE_GONE, WINDOWS_GONE = 16, 2
# Calls with index 0 .. B - 1, and how many batches the data set must have at least
POSITIONS, BATCHES = 100, 2


class Forgotten:
    """Watches the calls of one estimator that deposit.

    *No commit*: ``step()`` never runs, or the attached optimizer is not the one that updates the model.
    *A learned temperature that no optimizer has*: it gets gradients and keeps its value.
    *Batch positions for an index*: every batch has 0 .. B - 1, so that a few rows are shared by all samples.
    *A scale of the model that nothing uses*: ``DistributedDataParallel`` waits for its gradient and ends the next call.
    """

    def __init__(self) -> None:
        self._updates = 0  # of the model, since the first call of this window
        self.stepped: dict[int, bool] | None = None  # since the last call, by the id of each optimizer, if watched
        self._longest = 0  # calls of the longest window that was committed
        self._said_pending = False
        self._positions: int | None = 0  # calls with batch positions so far; None: the index is not one
        self._graded: int | None = 0  # calls so far that found a gradient in the learned parameters; None: settled
        self._graded_since = False
        self._before: list[Tensor] = []
        self._looked_for_scale = False

    def committed(self, window: int) -> None:
        """Note that a window of this many calls was committed."""
        self._longest = max(self._longest, window)
        self._watch(False)

    # -- a scale that nothing uses -----------------------------------------------------------------------------

    def scale(self, attached: Attachments) -> None:
        """Warn, at the first commit, of a scalar without gradient for which ``DistributedDataParallel`` waits."""
        if self._looked_for_scale:
            return
        self._looked_for_scale = True
        name = _awaited(attached.scalars_without_gradient())
        if name is not None:
            warn(
                f"parameter {name!r} of the model in DistributedDataParallel had no gradient in this update, and DDP "
                f"waits for one: the next forward will raise 'Expected to have finished reduction'. The estimator has "
                f"a temperature of its own and needs no logit_scale: freeze the parameter before wrapping the model, "
                f"{name}.requires_grad_(False), or let it be the temperature, tau=1 / scale at the call with the scale "
                f"(logit_scale.exp()) that forward returns"
            )

    # -- no commit ---------------------------------------------------------------------------------------------

    def pending(self, calls: int, attached: Attachments) -> None:
        """Warn once when so many calls wait for a commit that somebody must have forgotten it."""
        if self._said_pending:
            return
        if calls == 1:
            by_hand = self._longest > 0 and attached.gone() is None  # such a loop may take its time
            self._watch(not by_hand and attached.listening() is None)
        known = dict(self.stepped or {})  # a copy: an optimizer may step in another thread
        if known and all(known.values()):  # which of them has the model is not known
            self._updates += 1
            self.stepped = dict.fromkeys(known, False)
        passed = self._updates
        if passed < UPDATES and calls < PATIENCE_GONE:
            return
        gone, silent = attached.gone(), attached.listening()
        least, windows = (PATIENCE, WINDOWS) if gone is None else (PATIENCE_GONE, WINDOWS_GONE)
        if (passed < UPDATES or silent is not None) and calls < max(least, windows * self._longest):
            return
        self._said_pending = True
        meanwhile = f" in {passed} updates of the model" if passed else ""
        warn(f"{calls} calls have deposited{meanwhile} and none was committed: {_remedy(gone, silent)}")

    def _watch(self, on: bool) -> None:
        """Start or stop counting updates of the model, by the steps of all optimizers of the process."""
        self._updates, self.stepped = 0, {} if on else None
        if on:
            _watching.add(self)
        if on and not _hooks:  # once for all optimizers; it must not be removed while another thread runs it
            _hooks.append(register_optimizer_step_post_hook(_note))

    def saving(self, t: int, calls: int, attached: Attachments) -> None:
        """Warn once when a state is saved that knows nothing, although there were calls."""
        if t or calls < 2 or self._said_pending:
            return
        self._said_pending = True
        remedy = _remedy(attached.gone(), attached.listening())
        warn(f"{calls} calls have deposited and none was committed, so that what is saved has none of them: {remedy}")

    # -- a learned temperature ---------------------------------------------------------------------------------

    @property
    def unsure_of_optimizer(self) -> bool:
        """True as long as learned parameters may have gradients and no optimizer."""
        return self._graded is not None

    def updated(self, parameters: Sequence[Parameter]) -> None:
        """Note gradients at an update; optimizers may take them away right after it."""
        self._graded_since |= _have_gradients(parameters)

    def learned(self, parameters: Sequence[Parameter], attached: Attachments, async_checks: AsyncChecks) -> None:
        """Watch, at a call, the parameters that the user's optimizer should learn."""
        if not parameters:
            self._graded = None  # nothing is learned, now or later
        if self._graded is None or not (self._graded_since or _have_gradients(parameters)):
            return
        self._graded_since = False
        if self._graded == 0:
            self._before = [parameter.detach().clone() for parameter in parameters]
        self._graded += 1
        if self._graded < max(PATIENCE, WINDOWS * self._longest):
            return
        calls, self._graded = self._graded, None
        if attached.have(parameters):  # a learning rate of 0 is a choice
            return
        with torch.no_grad():
            idle = torch.stack([_idle(*pair) for pair in zip(parameters, self._before, strict=True)]).any()

        def tell(found: int) -> None:
            if found:
                warn(
                    f"the learned temperature has had gradients in {calls} calls and kept its value: no optimizer has "
                    f"it; give [*model.parameters(), *est.parameters()] to the optimizer, or let the model own it "
                    f"(compopt.as_module)"
                )

        async_checks.watch(idle.to(torch.int32), tell)

    # -- batch positions ---------------------------------------------------------------------------------------

    @property
    def unsure_of_positions(self) -> bool:
        """True until an index of something else than positions in the batch has come."""
        return self._positions is not None

    def positions(self, index: Tensor, n: int | None, remembered: bool) -> None:
        """Watch for an index of positions in the batch, as this rank gave it.

        Args:
            index: ``(b,)``.
            n: number of rows; ``None``: there are none.
            remembered: samples of earlier batches are known by their index, rows or not.
        """
        if self._positions is None or len(index) == 0:
            return
        unknown = n is None and remembered  # the data set may be larger than a batch
        if not (unknown or (n or 0) >= BATCHES * len(index)) or index.device.type != "cpu":
            self._positions = None
            return
        values = index.numpy()
        if values[-1] != len(values) - 1 or not np.array_equal(values, np.arange(len(values))):
            self._positions = None
            return
        self._positions += 1
        if self._positions < POSITIONS:
            return
        self._positions = None
        harm = f"all samples share {len(index)} rows" if n else f"a part of the memory is taken for these {len(index)}"
        warn(
            f"index was 0 .. {len(index) - 1} in each of the first {POSITIONS} calls{f', while n={n}' if n else ''}: "
            f"these look like positions in the batch, and {harm}; pass positions in the data set, see "
            f"compopt.data.Indexed{'' if n else ', or none where no sample repeats'}"
        )


_watching: WeakSet[Forgotten] = WeakSet()
_hooks: list[Any] = []


@outside_of_graphs
def _note(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for forgotten in tuple(_watching):
        stepped = forgotten.stepped  # read once: another thread may commit and end the watch meanwhile
        if stepped is not None:
            stepped[id(optimizer)] = True


def warn(message: str) -> None:
    """Warn with the user's own line."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(("compopt.", "torch.")):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)


def _remedy(gone: str | None, silent: str | None) -> str:
    if gone is not None:
        return f"the {gone} that est.attach() was given is gone; attach the optimizer that took its place"
    if silent is not None:
        return (
            f"the attached {silent} has not run step() meanwhile; attach the optimizer whose step() updates the "
            f"model (after deepspeed.initialize or prepare), or call est.step() after each update"
        )
    return (
        "call est.step() after optimizer.step(), or est.attach(optimizer); the trainers of transformers, "
        "sentence-transformers and Lightning need the EstimatorCallback of compopt.integrations"
    )


def _awaited(parameters: Sequence[Tensor]) -> str | None:
    """Return the name of the first of some parameters without gradient that ends the next call of a model in DDP.

    Every ``DistributedDataParallel`` of the process is looked through, because a parameter does not know who has it.
    """
    if not parameters or not (dist.is_available() and dist.is_initialized()):
        return None
    wanted = {id(parameter) for parameter in parameters}
    kind = torch.nn.parallel.DistributedDataParallel
    for model in [thing for thing in gc.get_objects() if issubclass(type(thing), kind)]:
        if model.find_unused_parameters or model.static_graph:
            continue
        for name, parameter in model.module.named_parameters():
            ignored = name if "." in name else f".{name}"  # as DDP compares them
            if id(parameter) in wanted and ignored not in model.parameters_to_ignore:
                return str(name)
    return None


def _have_gradients(parameters: Sequence[Parameter]) -> bool:
    return bool(parameters) and all(parameter.grad is not None for parameter in parameters)


def _idle(parameter: Parameter, before: Tensor) -> Tensor:
    """Return a flag on the device: the value is unchanged, although its gradient, if there is one, is not zero."""
    kept = (parameter == before.to(parameter.device)).all()
    return kept if parameter.grad is None else kept & (parameter.grad != 0).any()
