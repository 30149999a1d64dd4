"""Writes in place that nobody can tell from a new value, as what gives that value.

    total += row                %total_1 = add_(%total, %row)               add(%total, %row)
    out[i] = f(x[i])            copy_(select(%out, 0, 0), %f); ...          stack([%f, %f_1, ...])

A loop over the samples that writes so is one whose turns do the same to other rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from fxdp.capture.export.loop_turns import memory_of, written_values

aten = torch.ops.aten

_WRITES = frozenset({aten.copy_.default, aten.fill_.Tensor})
_WITHOUT = {
    aten.add_.Tensor: aten.add.Tensor,
    aten.sub_.Tensor: aten.sub.Tensor,
    aten.mul_.Tensor: aten.mul.Tensor,
    aten.div_.Tensor: aten.div.Tensor,
    aten.relu_.default: aten.relu.default,
    aten.detach_.default: aten.detach.default,
}

_MAY_BE_ITS_ARGUMENT = frozenset(
    {
        "dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout", "meshgrid", "einsum", "pad",
        "broadcast_tensors", "atleast_1d", "atleast_2d", "atleast_3d", "conj_physical", "type_as",
        "sum_to_size", "cartesian_prod",
    }
)  # fmt: skip
"""Ops whose schemas do not say that their result may be a view."""


def drop_needless_writes(gm: fx.GraphModule) -> None:
    """Turn such writes into ops that write nothing; in place."""
    for node in gm.graph.nodes:
        if node.target in _WITHOUT and _is_read_once(node):
            node.target = _WITHOUT[node.target]
    written = written_values(gm)
    for node in list(gm.graph.nodes):
        if _is_fresh(node):
            _fill(node, written)
    gm.recompile()


def _is_fresh(node: fx.Node) -> bool:
    """Whether an op has made a value in memory of its own."""
    schema = getattr(node.target, "_schema", None)
    if node.op != "call_function" or schema is None or memory_of(node) is not node:
        return False
    return schema.name.rpartition("::")[2] not in _MAY_BE_ITS_ARGUMENT


def _is_read_once(write: fx.Node) -> bool:
    """Whether nobody else reads what is written, in memory of its own, and a new value is of its kind."""
    written: Any = write.args[0]
    if not _is_fresh(written) or list(written.users) != [write]:
        return False
    kinds = {value.meta["val"].dtype for value in write.all_input_nodes}
    return len(kinds) == 1 and write.kwargs.keys() <= {"alpha"}


def _fill(out: fx.Node, written: set[fx.Node]) -> None:
    """Make a value of which all rows are written, before anybody reads it, of these rows."""
    found = [(row, write) for row in out.users if (write := _write_of(row)) is not None]
    value = out.meta.get("val")
    for dim in {row.args[1] for row, _ in found} if isinstance(value, torch.Tensor) else ():
        if _fill_along(out, dim, [pair for pair in found if pair[0].args[1] == dim], written):
            break


def _fill_along(
    out: fx.Node, dim: Any, found: Sequence[tuple[fx.Node, fx.Node]], written: set[fx.Node]
) -> bool:
    value = out.meta["val"]
    rows: dict[Any, tuple[fx.Node, fx.Node]] = {row.args[2]: (row, write) for row, write in found}
    order = {node: place for place, node in enumerate(out.graph.nodes)}
    last = max((write for _, write in found), key=order.__getitem__)
    known = [row for row, _ in found]
    first = [user for user in out.users if user not in known and order[user] < order[last]]
    whole = sorted(rows) == list(range(value.shape[dim])) and len(found) == len(rows)
    if not whole or not all(_reads_before(user, dim, rows, order) for user in first):
        return False
    if any(memory_of(write.args[1]) in written for _, write in found):  # type: ignore[arg-type]
        return False  # what a row was given may be another value after the last one
    with out.graph.inserting_after(last):
        made = out.graph.call_function(aten.stack.default, ([], dim % value.dim()))
    made.meta = {**out.meta, "stack_trace": last.meta.get("stack_trace")}
    with out.graph.inserting_before(made):
        made.args = ([_as_row(*rows[at]) for at in range(value.shape[dim])], dim % value.dim())
    out.replace_all_uses_with(made, lambda user: user not in known and user not in first)
    for row, write in rows.values():
        out.graph.erase_node(write)
        out.graph.erase_node(row)
    return True


def _write_of(row: fx.Node) -> fx.Node | None:
    """The one op that reads a row, where that writes a value into it."""
    write = next(iter(row.users), row)
    fills = row.target is aten.select.int and write.target in _WRITES and write.args[0] is row
    alone = len(row.users) == 1 and not write.users and len(write.args) == 2
    return write if fills and alone and isinstance(write.args[1], fx.Node) else None


def _reads_before(
    read: fx.Node, dim: int, rows: dict[Any, tuple[fx.Node, fx.Node]], order: dict[fx.Node, int]
) -> bool:
    """Whether what is read is a row that is written later, and nobody reads it then."""
    if read.target is not aten.select.int or read.args[1] != dim or read.args[2] not in rows:
        return False
    write = rows[read.args[2]][1]
    return all(_is_fresh(user) and order[user] < order[write] for user in read.users)


def _as_row(row: fx.Node, write: fx.Node) -> fx.Node:
    """What is written, in the dtype and shape of the row."""
    written: Any = write.args[1]
    wanted, given = row.meta["val"], written.meta["val"]
    if given.dtype != wanted.dtype:
        written = _call(row, aten.to.dtype, written, wanted.dtype)
    if given.shape == wanted.shape:
        return written  # type: ignore[no-any-return]
    return _call(row, aten.expand.default, written, [*wanted.shape])


def _call(row: fx.Node, op: Any, *args: Any) -> fx.Node:
    made = row.graph.call_function(op, args)
    made.meta = dict(row.meta)
    return made
