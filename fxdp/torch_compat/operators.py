"""Of torch's ops: what they are, which there are, how they decompose."""

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

# `OpOverload` and the table have no public name, though every backend of torch asks for them
__all__ = [
    "OpOverload",
    "OpOverloadPacket",
    "all_op_names",
    "exact_torch_release",
    "functional_ops",
    "overload_of",
    "patched_kernels",
    "release_before",
    "suggest_memory_format",
    "torch_decompositions",
    "torch_release",
    "without_autograd_kernel",
]


def torch_release() -> str:
    """As `2.13`."""
    return ".".join(torch.__version__.split(".")[:2])


def release_before(*release: int) -> bool:
    """Whether this torch is older than a release, as (2, 12)."""
    return tuple(int(n) for n in torch_release().split(".")) < release


def exact_torch_release() -> str:
    """The version with its commit."""
    return f"{torch.__version__} {torch.version.git_version}"


def all_op_names() -> list[str]:
    """The qualified names of all registered ops, as `aten::add.Tensor`."""
    return list(torch._C._dispatch_get_all_op_names())


def functional_ops() -> list[str]:
    """The aten overloads that write nothing and are made of no others, as `add.Tensor`: graphs have these."""
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
    """The overload behind what `torch.library.custom_op` returns; anything else as it is."""
    return getattr(op, "_opoverload", op)


@contextlib.contextmanager
def without_autograd_kernel(op: OpOverload) -> Iterator[None]:
    """Let an op keep torch's C++ derivative instead of its Python decomposition."""
    key = torch._C.DispatchKey.Autograd
    with patched_kernels([(op, key, partial(op._op_dk, key))] if key in op.py_kernels else []):
        yield


@contextlib.contextmanager
def patched_kernels(kernels: Sequence[tuple[OpOverload, Any, Callable[..., Any]]]) -> Iterator[None]:
    """Let ops have these kernels in Python for these dispatch keys, in this thread."""
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
    """What torch runs for a key, in Python or in C++."""
    found = resolve_key(op, key)
    kernel: Callable[..., Any] | None = op.py_kernels.get(found)
    return partial(op._op_dk, found) if kernel is None else kernel


def _forget_kernels(kernels: Sequence[tuple[OpOverload, Any, Callable[..., Any]]]) -> None:
    """An op remembers which kernel it called last for a key."""
    for op, _, _ in kernels:
        op._dispatch_cache.clear()
