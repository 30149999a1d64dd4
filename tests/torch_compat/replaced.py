"""What is replaced in torch, NumPy and Python at a moment, beside an earlier one."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from operator import is_
from types import FunctionType, ModuleType
from typing import Any, TypeAlias

import torch

from fxdp.torch_compat import is_guard

Owners: TypeAlias = "dict[str, dict[Any, Any]]"
"""The attributes of modules and classes, and the entries of tables, by the owner's name."""
Change: TypeAlias = "tuple[str, str]"
"""An owner, and a name of its own."""

_ROOTS = frozenset(
    {
        "torch", "numpy", "builtins", "random", "os", "sys", "threading", "logging", "warnings", "inspect",
        "functools", "contextlib", "copy", "operator", "secrets", "signal", "uuid",
    }
)  # fmt: skip
_PROGRAMS = "torch._inductor.runtime.compile_tasks."
"""Modules that Inductor writes."""
_HOOKS = ("_hooks[]",)
"""Registries of torch's public hooks, which grow and replace nothing."""
_ABSENT = object()


def owners() -> Owners:
    """All modules and classes of torch, NumPy and Python's own that are imported, with what they have."""
    found: Owners = {}
    tables: set[int] = set()
    for name, module in list(sys.modules.items()):
        if not isinstance(module, ModuleType) or not _is_torchs(name) or name.startswith(_PROGRAMS):
            continue
        found[name] = dict(vars(module))
        for key, value in found[name].items():
            if issubclass(type(value), type) and _is_torchs(str(value.__module__)):
                found.setdefault(f"{value.__module__}.{value.__qualname__}", dict(vars(value)))
            elif type(value) is dict and id(value) not in tables and key not in ("__builtins__", "modules"):
                tables.add(id(value))  # once, under the name in the module that was imported first
                found[f"{name}.{key}[]"] = dict(value)
    for packet in list(vars(torch.ops.aten).values()):
        for op in list(vars(packet).values()) if isinstance(packet, torch._ops.OpOverloadPacket) else ():
            if isinstance(op, torch._ops.OpOverload):
                found[f"{op}.py_kernels[]"] = dict(op.py_kernels)
    return found


def _is_torchs(module: str) -> bool:
    return module.partition(".")[0] in _ROOTS


def replaced(before: Owners, now: Owners) -> dict[Change, Any]:
    """What stands now in the place of a function, a class or a number; what is of fxdp, wherever it is."""
    return {
        (owner, str(name)): new
        for owner, name, old, new in _changes(before, now)
        if is_guard(new) or _is_ours(new) or _is_entry(owner, name) or _counts(owner, old)
    }


def _changes(before: Owners, now: Owners) -> Iterator[tuple[str, Any, Any, Any]]:
    for owner, names in now.items():
        if (was := before.get(owner)) is None or owner.endswith(_HOOKS):
            continue
        if len(was) == len(names) and all(map(is_, was.values(), names.values())):
            continue  # as nearly all: to hash the names takes longer
        for name in was.keys() | names.keys():
            old, new = was.get(name, _ABSENT), names.get(name, _ABSENT)
            if old is not new:
                yield owner, name, old, new


def _is_entry(owner: str, name: Any) -> bool:
    """Whether a table of torch's has a name of fxdp's."""
    return owner.startswith("torch") and str(name).startswith("fxdp")


def _counts(owner: str, old: Any) -> bool:
    """Whether it is no cache or counter that was there: functions and classes, and numbers of modules."""
    if callable(old) or isinstance(old, (property, staticmethod, classmethod)):
        return True
    return owner in sys.modules and isinstance(old, (bool, int, float)) and not isinstance(old, type)


def _is_ours(value: Any) -> bool:
    """Whether a function, a class or an object was made by fxdp or by `unittest.mock`."""
    if isinstance(value, property):
        return _is_ours(value.fget) or _is_ours(value.fset)
    if isinstance(value, partial):
        return _is_ours(value.func)
    if isinstance(value, FunctionType):
        return "/fxdp/" in value.__code__.co_filename and "/tests/" not in value.__code__.co_filename
    kind = value if isinstance(value, type) else type(value)
    return str(kind.__module__).startswith(("fxdp", "unittest.mock"))
