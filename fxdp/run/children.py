"""Processes that a script starts by multiprocessing: their files are their rank's, as a fork's are already.

fork         has all replacements; its loaders give one device's batches
spawn        Python reads the files' description with the child's own preparation data
"""

from __future__ import annotations

import contextlib
import multiprocessing.spawn
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fxdp.run.files.databases import database_patches
from fxdp.run.files.file_calls import FileCalls, Files, file_patches
from fxdp.run.files.scratch_files import NotedFiles, ScratchFiles
from fxdp.torch_compat import Patch, around, patched_everywhere

_INSTALLED = contextlib.ExitStack()
"""The replacements of a spawned child, until it ends."""


def child_patches(files: Files, own: str) -> Iterator[Patch]:
    """Yield the replacement by which children that are spawned have their rank's files.

    `own` is the folder of the run's own files.
    """

    def prepared(plain: Callable[..., dict[str, Any]], *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {"fxdp": _Child(files, own), **plain(*args, **kwargs)}

    yield Patch(multiprocessing.spawn, "get_preparation_data", around(prepared))


class _Child:
    """What a spawned child does before anything else: reading its pickle installs the replacements."""

    def __init__(self, files: Files, own: str) -> None:
        self._files, self._own = files, own

    def __reduce__(self) -> tuple[Any, ...]:
        root = self._files.root if isinstance(self._files, ScratchFiles) else None
        return _be_child, (root, str(self._files.journal), self._own)


def _be_child(root: str | None, journal: str, own: str) -> None:
    files = NotedFiles(Path(journal)) if root is None else ScratchFiles(Path(root), Path(journal))
    calls = FileCalls(files, own)
    made = [*file_patches(calls), *database_patches(calls, lambda _: None), *child_patches(files, own)]
    _INSTALLED.enter_context(patched_everywhere(made))
