"""Of torch's DTensor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from operator import attrgetter, is_
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.fx.passes.shape_prop import TensorMetadata
from torch.utils._python_dispatch import _disable_current_modes

from fxdp.torch_compat.permanent import replace_for_good
from fxdp.torch_compat.shortcuts import is_on
from fxdp.torch_compat.torch_ops import aten

__all__ = [
    "dtensor_like",
    "dtensor_spec",
    "gradient_like",
    "local_shard",
    "local_shards",
    "mesh_on_paper",
    "mesh_with_last",
    "set_data_by",
    "shard_axes",
    "sharded_tensor",
    "shards_of",
    "take_over",
    "tensor_metadata",
    "users_attributes",
]

_Kind = TypeVar("_Kind", bound=DTensor)
_OWN = frozenset({"_local_tensor", "_spec", "fxdp_writes_data"})
"""The attributes of a sharded parameter that its users know nothing of."""
_LOCAL, _SPEC = attrgetter("_local_tensor"), attrgetter("_spec")


def dtensor_spec(
    mesh: DeviceMesh, placements: Sequence[tuple[str, int, int]], shape: Sequence[int], dtype: torch.dtype
) -> Any:
    """A `DTensorSpec`, one placement per mesh axis: `("R", 0, 1)`, `("P(sum)", 0, 1)`, `("S", dim, outer)`"""
    from torch.distributed.tensor import Partial, Placement
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
    from torch.distributed.tensor.placement_types import _StridedShard

    def spelled(kind: str, dim: int, outer: int) -> Placement:
        if kind != "S":
            return Replicate() if kind == "R" else Partial(kind[2:-1])
        return Shard(dim) if outer == 1 else _StridedShard(dim, split_factor=outer)

    # a spec wants strides, which a program has for its own ranks only: those of the contiguous entire
    size = torch.Size(shape)
    stride = torch.empty(size, device="meta").stride()
    return DTensorSpec(
        mesh, tuple(spelled(*p) for p in placements), tensor_meta=TensorMeta(size, stride, dtype)
    )


def local_shard(tensor: DTensor) -> torch.Tensor:
    """What this rank holds of a `DTensor`: the very tensor; `to_local()` may make a view at each call."""
    return tensor._local_tensor


def shards_of(tensors: Iterable[DTensor]) -> list[torch.Tensor]:
    """`local_shard` of each, for all of a model in a third of the time."""
    return [*map(_LOCAL, tensors)]


def local_shards(
    tensors: Sequence[torch.Tensor | None], like: Sequence[DTensor]
) -> Sequence[torch.Tensor | None]:
    """Those of `DTensor`s that were made by `dtensor_like`; None for any other.

    Of an entire model's tensors a twentieth of the time that it takes to compare their placements.
    """
    try:  # as a rule all are
        if all(map(is_, map(_SPEC, tensors), map(_SPEC, like))):
            return shards_of(tensors)  # type: ignore[arg-type]
    except AttributeError:  # None, or a plain tensor
        pass
    return [
        tensor._local_tensor if isinstance(tensor, DTensor) and tensor._spec is other._spec else None
        for tensor, other in zip(tensors, like, strict=True)
    ]


def set_data_by(write: Callable[[DTensor, torch.Tensor], None], parameter: DTensor) -> None:
    """From now on `parameter.data = value` is done by `write`: of a `DTensor` torch ignores it.

    What moves to another device, as torch's own FSDP does, stays as it is, and so do others' parameters.
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
    """A parameter like `full` of which this rank holds the rows `local`, sharded along those axes."""
    placements = [Shard(0) if i in axes else Replicate() for i in range(mesh.ndim)]
    stride = torch.empty(full.shape, device="meta").stride()
    # of memory of its own first, as in `_new`: so the parameter can be pickled and copied
    own = torch.empty_like(local)
    made = DTensor.from_local(own, mesh, placements, run_check=False, shape=full.shape, stride=stride)
    parameter = nn.Parameter(made, requires_grad=full.requires_grad)
    parameter._local_tensor = local  # type: ignore[attr-defined]
    return parameter


def take_over(made: nn.Parameter, parameter: nn.Parameter) -> None:
    """Let `made` have what users gave the parameter in whose place it comes: hooks and attributes.

    Handles that `register_hook` returned remove hooks of both, as both have the same ones.
    """
    vars(made).update(vars(parameter))
    made._backward_hooks = parameter._backward_hooks
    made._post_accumulate_grad_hooks = parameter._post_accumulate_grad_hooks


def users_attributes(parameter: nn.Parameter) -> dict[str, Any]:
    """The attributes that users gave a sharded parameter."""
    return {name: value for name, value in vars(parameter).items() if name not in _OWN}


def shard_axes(tensor: DTensor) -> tuple[int, ...]:
    """The axes of its mesh along which the rows of a sharded parameter are sharded, one after another."""
    return tuple(axis for axis, placement in enumerate(tensor.placements) if placement == Shard(0))


def mesh_with_last(mesh: DeviceMesh, axis: str) -> DeviceMesh:
    """The same ranks and groups with that axis as the last: `mesh[...]` keeps the order of axes.

    A `DTensor` shards a dim along its mesh's axes in their order.
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
    """Another value of a `DTensor`'s kind; this takes 1 us, its constructor 4, `from_local` 75."""
    return new_dtensor(DTensor, local, tensor._spec)


def gradient_like(tensor: DTensor, local: torch.Tensor) -> DTensor:
    """The same for autograd to keep as a gradient, which takes it half as long."""
    return new_dtensor(_Gradient, local, tensor._spec)


class _Gradient(DTensor):
    """Detached, as autograd keeps it, it is a `DTensor` without more ado: torch would infer its placement."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is aten.detach.default:
            return new_dtensor(DTensor, args[0]._local_tensor, args[0]._spec)
        return super().__torch_dispatch__(func, types, args, kwargs)  # type: ignore[no-untyped-call]


def new_dtensor(kind: type[_Kind], local: torch.Tensor, spec: Any) -> _Kind:
    """A `DTensor` of this kind, of which this rank holds `local`."""
    # A `DTensor` that is made of a view takes over where that begins in its memory, though it has none
    # itself: then torch looks for that memory when it is to pickle or copy it. Sizes it has from the spec.
    made: _Kind = _constructor()(kind, _at_its_start(local.dtype, local.device), spec, requires_grad=False)
    made._local_tensor = local
    return made


@cache
def _constructor() -> Any:
    """What the constructor of a `DTensor` calls, without the wrappers for compilers that are around it."""
    asked: Any = torch.Tensor  # whose stubs lack it
    return asked._dtensor__new__ if is_on("dtensor_like") else type.__call__


@cache
def _at_its_start(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor that begins where its memory does."""
    # it is kept, so no mode that is on now may have made it
    with _disable_current_modes(), torch.inference_mode(False):
        return torch.empty(0, dtype=dtype, device=device)


def mesh_on_paper(device_type: str, ranks: Sequence[int], shape: Mapping[str, int], rank: int) -> DeviceMesh:
    """A mesh that joins nobody: without a process group torch makes it, but asks for this rank's number."""
    places = torch.tensor(ranks, dtype=torch.int).reshape(tuple(shape.values()))
    return DeviceMesh(device_type, places, mesh_dim_names=tuple(shape), _init_backend=False, _rank=rank)


def tensor_metadata(spec: Any) -> TensorMetadata:
    """What `print_readable()` shows of a spec: the full tensor's dtype and shape."""
    shape, stride, dtype = spec.tensor_meta
    return TensorMetadata(shape, dtype, False, stride, None, False, {})
