"""Metadata of graph nodes: everything that fxdp knows about a node.

Passes access `node.meta` through this file only. A node's `Metadata` holds its type (shape in `B`, dtype),
the input spec of a program input, the source line, and after analysis the placement, the placements that the
operands must have, and the reason.
"""

from __future__ import annotations

import linecache
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any

import torch
from torch import fx

from fxdp.ir.graph.signature import InputSpec, OutputSpec
from fxdp.ir.types.decompositions import Decomposition, Rewrite
from fxdp.ir.types.placements import Placement
from fxdp.ir.types.sizes import hint
from fxdp.ir.types.value_types import NodeType, ScalarType, TensorType, type_bytes
from fxdp.torch_compat import OpOverload, aten

_KEY = "fxdp"
_LAYOUT, _OPEN_LAYOUT = "fxdp_layout", "fxdp_open_layout"


@dataclass(frozen=True, slots=True)
class Location:
    """Location of a node in the user's code."""

    file: str = ""
    line: int = 0
    code: str = ""
    """The text of the line."""
    module: str = ""
    """The path of the module whose `forward` the line belongs to."""

    @classmethod
    def at(cls, file: str, line: int, module: str = "") -> Location:
        """Return the location of a line of a file, with its text."""
        return cls(file, line, linecache.getline(file, line).strip(), module)

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}" if self.file else "<unknown>"
        code = f" `{self.code}`" if self.code else ""
        module = f" in {self.module}" if self.module else ""
        return f"{where}{code}{module}"

    @property
    def where(self) -> str:
        """The beginning of an error, `at model.py:12 ...`, or `in the model` if the location is unknown."""
        return f"at {self}" if self.file else "in the model"


UNKNOWN = "unknown"
"""The reason of an op without a sharding rule."""


@dataclass(frozen=True, slots=True)
class Cause:
    """Cause of a collective: the op that needs the result, the redistributed value, and the user's line.

    Attributes
    ----------
    gradient : True if the collective reduces gradients of parameters.
    members : the causes of several values that travel together.
    elements : the number of elements that travel, if a value is cut into several messages; None: all.
    """

    consumer: str
    producer: str
    location: Location
    text: str = ""
    gradient: bool = False
    members: tuple[Cause, ...] = ()
    elements: int | None = None

    @property
    def each(self) -> tuple[Cause, ...]:
        """The causes of all values that travel; at least one."""
        return self.members or (self,)

    @property
    def words(self) -> str:
        """The text without the line of code, for output that shows the line beside it."""
        return self.text.replace(f" in `{self.location.code}`", "")


def members_of(causes: Iterable[Cause]) -> tuple[Cause, ...]:
    """Return the causes of all values in several messages, without duplicates."""
    return tuple(dict.fromkeys(one for cause in causes for one in cause.each))


@dataclass(slots=True)
class Metadata:
    """Everything that fxdp records about one node."""

    type: NodeType = None
    spec: InputSpec | None = None
    results: tuple[OutputSpec | None, ...] = ()  # output node only: one per result
    location: Location = field(default_factory=Location)
    backward: bool = False
    placement: Placement | tuple[Placement | None, ...] | None = None
    operands: tuple[Placement | None, ...] = ()  # one per tensor operand, in `fx` argument order
    reason: str | None = None
    """The name of the rule that chose the placement."""
    cause: Cause | None = None
    rematerialized: bool = False  # the full value is computed from full operands, not gathered
    skip: str | None = None  # names of the skip connections that carry this value: `a`, `a@1`, or `a, b`
    decomposed_from: str = ""  # the op of whose decomposition this is a step
    decomposition: Decomposition | None = None  # the ops that replace this one
    stage: int | None = None  # pipeline stage; None: unstaged, or on no single stage
    once: bool = False  # runs once per step, after the last micro-batch
    exchanged: bool = False  # runs once per step, between rounds of blocks
    rewrite: Rewrite | None = None  # how a rule localizes the op's size arguments
    recompute: str = ""  # `computed`: recomputed in the backward, from values that are `saved`
    draws_for: MemoryLayout | None = None  # layout at capture for which a random op draws, if it differs now
    draw: int | None = None  # number among the program's random ops, of which each has a seed of its own

    @property
    def types(self) -> tuple[TensorType | ScalarType | None, ...]:
        """The types of the node's results, as a tuple even for a single one."""
        return self.type if isinstance(self.type, tuple) else (self.type,)

    @property
    def placements(self) -> tuple[Placement | None, ...]:
        """The placements of the node's results, as a tuple even for a single one."""
        return self.placement if isinstance(self.placement, tuple) else (self.placement,)


def meta(node: fx.Node) -> Metadata:
    """Return the metadata of a node, created on first use."""
    found: Metadata | None = node.meta.get(_KEY)
    if found is None:
        found = node.meta[_KEY] = Metadata()
    return found


def tensor_type(node: fx.Node) -> TensorType:
    """Return the type of a node that is one tensor."""
    type_ = meta(node).type
    assert isinstance(type_, TensorType), f"%{node.name} is no tensor"
    return type_


