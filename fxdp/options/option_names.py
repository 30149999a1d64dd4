"""Names that are no options: each with the option that sets the same today."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from fxdp.errors import InputError
from fxdp.options.option_checks import shown
from fxdp.options.option_values import GROUPS

_RENAMED = {
    "compute": "backend",
    "checkpoint": "mode",
    "activation_memory_budget": "memory_budget",
    "recompute": "modules",
    "bucket_mb": "bucket_cap_mb",
}
"""Former names, each with the name of today."""
_GROUP_OF = {name: group for group, kind in GROUPS.items() for name in kind.names()}
"""The option that holds a field, by the field's name."""


def refuse_unknown(given: Mapping[str, Any], known: Sequence[str], where: str = "fxdp.compile") -> None:
    """Raise for names that are no options; `where` is the function that got them.

    Raises
    ------
    InputError : one line for each option that was renamed, moved into another or mistyped, with its spelling.
    """
    unknown = [name for name in given if name not in known]
    if not unknown:
        return
    moved: dict[str, dict[str, Any]] = {}
    for name in unknown:
        if name in _RENAMED or name in _GROUP_OF:
            moved.setdefault(_option_of(name), {})[name] = given[name]
    lines = [_now(option, values) for option, values in moved.items()]
    lines += [_near(name, given[name], known) for name in unknown if name not in (_RENAMED | _GROUP_OF)]
    listing = "\n  ".join(lines)
    raise InputError(
        f"{where} has no options of these names:\n  {listing}\nexpected some of {', '.join(known)}"
    )


def _option_of(name: str) -> str:
    """Return the option that sets what this name of today or before stands for."""
    own = _RENAMED.get(name, name)
    return _GROUP_OF.get(own, own)


def _now(option: str, given: Mapping[str, Any]) -> str:
    before = ", ".join(f"{name}={shown(value)}" for name, value in given.items())
    return f"{before}: now {_written(option, given)}"


def _near(name: str, value: Any, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, [*known, *_GROUP_OF, *_RENAMED], 1)
    return f"{name}: did you mean {_written(_option_of(near[0]), {near[0]: value})}?" if near else name


def _written(option: str, given: Mapping[str, Any]) -> str:
    """Return the argument of `fxdp.compile` that sets these, each under its name of today."""
    named = {_RENAMED.get(name, name): value for name, value in given.items()}
    alone = option not in GROUPS or (option == "activation_checkpointing" and len(named) == 1)
    values = list(named.values())
    return f"{option}={shown(values[0]) if alone else GROUPS[option].written(named)}"
