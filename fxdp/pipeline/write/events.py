"""Write the events that order a program's streams, with as few record/wait pairs as possible.

    %after_forward_0_mb0 = record_event('compute')
    %p2p_forward_waits = wait_event('p2p_forward', %after_forward_0_mb0)
    %send_relu_mb0_to1 = send_forward(%relu_mb0, 1, 0, stream='p2p_forward')
    ...
    %finish_0 = finish_0(%batch, %t_8, stream='reduce')
    %after_finish_0 = record_event('reduce')
    %compute_waits = wait_event('compute', %after_finish_0, %batch, %t_8)      -> frees %t_8

`runtime/streams.py` gives the reasons. Transfers need no events to end: `wait` and `wait_sent` wait for
them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import fx

from fxdp.runtime.streams import COMPUTE, REDUCE

RECORD, WAIT = "record_event", "wait_event"
"""Names of the program's modules that record an event and wait for one."""


@dataclass
class Events:
    """Writer of events into the graph of one rank."""

    graph: fx.Graph
    _last: fx.Node | None = None
    """The last node on the compute stream."""
    _event: fx.Node | None = None
    """The event recorded after `_last`, if any stream has needed one."""
    _waited: dict[str, fx.Node] = field(default_factory=dict)
    """The last event of compute for which each stream waits."""
    _reducing: list[fx.Node] = field(default_factory=list)

    def given(self, node: fx.Node) -> None:
        """Note a node as the last one on the compute stream."""
        self._last, self._event = node, None

    def order(self, stream: str) -> None:
        """Let a stream wait for everything on the compute stream so far."""
        assert self._last is not None
        if self._event is None:
            self._event = self._record(COMPUTE, self._last)
        if self._waited.get(stream) is not self._event:
            self._waited[stream] = self._event
            self._wait(stream, self._event)

    def reduces(self, node: fx.Node) -> None:
        """Note a node on the reduce stream."""
        self._reducing.append(node)

    def is_reducing(self, node: fx.Node) -> bool:
        """Return whether the reduce stream computes a value for which compute has not waited yet."""
        return any(source in self._reducing for source in node.all_input_nodes)

    def join(self) -> None:
        """Let compute wait for the reduce stream, so that values which that stream has read can be freed."""
        if self._reducing:
            held = dict.fromkeys(value for node in self._reducing for value in node.all_input_nodes)
            event = self._record(REDUCE, self._reducing[-1])
            self._reducing.clear()
            self.given(self._wait(COMPUTE, event, *held))

    def _record(self, stream: str, last: fx.Node) -> fx.Node:
        return self.graph.create_node("call_module", RECORD, (stream,), {}, name=f"after_{last.name}")

    def _wait(self, stream: str, *args: fx.Node) -> fx.Node:
        return self.graph.create_node("call_module", WAIT, (stream, *args), {}, name=f"{stream}_waits")
