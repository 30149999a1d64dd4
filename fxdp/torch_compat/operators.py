"""Torch's ops: registered names, kernels, decompositions, and the release of torch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch._decomp import decomposition_table as torch_decompositions
from torch._ops import OpOverload, OpOverloadPacket, resolve_key
from torch._prims_common import suggest_memory_format

from fxdp.torch_compat.patch import Patch, patched
from fxdp.torch_compat.torch_ops import aten

# `OpOverload` and the decomposition table have no public name, though every backend of torch needs both
__all__ = [
    "OpOverload", "OpOverloadPacket", "all_op_names", "exact_torch_release", "functional_ops", "overload_of",
    "patched_kernels", "release_before", "suggest_memory_format", "torch_decompositions", "torch_release",
    "without_autograd_kernel",
]  # fmt: skip


def torch_release() -> str:
    """Return the release, as `2.13`."""
    return ".".join(torch.__version__.split(".")[:2])


def release_before(*release: int) -> bool:
    """Return whether this torch is older than a release given as numbers, such as `2, 12`."""
    return tuple(int(n) for n in torch_release().split(".")) < release


def exact_torch_release() -> str:
    """Return the version with the git commit."""
    return f"{torch.__version__} {torch.version.git_version}"


def all_op_names() -> list[str]:
    """Return the qualified names of all registered ops, as `aten::add.Tensor`."""
    return list(torch._C._dispatch_get_all_op_names())


def functional_ops() -> list[str]:
    """Return the aten overloads that can be in graphs, neither mutating nor composite, as `add.Tensor`."""
    found = []
    for qualified in all_op_names():
        space, _, name = qualified.partition("::")
        base, _, overload = name.partition(".")
        op = getattr(getattr(aten, base), overload or "default") if space == "aten" else None
        if isinstance(op, OpOverload) and not op._schema.is_mutable and not _is_composite(qualified):
            found.append(name)
    return sorted(found)


def _is_composite(qualified: str) -> bool:
    found: bool = torch._C._dispatch_has_kernel_for_dispatch_key(qualified, "CompositeImplicitAutograd")
    return found


def overload_of(op: Any) -> Any:
    """Return the overload behind an op made by `torch.library.custom_op`; return all else unchanged."""
    return getattr(op, "_opoverload", op)


@contextlib.contextmanager
def without_autograd_kernel(op: OpOverload) -> Iterator[None]:
    """Make an op use torch's C++ derivative inside the block, instead of a Python decomposition."""
    key = torch._C.DispatchKey.Autograd
    with patched_kernels([(op, key, partial(op._op_dk, key))] if key in op.py_kernels else []):
        yield


@contextlib.contextmanager
def patched_kernels(kernels: Sequence[tuple[OpOverload, Any, Callable[..., Any]]]) -> Iterator[None]:
    """Install Python kernels for dispatch keys of ops inside the block, in this thread."""
    patches = (Patch(op.py_kernels, key, _instead(new), _kernel_of(op, key)) for op, key, new in kernels)
    try:
        with patched(patches):
            _forget_kernels(kernels)
            yield
    finally:
        _forget_kernels(kernels)


def _instead(kernel: Callable[..., Any]) -> Callable[[Any], Any]:
    return lambda _: kernel


def _kernel_of(op: OpOverload, key: Any) -> Callable[..., Any]:
    """Return the kernel, in Python or in C++, that torch runs for a dispatch key."""
    found = resolve_key(op, key)
    kernel: Callable[..., Any] | None = op.py_kernels.get(found)
    return partial(op._op_dk, found) if kernel is None else kernel


def _forget_kernels(kernels: Sequence[tuple[OpOverload, Any, Callable[..., Any]]]) -> None:
    """Clear the ops' caches of the last kernel per dispatch key."""
    for op, _, _ in kernels:
        op._dispatch_cache.clear()
