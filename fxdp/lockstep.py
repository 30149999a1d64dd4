"""The oracle: all ranks of a LOCAL program in one process, node by node against one device.

Every node holds a list with one value per rank; a collective combines the list; after each node the
ranks' values are put together by the node's placement and compared with what the captured graph computes
on the whole batch. The first difference names the node, so that a wrong rule, a dropped reduction or a
size that should be global shows in seconds. Random values are taken from the ranks: the reference uses
what they drew.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from fxdp import ir
from fxdp.annotations import (
    Input,
    Output,
    ResultSlot,
    ScalarType,
    Site,
    Size,
    Slot,
    Tangent,
    TensorType,
    is_host_size,
    note,
)
from fxdp.graph_text import node_text
from fxdp.parts import combine, join_parts, take_part
from fxdp.placements import Partial, Placement, Replicate, Shard
from fxdp.rules.arguments import local_shape
from fxdp.rules.randomness import node_draws
from fxdp.symbols import LOCAL, OFFSET, B, named_size

aten = torch.ops.aten

_UNWRITTEN = frozenset(
    {
        aten.empty.memory_format, aten.empty_like.default, aten.empty_strided.default,
        aten.empty_permuted.default, aten.new_empty.default, aten.new_empty_strided.default,
    }
)  # fmt: skip
_POISON = float("nan")


@dataclass(frozen=True, slots=True)
class Fault:
    """A node whose ranks' values do not make up the global one."""

    node: str
    text: str
    what: str
    rule: str
    site: Site

    def __str__(self) -> str:
        return f"{self.text}\n    {self.what}\n    rule {self.rule}, from {self.site}"


