"""`Facts`: what is known of the values of nodes, whatever ranks compute these.

All of it follows from what the inputs mean by contract (`fxdp.Rows`), checked at each call:

    row numbers          read and written on the rank that has the row           `pointers.py`
    packed samples       equal numbers of samples are on one rank alone          `packed_samples.py`
    selected rows        are an axis, and each rank's are of its own part        `selections.py`
    masks between these  one value wherever row and column are of two ranks      `blocks.py`
    numbers of rows      where each begins, and the row number that has each     `row_counts.py`
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import fx

from fxdp.ir.graph.metadata import meta, tensor_type
from fxdp.ir.types.placements import Placement, R, Shard
from fxdp.ir.types.sizes import Meaning, axis_of
from fxdp.ir.types.value_types import TensorType
from fxdp.placing.blocks import Masks
from fxdp.placing.iota import iota_dim
from fxdp.placing.packed_samples import PackedSamples, Positions
from fxdp.placing.pointers import pointer_of
from fxdp.placing.row_counts import RowCounts
from fxdp.placing.selections import BornAxes, SelectedRows
from fxdp.rules.registry import Blocks, Operand, Pointer


@dataclass(slots=True)
class Facts:
    """What is known of the values of nodes; `meanings` of the inputs, by index, of a ragged batch.

    `born` are the axes born inside the graph; None where none may be.
    """

    meanings: Sequence[Meaning | None] = ()
    born: BornAxes | None = None
    iota: dict[fx.Node, int] = field(default_factory=dict)
    pointers: dict[fx.Node, Pointer] = field(default_factory=dict)
    counts: RowCounts = field(default_factory=RowCounts)
    selections: SelectedRows = field(init=False)
    samples: PackedSamples = field(init=False)
    masks: Masks = field(init=False)

    def __post_init__(self) -> None:
        """Make what depends on earlier facts."""
        self.selections = SelectedRows(self.pointers, self.born)
        self.samples = PackedSamples(self.pointers, self.iota)
        self.masks = Masks(self.samples)

    @property
    def blocks(self) -> Mapping[fx.Node, Blocks]:
        """What is known of masks between ranks."""
        return self.masks.blocks

    def operand(
        self, index: int, node: fx.Node, placements: tuple[Placement, ...] = (R,), bytes_: int | None = None
    ) -> Operand:
        """Return a node as the operand of a rule."""
        return Operand(
            index, tensor_type(node), placements, self.pointers.get(node), bytes_, self.blocks.get(node),
            self.counts.axis_of(node), self.selections.axes_of(node),
        )  # fmt: skip

    def learn_input(self, node: fx.Node, index: int, placement: Placement) -> None:
        """Note what the values of an input mean."""
        meaning = self.meanings[index] if index < len(self.meanings) else None
        if meaning is None or not isinstance(placement, Shard):
            return
        if meaning.kind == "into":
            self.pointers[node] = Pointer(meaning.axis, placement)
        elif meaning.kind == "within":
            self.samples.positions[node] = Positions(node, placement)
        else:
            self.counts.learn_input(node, meaning.axis)

    def learn(self, node: fx.Node) -> None:
        """Find out what is known of the result of a call, from what is known of earlier nodes."""
        if self.selections.learn(node):
            return
        dim = iota_dim(node, self.iota)
        if dim is not None:
            self.iota[node] = dim
            along = axis_of(tensor_type(node).shape[dim])
            if along is not None and along.is_contiguous:
                self.pointers[node] = Pointer(along.name, Shard(dim))
        elif (self.meanings or self.selections.any) and isinstance(meta(node).type, TensorType):
            self._learn_of_ragged(node)

    def _learn_of_ragged(self, node: fx.Node) -> None:
        self.counts.learn(node, self.iota)
        number = self.counts.pointer_of(node)
        if (pointer := number or pointer_of(node, self.pointers, self.selections)) is not None:
            self.pointers[node] = pointer
        self.samples.learn(node, is_number=number is not None)
        self.masks.learn(node)
