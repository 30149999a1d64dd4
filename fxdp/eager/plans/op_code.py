"""The plan of a kind of call as Python code: one straight function, in which nothing is decided.

linear of x: [8, 6] in S(0), w: [4, 6]          sum of x: [8, 6] in S(0)

def run(args, kwargs):                          def run(args, kwargs):
    t0 = args[0]._local                             t0 = args[0]._local
    t1 = args[1]                                    r0 = target(t0)
    r0 = target(t0, t1)                             r0 = redistributed(r0, *reduction0)
    g0 = wrapper(GlobalTensor, *metadata0)          ...
    g0._local = r0
    g0._spec = spec0
    return g0
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from types import CodeType
from typing import Any

from torch import Tensor

from fxdp.eager import redistribute
from fxdp.eager.batch_axis import BatchAxis
from fxdp.eager.equal_operands import OVERWRITING, Comparisons
from fxdp.eager.message_report import COUNTS, user_line
from fxdp.eager.plans.decomposed import decomposed
from fxdp.eager.plans.op_plan import OpPlan, PlannedResult
from fxdp.eager.plans.sparse_layouts import wrapped_results
from fxdp.eager.sums import made, summed
from fxdp.eager.tensor import GlobalTensor, without_values
from fxdp.eager.view_origins import memory_of, note_view
from fxdp.errors import InputError
from fxdp.ir.ops.layouts import lay_out
from fxdp.ir.types.placements import P, R
from fxdp.ir.types.value_types import TensorType
from fxdp.rules.localize import MinusOffset
from fxdp.rules.registry import Operand
from fxdp.torch_compat import aten, kernel, refuse_pointer

_log = logging.getLogger("fxdp")
_TOLD = 1024  # lines that are told about
Run = Callable[[Sequence[Any], Mapping[str, Any]], Any]
"""Runs one kind of call on `(args, kwargs)`."""
_UNCHANGED = frozenset({aten.detach.default, aten.alias.default})
"""Ops whose local result is the local operand: local values have no gradient."""


def code_of(plan: OpPlan, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Run:
    """Return the plan as a function of the arguments of any call with the same key.

    Raises
    ------
    InputError : the call has global tensors of two meshes.
    """
    code = _Code(plan)
    code.operands(args, kwargs)
    code.call()
    code.results()
    exec(_compiled("\n    ".join(["def run(args, kwargs):", *code.lines])), code.values)
    run: Run = code.values["run"]
    return run


@lru_cache(maxsize=1024)
def _compiled(source: str) -> CodeType:
    return compile(source, "<plan of an op on global tensors>", "exec")


class _Code:
    """Lines of a function, and the values that they name."""

    def __init__(self, plan: OpPlan) -> None:
        self.plan, self.axis, self.name = plan, plan.axis, str(plan.op)
        self.lines: list[str] = []
        self.small: list[str] = []
        self.values: dict[str, Any] = {
            "__name__": __name__,  # not the user's line
            "wrapper": without_values, "GlobalTensor": GlobalTensor, "name": self.name,
            "redistributed": redistribute.redistributed, "axis": plan.axis, "op": plan.op,
            "target": plan.target, "kernel": kernel(plan.target), "refuse_pointer": refuse_pointer,
        }  # fmt: skip

    def operands(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Read this rank's part of each operand, in the placement that the plan wants."""
        plan = self.plan
        if plan.draws:
            self.lines.append("same_generators(axis)")
            self.values["same_generators"] = _same_generators
        if plan.reason:
            self.lines.append("count_full(name, 'all_gather')")
            self.values["count_full"] = COUNTS.add_full
        found = [
            *_leaves("args", args),
            *(leaf for n, v in kwargs.items() for leaf in _leaf(f"kwargs[{n!r}]", v)),
        ]
        for i, (path, tensor) in enumerate(found):
            if not isinstance(tensor, GlobalTensor):
                self.lines.append(f"t{i} = {path}")
                continue
            if tensor._spec.axis.ranks is not self.axis.ranks:
                raise _two_meshes(self.name, tensor._spec.axis, self.axis)
            self.lines.append(f"t{i} = {path}._local")
        self._compare(found)
        haves = [t._spec.placement if isinstance(t, GlobalTensor) else R for _, t in found]
        sums = [i for i, have in enumerate(haves) if have == P and plan.wants[i] == R]
        if sums and self.axis.ranks.world > 1:  # after each part is read, as other operands may be held sums
            self.values |= {"summed": summed, "ranks": self.axis.ranks}
            names, paths = "".join(f"t{i}, " for i in sums), "".join(f"{found[i][0]}, " for i in sums)
            self.lines.append(f"{names[:-1]} = summed(({paths}), ranks, name)")
        pairs = zip(found, haves, plan.wants, plan.types, plan.foreign, strict=True)
        for i, ((_, tensor), have, want, type_, foreign) in enumerate(pairs):
            if foreign:
                spec = tensor._spec  # type: ignore[attr-defined]
                _tell_of_two_batches(self.name, spec.axis, self.axis)
                self._redistribute(f"t{i}", spec.type, have, R, spec.axis)
                have = R
            if have != want and i not in sums:
                self._redistribute(f"t{i}", type_, have, want, self.axis)

    def _compare(self, found: Sequence[tuple[str, Tensor]]) -> None:
        """Compare the first plain operands with those of the other ranks."""
        plain = [i for i, (_, t) in enumerate(found) if not isinstance(t, GlobalTensor) and t.numel()]
        overwrites = self.plan.op._schema.name in OVERWRITING  # operand 0 may be memory without values
        read = [i for i in plain if i or not overwrites]
        if read and self.axis.ranks.process_mesh.comms is not None:
            ranks = self.axis.ranks
            self.values |= {"schedule": Comparisons(), "ranks": ranks, "note": ranks.plain.note}
            # in a batch that compares all lines do, which otherwise might take turns with those not due
            operands = "".join(f"t{i}, " for i in read)
            self.lines.append(f"if ranks.compares or schedule.due(): note(name, ({operands}))")

    def call(self) -> None:
        """Run the op on the local parts."""
        plan = self.plan
        if plan.decomposition is not None:
            given = "".join(f"t{i}, " for i in range(len(plan.wants)))
            self.lines.append(f"r0 = decomposed(decomposition, wants, ({given}), axis, name)")
            self.values |= {
                "decomposed": decomposed, "decomposition": plan.decomposition, "wants": plan.wants,
            }  # fmt: skip
            return
        if plan.op in _UNCHANGED:
            self.lines.append("r0 = t0")
            return
        args = "".join(f"{self._expression(value)}, " for value in plan.args)
        kwargs = "".join(f"{key}={self._expression(value)}, " for key, value in plan.kwargs.items())
        if plan.restrides:
            self.values |= {"lay_out": lay_out, "at_once": lambda how, *values: how(*values)}
            self.lines.append(f"a, k = lay_out(target, ({args}), dict({kwargs}), at_once)")
            args, kwargs = "*a, ", "**k"
        self.lines.append(f"r0 = kernel({args}{kwargs})")

    def results(self) -> None:
        """Wrap the results as global tensors."""
        plan, returns = self.plan, [str(one.type) for one in self.plan.op._schema.returns]
        if returns == ["Tensor"] and plan.results:
            if plan.decomposition is not None:
                self.lines.append("r0, = r0")
            self._wrap("g", "r0", 0, plan.results[0])
        elif not (plan.results and returns and all("Tensor" in one for one in returns)):
            self._wrap("g", "r0", 0, None)
        else:
            names = [f"r{i + 1}" for i in range(len(plan.results))]
            self.lines.append(f"{', '.join(names)}, = r0")
            for i, (name, planned) in enumerate(zip(names, plan.results, strict=True)):
                self._wrap(f"g{i}", name, i, planned)
            joined = "".join(f"g{i}, " for i in range(len(names)))
            self.lines.append(f"g = [{joined}]" if len(returns) == 1 else f"g = ({joined})")
        if self.small and self.axis.ranks.world > 1:
            self.values |= {"made": made, "ranks": self.axis.ranks}
            self.lines.append(f"made([{', '.join(self.small)}], ranks, name)")
        if plan.op.is_view:
            self._view(plan.shares and returns == ["Tensor"])
        self.lines.append("return g")

    def _view(self, is_simple: bool) -> None:
        self.values |= {"note_view": note_view, "op": self.plan.op, "shares": self.plan.shares}
        note = "note_view(g, args[0], op, args[1:], kwargs, shares)"
        if not is_simple:
            self.lines.append(note)
            return
        self.values["memory_of"] = memory_of
        self.lines += [  # what `note_view` does for the most common views
            "base = args[0]",
            f"if base._origin is not None: {note}",
            "else:",
            "    g._memory = base._memory or memory_of(base)",
            "    g._viewed = t0, op",
        ]

    def _wrap(self, name: str, result: str, index: int, planned: PlannedResult | None) -> None:
        if planned is None:
            self.values |= {"wrapped_results": wrapped_results, "unit": self.axis.ranks.unit}
            self.lines.append(f"{name} = wrapped_results({result}, unit)")
            return
        if planned.reduced is not None:
            type_ = TensorType(planned.spec.dtype, planned.spec.shape)
            self._redistribute(result, type_, planned.reduced, R, self.axis)
        if planned.is_small_sum:
            self.small.append(name)
        self.values |= {f"metadata{index}": planned.spec.metadata, f"spec{index}": planned.spec}
        self.lines += [
            f"{name} = wrapper(GlobalTensor, *metadata{index})",
            f"refuse_pointer({name})",
            f"{name}._local = {result}",
            f"{name}._spec = spec{index}",
        ]

    def _redistribute(self, name: str, type_: Any, have: Any, want: Any, axis: BatchAxis) -> None:
        if axis.ranks.world > 1:
            how = self._value((type_, have, want, axis, self.name))
            self.lines.append(f"{name} = redistributed({name}, *{how})")

    def _expression(self, value: Any) -> str:
        if isinstance(value, Operand):
            return f"t{value.index}"
        if isinstance(value, MinusOffset):
            return f"(t{value.operand.index} - {self.axis.offset})"
        if isinstance(value, list):
            return f"[{', '.join(map(self._expression, value))}]"
        return repr(value) if type(value) in (int, bool, type(None)) else self._value(value)

    def _value(self, value: Any) -> str:
        name = f"c{len(self.values)}"
        self.values[name] = value
        return name


