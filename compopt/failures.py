"""Errors of the file system that say which path they are about and what to do."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

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
def named(path: str | os.PathLike[str], kept: str = "") -> Iterator[None]:
    """Give an ``OSError`` the path that it is about, and a remedy; its class and ``errno`` stay.

    Blocks nest: an error that an inner one has explained passes as it is, since that one knows the path best.

    Args:
        path: what is written.
        kept: what is as it was.

    Raises:
        OSError: from the original one.
    """
    try:
        yield
    except OSError as error:
        if isinstance(error.__cause__, OSError):
            raise
        raise _explained(error, path, kept) from error


def _explained(error: OSError, path: str | os.PathLike[str], kept: str = "") -> OSError:
    """The same error with a path, a remedy, and what is as it was."""
    reason = error.strerror or str(error)
    remedy = _REMEDIES.get(error.errno or 0, "").format(free=_free(path))
    text = "; ".join(part for part in (reason, remedy, kept) if part)
    return OSError(error.errno, text, os.fspath(path)) if error.errno else OSError(f"{text}: {os.fspath(path)!r}")


def _free(path: str | os.PathLike[str]) -> str:
    with suppress(OSError):
        return f" ({shutil.disk_usage(Path(path).parent).free / 1e6:,.1f} MB are left)"
    return ""
