"""`PrivateFolder`: files of the current user only, written atomically, the least recently used removed first.

The files may contain code, so the folder is used only if no other user can write: the folder must belong to
the current user and must not be writable by group or others, as ssh requires for keys. Files are named
relative to a descriptor of the folder, so a folder that is swapped in later is not used.
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
"""Age in seconds after which a temporary file belongs to a killed process."""
_TEMPORARY = ".tmp-"
_ROOM = 0.9
"""The share of the limit to which a full folder is emptied, so that not every write has to remove files."""


class UnusableFolderError(Exception):
    """Raised if the folder is not private, or cannot be created; names the folder and the reason."""


@dataclass(frozen=True)
class PrivateFolder:
    """A folder with a limit on the total bytes of its files."""

    path: Path
    limit: int

    def read(self, name: str) -> bytes | None:
        """Return the content of a file, and mark the file as used now; None if there is no file.

        Raises
        ------
        UnusableFolderError : another user could have written the file.
        OSError : the file cannot be read.
        """
        with contextlib.suppress(FileNotFoundError), self._opened() as folder:
            with open(os.open(name, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=folder), "rb") as stream:
                content = stream.read()
            with contextlib.suppress(OSError):  # read-only, or removed in the meantime
                os.utime(name, dir_fd=folder)
            return content
        return None

    def write(self, name: str, content: bytes) -> None:
        """Write a file atomically; a concurrent reader finds the previous content, or no file.

        A content above the folder's limit is not written.

        Raises
        ------
        UnusableFolderError : another user could write the file.
        OSError : the file cannot be written.
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
        """Remove a file if possible."""
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
        """Remove the least recently used files until the rest is within the limit."""
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
    """Yield the time of last use, size and name of each file."""
    for name in os.listdir(folder):
        with contextlib.suppress(FileNotFoundError):  # another process may remove files, too
            found = os.stat(name, dir_fd=folder, follow_symlinks=False)
            yield found.st_mtime, found.st_size, name


def _remove(name: str, folder: int) -> None:
    with contextlib.suppress(OSError):
        os.unlink(name, dir_fd=folder)
