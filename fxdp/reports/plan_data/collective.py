"""`Collective`: one message of a step, with reason, line of the user's code, and timing.

all_reduce_9                contents: 387 floats, 1.5 KiB, summed over dp by gloo
  gradient of 0.weight      reason: %t_8 is P(sum), needed as R by the result
  model.py:7 in 0           line
  after t_8, before view    timing: issued, and waited for; overlapped with the ops between
"""

from __future__ import annotations

from dataclasses import dataclass

from fxdp.ir.graph.metadata import Location
from fxdp.reports.places import shown
from fxdp.reports.rows import format_bytes


@dataclass(frozen=True, slots=True)
class Need:
    """The reason why one value is communicated: producer, consumer, and line of the user's code.

    Attributes
    ----------
    value, redistribution, consumer : nodes of `plan.graph`: the value, the redistribution, the reading op.
    text : the cause in words: the op that needs the value, or the parameter of a gradient.
    has, wants : the placement before and after the redistribution.
    made, read : the ops that make and read the value, each with the rule that placed the op.
    bytes : size of the value, or of the piece of the value in this message.
    location : the user's line with the path of the module; never a line of torch.
    through : torch's own line between the two, if one of torch's modules runs the op.
    gradient : True for the gradient of a parameter.
    """

    value: str
    redistribution: str
    consumer: str
    text: str
    has: str
    wants: str
    made: str
    read: str
    bytes: int
    location: Location
    through: str = ""
    gradient: bool = False

    def chain(self) -> tuple[str, ...]:
        """Return the chain of causes, from the value to the user's line."""
        needed = f"%{self.value} is {self.has}, made by {self.made}"
        asked = f"{self.text} needs it as {self.wants}: {self.read}"
        through = (f"through {self.through}",) if self.through else ()
        return needed, asked, *through, f"at {shown(self.location)}"


@dataclass(frozen=True, slots=True)
class Overlapped:
    """The ops that run while a message is in flight: count, first and last in program order."""

    count: int = 0
    first: str = ""
    last: str = ""

    def __str__(self) -> str:
        if not self.count:
            return "nothing"
        return self.first if self.count == 1 else f"{self.count} ops, {self.first} to {self.last}"


@dataclass(frozen=True, slots=True, repr=False)
class Collective:
    """One collective of a step, or the transfers of one value between two pipeline ranks.

    Attributes
    ----------
    name : the node in `plan.text`; for a transfer `send_`, the value, source and destination.
    part : in a program with stages, the part with this node: `prologue`, `stage 1`, `finish 0`; else empty.
    kind, words : `all_reduce`, `all_gather`, `send` ..., and a description of the effect on the value.
    bytes : size of the value that is reduced, gathered or sent, in global shape, total of all `count`.
    type, dtype : type and dtype of the value.
    axis : the mesh axes along which the value is communicated.
    transport : `gloo`, `nccl`, `messages`, `memory` or `memory and gloo`; empty for a plan without a device.
    phase : `forward` or `backward`.
    text : the cause in words.
    needs : one reason for each value in the message.
    issued, waited : the op after which the message starts, and the op before which the program waits.
    overlapped : the ops that run between start and wait.
    gradient : whether gradients of parameters are reduced.
    count : the number of transfers, one per micro-batch.
    """

    name: str
    part: str
    kind: str
    words: str
    bytes: int
    type: str
    dtype: str
    axis: str
    transport: str
    phase: str
    text: str
    needs: tuple[Need, ...]
    issued: str
    waited: str
    overlapped: Overlapped
    gradient: bool = False
    count: int = 1

    @property
    def key(self) -> str:
        """The name with the part, because several parts may have a node of the same name."""
        return f"{self.part.replace(' ', '_')}.{self.name}" if self.part else self.name

    @property
    def location(self) -> Location:
        """The user's line of the first value in the message."""
        return self.needs[0].location

    def chain(self) -> tuple[str, ...]:
        """Return the chain of causes, from the first value in the message to the user's line."""
        return self.needs[0].chain()

    def __repr__(self) -> str:
        by = f" by {self.transport}" if self.transport else ""
        return (
            f"Collective({self.name}: {self.kind} of {format_bytes(self.bytes)} over {self.axis}{by}, "
            f"{self.phase}, {self.text})"
        )

    def __str__(self) -> str:
        times = f", {self.count} times" if self.count > 1 else ""
        by = f" by {self.transport}" if self.transport else ""
        where = f" in {self.part}" if self.part else ""
        head = (
            f"{self.name}{where}: {self.kind} of {self.type}, {format_bytes(self.bytes)}{times}, "
            f"over {self.axis}{by}, {self.phase}"
        )
        more = len(self.needs) - 1
        lines = [head, *self.chain(), *([f"and {more} more value{'s' * (more > 1)}"] if more else [])]
        issued, waited = self.issued or "the inputs", self.waited or "the end"
        lines.append(f"issued after {issued}, waited for before {waited}")
        lines.append(f"hidden behind {self.overlapped}")
        return "\n    ".join(lines)