@dataclass
class LockStep:
    """Interpret `local` on virtual ranks and `captured` on one device, comparing each node.

    Parameters
    ----------
    local : a graph of level LOCAL.
    captured : the same program at level CAPTURED, sharing node names.
    sizes : every rank's batch; their sum is the global batch.
    symbols : values of further dynamic sizes.
    tolerance : largest relative error (of the largest value) that counts as equal.
    single_device_rng : the ranks' generators are in the same state, as with `rng="single-device"`.
    """

    local: fx.GraphModule
    captured: fx.GraphModule
    sizes: Sequence[int]
    symbols: Mapping[str, int] = field(default_factory=dict)
    tolerance: float = 1e-9
    stop_at_first: bool = True
    single_device_rng: bool = False
    faults: list[Fault] = field(default_factory=list)

    def run(self, slots: Mapping[Slot, Any]) -> dict[ResultSlot, Tensor]:
        """The results of the ranks, put together; `slots` holds the *global* value of each input.

        Tangents are global too. Faults are collected in `faults`.
        """
        self._start()
        self._slots = slots
        for node in self.local.graph.nodes:
            if node.op == "output":
                return self._results(node)
            try:
                self._ranks[node] = self._run(node)
                if node.op != "placeholder":
                    self._check(node)
            except (RuntimeError, IndexError, TypeError, ValueError, ArithmeticError) as error:
                self._fault(node, f"cannot run: {error}")
                return {}
            if self.faults and self.stop_at_first:
                return {}
        raise AssertionError("a graph ends in an output node")

    def _start(self) -> None:
        self.world = len(self.sizes)
        self.batch = sum(self.sizes)
        self.offsets = [0, *accumulate(self.sizes)][:-1]
        self.faults.clear()
        self._ranks: dict[fx.Node, list[Any]] = {}
        self._whole: dict[str, Any] = {}
        self._floors: dict[fx.Node, float] = {}
        self._reference = {n.name: n for n in self.captured.graph.nodes}
        self._globals = {B: self.batch, **{named_size(k): v for k, v in self.symbols.items()}}

    def _run(self, node: fx.Node) -> list[Any]:
        if node.op == "placeholder":
            return self._placeholder(node)
        if node.op == "get_attr":
            value = _attribute(self.local, str(node.target))
            self._whole[node.name] = value
            return [value] * self.world
        if node.target in ir.CONVERSIONS:
            return self._convert(node)
        if self.single_device_rng and node_draws(node):
            return self._draw_alike(node)
        return [self._call(node, r) for r in range(self.world)]

    def _draw_alike(self, node: fx.Node) -> list[Any]:
        """Every rank draws what one device would."""
        values = []
        before = torch.get_rng_state()
        for rank in range(self.world):
            torch.set_rng_state(before)
            values.append(self._call(node, rank))
        return values

    def _call(self, node: fx.Node, rank: int) -> Any:
        return _execute(node, lambda n: self._ranks[n][rank])

    def _placeholder(self, node: fx.Node) -> list[Any]:
        slot = note(node).slot
        if isinstance(slot, Size):
            return [self._rank_size(slot.name, r) for r in range(self.world)]
        assert slot is not None
        whole = self._slots[slot]
        self._whole[node.name] = whole
        if isinstance(slot, (Input, Tangent)):
            return self._split(whole, note(node).placement)
        return [whole] * self.world

    def _rank_size(self, name: str, rank: int) -> int:
        values = {str(B): self.batch, str(LOCAL): self.sizes[rank], str(OFFSET): self.offsets[rank]}
        return values[name] if name in values else self.symbols[name]

    def _split(self, whole: Tensor, placement: Any) -> list[Any]:
        if not isinstance(placement, Shard):
            return [whole] * self.world
        outer = self._number(placement.outer)
        return [
            take_part(whole, placement.dim, outer, self.batch, start, size)
            for start, size in zip(self.offsets, self.sizes, strict=True)
        ]

    def _number(self, expr: Any) -> int:
        return int(expr.xreplace(self._globals)) if isinstance(expr, sympy.Basic) else int(expr)

    def _convert(self, node: fx.Node) -> list[Any]:
        values = self._ranks[node.args[0]]  # type: ignore[index]
        rest: list[Any] = [self._ranks[a][0] if isinstance(a, fx.Node) else a for a in node.args[1:]]
        if node.target is ir.all_reduce:
            return [torch.stack(values).sum(0).to(values[0].dtype)] * self.world
        if node.target is ir.reduce_scatter:
            return self._split(sum(values[1:], values[0]), Shard(*rest[:2]))
        if node.target is ir.all_gather:
            return [join_parts(values, rest[0], rest[1], self.sizes)] * self.world
        if node.target is ir.broadcast:
            return [values[0]] * self.world
        if node.target is ir.shard:
            return [
                take_part(v, rest[0], rest[1], self.batch, start, size)
                for v, start, size in zip(values, self.offsets, self.sizes, strict=True)
            ]
        if node.target is ir.partial:
            return [values[0], *(torch.zeros_like(v) for v in values[1:])]
        return values

    def _check(self, node: fx.Node) -> None:
        reference = self._reference.get(node.name)
        if reference is None or isinstance(note(node).type, ScalarType) or node.op == "get_attr":
            return
        if node_draws(node):
            self._whole[node.name] = self._combined(node)
            return
        whole = _execute(reference, self._reference_value)
        self._whole[node.name] = whole
        self._learn(note(reference).type, whole)
        self._compare(node, whole)

    def _learn(self, type_: Any, whole: Any) -> None:
        """The values of sizes that only the data fixes, from the first tensor that has them."""
        if isinstance(type_, tuple):
            for one, value in zip(type_, whole, strict=True):
                self._learn(one, value)
        elif isinstance(type_, TensorType):
            for size, value in zip(type_.shape, whole.shape, strict=True):
                if isinstance(size, sympy.Symbol):
                    self._globals.setdefault(size, value)

    def _reference_value(self, node: fx.Node) -> Any:
        known = note(node)
        if isinstance(known.type, ScalarType):
            if is_host_size(node):
                return _host(known.type.expr, self._globals)
            return self._ranks_by_name(node.name)[0]
        return self._whole[node.name]

    def _ranks_by_name(self, name: str) -> list[Any]:
        return next(v for n, v in self._ranks.items() if n.name == name)

    def _combined(self, node: fx.Node) -> Any:
        placement, values = note(node).placement, self._ranks[node]
        if isinstance(placement, tuple):
            return tuple(
                None if p is None else self._combine([v[i] for v in values], p)
                for i, p in enumerate(placement)
            )
        assert placement is not None
        return self._combine(values, placement)

    def _combine(self, values: list[Tensor], placement: Placement) -> Tensor:
        if isinstance(placement, Shard):
            placement = Shard(placement.dim, self._number(placement.outer))
        return combine(values, placement, self.sizes)

    def _compare(self, node: fx.Node, whole: Any) -> None:
        placement, values = note(node).placement, self._ranks[node]
        types = note(node).type
        if not isinstance(types, tuple):
            self._compare_one(node, whole, values, types, placement)
            return
        assert isinstance(placement, tuple)
        for i, (type_, p) in enumerate(zip(types, placement, strict=True)):
            if isinstance(type_, TensorType):
                self._compare_one(node, whole[i], [v[i] for v in values], type_, p)

    def _compare_one(self, node: fx.Node, whole: Any, values: list[Any], type_: Any, placement: Any) -> None:
        if not isinstance(whole, Tensor) or placement is None:
            return
        for rank, value in enumerate(values):
            shape = tuple(self._local_number(n, rank) for n in local_shape(type_, placement))
            if tuple(value.shape) != shape:
                self._fault(node, f"rank {rank} has shape {tuple(value.shape)}, expected {shape}")
                return
        if isinstance(placement, Partial):  # the terms of the sum count, not what is left of it
            largest = 1e-3 * max(map(_magnitude, values))
            self._floors[node] = max(self._floor(node), largest)
        if isinstance(placement, Replicate):
            error = max(difference(v, whole, self._floor(node)) for v in values)
        else:
            error = difference(self._combine(values, placement), whole, self._floor(node))
        if not error <= self.tolerance:
            self._fault(node, f"differs from one device by {error:.3g} (relative)")

    def _floor(self, node: fx.Node) -> float:
        """A thousandth of the largest operand: sums of cancelling terms are no better than that.

        An op of one operand (a view of such a sum) inherits its operand's floor.
        """
        if node not in self._floors:
            tensors = [n for n in node.all_input_nodes if isinstance(self._ranks[n][0], Tensor)]
            terms = (_magnitude(value) for n in tensors for value in self._ranks[n])
            floor = 1e-3 * max(terms, default=0.0)
            if len(tensors) == 1:
                floor = max(floor, self._floor(tensors[0]))
            self._floors[node] = floor
        return self._floors[node]

    def _local_number(self, expr: Any, rank: int) -> int:
        if not isinstance(expr, sympy.Basic):
            return int(expr)
        return int(expr.xreplace({**self._globals, LOCAL: self.sizes[rank]}))

    def _fault(self, node: fx.Node, what: str) -> None:
        known = note(node)
        rule = known.reason.rule if known.reason else "?"
        self.faults.append(Fault(node.name, node_text(node, ("dp",)), what, rule, known.site))

    def _results(self, node: fx.Node) -> dict[ResultSlot, Tensor]:
        results: dict[ResultSlot, Tensor] = {}
        values: Sequence[fx.Node] = node.args[0]  # type: ignore[assignment]
        placements = note(node).operands or [note(v).placement for v in values]
        for slot, value, placement in zip(note(node).results, values, placements, strict=True):
            if slot is not None:
                results[slot] = self._combine(self._ranks[value], placement)  # type: ignore[arg-type]
        return results

    def local_outputs(self) -> list[list[Tensor]]:
        """Every rank's own outputs, in order, as `compiled(...)` would return them."""
        node = self.local.graph.output_node()
        values: Sequence[fx.Node] = node.args[0]  # type: ignore[assignment]
        chosen = [v for s, v in zip(note(node).results, values, strict=True) if isinstance(s, Output)]
        return [[self._ranks[v][r] for v in chosen] for r in range(self.world)]


