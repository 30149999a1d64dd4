"""Views of global tensors: which share memory with their base, and which have to be read anew.

y = x.view(8, -1)[:, 0]     the local parts are views of one another: a write into y is one into x
row = x[0]                  gathered, so a copy: `ViewOrigin` says of what; a write goes back by a scatter,
                            and after a write into x the row is gathered anew when it is read
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from fxdp.eager.redistribute import redistributed
from fxdp.eager.sums import summed
from fxdp.eager.tensor import GlobalTensor, wrapped
from fxdp.ir.types.placements import P, R
from fxdp.torch_compat import without_torch_dispatch, without_torch_function


@dataclass(slots=True)
class Memory:
    """The memory that a base and its sharing views have in common; counts writes into it."""

    writes: int = 0


@dataclass(slots=True)
class ViewOrigin:
    """What a copy, or a view of a copy, was made of.

    Attributes
    ----------
    base, op, args, kwargs : the call `op(base, *args, **kwargs)` that returned the view. The base has no
        gradient: autograd keeps views in its graph, which must not keep the graph.
    shares : whether the local parts share memory.
    result : which of several results the view is; None of one.
    seen : writes into the base's memory that the view has seen, if it is a copy.
    """

    base: GlobalTensor
    op: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    shares: bool
    result: int | None = None
    seen: int = 0


def memory_of(value: GlobalTensor) -> Memory:
    """Return the memory of a global tensor, shared by its views."""
    if value._memory is None:
        value._memory = Memory()
    return value._memory


def note_view(view: Any, base: Tensor, op: Callable[..., Any], args: Any, kwargs: Any, shares: bool) -> None:
    """Record what a view, or each of several, was made of."""
    if not isinstance(base, GlobalTensor):
        return
    several = isinstance(view, (list, tuple))
    for index, one in enumerate(view if several else (view,)):
        if not isinstance(one, GlobalTensor):
            continue
        memory = memory_of(base)
        if shares:
            one._memory = memory
        if shares and base._origin is None:
            one._viewed = base._local, op
        else:
            which = index if several else None
            one._origin = ViewOrigin(
                without_graph(base), op, tuple(args), dict(kwargs), shares, which, memory.writes
            )


def current_local(value: GlobalTensor) -> Tensor:
    """Return the local part; a view that is a copy is made anew if its base was written since."""
    if value._origin is not None:
        renew(value)
    return value._local


def renew(value: GlobalTensor) -> None:
    """Make a copy, or a view of a copy, anew if its base was written since."""
    origin = value._origin
    if origin is None:
        return
    if origin.shares:
        before = origin.base._local
        if current_local(origin.base) is not before:
            _make_again(value, origin)
    elif memory_of(origin.base).writes != origin.seen:
        _make_again(value, origin)


def gathered(value: Tensor, cause: str = "full()") -> Tensor:
    """Return the full value of a global tensor without autograd, or the plain tensor itself."""
    if not isinstance(value, GlobalTensor):
        return value
    local, spec = current_local(value), value._spec
    if spec.placement == P:
        return summed([value], spec.axis.ranks, cause)[0]
    return redistributed(local, spec.type, spec.placement, R, spec.axis, cause)


def _make_again(value: GlobalTensor, origin: ViewOrigin) -> None:
    made = origin.op(origin.base, *origin.args, **origin.kwargs)
    fresh: GlobalTensor = made if origin.result is None else made[origin.result]
    value._local, value._spec = fresh._local, fresh._spec
    origin.seen = memory_of(origin.base).writes


def become(target: GlobalTensor, value: Tensor) -> None:
    """Give a tensor the value, memory and size of another one, as `target.data = value` does."""
    unit = target._spec.axis.ranks.unit
    given = value if isinstance(value, GlobalTensor) else wrapped(value.detach(), unit)
    with without_torch_function(), without_torch_dispatch():
        Tensor.data.__set__(target, given)  # type: ignore[attr-defined]
    target._local, target._spec, target._memory = current_local(given), given._spec, memory_of(given)
    target._origin, target._viewed = given._origin, given._viewed


def without_graph(value: GlobalTensor) -> GlobalTensor:
    """Return a tensor with the same local part, memory and origin, which autograd does not know."""
    made = GlobalTensor(value._local, value._spec)
    made._origin = None if value._origin is None else replace(value._origin)
    made._memory, made._viewed = memory_of(value), value._viewed
    return made
