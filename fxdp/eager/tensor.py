"""`GlobalTensor`: a tensor of the global batch, of which this rank holds a part."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from fxdp.eager.batch_axis import BatchAxis
from fxdp.eager.spec import GlobalSpec, dense_stride, spec_of
from fxdp.errors import InputError
from fxdp.ir.types.placements import Placement, R, Shard
from fxdp.torch_compat import refuse_pointer

if TYPE_CHECKING:
    from fxdp.eager.view_origins import Memory, ViewOrigin


class GlobalTensor(torch.Tensor):
    """A tensor with the global shape that holds this rank's part; all of torch's functions take it.

    Sizes, values and results mean what they mean on one device: `x.size(0)` is the global batch,
    `x.mean()` the mean over all ranks' samples. `fxdp.global_batch` and `fxdp.shard` make global tensors.
    Plain tensors in the same op count as equal on all ranks. All ranks must run the same ops in the same
    order; `item()` and the like of small results send nothing, so that one rank may call them alone.

    """

    _local: Tensor
    _spec: GlobalSpec
    _origin: ViewOrigin | None = None
    """What this tensor is a view of, if its base may be written without it."""
    _memory: Memory | None = None
    """The memory that it shares with its views."""
    _viewed: tuple[Tensor, Any] | None = None
    """The local part of the base that shares memory with this view, and the op that made the view."""

    @staticmethod
    def __new__(cls, local: Tensor, spec: GlobalSpec) -> GlobalTensor:
        """Wrap this rank's local value of a global tensor; without autograd."""
        made = without_values(cls, *spec.metadata)
        refuse_pointer(made)
        made._local, made._spec = local, spec
        return made

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run a function of torch; `gradients`, which imports this class, puts its own function here."""
        import fxdp.eager.autograd.gradients  # noqa: F401

        return cls.__torch_function__(func, types, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run one op below autograd; `dispatch`, which imports this class, puts its own function here."""
        import fxdp.eager.dispatch  # noqa: F401

        return cls.__torch_dispatch__(func, types, args, kwargs)

    @property
    def local(self) -> Tensor:
        """This rank's part, a plain tensor that shares its memory; terms of a sum if `placements` says so."""
        from fxdp.eager.view_origins import current_local

        return current_local(self)

    @property
    def placements(self) -> tuple[Placement, ...]:
        """The placement along each data axis of the mesh: `fxdp.S(0)`, `fxdp.R` or `fxdp.P`."""
        return (self._spec.placement,) * len(self._spec.axis.ranks.mesh.axes)

    @property
    def local_sizes(self) -> tuple[int, ...]:
        """The number of samples on each rank; empty if no dim is sharded."""
        return self._spec.axis.sizes if self._spec.layout.is_sharded else ()

    @property
    def data(self) -> Any:
        """The value without its graph; assigning another one gives its value, memory and size to this."""
        return torch.Tensor.data.__get__(self)  # type: ignore[attr-defined]

    @data.setter
    def data(self, value: Tensor) -> None:
        from fxdp.eager.view_origins import become

        become(self, value)

    def full(self) -> Tensor:
        """Return the full value, a plain tensor, with its gradient; all ranks must call this together."""
        from fxdp.eager.autograd.gradients import full_value

        return full_value(self)

    def tolist(self) -> Any:
        """Return the full value as nested lists; all ranks must call this together."""
        return self._detached().full().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """Return the full value as an array; all ranks must call this together."""
        return (self._detached() if force else self).full().numpy(force=force)

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the full value as an array; all ranks must call this together."""
        return self.full().__array__(*args, **kwargs)  # type: ignore[no-untyped-call]

    def _detached(self) -> GlobalTensor:
        return self.detach()  # type: ignore[return-value]

    def __deepcopy__(self, memo: dict[int, Any]) -> GlobalTensor:
        """Return a copy of the local part with the same layout."""
        if id(self) not in memo:
            copied: Any = self.detach().clone().requires_grad_(self.requires_grad)
            memo[id(self)] = copied
        return memo[id(self)]  # type: ignore[no-any-return]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle or save the full value, a plain tensor; all ranks must do so together."""
        plain = self._detached().full().requires_grad_(self.requires_grad)
        return plain.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __format__(self, spec: str) -> str:
        """Format a single number as one; anything else as its repr."""
        return format(self.item(), spec) if self.dim() == 0 else object.__format__(self, spec)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Return shape, placement and local part; sends nothing."""
        spec = self._spec
        grad = ", requires_grad=True" if self.requires_grad else ""
        return f"GlobalTensor(shape={tuple(spec.shape)}, {spec.layout}, local={self._local}{grad})"

    def data_ptr(self) -> NoReturn:
        """Refuse: there is no memory that has the global value."""
        raise self._no_memory("asked for its data_ptr()")

    def storage(self) -> NoReturn:
        """Refuse: there is no memory that has the global value."""
        raise self._no_memory("asked for its storage")

    _typed_storage = storage

    def untyped_storage(self) -> Any:
        """Return the size of one device's memory, which summaries of models ask for; refuse for a view."""
        return self.storage() if self._viewed or self._origin else _StorageSize(self)

    def __dlpack__(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse: there is no memory that has the global value."""
        raise self._no_memory("exported by DLPack")

    def _no_memory(self, what: str) -> InputError:
        return InputError(
            f"a global tensor of shape {tuple(self._spec.shape)} ({self._spec.layout}) was {what}, but no "
            "rank has memory with the global value; expected a plain tensor: take .local for this rank's "
            "part or .full() for the full value (on all ranks)"
        )


class _StorageSize:
    """The size of a storage that no rank has."""

    def __init__(self, tensor: GlobalTensor) -> None:
        self._tensor = tensor

    def nbytes(self) -> int:
        """Return the number of bytes."""
        return self._tensor.numel() * self._tensor.element_size()

    size = __len__ = nbytes

    def __sizeof__(self) -> int:
        """Return what `sys.getsizeof` counts of one device's storage, about."""
        return object.__sizeof__(self) + self.nbytes()

    def __getattr__(self, name: str) -> NoReturn:
        """Refuse: the memory's contents and place."""
        self._tensor.storage()


def without_values(*metadata: Any) -> GlobalTensor:
    """Return a tensor of a class, sizes, strides, ...; a normal one in inference mode, too, for views."""
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False):
            return torch.Tensor._make_wrapper_subclass(*metadata)  # type: ignore[no-any-return]
    return torch.Tensor._make_wrapper_subclass(*metadata)  # type: ignore[no-any-return]


def wrapped(local: Tensor, axis: BatchAxis, placement: Placement = R) -> GlobalTensor:
    """Return the global tensor with this local value, with dense strides if it is sharded."""
    layout = axis.full if placement is R else axis.layout(placement)
    shape, stride = tuple(local.shape), tuple(local.stride())
    if isinstance(placement, Shard):
        dim = placement.dim
        factor = local.shape[dim] // axis.local if axis.local else int(placement.outer)
        shape = (*shape[:dim], factor * axis.total, *shape[dim + 1 :])
        stride = dense_stride(shape)
    return GlobalTensor(local, spec_of(local.dtype, shape, stride, local.device, layout))
