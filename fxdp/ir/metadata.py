"""What fxdp knows of a graph node. Passes touch `node.meta` through this file only.

A node's `Metadata` holds its type (shape in `B`, dtype), its slot if it is an input of the program, its
source line, and after analysis its placement, the placements its operands must have, and the reason.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any

import torch
from torch import fx

from fxdp.ir.decompositions import Decomposition, Rewrite
from fxdp.ir.placements import Placement
from fxdp.ir.signature import InputSpec, OutputSpec
from fxdp.ir.sizes import hint
from fxdp.ir.types import NodeType, ScalarType, TensorType, type_bytes
from fxdp.torch_compat import OpOverload, aten

_KEY = "fxdp"
_LAYOUT, _OPEN_LAYOUT = "fxdp_layout", "fxdp_open_layout"


@dataclass(frozen=True, slots=True)
class Location:
    """Where in the user's code a node comes from."""

    file: str = ""
    line: int = 0
    code: str = ""
    """The line itself."""
    module: str = ""
    """The path of the module whose forward it belongs to."""

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}" if self.file else "<unknown>"
        code = f" `{self.code}`" if self.code else ""
        module = f" in {self.module}" if self.module else ""
        return f"{where}{code}{module}"

    @property
    def where(self) -> str:
        """`at model.py:12 ...`, as the first words of an error; of an unknown one, `in the model`."""
        return f"at {self}" if self.file else "in the model"


UNKNOWN = "unknown"
"""The rule of an op without one."""


@dataclass(frozen=True, slots=True)
class Cause:
    """Why a collective exists: the op that needs it, the value it converts, and the user's line.

    `gradient`: it reduces gradients of parameters. `members`: of several values that travel together, the
    cause of each; `each` has at least one. `elements`: how many of the value's travel, where it is cut into
    several messages; None: all.
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
        """The causes of all values that travel, those of one alone included."""
        return self.members or (self,)

    @property
    def words(self) -> str:
        """The text without the line of code, for where that stands beside it."""
        return self.text.replace(f" in `{self.location.code}`", "")


def members_of(causes: Iterable[Cause]) -> tuple[Cause, ...]:
    """The causes of all values in several messages, each once."""
    return tuple(dict.fromkeys(one for cause in causes for one in cause.each))


@dataclass(slots=True)
class Metadata:
    """All that fxdp keeps of one node."""

    type: NodeType = None
    spec: InputSpec | None = None
    results: tuple[OutputSpec | None, ...] = ()  # on the output node only, one per result
    location: Location = field(default_factory=Location)
    backward: bool = False
    placement: Placement | tuple[Placement | None, ...] | None = None
    operands: tuple[Placement | None, ...] = ()  # one per tensor operand, in `fx` argument order
    reason: str | None = None
    """Why it has its placement: the name of a rule."""
    cause: Cause | None = None
    rematerialized: bool = False  # its full value is computed from its operands' full values, not gathered
    skip: str | None = None  # which skip connections carry this value: `a`, `a@1`, or `a, b`
    decomposed_from: str = ""  # the op of which this is a step
    decomposition: Decomposition | None = None  # the ops that run instead
    stage: int | None = None  # of a program that is cut into stages; None: belongs to no single one
    once: bool = False  # runs once per step, after the last micro-batch
    rewrite: Rewrite | None = None  # how a rule wants its size arguments localized
    recompute: str = ""  # `computed`: also in the backward, from what is `saved`
    draws_for: MemoryLayout | None = None  # what a random op draws for, where it lies other than was captured

    @property
    def types(self) -> tuple[TensorType | ScalarType | None, ...]:
        """One per value that the node gives."""
        return self.type if isinstance(self.type, tuple) else (self.type,)

    @property
    def placements(self) -> tuple[Placement | None, ...]:
        """The same of where they lie."""
        return self.placement if isinstance(self.placement, tuple) else (self.placement,)


def meta(node: fx.Node) -> Metadata:
    """The note of a node, made on first use."""
    found: Metadata | None = node.meta.get(_KEY)
    if found is None:
        found = node.meta[_KEY] = Metadata()
    return found


def tensor_type(node: fx.Node) -> TensorType:
    """The type of a node that is one tensor."""
    type_ = meta(node).type
    assert isinstance(type_, TensorType), f"%{node.name} is no tensor"
    return type_


def placed_tensor(node: fx.Node) -> tuple[TensorType, Placement]:
    """The type and placement of a node that is one tensor."""
    placement = meta(node).placement
    assert placement is not None, f"%{node.name} is not placed"
    assert not isinstance(placement, tuple), f"%{node.name} is several tensors"
    return tensor_type(node), placement


def has_no_rule(node: fx.Node) -> bool:
    """Whether a node runs replicated on every rank because no rule knows its op."""
    return meta(node).reason == UNKNOWN


def value_bytes(node: fx.Node, batch: int = 64) -> int:
    """The bytes of a node's global value at typical sizes, as `type_bytes` counts them."""
    return type_bytes(meta(node).type, batch=batch)


