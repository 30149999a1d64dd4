"""Internals of torch's DTensor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from operator import attrgetter, is_
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.fx.passes.shape_prop import TensorMetadata
from torch.utils._python_dispatch import _disable_current_modes

from fxdp.torch_compat.permanent import replace_for_good
from fxdp.torch_compat.shortcuts import is_on
from fxdp.torch_compat.torch_ops import aten

__all__ = [
    "dtensor_like", "dtensor_spec", "gradient_like", "local_shard", "local_shards", "mesh_on_paper",
    "mesh_with_last", "set_data_by", "shard_axes", "sharded_tensor", "shards_of", "take_over",
    "tensor_metadata", "users_attributes",
]  # fmt: skip

_Kind = TypeVar("_Kind", bound=DTensor)
_OWN = frozenset({"_local_tensor", "_spec", "fxdp_writes_data"})
"""The attributes of a sharded parameter that fxdp or torch sets; all further attributes are the user's."""
_LOCAL, _SPEC = attrgetter("_local_tensor"), attrgetter("_spec")


def dtensor_spec(
    mesh: DeviceMesh, placements: Sequence[tuple[str, int, int]], shape: Sequence[int], dtype: torch.dtype
) -> Any:
    """Return a `DTensorSpec` from one placement `(kind, dim, outer)` per mesh axis.

    The placements are `("R", 0, 1)`, `("P(sum)", 0, 1)` and `("S", dim, outer)`, DTensor's strided shard with
    split factor `outer`.
    """
    from torch.distributed.tensor import Partial, Placement
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
    from torch.distributed.tensor.placement_types import _StridedShard

    def spelled(kind: str, dim: int, outer: int) -> Placement:
        if kind != "S":
            return Replicate() if kind == "R" else Partial(kind[2:-1])
        return Shard(dim) if outer == 1 else _StridedShard(dim, split_factor=outer)

    # a spec requires strides, but a program only has local ones: use those of the contiguous full tensor
    size = torch.Size(shape)
    stride = torch.empty(size, device="meta").stride()
    return DTensorSpec(
        mesh, tuple(spelled(*p) for p in placements), tensor_meta=TensorMeta(size, stride, dtype)
    )


def local_shard(tensor: DTensor) -> torch.Tensor:
    """Return the local tensor of a `DTensor` itself; `to_local()` may create a view at each call."""
    return tensor._local_tensor


def shards_of(tensors: Iterable[DTensor]) -> list[torch.Tensor]:
    """Return the local tensors of many `DTensor`s, in a third of the time of `local_shard` for each."""
    return [*map(_LOCAL, tensors)]


def local_shards(
    tensors: Sequence[torch.Tensor | None], like: Sequence[DTensor]
) -> Sequence[torch.Tensor | None]:
    """Return the local tensors of `DTensor`s that `dtensor_like` made, and None for all further tensors.

    For all parameters of a model this takes a twentieth of the time of comparing placements.
    """
    try:  # the usual case: all match
        if all(map(is_, map(_SPEC, tensors), map(_SPEC, like))):
            return shards_of(tensors)  # type: ignore[arg-type]
    except AttributeError:  # None, or a plain tensor
        pass
    return [
        tensor._local_tensor if isinstance(tensor, DTensor) and tensor._spec is other._spec else None
        for tensor, other in zip(tensors, like, strict=True)
    ]


def set_data_by(write: Callable[[DTensor, torch.Tensor], None], parameter: DTensor) -> None:
    """Route `parameter.data = value` to `write` from now on: torch ignores the assignment for a `DTensor`.

    An assignment that moves to another device, as by torch's own FSDP, keeps torch's behavior, and so do
    parameters without the mark of fxdp.
    """
    parameter.fxdp_writes_data = True  # type: ignore[attr-defined]  # deep copies have it, too
    plain: Any = torch.Tensor.data

    def assign(self: DTensor, value: torch.Tensor) -> None:
        if getattr(self, "fxdp_writes_data", False) and value.device == self.device:
            write(self, value)
        else:
            plain.__set__(self, value)

    replace_for_good("torch.distributed.tensor:DTensor.data", lambda _: property(plain.__get__, assign))


def sharded_tensor(
    local: torch.Tensor, full: torch.Tensor, mesh: DeviceMesh, axes: Sequence[int]
) -> nn.Parameter:
    """Return a parameter like `full`, sharded by rows along mesh axes `axes`, with local tensor `local`."""
    placements = [Shard(0) if i in axes else Replicate() for i in range(mesh.ndim)]
    stride = torch.empty(full.shape, device="meta").stride()
    # begin with separate memory, as in `new_dtensor`, so that the parameter can be pickled and copied
    own = torch.empty_like(local)
    made = DTensor.from_local(own, mesh, placements, run_check=False, shape=full.shape, stride=stride)
    parameter = nn.Parameter(made, requires_grad=full.requires_grad)
    if _groups(parameter.device_mesh) != _groups(mesh):  # type: ignore[attr-defined]
        # torch remembers specs by meshes that compare equal, even of process groups that are gone
        _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]
        parameter = nn.Parameter(made, requires_grad=full.requires_grad)
    parameter._local_tensor = local  # type: ignore[attr-defined]
    return parameter


