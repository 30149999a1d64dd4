"""One op on global tensors: full values run as they are, parts by the plan of this kind of call."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fxdp.capture.cross_sample.table import BatchSymbols, cross_sample_table
from fxdp.eager.data_ranks import WITH_GROUPS
from fxdp.eager.message_report import COUNTS, EagerReport, user_line
from fxdp.eager.plans.call_key import call_key
from fxdp.eager.plans.call_leaves import CallLeaves, tensors_of
from fxdp.eager.plans.data_sizes import DATA_SIZES
from fxdp.eager.plans.index_values import INDEXING, iotas
from fxdp.eager.plans.op_code import Run, code_of
from fxdp.eager.plans.op_plan import OpPlan, cheapest_plan, full_plan
from fxdp.eager.plans.placed_call import placed
from fxdp.eager.plans.plan_families import FAMILIES_KEPT, families_kept
from fxdp.eager.plans.sparse_layouts import run_on_full_values, stays_plain
from fxdp.eager.plans.strided import STRIDED
from fxdp.eager.spec import spec_of
from fxdp.eager.sums import holding
from fxdp.eager.tensor import GlobalTensor, wrapped
from fxdp.eager.view_origins import gathered, note_view
from fxdp.eager.writes import write_in_place
from fxdp.errors import InputError
from fxdp.ranks.comms.sequence_log import user_frame
from fxdp.ranks.rank_counts import warn_of_rank_counts
from fxdp.rules.registry import registry
from fxdp.torch_compat import OpOverload, aten

_log = logging.getLogger("fxdp")
_PLANS_KEPT = 8192
"""The most plans that are kept; the oldest go first."""
_PLANS: dict[tuple[Any, ...], Run] = {}
"""How a call runs by its key; keeps the op, too, which is in the key by identity only."""
WITH_GROUPS += [_PLANS.clear, spec_of.cache_clear]
_BY_VALUES = {id(op): op for op in (*DATA_SIZES, *STRIDED, *INDEXING)}
"""Ops whose way depends on values beside the key."""

_LAZY = {aten._conj.default: aten.conj_physical.default, aten._neg_view.default: aten.neg.default}
"""Ops that set a bit of their result; below the dispatch to global tensors kernels do not read it."""


_SCALES = (aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar)
"""Ops by which code for several ranks undoes averages."""


def eager_report() -> EagerReport:
    """Return what global tensors have sent so far, by line and op, with the ops that ran on full values."""
    return EagerReport(COUNTS.rows(), len(_PLANS), families_kept(), (_PLANS_KEPT, FAMILIES_KEPT), COUNTS.axes)


def run_op(
    cls: type,
    op: Any,
    types: Sequence[type],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> Any:
    """Run one op, below autograd; the result of one device, each rank holding its part.

    Raises
    ------
    InputError : an op that asks for memory or writes where it cannot; global tensors of two meshes.
    AgreementError : ranks are at different messages.
    """
    key = call_key(op, args, kwargs)
    run = _PLANS.get(key)
    if run is None:
        if id(op) in _BY_VALUES:
            return _run_by_values(op, key, args, kwargs or {})
        run = _kept(key, op, args, kwargs or {})
    return run(args, kwargs or {})


GlobalTensor.__torch_dispatch__ = classmethod(run_op)  # type: ignore[assignment,method-assign]


def _run_by_values(op: Any, key: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    special = DATA_SIZES.get(op) or STRIDED.get(op)
    if special is not None:
        result = special(op, args, kwargs)
        if result is not NotImplemented:
            return result
    tensors = tensors_of(args, kwargs)
    key = (_run_by_values, *key)  # not the key by which other ops are found
    if op in INDEXING and not _are_full(tensors):
        key = (*key, *iotas(op, tensors, placed(op, CallLeaves(op, args, kwargs)).axis))
    run = _PLANS.get(key) or _kept(key, op, args, kwargs)
    return run(args, kwargs)


def _kept(key: tuple[Any, ...], op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Run:
    if len(_PLANS) >= _PLANS_KEPT:
        del _PLANS[next(iter(_PLANS))]
    _PLANS[key] = run = _way(op, args, kwargs)
    return run


def _way(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Run:
    """Return how calls of this kind run."""
    read = _HOST_READS.get(op)
    if read is not None:
        return partial(read, op)
    if op.namespace == _COLLECTIVES:
        _check_collective(op, args, kwargs)
    if op in _LAZY:
        return partial(_computed_view, op)
    if op in _SCALES:
        _tell_of_rank_counts(args)
    if op._schema.is_mutable:
        return partial(write_in_place, op)
    tensors = tensors_of(args, kwargs)
    if any(map(stays_plain, tensors)):
        return partial(run_on_full_values, op)
    if _are_full(tensors):
        return code_of(full_plan(placed(op, CallLeaves(op, args, kwargs)), ""), args, kwargs)
    made = _made(op, args, kwargs)
    return code_of(made, args, kwargs) if isinstance(made, OpPlan) else made


def _are_full(tensors: Sequence[Tensor]) -> bool:
    return all(not isinstance(t, GlobalTensor) or t._spec.layout.is_full for t in tensors)


def _made(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> OpPlan | Run:
    known, cross_sample = registry.get(op), _cross_sample().get(op)
    if known is None and cross_sample is None and op._can_decompose():
        return lambda args, kwargs: op.decompose(*args, **kwargs)
    call = placed(op, CallLeaves(op, args, kwargs))
    if call.axis.total == 1 < call.axis.ranks.world and not op.is_view:
        plan: OpPlan | None = full_plan(call, "")  # a size of 1 broadcasts, whether it counts samples or not
    else:
        plan = cheapest_plan(call)
    if cross_sample is not None and (plan is None or (plan.sends and plan.decomposition is None)):
        otherwise = code_of(plan or full_plan(call, "its sizes depend on data"), args, kwargs)
        return _by_cross_samples(holding(call.axis.ranks, str(op), cross_sample), otherwise)
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


def _computed_view(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    made = _LAZY[op](*args, **kwargs)
    note_view(made, args[0], op, args[1:], kwargs, shares=False)
    return made


def _tell_of_rank_counts(args: Sequence[Any]) -> None:
    """Tell of a module's code that scales by the number of ranks; asked once for each kind of call."""
    ranks = next((a._spec.axis.ranks for a in args if isinstance(a, GlobalTensor)), None)
    if ranks is None or not any(type(a) is int and a == ranks.world for a in args):
        return
    module = user_frame(sys._getframe()).f_locals.get("self")
    if isinstance(module, nn.Module) and (name := type(module).__name__) not in ranks.told:
        ranks.told.add(name)
        warn_of_rank_counts(module, ranks.world, name)


