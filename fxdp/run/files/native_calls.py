"""Functions in C++ and Rust that open files by their names; replaced once their module is imported.

import tokenizers          the module runs, then the functions of the table are replaced
tokenizer.save("t.json")   rank 0: t.json, noted as new if it is; rank 1: t.json in its own folder
"""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import reduce
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NamedTuple

from fxdp.run.files.file_calls import FileCalls
from fxdp.torch_compat import Patch, around, patched_everywhere


class Opens(NamedTuple):
    """A function, where its argument with the file's name stands, and whether it writes the file."""

    function: str
    position: int
    argument: str
    writes: bool = False


FUNCTIONS: Mapping[str, Sequence[Opens]] = {
    "safetensors": (Opens("serialize_file", 1, "filename", True), Opens("safe_open", 0, "filename")),
    "tokenizers": (Opens("Tokenizer.save", 1, "path", True), Opens("Tokenizer.from_file", 0, "path")),
    "torch.jit": (
        Opens("RecursiveScriptModule.save", 1, "f", True),
        Opens("ScriptModule.save", 1, "f", True),
        Opens("load", 0, "f"),
    ),
    "torch.export": (Opens("save", 1, "f", True), Opens("load", 0, "f")),
    "pyarrow": (Opens("memory_map", 0, "path"),),
    "pyarrow.csv": (Opens("read_csv", 0, "input_file"), Opens("write_csv", 1, "output_file", True)),
    "pyarrow.json": (Opens("read_json", 0, "input_file"),),
    "pyarrow.parquet.core": (
        Opens("ParquetWriter.__init__", 1, "where", True),
        Opens("ParquetFile.__init__", 1, "source"),
        Opens("read_table", 0, "source"),
    ),
}


@contextlib.contextmanager
def native_calls(calls: FileCalls) -> Iterator[None]:
    """Replace the functions of the table, of modules that are imported inside when they are."""
    with contextlib.ExitStack() as stack:

        def replace(module: ModuleType) -> None:
            patches = [_patch(module, opens, calls) for opens in FUNCTIONS[module.__name__]]
            stack.enter_context(patched_everywhere(patches))

        for name in FUNCTIONS:
            if name in sys.modules:
                replace(sys.modules[name])
        finder: Any = _AfterImport(replace)
        sys.meta_path.insert(0, finder)
        stack.callback(sys.meta_path.remove, finder)
        yield


class _AfterImport:
    """A finder of modules that finds as the others do, and calls a function when a module has run."""

    def __init__(self, then: Callable[[ModuleType], None]) -> None:
        self._then = then

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
        """Return what the other finders find, if the module is one of the table's."""
        if name not in FUNCTIONS:
            return None
        found = (other.find_spec(name, path, target) for other in sys.meta_path if other is not self)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            plain = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                plain(module)
                self._then(module)

            loader.exec_module = exec_module
        return spec


def _patch(module: ModuleType, opens: Opens, calls: FileCalls) -> Patch:
    *owners, name = opens.function.split(".")
    owner = reduce(getattr, owners, module)
    is_static = isinstance(inspect.getattr_static(owner, name), staticmethod)

    def call(plain: Any, *args: Any, **kwargs: Any) -> Any:
        if opens.argument in kwargs:
            kwargs[opens.argument] = _place(kwargs[opens.argument], opens.writes, calls)
        elif len(args) > opens.position:
            at = opens.position
            args = (*args[:at], _place(args[at], opens.writes, calls), *args[at + 1 :])
        return plain(*args, **kwargs)

    make = around(call)
    return Patch(owner, name, (lambda plain: staticmethod(make(plain))) if is_static else make)


def _place(path: Any, writes: bool, calls: FileCalls) -> Any:
    """Return where this rank has a file; what is no name, as an open file, is as it is."""
    if not isinstance(path, (str, os.PathLike)):
        return path
    placed = calls.place(path, writes)
    return os.fspath(placed) if isinstance(path, str) else placed
