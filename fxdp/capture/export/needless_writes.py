"""Writes in place that nobody can tell from a new value, as what gives that value.

    total += row                %total_1 = add_(%total, %row)               add(%total, %row)
    (x @ y)[:, 1:].mul_(mask)   %part_1 = mul_(slice(%xy, 1, 1), %mask)     mul(slice(%xy, 1, 1), %mask)
    out[i] = f(x[i])            copy_(select(%out, 0, 0), %f); ...          stack([%f, %f_1, ...])

What is written into a part of a value of which nothing else is read would be put back, and taken out again:
where parts are reshaped (the relative positions of Funnel), in indices that keep Inductor busy for minutes.
A loop over the samples that writes so is one whose turns do the same to other rows.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from fxdp.capture.export.loop_iterations import is_fresh, memory_of, writes_of
from fxdp.capture.export.row_scatters import rows_as_values
from fxdp.torch_compat import aten

_WITHOUT = {
    aten.add_.Tensor: aten.add.Tensor,
    aten.sub_.Tensor: aten.sub.Tensor,
    aten.mul_.Tensor: aten.mul.Tensor,
    aten.div_.Tensor: aten.div.Tensor,
    aten.relu_.default: aten.relu.default,
    aten.detach_.default: aten.detach.default,
}


def give_new_values(gm: fx.GraphModule) -> None:
    """Turn writes into what nobody else reads into ops that write nothing; in place.

    None where memory is counted in: a new value may lie otherwise than what was written into.
    """
    if gm.graph.find_nodes(op="call_function", target=aten.as_strided.default):
        return
    for node in gm.graph.nodes:
        if node.target in _WITHOUT and _is_read_once(node):
            node.target = _WITHOUT[node.target]
    gm.recompile()


def drop_needless_writes(gm: fx.GraphModule) -> None:
    """Turn all such writes into ops that write nothing; in place."""
    give_new_values(gm)
    written = writes_of(gm)
    for node in list(gm.graph.nodes):
        if is_fresh(node):
            rows_as_values(node, written)
    gm.recompile()


def _is_read_once(write: fx.Node) -> bool:
    """Whether nobody else reads what is written, in memory of its own, and a new value is of its kind."""
    written: Any = write.args[0]
    kinds = {value.meta["val"].dtype for value in write.all_input_nodes}
    return len(kinds) == 1 and write.kwargs.keys() <= {"alpha"} and _is_own(written, write)


def _is_own(value: fx.Node, reader: fx.Node) -> bool:
    """Whether one node alone reads a value, or what that is a part of, and so on to what an op has made."""
    if list(value.users) != [reader]:
        return False
    return is_fresh(value) or (memory_of(value) is not value and _is_own(value.all_input_nodes[0], value))
