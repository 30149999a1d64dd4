"""Which program serves a call: captured and compiled on demand, specialised first, generic second.

A kind of call (structure, dtypes, modes) is compiled for its sizes at first. At the second distinct sizes it
is compiled once more for any batch, or, if other dims changed too, captured again with all dims open.
"""

from __future__ import annotations

import contextlib
import logging
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxdp.capture import Captured, Condition, capture, check_layouts, flatten_inputs, misread
from fxdp.compiler.emit import LocalProgram, emit, prepare
from fxdp.errors import AgreementError, InputError
from fxdp.ir.draws import node_draws
from fxdp.ir.sizes import B, named_size
from fxdp.lowering.inductor.collective_order import order_lines
from fxdp.lowering.shapes import SizesFixedError
from fxdp.module.call import Call
from fxdp.module.call_sizes import fixed_dims, row_numbers, size_values
from fxdp.module.input_agreement import check_contents
from fxdp.module.kinds import Kinds
from fxdp.module.outputs import has_size_leaves, packed, raise_if_checked
from fxdp.module.recent import Recent
from fxdp.options import Options
from fxdp.ranks.agreement import agree, gather_objects, tensor_lines
from fxdp.ranks.failure import everywhere, refusing
from fxdp.ranks.joined import Joined
from fxdp.runtime.chains import chained
from fxdp.torch_compat import compile_lock

_log = logging.getLogger("fxdp")
_CALLS, _ROWS = 1024, 256  # sizes of calls that are remembered, per kind and per program


@dataclass
class Served:
    """A program with what a call needs around it."""

    program: Any
    """A `Bound`, or the `Step` of a staged one."""
    graph: fx.GraphModule
    local: LocalProgram
    sizes: dict[str, int]
    rows: Recent[tuple[int, ...], Tensor] = field(default_factory=lambda: Recent(_ROWS))
    draws: bool = False
    """Whether the program draws random numbers."""


@dataclass
class CallKind:
    """All that was captured and compiled for one kind of call."""

    dims: tuple[tuple[int, ...], ...]
    """The dims of the first call, to which captures that are not `dynamic` belong."""
    captured: dict[bool, list[LocalProgram]] = field(default_factory=lambda: {False: [], True: []})
    """By `dynamic`: one capture for all sizes, or several where the model branches on sizes."""
    generic: dict[int, Served] = field(default_factory=dict)
    """The size-generic program of each capture, by its id."""
    lowerings: dict[int, Any] = field(default_factory=dict)
    """Of each capture in stages its lowered parts, by its id."""
    exact: Recent[Any, Served] = field(default_factory=lambda: Recent(_CALLS))
    """The program of each call so far, by its sizes."""


