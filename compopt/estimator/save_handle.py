"""Handle of a save beside training."""

from __future__ import annotations

import os
import threading
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path


class SaveHandle:
    """Checkpoint that is being written in a thread, see :func:`compopt.save`.

    The interpreter's end waits for the thread. In a forked process there is none: the save is the parent's.

    Args:
        path: the directory of the new checkpoint, or its URL.
        write: makes it complete, or raises.
        abandon: called in a forked process.

    Attributes:
        path: that directory; the checkpoint counts once :attr:`done` is true and :meth:`wait` does not raise.
    """

    def __init__(
        self, path: Path | str, write: Callable[[], object], abandon: Callable[[], None] | None = None
    ) -> None:
        self.path, self._abandon, self._pid = path, abandon, os.getpid()
        self._result: list[BaseException | None] = []  # empty until the save has ended
        self._told: list[str] = []  # how the user learnt of an error: "raised", "warned"
        weakref.finalize(self, _warn, path, self._result, self._told)  # also at the interpreter's end
        self._thread = threading.Thread(target=self._run, args=(write,), name="compopt-save")
        try:
            self._thread.start()
        except RuntimeError:  # no more threads can be had; other ranks wait for what this one writes
            self._run(write)

    def _run(self, write: Callable[[], object]) -> None:
        try:
            write()
            self._result.append(None)
        except BaseException as error:
            self._result.append(error)

    @property
    def done(self) -> bool:
        """True if the save has ended, well or with an error."""
        self._leave_to_parent()
        return bool(self._result)

    def wait(self, timeout: float | None = None) -> Path | str:
        """Wait until the checkpoint is complete.

        Args:
            timeout: seconds to wait at most.

        Returns:
            Its directory, or its URL.

        Raises:
            TimeoutError: it is not complete yet; the save goes on.
            OSError: a file could not be written. Whatever went wrong is raised here, with every call, and the earlier
                checkpoints are as they were.
            RuntimeError: another rank failed; or this process is a fork of the one that saves.

        Communicates: nothing.
        """
        self.settle(timeout)
        if not self._result:
            raise TimeoutError(f"{self.path} is not complete after {timeout} s; its save goes on")
        (error,) = self._result
        self._told.append("raised")
        if error is not None:
            raise error
        return self.path

    def settle(self, timeout: float | None = None) -> None:
        """Wait until the save has ended, well or with an error."""
        if not self.done:
            self._thread.join(timeout)

    def raise_untold(self) -> None:
        """Wait, and raise what went wrong unless somebody was told."""
        self.settle()
        if "raised" not in self._told:
            self.wait()

    def warn(self) -> None:
        """Warn, once, if the save has failed and nobody was told."""
        if self.done:
            _warn(self.path, self._result, self._told)

    def _leave_to_parent(self) -> None:
        """In a forked process, end the save as far as this process is concerned: it has no such thread."""
        if os.getpid() != self._pid and not self._result:
            self._result.append(RuntimeError(f"{self.path} is written by the process of which this one is a fork"))
            self._told.append("raised")
            if self._abandon is not None:
                self._abandon()

    def __repr__(self) -> str:
        return f"SaveHandle({str(self.path)!r}, done={self.done})"


def _warn(path: Path | str, result: list[BaseException | None], told: list[str]) -> None:
    error = result[0] if result and not told else None
    if error is not None:
        told.append("warned")
        warnings.warn(
            f"{path} could not be written ({type(error).__name__}: {error}); earlier checkpoints are as they were, and "
            f"the next save raises this",
            RuntimeWarning,
            stacklevel=3,
        )
