"""Packing of several values into one, which is reduced once and sliced afterwards.

    %a [2, 3] --reshape--> [6] --.                                        .--slice--view--> [2, 3]
                                  cat --> [10] --all_reduce--> wait [10] <
    %b [4]    --reshape--> [4] --'                                        '--slice--view--> [4]

One message costs its latency once. The nodes are inserted at the graph's insertion point, with the metadata
that passes and the verifier need: terms of a sum before the reduction, full values after it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from math import prod
from typing import Any

from torch import fx

from fxdp.ir import redistributions
from fxdp.ir.graph.metadata import Cause, meta, tensor_operands, tensor_type
from fxdp.ir.types.placements import P, Placement, R
from fxdp.ir.types.value_types import TensorType
from fxdp.torch_compat import aten


@dataclass(frozen=True)
class Packing:
    """Writer of the nodes around a reduction of several values.

    Attributes
    ----------
    rule : the reason in the metadata of the nodes.
    backward : the phase of the nodes.
    axis : the data axis along which the values are reduced; None: all.
    """

    graph: fx.Graph
    rule: str
    backward: bool
    axis: str | None = None

    def flat(self, value: fx.Node) -> fx.Node:
        """Insert a term as a flat value."""
        type_ = tensor_type(value)
        size = elements(type_)
        return self._add(aten.reshape.default, (value, [size]), TensorType(type_.dtype, (size,)), P)

    def piece(self, flat: fx.Node, start: int, stop: int) -> fx.Node:
        """Insert a range of a flat value, with the same placement."""
        placement = _side(flat)
        type_ = TensorType(tensor_type(flat).dtype, (stop - start,))
        return self._add(aten.slice.Tensor, (flat, 0, start, stop), type_, placement)

    def side_by_side(self, flats: Sequence[fx.Node]) -> fx.Node:
        """Insert the concatenation of flat values."""
        placement = _side(flats[0])
        type_ = TensorType(tensor_type(flats[0]).dtype, (sum(elements(tensor_type(f)) for f in flats),))
        return self._add(aten.cat.default, (list(flats),), type_, placement)

    def reduce(self, packed: fx.Node, cause: Cause) -> fx.Node:
        """Insert the start of an all-reduce."""
        made = self._add(redistributions.all_reduce, (packed, "sum"), tensor_type(packed), R, (P,))
        made.kwargs = {} if self.axis is None else {"axis": self.axis}
        meta(made).cause = cause
        return made

    def wait(self, pending: fx.Node) -> fx.Node:
        """Insert the wait for an all-reduce, which returns the result."""
        return self._add(redistributions.wait, (pending,), tensor_type(pending), R)

    def shaped(self, flat: fx.Node, type_: TensorType) -> fx.Node:
        """Insert a view of a flat result in the shape of `type_`."""
        return self._add(aten.view.default, (flat, list(type_.shape)), type_, R)

    def zeros(self, value: fx.Node) -> fx.Node:
        """Insert the sum of values without elements, which needs no communication."""
        return self._add(aten.zeros_like.default, (value,), tensor_type(value), R, (None,))

    @cached_property
    def _add(self) -> Callable[..., fx.Node]:
        return partial(placed_call, self.graph, backward=self.backward, reason=self.rule)


def placed_call(
    graph: fx.Graph, target: Callable[..., Any], args: tuple[Any, ...], type_: TensorType,
    placement: Placement, operands: tuple[Placement | None, ...] | None = None, *,
    backward: bool, reason: str,
) -> fx.Node:  # fmt: skip
    """Insert a node with metadata; by default the operands have the placement of the result."""
    made = graph.call_function(target, args)
    known = meta(made)
    known.type, known.placement, known.backward, known.reason = type_, placement, backward, reason
    known.operands = (placement,) * len(tensor_operands(made)) if operands is None else operands
    return made


def _side(flat: fx.Node) -> Placement:
    """Return P for terms before the sum, R for full values after it."""
    return R if meta(flat).placement == R else P


def elements(type_: TensorType) -> int:
    """Return the number of elements of a value of static size."""
    return prod(int(n) for n in type_.shape)
