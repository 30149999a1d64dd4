"""Names inside of torch as data: the owner of each name, and the signatures that fxdp knows.

    TorchName("torch.utils._pytree", "tree_flatten", ("(tree, is_leaf=None)",))
    TorchName("torch.fx:GraphModule", "recompile", ("(self)",))

`form()` alone imports the owner: a name that a release has dropped gives an answer, not an import error.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
from dataclasses import dataclass
from inspect import Parameter, Signature
from typing import Any

__all__ = ["TorchName", "form_of"]

_CONSTANTS = (type(None), bool, int, float, str)


@dataclass(frozen=True)
class TorchName:
    """An attribute of a module or class of torch."""

    owner: str
    """The owner as `module` or `module:Class`."""
    name: str
    known: tuple[str, ...]
    """The forms (see `form_of`) with which the tests passed."""
    earlier: str = ""
    """The `owner` in older releases; empty if the name has not moved."""

    @property
    def path(self) -> str:
        """The name for users: `torch.fx.GraphModule.recompile`."""
        return f"{self.owner.replace(':', '.')}.{self.name}"

    def form(self) -> str | None:
        """Return the form in the installed torch; None if the attribute or the owner is gone."""
        for place in filter(None, (self.owner, self.earlier)):
            module, _, inner = place.partition(":")
            with contextlib.suppress(ImportError, AttributeError):
                owner = importlib.import_module(module)
                return form_of(_attribute(getattr(owner, inner) if inner else owner, self.name))
        return None

    def misfit(self) -> str | None:
        """Return how the installed torch differs from all known forms; None if one of the forms matches."""
        found = self.form()
        if found is None:
            return f"{self.path} is gone"
        return None if found in self.known else f"{self.path} is {found} here, not {' or '.join(self.known)}"


def form_of(value: Any) -> str:
    """Return the kind and signature of an attribute found by `inspect.getattr_static`, without annotations.

    `(self, other)` for a function, `property`, `class(tb, skip=0)`, `staticmethod (cls, elem)`, `dict`.
    """
    if isinstance(value, (staticmethod, classmethod)):
        return f"{type(value).__name__} {form_of(value.__func__)}"
    kind = "class" if isinstance(value, type) else type(value).__name__
    kind = "" if inspect.isfunction(value) else kind
    if not callable(value):
        return kind
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):  # implemented in C++
        return kind
    plain = [_plain(parameter) for parameter in signature.parameters.values()]
    return kind + str(signature.replace(parameters=plain, return_annotation=Signature.empty))


def _plain(parameter: Parameter) -> Parameter:
    default = parameter.default
    if default is not Parameter.empty and not isinstance(default, _CONSTANTS):
        default = ...  # its text may be an address
    return parameter.replace(annotation=Parameter.empty, default=default)


def _attribute(owner: Any, name: str) -> Any:
    try:
        return inspect.getattr_static(owner, name)
    except AttributeError:  # a module of settings, which answers by `__getattr__`
        return getattr(owner, name)
