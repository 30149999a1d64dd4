"""Small words of writing a program: calls, values by name and micro-batch, transfers and their tags."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch
from torch import fx

from fxdp.ir import raw_bytes
from fxdp.ir.ops.parameter_shards import shard_rows
from fxdp.ir.placements import ParamShard, Placement
from fxdp.ir.sizes import evaluate
from fxdp.ir.types import TensorType, local_shape
from fxdp.pipeline.write.events import Events
from fxdp.runtime import p2p
from fxdp.runtime.streams import P2P_BACKWARD, P2P_FORWARD, REDUCE

_WINDOW = 2
"""Sends to one rank that may be under way before the oldest is waited for."""


ValueType = tuple[list[int], torch.dtype]
"""The shape and dtype of a value on a rank."""
Origin = tuple[int, int]
"""The stage and micro-batch of the forward that made a value."""


@dataclass(frozen=True)
class Sent:
    """One transfer between pipeline ranks, of one micro-batch or of the step, for the plan."""

    name: str
    source: int
    target: int
    bytes: int
    backward: bool
    tag: int = 0
    """The number of the transfer in the step, at both ends."""
    values: tuple[str, ...] = ()
    """The values in it, by name; several where results travel in one row of bytes."""


@dataclass(frozen=True)
class Message:
    """What travels between two pipeline ranks, known at both ends."""

    name: str
    shape: Sequence[int]
    dtype: torch.dtype
    tag: int
    """The same number at both ends, another for every transfer of the step."""
    backward: bool
    row: str = ""
    """What the plan calls it, if not by its name."""
    values: tuple[str, ...] = ()
    """What is in it, if not the one value of that name."""


def waits(node: fx.Node) -> bool:
    """Whether a node of a step waits for a transfer, its first argument."""
    return node.target is p2p.wait


@dataclass
class StepGraph:
    """Writes one rank's graph.

    `sizes` are the values of the size symbols in each micro-batch, and in the entire local batch under None;
    `sharding` says how sharded parameters are sharded, over data ranks and then over pipeline ranks.
    """

    rank: int
    sizes: Mapping[int | None, Mapping[str, int]]
    sharding: tuple[tuple[int, int], ...] = ((1, 0),)
    graph: fx.Graph = field(default_factory=fx.Graph)
    sent: list[Sent] = field(default_factory=list)
    tag: int = 0
    """The number of the last transfer; each takes the next, on all ranks alike."""
    _values: dict[tuple[str, int | None], fx.Node] = field(default_factory=dict)
    _pending: dict[tuple[str, int | None], fx.Node] = field(default_factory=dict)
    _in_flight: dict[int, list[tuple[fx.Node, Origin | None]]] = field(default_factory=dict)
    _events: Events = field(init=False)

    def __post_init__(self) -> None:
        self._events = Events(self.graph)

    def input(self, name: str) -> fx.Node:
        """The program's input, there when compute begins."""
        node = self.graph.placeholder(name)
        self._events.given(node)
        return node

    def module(self, target: str, args: tuple[Any, ...], name: str) -> fx.Node:
        """A call of one of the program's modules."""
        node = self.graph.create_node("call_module", target, args, {}, name=name)
        self._events.given(node)
        return node

    def _on(self, target: str, stream: str, args: tuple[Any, ...], name: str) -> fx.Node:
        """The same on another stream than compute's, after all that compute was given so far."""
        self._events.order(stream)
        return self.graph.create_node("call_module", target, args, {"stream": stream}, name=name)

    def reduce(self, target: str, args: tuple[Any, ...], name: str) -> fx.Node:
        """The same on the reduce stream; `value` and `end` wait for it."""
        node = self._on(target, REDUCE, args, name)
        self._events.reduces(node)
        return node

    def function(self, target: Any, args: tuple[Any, ...], name: str) -> fx.Node:
        """A call of a function, most are those of `runtime/p2p.py`."""
        node = self.graph.create_node("call_function", target, args, {}, name=name)
        self._events.given(node)
        return node

    def item(self, node: fx.Node, index: int, name: str) -> fx.Node:
        """One result of a call; nothing runs."""
        return self.graph.create_node("call_function", operator.getitem, (node, index), {}, name=name)

    def keep(self, name: str, microbatch: int | None, value: fx.Node) -> None:
        """From here on the value has this name."""
        self._values[name, microbatch] = value

    def keep_items(self, made: fx.Node, names: Sequence[str]) -> None:
        """The results of a call are values of the step."""
        for index, name in enumerate(names):
            self.keep(name, None, self.item(made, index, name))

    def value(self, name: str, microbatch: int | None) -> fx.Node:
        """The value of a name, waited for now if it is under way; the step's if of no micro-batch."""
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
        """Whether any of these values is under way."""
        return any((name, which) in self._pending for name in names for which in (microbatch, None))

    def shape(self, type_: TensorType, placement: Placement | None, microbatch: int | None) -> list[int]:
        """The shape of this rank's value; of rows with their padding."""
        if isinstance(placement, ParamShard):
            first, *rest = type_.shape
            return [shard_rows(int(first), self.sharding[0][0]), *map(int, rest)]
        return [evaluate(size, self.sizes[microbatch]) for size in local_shape(type_, placement)]

    def send(self, message: Message, value: fx.Node, peer: int, origin: Origin | None = None) -> None:
        """Start a send, after waiting for all but the last few to that rank; it is noted for the plan."""
        in_flight = self._in_flight.setdefault(peer, [])
        if len(in_flight) >= _WINDOW:
            self.function(p2p.wait_sent, (in_flight.pop(0)[0],), "sent")
        way = ("send_backward", P2P_BACKWARD) if message.backward else ("send_forward", P2P_FORWARD)
        node = self._on(*way, (value, peer, message.tag), f"send_{message.name}_to{peer}")
        in_flight.append((node, origin))
        row, size = message.row or message.name, prod(message.shape) * message.dtype.itemsize
        values = message.values or (row,)
        self.sent.append(Sent(row, self.rank, peer, size, message.backward, message.tag, values))

    def settle(self, origin: Origin) -> None:
        """Let go of what a forward sent: its backward begins, so all who needed it have it."""
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
        """Bring values from one rank to others as one row of bytes; at a target, the values.

        Parameters
        ----------
        row : what the plan calls it.
        given : at the source, a value by its name.
        shared : several targets get the same.
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
        """The value is under way: wait for it at its first use."""
        self._pending[name, microbatch] = pending

    def end(self, results: tuple[Any, ...]) -> None:
        """The program's results; nothing is under way when the step ends."""
        for in_flight in self._in_flight.values():
            for node, _ in in_flight:
                self.function(p2p.wait_sent, (node,), "sent")
        self._events.join()
        self.graph.output(results)


def suffix(microbatch: int | None) -> str:
    """`_mb3`, or nothing for a value of the step."""
    return "" if microbatch is None else f"_mb{microbatch}"
