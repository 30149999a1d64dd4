"""Determine the gradients that are None on one device, because no loss has read the outputs they depend on.

    out, aux = compiled(x);  loss(out).backward()

    gradient of     depends on    is
    body            out, aux      a value
    head            out           a value
    head of aux     aux           None: an optimizer skips the parameter, including weight decay and momentum

One device has a gradient as soon as the loss of any sample reads the output. If the samples of an output are
sharded, the losses of different ranks may read different outputs (a rank without labels for `aux`). Where
this can make a difference, ranks exchange the outputs read during the backward; otherwise nothing is sent.
Replicated outputs must be read by all ranks or by none: a violation is reported at the next call
(`ranks/comms/sequence_log.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from fxdp.runtime.template import TangentSpec

_Exchange: TypeAlias = "Callable[[Sequence[int]], Callable[[], Sequence[Sequence[int]]]]"
"""Sends this rank's integers, and returns a function that waits for the integers of all ranks."""

_BITS = 62  # per integer that ranks exchange


class _Unread(NamedTuple):
    """The consequences of a set of missing tangents."""

    outputs: frozenset[int]
    asks: bool
    """True if losses of other ranks matter, too; equal on all ranks, as only replicated outputs decide."""
    told: int
    """The unread outputs that all ranks must leave unread, as bits, for the sequence log; 0 if none."""
    absent: Sequence[int]
    """The positions of gradients that are None if no rank's loss has read the outputs."""


@dataclass
class UndefinedGradients:
    """Determines which gradients of a program are None.

    Parameters
    ----------
    tangents : the tangents of the program.
    behind : per input of the forward with a gradient, the position and the outputs that depend on the input.
    exchange : exchanges integers between all ranks; None for one rank, or if backwards may differ by rank.
    meta : called with the outputs that all ranks must leave unread, as bits.
    """

    tangents: Sequence[TangentSpec] = ()
    behind: Sequence[tuple[int, frozenset[int]]] = ()
    exchange: _Exchange | None = None
    meta: Callable[[int], None] = lambda outputs: None
    _known: dict[frozenset[int], _Unread] = field(default_factory=dict, repr=False)
    _absent: dict[frozenset[int], Sequence[int]] = field(default_factory=dict, repr=False)

    def begin(self, missing: frozenset[int]) -> Callable[[], Sequence[int]]:
        """Begin a backward without the tangents numbered `missing` on this rank.

        The returned function is called after the backward, and returns the positions of the gradients that
        are None.
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
            # all outputs of a gradient may be unread although a backward runs
            outputs & sharded and outputs.isdisjoint(read) and (read or not outputs >= sharded)
            for outputs in {outputs for _, outputs in self.behind}
        )
        # no tangent at all: another compiled module, fed by the outputs, had no gradients on any rank
        alike = unread - sharded if asks or len(missing) < len(self.tangents) else unread
        return _Unread(unread, asks, sum(1 << i for i in alike), self._without(unread))

    def _without(self, unread: frozenset[int]) -> Sequence[int]:
        """Return the positions of gradients whose outputs are all unread."""
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
    """Return the outputs that a rank has sent as bits."""
    return frozenset(
        word * _BITS + bit for word, bits in enumerate(integers) for bit in range(_BITS) if bits >> bit & 1
    )
