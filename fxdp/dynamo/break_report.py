"""Reports of graph breaks: the graphs that torch makes of a call, with ends, reasons, and skipped functions.

`BreakReport` logs once about a call that may be broken; `breaks_in_words` describes a call that may not:

    torch makes 2 graphs, each a program of its own, of the call of Net. ...
      graph 1 of 2 ends at train.py:12 `print(h.shape)`: Failed to trace builtin operator
      graph 2 of 2 ends with Net.forward
      no graph of scaled (train.py line 20): graph break in loop
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from fxdp.capture.external_state import external_state
from fxdp.capture.locations import is_user_file
from fxdp.capture.patches.module_state import unchanged
from fxdp.capture.patches.outside_state import ExternalState
from fxdp.ir.graph.metadata import Location
from fxdp.torch_compat.dynamo import GraphBreak, TracedFrame, graph_breaks
from fxdp.torch_compat.outer_call import OuterCall, frames_left_out

_KEPT = "_fxdp_breaks"
_WORDS = {"generic_jump": "Python decides on a tensor's value"}
"""Readable texts for reasons that torch gives as identifiers."""


@dataclass
class BreakReport:
    """The graphs of one compiled function, in the order in which torch compiles them."""

    title: str
    graphs: list[tuple[str, ...]] = field(default_factory=list)
    """For each graph the text of its end, and texts of inputs made by Python code."""
    known: frozenset[str] = frozenset()
    """Functions that torch skipped before, perhaps of another model."""
    told: int = 0
    """Number of graphs that were reported."""

    @classmethod
    def of(cls, call: OuterCall, title: str) -> BreakReport:
        """Return the report of the compiled function that is being called, created on first use."""
        keeper = {} if call.keeper is None else call.keeper.__dict__
        report: BreakReport | None = keeper.get(_KEPT)
        if report is None:
            earlier = {found.left_out for found in frames_left_out()} - set(call.running)
            report = keeper[_KEPT] = cls(title, known=frozenset(earlier))
        return report

    def add(self, function: str, end: GraphBreak | None, made: tuple[str, ...]) -> int:
        """Add a graph, unless it is known from an earlier compilation; return the graph's number, from 1."""
        ends = f"ends at {_end_in_words(end)}" if end is not None else f"ends with {function}"
        if (ends, *made) not in self.graphs:
            self.graphs.append((ends, *made))
        return self.graphs.index((ends, *made)) + 1

    def news(self) -> str:
        """Return the text about graphs and skipped functions not yet reported; empty if there are none."""
        left_out = [found for found in frames_left_out() if found.left_out not in self.known]
        if self.told == len(self.graphs) and not left_out:
            return ""
        n = len(self.graphs)
        lines = [
            f"graph {k} of {n} " + "; ".join(said) for k, said in enumerate(self.graphs, 1) if k > self.told
        ]
        beside = "which runs as it is on each rank's rows"
        lines += [f"no graph of {f.left_out}, {beside}: {_reason_in_words(f)}" for f in left_out]
        self.told = n
        self.known |= {found.left_out for found in left_out}
        many = f"{n} graphs, each a program of its own" if n > 1 else "one graph"
        return (
            f"torch makes {many}, of the call of {self.title}. What runs outside of them sees this rank's "
            "rows only, and graph_breaks=True promises that it treats samples one by one:\n  "
            + "\n  ".join(lines)
        )


def breaks_in_words(frame: TracedFrame) -> str:
    """Describe all graphs of a call. The call runs once more, and models and generators are restored."""
    with _as_before(frame):
        graphs, breaks = graph_breaks(frame)
    ends = [found for found in breaks if not found.left_out]
    if not breaks:
        return "\nTorch makes one graph of this call: add fullgraph=True"
    many = max(graphs, len(ends))
    lines = [f"graph {k} of {many} ends at {_end_in_words(b)}" for k, b in enumerate(ends, 1)]
    lines += [f"no graph of {b.left_out}: {_reason_in_words(b)}" for b in breaks if b.left_out]
    return "\nWhere torch breaks off this call:\n  " + "\n  ".join(lines)


def _end_in_words(found: GraphBreak) -> str:
    """Return the user's line at which a graph ends, with the reason."""
    frames = [frame for frame in found.stack if is_user_file(frame.filename)] or list(found.stack)
    if not frames:
        return f"a place that torch does not tell: {_reason_in_words(found)}"
    last = frames[-1]
    return f"{Location(last.filename, last.lineno or 0, last.line or '')}: {_reason_in_words(found)}"


def _reason_in_words(found: GraphBreak) -> str:
    """Return the last reason of the break, in one line."""
    said = found.reason.rpartition("another graph break occurred: ***")[2].strip()
    first = said.partition("\n")[0]
    return next((words for name, words in _WORDS.items() if first.startswith(name)), first)


@contextlib.contextmanager
def _as_before(frame: TracedFrame) -> Iterator[None]:
    """Restore modules, buffers, generators and external state after the block, in which a call may run."""
    modules = [value for value in frame.locals.values() if isinstance(value, nn.Module)]
    tensors: list[Tensor] = [tensor for module in modules for tensor in module.buffers()]
    values = [tensor.detach().clone() for tensor in tensors]
    with contextlib.ExitStack() as stack, torch.random.fork_rng(), torch.no_grad():
        for module in modules:
            stack.enter_context(unchanged(module))
            stack.enter_context(ExternalState(external_state(module)).put_back())
        yield
        for tensor, value in zip(tensors, values, strict=True):
            tensor.copy_(value)
