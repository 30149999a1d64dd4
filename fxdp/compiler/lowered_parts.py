"""The parts of a program as code, the same for all ranks that share them.

    wanted parts   each is emitted and lowered, unless this rank has it for these sizes
    exchange       which parts Inductor cannot compile, or only for fixed sizes, on any rank
                     fixed sizes    all ranks lower these parts anew, for the sizes of this call
                     no code        all ranks run the ops of these parts as they are, and say so
    exchange       the order of the collectives in each part: one for all ranks that share the part

A rank may have less to lower than another (micro-batches of fewer sizes), but never fewer exchanges: how many
there are follows from what was exchanged before.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import nn

from fxdp.compiler.emit import FULL, Lowered, WantedPart, lower_part, sizes_used
from fxdp.compiler.program import Program
from fxdp.errors import AgreementError, FxdpError
from fxdp.ir import redistributions
from fxdp.lowering.inductor.collective_order import order_lines
from fxdp.lowering.inductor.start import Start, start_of
from fxdp.lowering.shapes import SizesFixedError
from fxdp.ranks.agreement import agree, gather_objects
from fxdp.ranks.process_mesh import ProcessMesh
from fxdp.torch_compat import why_not_compiled

_log = logging.getLogger("fxdp")

_MOST = 1024
"""How many lowered parts are kept: where ops fix sizes, each size of a long run has one of its own."""

_ANY, _UNCOMPILED = "any size", "not compiled"

_Key: TypeAlias = "tuple[Any, ...]"
_Report: TypeAlias = "tuple[dict[str, tuple[Any, ...]], dict[str, str]]"
"""By name of the part: sizes that are fixed, and what Inductor said."""


@dataclass(frozen=True)
class _Failed:
    """A part that has no code: Inductor's words, or the sizes that must be fixed."""

    words: str = ""
    fixed: tuple[Any, ...] = ()


