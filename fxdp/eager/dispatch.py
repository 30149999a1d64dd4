"""One op on global tensors: full values run as they are, parts by the plan of this kind of call."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from torch import Tensor

from fxdp.capture.cross_sample.table import BatchSymbols, cross_sample_table
from fxdp.eager.call_leaves import CallLeaves, tensors_of
from fxdp.eager.data_sizes import DATA_SIZES
from fxdp.eager.execute import execute
from fxdp.eager.host_reads import HOST_READS
from fxdp.eager.index_values import INDEXING, iotas
from fxdp.eager.message_report import COUNTS, EagerReport, user_line
from fxdp.eager.op_plan import OpPlan, cheapest_plan, full_plan, placed
from fxdp.eager.tensor import GlobalTensor
from fxdp.eager.view_origins import current_local, note_view
from fxdp.eager.writes import write_in_place
from fxdp.rules.registry import registry
from fxdp.torch_compat import OpOverload

_log = logging.getLogger("fxdp")
_PLANS_KEPT = 8192
_PLANS: dict[Any, OpPlan | Callable[..., Any]] = {}
_SPECIAL: Mapping[Any, Callable[..., Any]] = {**DATA_SIZES, **HOST_READS}


def eager_report() -> EagerReport:
    """Return what global tensors have sent so far, by line and op, with the ops that ran on full values."""
    return EagerReport(COUNTS.rows(), len(_PLANS))


def run_op(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run one op, below autograd; the result of one device, each rank holding its part.

    Raises
    ------
    InputError : an op that asks for memory or writes where it cannot; global tensors of two meshes.
    AgreementError : ranks are at different messages.
    """
    special = _SPECIAL.get(op)
    if special is not None:
        result = special(op, args, kwargs)
        if result is not NotImplemented:
            return result
    if op._schema.is_mutable:
        return write_in_place(op, args, kwargs)
    tensors = tensors_of(args, kwargs)
    if all(not isinstance(t, GlobalTensor) or t._spec.layout.is_full for t in tensors):
        plan: OpPlan | Callable[..., Any] = full_plan(placed(op, CallLeaves(op, args, kwargs)), "")
    else:
        plan = _found(op, args, kwargs, tensors)
    if not isinstance(plan, OpPlan):
        return plan(*args, **kwargs)
    result = execute(plan, tensors)
    if op.is_view:
        note_view(result, tensors[0], op, args[1:], dict(kwargs), plan.shares)
    return result


def _found(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], tensors: Sequence[Tensor]) -> Any:
    named = tuple([(name, _key(value)) for name, value in kwargs.items()]) if kwargs else ()
    key: Any = (op, _key(args), named)
    if op in INDEXING:
        axis = placed(op, CallLeaves(op, args, kwargs)).axis
        key = (*key, iotas(op, tensors, axis))
    plan = _PLANS.get(key)
    if plan is None:
        if len(_PLANS) >= _PLANS_KEPT:
            del _PLANS[next(iter(_PLANS))]
        plan = _PLANS[key] = _made(op, args, kwargs)
    return plan


def _key(value: Any) -> Any:
    kind = type(value)
    if kind is GlobalTensor:
        if value._origin is not None:
            current_local(value)
        return value._spec
    if isinstance(value, Tensor):
        return value.dtype, value.shape, value.stride()
    if kind is list or kind is tuple:
        return tuple([_key(one) for one in value])
    if kind is float:  # 0.0 == -0.0, and the plan has the number
        return kind, value, math.copysign(1.0, value)
    return kind, value


def _made(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> OpPlan | Callable[..., Any]:
    known, cross_sample = registry.get(op), _cross_sample().get(op)
    if known is None and cross_sample is None and op._can_decompose():
        return op.decompose
    call = placed(op, CallLeaves(op, args, kwargs))
    plan = cheapest_plan(call)
    if cross_sample is not None and (plan is None or (plan.sends and plan.decomposition is None)):
        return _by_cross_samples(op, cross_sample, plan or full_plan(call, "its sizes depend on data"))
    if plan is not None:
        if known is None and plan.reason:
            plan.reason = "it has no rule"
    else:
        plan = full_plan(call, "it has no rule" if known is None else "its sizes depend on data")
    if plan.reason == "it has no rule":
        _log.warning(
            "%s: %s has no rule, so it runs on full values on every rank: exact, but no faster than one "
            "device. fxdp.register_rule adds a rule",
            user_line(), op,
        )  # fmt: skip
    return plan


@lru_cache(maxsize=1)
def _cross_sample() -> dict[Any, Callable[..., Any]]:
    return cross_sample_table(BatchSymbols(None))


def _by_cross_samples(op: OpOverload, decomposed: Callable[..., Any], plan: OpPlan) -> Callable[..., Any]:
    """Return a call by plain sums and global counts; by the plan where the decomposition does not apply."""

    def run(*args: Any, **kwargs: Any) -> Any:
        result = decomposed(*args, **kwargs)
        return execute(plan, tensors_of(args, kwargs)) if result is NotImplemented else result

    return run
