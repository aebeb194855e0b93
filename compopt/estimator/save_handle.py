"""Handle of a save beside training."""

from __future__ import annotations

import os
import threading
import warnings
import weakref
from collections.abc import Callable

from compopt.remote import Folder

_all: weakref.WeakSet[SaveHandle] = weakref.WeakSet()


class SaveHandle:
    """Checkpoint that is being written in a thread, see :func:`compopt.save`.

    The interpreter's end waits for the thread. In a forked process there is none: the save is the parent's.

    Args:
        path: the directory of the new checkpoint.
        write: makes it complete, or raises.
        abandon: called in a forked process.

    Attributes:
        path: that directory; the checkpoint counts once :attr:`done` is true and :meth:`wait` does not raise.
    """

    def __init__(self, path: Folder, write: Callable[[], None], abandon: Callable[[], None] | None = None) -> None:
        self.path, self._abandon = path, abandon
        self._outcome = _Outcome(path)
        self._ended = threading.Event()
        weakref.finalize(self, self._outcome.warn)  # whoever threw it away, or ends, shall know
        _all.add(self)
        threading.Thread(target=self._run, args=(write,), name="compopt-save").start()

    def _run(self, write: Callable[[], None]) -> None:
        try:
            write()
        except BaseException as error:
            self._outcome.error = error
        finally:
            self._ended.set()

    @property
    def done(self) -> bool:
        """True if the save has ended, well or with an error."""
        return self._ended.is_set()

    def wait(self, timeout: float | None = None) -> Folder:
        """Wait until the checkpoint is complete.

        Args:
            timeout: seconds to wait at most.

        Returns:
            Its directory.

        Raises:
            TimeoutError: it is not complete yet; the save goes on.
            OSError: a file could not be written. Whatever went wrong is raised here, with every call, and the earlier
                checkpoints are as they were.
            RuntimeError: another rank failed; or this process is a fork of the one that saves.

        Communicates: nothing.
        """
        if not self._ended.wait(timeout):
            raise TimeoutError(f"{self.path} is not complete after {timeout} s; its save goes on")
        self._outcome.told = True
        if self._outcome.error is not None:
            raise self._outcome.error
        return self.path

    def settle(self) -> None:
        """Wait until the save has ended, however it has."""
        self._ended.wait()

    def raise_untold(self) -> None:
        """Wait, and raise what went wrong unless somebody was told."""
        self.settle()
        if not self._outcome.told:
            self.wait()

    def warn(self) -> None:
        """Warn, once, if the save has failed and nobody knows."""
        if self.done:
            self._outcome.warn()

    def _forked(self) -> None:
        """Replace the thread, which a forked process has not, and its locks."""
        self._outcome.error = RuntimeError(f"{self.path} is written by the process of which this one is a fork")
        self._outcome.told = self._outcome.warned = True
        self._ended = threading.Event()
        self._ended.set()
        if self._abandon is not None:
            self._abandon()

    def __repr__(self) -> str:
        return f"SaveHandle({str(self.path)!r}, done={self.done})"


class _Outcome:
    """Result of a save, and notes of who was told."""

    def __init__(self, path: Folder) -> None:
        self._path = path
        self.error: BaseException | None = None
        self.told = self.warned = False

    def warn(self) -> None:
        if self.error is None or self.told or self.warned:
            return
        self.warned = True
        warnings.warn(
            f"{self._path} could not be written ({type(self.error).__name__}: {self.error}); earlier checkpoints are "
            f"as they were, and the next save raises this",
            RuntimeWarning,
            stacklevel=2,
        )


def _forked() -> None:
    for handle in list(_all):
        if not handle.done:
            handle._forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
