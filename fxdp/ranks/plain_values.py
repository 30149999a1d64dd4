"""Encode values for other ranks as text, so that decoding received data never runs code.

None, true, 3, 0.5, "text"                   as in JSON
["tuple", 1, 2]   ["list"]   ["set", "a"]    all remaining types begin with a name
["dict", [key, value], ...]   ["bytes", "base64"]
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterable
from typing import Any

from fxdp.errors import a_kind

_MAKERS: dict[str, Callable[[Iterable[Any]], Any]] = {"tuple": tuple, "list": list, "set": frozenset}


def encode(value: Any) -> bytes:
    """Encode a value made of None, numbers, text, bytes, tuples, lists, dicts and (frozen)sets.

    Raises
    ------
    TypeError : the value contains a different type.
    """
    return json.dumps(_tagged(value), separators=(",", ":")).encode()


def decode(data: bytes) -> Any:
    """Decode the result of `encode`; sets become frozensets.

    Raises
    ------
    ValueError : the bytes are not a valid encoding.
    """
    try:
        return _plain(json.loads(data))
    except (ValueError, TypeError, IndexError, RecursionError) as error:
        raise ValueError(f"no value of fxdp's: {error}") from error


def _tagged(value: Any) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, bytes):
        return ["bytes", base64.b64encode(value).decode()]
    if isinstance(value, dict):
        return ["dict", *([_tagged(key), _tagged(item)] for key, item in value.items())]
    for name, kind in (("tuple", tuple), ("list", list), ("set", (set, frozenset))):
        if isinstance(value, kind):
            return [name, *map(_tagged, value)]
    raise TypeError(f"{a_kind(value)} cannot be told to other ranks: make it text or numbers first")


def _plain(value: Any) -> Any:
    if not isinstance(value, list):
        if isinstance(value, dict):
            raise ValueError("an object")
        return value
    name, *items = value
    if name == "bytes":
        return base64.b64decode(items[0], validate=True)
    if name == "dict":
        return {_plain(key): _plain(item) for key, item in items}
    if name not in _MAKERS:
        raise ValueError(f"a {name!r}")
    return _MAKERS[name](map(_plain, items))
