"""Write the events that order a program's streams: each pair of them where one is needed, and no other.

    %after_forward_0_mb0 = record_event('compute')
    %p2p_forward_waits = wait_event('p2p_forward', %after_forward_0_mb0)
    %send_relu_mb0_to1 = send_forward(%relu_mb0, 1, 0, stream='p2p_forward')
    ...
    %finish_0 = finish_0(%batch, %t_8, stream='reduce')
    %after_finish_0 = record_event('reduce')
    %compute_waits = wait_event('compute', %after_finish_0, %batch, %t_8)      -> lets go of %t_8

`runtime/streams.py` says why. What is sent or received is waited for by `wait` and `wait_sent`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import fx

from fxdp.runtime.streams import COMPUTE, REDUCE

RECORD, WAIT = "record_event", "wait_event"
"""The program's modules of those names."""


@dataclass
class Events:
    """Writes events into the graph of one rank."""

    graph: fx.Graph
    _last: fx.Node | None = None
    """What compute was given last."""
    _event: fx.Node | None = None
    """Recorded after it, if anyone asked."""
    _waited: dict[str, fx.Node] = field(default_factory=dict)
    """The event of compute that a stream has waited for last."""
    _reducing: list[fx.Node] = field(default_factory=list)

    def given(self, node: fx.Node) -> None:
        """Compute was given a node."""
        self._last, self._event = node, None

    def order(self, stream: str) -> None:
        """Let a stream wait for all that compute was given so far."""
        assert self._last is not None
        if self._event is None:
            self._event = self._record(COMPUTE, self._last)
        if self._waited.get(stream) is not self._event:
            self._waited[stream] = self._event
            self._wait(stream, self._event)

    def reduces(self, node: fx.Node) -> None:
        """The reduce stream was given a node."""
        self._reducing.append(node)

    def is_reducing(self, node: fx.Node) -> bool:
        """Whether a value is made on the reduce stream, which compute has not waited for."""
        return any(source in self._reducing for source in node.all_input_nodes)

    def join(self) -> None:
        """Let compute wait for the reduce stream, and the program let go of what that read."""
        if self._reducing:
            held = dict.fromkeys(value for node in self._reducing for value in node.all_input_nodes)
            event = self._record(REDUCE, self._reducing[-1])
            self._reducing.clear()
            self.given(self._wait(COMPUTE, event, *held))

    def _record(self, stream: str, last: fx.Node) -> fx.Node:
        return self.graph.create_node("call_module", RECORD, (stream,), {}, name=f"after_{last.name}")

    def _wait(self, stream: str, *args: fx.Node) -> fx.Node:
        return self.graph.create_node("call_module", WAIT, (stream, *args), {}, name=f"{stream}_waits")
