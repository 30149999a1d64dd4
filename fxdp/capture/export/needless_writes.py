"""Functionalize in-place writes if no other node can observe the write.

    total += row                %total_1 = add_(%total, %row)               add(%total, %row)
    (x @ y)[:, 1:].mul_(mask)   %part_1 = mul_(slice(%xy, 1, 1), %mask)     mul(slice(%xy, 1, 1), %mask)
    out[i] = f(x[i])            copy_(select(%out, 0, 0), %f); ...          stack([%f, %f_1, ...])

Torch's functionalization would scatter the written part back into the base and slice it out again. If parts
are reshaped (as the relative positions of Funnel), the resulting index expressions keep Inductor busy for
minutes. A loop over the samples that writes in this way becomes a loop whose iterations do the same to
different rows. A tensor that is filled row by row becomes a stack of its rows:

    out[i, :3] = f(x[i])    %row = slice_scatter(select(%out, 0, i), %f, 0, 0, 3)       stack([%row, ...])

Between writes, reads of a row are redirected to the row's latest value.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Container, Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from torch import fx

from fxdp.capture.export.loop_iterations import is_fresh, memory_of, writes_of
from fxdp.torch_compat import aten

_WITHOUT = {
    aten.add_.Tensor: aten.add.Tensor,
    aten.sub_.Tensor: aten.sub.Tensor,
    aten.mul_.Tensor: aten.mul.Tensor,
    aten.div_.Tensor: aten.div.Tensor,
    aten.relu_.default: aten.relu.default,
    aten.detach_.default: aten.detach.default,
}
_WRITES = frozenset({aten.copy_.default, aten.fill_.Tensor, aten.fill_.Scalar})
_SCATTERS: dict[Any, Any] = {
    aten.select.int: aten.select_scatter.default,
    aten.slice.Tensor: aten.slice_scatter.default,
}


def give_new_values(gm: fx.GraphModule) -> None:
    """Replace in-place ops by out-of-place ops if no other node reads the written memory; in place.

    Does nothing if the graph uses `as_strided`: a new value may have strides that differ from the written
    one.
    """
    if gm.graph.find_nodes(op="call_function", target=aten.as_strided.default):
        return
    for node in gm.graph.nodes:
        if node.target in _WITHOUT and _is_read_once(node):
            node.target = _WITHOUT[node.target]
    gm.recompile()


def drop_needless_writes(gm: fx.GraphModule) -> None:
    """Replace all unobservable writes, including writes of rows, by ops without writes; in place."""
    give_new_values(gm)
    written = writes_of(gm)
    for node in list(gm.graph.nodes):
        if is_fresh(node):
            _rows_as_values(node, written)
    gm.recompile()


def _is_read_once(write: fx.Node) -> bool:
    """Return whether the written value has no further reader, and the new value would have the same dtype.

    A size that is written, as by `index += x.shape[0]`, has no dtype of its own.
    """
    written: Any = write.args[0]
    values = (value.meta["val"] for value in write.all_input_nodes)
    kinds = {value.dtype for value in values if isinstance(value, torch.Tensor)}
    return len(kinds) == 1 and write.kwargs.keys() <= {"alpha"} and _is_own(written, write)


def _is_own(value: fx.Node, reader: fx.Node) -> bool:
    """Return whether `reader` alone reads a value and the chain of views down to newly made memory."""
    if list(value.users) != [reader]:
        return False
    return is_fresh(value) or (memory_of(value) is not value and _is_own(value.all_input_nodes[0], value))


def _rows_as_values(out: fx.Node, written: Container[fx.Node]) -> None:
    """Replace a tensor that is filled row by row before any read by a stack of rows; in place."""
    value = out.meta.get("val")
    takes = [user for user in out.users if user.target is aten.select.int and any(_writes(user))]
    for dim in {take.args[1] for take in takes} if isinstance(value, torch.Tensor) else ():
        rows = _Rows(out, dim)
        if rows.can_be_values(written):
            rows.make_values()
            break


def _views(take: fx.Node) -> Iterator[fx.Node]:
    """Yield a selected row, and views of parts of the row."""
    yield take
    for user in take.users:
        if user.target in _SCATTERS and user.args[0] is take:
            yield from _views(user)


def _writes(take: fx.Node) -> Iterator[fx.Node]:
    """Yield the writes into a row or its parts, if the result of the write is unused."""
    for view in _views(take):
        for user in view.users:
            alone = user.target in _WRITES and user.args[0] is view and len(user.args) == 2 and not user.users
            if alone and isinstance(user.args[1], fx.Node | int | float) and user.args[1] is not view:
                yield user


class _Rows:
    """The rows of a value along a dim, while the rows are written."""

    def __init__(self, out: fx.Node, dim: Any) -> None:
        self._out, self._dim = out, dim
        self._place = {node: place for place, node in enumerate(out.graph.nodes)}
        takes = [user for user in out.users if user.target is aten.select.int and user.args[1] == dim]
        writes = sorted(chain.from_iterable(map(_writes, takes)), key=self._place.__getitem__)
        self._first, self._last = writes[0], writes[-1]
        self._takes = sorted(filter(self._is_early, takes), key=self._place.__getitem__)
        self._paths = {write: self._path(write) for write in writes}
        self._writes: dict[Any, list[fx.Node]] = {take.args[2]: [] for take in self._takes}
        for write, path in self._paths.items():
            self._writes[path[-1].args[2]].append(write)

    def can_be_values(self, written: Container[fx.Node]) -> bool:
        """Return whether the rewrite is unobservable: each row is written, and reads precede later writes."""
        size = self._out.meta["val"].shape[self._dim]
        if not isinstance(size, int) or self._writes.keys() != set(range(size)):
            return False
        others = [user for user in self._out.users if self._is_early(user) and user not in self._takes]
        full = [write for write, path in self._paths.items() if len(path) == 1]
        return (
            all(self._writes.values())
            and all(_is_known(view) for path in self._paths.values() for view in path)
            and all(is_fresh(user) and self._place[user] < self._place[self._first] for user in others)
            # a row that is written in full becomes the written value itself, which must not be modified later
            and not any(memory_of(v) in written for w in full if isinstance(v := w.args[1], fx.Node))
            and all(map(self._is_read_as_taken, self._takes))
        )

    def make_values(self) -> None:
        """Replace the writes by new values of rows, and the complete tensor by a stack of the rows."""
        graph = self._out.graph
        left = {user for user in self._out.users if self._is_early(user)}
        rows = [self._latest(row) for row in range(len(self._writes))]
        with graph.inserting_before(self._last):
            made = graph.call_function(aten.stack.default, (rows, self._dim))
        made.meta = {**self._out.meta, "stack_trace": self._last.meta.get("stack_trace")}
        self._out.replace_all_uses_with(made, lambda user: user not in left)
        for write in self._paths:
            graph.erase_node(write)
        views = chain(*self._paths.values(), self._takes)
        for view in sorted(set(views), key=self._place.__getitem__, reverse=True):
            if not view.users:
                graph.erase_node(view)

    def _is_early(self, node: fx.Node) -> bool:
        return self._place[node] < self._place[self._last]

    def _path(self, write: fx.Node) -> list[fx.Node]:
        """Return the chain of views from the operand of a write to the row."""
        path: list[Any] = [write.args[0]]
        while path[-1].args[0] is not self._out:
            path.append(path[-1].args[0])
        return path

    def _is_read_as_taken(self, take: fx.Node) -> bool:
        """Return whether all readers of a row read before the next write, and none keeps a view."""
        writes = self._writes[take.args[2]]
        places = [self._place[write] for write in writes]
        version = bisect_left(places, self._place[take])
        views = list(_views(take))
        return all(
            (is_fresh(user) or user in writes) and bisect_left(places, self._place[user]) == version
            for view in views
            for user in view.users
            if user not in views
        )

    def _latest(self, row: int) -> fx.Node:
        """Return the last value of a row, and redirect each earlier read to the row's value at that time."""
        takes = [take for take in self._takes if take.args[2] == row]
        value = takes[0]
        for step in sorted([*takes[1:], *self._writes[row]], key=self._place.__getitem__):
            if step not in self._paths:
                step.replace_all_uses_with(value)
                continue
            with self._out.graph.inserting_before(step):
                value = _scattered(step, self._paths[step])
        return value


