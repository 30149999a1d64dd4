"""What a forward does with the state of its modules: buffers that it assigns or that its Python code reads.

    self.average = 0.9 * self.average + 0.1 * x.mean(0)     a registered buffer: written in place at each step
    self.last = x                                           anything else: set while tracing, then as before,
                                                            so also a buffer that is in no state dict and
                                                            gets another shape (a table for this many tokens)

    self.register_buffer("stride", torch.tensor(2))         the graph has the number 2; a call that finds
    ... pad(x, (0, int(self.stride)))                       another value in the buffer is captured anew

Only buffers that no forward writes can be such numbers, and only where a model cannot be captured otherwise.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from fxdp import torch_compat
from fxdp.capture.snapshot import ABSENT, ValueSnapshot
from fxdp.errors import CaptureError
from fxdp.ir.graphs import attribute_of
from fxdp.torch_compat import aten


@dataclass(frozen=True)
class Assigned:
    """The buffers to which a forward assigned another tensor, by their names; known at its end."""

    written: list[str] = field(default_factory=list)
    """Those that get the values in place."""
    made: list[str] = field(default_factory=list)
    """Those that are made anew at each call: a step leaves them as they are."""


@contextlib.contextmanager
def assigned_buffers(module: nn.Module) -> Iterator[Assigned]:
    """Inside, a forward is traced; at its end what it assigned to a buffer is written into that in place.

    Tracing sees writes, not assignments, which it would lose.

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
    found = Assigned()
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


def read_old_values(gm: fx.GraphModule, names: Sequence[str]) -> None:
    """Let all but the last write of these buffers work on a copy, as an assignment leaves the old tensor.

    before: `%div = div(%x, %v)`, ..., `copy_(%v, %new)`     changes what the backward of div saved
    after:  `%old = clone(%v)`, `%div = div(%x, %old)`, ..., `copy_(%v, %new)`
    """
    known = {id(gm.get_buffer(name)) for name in names}
    first: dict[int, fx.Node] = {}
    for node in gm.graph.find_nodes(op="get_attr"):
        value = attribute_of(gm, node)
        if id(value) in known:  # a shared module's buffer has several names
            node.replace_all_uses_with(first.setdefault(id(value), node))
    for node in first.values():
        _let_copy_be_read(node)
    gm.recompile()


def _let_copy_be_read(node: fx.Node) -> None:
    last = next(n for n in reversed(node.graph.nodes) if n in node.users)
    with node.graph.inserting_after(node):
        old = node.graph.call_function(aten.clone.default, (node,))
    old.meta = dict(node.meta)
    node.replace_all_uses_with(old, lambda user: user is not old and user is not last)


def one_name_each(gm: fx.GraphModule) -> None:
    """Let the graph have a shared module's buffers under their first names alone.

    Each name is an input of what is traced, and torch cannot trace writes into one of two that are the same.
    """
    names: dict[int, str] = {}
    named = list(gm.named_buffers(remove_duplicate=False))
    first = {name: names.setdefault(id(buffer), name) for name, buffer in named}
    for node in gm.graph.find_nodes(op="get_attr"):
        node.target = first.get(str(node.target), node.target)
    for name in first.keys() - names.values():
        owner, _, key = name.rpartition(".")
        del gm.get_submodule(owner)._buffers[key]


@contextlib.contextmanager
def unchanged(module: nn.Module) -> Iterator[None]:
    """After it every module has the attributes that it had, and these their contents.

    Tracing would leave tensors there that have no values.
    """
    before = [(vars(owner), keep_all(vars(owner))) for owner in module.modules()]
    try:
        yield
    finally:
        for now, was in before:
            put_all_back(now, was)


def keep_all(attributes: Mapping[str, Any]) -> dict[str, ValueSnapshot]:
    """All attributes, and what they hold."""
    return {name: ValueSnapshot(value) for name, value in attributes.items()}


def put_all_back(now: dict[str, Any], was: Mapping[str, ValueSnapshot]) -> None:
    """Make attributes again what they were."""
    for name in [n for n in now if n not in was]:
        del now[name]
    for name, kept in was.items():
        kept.put_back()
        if now.get(name, ABSENT) is not kept.value:
            now[name] = kept.value


_LARGEST = 64
"""How many elements such a buffer may have."""


class WrittenError(Exception):
    """A buffer that counted as a number is written by the forward."""


@dataclass(frozen=True, slots=True)
class Number:
    """The contents of a buffer, to be made anew as a constant."""

    values: Any
    dtype: torch.dtype
    device: torch.device


def numbers_of(module: nn.Module, read: Set[str], written: Set[str]) -> dict[str, Number]:
    """The small buffers among those that Python reads; none if the forward writes one of these."""
    found = [(name, module.get_buffer(name)) for name in sorted(read)]
    if not written.isdisjoint(read) or any(b.is_meta or b.numel() > _LARGEST for _, b in found):
        return {}
    return {name: Number(buffer.tolist(), buffer.dtype, buffer.device) for name, buffer in found}


@contextlib.contextmanager
def as_numbers(module: nn.Module, numbers: Mapping[str, Number]) -> Iterator[None]:
    """While a forward is traced, have constants in the place of these buffers: Python may read them.

    Raises
    ------
    WrittenError : the forward writes or assigns one of them.
    """
    if not numbers:
        yield
        return
    # made anew inside of the trace, for then they are constants to it, whose values Python may read; a buffer
    # is an input of the exported program
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
                    raise WrittenError(name)
        finally:
            for _, buffers, key, value, _, _ in swapped:
                buffers[key] = value
