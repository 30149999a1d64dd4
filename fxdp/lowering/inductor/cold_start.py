"""A shorter cold start: ranks share the work of compiling, and kernels are built together.

Both leave Inductor's code as it is, and can be left out: `start.py` chooses.

**Turns.** Ranks with the same program would all compile the same two halves at the same time. Instead the
even ones begin with the forward and the odd ones with the backward; when all are done with their first half,
each finds the other in Inductor's cache on disk.

    rank 0:  forward   | backward (cached)
    rank 1:  backward  | forward (cached)

Where the cache is not shared, or the ranks' programs differ, each compiles both: slower, never wrong.

**Units.** The C++ kernels of a program are built in a few translation units, see `kernel_units.py`.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from fxdp.lowering.inductor.kernel_units import units
from fxdp.lowering.inductor.start import Start
from fxdp.torch_compat import CppBuilding, compile_lock, cpp_building

_log = logging.getLogger("fxdp")


@dataclass
class ColdStart(Start):
    """Halves by turns, each half's kernels in a few units."""

    backward_first: bool = False

    def building(self) -> AbstractContextManager[None]:
        """The half's kernels are built together."""
        return kernels_built_together()

    def run(self, forward: Callable[[], None], backward: Callable[[], None], *, independent: bool) -> None:
        """Compile this rank's first half, wait, find the other in the cache."""
        first, second = (backward, forward) if independent and self.backward_first else (forward, backward)
        first()
        self.finish()
        second()


@contextlib.contextmanager
def kernels_built_together() -> Iterator[None]:
    """Inside, programs that Inductor compiles or finds in its cache build their kernels together."""
    cpp = cpp_building()
    # A program that Inductor writes begins with `AsyncCompile()`, taken from its module when the program is
    # loaded; there is no setting for another class. So the module's name is replaced while a half is
    # compiled. Dynamo holds the same lock while it compiles: another thread's programs never see ours.
    with compile_lock:
        own = cpp.programs.AsyncCompile
        cpp.programs.AsyncCompile = _program(cpp)
        try:
            yield
        finally:
            cpp.programs.AsyncCompile = own


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
            # the first kernel that the program waits for comes after the last one that it asked for
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
            # asked for all at once before any is waited for: Inductor builds them side by side
            later = {n: super(Program, self).cpp_pybinding(*self._asked[n]) for n in sorted(alone)}
            self._built.update({n: kernel.result() for n, kernel in later.items()})

    return Program


@functools.cache
def _unit_cache(cpp: CppBuilding) -> Any:
    """Inductor's cache of extension modules, for those that `kernel_units` writes."""

    class Units(cpp.extension_cache):  # type: ignore[misc, name-defined]
        entry_function = "unit"

        @classmethod
        def _load_library_inner(cls, path: str, key: str) -> Any:
            library = super()._load_library_inner(path, key)
            # told where to find a tensor's data, a unit needs none of torch's Python headers
            library.connect(cpp.data_of)
            return library

    return Units
