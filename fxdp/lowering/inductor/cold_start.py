"""A shorter cold start: ranks share the work of compiling, and kernels are built together.

Both leave Inductor's code as it is, and can be left out: `start.py` chooses.

**Turns.** Ranks with the same program would all compile the same two halves at the same time. Instead the
even ones begin with the forward and the odd ones with the backward; when all are done with their first half,
each finds the other in Inductor's cache on disk.

    rank 0:  forward   | backward (cached)
    rank 1:  backward  | forward (cached)

Where the cache is not shared, or the ranks' programs differ, each compiles both: slower, never wrong.

**Units.** The C++ kernels of a program are built in a few translation units, see `translation_units.py`. A
half in
segments is several programs, whose kernels are often the same: those are built once, and all together.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, TypeAlias

from fxdp.lowering.inductor.cached_libraries import cached_library
from fxdp.lowering.inductor.start import Start
from fxdp.lowering.inductor.translation_units import units
from fxdp.torch_compat import CppBuilding, Patch, built_as_code, compile_lock, cpp_building, is_on, patched

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
    """Inside, programs that Inductor compiles or finds in its cache get their kernels at its end.

    None of these programs can run before. Inside of another such block, its end counts.

    Raises
    ------
    CppCompileError : g++ refuses a kernel; raised at the end.
    """
    cpp = cpp_building()
    # the lock of `patched`, which Dynamo holds while it compiles: kernels are built under it, too
    with compile_lock:
        if hasattr(cpp.programs.AsyncCompile, "kernels"):
            yield
            return
        kernels = _Kernels(cpp, cpp.programs.AsyncCompile)
        program = type("Program", (_program(cpp),), {"kernels": kernels})
        # A program that Inductor writes begins with `AsyncCompile()`, taken from its module when the program
        # is loaded; there is no setting for another class.
        with patched((Patch(cpp.programs, "AsyncCompile", lambda _: program),)):
            yield
        with built_as_code():  # programs are compiled and loaded under these settings, but that is over here
            kernels.build()


class _Awaited(NamedTuple):
    """What a program has in place of a kernel that is not built yet."""

    kernel: _Asked


@functools.cache
def _program(cpp: CppBuilding) -> type:
    """An `AsyncCompile` that waits for nothing: its program is given its kernels later."""

    class Program(cpp.programs.AsyncCompile):  # type: ignore[misc, name-defined]
        kernels: ClassVar[_Kernels]

        def cpp_pybinding(self, argtypes: Sequence[str], source: str) -> Any:
            if cpp.programs.get_compile_threads() <= 1:
                return super().cpp_pybinding(argtypes, source)  # such a program does not wait for its kernels
            return _Awaited((tuple(argtypes), source))

        def wait(self, scope: dict[str, Any]) -> None:
            self.kernels.awaited.append((scope, {k: v for k, v in scope.items() if isinstance(v, _Awaited)}))
            super().wait(scope)

    return Program


@dataclass
class _Kernels:
    """The kernels of several programs, each of them built once."""

    cpp: CppBuilding
    inductor: Any
    """Inductor's own `AsyncCompile`."""
    awaited: list[tuple[dict[str, Any], dict[str, _Awaited]]] = field(default_factory=list)
    """The names that programs have, and which of them are to be kernels."""

    def build(self) -> None:
        """Build what is awaited, and hand it out."""
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
        # asked for all at once before any is waited for: Inductor builds them side by side
        later = {asked[n]: inductor.cpp_pybinding(*asked[n]) for n in sorted(alone)}
        return known | {kernel: function.result() for kernel, function in later.items()}


@functools.cache
def _unit_cache(cpp: CppBuilding) -> Any:
    """Inductor's cache of extension modules, for those that `translation_units` writes."""

    class TranslationUnits(cpp.extension_cache):  # type: ignore[misc, name-defined]
        entry_function = "unit"

        @classmethod
        def _load_library_inner(cls, path: str, key: str) -> Any:
            library = super()._load_library_inner(path, key)
            # told where to find a tensor's data, a unit needs none of torch's Python headers
            library.connect(cpp.data_of)
            return library

    return TranslationUnits
