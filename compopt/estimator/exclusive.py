"""Lock that keeps writers and copies of an estimator's committed state apart."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Exclusive:
    """Lock around commits, copies and loads of one estimator, so that a state copied in a thread is of one commit.

    The thread that has it may take it again. Copies and pickles of an estimator have one of their own.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._writing = False

    @contextmanager
    def copying(self) -> Iterator[None]:
        """Keep writers away.

        Raises:
            RuntimeError: this thread itself is in the middle of writing (a signal handler that saves).
        """
        with self._lock:
            if self._writing:
                raise RuntimeError(
                    "the estimator is in the middle of a commit, and its state is of none: let a signal handler set a "
                    "flag, and save after optimizer.step()"
                )
            yield

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Keep copies and other writers away."""
        with self._lock:
            before, self._writing = self._writing, True
            try:
                yield
            finally:
                self._writing = before

    def __reduce__(self) -> tuple[Any, ...]:
        return Exclusive, ()
