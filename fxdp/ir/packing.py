"""Several values side by side in one: packed, reduced together, and cut out of the result.

    %a [2, 3] --reshape--> [6] --.                                        .--slice--view--> [2, 3]
                                  cat --> [10] --all_reduce--> wait [10] <
    %b [4]    --reshape--> [4] --'                                        '--slice--view--> [4]

One message costs its latency once. The nodes are written at the graph's insertion point, with the notes that
passes and the verifier ask for: terms of a sum before the reduction, full values after it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from torch import fx

from fxdp.ir import redistributions
from fxdp.ir.metadata import Cause, meta, tensor_operands, tensor_type
from fxdp.ir.placements import P, Placement, R
from fxdp.ir.types import TensorType
from fxdp.torch_compat import aten


@dataclass(frozen=True)
class Packing:
    """Writes the nodes around a sum of several values.

    Attributes
    ----------
    rule : the name in the reasons of the nodes.
    backward : the phase that they belong to.
    axis : along which data axis the values are summed; None: all.
    """

    graph: fx.Graph
    rule: str
    backward: bool
    axis: str | None = None

    def flat(self, value: fx.Node) -> fx.Node:
        """A term as one dim."""
        type_ = tensor_type(value)
        size = elements(type_)
        return self._add(aten.reshape.default, (value, [size]), TensorType(type_.dtype, (size,)), P)

    def piece(self, flat: fx.Node, start: int, stop: int) -> fx.Node:
        """A range of a flat value, on the side of the sum where that stands."""
        placement = _side(flat)
        type_ = TensorType(tensor_type(flat).dtype, (stop - start,))
        return self._add(aten.slice.Tensor, (flat, 0, start, stop), type_, placement)

    def side_by_side(self, flats: Sequence[fx.Node]) -> fx.Node:
        """Flat values one after another."""
        placement = _side(flats[0])
        type_ = TensorType(tensor_type(flats[0]).dtype, (sum(elements(tensor_type(f)) for f in flats),))
        return self._add(aten.cat.default, (list(flats),), type_, placement)

    def reduce(self, packed: fx.Node, cause: Cause) -> fx.Node:
        """Start the sum over the ranks."""
        made = self._add(redistributions.all_reduce, (packed, "sum"), tensor_type(packed), R, (P,))
        made.kwargs = {} if self.axis is None else {"axis": self.axis}
        meta(made).cause = cause
        return made

    def wait(self, pending: fx.Node) -> fx.Node:
        """Its result."""
        return self._add(redistributions.wait, (pending,), tensor_type(pending), R)

    def shaped(self, flat: fx.Node, type_: TensorType) -> fx.Node:
        """A flat result in its own shape."""
        return self._add(aten.view.default, (flat, list(type_.shape)), type_, R)

    def zeros(self, value: fx.Node) -> fx.Node:
        """The sum of values without elements, which nobody needs to send."""
        return self._add(aten.zeros_like.default, (value,), tensor_type(value), R, (None,))

    def _add(
        self, target: Callable[..., Any], args: tuple[Any, ...], type_: TensorType, placement: Placement,
        operands: tuple[Placement | None, ...] | None = None,
    ) -> fx.Node:  # fmt: skip
        """A node whose operands are where its result is, if not said otherwise."""
        return placed_call(
            self.graph, target, args, type_, placement, operands, backward=self.backward, reason=self.rule
        )


def placed_call(
    graph: fx.Graph, target: Callable[..., Any], args: tuple[Any, ...], type_: TensorType,
    placement: Placement, operands: tuple[Placement | None, ...] | None = None, *,
    backward: bool, reason: str,
) -> fx.Node:  # fmt: skip
    """A node with its note; its operands are where its result is, if not said otherwise."""
    made = graph.call_function(target, args)
    known = meta(made)
    known.type, known.placement, known.backward, known.reason = type_, placement, backward, reason
    known.operands = (placement,) * len(tensor_operands(made)) if operands is None else operands
    return made


def _side(flat: fx.Node) -> Placement:
    """Terms before the sum, full values after it."""
    return R if meta(flat).placement == R else P


def elements(type_: TensorType) -> int:
    """The number of elements of a value of fixed size."""
    return prod(int(n) for n in type_.shape)
