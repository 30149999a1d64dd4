"""Prove that a program's streams are ordered: whatever order they run in, no value is read before it is made.

    %relu = forward_0(%batch)
    %after = record_event('compute')
    wait_event('p2p_forward', %after)                          without it: %relu is sent before it is made
    %send = send_forward(%relu, 1, 0, stream='p2p_forward')
    wait_sent(%send)                                           without it: %relu is freed while it is sent

For each stream a set, as the bits of a number: the nodes that are done before whatever the stream runs next.
An event is a copy of that set, a wait for it adds it to another stream's; so does a wait for a transfer, with
what was done when the transfer began, and the transfer itself, which runs beside the stream that issued it.
Then four things must hold, which are the rule of `runtime/streams.py`:

1. What compute reads is done.
2. Another stream begins after all that compute was given so far: that made its operands, and used the memory
   that it may get.
3. Values that another stream reads, and buffers that a transfer fills, are let go of when compute has waited.
4. At the end of the step, everything is done.

Not looked at: whether a call writes into what it was given. Sums do, on the stream that made them.
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

TRANSFERS = ("send_forward", "send_backward", "receive_forward", "receive_backward")
"""Modules whose call returns before its work is done, on no stream of the program's."""

_LOOKS = (operator.getitem, getattr)
"""Calls that take a value out of another and run nothing."""

_SHOWN = 12


def check_order(graph: fx.Graph) -> None:
    """Check one rank's program.

    Raises
    ------
    VerifierError : all nodes that are not ordered after what they read, or before what may free it.
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
    """Per stream, what is done before it goes on."""
    carried: dict[fx.Node, int] = field(default_factory=dict)
    """What is done once an event has passed, or a transfer has ended."""
    makers: dict[fx.Node, int] = field(default_factory=dict)
    """The bit of the node that makes a value; of a value taken out of another, the same."""
    elsewhere: int = 0
    """All nodes on other streams than compute."""

    def faults(self) -> list[str]:
        """In the order of the program."""
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
        """A node on another stream than compute."""
        unmade = list(self._unmade(node, stream))
        yield from unmade
        if not unmade and (left := self._done(COMPUTE) & ~self._done(stream)):
            yield f"%{node} runs on {stream}, which has not waited for %{self._last(left)} on compute"
        self.elsewhere |= self.makers[node]
        if node.target in TRANSFERS:
            self.carried[node] = self._done(stream) | self.makers[node]
        else:
            self._add(stream, self.makers[node])

    def _unmade(self, node: fx.Node, stream: str) -> Iterator[str]:
        for value in node.all_input_nodes:
            if self.makers[value] & ~self._done(stream):
                yield f"%{node} on {stream} reads %{value}, but nothing orders it after the value is made"

    def _free(self, node: fx.Node, values: Sequence[fx.Node]) -> Iterator[str]:
        """After `node`, the program lets go of `values`."""
        for value in values:
            users = (user for user in value.users if user.target not in _LOOKS)
            readers = [user for user in users if self.makers[user] & self.elsewhere]
            if value.target in TRANSFERS:
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
    """The values of which the program lets go after each node: their last user, or the last of their send."""
    position = {node: number for number, node in enumerate(nodes)}

    def last(value: fx.Node) -> int:
        users = [last(user) if user.target in TRANSFERS else position[user] for user in value.users]
        return max(users, default=position[value])

    freed: dict[fx.Node, list[fx.Node]] = {}
    for node in nodes:
        freed.setdefault(nodes[last(node)], []).append(node)
    return freed
