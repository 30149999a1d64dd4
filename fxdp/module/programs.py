"""`Programs`: captures and compiles programs on demand, specialized first, generic second.

A kind of call (structure, dtypes, modes) is compiled for its first sizes. At the second distinct sizes the
kind is compiled once more for any batch; if further dims changed, the model is captured again with all dims
dynamic. With stages or micro-batches this holds for each part, and a step of calls to the parts is written
for each set of sizes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from fxdp.capture.captured import Captured
from fxdp.capture.driver import capture_request
from fxdp.capture.fingerprint import GraphFingerprint, capture_open
from fxdp.capture.python_values import SpecializationError
from fxdp.capture.refusals.input_layouts import check_layouts
from fxdp.compiler.emit import device_of
from fxdp.compiler.executable import CompiledVariants
from fxdp.compiler.option_combinations import check_options
from fxdp.compiler.owners import Owners
from fxdp.compiler.prepare import is_cut
from fxdp.compiler.program import Program
from fxdp.compiler.records import log_program
from fxdp.ir.graph.draws import graph_draws
from fxdp.ir.graph.graphs import no_collection
from fxdp.ir.types.sizes import axis, by_axis, is_even
from fxdp.module.assertion_attribution import failing_ranks
from fxdp.module.branch_specialization import OtherBranch, StateBefore, other_branch
from fxdp.module.cache import LRU
from fxdp.module.cache_entry import CacheEntry, GuardKey, Kinds
from fxdp.module.calls.call import Call, ProgramKey, request_of
from fxdp.module.calls.call_sizes import CallSizes, RowNumbers, decided_error
from fxdp.module.calls.input_agreement import check_inputs_agree
from fxdp.module.calls.outputs import packed, raise_if_checked
from fxdp.module.fallback import FallsBackError, captured_by_all
from fxdp.module.same_programs import SamePrograms
from fxdp.module.strategies import Strategies, plain_modes
from fxdp.options import Options
from fxdp.ranks.agreement import gather_objects
from fxdp.ranks.liveness.failure import everywhere, refusing
from fxdp.ranks.process_mesh import ProcessMesh
from fxdp.ranks.rank_fingerprint import check_fingerprints
from fxdp.runtime.chained_modules import chained
from fxdp.runtime.streams import Streams
from fxdp.runtime.unsharded_parameters import UnshardedParameters
from fxdp.sharding.sharded_parameters import full_placeholders
from fxdp.torch_compat import without_autocast

_log = logging.getLogger("fxdp")
_BRANCHES = 8  # a warning for each so many programs for branches of one call
_OUTLINES = 64  # keys whose first capture has a cached fingerprint


class Programs:
    """The programs of one compiled model.

    Raises
    ------
    MeshError : an option cannot be combined with stages or micro-batches.
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
            check_options(self._mesh, options)
        self._owners = Owners()
        self._streams = Streams.of(device_of(module, self._mesh)) if self._cut else Streams()
        self.kinds = Kinds()
        """The kinds of calls made so far, with their captures and entries."""
        self.compiled = 0
        """The number of programs compiled so far."""
        self.varied = False, False
        """Whether calls of a new kind will come with other batches, and with other dims."""
        self._outlines: LRU[ProgramKey, GraphFingerprint] = LRU(_OUTLINES)
        self._expected: GraphFingerprint | None = None
        self._row_numbers = RowNumbers()

    def alike(self, key: ProgramKey) -> tuple[ProgramKey, ...]:
        """Return the keys that differ from a new key in Python values alone; none for a known key."""
        return () if self.kinds.find(key) else self.kinds.alike(key)

    def expect(self, kind: ProgramKey | None, numbers: Mapping[str, float]) -> None:
        """Require that captures with numbers as inputs equal, at these numbers, the one of an earlier key."""
        taken = None if kind is None else self._outlines.get(kind)
        self._expected = None if taken is None else replace(taken, numbers={**taken.numbers, **numbers})

    @no_collection()  # each step of a compilation keeps the results of the last one
    def make(self, call: Call, batches: tuple[int, ...]) -> CacheEntry:
        """Compile for a call that came for the first time; a collective call."""
        sizes = CallSizes.of(call, batches, self._mesh.rank)
        kind = self.kinds.find(call.kind)
        generic, dynamic = self.varied if kind is None else (True, self._needs_open_dims(kind, sizes))
        if is_new := kind is None:
            if self._options.block is not None:
                check_fingerprints(self._process_mesh)
            check_inputs_agree(self._process_mesh, call)
        kind = kind or GuardKey(call.dims)
        captured = self._captured_for(kind, sizes, partial(self._capture, call), dynamic=dynamic)
        cache_entry = self._serve(captured, sizes, generic=generic)
        if is_new:
            self.kinds.add(call.kind, kind)
        kind.calls[sizes.key] = cache_entry
        return cache_entry

    @no_collection()
    def other_branch(
        self, cache_entry: CacheEntry, call: Call, batches: tuple[int, ...], other: OtherBranch
    ) -> CacheEntry:
        """Return the entry for the branches that a call takes, compiled if need be; a collective call."""
        sizes = CallSizes.of(call, batches, self._mesh.rank)
        kind = self.kinds.find(call.kind)
        assert kind is not None
        known = kind.branches.get(sizes.key) or [cache_entry]
        alike = [way for way in known if other.is_of(way.program.captured)]
        found = max(alike, key=lambda way: other.guessed(way.program.captured), default=None)
        if found is None:
            dynamic = any(made.program is cache_entry.program for made in kind.captured[True])
            capture = partial(self._capture, call)
            captured = self._captured_for(kind, sizes, capture, dynamic=dynamic, other=other)
            found = self._serve(captured, sizes, generic=False)
            known = [*known, found]
            if len(known) % _BRANCHES == 0:
                locations = {
                    str(check.location): None for check in found.program.captured.checks if check.branch
                }
                _log.warning(
                    "%d programs for ways that the code goes at %s", len(known), ", ".join(locations)
                )
        kind.branches[sizes.key] = known
        kind.calls[sizes.key] = found
        return found

    def _needs_open_dims(self, kind: GuardKey, sizes: CallSizes) -> bool:
        """Return whether a call needs, or an existing program of any dims has, other dims than the first."""
        if sizes.dims != kind.dims:
            return True
        if any(captured.any_size for captured in kind.captured[False]):
            return False
        return any(not sizes.broken(captured.program) for captured in kind.captured[True])

    def _captured_for(
        self,
        kind: GuardKey,
        sizes: CallSizes,
        capture: Callable[..., Program],
        *,
        dynamic: bool,
        other: OtherBranch | None = None,
    ) -> CompiledVariants:
        """Return a capture that is valid at these sizes, made now if there is none.

        A model whose Python code branches on sizes is captured once per branch, at a size that takes it.
        """
        known = kind.captured[dynamic]
        for captured in known:
            goes = other is None or other.is_of(captured.program.captured)
            if goes and not sizes.broken(captured.program):
                return captured
        capture = partial(capture, sizes, dynamic=dynamic, branches=() if other is None else other.branches)
        # one device may draw in another order for a single sample
        program = capture(hint=1 if sizes.batch == 1 and self._options.single_device_rng else None)
        # the code branches on sizes: traced at this batch it takes this call's branch
        if sizes.broken(program) and sizes.batch >= 2:
            program = capture(hint=sizes.batch)
        if broken := sizes.broken(program):
            error = decided_error(broken, sizes.batch)
            raise everywhere(FallsBackError(str(error), sizes.key) if self._options.fallback else error)
        known.append(CompiledVariants(program, self._process_mesh, self._module, self._streams, self._full))
        return known[-1]

    def _capture(
        self,
        call: Call,
        sizes: CallSizes,
        *,
        dynamic: bool,
        hint: int | None,
        branches: tuple[bool, ...],
    ) -> Program:
        """Capture a call and make its program; a collective call.

        Raises
        ------
        FallsBackError : on all ranks alike, capture refuses the call, which `fallback="eager"` runs.
        SpecializationError : on all ranks alike, Python values must be constants of the program.
        WantsShardingError : on all ranks alike, parameters must be sharded to fit into memory.
        """
        start = time.perf_counter()
        request = request_of(
            self._module,
            call.inputs,
            self._options,
            cut=self._cut,
            couple=self._mesh.size > 1 or self._options.has_microbatches,
            dynamic=dynamic,
            hint=hint,
            branches=branches,
        )

        def attempt() -> Captured | SpecializationError:
            with plain_modes(), full_placeholders(self._module):
                return capture_open(request, self._expected) if call.inputs.open else capture_request(request)

        def capture() -> Captured | SpecializationError:
            with refusing(self._process_mesh):
                return attempt()

        found = capture() if self._options.fallback is None else captured_by_all(self._process_mesh, attempt)
        if call.inputs.open:  # one rank alone may find names, and all ranks must capture again
            names = found.names if isinstance(found, SpecializationError) else frozenset()
            everyone = frozenset[str]().union(*gather_objects(self._process_mesh, names))
            if everyone:
                raise SpecializationError(everyone)
        assert isinstance(found, Captured)
        if call.kind not in self._outlines:
            self._outlines[call.kind] = GraphFingerprint.of(
                found, len(call.tensors), call.inputs.number_names, dict(call.inputs.scalars)
            )
        seconds = time.perf_counter() - start
        largest = sizes.values(found)
        for name, of_ranks in by_axis(sizes.batches).items():
            of = axis(name)
            largest |= {of.local.name: max(of_ranks), of.offset.name: 0}
        program = self._same.make(found, largest, capture)
        with refusing(self._process_mesh):
            if self._options.pipeline.gradients == "owner" and self._cut:
                self._owners.add(program)
        program.seconds = {"capture": seconds, **program.seconds}
        return program

    def _serve(self, captured: CompiledVariants, sizes: CallSizes, *, generic: bool) -> CacheEntry:
        """Return the entry of a capture for these sizes, or with `generic` for any, compiled if need be."""
        program, before = captured.program, captured.made
        values, batches = sizes.values(program.captured), sizes.batches
        with plain_modes(), without_autocast():
            found = captured.make(values, batches, lambda: self._row_numbers.of(sizes), generic=generic)
        if captured.made > before:
            self.compiled += 1
            kind = "any size" if generic else f"batches {batches}"
            _log.info("compiled program %d: %s", self.compiled, kind)
            log_program(program, values)
        return CacheEntry(found.runs, found.graph, program, values, graph_draws(program.gm.graph))

    def run(self, cache_entry: CacheEntry, call: Call, batches: tuple[int, ...]) -> Any:
        """Run a call; return the model's own output structure, or on all ranks alike `OtherBranch`.

        Raises
        ------
        InputError : the model's code reads strides of inputs, and these differ from the captured ones.
        """
        captured, runs = cache_entry.program.captured, cache_entry.runs
        if cache_entry.reads_layouts:
            check_layouts(captured, call.inputs, full_batch_draws=False)
        if self._full.places and not cache_entry.keeps_unsharded:
            self._full.drop()  # of another program; there is no memory for both
        values: dict[str, int] = {}
        rows: Mapping[str, Tensor] = {}
        if cache_entry.takes_sizes:
            sizes = CallSizes.of(call, batches, self._mesh.rank)
            values = sizes.values(captured)
            rows = self._row_numbers.of(sizes) if runs.takes_rows else rows
        tensors: Sequence[Tensor] = call.inputs.tensors
        if self._mesh.size > 1:
            tensors = chained(tensors, call.inputs.batch_dims, self._mesh.size)
        before = None
        if cache_entry.branches:
            before = StateBefore(cache_entry.program.gm.graph, self._module, call.tensors)
        with without_autocast():
            outputs = runs.run(tensors, values, rows, is_even(batches))
        if before is not None and (other := other_branch(captured.checks, outputs)) is not None:
            before.put_back()
            return other
        if captured.checks:
            told = partial(failing_ranks, self._process_mesh, self._module, self._options.loss_fn, call)
            raise_if_checked(captured.checks, outputs, told)
        return outputs[0] if cache_entry.returns_tensor else packed(captured, outputs, values)
