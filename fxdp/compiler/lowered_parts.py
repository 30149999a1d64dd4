"""Lower the parts of a program to code that agrees on all ranks that share a part.

    wanted parts   each is emitted and lowered, unless this rank has code for its sizes
    exchange       parts that Inductor cannot compile, or only for fixed sizes, on any rank
                     fixed sizes    all ranks lower these parts anew, for the sizes of this call
                     no code        all ranks run these parts as eager ops, and log this
    exchange       the order of the collectives in each part: equal on all ranks that share the part

One rank may have fewer parts to lower than another (fewer different sizes of micro-batches), but all ranks
make equally many exchanges: their number follows from the results of earlier exchanges.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import nn

from fxdp.compiler.emit import FULL, Lowered, WantedPart, lower_part
from fxdp.compiler.program import Program
from fxdp.errors import AgreementError, FxdpError, StageError
from fxdp.ir import redistributions
from fxdp.ir.graph.metadata import meta
from fxdp.ir.graph.signature import Size
from fxdp.ir.types.sizes import axes_of
from fxdp.ir.types.value_types import TensorType, local_shape
from fxdp.lowering.inductor.collective_order import order_lines
from fxdp.lowering.inductor.start import Start, start_of
from fxdp.lowering.shapes import SizesFixedError
from fxdp.ranks.agreement import agree, gather_objects
from fxdp.ranks.liveness.failure import everywhere
from fxdp.ranks.process_mesh import ProcessMesh
from fxdp.torch_compat import why_not_compiled

_log = logging.getLogger("fxdp")

_MOST = 1024
"""Most lowered parts kept: if ops fix sizes, a long run needs one for each size."""

_ANY, _UNCOMPILED = "any size", "not compiled"

_Key: TypeAlias = "tuple[Any, ...]"
_Report: TypeAlias = "tuple[dict[str, tuple[Any, ...]], dict[str, str]]"
"""By name of the part: the sizes that are fixed, and the error of Inductor."""


@dataclass(frozen=True)
class _Failed:
    """A part that could not be lowered: Inductor's error, or the sizes that must be fixed."""

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
        """Names of parts whose ops fix sizes; equal on all ranks."""

    def lower(self, wanted: Sequence[WantedPart], *, generic: bool) -> list[Lowered]:
        """Return the code of the given parts; all ranks call this together, each for the parts of this rank.

        The first call of a kind gets code for exactly the given sizes. In later calls a part without code
        for the given sizes is lowered for any size (`generic`).

        Raises
        ------
        AgreementError : ranks that share a part would start collectives in different orders.
        """
        found = self._attempts(wanted, generic)
        reports = gather_objects(self._process_mesh, _report(wanted, found))
        # a part lowered for fixed sizes may fix further ones: repeat until no rank reports a new size
        while self._add_fixed(reports):
            found = self._attempts(wanted, generic)
            reports = gather_objects(self._process_mesh, _report(wanted, found))
        failed, block = _failures(reports), self._program.options.block
        if failed and block is not None:
            raise everywhere(_not_compiled(failed, block))
        for name, words in failed.items():
            _log.warning(
                "Inductor cannot compile %s (%s): its ops run as they are on all ranks, as with "
                'backend="eager", with the same results',
                name,
                words,
            )
        # also on ranks that could compile the part: Inductor may order collectives differently
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
            if generic or block is not None:
                raise
            # uneven parts: the values that are saved or recomputed depend on each rank's own sizes
            _log.info("code for the ranks' own sizes would sum in different orders: it is made for any size")
            for w in wanted:
                self._known.pop(self._key(w, generic=False)[0], None)
            return self.lower(wanted, generic=True)
        return lowered

    def any_size(self) -> bool:
        """Return whether there is code for any size."""
        return any(key[-1] == _ANY and isinstance(c, Lowered) for key, c in self._known.items())

    def _attempts(self, wanted: Sequence[WantedPart], generic: bool) -> list[Lowered | _Failed]:
        start, known = self._start(), dict(self._known)
        try:
            with self._built_together(start):
                found = [self._attempt(w, generic, start) for w in wanted]
        except FxdpError:
            raise
        except Exception as error:  # g++ refuses a kernel: alone, each part tells its own
            _log.warning("kernels of all parts could not be built together, now part by part: %s", error)
            self._known = known
            found = [self._attempt(w, generic, start) for w in wanted]
        start.finish()  # also on a rank that had nothing to compile: all ranks wait for one another here
        return found

    def _built_together(self, start: Start) -> AbstractContextManager[None]:
        """Return a context in which parts are compiled, whose kernels it builds at its end, equal ones once.

        The one graph of a program that is not cut is built by its own `start`, shared between ranks.
        """
        return nullcontext() if self._program.step is None else start.building()

    def _start(self) -> Start:
        """Return the compile plan: ranks share the work of an uncut program; each stage is compiled alone."""
        program, process_mesh = self._program, self._process_mesh
        if program.options.backend == "eager":
            return Start()
        if process_mesh.comms is None or program.step is not None:
            return start_of()
        return start_of(program.mesh.rank, lambda: _meet(process_mesh))

    def _attempt(
        self, wanted: WantedPart, generic: bool, start: Start, *, as_it_is: bool = False
    ) -> Lowered | _Failed:
        """Return this rank's code for the wanted sizes, and lower the part if there is none.

        `as_it_is` asks for eager ops, after Inductor has failed on some rank.
        """
        key, for_any = self._key(wanted, generic)
        key = (_UNCOMPILED, *key) if as_it_is else key
        found = self._known.get(key)
        if found is None:
            if len(self._known) >= _MOST:
                del self._known[next(iter(self._known))]
            found = self._known[key] = self._lower(wanted, for_any, start, as_it_is)
        return found

    def _key(self, wanted: WantedPart, generic: bool) -> tuple[_Key, bool]:
        """Return the key of a part's code, and whether this code is for any size."""
        exact = exact_key(wanted)
        generic = generic or self._differs_by_place(wanted)
        for_any = generic and exact not in self._known and wanted.name not in self._fixed
        return ((*exact[:2], _ANY), True) if for_any else (exact, False)

    def _differs_by_place(self, wanted: WantedPart) -> bool:
        """Return whether each block of a part would have code of its own because it reads its place.

        As eager ops, code for any size is the same ops.
        """
        options = self._program.options
        if options.block is None or options.backend != "eager" or wanted.once:
            return False
        places = {one.offset.name for one in axes_of(wanted.sizes)}
        return any(name in places for name, _ in _sizes_used(wanted)[0])

    def _lower(self, wanted: WantedPart, generic: bool, start: Start, as_it_is: bool) -> Lowered | _Failed:
        compiled = not (as_it_is or wanted.once or self._program.options.backend == "eager")
        try:
            return lower_part(
                wanted, self._program, self._module, generic=generic, compiled=compiled, start=start
            )
        except SizesFixedError as error:
            return _Failed(fixed=error.args)
        except FxdpError:
            raise
        except Exception as error:  # whatever Inductor raises, the program can run without Inductor
            if not compiled:
                raise
            return _Failed(why_not_compiled(error))

    def _add_fixed(self, reports: Sequence[_Report]) -> bool:
        """Record the parts that fix sizes on any rank; return whether there are new ones."""
        found = {name: sizes for fixed, _ in reversed(reports) for name, sizes in fixed.items()}
        for name, sizes in found.items():
            who = "the model's code" if name == FULL else name
            _log.warning(
                "%s fixes the sizes %s: it is compiled anew for each size", who, SizesFixedError(*sizes)
            )
        self._fixed |= found.keys()
        return bool(found)


