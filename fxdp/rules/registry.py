"""Rules, their input (`Op`), their answers (`Alternative`), and the registry from ops to rules.

A rule is a pure function `Op -> iterable of Alternative`: the ways in which running the op on every
rank's local operands gives the local parts of the global result. "Everything replicated" is always exact and
need not be listed. The chooser (`placing/chooser.py`) adds the cost of redistributing each operand to the
placement of an alternative and takes the cheapest, so a rule never decides between a gather and a reduction
itself. A rule knows no graph and no mesh.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

from fxdp.errors import InputError
from fxdp.ir.types.decompositions import Decomposition, Rewrite
from fxdp.ir.types.placements import Dim, Placement, R, Shard
from fxdp.ir.types.sizes import axis, batch_factor, product
from fxdp.ir.types.value_types import TensorType
from fxdp.torch_compat import OpOverload, OpOverloadPacket


class Pointer(NamedTuple):
    """Fact about a value: what lies on a rank under `shard` are global row numbers of its rows of an axis.

    The fact is about values, and holds wherever these were computed. Each row of the axis may be `per` rows
    that are counted, as the `T` tokens of a sample in a dim of `T*B`.
    """

    axis: str
    shard: Shard
    per: Dim = 1

    @property
    def size(self) -> Dim:
        """The number of all rows that are counted."""
        return product(self.per, axis(self.axis).total)

    @property
    def offset(self) -> Dim:
        """The number of these rows on the ranks before this one."""
        return product(self.per, axis(self.axis).offset)


class SampleMask(NamedTuple):
    """Fact about a mask: it hides from each row those of other samples, and if `causal` later ones, no more.

    `numbers` is the name of the node with the number of each row's sample; samples are consecutive rows.
    """

    numbers: str
    causal: bool = False


class Blocks(NamedTuple):
    """Fact about a mask: the value `fill` wherever its positions along two dims are rows of different ranks.

    Both dims count the rows of one axis, each once; `samples` is what is known of it between rows of a rank.
    """

    axis: str
    dims: tuple[int, int]
    fill: float
    samples: SampleMask | None = None


@dataclass(frozen=True, slots=True)
class Operand:
    """Tensor operand in the input of a rule.

    Attributes
    ----------
    placements : the placements in which the value already exists.
    into : the axis of which the value's elements are row numbers, and the shard under which each rank has
        only numbers of its own rows, as `arange(B)` has; None for all other values.
    selects : the axes of the rows that a mask selects or that lengths repeat, on each rank of its own part;
        None where no axis may be born, so that selected rows are in full.
    gather_bytes : the bytes to gather a smaller value (before a cast or an expansion) from which the full
        value is then computed; None if the value itself is gathered.
    blocks : what is known of a mask between rows of different ranks; None for all other values.
    counts : the axis of which each element is a number of rows, one after the other, so that on each rank
        they add up to its own; None for all other values.
    """

    index: int
    type: TensorType
    placements: tuple[Placement, ...] = (R,)
    into: Pointer | None = None
    gather_bytes: int | None = None
    blocks: Blocks | None = None
    counts: str | None = None
    selects: tuple[str, ...] | None = None

    @property
    def shape(self) -> tuple[Dim, ...]:
        """The global shape."""
        return self.type.shape

    @property
    def ndim(self) -> int:
        """The number of dims."""
        return len(self.type.shape)

    @property
    def shards(self) -> tuple[Shard, ...]:
        """The sharded placements in which the value already exists."""
        return tuple(p for p in self.placements if isinstance(p, Shard))

    @property
    def batch_dims(self) -> tuple[int, ...]:
        """The dims that may be sharded: their size is a multiple of the batch."""
        return tuple(d for d, n in enumerate(self.type.shape) if batch_factor(n) is not None)


@dataclass(frozen=True, slots=True)
class Alternative:
    """One exact way to run the op: a placement per operand and per output.

    An operand of None is accepted in any placement, because its value is not read (`zeros_like`). An output
    of None is no tensor. With a decomposition, its steps run instead of the op.
    """

    inputs: tuple[Placement | None, ...]
    outputs: tuple[Placement | None, ...]
    rewrite: Rewrite | None = None
    decomposition: Decomposition | None = None


@dataclass(frozen=True, slots=True)
class Op:
    """Node as the input of a rule: tensor nodes are `Operand`s, SymInts are sympy expressions or ints.

    Lists are tuples, at any depth. `operands` lists every tensor occurrence in the order of `(args, kwargs)`,
    so an operand used twice has two entries. `outputs` has one type per result.
    """

    target: OpOverload
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    operands: tuple[Operand, ...]
    outputs: tuple[TensorType | None, ...]

    def arg(self, name: str) -> Any:
        """Return the argument called `name` in the op's schema, or its default."""
        for position, argument in enumerate(self.target._schema.arguments):
            if argument.name == name:
                if position < len(self.args):
                    return self.args[position]
                return dict(self.kwargs).get(name, argument.default_value)
        raise KeyError(f"{self.target} has no argument {name}")

    @property
    def output(self) -> TensorType:
        """The type of the only (or first) tensor result."""
        return next(t for t in self.outputs if t is not None)

    def alternative(
        self,
        inputs: Mapping[int, Placement | None] | None = None,
        outputs: Placement | tuple[Placement | None, ...] = R,
        rewrite: Rewrite | None = None,
    ) -> Alternative:
        """Return an alternative from the operands that are not R; one placement serves all tensor outputs."""
        chosen = inputs or {}
        if not isinstance(outputs, tuple):
            outputs = tuple(None if t is None else outputs for t in self.outputs)
        return Alternative(tuple(chosen.get(o.index, R) for o in self.operands), outputs, rewrite)


