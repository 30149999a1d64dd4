"""Of torch's fake tensors: one whose sizes and strides were made before is copied, with memory of its own.

Torch remembers what a fake op gives, and makes the tensor of it anew each time: for each symbolic size it
asks a dozen questions, whether it is zero, negative, how many bytes there are. The answers are those of the
last tensor with the same symbols at the same places.

    %a: f32[s0, 64] = relu(%x)      made by torch, and kept without its memory
    %b: f32[s0, 64] = relu(%y)      a copy of that, on memory of as many bytes; a view lies in what it views
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
    """Inside, fake tensors are copied."""
    with patched((Patch(FakeTensorMode, _NAME, lambda plain: _Copies(plain).method()),)):
        yield


class _Copies:
    """Tensors without a memory of their own, by what torch remembers of an op and the symbols in it."""

    def __init__(self, plain: _Make) -> None:
        from torch._C import _DisablePythonDispatcher
        from torch._subclasses.fake_tensor import in_kernel_invocation_manager

        self._plain = plain
        self._in_kernel, self._undispatched = in_kernel_invocation_manager, _DisablePythonDispatcher
        # what is a key by its address stays, that no other takes the address
        self._known: dict[tuple[int, ...], tuple[object, Tensor, Any]] = {}

    def method(self) -> _Make:
        """The method of a fake mode that makes a tensor of what is remembered."""

        def made(self_: FakeTensorMode, state: Any, entry: Any, key: Any, *rest: Any) -> Any:
            args = rest[-1]  # before torch 2.15 the op comes before them
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
        # the dispatcher in Python would have torch's decomposition of a detach, the longest part of all
        with self._in_kernel(mode), self._undispatched():
            made = aten.detach.default(like)
            if viewed is None:
                viewed = torch.empty(0, dtype=made.dtype, device="meta")
                torch.ops.inductor.resize_storage_bytes_.default(viewed, size)
            torch._functionalize_unsafe_set(made, viewed)
        return FakeTensor(mode, made, device)


def _version(env: Any) -> int:
    """Another one after a symbol became a number, or another symbol."""
    if env is None:
        return 0
    version: int = getattr(env, "_replacements_version_counter", len(env.replacements))  # 2.11 counts none
    return version


def _sizes(entry: Any, key: Any) -> list[SymInt] | None:
    """The symbolic sizes of a result that can be copied: all are its operands' own."""
    known = entry.metadata
    if known is None or entry.inplace_idx is not None or known.requires_grad or known.is_conj or known.is_neg:
        return None
    found: list[SymInt] = []
    for size in (*known.shape, *known.stride, known.storage_offset):
        if type(size) is int:
            continue
        # one that torch computes is a new object at each op, which tracers tell apart
        if type(size.value) is not int:
            return None
        found.append(key.key[size.value].value)
    return found
