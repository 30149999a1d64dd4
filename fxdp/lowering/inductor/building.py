"""Let Inductor build the C++ kernels of a program in a few translation units, see `units`."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

from fxdp.lowering.inductor.units import units
from fxdp.torch_compat import CppBuilding, compile_lock, cpp_building

_log = logging.getLogger("fxdp")


@contextlib.contextmanager
def kernels_built_together() -> Iterator[None]:
    """Inside, programs that Inductor compiles or finds in its cache build their kernels together."""
    cpp = cpp_building()
    with compile_lock, mock.patch.object(cpp.programs, "AsyncCompile", _program(cpp)):
        yield


@functools.cache
def _program(cpp: CppBuilding) -> type:
    """An `AsyncCompile` that waits until it knows all kernels of its program."""

    class Program(cpp.programs.AsyncCompile):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self._asked: list[tuple[Sequence[str], str]] = []
            self._built: dict[int, Any] = {}

        def cpp_pybinding(self, argtypes: Sequence[str], source: str) -> Any:
            if cpp.programs.get_compile_threads() <= 1:
                return super().cpp_pybinding(argtypes, source)  # such a program does not wait for its kernels
            number = len(self._asked)
            self._asked.append((argtypes, source))
            return cpp.later(lambda: self._kernel(number))

        def _kernel(self, number: int) -> Any:
            if not self._built:
                self._build()
            return self._built[number]

        def _build(self) -> None:
            running = [
                (_unit_cache(cpp).load_async(source, submit_fn=self.submit), numbers)
                for source, numbers in units(self._asked)
            ]
            alone = set(range(len(self._asked))).difference(*(numbers for _, numbers in running))
            for library, numbers in running:
                try:
                    functions = library()
                except cpp.failed as error:
                    _log.warning("%d kernels are built one by one, as g++ refused: %s", len(numbers), error)
                    alone.update(numbers)
                else:
                    self._built.update({n: getattr(functions, f"kernel_{i}") for i, n in enumerate(numbers)})
            later = {n: super(Program, self).cpp_pybinding(*self._asked[n]) for n in sorted(alone)}
            self._built.update({n: kernel.result() for n, kernel in later.items()})

    return Program


@functools.cache
def _unit_cache(cpp: CppBuilding) -> Any:
    """Inductor's cache of extension modules, for those that `units` writes."""

    class Units(cpp.extension_cache):  # type: ignore[misc, name-defined]
        entry_function = "unit"

        @classmethod
        def _load_library_inner(cls, path: str, key: str) -> Any:
            library = super()._load_library_inner(path, key)
            library.connect(cpp.data_of)
            return library

    return Units
