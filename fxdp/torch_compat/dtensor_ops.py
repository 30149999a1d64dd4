"""Handlers for ops on `DTensor`s that torch computes incorrectly, or that raise on some ranks only.

    rows[2].zero_()         writes into a copy: rows that are selected are gathered first
    rows.norm().item()      gives this rank's part of the number
    rows.max()              raises on a rank without rows, while all ranks with rows wait
    mse_loss(rows, other)   divides by the number of rows of a rank
    rows[:, 0] = 0.0        is not known

On the meshes along which fxdp shards parameters, these ops act as on a plain tensor.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._redistribute import redistribute_local_tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from fxdp.torch_compat.dtensor import dtensor_like, new_dtensor
from fxdp.torch_compat.operators import torch_release
from fxdp.torch_compat.torch_ops import aten

__all__ = ["act_as_plain", "compute_full_norms"]

_VIEWS = (aten.select.int, aten.slice.Tensor)
_NORMS = (aten.linalg_vector_norm.default, aten._foreach_norm.Scalar)
_OF_EVEN_ROWS = (
    aten.max.default, aten.min.default, aten.amax.default, aten.amin.default, aten.aminmax.default,
)  # fmt: skip
"""Ops that fail on a rank without rows."""
_OF_FULL_VALUES = (
    aten.mse_loss.default, aten.mse_loss_backward.default, aten.argmax.default, aten.argmin.default,
)  # fmt: skip
"""Ops that must see all rows; argmax and argmin fail on gloo in torch 2.11."""
_WRITES = tuple(
    getattr(getattr(aten, f"{name}_"), overload)
    for name, overload in (
        ("zero", "default"), ("fill", "Scalar"), ("copy", "default"), ("add", "Tensor"), ("sub", "Tensor"),
        ("mul", "Tensor"), ("div", "Tensor"), ("pow", "Scalar"), ("neg", "default"), ("clamp", "default"),
        ("lerp", "Scalar"), ("addcmul", "default"), ("addcdiv", "default"),
    )
)  # fmt: skip
"""Ops that write; torch 2.11 bypasses a subclass's dispatch, so only these ops reach the rows of a part."""


def act_as_plain(mesh: DeviceMesh) -> None:
    """Make the ops of this module correct for `DTensor`s of `mesh`, from now on."""
    _MESHES.add(mesh)
    if _BEFORE:
        return
    own = {aten._local_scalar_dense.default: _number}
    own |= (
        {aten.fill_.Tensor: _fill}
        | dict.fromkeys(_OF_FULL_VALUES, _of_full_values)
        | dict.fromkeys(_VIEWS, _view)
    )
    own |= dict.fromkeys(_OF_EVEN_ROWS, _of_uneven_rows) | dict.fromkeys(_NORMS, _norm)
    if torch_release() == "2.11":
        own |= dict.fromkeys(_WRITES, _write) | {aten.detach.default: _detached}
    handlers: dict[Any, Callable[..., Any]] = DTensor._op_dispatcher._custom_op_handlers
    for op, handler in own.items():
        _BEFORE[op] = handlers.get(op)
        handlers[op] = _OURS[op] = partial(_on_our_meshes, handler)


def compute_full_norms(mesh: DeviceMesh) -> None:
    """Compute norms of `DTensor`s of `mesh` from full values, with the bits of one device.

    A sum of norms of shards has an order that depends on the number of ranks. Values are gathered one by one.
    All modules that are sharded over this mesh, or an equal one, get such norms.
    """
    _OF_FULL_NORMS.add(mesh)


_MESHES: weakref.WeakSet[DeviceMesh] = weakref.WeakSet()
_OF_FULL_NORMS: weakref.WeakSet[DeviceMesh] = weakref.WeakSet()
_BEFORE: dict[Any, Callable[..., Any] | None] = {}
"""torch's own handlers, process-wide like the replacements."""
_OURS: dict[Any, Callable[..., Any]] = {}