def difference(a: Tensor, b: Tensor, floor: float = 0.0) -> float:
    """The largest |a - b| over the largest |b|, or over `floor` where that is larger.

    0 where both are 0; nan and inf must agree in place. A floor says how large the terms were from which a
    value that cancels to nothing was made.
    """
    if a.shape != b.shape:
        return float("inf")
    if a.numel() == 0:
        return 0.0
    if not (a.is_floating_point() or a.is_complex()):
        return 0.0 if torch.equal(a, b) else float("inf")
    finite = torch.isfinite(a) & torch.isfinite(b)
    if not torch.allclose(a[~finite], b[~finite], equal_nan=True):
        return float("inf")
    a, b = a[finite], b[finite]
    if a.numel() == 0:
        return 0.0
    scale = max(b.abs().max().item(), floor)
    return float((a - b).abs().max().item()) / (scale or 1.0)


def _execute(node: fx.Node, value_of: Callable[[fx.Node], Any]) -> Any:
    """Run one op; memory that it leaves unwritten is poisoned, so that nobody can rely on it."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), value_of)
    result = node.target(*args, **kwargs)  # type: ignore[operator]
    if node.target in _UNWRITTEN:
        result.fill_(_POISON if result.is_floating_point() or result.is_complex() else 1)
    return result


def _magnitude(value: Tensor) -> float:
    if not value.numel() or not (value.is_floating_point() or value.is_complex()):
        return 0.0
    largest = float(value.abs().max())
    return largest if largest < float("inf") else 0.0


def _host(expr: sympy.Basic, values: Mapping[Any, int]) -> int | float | bool:
    value = expr.xreplace({symbol: sympy.Integer(size) for symbol, size in values.items()})
    if isinstance(value, sympy.logic.boolalg.BooleanAtom):
        return bool(value)
    return int(value) if value.is_Integer else float(value)


def _attribute(module: torch.nn.Module, path: str) -> Any:
    for name in path.split("."):
        module = getattr(module, name)
    return module
