"""Analysis of nodes in iterations of a loop over samples: slices of samples, ops, and terms of sums."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from fxdp.ir.graph.graphs import written_operands
from fxdp.torch_compat import OpOverload, aten

SPLITS = frozenset({aten.unbind.int, aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default})
"""Ops that split a value along a dim."""
_SIGNS: dict[Any, tuple[int, int]] = {
    **dict.fromkeys((aten.add.Tensor, aten.add_.Tensor, operator.add), (1, 1)),
    **dict.fromkeys((aten.sub.Tensor, aten.sub_.Tensor, operator.sub), (1, -1)),
    aten.rsub.Scalar: (-1, 1),
}
"""The signs of both operands, for sums and differences of two."""
_STATEFUL = ("batch_norm", "instance_norm", "lstm", "gru", "rnn")
"""Ops with running averages or random numbers that their schemas do not declare."""
_MAY_BE_ITS_ARGUMENT = frozenset(
    {
        "dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout", "meshgrid", "einsum", "pad",
        "broadcast_tensors", "atleast_1d", "atleast_2d", "atleast_3d", "conj_physical", "type_as",
        "sum_to_size", "cartesian_prod",
    }
)  # fmt: skip
"""Ops with a result that may be a view although the schema does not declare that."""
_ATTENTION = aten.scaled_dot_product_attention.default
Group: TypeAlias = "tuple[fx.Node, ...]"


class OtherError(Exception):
    """Raised if the iterations of a loop are not the same ops."""


@dataclass(frozen=True, slots=True)
class SamplePart:
    """A contiguous slice of a value along a dim."""

    source: fx.Node
    dim: int
    rows: int | None
    """Length of the slice; None if the dim is removed: `x[i]`."""
    start: int


def part_of(node: fx.Node) -> SamplePart | None:
    """Return the slice of a value that a node takes; None if the node does anything else."""
    if node.target is operator.getitem:
        return _member_of(*node.args)
    if node.target not in (aten.select.int, aten.slice.Tensor):
        return None
    source, dim, *bounds = node.args
    size = _size(source, dim)
    if size is None or not all(isinstance(bound, int) for bound in bounds):
        return None
    dim %= source.meta["val"].dim()  # type: ignore[union-attr]
    if node.target is aten.select.int:
        return SamplePart(source, dim, None, bounds[0] % size)  # type: ignore[arg-type,operator]
    start, end, step = slice(*bounds).indices(size) if len(bounds) > 1 else (0, size, 0)
    return SamplePart(source, dim, end - start, start) if step == 1 else None  # type: ignore[arg-type]


def _member_of(apart: Any, index: Any) -> SamplePart | None:
    """Return the slice that a result of `unbind`, or of a split into equal parts, takes."""
    if apart.target not in SPLITS:
        return None
    source, dim = apart.args[0], split_dim(apart)
    if apart.target is aten.unbind.int:
        return SamplePart(source, dim, None, index)
    rows = {part.shape[dim] for part in apart.meta["val"]}
    count = next(iter(rows))
    equal = len(rows) == 1 and isinstance(count, int)
    return SamplePart(source, dim, count, index * count) if equal else None


def split_dim(apart: fx.Node) -> int:
    """Return the dim along which one of `SPLITS` splits a value."""
    source: Any = apart.args[0]
    position = 1 if apart.target is aten.unbind.int else 2
    return int(dim_at(apart, position) % source.meta["val"].dim())


def dim_at(node: fx.Node, position: int) -> int:
    """Return the argument `dim` of a call, which has this position; 0 if the call leaves it out."""
    found: Any = node.args[position] if len(node.args) > position else node.kwargs.get("dim", 0)
    return int(found)


def _size(source: Any, dim: Any) -> int | None:
    value = source.meta.get("val") if isinstance(source, fx.Node) else None
    size = value.shape[dim] if isinstance(value, Tensor) and isinstance(dim, int) else None
    return size if isinstance(size, int) else None


_Term: TypeAlias = "tuple[fx.Node, int]"
"""A value that a sum adds, with its sign."""
_Way: TypeAlias = "tuple[list[tuple[Group, int]], Any]"
"""Groups of one value per iteration, each with a sign; and the value before the loop's sums, if any."""


def ways_of(node: fx.Node, iterations: int, each: int) -> tuple[list[_Way], list[fx.Node]]:
    """Return possible decompositions of a chain of sums into `each` values per iteration; and the sums."""
    terms, sums, start = _terms(node, iterations * each)
    missing = iterations * each - len(terms)
    found: list[tuple[list[_Term], Any]] = []
    if not missing:  # with a full chain the first iteration's own value may be a sum, too
        found = [(terms, start), ([(sums[-1], 1), *terms[1:]], None)]
    elif missing == 1 and isinstance(start, fx.Node):
        found = [([(start, 1), *terms], None)]
    branches = []
    for taken, begun in found:
        groups = [tuple(zip(*taken[iteration::each], strict=True)) for iteration in range(each)]
        if all(len(set(signs)) == 1 for _, signs in groups):
            branches.append(([(group, signs[0]) for group, signs in groups], begun))
    return branches, sums


