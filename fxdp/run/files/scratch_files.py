"""What ranks above 0 write goes into a folder of their own, from which they also read it again.

    the script            on rank 1                                        on rank 0
    open("a.txt", "w")    scratch/home/me/a.txt                            a.txt, noted as new if it is
    open("a.txt")         scratch/home/me/a.txt                            a.txt
    exists("b.txt")       False if rank 0 has made it since the start      as it is
    open("c.txt", "a")    a copy of c.txt from before                      c.txt, copied for the others first
    remove("d.txt")       d.txt counts as removed                          d.txt is removed, copied first

So nothing is written twice, a value that is written can be read, and no rank sees what rank 0 has written
before it has come there itself. Folders of caches that ranks share on purpose are as they are.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_KEPT = 2**28
"""The largest file of which there is a copy, in bytes."""


class NotedFiles:
    """Rank 0's files. Noted in `journal`, before: new ones, and ones from before the run that it changes."""

    def __init__(self, journal: Path) -> None:
        self.journal = journal
        self._noted = _Noted(journal)
        self._file = os.open(journal, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def written(self, path: Any, *, keep: bool = False) -> Any:
        """Note a path that is about to be written."""
        if os.path.lexists(path):
            self.changed(path)
        else:
            os.write(self._file, os.fsencode(os.path.abspath(os.fspath(path))) + b"\n")
        return path

    def changed(self, path: Any) -> None:
        """Copy a file from before the run, for ranks that have not come here; none of more than 256 MiB."""
        name = os.path.abspath(os.fsdecode(path))
        self._noted.read()
        if name in self._noted.new or name in self._noted.kept or not os.path.isfile(name):
            return
        if os.path.getsize(name) <= _KEPT:
            copy = self._noted.folder + name
            os.makedirs(os.path.dirname(copy), exist_ok=True)
            shutil.copy2(name, copy)
            os.write(self._file, b"=" + os.fsencode(name) + b"\n")


class _Noted:
    """What the journal says: new names, and names of which there is a copy from before in `folder`."""

    def __init__(self, journal: Path) -> None:
        self.new, self.kept = set[str](), set[str]()
        self.folder = str(journal.parent / "before")
        self._journal, self._position = journal, 0

    def read(self) -> None:
        """Read what was added."""
        try:
            size = os.stat(self._journal).st_size
        except FileNotFoundError:
            return
        if size > self._position:
            with open(self._journal, "rb") as file:
                file.seek(self._position)
                text = file.read()
            complete = text[: text.rfind(b"\n") + 1]
            self._position += len(complete)
            for line in map(os.fsdecode, complete.splitlines()):
                (self.kept if line.startswith("=") else self.new).add(line.removeprefix("="))


class ScratchFiles:
    """The files of a rank above 0, as its script sees them.

    Parameters
    ----------
    root : the folder for what the script writes.
    journal : the file in which rank 0 notes what it makes.
    """

    def __init__(self, root: Path, journal: Path) -> None:
        self.root, self.journal = str(root), journal
        self._removed: set[str] = set()
        self._noted = _Noted(journal)

    def written(self, path: Any, *, keep: bool = False) -> Any:
        """Return where to write a path; `keep` copies what is there first.

        Raises
        ------
        FileNotFoundError : its folder does not exist, as on one device.
        """
        name = os.path.abspath(os.fsdecode(path))
        here = self.root + name
        if not self.exists(os.path.dirname(name)):
            raise FileNotFoundError(2, "No such file or directory", name)
        os.makedirs(os.path.dirname(here), exist_ok=True)
        if keep and not os.path.lexists(here) and self.exists(name):
            shutil.copy2(self.read(name), f"{here}.{os.getpid()}")
            os.replace(f"{here}.{os.getpid()}", here)  # at once, as workers may copy, too
        self._removed.discard(name)
        return here

    def read(self, path: Any) -> Any:
        """Return where to read a path.

        Raises
        ------
        FileNotFoundError : it does not exist for this rank.
        """
        name = os.path.abspath(os.fsdecode(path))
        here = self.root + name
        if os.path.lexists(here):
            return here
        there = os.path.lexists(name)  # asked before the journal, where rank 0 notes what it will make
        self._noted.read()
        if name in self._noted.kept and name not in self._removed:
            return self._noted.folder + name
        if self._hidden(name):
            raise FileNotFoundError(2, "No such file or directory", os.fsdecode(path))
        return path if there else here

    def exists(self, path: Any) -> bool:
        """Return whether a path exists for this rank."""
        try:
            return os.path.lexists(self.read(path))
        except FileNotFoundError:
            return False

    def remove(self, path: Any) -> None:
        """Let a file or folder, with all that is in it, count as removed."""
        where = self.read(path)
        name = os.path.abspath(os.fsdecode(path))
        if not os.path.lexists(where):
            raise FileNotFoundError(2, "No such file or directory", os.fsdecode(path))
        if where == self.root + name:
            _delete(where)
        self._removed.add(name)

    def mkdir(self, path: Any, mode: int = 0o777) -> None:
        """Make a folder.

        Raises
        ------
        FileExistsError : there is one.
        """
        if self.exists(path):
            raise FileExistsError(17, "File exists", os.fsdecode(path))
        os.mkdir(self.written(path), mode)

    def folder(self, path: Any) -> str:
        """Return where files are made in a folder, by names that the system chooses."""
        name = os.path.abspath(os.fsdecode(path))
        if not self.exists(name):
            return name
        os.makedirs(self.root + name, exist_ok=True)
        return self.root + name

    def rename(self, old: Any, new: Any) -> None:
        """Move a file or folder."""
        source, target = self.read(old), self.written(new)
        if os.path.isdir(source) and not os.path.isdir(target):
            shutil.copytree(source, target)
        else:
            shutil.copy2(source, target)
        self.remove(old)

    def names(self, path: Any) -> list[str]:
        """Return the names in a folder."""
        name = os.path.abspath(os.fsdecode(path))
        where = [self.root + name] if os.path.isdir(self.root + name) else []
        if not self._hidden(name):
            where.append(name)
        elif not where:
            raise FileNotFoundError(2, "No such file or directory", os.fsdecode(path))
        found = {one: None for folder in where if os.path.isdir(folder) for one in os.listdir(folder)}
        found |= {os.path.basename(one): None for one in self._noted.kept if os.path.dirname(one) == name}
        if not found and not any(map(os.path.isdir, where)):
            return os.listdir(path)
        return [one for one in found if self.exists(os.path.join(name, one))]

    def scan(self, path: Any) -> FolderEntries:
        """Return the entries of a folder."""
        return FolderEntries([FolderEntry(self, os.fsdecode(path), one) for one in self.names(path)])

    def _hidden(self, name: str) -> bool:
        """Return whether the real path is none of this rank's: removed, or made by rank 0 since the start."""
        self._noted.read()
        while True:
            if name in self._removed or name in self._noted.new:
                return True
            above = os.path.dirname(name)
            if above == name:
                return False
            name = above


def _delete(path: str) -> None:
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    else:
        Path(path).unlink()


class FolderEntry:
    """An entry of a folder, like `os.DirEntry`."""

    def __init__(self, files: ScratchFiles, folder: str, name: str) -> None:
        self.name, self.path, self._files = name, os.path.join(folder, name), files

    def __fspath__(self) -> str:
        """Return the path."""
        return self.path

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        """Return the file's state."""
        return os.stat(self._files.read(self.path), follow_symlinks=follow_symlinks)

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        """Return whether it is a folder."""
        where = self._files.read(self.path)
        return os.path.isdir(where) and (follow_symlinks or not os.path.islink(where))

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        """Return whether it is a file."""
        where = self._files.read(self.path)
        return os.path.isfile(where) and (follow_symlinks or not os.path.islink(where))

    def is_symlink(self) -> bool:
        """Return whether it is a symbolic link."""
        return os.path.islink(self._files.read(self.path))

    def is_junction(self) -> bool:
        """Return False: other systems have junctions."""
        return False

    def inode(self) -> int:
        """Return the number of its inode."""
        return self.stat(follow_symlinks=False).st_ino


class FolderEntries:
    """The entries of a folder, like the result of `os.scandir`."""

    def __init__(self, entries: Sequence[FolderEntry]) -> None:
        self._entries = iter(entries)

    def __iter__(self) -> FolderEntries:
        """Return itself."""
        return self

    def __next__(self) -> FolderEntry:
        """Return the next entry."""
        return next(self._entries)

    def __enter__(self) -> FolderEntries:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""
