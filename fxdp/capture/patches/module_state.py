"""State of modules in a forward: buffers that are assigned, and buffers that Python code reads.

    self.average = 0.9 * self.average + 0.1 * x.mean(0)     a registered buffer: written in place at each step
    self.last = x                                           any other attribute: set while tracing, then
                                                            restored; also a non-persistent buffer that
                                                            gets another shape (a table for this many tokens)

    self.register_buffer("stride", torch.tensor(2))         the graph has the number 2; a call with another
    ... pad(x, (0, int(self.stride)))                       value in the buffer is captured anew

A buffer is only treated as a number if no forward writes the buffer, and if capture fails otherwise.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from fxdp import torch_compat
from fxdp.capture.snapshot import ABSENT, ValueSnapshot
from fxdp.errors import CaptureError


@dataclass(frozen=True)
class _AssignedBuffers:
    """Names of the buffers to which a forward assigned a new tensor; complete after the forward."""

    written: list[str] = field(default_factory=list)
    """Names of buffers to which the new values are written in place."""
    made: list[str] = field(default_factory=list)
    """Names of buffers that each call makes anew: a step leaves these unchanged."""


@contextlib.contextmanager
def assigned_buffers(module: nn.Module) -> Iterator[_AssignedBuffers]:
    """Trace a forward inside the block; at the end, write assigned values into the buffers in place.

    Tracing records writes, but would lose assignments.

    Raises
    ------
    CaptureError : a buffer of the state dict is assigned a value of another shape or dtype, or None.
    """
    before = [
        (f"{path}.{name}".lstrip("."), owner, name, value)
        for path, owner in module.named_modules()
        for name, value in owner._buffers.items()
        if value is not None
    ]
    found = _AssignedBuffers()
    yield found
    for path, owner, name, value in before:
        assigned = owner._buffers.get(name)
        if assigned is value:
            continue
        if assigned is None or (assigned.shape, assigned.dtype) != (value.shape, value.dtype):
            if assigned is not None and name in owner._non_persistent_buffers_set:
                owner._buffers[name] = value
                found.made.append(path)
                continue
            got = "set to None" if assigned is None else f"assigned {assigned.dtype}{list(assigned.shape)}"
            raise CaptureError(
                f"the forward changes shape or dtype of buffer {path}, {value.dtype}{list(value.shape)}: it "
                f"is {got}. Keep both, so that it can be written in place; or call the model once before it "
                "is compiled, if it is the first call that makes the buffer"
            )
        owner._buffers[name] = value
        value.copy_(assigned.detach())
        found.written.append(path)


@contextlib.contextmanager
def unchanged(module: nn.Module) -> Iterator[None]:
    """Restore all attributes of all modules after the block, including the contents of containers.

    Tracing would leave tensors without values in attributes.
    """
    before = [(vars(owner), keep_all(vars(owner))) for owner in module.modules()]
    try:
        yield
    finally:
        for now, was in before:
            _put_all_back(now, was)


def keep_all(attributes: Mapping[str, Any]) -> dict[str, ValueSnapshot]:
    """Return snapshots of all attributes and of their contents."""
    return {name: ValueSnapshot(value) for name, value in attributes.items()}


def _put_all_back(now: dict[str, Any], was: Mapping[str, ValueSnapshot]) -> None:
    """Restore attributes from snapshots."""
    for name in [n for n in now if n not in was]:
        del now[name]
    for name, kept in was.items():
        kept.put_back()
        if now.get(name, ABSENT) is not kept.value:
            now[name] = kept.value


_LARGEST = 64
"""Largest number of elements of a buffer that is treated as a number."""


class _WrittenError(Exception):
    """The forward writes a buffer that was treated as a number."""


@dataclass(frozen=True, slots=True)
class Number:
    """The contents of a buffer, from which a constant is created."""

    values: Any
    dtype: torch.dtype
    device: torch.device


def numbers_of(module: nn.Module, read: Set[str], written: Set[str]) -> dict[str, Number]:
    """Return the contents of the buffers that Python reads, if all are small.

    Empty if the forward writes one of these buffers, or if a buffer is too large.
    """
    found = [(name, module.get_buffer(name)) for name in sorted(read)]
    if not written.isdisjoint(read) or any(b.is_meta or b.numel() > _LARGEST for _, b in found):
        return {}
    return {name: Number(buffer.tolist(), buffer.dtype, buffer.device) for name, buffer in found}


@contextlib.contextmanager
def as_numbers(module: nn.Module, numbers: Mapping[str, Number]) -> Iterator[None]:
    """Replace buffers by constants, which Python may read, while a forward is traced inside the block.

    Raises
    ------
    WrittenError : the forward writes or assigns one of the buffers.
    """
    if not numbers:
        yield
        return
    # created inside of the trace, because then the trace treats them as constants, whose values Python may
    # read; a buffer is an input of the exported program
    swapped = []
    with torch_compat.larger_constants(_LARGEST):
        for name, number in numbers.items():
            path, _, key = name.rpartition(".")
            buffers = module.get_submodule(path)._buffers
            made = torch.tensor(number.values, dtype=number.dtype, device=number.device)
            swapped.append((name, buffers, key, buffers[key], made, made._version))
            buffers[key] = made
        try:
            yield
            for name, buffers, key, _, made, version in swapped:
                if buffers[key] is not made or made._version != version:
                    raise _WrittenError(name)
        finally:
            for _, buffers, key, value, _, _ in swapped:
                buffers[key] = value
