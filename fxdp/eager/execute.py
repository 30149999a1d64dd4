"""Run the plan of a call: redistribute operands, run the op on local parts, wrap the results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fxdp.eager.batch_axis import BatchAxis
from fxdp.eager.message_report import COUNTS
from fxdp.eager.op_plan import OpPlan, PlannedResult
from fxdp.eager.redistribute import redistributed
from fxdp.eager.tensor import GlobalTensor, wrapped
from fxdp.eager.view_origins import current_local
from fxdp.errors import InputError
from fxdp.ir.ops.layouts import lay_out
from fxdp.ir.types.decompositions import Decomposition, Term
from fxdp.ir.types.placements import Placement, R
from fxdp.ir.types.value_types import TensorType
from fxdp.rules.localize import MinusOffset
from fxdp.rules.registry import Operand


def execute(plan: OpPlan, tensors: Sequence[Tensor]) -> Any:
    """Return the results of the call on these operands, as global tensors."""
    axis, name = plan.axis, str(plan.op)
    if plan.draws and axis.ranks.generators_differ:
        raise axis.ranks.drawing_apart()
    if plan.reason:
        COUNTS.add_full(name, "all_gather")
    locals_ = [
        _operand(tensor, want, type_, foreign, axis, name)
        for tensor, want, type_, foreign in zip(tensors, plan.wants, plan.types, plan.foreign, strict=True)
    ]
    if plan.decomposition is not None:
        results = _decomposed(plan.decomposition, plan.wants, locals_, axis, name)
    else:
        args = [_filled(value, locals_, axis) for value in plan.args]
        kwargs = {key: _filled(value, locals_, axis) for key, value in plan.kwargs.items()}
        if plan.restrides:
            args, kwargs = _restrided(plan, args, kwargs)
        results = plan.target(*args, **kwargs)
    return _wrapped(results, plan, name)


def _operand(
    tensor: Tensor, want: Placement, type_: TensorType, foreign: bool, axis: BatchAxis, name: str
) -> Tensor:
    if not isinstance(tensor, GlobalTensor):
        return tensor if want == R else redistributed(tensor, type_, R, want, axis, name)
    spec, local = tensor._spec, current_local(tensor)
    if spec.axis.ranks is not axis.ranks:
        raise InputError(
            f"{name} has global tensors of two meshes, {spec.axis.ranks.mesh} and {axis.ranks.mesh}; "
            "expected one mesh: take .full() of one of them"
        )
    have = spec.placement
    if foreign:
        local, have = redistributed(local, spec.type, have, R, spec.axis, name), R
    return local if have == want else redistributed(local, type_, have, want, axis, name)


def _restrided(plan: OpPlan, args: list[Any], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    target: Any = plan.target
    return lay_out(target, tuple(args), kwargs, lambda how, *values: how(*values))


def _filled(value: Any, locals_: Sequence[Tensor], axis: BatchAxis) -> Any:
    if isinstance(value, Operand):
        return locals_[value.index]
    if isinstance(value, MinusOffset):
        return locals_[value.operand.index] - axis.offset
    if isinstance(value, list):
        return [_filled(one, locals_, axis) for one in value]
    return value


def _decomposed(
    steps: Decomposition, wants: Sequence[Placement], locals_: Sequence[Tensor], axis: BatchAxis, name: str
) -> list[Tensor | None]:
    """Return the results of a decomposition, each intermediate value redistributed where a step reads it."""
    from fxdp.eager.op_plan import _numbers

    made: dict[tuple[int, Placement], Tensor] = {}
    born: dict[int, Placement] = dict(enumerate(wants))
    made.update({(i, want): local for i, (want, local) in enumerate(zip(wants, locals_, strict=True))})

    def read(term: Term) -> Tensor:
        key = term.index, term.at
        if key not in made:
            have = born[term.index]
            made[key] = redistributed(made[term.index, have], term.type, have, term.at, axis, name)
        return made[key]

    def value(argument: Any) -> Any:
        return read(argument) if isinstance(argument, Term) else _numbers(argument, axis.values)

    for index, step in enumerate(steps.steps, 1):
        result = step.target(*map(value, step.args), **{key: value(v) for key, v in step.kwargs})
        made[-index, step.at], born[-index] = result, step.at
    found: list[Tensor | None] = []
    for term in steps.results:
        if term is None:
            found.append(None)
        elif (reduced := made.get((term.index, R))) is not None:
            found.append(reduced)
        else:
            found.append(made[term.index, born[term.index]])
    return found


def _wrapped(results: Any, plan: OpPlan, name: str) -> Any:
    if isinstance(results, Tensor):
        return _global(results, None if plan.results is None else plan.results[0], plan.axis, name)
    if not isinstance(results, (list, tuple)):
        return results
    planned = plan.results or (None,) * len(results)
    every = [
        _global(result, one, plan.axis, name) if isinstance(result, Tensor) else result
        for result, one in zip(results, planned, strict=True)
    ]
    if plan.decomposition is not None and len(every) == 1:
        return every[0]
    return type(results)(every) if type(results) in (list, tuple) else tuple(every)


def _global(result: Tensor, planned: PlannedResult | None, axis: BatchAxis, name: str) -> GlobalTensor:
    if planned is None:
        return wrapped(result, axis.ranks.unit)
    if planned.reduced is not None:
        type_ = TensorType(result.dtype, tuple(result.shape))
        result = redistributed(result, type_, planned.reduced, R, axis, name)
    return GlobalTensor(result, planned.spec)
