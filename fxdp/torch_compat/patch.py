"""Replace attributes of torch, Python or a module for one thread only: the thread that captures.

    patched((Patch(torch, "rand", make), Patch(Tensor, "data", make)))

                    the thread inside           any other thread, and all threads afterwards
    torch.rand      make(torch.rand)            a function that calls torch's own
    Tensor.data     make(Tensor.data)           torch's own, the very object

All threads of a process read the same `torch` and `random`. So `patched` installs a guard, which checks at
each use whether the calling thread is the one that captures. A data loader or a model that trains in a
different thread keeps the original behavior.
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
from typing import Any, TypeAlias

from torch._dynamo.convert_frame import compile_lock

__all__ = ["Here", "Patch", "around", "calling_frame", "is_guard", "patched", "patched_everywhere"]

_INLINE = "_torchdynamo_inline"
"""The attribute of a function that names the function which Dynamo traces instead."""


@dataclass(frozen=True, slots=True, eq=False)
class Patch:
    """A name and the replacement for the value behind this name."""

    owner: type | ModuleType | dict[Any, Any] | tuple[dict[Any, Any], ...]
    """A class, a module, a dict, or a tuple of dicts that all bind the name to the same value."""
    name: Any
    """The attribute's name, or the key if the owner is one of torch's tables."""
    make: Callable[[Any], Any]
    missing: Any = None
    """The value for all other threads if a table lacks the key; also the argument of `make` in that case."""


@contextlib.contextmanager
def patched(patches: Iterable[Patch]) -> Iterator[Here]:
    """Install patches for the calling thread, and restore the former values at the end; may be nested."""
    here = Here()
    # Two threads must not patch at the same time: the last to leave would restore the guard of the first.
    # Torch's own lock, held while torch compiles, is reentrant.
    with compile_lock, contextlib.ExitStack() as stack:
        here.inside = True
        # A replacement may outlive the block (`from random import random` in a module imported inside, a
        # bound method in an attribute); from then on it acts as the original, in this thread too.
        stack.callback(setattr, here, "inside", False)
        for patch in patches:
            stack.callback(_installed(patch, here))
        yield here


@contextlib.contextmanager
def patched_everywhere(patches: Iterable[Patch]) -> Iterator[None]:
    """Install patches for all threads, and restore the former values at the end.

    Only for a process whose one purpose is the enclosed block, as that of a script by `fxdp run`.
    """
    here = _Everywhere()
    with contextlib.ExitStack() as stack:
        stack.callback(setattr, here, "inside", False)
        for patch in patches:
            stack.callback(_installed(patch, here))
        yield


def around(replacement: Callable[..., Any]) -> Callable[[Any], Any]:
    """Return a function for `Patch.make` that turns each call into `replacement(plain, ...)`.

    `plain` is the value that is replaced.
    """

    def make(plain: Callable[..., Any]) -> Callable[..., Any]:
        # a function, because a `partial` would not bind `self` in a class; `calling_frame` skips this frame
        @functools.wraps(plain)
        def call(*args: Any, **kwargs: Any) -> Any:
            return replacement(plain, *args, **kwargs)

        return call

    return make


def calling_frame() -> FrameType:
    """Return the frame that called a replacement, without the guard's frames; for use in a replacement."""
    frame = sys._getframe(2)
    while frame.f_globals is globals():
        assert frame.f_back is not None
        frame = frame.f_back
    return frame


def is_guard(value: Any) -> bool:
    """Return whether a value, as found in `vars()` of an owner, is a guard installed by `patched`."""
    if isinstance(value, FunctionType):
        return value.__code__.co_filename == __file__ and value.__code__.co_name == "guard"
    return isinstance(value, _Guard)


class Here(threading.local):
    """Flag of a thread: true in the thread for which patches are installed.

    A thread-local, because a thread's number is not unique: a forked child (a data loader's worker) may reuse
    the number for a new thread.
    """

    inside = False


class _Everywhere:
    """Flag of all threads."""

    inside = True


