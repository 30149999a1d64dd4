"""Copy a fake tensor if one with equal sizes and strides was made before; the copy has its own memory.

Torch caches the result of a fake op as metadata, and builds a tensor from the metadata each time. For each
symbolic size, torch then asks a dozen questions: is the size zero, is it negative, how many bytes are there.
The answers are equal to those for the last tensor with the same symbols in the same places.

    %a: f32[s0, 64] = relu(%x)      made by torch, and cached without memory
    %b: f32[s0, 64] = relu(%y)      a copy of %a with new memory of equal size; a view shares memory
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import torch
from torch import SymInt, Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from fxdp.torch_compat.patch import Patch, patched
from fxdp.torch_compat.shortcuts import shortcut
from fxdp.torch_compat.torch_ops import aten

__all__ = ["memoized_fakes"]

_NAME = "_get_output_tensor_from_cache_entry"

_Make: TypeAlias = Callable[..., Any]


@shortcut("memoized_fakes")
def memoized_fakes() -> Iterator[None]:
    """Copy fake tensors inside the block instead of building each from metadata."""
    with patched((Patch(FakeTensorMode, _NAME, lambda plain: _Copies(plain).method()),)):
        yield


class _Copies:
    """Cache of fake tensors without memory, keyed by torch's cache entry of an op and by symbolic sizes."""

    def __init__(self, plain: _Make) -> None:
        from torch._C import _DisablePythonDispatcher
        from torch._subclasses.fake_tensor import in_kernel_invocation_manager

        self._plain = plain
        self._in_kernel, self._undispatched = in_kernel_invocation_manager, _DisablePythonDispatcher
        # an object that is a key by address must stay alive, so that the address is not reused
        self._known: dict[tuple[int, ...], tuple[object, Tensor, Any]] = {}

    def method(self) -> _Make:
        """Return the replacement of the fake mode's method that builds a tensor from a cache entry."""

        def made(self_: FakeTensorMode, state: Any, entry: Any, key: Any, *rest: Any) -> Any:
            args = rest[-1]  # before torch 2.15, an argument `func` comes before `args`
            sizes = _sizes(entry, key)
            if sizes is None:
                return self._plain(self_, state, entry, key, *rest)
            viewed = None if entry.view_idx is None else args[entry.view_idx]
            nodes = [size.node for size in sizes]
            name = (id(entry), _version(state.shape_env), *map(id, nodes))
            if (known := self._known.get(name)) is not None:
                return self._copy(self_, known[1], known[2], viewed, entry.metadata.device)
            new = self._plain(self_, state, entry, key, *rest)
            with self._in_kernel(self_), self._undispatched():
                like = aten.detach.default(new)
                torch._functionalize_unsafe_set(like, torch.empty(0, dtype=like.dtype, device="meta"))
            self._known[name] = (entry, nodes), like, new.untyped_storage().nbytes()
            return new

        return made

    def _copy(
        self, mode: FakeTensorMode, like: Tensor, size: Any, viewed: Tensor | None, device: Any
    ) -> FakeTensor:
        # the Python dispatcher would run torch's decomposition of detach, the slowest part of all
        with self._in_kernel(mode), self._undispatched():
            made = aten.detach.default(like)
            if viewed is None:
                viewed = torch.empty(0, dtype=made.dtype, device="meta")
                torch.ops.inductor.resize_storage_bytes_.default(viewed, size)
            torch._functionalize_unsafe_set(made, viewed)
        return FakeTensor(mode, made, device)


def _version(env: Any) -> int:
    """Return a number that changes after a symbol was replaced by a number or another symbol."""
    if env is None:
        return 0
    version: int = getattr(env, "_replacements_version_counter", len(env.replacements))  # since 2.12
    return version


def _sizes(entry: Any, key: Any) -> list[SymInt] | None:
    """Return the symbolic sizes of a result; None if the result cannot be copied.

    A result can be copied if all symbolic sizes are sizes of operands.
    """
    known = entry.metadata
    if known is None or entry.inplace_idx is not None or known.requires_grad or known.is_conj or known.is_neg:
        return None
    found: list[SymInt] = []
    for size in (*known.shape, *known.stride, known.storage_offset):
        if type(size) is int:
            continue
        # torch makes a new object for a computed size at each op, and tracers distinguish these objects
        if type(size.value) is not int:
            return None
        found.append(key.key[size.value].value)
    return found
