"""A shorter cold start: ranks share the work of compiling, and kernels are built together.

Both leave Inductor's code unchanged, and both are optional (`FXDP_SHORTCUTS`).

**Work sharing.** Ranks with the same program would all compile the same forward and backward at the same
time. Instead, even ranks begin with the forward and odd ranks with the backward. When all ranks are done with
the first graph, each finds the second in Inductor's cache on disk.

    rank 0:  forward   | backward (cached)
    rank 1:  backward  | forward (cached)

If the cache is not shared, or the programs of the ranks differ, each rank compiles both: slower, but correct.

**Translation units.** The C++ kernels of a program are built in a few translation units, see
`translation_units.py`. A graph in regions consists of several programs that often have equal kernels: these
kernels are built once, and all kernels together.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, TypeAlias

from fxdp.lowering.inductor.start import Start
from fxdp.startup.artifacts.cached_libraries import cached_library
from fxdp.startup.building.translation_units import units
from fxdp.startup.building.vector_instructions import built_as_code
from fxdp.torch_compat import CppBuilding, Patch, compile_lock, cpp_building, is_on, patched

_log = logging.getLogger("fxdp")

_Asked: TypeAlias = "tuple[tuple[str, ...], str]"
"""A kernel: the argument types and the source."""


@dataclass
class ColdStart(Start):
    """A start that shares compilation between ranks, and builds the kernels of a graph in few units."""

    backward_first: bool = False

    def building(self) -> AbstractContextManager[None]:
        """Build the kernels of a graph together at the end of the block."""
        return kernels_built_together()

    def run(self, forward: Callable[[], None], backward: Callable[[], None], *, independent: bool) -> None:
        """Compile this rank's first graph, wait for all ranks, and load the second graph from the cache."""
        first, second = (backward, forward) if independent and self.backward_first else (forward, backward)
        first()
        self.finish()
        second()


@contextlib.contextmanager
def kernels_built_together() -> Iterator[None]:
    """Build the kernels of all programs that Inductor compiles or loads inside, at the end of the block.

    None of these programs can run before the end. A nested block leaves the build to the outer block.

    Raises
    ------
    CppCompileError : g++ refuses a kernel; raised at the end.
    """
    cpp = cpp_building()
    # the lock of `patched`, which Dynamo holds while compiling: also held while building kernels
    with compile_lock:
        if hasattr(cpp.programs.AsyncCompile, "kernels"):
            yield
            return
        kernels = _Kernels(cpp, cpp.programs.AsyncCompile)
        program = type("Program", (_program(cpp),), {"kernels": kernels})
        # A program written by Inductor begins with `AsyncCompile()`, looked up in a module when the program
        # is loaded; no setting selects a different class.
        with patched((Patch(cpp.programs, "AsyncCompile", lambda _: program),)):
            yield
        with built_as_code():  # as when compiling and loading the programs
            kernels.build()


class _Awaited(NamedTuple):
    """Placeholder in a program for a kernel that is not built yet."""

    kernel: _Asked


@functools.cache
def _program(cpp: CppBuilding) -> type:
    """Return a subclass of `AsyncCompile` that does not wait: kernels are inserted into the program later."""

    class Program(cpp.programs.AsyncCompile):  # type: ignore[misc, name-defined]
        kernels: ClassVar[_Kernels]

        def cpp_pybinding(self, argtypes: Sequence[str], source: str) -> Any:
            if cpp.programs.get_compile_threads() <= 1:
                return super().cpp_pybinding(argtypes, source)  # such a program does not wait for kernels
            return _Awaited((tuple(argtypes), source))

        def wait(self, scope: dict[str, Any]) -> None:
            self.kernels.awaited.append((scope, {k: v for k, v in scope.items() if isinstance(v, _Awaited)}))
            super().wait(scope)

    return Program


@dataclass
class _Kernels:
    """The kernels of several programs; each distinct kernel is built once."""

    cpp: CppBuilding
    inductor: Any
    """Inductor's original `AsyncCompile`."""
    awaited: list[tuple[dict[str, Any], dict[str, _Awaited]]] = field(default_factory=list)
    """The namespaces of programs, each with the names that wait for a kernel."""

    def build(self) -> None:
        """Build the kernels that programs wait for, and insert them into the programs' namespaces."""
        asked = list(dict.fromkeys(one.kernel for _, names in self.awaited for one in names.values()))
        known = self._built(asked) if asked else {}
        for scope, names in self.awaited:
            scope.update({name: known[one.kernel] for name, one in names.items()})

    def _built(self, asked: Sequence[_Asked]) -> dict[_Asked, Any]:
        inductor, known = self.inductor(), {}
        running = [
            (cached_library(_unit_cache(self.cpp), source, inductor.submit), numbers)
            for source, numbers in (units(asked) if is_on("translation_units") else ())
        ]
        alone = set(range(len(asked))).difference(*(numbers for _, numbers in running))
        for library, numbers in running:
            try:
                functions = library()
            except self.cpp.failed as error:
                _log.warning("%d kernels are built one by one, as g++ refused: %s", len(numbers), error)
                alone.update(numbers)
            else:
                known.update({asked[n]: getattr(functions, f"kernel_{i}") for i, n in enumerate(numbers)})
        # submit all before waiting for the first: Inductor builds in parallel
        later = {asked[n]: inductor.cpp_pybinding(*asked[n]) for n in sorted(alone)}
        return known | {kernel: function.result() for kernel, function in later.items()}


@functools.cache
def _unit_cache(cpp: CppBuilding) -> Any:
    """Return Inductor's cache of extension modules, adapted to modules that `translation_units` writes."""

    class TranslationUnits(cpp.extension_cache):  # type: ignore[misc, name-defined]
        entry_function = "unit"

        @classmethod
        def _load_library_inner(cls, path: str, key: str) -> Any:
            library = super()._load_library_inner(path, key)
            # with the address of the function that returns a tensor's data, a unit needs none of torch's
            # Python headers
            library.connect(cpp.data_of)
            return library

    return TranslationUnits