def _groups(mesh: DeviceMesh) -> list[str] | None:
    """Return the names of a mesh's process groups; None for a mesh on paper."""
    return getattr(mesh, "_dim_group_names", None)


def take_over(made: nn.Parameter, parameter: nn.Parameter) -> None:
    """Give `made` the hooks and attributes of the parameter that `made` replaces.

    Both share the hooks, so a handle from `register_hook` removes the hook of both.
    """
    vars(made).update(vars(parameter))
    made._backward_hooks = parameter._backward_hooks
    made._post_accumulate_grad_hooks = parameter._post_accumulate_grad_hooks


def users_attributes(parameter: nn.Parameter) -> dict[str, Any]:
    """Return the attributes that users set on a sharded parameter."""
    return {name: value for name, value in vars(parameter).items() if name not in _OWN}


def shard_axes(tensor: DTensor) -> tuple[int, ...]:
    """Return the mesh axes along which the rows of a sharded parameter are sharded, outermost first."""
    return tuple(axis for axis, placement in enumerate(tensor.placements) if placement == Shard(0))


def mesh_with_last(mesh: DeviceMesh, axis: str) -> DeviceMesh:
    """Return a mesh of the same ranks and groups with `axis` last; `mesh[...]` would keep the order of axes.

    The order matters because a `DTensor` shards a dim along the mesh axes in their order.
    """
    names = mesh.mesh_dim_names or ()
    order = sorted(range(mesh.ndim), key=lambda i: names[i] == axis)
    if order == list(range(mesh.ndim)):
        return mesh
    made = DeviceMesh(
        mesh.device_type, mesh.mesh.permute(order), mesh_dim_names=tuple(names[i] for i in order),
        _init_backend=False,
    )  # fmt: skip
    made._dim_group_names = [mesh._dim_group_names[i] for i in order]
    return made


def dtensor_like(tensor: DTensor, local: torch.Tensor) -> DTensor:
    """Return a `DTensor` of `local` with the spec of `tensor`, in 1 us (constructor 4, `from_local` 75)."""
    return new_dtensor(DTensor, local, tensor._spec)


def gradient_like(tensor: DTensor, local: torch.Tensor) -> DTensor:
    """Return a `DTensor` like `tensor` that autograd stores as a gradient in half the time."""
    return new_dtensor(_Gradient, local, tensor._spec)


class _Gradient(DTensor):
    """Gradient that autograd detaches to a plain `DTensor`, without torch's sharding propagation."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is aten.detach.default:
            return new_dtensor(DTensor, args[0]._local_tensor, args[0]._spec)
        return super().__torch_dispatch__(func, types, args, kwargs)  # type: ignore[no-untyped-call]


def new_dtensor(kind: type[_Kind], local: torch.Tensor, spec: Any) -> _Kind:
    """Return a `DTensor` of class `kind` with `local` as the local tensor."""
    # A `DTensor` made of a view inherits the storage offset without a storage, and torch then looks for the
    # storage when pickling or copying. Sizes come from the spec.
    made: _Kind = _constructor()(kind, _at_its_start(local.dtype, local.device), spec, requires_grad=False)
    made._local_tensor = local
    return made


@cache
def _constructor() -> Any:
    """Return the function that the constructor of `DTensor` calls, without the wrappers for compilers."""
    asked: Any = torch.Tensor  # the stubs lack the attribute
    return asked._dtensor__new__ if is_on("dtensor_like") else type.__call__


@cache
def _at_its_start(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return an empty tensor with storage offset 0."""
    # cached, so no active mode may take part
    with _disable_current_modes(), torch.inference_mode(False):
        return torch.empty(0, dtype=dtype, device=device)


def mesh_on_paper(device_type: str, ranks: Sequence[int], shape: Mapping[str, int], rank: int) -> DeviceMesh:
    """Return a mesh without process groups; torch then requires the number of this rank."""
    places = torch.tensor(ranks, dtype=torch.int).reshape(tuple(shape.values()))
    return DeviceMesh(device_type, places, mesh_dim_names=tuple(shape), _init_backend=False, _rank=rank)


def tensor_metadata(spec: Any) -> TensorMetadata:
    """Return the dtype and shape of a spec's full tensor, in the form that `print_readable()` shows."""
    shape, stride, dtype = spec.tensor_meta
    return TensorMetadata(shape, dtype, False, stride, None, False, {})
