"""File utilities: informative errors, durable writes, checksums, and locks between processes."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import socket
import sys
import threading
import time
import warnings
import weakref
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from pathlib import Path

if sys.platform != "win32":
    import fcntl

_REMEDIES = {
    errno.ENOSPC: "free space there{free} or name another directory",
    errno.EDQUOT: "the quota is used up: free space there or name another directory",
    errno.EFBIG: "a file may not be so large there (ulimit -f, or the file system): raise the limit or name another "
    "directory",
    errno.EROFS: "the file system is read-only: name another directory",
    errno.EACCES: "this user may not write there: name another directory",
    errno.EPERM: "this user may not write there: name another directory",
    errno.ENOENT: "the directory was removed while it was in use: by another run?",
}


@contextmanager
def explained_errors(path: str | os.PathLike[str], kept: str = "") -> Iterator[None]:
    """Add a path, a remedy and ``kept``, a note on unchanged data, to an ``OSError``; class and ``errno`` stay.

    Blocks may be nested: an error that an inner block has extended passes unchanged.
    """
    try:
        yield
    except OSError as error:
        if isinstance(error.__cause__, OSError):
            raise
        remedy = _REMEDIES.get(error.errno or 0, "").format(free=_free(path))
        text = "; ".join(part for part in (error.strerror or str(error), remedy, kept) if part)
        if error.errno:
            raise OSError(error.errno, text, os.fspath(path)) from error
        raise OSError(f"{text}: {os.fspath(path)!r}") from error


def _free(path: str | os.PathLike[str]) -> str:
    with suppress(OSError):
        return f" ({shutil.disk_usage(Path(path).parent).free / 1e6:,.1f} MB are left)"
    return ""


# -- durable writes ------------------------------------------------------------------------------------------------


def make_directory(directory: Path) -> None:
    """Create a directory and its parents, and sync their names."""
    missing = [path for path in (directory, *directory.parents) if not path.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    for path in missing:
        sync_directory(path.parent)


def write_file(path: Path, content: bytes) -> None:
    """Write a new file and sync its content; its name is synced by :func:`sync_directory`."""
    with open(path, "xb") as file:  # "x": never overwrite an existing file
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    """Sync the names in a directory."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def checksum(path: Path, crc32: bool = False) -> str:
    """Return the SHA-256 of a file (or its CRC-32) in hexadecimal digits."""
    digest, crc = hashlib.sha256(), 0
    with open(path, "rb") as file:
        while piece := file.read(1 << 22):
            if crc32:
                crc = zlib.crc32(piece, crc)
            else:
                digest.update(piece)
    return f"{crc:08x}" if crc32 else digest.hexdigest()


# -- locks -----------------------------------------------------------------------------------------------------------

# Seconds to wait for a lock. A killed process still holds its locks while the kernel frees its memory.
LOCK_SECONDS = 2.0
# A second flock by this process would be refused like that of another process. All users share the lock that it holds.
_locks: weakref.WeakValueDictionary[Path, Lock] = weakref.WeakValueDictionary()
_guard = threading.RLock()


class Lock:
    """Locked file, see :func:`lock`; unlocked when this object is collected.

    The kernel releases a flock when all copies of the descriptor are closed, at the latest at the end of the process.
    Forked children close their copies at once, so that a DataLoader worker that outlives its run holds no lock.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path, self.descriptor = path, descriptor
        weakref.finalize(self, _unlock, path, descriptor, os.getpid())


def _unlock(path: Path, descriptor: int, pid: int) -> None:
    if os.getpid() != pid:
        return
    if _is_file(path, descriptor):
        with suppress(OSError):
            path.unlink()  # before unlocking: a waiting process then detects that its file is no longer at the path
    os.close(descriptor)


def _is_file(path: Path, descriptor: int) -> bool:
    """Return whether the file at ``path`` is the one of an open descriptor."""
    with suppress(OSError):
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    return False


def lock(path: Path, what: Path, remedy: str) -> Lock | None:
    """Lock a file for this process.

    Args:
        path: path of the lock file, in an existing directory.
        what: the file or directory that the lock protects, for messages.
        remedy: advice for a refused run, for messages.

    Returns:
        The lock, which this process holds until the object is collected; ``None`` if the file system has no locks.

    Raises:
        RuntimeError: another process holds the lock; the message contains process, machine and time. Or the system is
            Windows, where tables on disk and checkpoint directories are not available.
        OSError: the lock file cannot be written.

    Warns:
        UserWarning: the file system has no locks.
    """
    if sys.platform == "win32":
        raise RuntimeError(f"{what}: Windows lacks POSIX file operations; save est.state_dict(), keep rows in memory")
    path = path.absolute()
    with _guard:
        held = _locks.get(path)
        return held if held is not None and _is_file(path, held.descriptor) else _acquire(path, what, remedy)


def _acquire(path: Path, what: Path, remedy: str) -> Lock | None:
    """Lock a file; return ``None`` if the file system has no locks."""
    end = time.monotonic() + LOCK_SECONDS
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        refused = _flock(descriptor)
        if refused is None and _is_file(path, descriptor):
            _sign(descriptor)
            _locks[path] = held = Lock(path, descriptor)
            return held
        holder = _holder(descriptor)
        os.close(descriptor)
        if refused is None:  # the former holder has just removed the file: try again
            continue
        if refused.errno not in (errno.EACCES, errno.EAGAIN):
            warnings.warn(
                f"{what}: the file system has no locks ({refused.strerror}), so two runs that write there go unnoticed",
                stacklevel=4,
            )
            return None
        if time.monotonic() > end:
            raise RuntimeError(f"{what} is in use by {holder}: {remedy}")
        time.sleep(0.05)


def _flock(descriptor: int) -> OSError | None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error
    return None


def _sign(descriptor: int) -> None:
    """Write process, host and time into the lock file; ignore a full disk."""
    since = datetime.now(timezone.utc).isoformat(timespec="seconds")
    with suppress(OSError):
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()} since {since}".encode(), 0)


def _holder(descriptor: int) -> str:
    with suppress(OSError):
        return os.pread(descriptor, 1 << 12, 0).decode(errors="replace") or "another process"
    return "another process"


def _close_in_child() -> None:
    global _guard
    _guard = threading.RLock()
    for held in list(_locks.values()):
        os.close(held.descriptor)
    _locks.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)
