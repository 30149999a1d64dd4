"""Which program serves a call: captured and compiled on demand, specialised first, generic second.

A kind of call (structure, dtypes, modes) is compiled for its sizes at first. At the second distinct sizes it
is compiled once more for any batch, or, if other dims changed too, captured again with all dims open. In
stages or micro-batches that is said of each part, and a step of calls to them is written for each sizes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn

from fxdp.capture.captured import Captured, Condition
from fxdp.capture.driver import capture_request
from fxdp.capture.fingerprint import GraphFingerprint, capture_open
from fxdp.capture.python_values import SpecializationError
from fxdp.capture.refusals.input_layouts import check_layouts
from fxdp.compiler.emit import device_of
from fxdp.compiler.executable import CompiledVariants
from fxdp.compiler.owners import Owners
from fxdp.compiler.prepare import check_options, is_cut
from fxdp.compiler.program import Program
from fxdp.compiler.records import log_program
from fxdp.ir.draws import graph_draws
from fxdp.ir.graphs import no_collection
from fxdp.ir.metadata import Location
from fxdp.ir.sizes import B, named_size
from fxdp.module.assertion_attribution import failing_ranks
from fxdp.module.branch_specialization import OtherBranch, on_its_branch
from fxdp.module.cache import LRU, Kinds
from fxdp.module.cache_entry import CacheEntry, GuardKey
from fxdp.module.call import Call, ProgramKey, request_of
from fxdp.module.call_sizes import decided_error, fixed_dims, row_numbers, size_values
from fxdp.module.guards.plain_modes import plain_modes
from fxdp.module.input_agreement import check_inputs_agree
from fxdp.module.outputs import packed, raise_if_checked
from fxdp.module.same_programs import SamePrograms
from fxdp.module.sharded_parameters import full_placeholders
from fxdp.module.strategies import Strategies
from fxdp.options import Options
from fxdp.ranks.agreement import gather_objects
from fxdp.ranks.failure import everywhere, refusing
from fxdp.ranks.process_mesh import ProcessMesh
from fxdp.runtime.chained_modules import chained
from fxdp.runtime.streams import Streams
from fxdp.runtime.unsharded_parameters import UnshardedParameters
from fxdp.torch_compat import without_autocast

_log = logging.getLogger("fxdp")
_ROWS = 256  # sizes of calls for which row numbers are remembered
_BRANCHES = 8  # after so many that branches on flags went, and as many more, who calls is told
_OUTLINES = 64  # kinds whose first capture is remembered in outline


class _Found(NamedTuple):
    """The entry that served the last call, with its key."""

    kind: ProgramKey
    dims: tuple[tuple[int, ...], ...]
    batches: tuple[int, ...]
    cache_entry: CacheEntry


class Programs:
    """The programs of one compiled model.

    Raises
    ------
    MeshError : options that do not go with stages or micro-batches.
    """

    def __init__(
        self,
        module: nn.Module,
        process_mesh: ProcessMesh,
        options: Options,
        full: UnshardedParameters,
        *,
        sharded: bool,
    ) -> None:
        self._module = module
        self._full = full
        self._same = SamePrograms(process_mesh, Strategies(process_mesh, options, sharded=sharded))
        self._process_mesh, self._mesh = process_mesh, process_mesh.mesh
        self._options = options
        self._cut = is_cut(self._mesh, options)
        if self._cut:
            check_options(options)
        self._owners = Owners()
        self._streams = Streams.of(device_of(module, self._mesh)) if self._cut else Streams()
        self._kinds: Kinds[GuardKey] = Kinds()
        self.compiled = 0
        """How many programs were compiled."""
        self._outlines: LRU[ProgramKey, GraphFingerprint] = LRU(_OUTLINES)
        self._expected: GraphFingerprint | None = None
        self._rows: LRU[Any, Tensor] = LRU(_ROWS)
        """Row numbers of padded gathers by batch sizes and device."""
        self._found: _Found | None = None

    def find(self, call: Call, batches: tuple[int, ...]) -> CacheEntry | None:
        """The program that serves the call without compiling anything."""
        last = self._found
        # the most recent entry of the caches already: no lookup, and the LRU order stays
        if last is not None and call.kind is last.kind and call.dims == last.dims and batches == last.batches:
            return last.cache_entry
        kind = self._kinds.find(call)
        found = None if kind is None else kind.calls.get((call.dims, batches))
        self._found = None if found is None else _Found(call.kind, call.dims, batches, found)
        return found

    def alike(self, call: Call) -> tuple[ProgramKey, ...]:
        """The kinds that differ from a new one in Python values alone; none for a kind that is known."""
        return () if self._kinds.find(call) else self._kinds.alike(call)

    def expect(self, kind: ProgramKey | None, numbers: Mapping[str, float]) -> None:
        """From now on a capture with numbers as inputs must be, at these numbers, that of a kind before."""
        taken = None if kind is None else self._outlines.get(kind)
        self._expected = None if taken is None else replace(taken, numbers={**taken.numbers, **numbers})

    @no_collection()  # also between the steps of a compilation, each of which keeps what the last one made
    def make(self, call: Call, batches: tuple[int, ...]) -> CacheEntry:
        """The program for a call that came for the first time; all ranks call this together."""
        self._found = None
        kind = self._kinds.find(call)
        first = kind is None
        if kind is None:
            check_inputs_agree(self._process_mesh, call)
            kind = GuardKey(call.dims)
        dynamic = not first and self._needs_open_dims(kind, call, batches)
        captured = self._captured_for(kind, call, batches, dynamic=dynamic)
        cache_entry = self._serve(captured, call, batches, generic=not first)
        if first:
            self._kinds.add(call, kind)
        kind.calls[call.dims, batches] = cache_entry
        return cache_entry

    @no_collection()
    def other_branch(
        self, cache_entry: CacheEntry, call: Call, batches: tuple[int, ...], other: OtherBranch
    ) -> CacheEntry:
        """The program for the way that a call turned out to go; all ranks call this together."""
        self._found = None
        kind = self._kinds.find(call)
        assert kind is not None
        sizes = call.dims, batches
        known = kind.branches.get(sizes) or [cache_entry]
        alike = [way for way in known if other.is_of(way.program.captured)]
        found = max(alike, key=lambda way: other.guessed(way.program.captured), default=None)
        if found is None:
            dynamic = any(made.program is cache_entry.program for made in kind.captured[True])
            captured = self._captured_for(kind, call, batches, dynamic=dynamic, other=other)
            found = self._serve(captured, call, batches, generic=False)
            known = [*known, found]
            if len(known) % _BRANCHES == 0:
                locations = {
                    str(check.location): None for check in found.program.captured.checks if check.branch
                }
                _log.warning(
                    "%d programs for ways that the code goes at %s", len(known), ", ".join(locations)
                )
        kind.branches[sizes] = known
        kind.calls[sizes] = found
        return found

    def _needs_open_dims(self, kind: GuardKey, call: Call, batches: tuple[int, ...]) -> bool:
        """Other dims than the first call's; or the first's, which a program of any dims serves as well."""
        if call.dims != kind.dims:
            return True
        if any(captured.any_size for captured in kind.captured[False]):
            return False
        return any(not self._broken(captured.program, call, batches) for captured in kind.captured[True])

    def _captured_for(
        self,
        kind: GuardKey,
        call: Call,
        batches: tuple[int, ...],
        *,
        dynamic: bool,
        other: OtherBranch | None = None,
    ) -> CompiledVariants:
        """A capture that is valid at these sizes, made now if there is none.

        A model whose Python code branches on sizes is captured once per branch, at a size that takes it.
        """
        known = kind.captured[dynamic]
        for captured in known:
            goes = other is None or other.is_of(captured.program.captured)
            if goes and not self._broken(captured.program, call, batches):
                return captured
        batch = sum(batches)
        branches = () if other is None else other.branches
        # one device may draw in another order for a single sample
        hint = 1 if batch == 1 and self._options.single_device_rng else None
        program = self._capture(call, batches, dynamic=dynamic, hint=hint, branches=branches)
        # the code branches on sizes: traced at this batch it takes this call's branch
        if self._broken(program, call, batches) and batch >= 2:
            program = self._capture(call, batches, dynamic=dynamic, hint=batch, branches=branches)
        if broken := self._broken(program, call, batches):
            raise everywhere(decided_error(broken, batch))
        known.append(CompiledVariants(program, self._process_mesh, self._module, self._streams, self._full))
        return known[-1]

    def _broken(self, program: Program, call: Call, batches: tuple[int, ...]) -> list[Condition]:
        """What the capture relies on and this call does not fulfil."""
        values = size_values(program.captured, call, batches, self._mesh.rank)
        sizes = {B if name == "B" else named_size(name): value for name, value in values.items()}
        relied = [
            *program.captured.conditions,
            *fixed_dims(program.gm, program.captured.batch, call, values),
            *_few_samples(program),
        ]
        return [c for c in relied if not c.holds(sizes)]

    def _capture(
        self,
        call: Call,
        batches: tuple[int, ...],
        *,
        dynamic: bool,
        hint: int | None,
        branches: tuple[bool, ...] = (),
    ) -> Program:
        """The program for a call; all ranks call this together.

        Raises
        ------
        SpecializationError : on all ranks alike, of Python values that must be constants of the program.
        WantsShardingError : on all ranks alike, where parameters must be sharded for memory's sake.
        """
        start = time.perf_counter()
        request = request_of(
            self._module,
            call.inputs,
            self._options,
            cut=self._cut,
            couple=self._mesh.size * self._options.microbatches > 1,
            dynamic=dynamic,
            hint=hint,
            branches=branches,
        )

        def capture() -> Captured | SpecializationError:
            with refusing(self._process_mesh), plain_modes(), full_placeholders(self._module):
                return capture_open(request, self._expected) if call.inputs.open else capture_request(request)

        found = capture()
        if call.inputs.open:  # a rank that finds so alone would leave the others waiting for its program
            names = found.names if isinstance(found, SpecializationError) else frozenset()
            everyone = frozenset[str]().union(*gather_objects(self._process_mesh, names))
            if everyone:
                raise SpecializationError(everyone)
        assert isinstance(found, Captured)
        if call.kind not in self._outlines:
            self._outlines[call.kind] = GraphFingerprint.of(found, call.inputs)
        seconds = time.perf_counter() - start
        sizes = size_values(found, call, batches, self._mesh.rank)
        program = self._same.make(found, {**sizes, "b": max(batches), "offset": 0}, capture)
        with refusing(self._process_mesh):
            if self._options.gradients == "owner" and self._cut:
                self._owners.add(program)
        program.seconds = {"capture": seconds, **program.seconds}
        return program

    def _serve(
        self, captured: CompiledVariants, call: Call, batches: tuple[int, ...], *, generic: bool
    ) -> CacheEntry:
        program, before = captured.program, captured.made
        sizes = size_values(program.captured, call, batches, self._mesh.rank)
        with plain_modes(), without_autocast():
            found = captured.make(sizes, batches, lambda: self._row_numbers(call, batches), generic=generic)
        if captured.made > before:
            self.compiled += 1
            kind = "any size" if generic else f"batches {batches}"
            _log.info("compiled program %d: %s", self.compiled, kind)
            log_program(program, sizes)
        return CacheEntry(found.runs, found.graph, program, sizes, graph_draws(program.gm.graph))

    def run(self, cache_entry: CacheEntry, call: Call, batches: tuple[int, ...]) -> Any:
        """Run a call; the model's own output structure, or on all ranks alike `OtherBranch`.

        Raises
        ------
        InputError : the model's code reads how inputs lie, and they lie otherwise.
        """
        captured, runs = cache_entry.program.captured, cache_entry.runs
        if cache_entry.reads_layouts:
            check_layouts(captured, call.inputs, full_batch_draws=False)
        if self._full.places and not cache_entry.keeps_unsharded:
            self._full.drop()  # another program of this model may keep them, but there is no room
        sizes = size_values(captured, call, batches, self._mesh.rank) if cache_entry.takes_sizes else {}
        rows = self._row_numbers(call, batches) if runs.takes_rows else None
        tensors: Sequence[Tensor] = call.inputs.tensors
        if self._mesh.size > 1:
            tensors = chained(tensors, call.inputs.batch_dims, self._mesh.size)
        even = batches.count(batches[0]) == len(batches)
        with without_autocast():
            if not cache_entry.branches:
                outputs = runs.run(tensors, sizes, rows, even)
            else:
                run = partial(runs.run, tensors, sizes, rows, even)
                found = on_its_branch(cache_entry.program, self._module, call, run)
                if isinstance(found, OtherBranch):
                    return found
                outputs = found
        if captured.checks:
            told = partial(failing_ranks, self._process_mesh, self._module, self._options.loss_fn, call)
            raise_if_checked(captured.checks, outputs, told)
        return outputs[0] if cache_entry.returns_tensor else packed(captured, outputs, sizes)

    def _row_numbers(self, call: Call, batches: tuple[int, ...]) -> Tensor:
        device = call.tensors[0].device
        rows = self._rows.get((batches, device))
        if rows is None:
            rows = self._rows[batches, device] = row_numbers(batches).to(device)
        return rows


def _few_samples(program: Program) -> list[Condition]:
    """What it sends is chosen by how many samples there are: of many more another program sends less."""
    most = program.most_samples
    return [] if most is None else [Condition(most >= B, Location())]
