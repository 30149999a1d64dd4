"""Ops that write: the functional op, then a copy of its result into the local part of the target."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from fxdp.eager.message_report import user_line
from fxdp.eager.one_device_view import note_plain_write
from fxdp.eager.redistribute import redistributed
from fxdp.eager.tensor import GlobalTensor, wrapped
from fxdp.eager.view_origins import current_local, gathered, memory_of, without_graph
from fxdp.errors import InputError
from fxdp.ir.graph.draws import draws
from fxdp.ir.types.placements import Placement, R
from fxdp.torch_compat import OpOverload, aten, without_torch_dispatch

_VIEWS_IN_PLACE = frozenset({"squeeze_", "unsqueeze_", "t_", "transpose_"})
_RESIZES = frozenset({"resize_", "set_", "as_strided_"})
_OTHER_NAMES: Mapping[Any, Any] = {
    aten.normal_.default: aten.normal_functional.default,
    aten._index_put_impl_.default: aten.index_put.default,
}
_SCATTERS: Mapping[Any, Callable[..., Any]] = {
    aten.select.int: aten.select_scatter.default, aten.slice.Tensor: aten.slice_scatter.default,
    aten.diagonal.default: aten.diagonal_scatter.default,
    aten.as_strided.default: aten.as_strided_scatter.default,
    aten.detach.default: lambda base, value: value, aten.alias.default: lambda base, value: value,
    aten.view.default: lambda base, value, size: value.reshape(base.shape),
    aten._conj.default: lambda base, value: value.conj(), aten._neg_view.default: lambda base, value: -value,
}  # fmt: skip
"""For ops whose result may be a gathered copy, the op that puts a written copy back into the base."""


def write_in_place(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run an op that writes its first argument, and return this argument, but for a list.

    Raises
    ------
    InputError : the op changes memory, writes several arguments, or into a view that cannot be written.
    """
    name = op._schema.name.partition("::")[2]
    target = args[0] if args else None
    if name in _VIEWS_IN_PLACE and isinstance(target, GlobalTensor):
        return _become_view(op, target, args, kwargs)
    if op is aten.as_strided_.default and _is_in_place(target, *args[1:], **kwargs):
        return target
    if name in _RESIZES:
        raise InputError(
            f"{user_line()}: {name} changes the memory of a global tensor in place; expected a new tensor: "
            f"x = x.{name.rstrip('_')}(...)"
        )
    written = [a.name for a in op._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    if written == ["out"] and isinstance(kwargs.get("out"), Tensor):
        return _write_out(op, args, kwargs)
    if (with_written := _with_written(op)) is not None:
        return _write_beside(op, with_written, written, args, kwargs)
    if isinstance(target, (list, tuple)) and name.endswith("_") and written == ["self"]:
        for one, value in zip(target, _functional(op)(*args, **kwargs), strict=True):
            _write(one, value)
        return None
    if not isinstance(target, Tensor) or not name.endswith("_") or written != [op._schema.arguments[0].name]:
        raise InputError(
            f"{user_line()}: {op} writes into {', '.join(written)}, which global tensors do not support; "
            "expected an op that returns its result: leave out= away, or call the op without its underscore"
        )
    if op is aten._index_put_impl_.default:
        args, kwargs = args[:4], {}
    if op is aten.copy_.default:
        _write(target, _expanded(args[1], target))
    elif _is_full(target) and draws(op, args, kwargs) and all(map(_is_full, args[1:])):
        _draw_in_place(op, target, args, kwargs)
    else:
        _write(target, _functional(op)(*_with_defaults(op, args, kwargs), **kwargs))
    return target


def _write_out(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Write the result of the op without `out=` into `out`, and return `out`."""
    given = dict(kwargs)
    out = given.pop("out")
    value = _functional(op)(*args, **given)
    if value.shape != out.shape or value.dtype != out.dtype:
        raise InputError(
            f"{user_line()}: out= of {op} is {out.dtype} of shape {tuple(out.shape)}; expected {value.dtype} "
            f"of shape {tuple(value.shape)}, or leave out= away: a global tensor is not resized"
        )
    _write(out, value)
    return out


def _write_beside(
    op: OpOverload, with_written: Any, written: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Run an op that writes beside its results, as the noise of `rrelu`; return the results."""
    results = with_written(*_with_defaults(op, args, kwargs), **kwargs)
    targets = dict(zip((a.name for a in op._schema.arguments), args, strict=False)) | dict(kwargs)
    for name, value in zip(written, results[-len(written) :], strict=True):
        _write(targets[name], value)
    own = results[: len(results) - len(written)]
    return targets[written[0]] if not own else own[0] if len(own) == 1 else tuple(own)


def _become_view(op: OpOverload, target: GlobalTensor, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Make a tensor a view of itself, as `transpose_` does."""
    view: GlobalTensor = _functional(op)(without_graph(target), *args[1:], **kwargs)
    target._local, target._spec = view._local, view._spec
    target._origin, target._memory, target._viewed = view._origin, view._memory, view._viewed
    with without_torch_dispatch():
        op(target, *args[1:], **kwargs)  # the shape that torch sees
    return target


def _with_defaults(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    # torch leaves out arguments that are an op's defaults, which its functional form may not have
    rest = [a for a in op._schema.arguments[len(args) :] if not a.kwarg_only and a.name not in kwargs]
    return [*args, *(a.default_value for a in rest if a.has_default_value())]


def _is_in_place(
    target: Any, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> bool:
    """Return whether all elements stay where they are: pooling sets the strides of dims of size 1 so."""
    strides = zip(size, stride, target.stride(), strict=False)
    same = all(new == old for n, new, old in strides if n != 1)
    return tuple(size) == tuple(target.shape) and same and not storage_offset


def _draw_in_place(op: OpOverload, target: Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    # the functional op would fill a transposed value in another order
    local = current_local(target) if isinstance(target, GlobalTensor) else target
    if isinstance(target, GlobalTensor) and target._spec.axis.ranks.generators_differ:
        raise target._spec.axis.ranks.drawing_apart()
    op(local, *map(gathered, args[1:]), **kwargs)
    if isinstance(target, GlobalTensor):
        memory_of(target).writes += 1


def _is_full(value: Any) -> bool:
    return not isinstance(value, GlobalTensor) or value._spec.layout.is_full


def _expanded(value: Any, target: Tensor) -> Tensor:
    return value if value.shape == target.shape else value.expand(target.shape)  # type: ignore[no-any-return]


@cache
def _with_written(op: OpOverload) -> Any:
    """Return the op that returns the result of `op` and all that it writes; None if there is none."""
    namespace, _, name = op._schema.name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), f"{name.removesuffix('_')}_functional", None)
    return None if packet is None or op in _OTHER_NAMES else packet.default


@cache
def _functional(op: OpOverload) -> Any:
    """Return the op that returns what `op` writes."""
    if op in _OTHER_NAMES:
        return _OTHER_NAMES[op]
    namespace, _, name = op._schema.name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), name.removesuffix("_"), None)
    names = () if packet is None else packet.overloads()
    takes = [str(argument.type) for argument in op._schema.arguments if not argument.is_out]
    overloads = [getattr(packet, name) for name in sorted(names, key=lambda name: name != op._overloadname)]
    found = next((o for o in overloads if [str(a.type) for a in o._schema.arguments] == takes), None)
    if found is None:
        raise InputError(
            f"{user_line()}: {op} writes in place and has no form that returns its result; expected an op "
            "that has one, as x = x.add(1)"
        )
    return found


def _write(target: Tensor, value: Tensor) -> None:
    """Copy a value into a plain or global tensor, in the target's own placement."""
    if not isinstance(target, GlobalTensor):
        target.copy_(gathered(value, "copy_"))
        note_plain_write()
        return
    origin, local = target._origin, current_local(target)
    if origin is not None:
        scatter = _SCATTERS.get(origin.op)
        if scatter is None or origin.result is not None:
            raise InputError(
                f"{user_line()}: a write into {origin.op} of a global tensor, which is a gathered copy; "
                "expected a write into the tensor itself: use torch.where, or index it in the assignment"
            )
        _write(origin.base, scatter(origin.base, value, *origin.args, **origin.kwargs))
        return
    if target._viewed is not None and not _share_memory(local, target._viewed[0]):
        raise InputError(
            f"{user_line()}: a write into {target._viewed[1]} of a global tensor whose local part had to be "
            "copied; expected a contiguous tensor: call .contiguous() before the view"
        )
    _copy_into(target, local, value)
    memory_of(target).writes += 1


def _copy_into(target: GlobalTensor, local: Tensor, value: Tensor) -> None:
    spec = target._spec
    given = value if isinstance(value, GlobalTensor) else wrapped(value, spec.axis.ranks.unit)
    have: Placement = given._spec.placement
    part, type_, axis = current_local(given), given._spec.type, given._spec.axis
    if given._spec.layout.is_sharded and (axis is not spec.axis or have != spec.placement):
        part, have = redistributed(part, type_, have, R, axis, "copy_"), R
    if have != spec.placement:
        of_target = spec.type if spec.layout.is_sharded else type_
        part = redistributed(part, of_target, have, spec.placement, spec.axis, "copy_")
    local.copy_(part)


def _share_memory(a: Tensor, b: Tensor) -> bool:
    empty = a.numel() == 0 or b.numel() == 0
    return empty or a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