def exact_key(wanted: WantedPart) -> _Key:
    """Return the key of a part's code for exactly the given sizes: parts with equal keys can share code."""
    graph = wanted.part.gm.graph
    # a term that all parts have in full is added by the first part alone, so its code differs
    own = wanted.place == 0 or not graph.find_nodes(op="call_function", target=redistributions.partial)
    return wanted.name, own, *_sizes_used(wanted)


def _report(wanted: Sequence[WantedPart], found: Sequence[Lowered | _Failed]) -> _Report:
    failed = [(w.name, code) for w, code in zip(wanted, found, strict=True) if isinstance(code, _Failed)]
    fixed = {n: tuple(map(str, c.fixed)) for n, c in failed if c.fixed}  # as text, to be sent to all ranks
    return fixed, {n: c.words for n, c in failed if c.words}


def _failures(reports: Sequence[_Report]) -> dict[str, str]:
    """Return, for each part that a rank could not compile, the first rank that failed and the error."""
    found: dict[str, str] = {}
    for rank, (_, words) in enumerate(reports):
        for name, text in words.items():
            found.setdefault(name, f"rank {rank}: {text}")
    return found


def _not_compiled(failed: Mapping[str, str], block: int) -> StageError:
    listing = "\n  ".join(f"{name}: {words}" for name, words in failed.items())
    return StageError(
        f"fxdp.Bitwise(block={block}): Inductor cannot compile these parts, whose ops alone would have other "
        f'bits than where it can:\n  {listing}\nUse backend="eager" on every mesh'
    )


def _meet(process_mesh: ProcessMesh) -> None:
    gather_objects(process_mesh, None)


def _sizes_used(wanted: WantedPart) -> tuple[Any, ...]:
    """Return the sizes on which the code of a part depends; a change of one requires new code.

    A part with collectives depends on the batch sizes of all ranks. All ranks must run the same code,
    regardless of the local sizes that each rank has met before.
    """
    names = set()
    graph = wanted.part.gm.graph
    for node in graph.find_nodes(op="placeholder"):
        spec, type_, placement = meta(node).spec, meta(node).type, meta(node).placement
        if isinstance(spec, Size) and node.users:
            names.add(spec.name)
        if isinstance(type_, TensorType) and not isinstance(placement, tuple):
            shape = local_shape(type_, placement)
            names |= {s.name for n in shape if not isinstance(n, int) for s in n.free_symbols}
    everyone = any(n.target in redistributions.REDISTRIBUTIONS for n in graph.nodes)
    if everyone:
        names |= {name for one in axes_of(wanted.sizes) for name in one.inputs}
    own = tuple(sorted((key, value) for key, value in wanted.sizes.items() if key in names))
    return (own, wanted.batches if everyone else ())
