"""The one way in which fxdp changes Python: names that mean something else to one thread, which captures.

    patched((Patch(torch, "rand", make), Patch(Tensor, "data", make)))

                    the thread inside           any other thread, and all of them afterwards
    torch.rand      make(torch.rand)            a function that calls torch's own
    Tensor.data     make(Tensor.data)           torch's own, the very object

A process has one `torch` and one `random`, whichever thread reads them. So what is installed is a guard,
which asks at each use who is there; a data loader or another model that trains meanwhile never notices.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import inspect
import operator
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType, FunctionType, ModuleType
from typing import Any

from torch._dynamo.convert_frame import compile_lock

__all__ = ["Here", "Patch", "around", "calling_frame", "is_guard", "patched"]

_INLINE = "_torchdynamo_inline"
"""The attribute of a function that names the function which Dynamo traces instead."""


@dataclass(frozen=True, slots=True, eq=False)
class Patch:
    """One name, and what takes its place: made of what `getattr(owner, name)` gives."""

    owner: type | ModuleType | dict[Any, Any] | tuple[dict[Any, Any], ...]
    """A class, a module, a dict, or several dicts in which the name means the same."""
    name: Any
    """A key, where the owner is a table of torch's."""
    make: Callable[[Any], Any]
    missing: Any = None
    """The value for all other threads where a table has no such key; `make` gets it, too."""


@contextlib.contextmanager
def patched(patches: Iterable[Patch]) -> Iterator[Here]:
    """Install them for this thread, in patches of before if there are any; put back what was there."""
    here = Here()
    # Two threads that patch must not interleave: who leaves first would put back what the other one found.
    # Torch's own lock, which it holds while it compiles, lets the same thread in again.
    with compile_lock, contextlib.ExitStack() as stack:
        here.inside = True
        # What is still held of ours later (`from random import random` in a module that was imported
        # meanwhile, a bound method in an attribute) is the original again, in this thread, too.
        stack.callback(setattr, here, "inside", False)
        for patch in patches:
            stack.callback(_installed(patch, here))
        yield here


def around(replacement: Callable[..., Any]) -> Callable[[Any], Any]:
    """As `Patch.make`: a call becomes one of `replacement(plain, ...)`, `plain` being what was there."""

    def make(plain: Callable[..., Any]) -> Callable[..., Any]:
        # a function and no `partial`, which would not bind `self` in a class; `calling_frame` passes it over
        @functools.wraps(plain)
        def call(*args: Any, **kwargs: Any) -> Any:
            return replacement(plain, *args, **kwargs)

        return call

    return make


def calling_frame() -> FrameType:
    """Asked by a replacement: the frame that called it, on the other side of its guard if there is one."""
    frame = sys._getframe(2)
    while frame.f_globals is globals():
        assert frame.f_back is not None
        frame = frame.f_back
    return frame


def is_guard(value: Any) -> bool:
    """Whether an attribute, as `vars()` has it, was installed by `patched`."""
    if isinstance(value, FunctionType):
        return value.__code__.co_filename == __file__ and value.__code__.co_name == "guard"
    return isinstance(value, (_Method, _Value))


class Here(threading.local):
    """Whether a thread is the one for which patches are installed.

    Not its number: the child of a fork (a data loader's worker) may give that to a thread of its own.
    """

    inside = False


class _Method:
    """Stands in a class; gives methods, class methods and static methods as they are to who asks.

    A function that chose would stand between caller and replacement, and be no longer the object by which
    torch's tables know `Tensor.item`.
    """

    def __init__(self, here: Here, new: Any, old: Any) -> None:
        self._here, self._new, self._old = here, new, old

    def _chosen(self) -> Any:
        return self._new if self._here.inside else self._old

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self._chosen().__get__(instance, owner)


class _Property(_Method):
    """The same for what can be assigned; a method with `__set__` could not be hidden by an instance's own."""

    def __set__(self, instance: Any, value: Any) -> None:
        self._chosen().__set__(instance, value)

    def __delete__(self, instance: Any) -> None:
        self._chosen().__delete__(instance)


