"""Collect the skip declarations of a model in execution order, and check that stashes and pops match.

nn.Sequential        the children run one after another
any other module     the skippables inside may run in any order: they form one group
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from fxdp.skip.base import Skippable
from fxdp.skip.namespace import Namespace


@dataclass(frozen=True)
class Declaration:
    """A skippable module and its name in the model."""

    path: str
    skippable: Skippable


@dataclass(frozen=True)
class _DeclarationFault:
    """A fault in the declaration of one name."""

    name: str
    text: str


def skippables_in_order(module: nn.Module, *, repeated: bool = False) -> Iterator[list[Declaration]]:
    """Yield groups of skippables; each group runs after the previous group.

    `repeated`: list a module of an `nn.Sequential` as often as the module runs there, not once.
    """
    seen: set[int] | None = None if repeated else set()
    return _groups(module, "", seen)


def _groups(module: nn.Module, path: str, seen: set[int] | None) -> Iterator[list[Declaration]]:
    if isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward:
        for name, child in module._modules.items():
            if child is not None:
                yield from _groups(child, f"{path}.{name}" if path else name, seen)
        return
    found = [
        Declaration(name, child)
        for name, child in module.named_modules(prefix=path)
        if isinstance(child, Skippable) and (seen is None or id(child) not in seen)
    ]
    if seen is not None:
        seen |= {id(one.skippable) for one in found}
    if found:
        yield found


def find_faults(module: nn.Module) -> list[_DeclarationFault]:
    """Return all mismatches between stashes and pops in a model."""
    faults: list[_DeclarationFault] = []
    stashed: dict[tuple[Namespace | None, str], None] = {}  # a dict, because a set has no order
    popped: set[tuple[Namespace | None, str]] = set()
    for group in skippables_in_order(module):
        faults += _both(group)
        for one in group:
            for key in _only(one.skippable, one.skippable.stashable()):
                if key in stashed:
                    faults.append(
                        _fault(one, key[1], "redeclared", "as stashable but not isolated by namespace")
                    )
                stashed[key] = None
        for one in group:
            for key in _only(one.skippable, one.skippable.poppable()):
                if key in popped:
                    faults.append(
                        _fault(one, key[1], "redeclared", "as poppable but not isolated by namespace")
                    )
                elif key not in stashed:
                    faults.append(_fault(one, key[1], "declared", "as poppable but it was not stashed"))
                else:
                    popped.add(key)
    for key in stashed:
        if key not in popped:
            text = f"no module declared '{key[1]}' as poppable but stashed"
            faults.append(_DeclarationFault(key[1], text))
    return faults


def _both(group: Sequence[Declaration]) -> Iterator[_DeclarationFault]:
    for one in group:
        for name in sorted(one.skippable.stashable_names & one.skippable.poppable_names):
            yield _fault(one, name, "declared", "both as stashable and as poppable")


def _only(
    skippable: Skippable, keys: Iterator[tuple[Namespace | None, str]]
) -> Iterator[tuple[Namespace | None, str]]:
    """Skip names that are declared both as stash and as pop, which `_both` reports."""
    both = skippable.stashable_names & skippable.poppable_names
    return (key for key in keys if key[1] not in both)


def _fault(one: Declaration, name: str, verb: str, what: str) -> _DeclarationFault:
    return _DeclarationFault(name, f"'{one.path}' {verb} '{name}' {what}")
