"""Work in a thread beside the training loop, whose errors are raised in the loop."""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

# Seconds that the interpreter's end waits for a job to notice that it is cancelled
GRACE = 20.0
_running: weakref.WeakSet[Job] = weakref.WeakSet()


class Job:
    """An action in a thread of its own.

    Args:
        action: called with the job; a long one looks at :attr:`cancelled` now and then.

    Attributes:
        cancelled: nobody will ask for the result.
        seconds: how long the action ran, once it is done.
    """

    def __init__(self, action: Callable[[Job], Any]) -> None:
        self.cancelled, self.seconds = False, 0.0
        self._action, self._value = action, None
        self._error: Exception | None = None
        # a daemon: a program that ends in the middle of an epoch does not wait for batches that nobody wants
        self._thread = threading.Thread(target=self._run, name="compopt-sampler", daemon=True)
        _running.add(self)
        self._thread.start()

    def _run(self) -> None:
        started = time.perf_counter()
        try:
            self._value = self._action(self)
        except Exception as error:
            self._error = error
        self.seconds = time.perf_counter() - started

    @property
    def done(self) -> bool:
        """It has ended, well or not."""
        return not self._thread.is_alive()

    def wait(self, seconds: float | None = None) -> None:
        """Until it has ended, or so long."""
        self._thread.join(seconds)

    def result(self) -> Any:
        """Wait for the value; an error of the thread is raised here."""
        self.wait()
        if self._error is not None:
            raise RuntimeError(
                f"forming the next epoch's batches failed in the background: {type(self._error).__name__}: "
                f"{self._error}"
            ) from self._error
        return self._value


@atexit.register
def _end() -> None:
    """A daemon that computes while the interpreter goes takes the process down with it: let all come to an end."""
    jobs = [job for job in _running if not job.done]
    for job in jobs:
        job.cancelled = True
    for job in jobs:
        job.wait(GRACE)