def _terms(node: fx.Node, most: int) -> tuple[list[_Term], list[fx.Node], Any]:
    """Walk a chain of sums back from the last node; return terms in order, sums, and the initial value."""
    terms: list[_Term] = []
    sums: list[fx.Node] = []
    left: Any = node
    while len(terms) < most and _takes(left, fx.Node) and (left is node or len(left.users) == 1):
        sums.append(left)
        terms.append((left.args[1], _SIGNS[left.target][1]))
        left = left.args[0]
    if len(terms) < most and _takes(left, (int, float)) and len(left.users) == 1:
        sums.append(left)
        of_value, of_number = _SIGNS[left.target]
        terms.append((left.args[0], of_value))
        left = of_number * left.args[1] or None
    return terms[::-1], sums, left


def _takes(node: Any, kind: Any) -> bool:
    return is_sum(node) and isinstance(node.args[1], kind)


def is_sum(node: Any) -> bool:
    """Return whether a node is `a + b`, `a - b`, or an `a += b` for which nothing else reads `a`."""
    return isinstance(node, fx.Node) and node.target in _SIGNS and len(node.args) == 2 and not node.kwargs


def are_alike(first: fx.Node, other: fx.Node) -> bool:
    """Return whether two nodes are the same op with values of equal dtypes and shapes."""
    return first.target is other.target and _kinds(first) == _kinds(other)


def _kinds(node: fx.Node) -> list[Any]:
    # data-dependent sizes are compared by name, since torch cannot compare them; values of vectorized loops
    # have none
    values = pytree.tree_leaves(node.meta.get("val"))
    return [(v.dtype, *map(str, v.shape)) if isinstance(v, Tensor) else (type(v),) for v in values]


def is_of_operands_alone(node: fx.Node) -> bool:
    """Return whether a node is a pure op with tensor results of known sizes: no writes, no random numbers."""
    values = pytree.tree_leaves(node.meta.get("val"))
    if not values or not all(isinstance(value, Tensor) for value in values):
        return False
    if not all(isinstance(size, int) for value in values for size in value.shape):
        return False
    target = node.target
    if target is operator.getitem or (target is _ATTENTION and not _drops(node)):
        return True
    if not isinstance(target, OpOverload) or draws_or_keeps(node):
        return False
    return not target._schema.is_mutable or target is aten.detach_.default


def draws_or_keeps(node: fx.Node) -> bool:
    """Return whether an op draws random numbers, or has a state."""
    target: Any = node.target
    if target is _ATTENTION:
        return _drops(node)
    draws = torch.Tag.nondeterministic_seeded in target.tags
    return draws or any(name in target._schema.name for name in _STATEFUL)


def _drops(node: fx.Node) -> bool:
    return bool(node.args[4] if len(node.args) > 4 else node.kwargs.get("dropout_p", 0.0))


def writes_of(gm: fx.GraphModule, *, own_sums: bool = False) -> dict[fx.Node, list[fx.Node]]:
    """Return the ops that write into each value, or into a view of the value, in order.

    With `own_sums` this includes `a += b` and `a -= b` on unshared values.
    """
    found: dict[fx.Node, list[fx.Node]] = {}
    for node in gm.graph.nodes:
        if node.op != "call_function" or node.target is aten.detach_.default:
            continue
        if not own_sums and _is_own_sum(node):
            continue
        if isinstance(node.target, OpOverload):
            written = written_operands(node)
        else:  # a subgraph, which may write into its operands
            regions = [getattr(gm, n.target) for n in node.all_input_nodes if _is_graph(gm, n)]
            written = node.all_input_nodes if any(map(writes_of, regions)) else []
        for operand in written:
            found.setdefault(memory_of(operand), []).append(node)
    return found


def _is_graph(gm: fx.GraphModule, node: fx.Node) -> bool:
    return node.op == "get_attr" and isinstance(getattr(gm, str(node.target), None), fx.GraphModule)


def _is_own_sum(node: fx.Node) -> bool:
    """Return whether a node is `a += b` or `a -= b` on a value `a` that is not a view and has one user."""
    of = node.args[0] if node.target in (aten.add_.Tensor, aten.sub_.Tensor) else None
    return isinstance(of, fx.Node) and memory_of(of) is of and len(of.users) == 1


def memory_of(node: fx.Node) -> fx.Node:
    """Return the value that may own the memory of a node's value."""
    while True:
        if node.target is operator.getitem:
            node = node.args[0]  # type: ignore[assignment]
            continue
        schema = getattr(node.target, "_schema", None)
        shared = schema is not None and any(returned.alias_info is not None for returned in schema.returns)
        if not shared or not isinstance(node.args[0], fx.Node):
            return node
        node = node.args[0]


def is_fresh(node: fx.Node) -> bool:
    """Return whether a node is an op with a result in newly allocated memory."""
    schema = getattr(node.target, "_schema", None)
    if node.op != "call_function" or schema is None or memory_of(node) is not node:
        return False
    if node.target is aten.einsum.default and len(node.args[1]) > 1:  # type: ignore[arg-type]
        return True  # a product
    return schema.name.rpartition("::")[2] not in _MAY_BE_ITS_ARGUMENT
