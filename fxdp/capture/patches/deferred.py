"""Deferred functions: opaque nodes in the exported graph, replaced by the functions before differentiation.

Torch's export keeps no backward but the one that torch derives from the exported ops: export traces through
the forward of an `autograd.Function` and drops hooks on gradients. So during the export of the user's code
both become opaque nodes with an index, and the differentiated graph is traced with the function or hook
itself.

    exported:       %y = fxdp.apply([%x], [%size], 0)    fxdp.hook(%y, 1)
    differentiated: %y = kept[0]([%x], [%size])          kept[1](%y)
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, fx

torch.library.define("fxdp::apply", "(Tensor[] tensors, SymInt[] sizes, int index) -> Tensor[]")
torch.library.define("fxdp::hook", "(Tensor x, int index) -> ()")

_APPLY = torch.ops.fxdp.apply.default
_HOOK = torch.ops.fxdp.hook.default
fx.node.has_side_effect(_HOOK)


class Deferred:
    """The functions and hooks of one export, by index."""

    def __init__(self) -> None:
        self._kept: list[Callable[..., Any]] = []

    def apply(self, function: Callable[..., Any], tensors: Sequence[Tensor], sizes: Sequence[Any]) -> Any:
        """Return the results of `function(tensors, sizes)`, a list of tensors, as one node."""
        self._kept.append(function)
        return torch.ops.fxdp.apply(tensors, sizes, len(self._kept) - 1)

    def visit(self, function: Callable[..., Any], x: Tensor) -> None:
        """Add a node at which `function(x)` is called."""
        self._kept.append(function)
        torch.ops.fxdp.hook(x, len(self._kept) - 1)

    def run(self, index: int, *args: Any) -> Any:
        """Call the function or hook of a node."""
        return self._kept[index](*args)

    def bind(self, gm: fx.GraphModule) -> None:
        """Replace the opaque nodes of a graph and of its regions by calls of the functions; in place."""
        graphs = [part.graph for part in gm.modules() if isinstance(part, fx.GraphModule)]
        for graph, op in itertools.product(graphs, (_APPLY, _HOOK)):
            for node in graph.find_nodes(op="call_function", target=op):
                *args, index = node.args
                node.target, node.args = _plain(self._kept[index]), tuple(args)


def _plain(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function as fx expects the target of a node: a Python function with a name."""

    def call(*args: Any) -> Any:
        return function(*args)

    return call


_current: ContextVar[Deferred | None] = ContextVar("deferred", default=None)
"""Deferred functions of the running export, for the ops' kernels, to which torch only passes plain values."""


@contextlib.contextmanager
def deferring() -> Iterator[Deferred]:
    """Collect deferred functions and hooks during the export inside the block."""
    kept = Deferred()
    token = _current.set(kept)
    try:
        yield kept
    finally:
        _current.reset(token)


def current() -> Deferred | None:
    """Return the deferred functions of the running export; None outside of an export."""
    return _current.get()


def _like_results(tensors: Sequence[Tensor], sizes: Sequence[Any], index: int) -> list[Tensor]:
    """Return tensors like the function's results, none of which is a view of an argument."""
    kept = current()
    assert kept is not None, "fxdp::apply exists during an export only"
    # The function runs on fakes for the sizes of its results. Returning an argument, or a view of one, would
    # let export treat the node as an alias.
    with torch.no_grad():
        made = kept.run(index, tensors, sizes)
    return [t.new_empty_strided(t.size(), t.stride()) for t in made]


def _nothing(x: Tensor, index: int) -> None:
    """Return nothing, as a hook has no result."""


torch.library.register_fake("fxdp::apply", _like_results)
torch.library.register_fake("fxdp::hook", _nothing)
torch.library.impl("fxdp::hook", "CompositeExplicitAutograd", _nothing)  # for constants, called eagerly
