"""What a step of sharded parameters sends and holds, counted at torch's ops and storages, not from a plan."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from fxdp.ir.ops import parameter_shards as rows
from fxdp.ir.ops.packed_sums import start_sum

_REDUCED = frozenset({
    "all_reduce", "all_reduce_", "broadcast", "broadcast_", "reduce_scatter_tensor",
})  # fmt: skip
_ROWS = {
    rows.start_all_gather_shards: "all_gather_shards", rows.publish_shards: "all_gather_shards",
    rows.start_reduce_scatter_shards: "reduce_scatter_shards",
}  # fmt: skip


@dataclass
class Traffic(TorchDispatchMode):
    """Inside, each collective and its bytes of full values, and what is gathered at once."""

    calls: list[tuple[str, int]] = field(default_factory=list)
    most_buckets: int = 0
    most_bytes: int = 0
    """The most of full values at once, under way or there."""
    _alive: list[tuple[int, int, StorageWeakRef]] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _ROWS:
            values, sizes, world = args[:3]
            self.calls.append((_ROWS[func], prod((sum(sizes), world, values[0].itemsize))))
        elif func is start_sum:
            self.calls.append(("all_reduce", sum(value.nbytes for value in args[0])))
        elif func.namespace == "_c10d_functional" and (size := _size(func, args)) is not None:
            self.calls.append((func._schema.name.partition("::")[2], size))
        if func is rows.start_all_gather_shards:  # what is shown is no copy
            self._holds(result, len(self.calls))
        return result

    def _holds(self, value: Tensor, bucket: int) -> None:
        """A bucket is there as long as its full values, which a gather writes where they stay."""
        storage = value.untyped_storage()
        self._alive = [one for one in self._alive if not one[-1].expired()]
        self._alive.append((bucket, value.nbytes, StorageWeakRef(storage)))
        alive = {b: size for b, size, _ in self._alive}
        self.most_buckets = max(self.most_buckets, len(alive))
        self.most_bytes = max(self.most_bytes, sum(alive.values()))

    @property
    def sent(self) -> int:
        """Bytes of all of them."""
        return sum(size for _, size in self.calls)

    @property
    def largest_gather(self) -> int:
        """Bytes of the largest bucket of full values."""
        return max((size for name, size in self.calls if name == "all_gather_shards"), default=0)

    def of(self, kind: str) -> int:
        """Bytes of one kind."""
        return sum(size for name, size in self.calls if name == kind)


def _size(func: Any, args: Any) -> int | None:
    name = func._schema.name.partition("::")[2]
    if name in _REDUCED:
        return int(args[0].nbytes)
    return int(args[0].nbytes) * int(args[1]) if name.startswith("all_gather_into_tensor") else None


def own_memory(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def plain_copies(parameters: list[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
    """Plain tensors like what this rank holds of parameters, with random gradients."""
    made = []
    for parameter in parameters:
        own = torch.nn.Parameter(own_memory(parameter.detach()).clone())
        own.grad = torch.randn_like(own)
        made.append(own)
    return made
