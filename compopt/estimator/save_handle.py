"""Handle of a checkpoint that a background thread writes."""

from __future__ import annotations

import os
import threading
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path


class SaveHandle:
    """Handle of a checkpoint that a background thread writes, see :func:`compopt.save`.

    Example:
        >>> import tempfile, compopt
        >>> handle = compopt.save(compopt.SogCLREstimator(n=10), tempfile.mkdtemp(), blocking=False)
        >>> handle.wait() == handle.path
        True

    The interpreter waits for the thread before it exits. A forked process has no such thread: the parent completes the
    save.

    Args:
        path: the directory of the new checkpoint.
        write: completes the checkpoint, or raises.
        abandon: called in a forked process, to release the parent's snapshot.

    Attributes:
        path: the directory; the checkpoint is complete once :attr:`done` is true and :meth:`wait` does not raise.
    """

    def __init__(self, path: Path, write: Callable[[], object], abandon: Callable[[], None] | None = None) -> None:
        self.path, self._abandon, self._pid = path, abandon, os.getpid()
        self._result: list[BaseException | None] = []  # empty until the save has ended
        self._reported: list[str] = []  # how an error was reported to the user: "raised", "warned"
        weakref.finalize(self, _warn, path, self._result, self._reported)  # also when the interpreter exits
        self._thread = threading.Thread(target=self._run, args=(write,), name="compopt-save")
        try:
            self._thread.start()
        except RuntimeError:  # no thread can be started; write here, since the other ranks wait for this rank's files
            self._run(write)

    def _run(self, write: Callable[[], object]) -> None:
        try:
            write()
            self._result.append(None)
        except BaseException as error:
            self._result.append(error)

    @property
    def done(self) -> bool:
        """Return whether the save has ended, successfully or with an error."""
        self._leave_to_parent()
        return bool(self._result)

    def wait(self, timeout: float | None = None) -> Path:
        """Wait until the checkpoint is complete.

        Args:
            timeout: seconds to wait at most.

        Returns:
            The directory of the checkpoint.

        Raises:
            TimeoutError: the checkpoint is not complete yet; the save continues.
            OSError: a file could not be written. Every call raises the error of the save, whatever its type. Earlier
                checkpoints are unchanged.
            RuntimeError: another rank failed, or this process is a fork of the process that saves.

        Communicates: nothing.
        """
        self.settle(timeout)
        if not self._result:
            raise TimeoutError(f"{self.path} is not complete after {timeout} s; the save continues")
        (error,) = self._result
        self._reported.append("raised")
        if error is not None:
            raise error
        return self.path

    def settle(self, timeout: float | None = None) -> None:
        """Wait until the save has ended, successfully or with an error; do not raise."""
        if not self.done:
            self._thread.join(timeout)

    def raise_unreported(self) -> None:
        """Wait, and raise the error of the save unless :meth:`wait` has already raised it."""
        self.settle()
        if "raised" not in self._reported:
            self.wait()

    def warn(self) -> None:
        """Warn, once, if the save has failed and the error was not reported yet."""
        if self.done:
            _warn(self.path, self._result, self._reported)

    def _leave_to_parent(self) -> None:
        """Mark the save as ended in a forked process, which does not have the thread of its parent."""
        if os.getpid() != self._pid and not self._result:
            self._result.append(RuntimeError(f"{self.path} is written by the process of which this one is a fork"))
            self._reported.append("raised")
            if self._abandon is not None:
                self._abandon()

    def __repr__(self) -> str:
        return f"SaveHandle({str(self.path)!r}, done={self.done})"


def _warn(path: Path, result: list[BaseException | None], reported: list[str]) -> None:
    error = result[0] if result and not reported else None
    if error is not None:
        reported.append("warned")
        warnings.warn(
            f"{path} could not be written ({type(error).__name__}: {error}); earlier checkpoints are as they were, and "
            f"the next save raises this",
            RuntimeWarning,
            stacklevel=3,
        )
