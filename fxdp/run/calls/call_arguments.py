"""`CallArguments`: the arguments of a call, with the dims along which they have the batch.

    model(x, mask)      x: [8, 3] in S(0) of (5, 3)     mask: [8, 8], plain       0, 0
    model(x, scale)     x: [8, 3] in S(0) of (5, 3)     scale: [3], plain         0, None
    model(x, y)         x: [8, 3], y: [8], plain, equal on all ranks              0, 0, and cut

That `mask` counts samples is a guess, which costs no number: a program is right for each size that it takes.
So is that plain arguments alone, all with one size in front, are a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fxdp.eager.autograd.gradients import replicated
from fxdp.eager.batch_axis import BatchAxis
from fxdp.eager.plans.sparse_layouts import stays_plain
from fxdp.eager.tensor import GlobalTensor, wrapped
from fxdp.ir.types.placements import Shard

_ATOMS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_VALUES = (bool, str, type(None))
"""Arguments of which each value is a kind of its own."""


@dataclass(frozen=True)
class CallArguments:
    """The arguments of a call.

    Attributes
    ----------
    spec : their structure, in tuples, lists and dicts.
    dims : for each tensor the dim along which it has the batch, or None.
    key : all that decides on the program among arguments and modes, except sizes.
    total : the size of the batch.
    shapes : the global shape of each tensor.
    is_plain : whether no argument is a global tensor.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    spec: Any
    dims: tuple[int | None, ...]
    key: tuple[Any, ...]
    total: int
    shapes: tuple[torch.Size, ...]
    is_plain: bool

    @classmethod
    def read(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallArguments | None:
        """Read the arguments of a call; None if no program is made for such arguments."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        axis: Any = None
        for leaf in leaves:
            if type(leaf) is GlobalTensor and leaf._spec.layout.is_sharded:
                if axis is not None and leaf._spec.axis is not axis:
                    return None
                axis = leaf._spec.axis
        total = _common_size(leaves) if axis is None else axis.total
        if total < 2 or not _is_plain(spec):
            return None
        tokens: list[Any] = []
        dims: list[int | None] = []
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                if not _is_taken(leaf, total):
                    return None
                dims.append(_batch_dim(leaf, total))
                tokens.append((leaf.dtype, leaf.dim(), leaf.requires_grad, leaf.device))
            elif isinstance(leaf, _ATOMS):
                tokens.append((type(leaf), leaf if isinstance(leaf, _VALUES) else None))
            else:
                return None
        key = spec, tuple(dims), tuple(tokens), torch.is_grad_enabled(), axis is None
        shapes = tuple(leaf.shape for leaf in leaves if isinstance(leaf, Tensor))
        return cls(args, kwargs, spec, tuple(dims), key, total, shapes, axis is None)

    def prefix(self) -> Any:
        """Return the batch dims as a pytree like the arguments."""
        dims = iter(self.dims)
        return pytree.tree_map(
            lambda leaf: next(dims) if isinstance(leaf, Tensor) else None, (self.args, self.kwargs)
        )

    def entered(self, axis_of: Callable[[int], BatchAxis]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments; plain tensors with gradients become global ones, whose gradients are full.

        If all are plain, they are cut along `axis_of(size of the batch)`.
        """
        if self.is_plain:
            axis = axis_of(self.total)
            cut = pytree.tree_map_only(Tensor, lambda leaf: _cut(leaf, axis), (self.args, self.kwargs))
            return cut  # type: ignore[no-any-return]
        leaves, spec = pytree.tree_flatten((self.args, self.kwargs))
        if not torch.is_grad_enabled() or not any(map(_enters, leaves)):
            return self.args, self.kwargs
        unit = next(leaf for leaf in leaves if type(leaf) is GlobalTensor)._spec.axis.ranks.unit
        entered = [replicated(leaf, unit) if _enters(leaf) else leaf for leaf in leaves]
        return pytree.tree_unflatten(entered, spec)  # type: ignore[no-any-return]


@lru_cache(maxsize=1024)
def _is_plain(spec: Any) -> bool:
    """Return whether arguments are in tuples, lists and dicts alone."""
    return spec.type in (None, tuple, list, dict) and all(map(_is_plain, spec.children()))


def _is_taken(tensor: Tensor, total: int) -> bool:
    """Return whether a program takes such a tensor: full, or by samples of the batch; none to derive by."""
    if type(tensor) is not GlobalTensor:
        return type(tensor) in (Tensor, nn.Parameter) and not stays_plain(tensor)
    if tensor.requires_grad and tensor.is_leaf:
        return False  # its gradient is asked for, and often differentiated again
    placement = tensor._spec.placement
    return not isinstance(placement, Shard) or (placement.outer == 1 and tensor.shape[placement.dim] == total)


def _batch_dim(tensor: Tensor, total: int) -> int | None:
    if type(tensor) is GlobalTensor and isinstance(placement := tensor._spec.placement, Shard):
        return placement.dim
    return 0 if tensor.dim() and tensor.shape[0] == total else None


def _common_size(leaves: Sequence[Any]) -> int:
    """Return the size in front of all plain tensors; 0 if they have several, or if one gets a gradient."""
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    apart = any(type(leaf) is not Tensor or leaf.requires_grad or stays_plain(leaf) for leaf in tensors)
    sizes = set() if apart else {int(leaf.shape[0]) for leaf in tensors if leaf.dim()}
    return sizes.pop() if len(sizes) == 1 else 0


def _cut(tensor: Tensor, axis: BatchAxis) -> Tensor:
    """Return a plain tensor, equal on all ranks, as a global one, of which this rank has its part."""
    return wrapped(tensor.narrow(0, axis.offset, axis.local), axis, Shard(0)) if tensor.dim() else tensor


def _enters(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and type(leaf) is not GlobalTensor and leaf.requires_grad