def _leaves(path: str, values: Sequence[Any]) -> Iterator[tuple[str, Tensor]]:
    for i, value in enumerate(values):
        yield from _leaf(f"{path}[{i}]", value)


def _leaf(path: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, (list, tuple)):
        yield from _leaves(path, value)


def _same_generators(axis: BatchAxis) -> None:
    if axis.ranks.generators_differ:
        raise axis.ranks.drawing_apart()


def _two_meshes(name: str, one: BatchAxis, other: BatchAxis) -> InputError:
    return InputError(
        f"{user_line()}: {name} has global tensors of two meshes, {one.ranks.mesh} (of {one.line}) and "
        f"{other.ranks.mesh} (of {other.line}); expected one mesh: take .full() of one of them"
    )


def _tell_of_two_batches(name: str, one: BatchAxis, other: BatchAxis) -> None:
    """Warn once a line that batches of one size meet, whose samples are on other ranks."""
    line, told = user_line(), other.ranks.told
    if one.total == other.total and line not in told and len(told) < _TOLD:
        told.add(line)
        _log.warning(
            "%s: %s has two batches of %d samples with other parts: %s (of %s) and %s (of %s). They meet in "
            "rank order, as on one device, and one is gathered at each call; if the samples belong together, "
            "pass both through one fxdp.global_batch",
            line, name, one.total, one.sizes, one.line, other.sizes, other.line,
        )  # fmt: skip