@lru_cache(maxsize=1)
def _cross_sample() -> dict[Any, Callable[..., Any]]:
    return cross_sample_table(BatchSymbols(None))


def _by_cross_samples(decomposed: Callable[..., Any], otherwise: Run) -> Run:
    """Return a call by plain sums and global counts; `otherwise` where the decomposition does not apply."""

    def run(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        result = decomposed(*args, **kwargs)
        return otherwise(args, kwargs) if result is NotImplemented else result

    return run


def _host_read(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run the op on full values; sends only what is sharded, or a large sum."""
    return op(*[gathered(value, str(op)) for value in args], **kwargs)


def _pack(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Pack full sequences; recurrent layers read the batch sizes from memory, so these are plain."""
    axis = next(value._spec.axis for value in args if isinstance(value, GlobalTensor))
    data, batch_sizes = op(*[gathered(value, str(op)) for value in args], **kwargs)
    return wrapped(data, axis.ranks.unit), batch_sizes


_HOST_READS: Mapping[Any, Callable[..., Any]] = {
    aten._local_scalar_dense.default: _host_read,
    aten.equal.default: _host_read,
    aten.is_nonzero.default: _host_read,
    aten._pack_padded_sequence.default: _pack,
}
"""Ops whose result, or a part of it, is read by Python or by a kernel as numbers."""


_COLLECTIVES = "c10d"
"""The namespace of torch.distributed's ops."""


def _check_collective(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise if a collective gets a global tensor that is not full on every rank.

    dist.all_reduce(loss)       loss * ranks: each rank has the loss of the global batch
    dist.all_gather(all, x)     refused where x is sharded: it is the batch of all ranks already

    Raises
    ------
    InputError : names the line.
    """
    given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, GlobalTensor)]
    parts = [leaf for leaf in given if not leaf._spec.layout.is_full]
    if parts:
        raise InputError(
            f"{user_line()}: {op} got a global tensor of shape {tuple(parts[0].shape)} "
            f"({parts[0]._spec.layout}), which is of all ranks already; expected no collective, or a plain "
            "tensor: .local is this rank's part, .full() the full value"
        )