Rule: TypeAlias = Callable[[Op], Iterable[Alternative]]

Kind: TypeAlias = Literal["batched", "contracted", "gathered"]
"""How a rule treats a batch dim.

`batched`: the dim stays sharded. `contracted`: it stays sharded or is summed over, with a partial result.
`gathered`: the op runs replicated on every rank, because no sharded alternative is exact.
"""


@dataclass(frozen=True, slots=True)
class RegisteredRule:
    """A rule with name, family and kind (for reasons, reports and the table in the docs)."""

    name: str
    family: str
    rule: Rule
    kind: Kind = "batched"
    full: bool = True
    """True if "everything replicated" is exact; False only for ops on one part of the batch."""


class Registry:
    """Mapping from op overloads to rules."""

    def __init__(self) -> None:
        self._rules: dict[OpOverload, RegisteredRule] = {}

    def __getitem__(self, target: OpOverload) -> RegisteredRule:
        return self._rules[target]

    def get(self, target: Any) -> RegisteredRule | None:
        """Return the op's rule, or None for an op that must run replicated."""
        return self._rules.get(target)

    def targets(self) -> tuple[OpOverload, ...]:
        """Return all ops with a rule, sorted by name."""
        return tuple(sorted(self._rules, key=str))

    def add(
        self, rule: Rule, family: str, *targets: OpOverload | OpOverloadPacket,
        kind: Kind = "batched", full: bool = True, name: str = "",
    ) -> None:  # fmt: skip
        """Register `rule` for overloads, or for all functional overloads of packets; all of them or none."""
        registered = RegisteredRule(name or rule.__name__.removeprefix("_"), family, rule, kind, full)
        found = overloads(targets)
        taken = [f"{o} (rule {self._rules[o].name!r})" for o in found if o in self._rules]
        if taken:
            raise InputError(
                f"rule {registered.name!r}: {', '.join(taken)} already registered; an op has one rule. "
                "Register a rule for another op, or leave this one to the rule it has"
            )
        self._rules.update(dict.fromkeys(found, registered))

    def remove(self, *targets: OpOverload | OpOverloadPacket) -> None:
        """Remove the rules of ops; ops without a rule run replicated on every rank."""
        for overload in overloads(targets):
            self._rules.pop(overload, None)


def overloads(targets: Iterable[OpOverload | OpOverloadPacket]) -> list[OpOverload]:
    """Return the overloads among ops and packets; for a packet, the functional ones."""
    found: list[OpOverload] = []
    for target in targets:
        if isinstance(target, OpOverload):
            found.append(target)
        else:  # a packet that this torch lacks has none
            every = (getattr(target, name) for name in target.overloads())  # type: ignore[no-untyped-call]
            found += [overload for overload in every if not overload._schema.is_mutable]
    return found


registry = Registry()
"""The registry that `fxdp.compile` uses; families add their rules when `fxdp.rules` is imported."""

# moving elements, or one pass over them, costs only memory traffic; a gather uses the network
_CHEAP = frozenset({"view", "slice", "join", "pointwise"})


def is_cheap(target: Any) -> bool:
    """Return whether recomputing the op on full operands is cheaper than gathering the result."""
    found = registry.get(target)
    return found is not None and found.family in _CHEAP


def rule(
    family: str, *targets: OpOverload | OpOverloadPacket, kind: Kind = "batched", full: bool = True
) -> Callable[[Rule], Rule]:
    """Register the decorated rule for ops, under the name of a family."""

    def register(function: Rule) -> Rule:
        registry.add(function, family, *targets, kind=kind, full=full)
        return function

    return register


def runs_replicated(name: str, family: str, *targets: OpOverload | OpOverloadPacket) -> None:
    """Register ops for which only "everything replicated" is exact, so that they do not count as unknown."""
    registry.add(lambda op: (), family, *targets, kind="gathered", name=name)
