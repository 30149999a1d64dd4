"""Erase lengths that were read from data and that no op needs, after their parts were joined again.

    lengths.tolist()            %n = item(getitem(unbind(%lengths), 0)), ...    erased
    %n >= 0, assert             %ok = ge(%n, 0);  _assert_scalar(%ok)           erased
    rows.numel()                %all = add(mul(10, %n), mul(10, %m), ...)       mul(sym_size(%x, 0), 10)

The sum of all lengths is the size of the tensor that was split, so numbers that only need the sum are
computed from that size.
"""

from __future__ import annotations

import operator
from collections.abc import Container, Iterable, Iterator, Sequence
from typing import Any

import sympy
import torch
from torch import fx

from fxdp.ir.graph.graphs import spread
from fxdp.torch_compat import aten

_ASSERTIONS = frozenset(
    {
        aten._assert_scalar.default,
        aten.sym_constrain_range.default,
        aten.sym_constrain_range_for_size.default,
    }
)
_NUMBERS = (bool, int, float, torch.SymBool, torch.SymInt, torch.SymFloat)
_READS = frozenset(
    {aten.item.default, aten._local_scalar_dense.default, aten.select.int, aten.unbind.int, operator.getitem}
)


def drop_lengths(x: fx.Node, dim: int, lengths: Sequence[Any]) -> None:
    """Erase the lengths of all parts of `x` along `dim`, if only the sum of lengths is needed; in place."""
    numbers = [length for length in lengths if isinstance(length, fx.Node)]
    readers = _readers(numbers)
    wanted = [node for node in readers if any(not _is_number(user) for user in node.users)]
    shares = [_share(node, lengths) for node in wanted]
    others = any(not _is_number(user) for number in numbers for user in number.users)
    if others or None in shares:
        return
    with x.graph.inserting_after(x):
        total = x.graph.call_function(aten.sym_size.int, (x, dim))
    total.meta = {**x.meta, "val": x.meta["val"].shape[dim]}
    for node, share in zip(wanted, shares, strict=True):
        with x.graph.inserting_before(node):
            made = x.graph.call_function(operator.mul, (total, share))
        made.meta = dict(node.meta)
        node.replace_all_uses_with(made, lambda user: not _is_number(user))
    for node in reversed(readers):
        x.graph.erase_node(node)
    if not total.users:
        x.graph.erase_node(total)
    for number in numbers:
        _erase_unread(number)


def unread_assertions(graph: fx.Graph, unread: Container[fx.Node]) -> list[fx.Node]:
    """Return assertions about values without further readers, and the numbers computed for the assertions."""
    kinds = _all_of(graph, (aten._assert_tensor_metadata.default,))
    found = [node for node in kinds if node.args[0] in unread]
    for node in _all_of(graph, _ASSERTIONS):
        numbers = list(_numbers_of(node))
        if any(n in unread for number in numbers for n in (number, *number.all_input_nodes)):
            found += [node, *numbers]
    return found


def _all_of(graph: fx.Graph, targets: Iterable[Any]) -> list[fx.Node]:
    return [node for target in targets for node in graph.find_nodes(op="call_function", target=target)]


def _numbers_of(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the numbers that a node reads, and the results of ops that have these numbers as sizes."""
    for number in node.all_input_nodes:
        if _is_number(number) or number.target is operator.getitem:
            yield number
            yield from _numbers_of(number)


def _is_number(node: fx.Node) -> bool:
    return node.target in _ASSERTIONS or isinstance(node.meta.get("val"), _NUMBERS)


def _readers(numbers: Sequence[fx.Node]) -> list[fx.Node]:
    """Return all numbers computed from these, and assertions about these, in order."""
    users = (user for number in numbers for user in number.users if _is_number(user))
    found = spread(users, lambda node: filter(_is_number, node.users))
    return [node for node in numbers[0].graph.nodes if node in found] if numbers else []


def _share(node: fx.Node, lengths: Sequence[Any]) -> int | None:
    """Return the factor of a number that is a multiple of the sum of all lengths; None for other numbers."""
    of = [_expression(length) for length in lengths]
    one = sympy.expand(_expression(node))
    factor = one.coeff(of[0]) if of[0].is_Symbol else sympy.nan
    alike = factor.is_Integer and sympy.expand(factor * sum(of) - one) == 0
    return int(factor) if alike else None


def _expression(value: Any) -> Any:
    if isinstance(value, fx.Node):
        value = value.meta["val"]
    return sympy.sympify(getattr(getattr(value, "node", None), "expr", value))


def _erase_unread(node: fx.Node) -> None:
    """Erase an unread read of a number, and unread operands: `item(getitem(unbind(lengths), 0))`."""
    if node.users or node.target not in _READS or node._erased:
        return
    sources = node.all_input_nodes
    node.graph.erase_node(node)
    for source in sources:
        _erase_unread(source)