class LoweredParts:
    """The parts of one program that this rank has lowered so far, by sizes."""

    def __init__(self, program: Program, process_mesh: ProcessMesh, module: nn.Module) -> None:
        self._program = program
        self._process_mesh = process_mesh
        self._module = module
        self._known: dict[_Key, Lowered | _Failed] = {}
        self._fixed: set[str] = set()
        """Names of parts whose ops fix sizes; the same on all ranks."""

    def lower(self, wanted: Sequence[WantedPart], *, generic: bool) -> list[Lowered]:
        """The code of these parts; all ranks call this together, with parts of their own.

        The first sizes of a kind of call have code of their own. Whatever part of another call has not been
        lowered for its sizes is lowered for any (`generic`).

        Raises
        ------
        AgreementError : ranks that share a part would start its collectives in different orders.
        """
        found = self._attempts(wanted, generic)
        reports = gather_objects(self._process_mesh, _report(wanted, found))
        # a part lowered for fixed sizes may show others: until all ranks have nothing new to say
        while self._add_fixed(reports):
            found = self._attempts(wanted, generic)
            reports = gather_objects(self._process_mesh, _report(wanted, found))
        failed = _failures(reports)
        for name, words in failed.items():
            _log.warning(
                "Inductor cannot compile %s (%s): its ops run as they are on all ranks, as with "
                'compute="eager", with the same results',
                name,
                words,
            )
        # also where this rank could compile it: Inductor may order collectives in another way
        lowered = []
        for w, code in zip(wanted, found, strict=True):
            if w.name in failed:
                code = self._attempt(w, generic, Start(), as_it_is=True)
            assert isinstance(code, Lowered)
            lowered.append(code)
        lines = [
            line if w.name == FULL else f"{w.label} {line}"
            for w, code in zip(wanted, lowered, strict=True)
            for line in order_lines(code.pair)
        ]
        try:
            agree(self._process_mesh, lines, "compiled programs", among=self._process_mesh.mesh.pipeline.rank)
        except AgreementError:
            if generic:
                raise
            # uneven parts: what is saved, or computed again with its sums, goes by the sizes of a rank's own
            _log.info("code for the ranks' own sizes would sum in different orders: it is made for any size")
            for w in wanted:
                self._known.pop(self._key(w, generic=False)[0], None)
            return self.lower(wanted, generic=True)
        return lowered

    def any_size(self) -> bool:
        """Whether there is code for any size."""
        return any(key[-1] == _ANY and isinstance(c, Lowered) for key, c in self._known.items())

    def _attempts(self, wanted: Sequence[WantedPart], generic: bool) -> list[Lowered | _Failed]:
        start = self._start()
        found = [self._attempt(w, generic, start) for w in wanted]
        start.finish()  # a rank that had nothing to compile meets the others all the same
        return found

    def _start(self) -> Start:
        """Ranks share the work of compiling a program that is not cut; stages are compiled each alone."""
        program, process_mesh = self._program, self._process_mesh
        if program.options.compute == "eager":
            return Start()
        if process_mesh.comms is None or program.step is not None:
            return start_of()
        return start_of(program.mesh.rank, lambda: _meet(process_mesh))

    def _attempt(
        self, wanted: WantedPart, generic: bool, start: Start, *, as_it_is: bool = False
    ) -> Lowered | _Failed:
        """What this rank has for these sizes, or makes now; `as_it_is` where Inductor has failed."""
        key, for_any = self._key(wanted, generic)
        key = (_UNCOMPILED, *key) if as_it_is else key
        found = self._known.get(key)
        if found is None:
            if len(self._known) >= _MOST:
                del self._known[next(iter(self._known))]
            found = self._known[key] = self._lower(wanted, for_any, start, as_it_is)
        return found

    def _key(self, wanted: WantedPart, generic: bool) -> tuple[_Key, bool]:
        """What code a part is served by, and whether that is for any size."""
        graph = wanted.part.gm.graph
        # a term that all parts have entire is kept by the first alone, whose code is another then
        own = wanted.place == 0 or not graph.find_nodes(op="call_function", target=redistributions.partial)
        exact = (wanted.name, own, *sizes_used(wanted))
        for_any = generic and exact not in self._known and wanted.name not in self._fixed
        return ((wanted.name, own, _ANY), True) if for_any else (exact, False)

    def _lower(self, wanted: WantedPart, generic: bool, start: Start, as_it_is: bool) -> Lowered | _Failed:
        compiled = not (as_it_is or wanted.once or self._program.options.compute == "eager")
        try:
            return lower_part(
                wanted, self._program, self._module, generic=generic, compiled=compiled, start=start
            )
        except SizesFixedError as error:
            return _Failed(fixed=error.args)
        except FxdpError:
            raise
        except Exception as error:  # whatever Inductor may raise, the program runs without it
            if not compiled:
                raise
            return _Failed(why_not_compiled(error))

    def _add_fixed(self, reports: Sequence[_Report]) -> bool:
        """Note which parts fix sizes on any rank; whether there are new ones."""
        found = {name: sizes for fixed, _ in reversed(reports) for name, sizes in fixed.items()}
        for name, sizes in found.items():
            who = "the model's code" if name == FULL else name
            _log.warning(
                "%s fixes the sizes %s: it is compiled anew for each size", who, SizesFixedError(*sizes)
            )
        self._fixed |= found.keys()
        return bool(found)


def _report(wanted: Sequence[WantedPart], found: Sequence[Lowered | _Failed]) -> _Report:
    failed = [(w.name, code) for w, code in zip(wanted, found, strict=True) if isinstance(code, _Failed)]
    fixed = {n: tuple(map(str, c.fixed)) for n, c in failed if c.fixed}  # as text: other ranks read them
    return fixed, {n: c.words for n, c in failed if c.words}


def _failures(reports: Sequence[_Report]) -> dict[str, str]:
    """Of each part that some rank could not compile, the first such rank and its words."""
    found: dict[str, str] = {}
    for rank, (_, words) in enumerate(reports):
        for name, text in words.items():
            found.setdefault(name, f"rank {rank}: {text}")
    return found


def _meet(process_mesh: ProcessMesh) -> None:
    gather_objects(process_mesh, None)
