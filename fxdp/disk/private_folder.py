"""`PrivateFolder`: files of this user alone, written in full or not at all, the oldest ones removed.

What is read from it may be code, so it is used only if nobody else can write it: it is this user's own and
neither its group nor others may write, as ssh asks of its keys. It is opened once, and files are named
relative to what was opened: a folder that somebody puts in its place later is another one.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_STRAY_S = 3600
"""After so long a temporary file is of a process that was killed while it wrote."""
_TEMPORARY = ".tmp-"
_ROOM = 0.9
"""To what share of the limit a full folder is emptied, so that not every write has to remove something."""


class UnusableFolderError(Exception):
    """The folder is not this user's alone, or cannot be made; says which and why."""


@dataclass(frozen=True)
class PrivateFolder:
    """A folder and how many bytes its files may have together."""

    path: Path
    limit: int

    def read(self, name: str) -> bytes | None:
        """The content of a file, which counts as used now; None if there is none.

        Raises
        ------
        UnusableFolderError : others could have written it.
        OSError : it cannot be read.
        """
        with contextlib.suppress(FileNotFoundError), self._opened() as folder:
            with open(os.open(name, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=folder), "rb") as stream:
                content = stream.read()
            with contextlib.suppress(OSError):  # read-only, or removed meanwhile
                os.utime(name, dir_fd=folder)
            return content
        return None

    def write(self, name: str, content: bytes) -> None:
        """Make a file of this content; who reads meanwhile finds the file before, or none.

        Raises
        ------
        UnusableFolderError : others could write it.
        OSError : it cannot be written.
        """
        if len(content) > self.limit:
            return
        with self._opened(make=True) as folder:
            temporary = f"{_TEMPORARY}{secrets.token_hex(8)}"
            try:
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
                with open(os.open(temporary, flags, 0o600, dir_fd=folder), "wb") as stream:
                    stream.write(content)
                os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
            except OSError:
                _remove(temporary, folder)
                raise
            self._make_room(folder)

    def remove(self, name: str) -> None:
        """Remove a file, if it is there and can be removed."""
        with contextlib.suppress(UnusableFolderError, OSError), self._opened() as folder:
            os.unlink(name, dir_fd=folder)

    @contextlib.contextmanager
    def _opened(self, *, make: bool = False) -> Iterator[int]:
        if make:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            _check(os.fstat(folder), self.path)
            yield folder
        finally:
            os.close(folder)

    def _make_room(self, folder: int) -> None:
        """Remove files that were not used for longest, until the others are within the limit."""
        files = sorted(_files(folder))
        total = sum(size for _, size, _ in files)
        goal = self.limit if total <= self.limit else int(self.limit * _ROOM)
        for used, size, name in files:
            stray = name.startswith(_TEMPORARY) and used < time.time() - _STRAY_S
            if stray or total > goal:
                _remove(name, folder)
                total -= size


def _check(found: os.stat_result, path: Path) -> None:
    if found.st_uid != os.getuid():
        raise UnusableFolderError(f"{path} belongs to user {found.st_uid}, not to {os.getuid()}")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        mode = f"{stat.S_IMODE(found.st_mode):o}"
        raise UnusableFolderError(
            f"{path} can be written by others (mode {mode}): chmod 700 makes it private"
        )


def _files(folder: int) -> Iterator[tuple[float, int, str]]:
    """When each was used last, its size and name."""
    for name in os.listdir(folder):
        with contextlib.suppress(FileNotFoundError):  # another process makes room, too
            found = os.stat(name, dir_fd=folder, follow_symlinks=False)
            yield found.st_mtime, found.st_size, name


def _remove(name: str, folder: int) -> None:
    with contextlib.suppress(OSError):
        os.unlink(name, dir_fd=folder)