def placed_tensor(node: fx.Node) -> tuple[TensorType, Placement]:
    """Return the type and placement of a node that is one tensor."""
    placement = meta(node).placement
    assert placement is not None, f"%{node.name} is not placed"
    assert not isinstance(placement, tuple), f"%{node.name} is several tensors"
    return tensor_type(node), placement


def has_no_rule(node: fx.Node) -> bool:
    """Return whether a node runs replicated on every rank because the op has no sharding rule."""
    return meta(node).reason == UNKNOWN


def value_bytes(node: fx.Node, batch: int = 64) -> int:
    """Return the bytes of a node's global value at typical sizes, as counted by `type_bytes`."""
    return type_bytes(meta(node).type, batch=batch)


def copy_meta(source: fx.Node, target: fx.Node, **changes: Any) -> Metadata:
    """Give `target` a copy of `source`'s metadata with `changes`, as passes do for inserted nodes."""
    # by position: `dataclasses.replace` takes three times as long, and entire graphs are copied
    new = target.meta[_KEY] = Metadata(*_FIELDS(meta(source)))
    for name, value in changes.items():
        setattr(new, name, value)
    return new


_FIELDS = attrgetter(*(field.name for field in fields(Metadata)))


def sequence_number(node: fx.Node) -> int | None:
    """Return torch's sequence number of the forward op that a node computes or differentiates."""
    number: int | None = node.meta.get("seq_nr")
    return number


@dataclass(frozen=True, slots=True)
class MemoryLayout:
    """Memory layout of a captured value, as ints, or as expressions in torch's own size symbols."""

    sizes: tuple[Any, ...]
    strides: tuple[Any, ...]
    offset: Any


def memory_layout(node: fx.Node) -> MemoryLayout | None:
    """Return the symbolic layout of a captured node's value, or None if capture recorded none."""
    kept: MemoryLayout | None = node.meta.get(_OPEN_LAYOUT)
    return kept or _layout(node, "expr")


def example_layout(node: fx.Node) -> MemoryLayout | None:
    """Return the layout of the example's value in numbers; sizes that depend on data are None."""
    kept: MemoryLayout | None = node.meta.get(_LAYOUT)
    return kept or _layout(node, "hint")


def typical_layout(node: fx.Node) -> MemoryLayout | None:
    """Return the layout of the example's value; sizes that depend on data get a typical number."""
    found, open_ = example_layout(node), memory_layout(node)
    if found is None or open_ is None or None not in (*found.sizes, *found.strides):
        return found
    sizes, strides = (tuple(max(1, hint(n)) for n in given) for given in (open_.sizes, open_.strides))
    return MemoryLayout(sizes, strides, open_.offset)


def keep_layout(node: fx.Node) -> None:
    """Replace the captured example value, with sizes of one example, by its memory layout."""
    node.meta[_LAYOUT] = _layout(node, "hint")
    node.meta.pop("val", None)


def layouts(node: fx.Node) -> tuple[MemoryLayout | None, MemoryLayout | None]:
    """Return the known layouts of a node's value: the symbolic one and the example's."""
    return memory_layout(node), example_layout(node)


def set_layouts(node: fx.Node, known: tuple[MemoryLayout | None, MemoryLayout | None]) -> None:
    """Set the layouts of a node that has no example value: the symbolic one and the example's."""
    for key, layout in zip((_OPEN_LAYOUT, _LAYOUT), known, strict=True):
        if layout is not None:
            node.meta[key] = layout


def _layout(node: fx.Node, numbers: str) -> MemoryLayout | None:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return None
    sizes, strides = (
        tuple(getattr(getattr(n, "node", None), numbers, n) for n in found)
        for found in (value.shape, value.stride())
    )
    offset = value.storage_offset()
    return MemoryLayout(sizes, strides, getattr(getattr(offset, "node", None), numbers, offset))


def tensor_operands(node: fx.Node) -> list[fx.Node]:
    """Return the nodes from which `node` reads tensors, in argument order, repeated if used twice.

    `meta(node).operands` has one placement for each. The tuple that a `getitem` reads is no tensor operand.
    """
    found: list[fx.Node] = []

    def visit(argument: fx.Node) -> fx.Node:
        if isinstance(meta(argument).type, TensorType):
            found.append(argument)
        return argument

    fx.map_arg((node.args, node.kwargs), visit)
    return found


_READS_SIZE = frozenset(
    {
        aten.sym_size.int,
        aten.sym_numel.default,
        aten.sym_stride.int,
        aten.sym_storage_offset.default,
    }
)


def is_host_size(node: fx.Node) -> bool:
    """Return whether the node is arithmetic on sizes: an expression, which is not executed as captured.

    A number read from a tensor's values (`.item()`) is no host size.
    """
    if node.op != "call_function" or not isinstance(meta(node).type, ScalarType):
        return False
    return node.target in _READS_SIZE or not isinstance(node.target, OpOverload)
