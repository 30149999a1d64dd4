"""A shorter cold start: ranks share the work of compiling, and kernels are built together.

Both leave Inductor's code as it is, and can be left out: `start.py` chooses.

**Turns.** Ranks with the same program would all compile the same two halves at the same time. Instead the
even ones begin with the forward and the odd ones with the backward; when all are done with their first half,
each finds the other in Inductor's cache on disk.

    rank 0:  forward   | backward (cached)
    rank 1:  backward  | forward (cached)

Where the cache is not shared, or the ranks' programs differ, each compiles both: slower, never wrong.

**Units.** The C++ kernels of a program are built in a few translation units, see `kernel_units.py`. A half in
segments is several programs, whose kernels are often the same: those are built once.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

from fxdp.lowering.inductor.kernel_units import units
from fxdp.lowering.inductor.start import Start
from fxdp.torch_compat import CppBuilding, compile_lock, cpp_building

_log = logging.getLogger("fxdp")

_Asked: TypeAlias = "tuple[tuple[str, ...], str]"
"""A kernel: the types of its arguments, and its source."""


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
    """Inside, programs that Inductor compiles or finds in its cache build their kernels together.

    A kernel that an earlier program inside of it has built is not built again.
    """
    cpp = cpp_building()
    # A program that Inductor writes begins with `AsyncCompile()`, taken from its module when the program is
    # loaded; there is no setting for another class. So the module's name is replaced while a half is
    # compiled. Dynamo holds the same lock while it compiles: another thread's programs never see ours.
    with compile_lock:
        own = cpp.programs.AsyncCompile
        if not issubclass(own, _program(cpp)):  # else this is inside of another, whose kernels are known
            cpp.programs.AsyncCompile = type("Program", (_program(cpp),), {"known": {}})
        try:
            yield
        finally:
            cpp.programs.AsyncCompile = own


@functools.cache
def _program(cpp: CppBuilding) -> type:
    """An `AsyncCompile` that waits until it knows all kernels of its program."""

    class Program(cpp.programs.AsyncCompile):  # type: ignore[misc, name-defined]
        known: ClassVar[dict[_Asked, Any]]

        def __init__(self) -> None:
            super().__init__()
            self._asked: dict[_Asked, None] = {}

        def cpp_pybinding(self, argtypes: Sequence[str], source: str) -> Any:
            if cpp.programs.get_compile_threads() <= 1:
                return super().cpp_pybinding(argtypes, source)  # such a program does not wait for its kernels
            asked = tuple(argtypes), source
            self._asked[asked] = None
            return cpp.later(lambda: self._kernel(asked))

        def _kernel(self, asked: _Asked) -> Any:
            # the first kernel that the program waits for comes after the last one that it asked for
            if asked not in self.known:
                self._build([kernel for kernel in self._asked if kernel not in self.known])
            return self.known[asked]

        def _build(self, asked: Sequence[_Asked]) -> None:
            running = [
                (_unit_cache(cpp).load_async(source, submit_fn=self.submit), numbers)
                for source, numbers in units(asked)
            ]
            alone = set(range(len(asked))).difference(*(numbers for _, numbers in running))
            for library, numbers in running:
                try:
                    functions = library()
                except cpp.failed as error:
                    _log.warning("%d kernels are built one by one, as g++ refused: %s", len(numbers), error)
                    alone.update(numbers)
                else:
                    known = {asked[n]: getattr(functions, f"kernel_{i}") for i, n in enumerate(numbers)}
                    self.known.update(known)
            # asked for all at once before any is waited for: Inductor builds them side by side
            later = {asked[n]: super(Program, self).cpp_pybinding(*asked[n]) for n in sorted(alone)}
            self.known.update({kernel: function.result() for kernel, function in later.items()})

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
