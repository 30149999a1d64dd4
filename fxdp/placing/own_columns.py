"""A rank's own columns of a mask, computed from its own part of the operands and not cut from the mask.

before: %eq = eq(%rows, %columns)                          the rank's rows, all columns
after:  %own = slice(%columns, -1, offset, offset + b)
        %eq_own = eq(%rows, %own)                          the rank's rows and columns
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import fx

from fxdp.ir import redistributions
from fxdp.ir.graph.metadata import copy_meta, meta, tensor_type
from fxdp.ir.ops.library import aten
from fxdp.ir.types.placements import Shard
from fxdp.ir.types.value_types import ScalarType
from fxdp.rules.registry import registry


@dataclass(frozen=True)
class OwnRange:
    """The rows of an axis that a rank has, and all that was cut to these: once, before the first user.

    `start`, `end` and `size` are numbers in the graph.
    """

    start: fx.Node
    end: fx.Node
    size: fx.Node
    made: dict[tuple[fx.Node, tuple[int, ...]], fx.Node]


def own_part(source: fx.Node, dims: Iterable[int], user: fx.Node, own: OwnRange) -> fx.Node:
    """Return the part of `source` within a rank's range along each of `dims`, computed before `user`."""
    key = source, tuple(sorted(dims))
    if not key[1]:
        return source
    if key not in own.made:
        own.made[key] = _made(*key, user, own)
    return own.made[key]


def _made(source: fx.Node, dims: tuple[int, ...], user: fx.Node, own: OwnRange) -> fx.Node:
    ndim, target = len(tensor_type(source).shape), source.target

    def part(value: fx.Node) -> fx.Node:
        shape = tensor_type(value).shape
        at = (dim + len(shape) - ndim for dim in dims)
        return own_part(value, (dim for dim in at if dim >= 0 and shape[dim] != 1), user, own)

    if target is redistributions.shard and source.args[2] == 1 and source.args[1] not in dims:
        return own_part(source.args[0], (*dims, source.args[1]), user, own)  # type: ignore[arg-type]
    args: Any
    if _is_pointwise(target):
        args = fx.map_arg(source.args, part)
    elif target is aten.unsqueeze.default and (added := int(source.args[1]) % ndim) not in dims:  # type: ignore[arg-type]
        inner = (dim - (added < dim) for dim in dims)
        args = own_part(source.args[0], inner, user, own), source.args[1]  # type: ignore[arg-type]
    elif target is aten.expand.default:
        sizes = [own.size if dim in dims else size for dim, size in enumerate(source.args[1])]  # type: ignore[arg-type]
        args = part(source.args[0]), sizes  # type: ignore[arg-type]
    else:
        target = aten.slice.Tensor
        args = own_part(source, dims[:-1], user, own), dims[-1], own.start, own.end
    with user.graph.inserting_before(user):
        kwargs = {} if target is aten.slice.Tensor else source.kwargs
        node = user.graph.call_function(target, args, kwargs)  # type: ignore[arg-type]
    placement = meta(source).placement
    operands = [n for n in node.all_input_nodes if not isinstance(meta(n).type, ScalarType)]
    copy_meta(
        source, node, spec=None, backward=meta(user).backward,
        placement=placement if isinstance(placement, Shard) else Shard(dims[0]),
        operands=tuple(meta(value).placement for value in operands),
    )  # fmt: skip
    return node


def _is_pointwise(target: Any) -> bool:
    """Return whether an op's operands broadcast, so that a part of the result comes from a part of each."""
    found = registry.get(target)
    return found is not None and found.family == "pointwise"
