"""Gradients that one device leaves None: of what only those outputs depend on that no loss has read.

    out, aux = compiled(x);  loss(out).backward()

    gradient of     depends on    is
    body            out, aux      a value
    head            out           a value
    head of aux     aux           None: an optimizer leaves it alone, weight decay and momentum, too

One device has a gradient as soon as the loss of any sample reads the output. Of outputs whose samples are
sharded, ranks may read others than one another (a rank without labels for `aux`). Where that may decide,
they tell each other while the backward runs; elsewhere nothing is sent. Outputs that all ranks have full
must be read by all alike: whoever does otherwise is told at the next call (`ranks/comms/sequence_log.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from fxdp.runtime.template import TangentSpec

Exchange: TypeAlias = "Callable[[Sequence[int]], Callable[[], Sequence[Sequence[int]]]]"
"""Sends this rank's integers; what it returns waits for those of all ranks."""

_BITS = 62  # of an integer that ranks exchange


class _Unread(NamedTuple):
    """What follows from the tangents that a backward is not given."""

    outputs: frozenset[int]
    asks: bool
    """Whether other ranks' losses decide, too. All ranks ask alike: it follows from entire outputs alone."""
    told: int
    """The outputs that all ranks must leave out alike, as bits; to be noted where there are any."""
    absent: Sequence[int]
    """The positions of the gradients that are None, if no rank's loss has read these outputs."""


@dataclass
class UndefinedGradients:
    """Which gradients of a program are None.

    Parameters
    ----------
    tangents : those of the program.
    behind : for each input of the forward that has a gradient its position, and the outputs behind it.
    exchange : with all ranks; None where there is one, or where ranks need not run the same backwards.
    note : told the outputs that all ranks must leave out alike, as bits.
    """

    tangents: Sequence[TangentSpec] = ()
    behind: Sequence[tuple[int, frozenset[int]]] = ()
    exchange: Exchange | None = None
    meta: Callable[[int], None] = lambda outputs: None
    _known: dict[frozenset[int], _Unread] = field(default_factory=dict, repr=False)
    _absent: dict[frozenset[int], Sequence[int]] = field(default_factory=dict, repr=False)

    def begin(self, missing: frozenset[int]) -> Callable[[], Sequence[int]]:
        """A backward begins, of which this rank has no tangents of the numbers `missing`.

        What it returns is called after it, and gives the positions of the gradients that are None.
        """
        known = self._known.get(missing)
        if known is None:
            known = self._known[missing] = self._unread(missing)
        if known.told:
            self.meta(known.told)
        if self.exchange is None or not known.asks:
            return lambda: known.absent
        finish = self.exchange(self._integers(known.outputs))
        return lambda: self._without(frozenset.intersection(*map(_outputs, finish())))

    def _unread(self, missing: frozenset[int]) -> _Unread:
        unread = frozenset(self.tangents[i].output for i in missing)
        sharded = frozenset(t.output for t in self.tangents if t.sharded)
        read = frozenset(t.output for t in self.tangents) - sharded - unread
        asks = any(
            # all of a gradient's outputs may be unread, and yet a backward runs
            outputs & sharded and outputs.isdisjoint(read) and (read or not outputs >= sharded)
            for outputs in {outputs for _, outputs in self.behind}
        )
        # none at all: another compiled module, which the outputs feed, had none to give, on any rank
        alike = unread - sharded if asks or len(missing) < len(self.tangents) else unread
        return _Unread(unread, asks, sum(1 << i for i in alike), self._without(unread))

    def _without(self, unread: frozenset[int]) -> Sequence[int]:
        """The positions of gradients of which all outputs are unread."""
        found = self._absent.get(unread)
        if found is None:
            found = [place for place, outputs in self.behind if outputs and outputs <= unread]
            self._absent[unread] = found
        return found

    def _integers(self, outputs: frozenset[int]) -> list[int]:
        count = 1 + max(t.output for t in self.tangents)
        bits, mask = sum(1 << i for i in outputs), (1 << _BITS) - 1
        return [bits >> first & mask for first in range(0, count, _BITS)]


def _outputs(integers: Sequence[int]) -> frozenset[int]:
    """The outputs that one rank has sent as bits."""
    return frozenset(
        word * _BITS + bit for word, bits in enumerate(integers) for bit in range(_BITS) if bits >> bit & 1
    )
