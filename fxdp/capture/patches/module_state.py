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
import sys
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from fxdp import torch_compat
from fxdp.errors import CaptureError
from fxdp.ir.graphs import attribute_of

_CONTAINERS = (dict, OrderedDict, list, set, deque)  # hooks are in ordered ones
"""The registries of parameters, buffers and modules are of these, too."""


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
        old = node.graph.call_function(torch.ops.aten.clone.default, (node,))
    old.meta = dict(node.meta)
    node.replace_all_uses_with(old, lambda user: user is not old and user is not last)


@contextlib.contextmanager
def unchanged(module: nn.Module) -> Iterator[None]:
    """After it every module has the attributes that it had, and these their contents.

    Tracing would leave tensors there that have no values.
    """
    with _as_before(module.modules()), unchanged_objects(module):
        yield


@contextlib.contextmanager
def unchanged_objects(module: nn.Module) -> Iterator[None]:
    """As `unchanged`, for what modules hold that is no module: `torch.export` restores modules alone.

    self.rope = Rope()      a table that this makes at its first call must not be that of an earlier trace
    """
    with _as_before([value for _, value in held_objects(module)]):
        yield


def held_objects(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Objects of the user's classes in attributes of modules, or in lists and dicts there; each once."""
    seen: set[int] = set()
    for path, owner in module.named_modules():
        for name, value in vars(owner).items():
            if type(value) in _ATOMS or (type(value) in _CONTAINERS and not value):
                continue  # as most are: a module has a dozen dicts for hooks
            for keys, held in _members(value):
                if _is_plain(held) and id(held) not in seen:
                    seen.add(id(held))
                    yield ".".join(filter(None, (path, name))) + "".join(f"[{k!r}]" for k in keys), held


_ATOMS = frozenset({bool, int, float, str, type(None)})


def _members(value: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """What is in a value by its key if it is a container, else the value."""
    if isinstance(value, Mapping):
        yield from (((key,), held) for key, held in value.items())
    elif isinstance(value, (list, tuple, deque)):
        yield from (((index,), held) for index, held in enumerate(value))
    else:
        yield (), value


_FOREIGN = sys.stdlib_module_names | {"torch"}


def _is_plain(value: Any) -> bool:
    """Whether it is an object of a user's class, with attributes."""
    return (
        not isinstance(value, (nn.Module, torch.Tensor, type))
        and type(value).__module__.partition(".")[0] not in _FOREIGN
        and isinstance(getattr(value, "__dict__", None), dict)
    )


@contextlib.contextmanager
def _as_before(owners: Iterable[Any]) -> Iterator[None]:
    before = [(vars(owner), _snapshot(vars(owner))) for owner in owners]
    try:
        yield
    finally:
        for now, was in before:
            _restore(now, was)


def _snapshot(attributes: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Each attribute, and a copy of what it holds if it is a container."""
    return {name: (v, type(v)(v) if type(v) in _CONTAINERS else None) for name, v in attributes.items()}


def _restore(now: dict[str, Any], was: dict[str, tuple[Any, Any]]) -> None:
    for name in [n for n in now if n not in was]:
        del now[name]
    for name, (value, content) in was.items():
        if now.get(name) is not value:
            now[name] = value
        if content is not None:
            value.clear()
            value.extend(content) if isinstance(value, (list, deque)) else value.update(content)


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