def copy_meta(source: fx.Node, target: fx.Node, **changes: Any) -> Metadata:
    """Give `target` a copy of `source`'s note with `changes`; what a pass does to a node it makes."""
    # by place: `dataclasses.replace` takes thrice as long, and full graphs are copied
    new = target.meta[_KEY] = Metadata(*_FIELDS(meta(source)))
    for name, value in changes.items():
        setattr(new, name, value)
    return new


_FIELDS = attrgetter(*(field.name for field in fields(Metadata)))


def sequence_number(node: fx.Node) -> int | None:
    """The number that torch gave to the forward op which a node computes or differentiates."""
    number: int | None = node.meta.get("seq_nr")
    return number


@dataclass(frozen=True, slots=True)
class MemoryLayout:
    """How a captured value lay in memory: ints, or expressions in torch's own size symbols."""

    sizes: tuple[Any, ...]
    strides: tuple[Any, ...]
    offset: Any


def memory_layout(node: fx.Node) -> MemoryLayout | None:
    """The layout of a captured node's value, where capture kept it."""
    kept: MemoryLayout | None = node.meta.get(_OPEN_LAYOUT)
    return kept or _layout(node, "expr")


def example_layout(node: fx.Node) -> MemoryLayout | None:
    """The same in numbers, as it was for the example; a size that only the data fixes is None."""
    kept: MemoryLayout | None = node.meta.get(_LAYOUT)
    return kept or _layout(node, "hint")


def typical_layout(node: fx.Node) -> MemoryLayout | None:
    """The same with some number for a size that only the data fixes."""
    found, open_ = example_layout(node), memory_layout(node)
    if found is None or open_ is None or None not in (*found.sizes, *found.strides):
        return found
    sizes, strides = (tuple(max(1, hint(n)) for n in given) for given in (open_.sizes, open_.strides))
    return MemoryLayout(sizes, strides, open_.offset)


def keep_layout(node: fx.Node) -> None:
    """Drop the captured value, whose sizes are one example's, and keep how it lay in memory."""
    node.meta[_LAYOUT] = _layout(node, "hint")
    node.meta.pop("val", None)


def layouts(node: fx.Node) -> tuple[MemoryLayout | None, MemoryLayout | None]:
    """The layouts that are known of a node's value, open and of the example."""
    return memory_layout(node), example_layout(node)


def set_layouts(node: fx.Node, known: tuple[MemoryLayout | None, MemoryLayout | None]) -> None:
    """Let the node have these layouts, and no value."""
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
    """The nodes that `node` reads tensors from, in argument order, repeated where used twice.

    `note(node).operands` has one placement for each. (The tuple that a `getitem` reads is none.)
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
    """Whether the node is arithmetic on sizes: an expression, which is not executed as captured.

    A number read from a tensor's values (`.item()`) is none.
    """
    if node.op != "call_function" or not isinstance(meta(node).type, ScalarType):
        return False
    return node.target in _READS_SIZE or not isinstance(node.target, OpOverload)
