"""Functionalize in-place writes if no other node can observe the write.

    total += row                %total_1 = add_(%total, %row)               add(%total, %row)
    (x @ y)[:, 1:].mul_(mask)   %part_1 = mul_(slice(%xy, 1, 1), %mask)     mul(slice(%xy, 1, 1), %mask)
    out[i] = f(x[i])            copy_(select(%out, 0, 0), %f); ...          stack([%f, %f_1, ...])

Torch's functionalization would scatter the written part back into the base and slice it out again. If parts
are reshaped (as the relative positions of Funnel), the resulting index expressions keep Inductor busy for
minutes. A loop over the samples that writes in this way becomes a loop whose iterations do the same to
different rows.
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
            rows_as_values(node, written)
    gm.recompile()


def _is_read_once(write: fx.Node) -> bool:
    """Return whether the written value has no further reader, and the new value would have the same dtype."""
    written: Any = write.args[0]
    kinds = {value.meta["val"].dtype for value in write.all_input_nodes}
    return len(kinds) == 1 and write.kwargs.keys() <= {"alpha"} and _is_own(written, write)


def _is_own(value: fx.Node, reader: fx.Node) -> bool:
    """Return whether `reader` alone reads a value and the chain of views down to newly made memory."""
    if list(value.users) != [reader]:
        return False
    return is_fresh(value) or (memory_of(value) is not value and _is_own(value.all_input_nodes[0], value))