class _Value:
    """Stands in a module for a class, a number or an object: for all that is more than a function."""

    def __init__(self, here: Here, new: Any, old: Any) -> None:
        self._here, self._new, self._old = here, new, old

    def _chosen(self) -> Any:
        return self._new if self._here.inside else self._old

    def __getattr__(self, name: str) -> Any:
        return getattr(self._chosen(), name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._chosen()(*args, **kwargs)

    def __instancecheck__(self, instance: Any) -> bool:
        return isinstance(instance, self._chosen())

    def __subclasscheck__(self, subclass: type) -> bool:
        return issubclass(subclass, self._chosen())

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        return (self._chosen(),)

    def __bool__(self) -> bool:
        return bool(self._chosen())

    def __index__(self) -> int:
        return operator.index(self._chosen())

    def __hash__(self) -> int:
        return hash(self._chosen())

    def __eq__(self, other: object) -> bool:
        return bool(self._chosen() == other)

    def __lt__(self, other: Any) -> Any:
        return self._chosen() < other

    def __le__(self, other: Any) -> Any:
        return self._chosen() <= other

    def __gt__(self, other: Any) -> Any:
        return self._chosen() > other

    def __ge__(self, other: Any) -> Any:
        return self._chosen() >= other


def _installed(patch: Patch, here: Here) -> Callable[[], None]:
    """Install a guard; gives what takes it away."""
    if isinstance(patch.owner, type):
        return _in_class(patch.owner, patch.name, patch.make, here)
    owners = patch.owner if isinstance(patch.owner, tuple) else (patch.owner,)
    several = [names if isinstance(names, dict) else vars(names) for names in owners]
    return _in_globals(several, patch, here)


def _in_class(owner: type, name: str, make: Callable[[Any], Any], here: Here) -> Callable[[], None]:
    inherited = name not in vars(owner)
    old = inspect.getattr_static(owner, name)  # the descriptor itself, from whichever base
    kind = _Property if hasattr(old, "__set__") else _Method
    guard = kind(here, make(getattr(owner, name)), old)
    setattr(owner, name, guard)

    def restore() -> None:
        if vars(owner).get(name) is not guard:
            return  # somebody else has replaced it since, who is not to lose that
        if inherited:
            delattr(owner, name)
        else:
            setattr(owner, name, old)

    return restore


def _in_globals(several: Sequence[dict[Any, Any]], patch: Patch, here: Here) -> Callable[[], None]:
    """In modules, whose own code finds it there, too; a builtin that they do not have is shadowed."""
    name = patch.name
    inherited = all(name not in names for names in several)
    if inherited:
        old = getattr(builtins, name) if patch.missing is None else patch.missing
    else:
        old = several[0][name]
    new = patch.make(old)
    if not callable(new) or isinstance(old, type):
        return _in_place(several, name, inherited, old, _Value(here, new, old))

    # one for all: a process has thousands of modules, and this is done for each capture
    @functools.wraps(old)
    def guard(*args: Any, **kwargs: Any) -> Any:
        return (new if here.inside else old)(*args, **kwargs)

    # Dynamo, which torch runs inside of a capture for `torch.cond`, cannot trace whose thread it is. It holds
    # the lock that this thread has: so it is this thread, and traces what it would call.
    if isinstance(new, FunctionType):
        setattr(guard, _INLINE, new)
    remove = _in_place(several, name, inherited, old, guard)

    def restore() -> None:
        remove()
        vars(guard).pop(_INLINE, None)
        if isinstance(old, FunctionType):  # who still holds the guard has the original, traced or called
            setattr(guard, _INLINE, old)

    return restore


def _in_place(
    several: Sequence[dict[Any, Any]], name: Any, inherited: bool, old: Any, guard: Any
) -> Callable[[], None]:
    for names in several:
        names[name] = guard

    def restore() -> None:
        for names in several:
            if names.get(name) is not guard:
                continue
            if inherited:
                del names[name]
            else:
                names[name] = old

    return restore
