"""Prove that a program's streams are ordered: in every possible execution, values exist when they are read.

    %relu = forward_0(%batch)
    %after = record_event('compute')
    wait_event('p2p_forward', %after)                          if missing: %relu is sent before computed
    %send = send_forward(%relu, 1, 0, stream='p2p_forward')
    wait_sent(%send)                                           if missing: %relu is freed during the send

Each stream has a set of nodes, as the bits of an integer: all nodes finished before the stream's next op. An
event is a copy of this set; waiting for the event adds the copy to the set of the waiting stream. Waiting
for a transfer adds the transfer, and everything finished when the transfer began; meanwhile the transfer
runs beside the stream that issued it. Four conditions must hold, which are the rule of `runtime/streams.py`:

1. Every value that compute reads is finished.
2. An op on another stream begins after everything on compute so far, which computed the operands and used
   the memory that the op may get.
3. Values that another stream reads, and buffers that a transfer fills, are freed only after compute has
   waited for that stream or transfer.
4. At the end of the step, everything is finished.

Not checked: whether a call writes into an argument. Sums do, on the stream that created the argument.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from fxdp.errors import VerifierError
from fxdp.pipeline.write.events import RECORD, WAIT
from fxdp.runtime import p2p
from fxdp.runtime.streams import COMPUTE

_TRANSFERS = ("send_forward", "send_backward", "receive_forward", "receive_backward")
"""Modules with calls that return before the transfer is done, which runs on none of the program's streams."""

_LOOKS = (operator.getitem, getattr)
"""Calls that extract a value and run nothing on the device."""

_SHOWN = 12


def check_order(graph: fx.Graph) -> None:
    """Check one rank's program.

    Raises
    ------
    VerifierError : lists all nodes that are not ordered after their operands, or before the operands are
        freed.
    """
    if faults := _Order(tuple(graph.nodes)).faults():
        shown = "\n".join(f"  {fault}" for fault in faults[:_SHOWN])
        more = f"\n  and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
        raise VerifierError(
            f"streams of a program that are not ordered:\n{shown}{more}\n"
            "expected an event of the one stream for which the other waits, or a wait for the transfer\n"
            "this is a bug in fxdp"
        )


@dataclass
class _Order:
    nodes: Sequence[fx.Node]
    done: dict[str, int] = field(default_factory=dict)
    """Per stream, the nodes that are finished before the next op."""
    carried: dict[fx.Node, int] = field(default_factory=dict)
    """Per event or transfer, the nodes that are finished after a wait for this event or transfer."""
    makers: dict[fx.Node, int] = field(default_factory=dict)
    """The bit of the node that computes each value; an extracted value has the source's bit."""
    elsewhere: int = 0
    """All nodes on any stream except compute."""

    def faults(self) -> list[str]:
        """Return all faults in the order of the program."""
        freed = _freed(self.nodes)
        found: list[str] = []
        for number, node in enumerate(self.nodes):
            self.makers[node] = 1 << number
            found += self._node(node)
            found += self._free(node, freed.get(node, ()))
        return found

    def _node(self, node: fx.Node) -> Iterator[str]:
        stream = node.kwargs.get("stream", COMPUTE)
        assert isinstance(stream, str)
        if node.op == "output":
            yield from self._unmade(node, COMPUTE)
            if left := self.elsewhere & ~self._done(COMPUTE):
                yield f"the step ends, but compute has not waited for %{self._last(left)}"
        elif node.target in _LOOKS:
            self.makers[node] = self.makers[node.all_input_nodes[0]]
        elif node.target == RECORD:
            self.carried[node] = self._done(str(node.args[0]))
        elif node.target == WAIT:
            event: Any = node.args[1]
            self._add(str(node.args[0]), self.carried[event])
        elif node.target in (p2p.wait, p2p.wait_sent):
            self._add(COMPUTE, self.carried[node.all_input_nodes[0]] | self.makers[node])
        elif stream == COMPUTE:
            yield from self._unmade(node, COMPUTE)
            self._add(COMPUTE, self.makers[node])
        else:
            yield from self._begin(node, stream)

    def _begin(self, node: fx.Node, stream: str) -> Iterator[str]:
        """Check a node on any stream except compute."""
        unmade = list(self._unmade(node, stream))
        yield from unmade
        if not unmade and (left := self._done(COMPUTE) & ~self._done(stream)):
            yield f"%{node} runs on {stream}, which has not waited for %{self._last(left)} on compute"
        self.elsewhere |= self.makers[node]
        if node.target in _TRANSFERS:
            self.carried[node] = self._done(stream) | self.makers[node]
        else:
            self._add(stream, self.makers[node])

    def _unmade(self, node: fx.Node, stream: str) -> Iterator[str]:
        for value in node.all_input_nodes:
            if self.makers[value] & ~self._done(stream):
                yield f"%{node} on {stream} reads %{value}, but nothing orders it after the value is made"

    def _free(self, node: fx.Node, values: Sequence[fx.Node]) -> Iterator[str]:
        """Check that `values` may be freed after `node`."""
        for value in values:
            users = (user for user in value.users if user.target not in _LOOKS)
            readers = [user for user in users if self.makers[user] & self.elsewhere]
            if value.target in _TRANSFERS:
                readers.append(value)
            for reader in readers:
                if self.makers[reader] & ~self._done(COMPUTE):
                    yield f"%{value} is let go of after %{node}, but compute has not waited for %{reader}"

    def _done(self, stream: str) -> int:
        return self.done.get(stream, 0)

    def _add(self, stream: str, nodes: int) -> None:
        self.done[stream] = self._done(stream) | nodes

    def _last(self, nodes: int) -> fx.Node:
        return self.nodes[nodes.bit_length() - 1]


def _freed(nodes: Sequence[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """Map each node to the values freed after it: after the last use, or the end of the last send."""
    position = {node: number for number, node in enumerate(nodes)}

    def last(value: fx.Node) -> int:
        users = [last(user) if user.target in _TRANSFERS else position[user] for user in value.users]
        return max(users, default=position[value])

    freed: dict[fx.Node, list[fx.Node]] = {}
    for node in nodes:
        freed.setdefault(nodes[last(node)], []).append(node)
    return freed
