"""Which calls of Python and torch open, make, remove and look at files, and how they find a rank's own."""

from __future__ import annotations

import builtins
import importlib
import importlib.util
import io
import os
import shutil
import sys
import tarfile
import tempfile
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch

from fxdp.run.files.scratch_files import NotedFiles, ScratchFiles
from fxdp.settings import inductor_cache_asked
from fxdp.torch_compat import Patch, around

_SYSTEM = ("/dev/", "/proc/", "/sys/")
_SHARED = (
    "torch._inductor",
    "torch._dynamo",
    "torch.utils._filelock",
    "triton",
    "filelock",
    "fxdp.",
    "importlib",
)
"""Code whose files are all ranks', made with locks of its own."""
_THROUGH = (
    "os",
    "io",
    "pathlib",
    "shutil",
    "posixpath",
    "genericpath",
    "contextlib",
    "glob",
    "tempfile",
    "functools",
)
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

Files = NotedFiles | ScratchFiles


class FileCalls:
    """The replacements, for one rank's files, in a run with its own files in the folder `own`."""

    def __init__(self, files: Files, own: str) -> None:
        self.files, self._busy = files, threading.local()
        cache = inductor_cache_asked() or os.path.join(tempfile.gettempdir(), "torchinductor")
        self._shared = (*_SYSTEM, own, cache)
        self._made: set[str] = set()
        """What tempfile has made in the system's folder, by names that differ from rank to rank."""

    def is_plain(self, path: Any, *, makes: bool = False) -> bool:
        """Return whether a path is as it is: a descriptor, a shared cache, a temporary file."""
        if isinstance(path, int) or getattr(self._busy, "on", False):
            return True
        try:
            name = os.path.abspath(os.fsdecode(path))
        except TypeError:
            return True
        if name.startswith(self._shared) or "__pycache__" in name:
            return True
        if self._made and any(name == one or name.startswith(one + "/") for one in self._made):
            return True
        asks, is_temporary = _asking(sys._getframe(2))
        if is_temporary and makes and os.path.dirname(name) == _temporary_folder():
            self._made.add(name)
            return True
        return asks.startswith(_SHARED)

    def of_files(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a method of the rank's files, in which calls of the same kind are plain."""
        self._busy.on = True
        try:
            return method(*args, **kwargs)
        finally:
            self._busy.on = False

    def open(self, plain: Any, file: Any, mode: Any = "r", *args: Any, **kwargs: Any) -> Any:
        """Open a file."""
        writes = isinstance(mode, str) and any(one in mode for one in "wax+")
        if not self.is_plain(file, makes=writes):
            if not writes:
                file = self._read(file)
            else:
                if "x" in mode and self._exists(file):
                    raise FileExistsError(17, "File exists", os.fsdecode(file))
                if "r" in mode:
                    self._read(file)
                file = self.of_files(self.files.written, file, keep="w" not in mode)
        return plain(file, mode, *args, **kwargs)

    def os_open(self, plain: Any, path: Any, flags: int, *args: Any, **kwargs: Any) -> Any:
        """Open a file by its descriptor."""
        writes = bool(flags & _WRITING)
        if kwargs.get("dir_fd") is None and not self.is_plain(path, makes=writes):
            if not writes:
                path = self._read(path)
            else:
                if flags & os.O_EXCL and self._exists(path):
                    raise FileExistsError(17, "File exists", os.fsdecode(path))
                path = self.of_files(self.files.written, path, keep=not flags & os.O_TRUNC)
        return plain(path, flags, *args, **kwargs)

    def writes(self, plain: Any, path: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a function that writes the file that its first argument names."""
        if not self.is_plain(path):
            path = self.of_files(self.files.written, path)
        return plain(path, *args, **kwargs)

    def writes_second(self, plain: Any, value: Any, path: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a function that writes the file that its second argument names."""
        if isinstance(path, (str, os.PathLike)) and not self.is_plain(path):
            path = self.of_files(self.files.written, path)
        return plain(value, path, *args, **kwargs)

    def reads(self, plain: Any, path: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a function that looks at the file that its first argument names."""
        if kwargs.get("dir_fd") is None and not self.is_plain(path):
            path = self._read(path)
        return plain(path, *args, **kwargs)

    def access(self, plain: Any, path: Any, *args: Any, **kwargs: Any) -> bool:
        """Return whether a file may be used; False, without an error, if it does not exist."""
        try:
            return bool(self.reads(plain, path, *args, **kwargs))
        except FileNotFoundError:
            return False

    def reads_file(self, plain: Any, path: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a function that reads a file by its name, or an open one."""
        if isinstance(path, (str, os.PathLike)) and not self.is_plain(path):
            path = self._read(path)
        return plain(path, *args, **kwargs)

    def changes(self, plain: Any, path: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a function that changes a file in place."""
        if kwargs.get("dir_fd") is None and not self.is_plain(path):
            self._read(path)
            path = self.of_files(self.files.written, path, keep=True)
        return plain(path, *args, **kwargs)

    def mkdir(self, plain: Any, path: Any, *args: Any, **kwargs: Any) -> Any:
        """Make a folder."""
        if kwargs.get("dir_fd") is not None or self.is_plain(path, makes=True):
            return plain(path, *args, **kwargs)
        if isinstance(self.files, NotedFiles):
            self.of_files(self.files.written, path)
            return plain(path, *args, **kwargs)
        return self.of_files(self.files.mkdir, path)

    def rename(self, plain: Any, old: Any, new: Any, **kwargs: Any) -> Any:
        """Move a file or folder."""
        if self.is_plain(new):
            return plain(old, new, **kwargs)
        if self.is_plain(old):  # a temporary file, which becomes another by a name of the script
            return plain(old, self.of_files(self.files.written, new), **kwargs)
        if isinstance(self.files, NotedFiles):
            self.of_files(self.files.changed, old)
            self.of_files(self.files.written, new)
            return plain(old, new, **kwargs)
        return self.of_files(self.files.rename, old, new)

    def temporary(self, plain: Any, prefix: Any, suffix: Any, folder: Any) -> Any:
        """Return how and where the module tempfile makes a file: a rank's own, in a folder of the script."""
        prefix, suffix, folder, kind = plain(prefix, suffix, folder)
        if not self.is_plain(folder) and os.path.abspath(os.fsdecode(folder)) != _temporary_folder():
            found = self.of_files(self._scratch.folder, folder)
            folder = found if kind is str else os.fsencode(found)
        return prefix, suffix, folder, kind

    def remove(self, plain: Any, path: Any, *args: Any, **kwargs: Any) -> Any:
        """Remove a file or an empty folder."""
        if kwargs.get("dir_fd") is not None or self.is_plain(path):
            return plain(path, *args, **kwargs)
        if isinstance(self.files, NotedFiles):
            self.of_files(self.files.changed, path)
            return plain(path, *args, **kwargs)
        return self.of_files(self._scratch.remove, path)

    def rmtree(self, plain: Any, path: Any, ignore_errors: bool = False, *args: Any, **kwargs: Any) -> Any:
        """Remove a folder with all that is in it."""
        if self.is_plain(path):
            return plain(path, ignore_errors, *args, **kwargs)
        try:
            return self.of_files(self._scratch.remove, path)
        except OSError:
            if not ignore_errors:
                raise

    def listdir(self, plain: Any, path: Any = ".") -> Any:
        """Return the names in a folder."""
        return plain(path) if self.is_plain(path) else self.of_files(self._scratch.names, path)

    def scandir(self, plain: Any, path: Any = ".") -> Any:
        """Return the entries of a folder."""
        return plain(path) if self.is_plain(path) else self.of_files(self._scratch.scan, path)

    def place(self, path: Any, writes: bool) -> Any:
        """Return where code that opens a file by its name reads or writes the file."""
        if self.is_plain(path, makes=writes):
            return path
        return self.of_files(self.files.written, path) if writes else self._read(path)

    def own_copy(self, path: Any, limit: int | None = None) -> Any:
        """Return where C code that is given a name writes a file, copied from what was there before.

        None above rank 0 for one of more than `limit` bytes.
        """
        if isinstance(self.files, NotedFiles):
            return self.of_files(self.files.written, path)
        if limit is not None and self._exists(path) and os.stat(path).st_size > limit:
            return None
        return self.of_files(self.files.written, path, keep=True)

    @property
    def _scratch(self) -> ScratchFiles:
        assert isinstance(self.files, ScratchFiles)
        return self.files

    def _read(self, path: Any) -> Any:
        return path if isinstance(self.files, NotedFiles) else self.of_files(self.files.read, path)

    def _exists(self, path: Any) -> bool:
        if isinstance(self.files, NotedFiles):
            return os.path.lexists(path)
        return bool(self.of_files(self.files.exists, path))


def file_patches(calls: FileCalls) -> Iterator[Patch]:
    """Yield the replacements of calls that write; above rank 0, also of those that read."""
    files = calls.files
    yield Patch(builtins, "open", around(calls.open))
    yield Patch(io, "open", around(calls.open))
    yield Patch(tarfile, "bltn_open", around(calls.open))
    if importlib.util.find_spec("_bz2"):  # Python may be built without
        yield Patch(importlib.import_module("bz2"), "_builtin_open", around(calls.open))
    yield Patch(os, "open", around(calls.os_open))
    yield Patch(os, "mkdir", around(calls.mkdir))
    for name in ("rename", "replace"):
        yield Patch(os, name, around(calls.rename))
    for name in ("link", "symlink"):
        yield Patch(os, name, around(calls.writes_second))
    yield Patch(torch, "save", around(calls.writes_second))
    for name in ("remove", "unlink"):
        yield Patch(os, name, around(calls.remove))
    if isinstance(files, NotedFiles):
        return
    yield Patch(tempfile, "_sanitize_params", around(calls.temporary))
    yield Patch(torch, "load", around(calls.reads_file))
    for name in ("stat", "lstat", "readlink", "statvfs"):
        yield Patch(os, name, around(calls.reads))
    yield Patch(os, "access", around(calls.access))
    for name in ("utime", "chmod", "truncate"):
        yield Patch(os, name, around(calls.changes))
    yield Patch(os, "rmdir", around(calls.remove))
    yield Patch(os, "listdir", around(calls.listdir))
    yield Patch(os, "scandir", around(calls.scandir))
    yield Patch(shutil, "rmtree", around(calls.rmtree))


def _temporary_folder() -> str:
    return os.path.abspath(tempfile.gettempdir())


def _asking(frame: FrameType | None) -> tuple[str, bool]:
    """Return the name of the module outside the standard library that asks, and whether by tempfile."""
    name, is_temporary = "", False
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if not (name in _THROUGH or name.startswith(("fxdp.run.", "fxdp.torch_compat."))):
            break
        is_temporary |= name == "tempfile"
        frame = frame.f_back
    return name, is_temporary