class Programs:
    """The programs of one compiled model."""

    def __init__(self, module: nn.Module, joined: Joined, options: Options) -> None:
        self._module = module
        self._joined, self._mesh = joined, joined.mesh
        self._options = options
        self._kinds: Kinds[CallKind] = Kinds()
        self.compiled = 0
        """How many programs were compiled."""

    def find(self, call: Call, batches: tuple[int, ...]) -> Served | None:
        """The program that serves the call without compiling anything."""
        kind = self._kinds.find(call)
        return None if kind is None else kind.exact.get((call.dims, batches))

    def make(
        self, call: Call, batches: tuple[int, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Served:
        """The program for a call that came for the first time; all ranks call this together."""
        kind = self._kinds.find(call)
        if kind is None:
            check_contents(self._joined, call)
            kind = CallKind(call.dims)
            local = self._captured_for(kind, call, batches, args, kwargs, dynamic=False)
            served = self._emit(kind, local, call, batches, generic=False)
            self._kinds.add(call, kind, args, kwargs)
        else:
            served = self._make_further(kind, call, batches, args, kwargs)
        kind.exact[call.dims, batches] = served
        return served

    def _make_further(
        self,
        kind: CallKind,
        call: Call,
        batches: tuple[int, ...],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Served:
        """The program for other sizes of a known kind."""
        dynamic = self._needs_open_dims(kind, call, batches)
        local = self._captured_for(kind, call, batches, args, kwargs, dynamic=dynamic)
        served = kind.generic.get(id(local))
        if served is None:
            try:
                served = kind.generic[id(local)] = self._emit(kind, local, call, batches, generic=True)
            except SizesFixedError as error:
                _log.warning("the model's code fixes the sizes %s: it is compiled anew for each size", error)
                served = self._emit(kind, local, call, batches, generic=False)
        return served

    def _needs_open_dims(self, kind: CallKind, call: Call, batches: tuple[int, ...]) -> bool:
        """Other dims than the first call's; or the first's, which a program of any dims serves as well."""
        if call.dims != kind.dims:
            return True
        if any(id(local) in kind.generic for local in kind.captured[False]):
            return False
        return any(not self._broken(local, call, batches) for local in kind.captured[True])

    def _captured_for(
        self,
        kind: CallKind,
        call: Call,
        batches: tuple[int, ...],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        dynamic: bool,
    ) -> LocalProgram:
        """A capture that is valid at these sizes, made now if there is none.

        A model whose Python code branches on sizes is captured once per branch, at a size that takes it.
        """
        known = kind.captured[dynamic]
        for local in known:
            if not self._broken(local, call, batches):
                return local
        batch = sum(batches)
        hint = 1 if batch == 1 and self._options.single_device_rng else None
        local = self._capture(call, args, kwargs, dynamic=dynamic, hint=hint)
        if self._broken(local, call, batches) and batch >= 2:
            local = self._capture(call, args, kwargs, dynamic=dynamic, hint=batch)
        broken = self._broken(local, call, batches)
        if broken:
            listing = "\n  ".join(f"{c.expr} at {c.site}" for c in broken)
            raise everywhere(
                InputError(
                    "the model's Python code decided on a size in a way that does not hold for this call, "
                    f"whose global batch is {batch}:\n  {listing}\nUse tensor operations instead of "
                    "Python conditions on sizes there, or keep the sizes within the condition"
                )
            )
        known.append(local)
        return local

    def _broken(self, local: LocalProgram, call: Call, batches: tuple[int, ...]) -> list[Condition]:
        """What the capture relies on and this call does not fulfil."""
        values = size_values(local.captured, call, batches, self._mesh.rank)
        sizes = {B if name == "B" else named_size(name): value for name, value in values.items()}
        relied = [*local.captured.conditions, *fixed_dims(local.gm, local.captured.batch, call, values)]
        return [c for c in relied if not c.holds(sizes)]

    def _capture(
        self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], *, dynamic: bool, hint: int | None
    ) -> LocalProgram:
        start = time.perf_counter()
        with refusing(self._joined), _plain_modes():
            captured = capture(
                self._module,
                args,
                kwargs,
                batch_dims=self._options.batch_dims,
                loss_fn=self._options.loss_fn,
                dynamic=dynamic,
                differentiable=self._differentiable,
                couple=self._mesh.size * self._options.microbatches > 1,
                own_statistics=self._options.own_statistics,
                hint=hint,
                whole_draws=self._options.single_device_rng,
            )
            seconds = time.perf_counter() - start
            local = self._prepare(captured)
        local.seconds = {"capture": seconds, **local.seconds}
        self._compare(local)
        return local

    _differentiable = "all"
    """Which outputs may be differentiated, in `capture`'s words."""

    def _prepare(self, captured: Captured) -> LocalProgram:
        return prepare(captured, self._mesh, self._options)

    def _compare(self, local: LocalProgram) -> None:
        """All ranks must have compiled the same program."""
        constants = tensor_lines(local.captured.constants) if self._mesh.world > 1 else []
        digests = gather_objects(self._joined, (local.digest, *constants))
        if len(set(digests)) > 1:
            agree(self._joined, local.text.splitlines(), "models")
            agree(self._joined, constants, "constant tensors")
            raise AgreementError(
                "the ranks' programs differ in a constant: are the models' Python values equal?"
            )

    def _emit(
        self, kind: CallKind, local: LocalProgram, call: Call, batches: tuple[int, ...], *, generic: bool
    ) -> Served:
        sizes = size_values(local.captured, call, batches, self._mesh.rank)
        even = len(set(batches)) == 1 and not (generic and self._mesh.size > 1)
        with _plain_modes():
            program, graph = emit(local, self._joined, self._module, sizes, generic=generic, even=even)
        agree(self._joined, order_lines(program.halves), "compiled programs")
        self.compiled += 1
        _log.info("compiled program %d: %s", self.compiled, "any size" if generic else f"batches {batches}")
        return Served(program, graph, local, sizes, draws=any(map(node_draws, graph.graph.nodes)))

    def check_layouts(
        self, served: Served, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Refuse this rank's inputs if the model's code reads how they lie, and they lie otherwise.

        Raises
        ------
        InputError : names the line and the inputs.
        """
        captured = served.local.captured
        if misread(captured, call.tensors):
            check_layouts(captured, flatten_inputs(self._module, args, kwargs), whole_draws=False)

    def run(self, served: Served, call: Call, batches: tuple[int, ...]) -> Any:
        """Run a call; the model's own output structure."""
        captured, program = served.local.captured, served.program
        sizes: dict[str, int] = {}
        if program.takes_sizes or has_size_leaves(captured):
            sizes = size_values(captured, call, batches, self._mesh.rank)
        rows = None
        if program.takes_rows:
            rows = served.rows.get(batches)
            if rows is None:
                device = call.tensors[0].device
                rows = served.rows[batches] = row_numbers(batches).to(device)
        tensors = chained(call.tensors, call.batch_dims, self._mesh.size)
        return self._pack(captured, program.run(tensors, sizes, rows), sizes)

    def _pack(self, captured: Captured, outputs: Sequence[Tensor], sizes: dict[str, int]) -> Any:
        """The model's own output structure around flat outputs."""
        if captured.checks:
            raise_if_checked(captured.checks, outputs)
        return packed(captured, outputs, sizes)


@contextlib.contextmanager
def _plain_modes() -> Iterator[None]:
    """Compile outside of inference mode, gradients on or off as they are, one thread at a time.

    Inductor warns about itself (deprecations, tunables), which must not end a program run with `-W error`.
    """
    enabled = torch.is_grad_enabled()
    with (
        compile_lock,
        torch.inference_mode(False),
        torch.set_grad_enabled(enabled),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        yield