def _on_our_meshes(
    handler: Callable[..., Any], op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    # checking the first operand is enough as a rule; checking all takes longer than an op on a gradient
    ours = _is_ours(args[0] if args else None) or any(map(_is_ours, tree_leaves((args, kwargs))))
    return (handler if ours else _as_torch_does)(op, args, kwargs)


def _is_ours(operand: Any) -> bool:
    return isinstance(operand, DTensor) and operand._spec.mesh in _MESHES


def _as_torch_does(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if (before := _BEFORE[op]) is not None:
        return before(op, args, kwargs)
    handlers: dict[Any, Callable[..., Any]] = DTensor._op_dispatcher._custom_op_handlers
    own = _OURS[op]
    handlers.pop(op, None)  # pop with a default: another thread may be here at the same time
    try:
        return op(*args, **kwargs)
    finally:
        handlers[op] = own


def _number(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return op(_full(args[0]))


def _norm(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensors = args[0] if isinstance(args[0], (list, tuple)) else [args[0]]
    if any(isinstance(t, DTensor) and t.device_mesh in _OF_FULL_NORMS for t in tensors):
        if tensors is not args[0]:
            return _of_full_values(op, args, kwargs)
        each = (_of_full_values(op, ([tensor], *args[1:]), kwargs) for tensor in tensors)
        return [norm for norms in each for norm in norms]
    if math.isinf(args[1] if len(args) > 1 else kwargs.get("ord", 2)):
        return _of_uneven_rows(op, args, kwargs)
    return _as_torch_does(op, args, kwargs)


def _of_uneven_rows(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _as_torch_does(op, *tree_map_only(DTensor, _evened, (args, kwargs)))


def _of_full_values(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _as_torch_does(op, *tree_map_only(DTensor, _replicated, (args, kwargs)))


def _fill(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    filled, value = args
    if isinstance(filled, _Part):
        return filled.write(op, args[1:], kwargs)
    op(filled._local_tensor, _full(value) if isinstance(value, DTensor) else value)
    return filled


def _write(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if isinstance(args[0], _Part):
        return args[0].write(op, args[1:], kwargs)
    return _as_torch_does(op, args, kwargs)


def _detached(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return dtensor_like(args[0], args[0]._local_tensor)  # a gradient that can be copied and pickled


def _view(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    rows, dim = args[0], args[1] if len(args) > 1 else 0
    made = _as_torch_does(op, args, kwargs)
    if isinstance(rows, _Part):
        return _Part.of(made, rows.rows, (*rows.views, (op, args[1:], kwargs)))
    if rows.placements == made.placements or not any(p.is_shard(dim % rows.ndim) for p in rows.placements):
        return made
    return _Part.of(made, rows, ((op, args[1:], kwargs),))


def _full(tensor: DTensor) -> torch.Tensor:
    return _replicated(tensor)._local_tensor


def _evened(tensor: DTensor) -> DTensor:
    """Return the tensor, replicated if the ranks hold different numbers of rows."""
    parts = [1] * tensor.ndim
    for axis, placement in enumerate(tensor.placements):
        if isinstance(placement, Shard):
            parts[placement.dim] *= tensor.device_mesh.size(axis)
    if all(size % count == 0 for size, count in zip(tensor.shape, parts, strict=True)):
        return tensor
    return _replicated(tensor)


def _replicated(tensor: DTensor) -> DTensor:
    """Return the tensor replicated; `redistribute` of torch 2.11 fails here, below autograd."""
    spec = _spread(tensor)
    return new_dtensor(DTensor, redistribute_local_tensor(tensor._local_tensor, tensor._spec, spec), spec)


def _spread(tensor: DTensor) -> DTensorSpec:
    places = (Replicate(),) * tensor.device_mesh.ndim
    return DTensorSpec(tensor.device_mesh, places, tensor_meta=tensor._spec.tensor_meta)


class _Part(DTensor):
    """View of a sharded tensor, gathered on each rank; writes into the view reach the sharded tensor.

    Attributes
    ----------
    rows : the sharded tensor.
    views : the ops that made the view, each with the remaining arguments.
    """

    rows: DTensor
    views: tuple[tuple[Any, tuple[Any, ...], dict[str, Any]], ...]

    @classmethod
    def of(cls, made: DTensor, rows: DTensor, views: tuple[Any, ...]) -> _Part:
        """Return `made` as a part of `rows`."""
        part = new_dtensor(cls, made._local_tensor, made._spec)
        part.rows, part.views = rows, views
        return part

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        part = args[0] if args else None
        schema = func._schema.arguments
        if isinstance(part, cls) and schema[0].is_write:
            return part.write(func, args[1:], kwargs)
        made = super().__torch_dispatch__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        if isinstance(part, cls) and isinstance(made, DTensor) and func.is_view:
            return cls.of(made, part.rows, (*part.views, (func, args[1:], kwargs)))
        return made

    def write(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Part:
        """Apply an in-place op to the viewed elements of the sharded tensor, and to this value."""
        rows = self.rows
        args, kwargs = tree_map_only(DTensor, _full, (args, kwargs))
        with torch.no_grad():
            full = _full(rows)
            part = full
            for view, others, options in self.views:
                part = view(part, *others, **options)
            func(part, *args, **kwargs)
            rows._local_tensor.copy_(redistribute_local_tensor(full, _spread(rows), rows._spec))
            self._local_tensor.copy_(part)
        return self
