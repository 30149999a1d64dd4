"""Files that a script leaves open: Python writes what they still hold when it ends, `os._exit` would not."""

from __future__ import annotations

import bz2
import contextlib
import gc
import gzip
import io
import lzma
import shelve
import zipfile
from typing import Any

_TEXT = (io.TextIOWrapper,)
_ARCHIVES = (shelve.Shelf, zipfile.ZipFile, gzip.GzipFile, bz2.BZ2File, lzma.LZMAFile)
"""Files within files, whose end is written only when they are closed."""
_BYTES = (io.BufferedWriter, io.BufferedRandom)


def write_open_files() -> None:
    """Write what files still hold, as Python does at its end; an error there changes no exit code."""
    known: tuple[Any, ...] = (*_TEXT, *_ARCHIVES, *_BYTES)
    # by their types alone: isinstance would ask proxies of libraries for their class
    kinds = set(known)
    reached = [one for one in gc.get_objects() if not kinds.isdisjoint(type(one).__mro__)]
    for kind in known:  # from the outer to the inner
        for file in (one for one in reached if kind in type(one).__mro__):
            with contextlib.suppress(Exception):  # closed already
                file.close() if kind in _ARCHIVES else file.flush()
