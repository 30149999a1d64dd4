"""What capture hands on: the joint graph and how its results become the model's own output."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import sympy
import torch
from torch import fx
from torch.utils._pytree import TreeSpec

from fxdp.capture.external_places import ExternalPlace, ReadState
from fxdp.capture.locations import Origin
from fxdp.ir.metadata import Location

Otherwise: TypeAlias = Literal["raises", "branches", "not finite", "other number"]
"""What the code does where a check fails: it raises, goes a way that is a program of its own or one for
values that are not finite, or goes on with another number than the program has."""


@dataclass(frozen=True, slots=True)
class OutputLeaf:
    """A leaf of the model's output that is tensor output `index` of the program."""

    index: int


@dataclass(frozen=True, slots=True)
class SizeLeaf:
    """A leaf of the model's output that is a host number computed from sizes, as `x.shape[0]`."""

    expr: sympy.Expr


@dataclass(frozen=True, slots=True)
class Condition:
    """What the model's Python code asked of the sizes and the program therefore relies on."""

    expr: sympy.Basic
    location: Location
    refusal: str = ""
    """What eager code says where it does not hold; empty where it would go another way."""

    def holds(self, sizes: dict[sympy.Symbol, int]) -> bool:
        """Whether it holds at these sizes; unknown symbols count as fulfilled."""
        value = self.expr.xreplace({symbol: sympy.Integer(size) for symbol, size in sizes.items()})
        return bool(value != sympy.false)


@dataclass(frozen=True, slots=True)
class Route:
    """A skip connection: where its tensor is stashed and where it is popped, each with the module's path.

    In the joint graph it is an ordinary edge; the note of the node that makes its value has `key` as `skip`.
    """

    namespace: int | None
    """Which of the model's namespaces, counted from 1 as they appear; None is the default one."""
    name: str
    stash: Location
    pop: Location

    @property
    def key(self) -> str:
        """`name` in the default namespace, `name@1` in another."""
        return self.name if self.namespace is None else f"{self.name}@{self.namespace}"


@dataclass(frozen=True, slots=True)
class Check:
    """A check of data in the user's code: tensor output `output` of the program must be `passes`."""

    output: int
    passes: bool
    otherwise: Otherwise
    """What the user's code does otherwise."""
    location: Location

    @property
    def branch(self) -> bool:
        """Whether the other way is a program of its own."""
        return self.otherwise == "branches"


@dataclass(frozen=True, slots=True)
class LayoutRead:
    """A place at which the user's code reads how a tensor lies in memory."""

    how: str
    """The function that reads it."""
    location: Location
    offset: bool = False
    """Whether it tells where in its storage the tensor begins."""
    of: int | None = None
    """The input that is read; None: what may be computed of any."""


@dataclass(frozen=True, slots=True, eq=False)
class ReadValue:
    """A tensor outside of inputs, parameters and buffers whose value the user's code reads into Python."""

    tensor: torch.Tensor
    location: Location


@dataclass(frozen=True)
class Captured:
    """One flat joint graph in global shapes, and the way back to the model's inputs and outputs."""

    gm: fx.GraphModule
    leaves: tuple[Any, ...]
    """One per leaf of the model's output: `OutputLeaf`, `SizeLeaf`, or the plain Python value."""
    out_spec: TreeSpec
    detached: tuple[int, ...] = ()
    """Outputs that got no tangent although they depend on parameters."""
    symbols: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Where the value of a further dynamic size (`s0`, ...) is read: input index, dim."""
    batch: tuple[int | None, ...] = ()
    """The batch dim of each tensor input."""
    constants: dict[str, torch.Tensor] = field(default_factory=dict)
    """The tensors of the `Constant` slots."""
    conditions: tuple[Condition, ...] = ()
    """Conditions on the sizes that do not hold for every batch of at least 2."""
    routes: tuple[Route, ...] = ()
    """The skip connections, in the order of their stashes."""
    checks: tuple[Check, ...] = ()
    """Outputs beyond the model's own: what its code raises on."""
    static: bool = False
    """Whether the model fixed its batch size and the graph was fitted from several static traces."""
    numbers: tuple[str, ...] = ()
    """The buffers whose values the program was made for."""
    read_values: tuple[ReadValue, ...] = ()
    """The tensors beside these for whose values it was made, too."""
    layout_reads: tuple[LayoutRead, ...] = ()
    """Where the model's code reads how its tensors lie."""
    origin: Origin = field(default_factory=Origin)
    """The user's lines that stand behind nodes without one of their own."""
    model: str = ""
    """The class of the model."""
    read: ReadState = field(default_factory=ReadState)
    """What the model's code may read of Python beside its modules' attributes."""
    written: tuple[tuple[int, Any], ...] = ()
    """The places of these that it changes itself, by what they are known by."""
    words: tuple[tuple[ExternalPlace, str], ...] = ()
    """The words that its first call leaves in some of them, as each later one does."""

    @property
    def branches(self) -> tuple[bool, ...]:
        """Which way the program goes at each flag of the batch that the code branches on."""
        return tuple(check.passes for check in self.checks if check.branch)
