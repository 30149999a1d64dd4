"""Builder of one rank's program: calls, values by name and micro-batch, transfers and their tags."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch
from torch import fx

from fxdp.ir.network import raw_bytes
from fxdp.ir.ops.parameter_shards import shard_rows
from fxdp.ir.types.placements import ParamShard, Placement
from fxdp.ir.types.sizes import evaluate
from fxdp.ir.types.value_types import TensorType, local_shape
from fxdp.pipeline.write.events import Events
from fxdp.runtime import p2p
from fxdp.runtime.streams import P2P_BACKWARD, P2P_FORWARD, REDUCE

_WINDOW = 2
"""Sends to one rank that may be in flight before the program waits for the oldest."""


ValueType = tuple[list[int], torch.dtype]
"""Shape and dtype of a value on a rank."""
_Origin = tuple[int, int]
"""Stage and micro-batch of the forward that computed a value."""


@dataclass(frozen=True)
class Sent:
    """One transfer between pipeline ranks, of one micro-batch or of the step, for the plan."""

    name: str
    source: int
    target: int
    bytes: int
    backward: bool
    tag: int = 0
    """Number of the transfer in the step, equal at both ends."""
    values: tuple[str, ...] = ()
    """Names of the values in the transfer; several if results travel in one buffer of bytes."""


@dataclass(frozen=True)
class Message:
    """A message between two pipeline ranks, as known at both ends."""

    name: str
    shape: Sequence[int]
    dtype: torch.dtype
    tag: int
    """Number that is equal at both ends, and unique among the transfers of the step."""
    backward: bool
    row: str = ""
    """Name in the plan, if different from `name`."""
    values: tuple[str, ...] = ()
    """Names of the contained values, if not the single value `name`."""


def waits(node: fx.Node) -> bool:
    """Return whether a node of a step waits for a transfer (the first argument)."""
    return node.target is p2p.wait


@dataclass
class StepGraph:
    """Builder of one rank's graph.

    `sizes` are the values of the size symbols in each micro-batch, and in the full local batch under None;
    `sharding` are the (ranks, index) pairs of sharded parameters, over data ranks and then over pipeline
    ranks; `parallel` is True if several data ranks share the batch, so that sums go over ranks.
    """

    rank: int
    sizes: Mapping[int | None, Mapping[str, int]]
    sharding: tuple[tuple[int, int], ...] = ((1, 0),)
    parallel: bool = False
    graph: fx.Graph = field(default_factory=fx.Graph)
    sent: list[Sent] = field(default_factory=list)
    tag: int = 0
    """Number of the last transfer; each transfer takes the next number, equally on all ranks."""
    _values: dict[tuple[str, int | None], fx.Node] = field(default_factory=dict)
    _roots: dict[str, tuple[fx.Node, ...]] = field(default_factory=dict)
    _pending: dict[tuple[str, int | None], fx.Node] = field(default_factory=dict)
    _in_flight: dict[int, list[tuple[fx.Node, _Origin | None]]] = field(default_factory=dict)
    _events: Events = field(init=False)

    def __post_init__(self) -> None:
        self._events = Events(self.graph)

    def input(self, name: str) -> fx.Node:
        """Add an input of the program, ready when compute begins."""
        node = self.graph.placeholder(name)
        self._events.given(node)
        return node

    def module(self, target: str, args: tuple[Any, ...], name: str) -> fx.Node:
        """Add a call of one of the program's modules."""
        node = self.graph.create_node("call_module", target, args, {}, name=name)
        self._events.given(node)
        return node

    def _on(self, target: str, stream: str, args: tuple[Any, ...], name: str) -> fx.Node:
        """Add a call on any stream except compute, after everything on compute so far."""
        self._events.order(stream)
        return self.graph.create_node("call_module", target, args, {"stream": stream}, name=name)

    def reduce(self, target: str, args: tuple[Any, ...], name: str) -> fx.Node:
        """Add a call on the reduce stream; `value` and `end` wait for the result."""
        node = self._on(target, REDUCE, args, name)
        self._events.reduces(node)
        return node

    def function(self, target: Any, args: tuple[Any, ...], name: str) -> fx.Node:
        """Add a call of a function, usually one of `runtime/p2p.py`."""
        node = self.graph.create_node("call_function", target, args, {}, name=name)
        self._events.given(node)
        return node

    def item(self, node: fx.Node, index: int, name: str) -> fx.Node:
        """Add an access to one result of a call, which runs nothing."""
        return self.graph.create_node("call_function", operator.getitem, (node, index), {}, name=name)

    def keep(self, name: str, microbatch: int | None, value: fx.Node) -> None:
        """Bind a name to a value from here on."""
        self._values[name, microbatch] = value

    def keep_roots(self, name: str, roots: tuple[fx.Node, ...]) -> None:
        """Bind a name to this rank's roots of the tree in which blocks are summed."""
        self._roots[name] = roots

    def total(self, name: str) -> fx.Node | tuple[fx.Node, ...]:
        """Return a value of the step, or its roots; on one data rank, whose only root is the sum, the sum."""
        roots = self._roots.get(name)
        if roots is None:
            return self.value(name, None)
        return roots if self.parallel else roots[0]

    def keep_items(self, made: fx.Node, names: Sequence[str]) -> None:
        """Bind names to the results of a call, as values of the step."""
        for index, name in enumerate(names):
            self.keep(name, None, self.item(made, index, name))

    def value(self, name: str, microbatch: int | None) -> fx.Node:
        """Return the value with this name, after a wait if the receive is still in flight.

        A name without a value for the micro-batch refers to the value of the step.
        """
        key = (name, microbatch)
        if key not in self._values and key not in self._pending:
            key = (name, None)
        if key in self._pending:
            pending = self._pending.pop(key)
            self._values[key] = self.function(p2p.wait, (pending,), f"{name}{suffix(key[1])}")
        found = self._values[key]
        if self._events.is_reducing(found):
            self._events.join()
        return found

    def waits_for(self, names: Sequence[str], microbatch: int | None) -> bool:
        """Return whether a receive of any of these values is in flight."""
        return any((name, which) in self._pending for name in names for which in (microbatch, None))

    def shape(self, type_: TensorType, placement: Placement | None, microbatch: int | None) -> list[int]:
        """Return the shape of a value on this rank, with padding for a sharded parameter."""
        if isinstance(placement, ParamShard):
            first, *rest = type_.shape
            return [shard_rows(int(first), self.sharding[0][0]), *map(int, rest)]
        return [evaluate(size, self.sizes[microbatch]) for size in local_shape(type_, placement)]

    def send(self, message: Message, value: fx.Node, peer: int, origin: _Origin | None = None) -> None:
        """Start a send, and record the send for the plan.

        Before that, wait for all earlier sends to that rank except the last few.
        """
        in_flight = self._in_flight.setdefault(peer, [])
        if len(in_flight) >= _WINDOW:
            self.function(p2p.wait_sent, (in_flight.pop(0)[0],), "sent")
        way = ("send_backward", P2P_BACKWARD) if message.backward else ("send_forward", P2P_FORWARD)
        node = self._on(*way, (value, peer, message.tag), f"send_{message.name}_to{peer}")
        in_flight.append((node, origin))
        row, size = message.row or message.name, prod(message.shape) * message.dtype.itemsize
        values = message.values or (row,)
        self.sent.append(Sent(row, self.rank, peer, size, message.backward, message.tag, values))

    def settle(self, origin: _Origin) -> None:
        """Wait for the sends of a forward, before the backward: by then all receivers have the values."""
        for in_flight in self._in_flight.values():
            for item in [i for i in in_flight if i[1] == origin]:
                in_flight.remove(item)
                self.function(p2p.wait_sent, (item[0],), "sent")

    def receive(self, message: Message, peer: int) -> fx.Node:
        """Start a receive."""
        way = ("receive_backward", P2P_BACKWARD) if message.backward else ("receive_forward", P2P_FORWARD)
        args = (list(message.shape), message.dtype, peer, message.tag)
        return self._on(*way, args, f"receive_{message.name}_from{peer}")

    def hand_over(
        self, row: str, types: Mapping[str, ValueType], source: int, targets: Sequence[int],
        given: Callable[[str], fx.Node], *, backward: bool, shared: bool = False,
    ) -> dict[str, fx.Node]:  # fmt: skip
        """Send values from one rank to several as one buffer of bytes; return the values at a target.

        Parameters
        ----------
        row : name of the transfer in the plan.
        given : at the source, a value by name.
        shared : True if several targets get the same values.
        """
        self.tag += 1
        shapes, dtypes = [shape for shape, _ in types.values()], [dtype for _, dtype in types.values()]
        size = raw_bytes.packed_size(shapes, dtypes)
        message = Message(row, [size], torch.uint8, self.tag, backward, row, tuple(types))
        if self.rank == source:
            packed = f"{row}_of{source}" if shared else f"{row}_to{targets[0]}"
            message = replace(message, name=packed if shared else row)
            value = self.function(raw_bytes.pack, ([given(name) for name in types],), packed)
            for target in targets:
                self.send(message, value, target)
        if self.rank not in targets:
            return {}
        value = self.function(p2p.wait, (self.receive(message, source),), f"{row}_of{source}")
        made = self.function(raw_bytes.unpack, (value, shapes, dtypes), f"unpacked_of{source}")
        return {name: self.item(made, i, name) for i, name in enumerate(types)}

    def expect(self, name: str, microbatch: int | None, pending: fx.Node) -> None:
        """Register a receive in flight, to be waited for at the value's first use."""
        self._pending[name, microbatch] = pending

    def end(self, results: tuple[Any, ...]) -> None:
        """Set the program's results, after waits for everything in flight."""
        for in_flight in self._in_flight.values():
            for node, _ in in_flight:
                self.function(p2p.wait_sent, (node,), "sent")
        self._events.join()
        self.graph.output(results)


def suffix(microbatch: int | None) -> str:
    """Return `_mb3`, or nothing for a value of the step."""
    return "" if microbatch is None else f"_mb{microbatch}"
