"""Loop iterations that cannot be vectorized over the batch; they run one after another.

    for one, mask in zip(x, masks):                 iterations([%x, %masks], [], code, "float64[]")
        places = torch.where(mask)[0]
        losses.append(f(one[places]).sum())         code: def iteration(one, mask): ...

The sequential loop contains the part of each iteration from which a value of fixed size is computed: ops with
sizes that depend on the sample's data, and writes into values of the iteration, in order, up to the join of
the loop's results. All other parts of the iterations are vectorized and are operands of the loop.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from fxdp.capture.export.loop_iterations import Group, OtherError, draws_or_keeps, is_fresh, memory_of
from fxdp.ir.ops.sequential_sample_loop import NAMES, described
from fxdp.torch_compat import OpOverload, aten

_OF_SIZES = (torch.sym_max, torch.sym_min, torch.sym_float, torch.sym_not)
_BESIDE = frozenset({"fx_pytree", "pytree", "NoneType"})
"""Names that fx defines for all generated code."""


class SequentialLoop:
    """The nodes that compute one value per iteration, as the code of one iteration.

    `is_given` returns for values of all iterations whether the loop may read them unchanged; `writes` maps
    memory to the ops that write into the memory.

    Raises
    ------
    OtherError : the iterations differ, or contain ops that must not run more than once.
    """

    def __init__(
        self,
        made: Group,
        is_given: Callable[[Group], bool],
        writes: Mapping[fx.Node, Sequence[fx.Node]],
        before: fx.Node,
    ) -> None:
        self._made, self._is_given, self._writes, self._before = made, is_given, writes, before
        self._nodes = self._found()
        read = [self._read(nodes) for nodes in self._nodes]
        if len({len(values) for values in read}) > 1:
            raise OtherError
        self.read: list[Group] = list(zip(*read, strict=True))
        """Values that the iterations read; each group has one value per iteration."""
        self.result = self._result()

    @property
    def nodes(self) -> list[fx.Node]:
        """Return all nodes of all iterations."""
        return [node for nodes in self._nodes for node in nodes]

    def code(self, read: Sequence[Group]) -> str:
        """Return the code of an iteration, as a function of the values in `read`."""
        texts = {
            self._code(iteration, [group[iteration] for group in read])
            for iteration in range(len(self._made))
        }
        if len(texts) > 1:
            raise OtherError
        return texts.pop()

    def _found(self) -> list[list[fx.Node]]:
        """Return the nodes of each iteration, in order."""
        inside: dict[Group, None] = {}
        left = [self._made]
        while left:
            group = left.pop()
            if group in inside or (group is not self._made and self._is_given(group)):
                continue
            if not all(map(_may_run_again, group)):
                raise OtherError
            inside[group] = None
            left += [*_operands(group), *self._written(group)]
        iterations = (dict.fromkeys(column) for column in zip(*inside, strict=True))
        return [sorted(nodes) for nodes in iterations]

    def _written(self, group: Group) -> list[Group]:
        """Return further groups that must run so that these values are up to date when results are joined."""
        roots = tuple(map(memory_of, group))
        writes = [[w for w in self._writes.get(root, ()) if w < self._before] for root in roots]
        if not any(w is node or node < w for node, found in zip(group, writes, strict=True) for w in found):
            return []
        if len({len(found) for found in writes}) > 1 or not all(map(is_fresh, roots)):
            raise OtherError
        return [roots, *zip(*writes, strict=True)]

    @staticmethod
    def _read(nodes: Sequence[fx.Node]) -> list[fx.Node]:
        own = set(nodes)
        return list(dict.fromkeys(n for node in nodes for n in node.all_input_nodes if n not in own))

    def _result(self) -> str:
        """Return the dtype and shape of each iteration's value."""
        values = [node.meta.get("val") for node in self._made]
        kinds = {_kind(value) for value in values}
        if len(kinds) > 1 or None in kinds:
            raise OtherError
        return str(kinds.pop())

    def _code(self, iteration: int, read: Sequence[fx.Node]) -> str:
        graph = fx.Graph()
        copies = {node: graph.placeholder(f"x{place}") for place, node in enumerate(read)}
        for node in self._nodes[iteration]:
            if any(n not in copies for n in node.all_input_nodes):
                raise OtherError
            args, kwargs = fx.map_arg((node.args, node.kwargs), copies.__getitem__)
            copies[node] = graph.call_function(node.target, args, kwargs)  # type: ignore[arg-type]
        graph.output(copies[self._made[iteration]])
        code = graph.python_code("self")
        if code.globals.keys() - NAMES.keys() - _BESIDE:
            raise OtherError
        return _in_one_line(code.src)


def _in_one_line(code: str) -> str:
    """Return the code as `def iteration(x0): y = f(x0); return y`."""
    head, *lines = code[code.index("def forward(self, ") :].splitlines()
    statements = [line.strip().partition(";")[0] for line in lines if line.strip()]
    return f"{head.replace('forward(self, ', 'iteration(')} {'; '.join(statements)}"


def _operands(group: Group) -> list[Group]:
    """Return the groups of nodes that a group reads."""
    leaves = [pytree.tree_leaves((node.args, node.kwargs)) for node in group]
    if len({len(found) for found in leaves}) > 1:
        raise OtherError
    return [column for column in zip(*leaves, strict=True) if all(isinstance(x, fx.Node) for x in column)]


def _may_run_again(node: fx.Node) -> bool:
    """Return whether a node is an op, or arithmetic on numbers, without random numbers and state."""
    if node.op != "call_function" or node.target is aten.detach_.default:
        return False
    if isinstance(node.target, OpOverload):
        return not draws_or_keeps(node) and _writes_its_first(node.target)
    of_number = getattr(node.target, "__module__", "") == "_operator" or node.target in _OF_SIZES
    return node.target is operator.getitem or (of_number and not isinstance(node.meta.get("val"), Tensor))


def _writes_its_first(target: OpOverload) -> bool:
    """Return whether an op writes nothing, or writes only the first operand and returns it."""
    written = [place for place, argument in enumerate(target._schema.arguments) if argument.is_write]
    gives = [returned.alias_info is not None for returned in target._schema.returns]
    return not written or (written == [0] and gives == [True])


def _kind(value: Any) -> str | None:
    if isinstance(value, torch.SymInt):
        return described(torch.int64, [])
    known = isinstance(value, Tensor) and all(isinstance(size, int) for size in value.shape)
    return described(value.dtype, value.shape) if known else None
