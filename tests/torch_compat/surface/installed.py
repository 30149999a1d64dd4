"""What the installed torch has of all that fxdp names."""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import importlib
import inspect
import textwrap
import warnings
from collections.abc import Iterator, Mapping
from types import FunctionType, ModuleType
from typing import Any, TypeAlias

import torch

from fxdp.torch_compat.torch_names import form_of
from tests.torch_compat.surface.replaced import replaced
from tests.torch_compat.surface.sources import named

Surface: TypeAlias = dict[str, dict[str, str]]
"""Of `names` the kind and signature, of `ops` the schema, of `texts` a hash, of `settings` the default."""

_PLAIN = {"NoneType", "bool", "int", "float", "str"}


def surface() -> Surface:
    """Of the installed torch; what it has not got is not in it."""
    paths = sorted({shortened(path) for path in (*named().names, *replaced())})
    known = {path: value for path in paths if (value := _static(path)) is not None}
    return {
        "names": {path: _kind(value[0]) for path, value in known.items()},
        "ops": {op: schema for op in sorted(named().ops) if (schema := _schema(op))},
        "texts": {path: hashlib.sha256(text.encode()).hexdigest()[:10] for path, text in texts().items()},
        "settings": dict(_settings()),
    }


@functools.cache
def texts() -> Mapping[str, str]:
    """Functions for which fxdp stands in, and private ones that it calls, without their comments."""
    paths = {shortened(path) for path in (*named().names, *replaced())}
    wanted = sorted(path for path in paths if path in replaced() or not is_public(path))
    return {path: text for path in wanted if (value := _static(path)) and (text := _text(value[0]))}


def listing() -> set[str]:
    """All ops, and all public names beside those that fxdp names: what it may name tomorrow."""
    found: set[str] = set()
    for name in dir(torch.ops.aten):
        packet = getattr(torch.ops.aten, name)
        if isinstance(packet, torch._ops.OpOverloadPacket):
            found |= {f"aten.{name}", *(f"aten.{name}.{overload}" for overload in packet.overloads())}
    for owner in {path.rpartition(".")[0] for path in map(shortened, named().names)}:
        if is_public(owner) and (value := _static(owner)) is not None:
            beside = (f"{owner}.{name}" for name in dir(value[0]))
            found |= {path for path in beside if is_public(path) and not _is_module(path)}
    return found


def is_public(path: str) -> bool:
    """Whether torch promises a name: it may stand in fxdp where no release came with it or dropped it."""
    return not any(part.startswith("_") for part in path.split("."))


@functools.cache
def shortened(path: str) -> str:
    """As far as modules and classes go: of `...virtualized.V.graph` the last is no name, but a value's."""
    value: Any = torch
    parts = path.split(".")
    for index in range(1, len(parts)):
        if not isinstance(value, (ModuleType, type)):
            return ".".join(parts[:index])
        found = _static(".".join(parts[: index + 1]))
        if found is None:
            return path
        value = found[0]
    return path


@functools.cache
def _static(path: str) -> tuple[Any] | None:
    """The attribute as it stands in its owner, in a tuple, as it may be None."""
    owner, _, name = path.rpartition(".")
    if not owner:
        return (_imported(path),)
    with contextlib.suppress(ImportError):
        if (found := _static(owner)) is None:
            return None
        with contextlib.suppress(AttributeError):
            if isinstance(found[0], type):
                return (inspect.getattr_static(found[0], name),)
            return (getattr(found[0], name),)
        return (_imported(path),) if isinstance(found[0], ModuleType) else None
    return None


def _imported(module: str) -> ModuleType:
    with warnings.catch_warnings(action="ignore"):  # torch's own of its own
        return importlib.import_module(module)


def _is_module(path: str) -> bool:
    owner, _, name = path.rpartition(".")
    found = _static(owner)
    # asked of its type: what is deprecated warns when its class is asked for
    return found is not None and issubclass(type(vars(found[0]).get(name)), ModuleType)


def _kind(value: Any) -> str:
    kind = form_of(value) or type(value).__name__
    return "value" if kind in _PLAIN else kind


def _schema(op: str) -> str:
    """Of an overload its arguments and results, of a name its overloads; empty where the op is gone."""
    found: Any = torch.ops
    for part in op.split("."):
        found = getattr(found, part, None)
    if isinstance(found, torch._ops.OpOverload):
        schema = str(found._schema)
        return schema[schema.index("(") :]
    if isinstance(found, torch._ops.OpOverloadPacket):
        return " ".join(sorted(found.overloads()))
    return "" if found is None else type(found).__name__


def _settings() -> Iterator[tuple[str, str]]:
    for place in sorted(named().settings):
        module, _, name = place.partition(":")
        entries = _imported(module)._config
        if name in entries:
            yield f"{module}.{name}", repr(entries[name].default)


def _text(value: Any) -> str:
    function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
    function = inspect.unwrap(function) if callable(function) else None
    if not isinstance(function, FunctionType):
        return ""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, SyntaxError):  # made by torch at run time
        return ""
    (body,) = tree.body
    if isinstance(body, ast.FunctionDef) and ast.get_docstring(body, clean=False) is not None:
        body.body = body.body[1:] or [ast.Pass()]
    return ast.unparse(tree)
