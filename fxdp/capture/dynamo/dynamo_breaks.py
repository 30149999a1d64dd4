"""Where torch.compile breaks a function into graphs, in words: graph k of n, its line, and why it ends there.

    graph 1 of 2 ends at train.py:12 `if h.sum() > 0:`: Python decides on a tensor's value
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from fxdp.capture.patches.module_state import unchanged
from fxdp.capture.sites import is_user_file
from fxdp.ir.notes import Site
from fxdp.torch_compat import GraphBreak, TracedFrame, graph_breaks

_WORDS = {"generic_jump": "Python decides on a tensor's value"}
"""Torch's names of reasons that are no words."""


def breaks_in_words(frame: TracedFrame) -> str:
    """All graphs of a call; the call runs once more for it, and leaves models and generators as they were."""
    with _as_before(frame):
        graphs, breaks = graph_breaks(frame)
    ends = [found for found in breaks if not found.left_out]
    if not breaks:
        return "\nTorch makes one graph of this call: add fullgraph=True"
    many = max(graphs, len(ends))
    lines = [f"graph {k} of {many} ends at {end_in_words(b)}" for k, b in enumerate(ends, 1)]
    lines += [f"no graph of {b.left_out}: {reason_in_words(b)}" for b in breaks if b.left_out]
    return "\nWhere torch breaks off this call:\n  " + "\n  ".join(lines)


def end_in_words(found: GraphBreak) -> str:
    """The user's line at which a graph ends, and why."""
    frames = [frame for frame in found.stack if is_user_file(frame.filename)] or list(found.stack)
    if not frames:
        return f"a place that torch does not tell: {reason_in_words(found)}"
    last = frames[-1]
    return f"{Site(last.filename, last.lineno or 0, last.line or '')}: {reason_in_words(found)}"


def reason_in_words(found: GraphBreak) -> str:
    """The last thing that went wrong, in one line."""
    said = found.reason.rpartition("another graph break occurred: ***")[2].strip()
    first = said.partition("\n")[0]
    return next((words for name, words in _WORDS.items() if first.startswith(name)), first)


@contextlib.contextmanager
def _as_before(frame: TracedFrame) -> Iterator[None]:
    """Inside, a call may run that counts for nothing."""
    modules = [value for value in frame.locals.values() if isinstance(value, nn.Module)]
    tensors: list[Tensor] = [tensor for module in modules for tensor in module.buffers()]
    values = [tensor.detach().clone() for tensor in tensors]
    with contextlib.ExitStack() as stack, torch.random.fork_rng(), torch.no_grad():
        for module in modules:
            stack.enter_context(unchanged(module))
        yield
        for tensor, value in zip(tensors, values, strict=True):
            tensor.copy_(value)
