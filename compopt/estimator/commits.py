"""Deposit and commit: what is proposed between two updates, and the one moment in which it is written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from compopt.batch import Batch
from compopt.checks.context import outside_of_graphs
from compopt.estimator.attach import Attachments
from compopt.estimator.component import Component
from compopt.estimator.exclusive import Exclusive
from compopt.estimator.forgotten import Forgotten
from compopt.estimator.hooks import Hooks
from compopt.estimator.save_handle import SaveHandle
from compopt.stores.table import RowTable


class Commits(Hooks):
    """Mixin of what happens between two updates of the model, and at them.

    Attributes:
        t: commits so far.
    """

    _components: dict[str, Component]
    _table: RowTable | None

    def __init__(self) -> None:
        super().__init__()
        self.t = 0
        self._pending = 0
        self._state = Exclusive()
        self._attachments = Attachments()
        self._forgotten = Forgotten()
        self._saving: SaveHandle | None = None

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """What the user's optimizer must learn (a learned temperature); usually empty."""
        for part in self._components.values():
            yield from part.learned()

    def stand_alone(self) -> None:
        """Do nothing; a part of another estimator refuses here what it leaves to its owner."""

    @property
    def pending(self) -> int:
        """Calls whose proposals wait for :meth:`step`."""
        return self._pending

    def _deposit(self, batch: Batch, proposals: Mapping[str, Tensor], valid: Tensor | None = None) -> None:
        """Keep the proposals of one call, ``(B, D)`` each, until the commit."""
        if self._table is not None:
            self._table.deposit(batch, proposals, valid)
        elif not any(part.has_pending_state for part in self._components.values()):
            return  # a stateless estimator has nothing to commit
        self._pending += 1
        self._forgotten.pending(self._pending, self._attachments)

    def _begin_saving(self) -> None:
        """What precedes a copy of the state, whoever takes it."""
        self._forgotten.saving(self.t, self._pending, self._attachments)
        self._run("state_dict_pre")

    @outside_of_graphs
    def step(self) -> None:
        """Write everything pending to the rows and advance :attr:`t`; with nothing pending, do nothing.

        With :meth:`attach` it runs by itself. Step hooks run before and after it.

        Raises:
            RuntimeError: this is a part of another estimator, which commits.

        Warns:
            RuntimeWarning: a save beside training has failed (``compopt.save(..., blocking=False)``).

        Communicates: nothing.
        """
        self.stand_alone()
        self._commit(None)

    @outside_of_graphs
    def _commit(self, found_inf: Tensor | None) -> None:
        if self._saving is not None:
            self._saving.warn()
        self._drop_skipped()
        self._forgotten.updated(list(self.parameters()))
        if not self._pending:
            return
        if found_inf is not None:
            found_inf = found_inf.reshape(())  # (1,) would give state that is a number an axis
            if found_inf.device.type == "cpu" and found_inf.item() > 0:
                self.discard()
                return
        self._run("step_pre", (), {})
        with self._state.writing(), torch.no_grad():
            if self._table is not None:
                self._table.commit(found_inf)
            for part in self._components.values():
                part.commit_state(found_inf)
            self._forgotten.committed(self._pending)
            self._pending = 0
            self.t += 1
        self._forgotten.scale(self._attachments)
        self._run("step_post", (), {})

    @outside_of_graphs
    def discard(self) -> None:
        """Forget everything pending: call it when an update was skipped. Communicates nothing."""
        with self._state.writing():
            self._pending = 0
            if self._table is not None:
                self._table.discard()
            for part in self._components.values():
                part.discard_state()

    def _drop_skipped(self) -> None:
        """What is pending belongs to an update that an attached engine has skipped since."""
        if self._attachments.skipped():
            self.discard()

    def attach(self, optimizer: Any) -> RemovableHandle:
        """Run :meth:`step` after each real ``optimizer.step()``; a step skipped for overflow discards.

        Wrappers and engines are unwrapped; attaching twice changes nothing. Call it after
        ``deepspeed.initialize`` (with the engine) or ``accelerator.prepare``. An unfused ``GradScaler`` skip does
        not touch the optimizer at all: the finite rows of that window then join the next commit, which is harmless
        because the weights did not move; :func:`compopt.integrations.amp.attach` drops them, and so does
        :meth:`discard`. An optimizer around a ``base_optimizer`` (SAM) commits when that steps. The step that
        ``torch.distributed.checkpoint`` makes for the state of an optimizer without any is none. Attach anew to an
        optimizer that is made anew: a warning says when nothing commits any more. The optimizer keeps no estimator
        alive.

        Args:
            optimizer: a torch optimizer, or a wrapper or engine that keeps one in ``.optimizer``.

        Returns:
            A handle with ``remove()``.

        Raises:
            TypeError: no torch optimizer is inside.
            RuntimeError: this is a part of another estimator; attach that.

        Communicates: nothing, neither here nor when it commits.
        """
        self.stand_alone()
        return self._attachments.add(optimizer, self._commit)

    def _await_save(self) -> None:
        """Whatever a save beside training reads may be replaced from here on."""
        if self._saving is not None:
            self._saving.settle()

    def between_commits(self) -> AbstractContextManager[None]:
        """Inside, no other thread copies the state, and no commit runs: for changes of several values at once."""
        return self._state.writing()
