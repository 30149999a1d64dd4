"""What the exported graph of a model only names, and what is run when that graph is differentiated.

torch's export keeps no backward but the one that it derives itself: it traces through the forward of an
`autograd.Function` and drops hooks on gradients. So while the user's code is exported, either becomes one
opaque node with a number, and the differentiated graph is traced with the function or the hook itself.

    exported:       %y = fxdp.apply([%x], [%size], 0)    fxdp.hook(%y, 1)
    differentiated: %y = kept[0]([%x], [%size])          kept[1](%y)
"""

from __future__ import annotations

import contextlib
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
    """What the nodes of one export stand for, by their numbers."""

    def __init__(self) -> None:
        self._kept: list[Callable[..., Any]] = []

    def apply(self, function: Callable[..., Any], tensors: Sequence[Tensor], sizes: Sequence[Any]) -> Any:
        """The results of `function(tensors, sizes)`, a list of tensors, as one node."""
        self._kept.append(function)
        return torch.ops.fxdp.apply(tensors, sizes, len(self._kept) - 1)

    def visit(self, function: Callable[..., Any], x: Tensor) -> None:
        """A node at which `function(x)` is called."""
        self._kept.append(function)
        torch.ops.fxdp.hook(x, len(self._kept) - 1)

    def run(self, index: int, *args: Any) -> Any:
        """Call what a node stands for."""
        return self._kept[index](*args)

    def bind(self, gm: fx.GraphModule) -> None:
        """After it, each node calls what it stands for."""
        for op in (_APPLY, _HOOK):
            for node in gm.graph.find_nodes(op="call_function", target=op):
                *args, index = node.args
                node.target, node.args = _plain(self._kept[index]), tuple(args)


def _plain(function: Callable[..., Any]) -> Callable[..., Any]:
    """What fx takes for a node's target: a function with a name."""

    def call(*args: Any) -> Any:
        return function(*args)

    return call


_current: ContextVar[Deferred | None] = ContextVar("deferred", default=None)
"""Where the ops' kernels, which torch calls with plain values only, find what they stand for."""


@contextlib.contextmanager
def deferring() -> Iterator[Deferred]:
    """An export during which functions and hooks are kept."""
    kept = Deferred()
    token = _current.set(kept)
    try:
        yield kept
    finally:
        _current.reset(token)


def current() -> Deferred | None:
    """What the export that is under way keeps; None outside of one."""
    return _current.get()


def _like_results(tensors: Sequence[Tensor], sizes: Sequence[Any], index: int) -> list[Tensor]:
    """Tensors like the function's results, none of which is a view of what it was given."""
    kept = current()
    assert kept is not None, "fxdp::apply exists during an export only"
    # The function runs on fakes for the sizes of its results. A result that is an argument, or a view of one,
    # would say so of the node, which export then takes for an alias.
    with torch.no_grad():
        made = kept.run(index, tensors, sizes)
    return [t.new_empty_strided(t.size(), t.stride()) for t in made]


def _nothing(x: Tensor, index: int) -> None:
    """A hook has no result."""


torch.library.register_fake("fxdp::apply", _like_results)
torch.library.register_fake("fxdp::hook", _nothing)
torch.library.impl("fxdp::hook", "CompositeExplicitAutograd", _nothing)  # of a constant, whose value is known
