"""A disk that loses power: synced data survive, and any subset of the unsynced changes may survive.

POSIX promises that the content of a file survives a power loss after ``fsync`` of the file, and that a name does after
``fsync`` of its directory. Any of the unsynced changes may or may not have reached the disk, regardless of the order
in which they were made. :class:`Disk` inspects a real directory before each ``fsync`` and records the changes;
:meth:`Disk.after_power_loss` writes one possible content of the disk after a power failure at that moment.
"""

from __future__ import annotations

import os
import random
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

ABSENT = None
Name = tuple[int, str]  # inode of the directory, name in the directory


@dataclass
class Moment:
    """Contents that the disk may have at one moment.

    Attributes:
        names: for each name, every inode that it may refer to on the disk; ``None``: the name does not exist.
        contents: for each inode of a file, every content that it may have.
        directories: inodes that are directories.
        over: ``save()`` had returned.
    """

    names: dict[Name, list[int | None]]
    contents: dict[int, list[bytes]]
    directories: set[int]
    over: bool = False

    def unsynced(self) -> list[Name]:
        """Return names for which the disk may have more than one state."""
        return [name for name, found in self.names.items() if len(found) > 1]


@dataclass
class Disk:
    """Record the changes in ``root``, whose initial state is durable."""

    root: Path
    moments: list[Moment] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._names: dict[Name, list[int | None]] = {}
        self._contents: dict[int, list[bytes]] = {}
        self._directories: set[int] = set()
        self._held: list[int] = []  # descriptors: the inode of an open file is not reused
        self._known: set[int] = set()
        self._look()
        self._names = {name: found[-1:] for name, found in self._names.items()}
        self._contents = {inode: found[-1:] for inode, found in self._contents.items()}

    # -- watching ------------------------------------------------------------------------------------------------

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Record the state before every ``os.fsync`` inside the context."""
        real = os.fsync

        def fsync(descriptor: int) -> None:
            self.look()
            real(descriptor)
            self._synced(descriptor)

        os.fsync = fsync
        try:
            yield
        finally:
            os.fsync = real
        self.look()
        self.moments[-1].over = True

    def look(self) -> None:
        """Record the possible contents of the disk for a power failure at this moment."""
        self._look()
        names = {name: list(found) for name, found in self._names.items()}
        contents = {inode: list(found) for inode, found in self._contents.items()}
        self.moments.append(Moment(names, contents, set(self._directories)))

    def _look(self) -> None:
        seen: dict[Name, int] = {}
        self._walk(self.root, seen)
        for name in self._names.keys() - seen.keys():
            _add(self._names[name], ABSENT)
        for name, inode in seen.items():
            _add(self._names.setdefault(name, [ABSENT]), inode)

    def _walk(self, folder: Path, seen: dict[Name, int]) -> None:
        here = os.stat(folder).st_ino
        self._directories.add(here)
        for entry in os.scandir(folder):
            inode = self._inode(Path(entry.path))
            seen[here, entry.name] = inode
            if entry.is_dir(follow_symlinks=False):
                self._walk(Path(entry.path), seen)
            else:
                content = Path(entry.path).read_bytes()
                # none of the content may be there, or a part
                _add(self._contents.setdefault(inode, [b"", content[: len(content) // 2]]), content)

    def _inode(self, path: Path) -> int:
        inode = path.stat().st_ino
        if inode not in self._known:
            self._known.add(inode)
            self._held.append(os.open(path, os.O_RDONLY))
        return inode

    def _synced(self, descriptor: int) -> None:
        status = os.fstat(descriptor)
        if not stat.S_ISDIR(status.st_mode):
            if status.st_ino in self._contents:
                self._contents[status.st_ino] = self._contents[status.st_ino][-1:]
            return
        for name, found in self._names.items():
            if name[0] == status.st_ino:
                self._names[name] = found[-1:]

    def close(self) -> None:
        for descriptor in self._held:
            os.close(descriptor)

    # -- the power fails ---------------------------------------------------------------------------------------

    def after_power_loss(
        self, moment: Moment, target: Path, choose: random.Random | bool, lost: Name | None = None
    ) -> None:
        """Write one possible disk: random, or with all (``True``) or none (``False``) of the unsynced changes.

        ``lost``: a name whose unsynced changes are lost in any case.
        """

        def pick(found: list) -> object:
            return found[-1 if choose else 0] if isinstance(choose, bool) else choose.choice(found)

        contents: dict[int, bytes] = {}
        made: dict[int, Path] = {}

        def lay(directory: int, path: Path) -> None:
            path.mkdir()
            for name, found in moment.names.items():
                inode = ABSENT if name[0] != directory else found[0] if name == lost else pick(found)
                if inode is ABSENT:
                    continue
                if inode in moment.directories:
                    lay(inode, path / name[1])
                elif inode in made:
                    os.link(made[inode], path / name[1])
                else:
                    made[inode] = path / name[1]
                    made[inode].write_bytes(contents.setdefault(inode, pick(moment.contents[inode])))

        lay(os.stat(self.root).st_ino, target)


def _add(found: list, new: object) -> None:
    """Append the latest state; a state that occurred before moves to the end."""
    if new in found:
        found.remove(new)
    found.append(new)
