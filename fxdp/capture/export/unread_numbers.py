"""Numbers that were read from tensors and that no op needs any more, after a rewrite.

    lengths.tolist()        %n = item(select(%lengths, 0))
                            %ok = %n >= 0;  _assert_scalar(%ok)         erased, with what is computed of it

A number that only assertions read is as good as unread: what needed it to be right is gone.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable

import torch
from torch import fx

aten = torch.ops.aten

_ASSERTIONS = frozenset(
    {
        aten._assert_scalar.default,
        aten.sym_constrain_range.default,
        aten.sym_constrain_range_for_size.default,
        torch._check,
    }
)
_NUMBERS = (bool, int, float, torch.SymBool, torch.SymInt, torch.SymFloat)
_READS = frozenset(
    {aten.item.default, aten._local_scalar_dense.default, aten.select.int, aten.unbind.int, operator.getitem}
)


def drop_numbers(graph: fx.Graph, numbers: Iterable[fx.Node]) -> None:
    """Erase these numbers where nothing but assertions reads them, and the reads that gave them; in place."""
    for number in dict.fromkeys(numbers):
        readers = _readers(number)
        if readers is not None:
            for node in reversed(readers):
                graph.erase_node(node)
            _erase_unread(number)


def _readers(number: fx.Node) -> list[fx.Node] | None:
    """All that is computed of a number, in order; None where anything but numbers and assertions is."""
    found: set[fx.Node] = set()
    left = list(number.users)
    while left:
        node = left.pop()
        if node.target not in _ASSERTIONS and not isinstance(node.meta.get("val"), _NUMBERS):
            return None
        found.add(node)
        left += node.users
    return [node for node in number.graph.nodes if node in found]


def _erase_unread(node: fx.Node) -> None:
    """Erase a read, and what only it has read of: `item(getitem(unbind(lengths), 0))`."""
    if node.users or node.target not in _READS:
        return
    sources = node.all_input_nodes
    node.graph.erase_node(node)
    for source in sources:
        _erase_unread(source)
