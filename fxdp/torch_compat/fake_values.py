"""Internals of fake tensors: values for copied nodes without running the op, and known constants."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode

__all__ = [
    "TRACED", "in_other_memory", "is_traced", "known_number", "storage_id", "traced_nodes", "written_value",
]  # fmt: skip

TRACED = (FakeTensor, FunctionalTensor)
"""The tensor classes that represent real tensors while tracing."""


def is_traced() -> bool:
    """Return whether ops are being traced into a graph."""
    return get_proxy_mode() is not None


@contextlib.contextmanager
def traced_nodes() -> Iterator[list[fx.Node]]:
    """Yield a list that contains, after the block, the nodes that a trace added inside."""
    found: list[fx.Node] = []
    mode = get_proxy_mode()
    graph = fx.Graph() if mode is None else mode.tracer.graph
    last = next(iter(reversed(graph.nodes)), None)
    yield found
    found += itertools.takewhile(lambda node: node is not last, reversed(graph.nodes))


def written_value(tensor: FunctionalTensor) -> tuple[Tensor, tuple[bool, ...]]:
    """Return the value of a functional tensor, and whether data, metadata and storage changed."""
    held: Any = tensor.elem
    asked: Any = torch  # the stubs lack these functions
    branches = (
        asked._functionalize_has_data_mutation(held),
        asked._functionalize_has_metadata_mutation(held),
        asked._functionalize_was_storage_changed(held),
    )
    return asked._from_functional_tensor(held), branches


def known_number(tensor: Tensor) -> Any:
    """Return the value of a 0-dim tensor if known during tracing; None otherwise."""
    if tensor.dim() != 0:
        return None
    if isinstance(tensor, FunctionalTensor):
        tensor = torch._from_functional_tensor(tensor.elem)
    if isinstance(tensor, FakeTensor):
        return None if tensor.constant is None else tensor.constant.item()
    return tensor.item()


def in_other_memory(value: Any, operands: Iterable[tuple[Any, Any]], further: int = 0) -> Any:
    """Return the fake value of a copied node: tensors like those of `value`, based on the copy's operands.

    `operands` are pairs: an operand of the original node and the operand of the copy. A view of an operand
    becomes the same view of the copy's operand, with `further` added to the storage offset. A tensor that is
    no view of an operand gets new memory, shared with no operand.
    """
    from torch._subclasses.fake_tensor import in_kernel_invocation_manager

    tensors = [value] if isinstance(value, FakeTensor) else []
    if isinstance(value, (list, tuple)):
        tensors = [one for one in value if isinstance(one, FakeTensor)]
    if not tensors:
        return value
    with in_kernel_invocation_manager(tensors[0].fake_mode):  # inside, the tensors are on the meta device
        pairs = [pair for operand in operands for pair in _each(*operand)]
        memory = {storage_id(one): (other, _moved(one, other) + further) for one, other in pairs}
        made = {id(tensor): _made(tensor, memory) for tensor in tensors}
    found = [made.get(id(one), one) for one in ([value] if isinstance(value, FakeTensor) else value)]
    return found[0] if isinstance(value, FakeTensor) else type(value)(found)


def _each(one: Any, other: Any) -> Iterable[tuple[FakeTensor, Any]]:
    pairs = zip(one, other, strict=True) if isinstance(one, (list, tuple)) else [(one, other)]
    return [(a, b) for a, b in pairs if isinstance(a, FakeTensor)]


def _moved(one: FakeTensor, other: Tensor) -> int:
    """Return how much larger the storage offset of `other` is than that of `one`, in elements."""
    here, there = one.storage_offset(), other.storage_offset()
    return there - here if isinstance(here, int) and isinstance(there, int) else 0


def _made(tensor: FakeTensor, memory: dict[int, tuple[Any, int]]) -> FakeTensor:
    shape, stride, offset = tuple(tensor.shape), tensor.stride(), tensor.storage_offset()
    base, moved = memory.get(storage_id(tensor), (None, 0))
    if base is None:
        found = torch.empty_strided(shape, stride, dtype=tensor.dtype, device="meta")
        memory[storage_id(tensor)] = found, 0
    elif base.dtype == tensor.dtype:
        found = torch.as_strided(base, shape, stride, offset + moved if moved else offset)
    else:  # a view of the same bytes with another dtype
        found = torch.empty(0, dtype=tensor.dtype, device="meta")
        moved = moved * base.itemsize // tensor.itemsize
        found.set_(base.untyped_storage(), offset + moved if moved else offset, shape, stride)
    return FakeTensor(tensor.fake_mode, found, tensor.fake_device)


def storage_id(tensor: Tensor) -> int:
    """Return a number that tensors in the same memory share, also those without addresses."""
    address: int = tensor.untyped_storage()._cdata
    return address
