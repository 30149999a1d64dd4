"""Files that a script leaves open: Python writes what they still hold when it ends, `os._exit` would not."""

from __future__ import annotations

import contextlib
import gc
import io
import sys
from typing import Any

_TEXT = (io.TextIOWrapper,)
_ARCHIVES = ("shelve:Shelf", "zipfile:ZipFile", "gzip:GzipFile", "bz2:BZ2File", "lzma:LZMAFile")
"""Files within files, whose end is written only when they are closed."""
_BYTES = (io.BufferedWriter, io.BufferedRandom)


def write_open_files() -> None:
    """Write what files still hold, as Python does at its end; an error there changes no exit code."""
    # of modules that the script has imported; Python may be built without some
    named = (name.split(":") for name in _ARCHIVES)
    archives = tuple(getattr(sys.modules[module], kind) for module, kind in named if module in sys.modules)
    known: tuple[Any, ...] = (*_TEXT, *archives, *_BYTES)
    # by their types alone: isinstance would ask proxies of libraries for their class
    kinds = set(known)
    reached = [one for one in gc.get_objects() if not kinds.isdisjoint(type(one).__mro__)]
    for kind in known:  # from the outer to the inner
        for file in (one for one in reached if kind in type(one).__mro__):
            with contextlib.suppress(Exception):  # closed already
                file.close() if kind in archives else file.flush()
