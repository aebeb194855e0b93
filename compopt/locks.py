"""Which process writes in a directory: locks that the kernel takes back when the process ends, however it ends.

They are POSIX record locks. A forked process does not inherit them, so that a loader's worker that outlives a killed
run does not keep them; network file systems know them. Within one process they exclude nobody.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import sys
import threading
import time
import warnings
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path

if sys.platform != "win32":
    import fcntl

# Seconds that a new run waits for the lock of one that is about to end: the kernel takes back the memory of a killed
# process first.
PATIENCE = 2.0
_REFUSED = (errno.EACCES, errno.EAGAIN)
_Key = tuple[int, int]  # device and inode


@dataclass
class _Held:
    """A lock of this process, with so many claims on it. Closing any descriptor of its file would give it back."""

    path: Path
    descriptor: int
    pid: int = field(default_factory=os.getpid)
    claims: int = 0


_held: dict[_Key, _Held] = {}
_guard = threading.Lock()
# Claims that were given back. Estimators give theirs back when they are collected, which can happen at any line, also
# one at which this very thread holds the guard: whoever holds it does the rest.
_returned: deque[_Key] = deque()


class Claim:
    """This process writes beside a lock file, until :meth:`release`.

    Args:
        path: of the lock file; its directory exists.
        what: is written, for messages.
        remedy: what a refused run may do.

    Raises:
        RuntimeError: another process holds it; the message says which, on which machine, since when.
        OSError: the lock file cannot be written.

    Warns:
        UserWarning: the file system has no locks.
    """

    def __init__(self, path: Path, what: Path, remedy: str) -> None:
        self.path, self.what = path, what
        try:
            with _guard:
                self._key = _share(path) or _acquire(path, what, remedy)
        finally:
            _give_back()

    @property
    def valid(self) -> bool:
        """The lock file is still there, and a lock was to be had."""
        return self._key is not None and _key(self.path) == self._key

    def release(self) -> None:
        """Give the claim back; the last one of this process gives the lock back. It waits for nobody."""
        key, self._key = self._key, None
        if key is not None:
            _returned.append(key)
            _give_back()


def _give_back() -> None:
    """Do it, unless somebody is at it, who then looks again."""
    while _returned and _guard.acquire(blocking=False):
        try:
            while _returned:
                _release(_returned.popleft())
        finally:
            _guard.release()


def _release(key: _Key) -> None:
    held = _held.get(key)
    if held is None or held.pid != os.getpid():
        return
    held.claims -= 1
    if not held.claims:
        del _held[key]
        if _key(held.path) == key:
            with suppress(OSError):
                held.path.unlink()  # while it is held: whoever opened it before finds another file there
        os.close(held.descriptor)


def _key(path: Path) -> _Key | None:
    with suppress(OSError):
        status = path.stat()
        return status.st_dev, status.st_ino
    return None


def _share(path: Path) -> _Key | None:
    """A further claim on a lock that this process has."""
    key = _key(path)
    if key is None or key not in _held:
        return None
    _held[key].claims += 1
    return key


def _acquire(path: Path, what: Path, remedy: str) -> _Key | None:
    """Lock a file, or ``None`` where there are no locks."""
    end = time.monotonic() + PATIENCE
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        refused = _try(descriptor)
        if refused is None:
            status = os.fstat(descriptor)
            key = status.st_dev, status.st_ino
            if _key(path) == key:  # its last holder may have removed it in between
                _sign(descriptor)
                _held[key] = _Held(path, descriptor, claims=1)
                return key
        holder = _read(descriptor)
        os.close(descriptor)
        if refused is not None and refused.errno not in _REFUSED:
            _warn(what, refused)
            return None
        if refused is not None and time.monotonic() > end:
            raise RuntimeError(f"{what} is in use by {holder}: {remedy}")
        time.sleep(0.05)


def _try(descriptor: int) -> OSError | None:
    """Lock; what the kernel says if it does not."""
    if sys.platform == "win32":
        return OSError(errno.ENOSYS, "no POSIX locks on this system")
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error
    return None


def _sign(descriptor: int) -> None:
    """Say who holds the lock; a full disk keeps nobody from holding it."""
    since = datetime.now(timezone.utc).isoformat(timespec="seconds")
    with suppress(OSError):
        os.ftruncate(descriptor, 0)
        os.pwrite(
            descriptor, json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": since}).encode(), 0
        )


def _read(descriptor: int) -> str:
    try:
        found = json.loads(os.pread(descriptor, 1 << 12, 0))
        return f"process {found['pid']} on {found['host']} since {found['since']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"


def _warn(what: Path, error: OSError) -> None:
    warnings.warn(
        f"{what}: the file system has no locks ({error.strerror}): nobody notices two runs that write there",
        stacklevel=4,
    )


def _forget() -> None:
    """In a forked process: the locks are its parent's."""
    global _guard
    _guard = threading.Lock()
    _held.clear()
    _returned.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
