"""Random ops for the global batch: each draws what a single device would, and keeps a rank's part.

They are opaque to Inductor, whose random numbers would differ from eager's, and each reads the previous draw,
so that no compiler changes their order. On a GPU the same kernel is launched over the same shape, so the
Philox counters and the generator's offset also equal those of a single device.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fxdp.ir.ops.library import existing, opaque
from fxdp.ir.ops.parts import take_part, unflatten
from fxdp.torch_compat import OpOverload, aten

UNREAD = -2  # marks a tensor of which the op reads the shape only
_ALIKE = 0.5  # stands for values of remote ranks: a probability, a mean, a deviation, a weight

IN_PLACE = {
    aten.bernoulli.p: aten.bernoulli_.float,
    aten.normal_functional.default: aten.normal_.default,
}
"""The in-place op from which capture makes each of these ops, which would fill memory in a different order.

`normal_` draws one number at a time into memory with gaps, and blocks of numbers elsewhere.
"""

FUSED_DROPOUTS = frozenset({aten.native_dropout.default, *existing("_fused_dropout")})
"""Ops that on a GPU draw for several elements at once if the operand has no gaps, else for one."""

_EXTRA = (
    "SymInt[] full, int[] dims, int[] order, int[] gaps, int dim, SymInt outer, SymInt batch, SymInt start, "
    "SymInt rows"
)
"""Arguments beside the op's own, with names that no op uses (binomial has a `count`)."""

_TWINS: dict[OpOverload, OpOverload] = {}


def twin(target: OpOverload) -> OpOverload:
    """Return the op that draws the numbers of the global batch and keeps a part; registered on first use."""
    if target not in _TWINS:
        _TWINS[target] = _define(target)
    return _TWINS[target]


def is_twin(target: Any) -> bool:
    """Return whether the op is one that `twin` registered; its last argument is the previous draw."""
    return isinstance(target, OpOverload) and target._schema.name.startswith("fxdp::whole_")


def _define(target: OpOverload) -> OpOverload:
    schema = str(target._schema)
    base = target._schema.name.removeprefix("aten::").strip("_")
    name = f"whole_{base}_{target._overloadname}"
    arguments, _, returns = schema.partition("(")[2].rpartition(") -> ")
    listed = [re.sub(r"=.*", "", a) for a in arguments.split(", ") if a != "*" and "Generator" not in a]
    names = [a.split()[-1] for a in listed]

    def draw(*given: Any) -> Any:
        extra = _Part(*given[len(names) : -1])
        return extra.taken(_call(_eager_form(target), names, extra.widened(names, given[: len(names)])))

    def shapes(*given: Any) -> Any:
        extra = _Part(*given[len(names) : -1])
        if extra.dim >= 0:
            return extra.in_memory_format(_call(target, names, given[: len(names)]))
        return extra.in_memory_format(
            _call(_eager_form(target), names, extra.widened(names, given[: len(names)]))
        )

    # torch.fx finds no arguments named by a Python keyword, and Inductor asks torch.fx
    spelled = [re.sub(r" from$", " from_", a) for a in listed]
    own = f"{name}({', '.join([*spelled, _EXTRA, 'Tensor? after'])}) -> {returns}"
    return opaque(own, draw, shapes, tags=(torch.Tag.nondeterministic_seeded,))


def _eager_form(target: OpOverload) -> OpOverload:
    form: OpOverload = IN_PLACE.get(target, target)
    return form


def _call(target: OpOverload, names: Sequence[str], values: Sequence[Any]) -> Any:
    keywords = {a.name for a in target._schema.arguments if a.kwarg_only}
    args = [v for n, v in zip(names, values, strict=True) if n not in keywords]
    given = {n: v for n, v in zip(names, values, strict=True) if n in keywords}
    return target(*args, **given, **dict.fromkeys(keywords & {"generator"}))


class _Part:
    """The part of the full value that a rank keeps."""

    def __init__(
        self, full: Sequence[int], dims: Sequence[int], order: Sequence[int], gaps: Sequence[int], dim: int,
        outer: int, batch: int, start: int, rows: int,
    ) -> None:  # fmt: skip
        self.full, self.dims, self.order, self.dim = list(full), list(dims), list(order), dim
        self.gaps = list(gaps)
        self.outer, self.batch, self.start, self.rows = outer, batch, start, rows

    def widened(self, names: Sequence[str], values: Sequence[Any]) -> list[Any]:
        """Return the op's arguments for the full value: sizes, and tensors with this rank's values."""
        dims = iter(self.dims)
        widened: list[Any] = []
        for name, value in zip(names, values, strict=True):
            if isinstance(value, Tensor):
                value = self._widened(value, next(dims))
            elif name == "size":
                value = self.full
            widened.append(value)
        return widened

    def _widened(self, value: Tensor, dim: int) -> Tensor:
        if dim == UNREAD:
            return self._memory(value, self.full, self.gaps)
        if dim < 0:
            if self.gaps and value.dim() == len(self.order):
                return self._memory(value, value.shape, self.gaps).copy_(value)
            return self.in_memory_format(value) if value.dim() == len(self.order) else value
        shape = list(value.shape)
        shape[dim] = self.full[self.dim]
        made = self._memory(value, shape, self.gaps).fill_(_ALIKE)
        blocks = unflatten(value, dim, self.outer, self.rows, self._inner(shape[dim]))
        split = unflatten(made, dim, self.outer, self.batch, self._inner(shape[dim]))
        split.narrow(dim + 1, self.start, self.rows).copy_(blocks)
        return made

    def in_memory_format(self, results: Any) -> Any:
        """Return results in memory with the order of dims that they have in the model."""
        if isinstance(results, tuple):
            return tuple(map(self.in_memory_format, results))
        lies = results.permute(self.order) if results.dim() == len(self.order) else results
        return results if lies.is_contiguous() else self._memory(results, results.shape).copy_(results)

    def _memory(self, like: Tensor, shape: Sequence[int], gaps: Sequence[int] = ()) -> Tensor:
        """Allocate memory of a shape, with the model's order of dims and gaps, in which eager draws."""
        if len(shape) != len(self.order):
            return like.new_empty(shape)
        sizes = [n for d in self.order for n in ([shape[d], 2] if d in gaps else [shape[d]])]
        ordered = like.new_empty(sizes)
        for place, d in enumerate(self.order):
            ordered = ordered.select(place + 1, 0) if d in gaps else ordered
        return ordered.permute([self.order.index(d) for d in range(len(shape))])

    def _inner(self, length: int) -> int:
        return length // (self.outer * self.batch)

    def taken(self, results: Any) -> Any:
        """Return this rank's part of the drawn values, copied so that it is aligned and the rest is freed."""
        if isinstance(results, tuple):
            return tuple(map(self.taken, results))
        if self.dim < 0 or self.rows == self.batch:
            return self.in_memory_format(results)
        part = take_part(results, self.dim, self.outer, self.batch, self.start, self.rows)
        made = self.in_memory_format(part)
        return part.clone() if made is part else made
