"""Data bases that C code opens by their names: SQLite's, and those of `dbm` and `shelve`.

    the script                 rank 0                       rank 1
    sqlite3.connect("a.db")    noted as new if it is;       a copy of what was there before;
                               all meet, then it connects   all meet, then it connects to its own

A file that is there already may be large and never be written: from `_COPIED` bytes on it is opened for
reading alone above rank 0, and a line that writes to it ends the run in SQLite's words.
"""

from __future__ import annotations

import dbm
import importlib
import importlib.util
import os
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import quote

from fxdp.run.files.file_calls import FileCalls
from fxdp.run.files.scratch_files import ScratchFiles
from fxdp.run.script_lines import script_line
from fxdp.torch_compat import Patch, around

_COPIED = 2**30
_SQLITE = ("sqlite3", "sqlite3.dbapi2") if importlib.util.find_spec("_sqlite3") else ()
"""Python may be built without."""
_ENDINGS = ("", ".db", ".dat", ".dir", ".bak", ".pag")


def database_patches(calls: FileCalls, meet: Callable[[str], None]) -> Iterator[Patch]:
    """Yield the replacements of calls that open data bases; `meet` waits for all ranks, where all come."""
    known = set[str]()

    def connect(plain: Any, database: Any, *args: Any, **kwargs: Any) -> Any:
        if database in (":memory:", "", b"") or kwargs.get("uri") or calls.is_plain(database):
            return plain(database, *args, **kwargs)
        name = os.path.abspath(os.fsdecode(database))
        path = calls.own_copy(database, _COPIED)
        if name not in known:
            known.add(name)
            meet(f"sqlite3.connect at {script_line()}")
        if path is None:
            return plain(f"file:{quote(name)}?mode=ro", *args, **kwargs, uri=True)
        return plain(path, *args, **kwargs)

    def open_dbm(plain: Any, file: Any, flag: str = "r", *args: Any, **kwargs: Any) -> Any:
        if calls.is_plain(file, makes=flag != "r"):
            return plain(file, flag, *args, **kwargs)
        name = os.path.abspath(os.fsdecode(file))
        for ending in _ENDINGS:
            calls.own_copy(name + ending)
        if name not in known:
            known.add(name)
            meet(f"dbm.open at {script_line()}")
        here = calls.files.root + name if isinstance(calls.files, ScratchFiles) else file
        return plain(here, flag, *args, **kwargs)

    for module in map(importlib.import_module, _SQLITE):
        yield Patch(module, "connect", around(connect))
    yield Patch(dbm, "open", around(open_dbm))
