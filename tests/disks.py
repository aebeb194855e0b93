"""Full and read-only disks: real ones where this process may mount file systems, otherwise simulated errors."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


class CannotMount(OSError):
    """Raised if this process may not mount a file system, or if the machine has no mkfs."""


@contextlib.contextmanager
def mounted(path: Path, size: int, *options: str) -> Iterator[Path]:
    """Mount a file system of ``size`` bytes in a file.

    Raises:
        CannotMount: file systems cannot be mounted here.
    """
    path.mkdir()
    image = path.with_suffix(".image")
    image.touch()
    os.truncate(image, size)
    try:
        subprocess.run(["mkfs.ext4", "-q", "-F", "-O", "^has_journal", image], check=True, capture_output=True)
        choices = ",".join(("loop", *options))
        subprocess.run(["mount", "-o", choices, image, path], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise CannotMount(f"may not mount a file system: {error}") from error
    try:
        yield path
    finally:
        subprocess.run(["umount", "--lazy", path], check=True)


def fill(path: Path, left: int = 0) -> Path:
    """Fill a file system up to ``left`` bytes; a repeated call also takes the space that was freed since.

    Removing the returned file frees the space.
    """
    balloon = path / "balloon"
    usage = os.statvfs(path)
    with open(balloon, "ab", buffering=0) as file, contextlib.suppress(OSError):
        with contextlib.suppress(OSError):  # in one call; the file system's metadata may take some of the rest
            os.posix_fallocate(file.fileno(), file.tell(), max(0, usage.f_bavail - 64) * usage.f_frsize)
        file.seek(0, os.SEEK_END)
        while file.write(b"x" * 4096):
            pass
    os.truncate(balloon, max(0, balloon.stat().st_size - left))
    return balloon


def full_after(monkeypatch: pytest.MonkeyPatch, name: str, calls: int) -> None:
    """Make ``os.NAME`` raise ENOSPC from call number ``calls`` on."""
    real, count = getattr(os, name), [0]

    def full(*args, **options):
        count[0] += 1
        if count[0] >= calls:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*args, **options)

    monkeypatch.setattr(os, name, full)
