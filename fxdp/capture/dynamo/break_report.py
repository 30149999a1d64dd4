"""`BreakReport`: says once into which graphs torch breaks a call, where, why, and what it leaves out.

    torch makes 2 graphs, each a program of its own, of the call of Net. ...
      graph 1 of 2 ends at train.py:12 `print(h.shape)`: Failed to trace builtin operator
      graph 2 of 2 ends with Net.forward
      no graph of scaled (train.py line 20): graph break in loop
"""

from __future__ import annotations

from dataclasses import dataclass, field

from fxdp.capture.dynamo.dynamo_breaks import end_in_words, reason_in_words
from fxdp.torch_compat import GraphBreak, OuterCall, frames_left_out

_KEPT = "_fxdp_breaks"


@dataclass
class BreakReport:
    """The graphs of one compiled function, as torch asks for them."""

    title: str
    graphs: list[tuple[str, ...]] = field(default_factory=list)
    """Of each where it ends, and what it takes that Python made."""
    known: frozenset[str] = frozenset()
    """Functions that were left out before, of others perhaps."""
    told: int = 0
    """Of how many graphs was said."""

    @classmethod
    def of(cls, call: OuterCall, title: str) -> BreakReport:
        """That of the compiled function which is being called."""
        keeper = {} if call.keeper is None else call.keeper.__dict__
        report: BreakReport | None = keeper.get(_KEPT)
        if report is None:
            earlier = {found.left_out for found in frames_left_out()} - set(call.running)
            report = keeper[_KEPT] = cls(title, known=frozenset(earlier))
        return report

    def add(self, function: str, end: GraphBreak | None, made: tuple[str, ...]) -> int:
        """Know of one more graph, or of one that is compiled anew; its number, from 1."""
        ends = f"ends at {end_in_words(end)}" if end is not None else f"ends with {function}"
        if (ends, *made) not in self.graphs:
            self.graphs.append((ends, *made))
        return self.graphs.index((ends, *made)) + 1

    def news(self) -> str:
        """What was not told yet; empty for nothing."""
        left_out = [found for found in frames_left_out() if found.left_out not in self.known]
        if self.told == len(self.graphs) and not left_out:
            return ""
        n = len(self.graphs)
        lines = [
            f"graph {k} of {n} " + "; ".join(said)
            for k, said in enumerate(self.graphs, 1)
            if k > self.told
        ]
        lines += [
            f"no graph of {found.left_out}, which runs as it is on each rank's rows: {reason_in_words(found)}"
            for found in left_out
        ]
        self.told = n
        self.known |= {found.left_out for found in left_out}
        many = f"{n} graphs, each a program of its own" if n > 1 else "one graph"
        return (
            f"torch makes {many}, of the call of {self.title}. What runs outside of them sees this rank's "
            "rows only, and graph_breaks=True promises that it treats samples one by one:\n  "
            + "\n  ".join(lines)
        )