def _scattered(write: fx.Node, path: Sequence[fx.Node]) -> fx.Node:
    """Return the value of a row after a write into a part of the row."""
    value = _as_part(path[0], write)
    for view in path[:-1]:
        of: Any = view.args[0]
        value = _call(of, _SCATTERS[view.target], of, value, *_place_in(of, *view.args[1:]))
    return value


def _is_known(view: fx.Node) -> bool:
    """Return whether the position of a view is known in the trace."""
    of: Any = view.args[0]
    sizes = of.meta["val"].shape
    return all(isinstance(number, int) for number in (*view.args[1:], *sizes))


def _place_in(of: fx.Node, dim: Any, index: Any = None, *rest: Any) -> tuple[Any, ...]:
    """Return the position of a part in a value; bounds of slices are clipped, as scatters require."""
    if not rest:
        return dim, index
    return dim, *slice(index, *rest).indices(of.meta["val"].shape[dim])


def _as_part(part: fx.Node, write: fx.Node) -> fx.Node:
    """Return the written value, in the dtype and shape of the part."""
    written: Any = write.args[1]
    wanted = part.meta["val"]
    if not isinstance(written, fx.Node):
        kind = {"dtype": wanted.dtype, "device": wanted.device}
        return _call(part, aten.full.default, [*wanted.shape], written, **kind)
    given = written.meta["val"]
    if given.dtype != wanted.dtype:
        written = _call(part, aten.to.dtype, written, wanted.dtype)
    if given.shape == wanted.shape:
        return written  # type: ignore[no-any-return]
    return _call(part, aten.expand.default, written, [*wanted.shape])


def _call(like: fx.Node, op: Any, *args: Any, **kwargs: Any) -> fx.Node:
    made = like.graph.call_function(op, args, kwargs)
    made.meta = dict(like.meta)
    return made
