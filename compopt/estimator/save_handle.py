"""Handle of a save beside training."""

from __future__ import annotations

import os
import threading
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass
class _Outcome:
    """Result of a save, and notes of who knows it."""

    path: Path | str
    error: BaseException | None = None
    told: bool = False
    warned: bool = False

    def warn(self) -> None:
        """Warn, once, if the save has failed and nobody was told."""
        if self.error is None or self.told or self.warned:
            return
        self.warned = True
        warnings.warn(
            f"{self.path} could not be written ({type(self.error).__name__}: {self.error}); earlier checkpoints are "
            f"as they were, and the next save raises this",
            RuntimeWarning,
            stacklevel=2,
        )


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
        self._outcome, self._ended = _Outcome(path), threading.Event()
        weakref.finalize(self, self._outcome.warn)  # also at the interpreter's end
        thread = threading.Thread(target=self._run, args=(write,), name="compopt-save")
        try:
            thread.start()
        except RuntimeError:  # no more threads can be had; other ranks wait for what this one writes
            self._run(write)

    def _run(self, write: Callable[[], object]) -> None:
        try:
            write()
        except BaseException as error:
            self._outcome.error = error
        finally:
            self._ended.set()

    @property
    def done(self) -> bool:
        """True if the save has ended, well or with an error."""
        self._leave_to_parent()
        return self._ended.is_set()

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
        self._leave_to_parent()
        if not self._ended.wait(timeout):
            raise TimeoutError(f"{self.path} is not complete after {timeout} s; its save goes on")
        self._outcome.told = True
        if self._outcome.error is not None:
            raise self._outcome.error
        return self.path

    def settle(self) -> None:
        """Wait until the save has ended, well or with an error."""
        self._leave_to_parent()
        self._ended.wait()

    def raise_untold(self) -> None:
        """Wait, and raise what went wrong unless somebody was told."""
        self.settle()
        if not self._outcome.told:
            self.wait()

    def warn(self) -> None:
        """Warn, once, if the save has failed and nobody was told."""
        if self.done:
            self._outcome.warn()

    def _leave_to_parent(self) -> None:
        """In a forked process, end the save as far as this process is concerned: it has no such thread."""
        if os.getpid() == self._pid or self._ended.is_set():
            return
        self._pid = os.getpid()
        self._outcome.error = RuntimeError(f"{self.path} is written by the process of which this one is a fork")
        self._outcome.told = self._outcome.warned = True
        self._ended = threading.Event()  # that of the parent may be locked for ever
        self._ended.set()
        if self._abandon is not None:
            self._abandon()

    def __repr__(self) -> str:
        return f"SaveHandle({str(self.path)!r}, done={self.done})"
