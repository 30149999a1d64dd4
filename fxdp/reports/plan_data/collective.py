"""`Collective`: what travels between ranks in a step, why, where in the user's code, and when.

all_reduce_9        what    387 floats, 1.5 KiB, summed over dp by gloo
  gradient of 0.weight      why: %t_8 is P(sum), needed as R by the result
  model.py:7 in 0           where
  after t_8, before view    when: issued, and waited for; hidden behind what runs between
"""

from __future__ import annotations

from dataclasses import dataclass

from fxdp.ir.metadata import Location
from fxdp.reports.rows import format_bytes


@dataclass(frozen=True, slots=True)
class Need:
    """Why one value travels: what made it, what reads it, and for which line of the user's code.

    Attributes
    ----------
    value, redistribution, consumer : nodes of `plan.graph`: the value, its redistribution, the op that reads
    it. text : the cause in words: the op that needs it, or whose gradient it is.
    has, wants : its placement before and after.
    made, read : the ops that make and read it, each with the rule that placed it.
    bytes : of the value, or of the piece of it that travels here.
    site : the user's line with the path of the module; never a line of torch's.
    through : torch's own line between the two, where one of torch's modules runs the op.
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
        """From the value to the user's line."""
        needed = f"%{self.value} is {self.has}, made by {self.made}"
        asked = f"{self.text} needs it as {self.wants}: {self.read}"
        through = (f"through {self.through}",) if self.through else ()
        return needed, asked, *through, f"at {self.location}"


@dataclass(frozen=True, slots=True)
class Overlapped:
    """What runs while a message is under way: how many ops, from the first to the last in program order."""

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
    name : its node in `plan.text`; of a transfer `send_`, the value, from and to.
    part : of a program in stages, where it is: `prologue`, `stage 1`, `finish 0`; else empty.
    kind, words : `all_reduce`, `all_gather`, `send` ..., and what it does to the value.
    bytes : of the value that is reduced, gathered or sent, in global shape, all `count` together.
    type, dtype : of the value.
    axis : the mesh axes along which it travels.
    carrier : `gloo`, `nccl`, `messages`, `memory` or `memory and gloo`; empty where the plan has no device.
    phase : `forward` or `backward`.
    text : the cause in words.
    needs : why each of the values in it travels.
    issued, waited : the op after which it starts, and the one before which it is waited for.
    hidden : what runs between.
    gradient : whether it reduces gradients of parameters.
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
        """Its name with its part, as several parts may have a node of that name."""
        return f"{self.part.replace(' ', '_')}.{self.name}" if self.part else self.name

    @property
    def location(self) -> Location:
        """The user's line of the first value in it."""
        return self.needs[0].location

    def chain(self) -> tuple[str, ...]:
        """Why it exists, from the first value in it to the user's line."""
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
        lines = [head, *self.chain(), *([f"and {more} more values"] if more else [])]
        issued, waited = self.issued or "the inputs", self.waited or "the end"
        lines.append(f"issued after {issued}, waited for before {waited}")
        lines.append(f"hidden behind {self.overlapped}")
        return "\n    ".join(lines)