class _Guard:
    """An attribute's new and old value; which of both is there depends on the thread."""

    def __init__(self, here: _Here, new: Any, old: Any) -> None:
        self._here, self._new, self._old = here, new, old

    def _chosen(self) -> Any:
        return self._new if self._here.inside else self._old


class _Method(_Guard):
    """Guard in a class that returns methods, class methods and static methods unchanged, without a wrapper.

    A function that dispatches would stand between caller and replacement, and would not be the object by
    which torch's tables know `Tensor.item`.
    """

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self._chosen().__get__(instance, owner)


class _Property(_Method):
    """Guard for an attribute that can be assigned.

    Separate from `_Method`, because an instance attribute could not hide a method with `__set__`.
    """

    def __set__(self, instance: Any, value: Any) -> None:
        self._chosen().__set__(instance, value)

    def __delete__(self, instance: Any) -> None:
        self._chosen().__delete__(instance)


class _Value(_Guard):
    """Guard in a module for a class, a number or an object: for any value that is more than a function."""

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


def _in_both_orders(of_two: Callable[[Any, Any], Any]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    return (
        lambda guard, other: of_two(guard._chosen(), other),
        lambda guard, other: of_two(other, guard._chosen()),
    )


for _name in ("lt", "le", "gt", "ge"):
    setattr(_Value, f"__{_name}__", _in_both_orders(getattr(operator, _name))[0])
for _name in ("and", "or", "xor"):  # `tracing |= torch.compiler.is_compiling()`
    for _prefix, _method in zip(("", "r"), _in_both_orders(getattr(operator, f"__{_name}__")), strict=True):
        setattr(_Value, f"__{_prefix}{_name}__", _method)


_Here: TypeAlias = Here | _Everywhere


def _installed(patch: Patch, here: _Here) -> Callable[[], None]:
    """Install a guard, and return the function that removes the guard."""
    if isinstance(patch.owner, type):
        return _in_class(patch.owner, patch.name, patch.make, here)
    owners = patch.owner if isinstance(patch.owner, tuple) else (patch.owner,)
    several = [names if isinstance(names, dict) else vars(names) for names in owners]
    return _in_globals(several, patch, here)


def _in_class(owner: type, name: str, make: Callable[[Any], Any], here: _Here) -> Callable[[], None]:
    inherited = name not in vars(owner)
    old = inspect.getattr_static(owner, name)  # the descriptor itself, from whichever base class has it
    kind = _Property if hasattr(old, "__set__") else _Method
    new = make(getattr(owner, name))
    guard = kind(here, new, old)
    setattr(owner, name, guard)

    def restore() -> None:
        now = vars(owner).get(name)
        if now is not guard and now is not new:  # torch.fx puts back what it has read: the replacement itself
            return  # replaced again in the meantime, which must stay
        if inherited:
            delattr(owner, name)
        else:
            setattr(owner, name, old)

    return restore


def _in_globals(several: Sequence[dict[Any, Any]], patch: Patch, here: _Here) -> Callable[[], None]:
    """Install a guard in module globals or tables, where the modules' own code finds the guard, too.

    A builtin that the modules do not define is shadowed.
    """
    name = patch.name
    inherited = all(name not in names for names in several)
    if inherited:
        old = getattr(builtins, name) if patch.missing is None else patch.missing
    else:
        old = several[0][name]
    new = patch.make(old)
    if not callable(new) or isinstance(old, type):
        return _in_place(several, name, inherited, old, _Value(here, new, old))

    # one guard for all modules: a process has thousands, and each capture patches them
    @functools.wraps(old)
    def guard(*args: Any, **kwargs: Any) -> Any:
        return (new if here.inside else old)(*args, **kwargs)

    # Dynamo, which torch runs inside of a capture for `torch.cond`, cannot trace a thread-local read. Dynamo
    # holds the lock that this thread has, so the tracing thread is this one: trace the replacement itself.
    if isinstance(new, FunctionType):
        setattr(guard, _INLINE, new)
    remove = _in_place(several, name, inherited, old, guard)

    def restore() -> None:
        remove()
        vars(guard).pop(_INLINE, None)
        if isinstance(old, FunctionType):  # a guard still in use acts as the original, traced or called
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
