"""Results of capture: the joint graph, and the way from the graph's results to the model's output."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import sympy
import torch
from torch import fx
from torch.utils._pytree import TreeSpec

from fxdp.capture.external_places import ExternalPlace, ReadState
from fxdp.capture.input_axes import ONE_AXIS, InputAxes
from fxdp.capture.locations import Origin
from fxdp.ir.graph.metadata import Location

Otherwise: TypeAlias = Literal["raises", "branches", "not finite", "other number"]
"""How the user's code continues after a failed check.

`raises`: the code raises; `branches`: the code takes a branch that is compiled as a separate program;
`not finite`: the code takes a branch for values that are not finite; `other number`: the code reads a number
that differs from the number in the program.
"""


@dataclass(frozen=True)
class SideEffect:
    """What a line of the user's code does beside computing, as a verb with its object."""

    words: str
    location: Location


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
    """A condition on sizes that the model's Python code evaluated and that the program relies on."""

    expr: sympy.Basic
    location: Location
    refusal: str = ""
    """The error of eager code if the condition is false; empty if eager code would take another branch."""

    def holds(self, sizes: dict[sympy.Symbol, int]) -> bool:
        """Return whether the condition holds at these sizes; symbols without a size count as fulfilled."""
        value = self.expr.xreplace({symbol: sympy.Integer(size) for symbol, size in sizes.items()})
        return bool(value != sympy.false)


@dataclass(frozen=True, slots=True)
class Route:
    """A skip connection: the locations at which a tensor is stashed and popped, with their module paths.

    In the joint graph a skip connection is an ordinary edge; the metadata of the node that computes the
    tensor has `key` as `skip`.
    """

    namespace: int | None
    """Number of the namespace, counted from 1 in the order of appearance; None for the default namespace."""
    name: str
    stash: Location
    pop: Location

    @property
    def key(self) -> str:
        """Return `name` in the default namespace, and for example `name@1` in another one."""
        return self.name if self.namespace is None else f"{self.name}@{self.namespace}"


@dataclass(frozen=True, slots=True)
class Check:
    """A check of data in the user's code: tensor output `output` of the program must equal `passes`."""

    output: int
    passes: bool
    otherwise: Otherwise
    """How the user's code continues if the check fails."""
    location: Location

    @property
    def branch(self) -> bool:
        """Return whether the failing branch is compiled as a separate program."""
        return self.otherwise == "branches"


@dataclass(frozen=True, slots=True)
class LayoutRead:
    """A location at which the user's code reads the memory layout of a tensor."""

    how: str
    """Name of the function that reads the layout."""
    location: Location
    offset: bool = False
    """True if the result of the function depends on the tensor's storage offset."""
    of: int | None = None
    """Index of the input that is read; None for a tensor that may be computed from any input."""


@dataclass(frozen=True, slots=True, eq=False)
class ReadValue:
    """A tensor that is no input, parameter or buffer, and that the user's code reads into Python by value."""

    tensor: torch.Tensor
    location: Location


@dataclass(frozen=True, slots=True)
class LeftStrategy:
    """A strategy of capture (`capture_strategies.py`) before the one that worked, and why it was left."""

    name: str
    reason: str
    """What it failed with, and where; of one that was not tried, what it is for."""
    tried: bool

    def __str__(self) -> str:
        return f"{self.name}: {self.reason if self.tried else f'not tried, it is for {self.reason}'}"


@dataclass(frozen=True)
class Captured:
    """One flat joint graph in global shapes, and the way back to the model's inputs and outputs."""

    gm: fx.GraphModule
    leaves: tuple[Any, ...]
    """For each leaf of the model's output: `OutputLeaf`, `SizeLeaf`, or the plain Python value."""
    out_spec: TreeSpec
    detached: tuple[int, ...] = ()
    """Indices of outputs that got no tangent although they depend on parameters."""
    symbols: dict[str, tuple[int, int]] = field(default_factory=dict)
    """For each further dynamic size (`s0`, ...), where to read the value: index of an input, dim."""
    batch: tuple[int | None, ...] = ()
    """The batch dim of each tensor input."""
    axes: InputAxes = ONE_AXIS
    """The batch axis of each tensor input, and into which axis its values point."""
    constants: dict[str, torch.Tensor] = field(default_factory=dict)
    """The tensors of the graph's `Constant` inputs."""
    conditions: tuple[Condition, ...] = ()
    """Conditions on the sizes that do not hold for every batch of at least 2."""
    routes: tuple[Route, ...] = ()
    """The skip connections, in the order of their stashes."""
    checks: tuple[Check, ...] = ()
    """Checks on outputs beyond the model's own, at which the model's code raises or branches."""
    static: bool = False
    """True if the model fixed the batch size and the graph was fitted from several static traces."""
    numbers: tuple[str, ...] = ()
    """Names of the buffers to whose values the program is specialized."""
    read_values: tuple[ReadValue, ...] = ()
    """Further tensors to whose values the program is specialized."""
    layout_reads: tuple[LayoutRead, ...] = ()
    """Locations at which the model's code reads memory layouts of tensors."""
    origin: Origin = field(default_factory=Origin)
    """The user's lines behind nodes that have no user line of their own."""
    model: str = ""
    """Name of the model's class."""
    read: ReadState = field(default_factory=ReadState)
    """External Python state that the model's code may read: all state outside of module attributes."""
    written: tuple[tuple[int, Any], ...] = ()
    """Keys (`ExternalPlace.known_by`) of the places in `read` that the model's code itself changes."""
    beside: tuple[SideEffect, ...] = ()
    """What the model's code does beside computing, and a program does not: output, files, draws in Python."""
    words: tuple[tuple[ExternalPlace, str], ...] = ()
    """Places in which each call leaves a constant string of the code, with the string."""
    strategy: str = "symbolic"
    """Strategy that captured the model; after a comma, that by which its changed program was traced."""
    left: tuple[LeftStrategy, ...] = ()
    """The strategies before that one, with the reasons why they were left."""

    @property
    def branches(self) -> tuple[bool, ...]:
        """Return which branch the program takes at each flag of the batch that the code branches on."""
        return tuple(check.passes for check in self.checks if check.branch)

    def reasons(self, *, every: bool = False) -> tuple[str, ...]:
        """Say which strategy captured the model and why those before it were left; nothing for the first one.

        `every`: list strategies that were not tried, too.
        """
        if not self.left:
            return ()
        left = (f"  {one}" for one in self.left if one.tried or every)
        return (f"captured by {self.strategy}, after", *left)
