"""Names in Python bytecode: attributes, globals and strings that code reads, and lines that assign names."""

from __future__ import annotations

import dis
import functools
import sys
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from operator import itemgetter

from fxdp.ir.graph.metadata import Location

_ASKING = frozenset({"getattr", "hasattr", "get", "__dict__", "vars"})
_CHANGES = ("STORE_GLOBAL", "STORE_ATTR", "STORE_DEREF", "DELETE_GLOBAL", "DELETE_ATTR")


@dataclass(frozen=True)
class _CodeNames:
    """Names that occur in a code object.

    `read`: attributes and strings that are identifiers; `globals`: global variables; `asked`: attributes that
    the code may look up although they do not exist.
    """

    read: frozenset[str]
    globals: tuple[str, ...]
    asked: frozenset[str]


@functools.lru_cache(maxsize=65536)
def names_of(code: types.CodeType) -> _CodeNames:
    """Return the names in a code object, including the functions nested in the code."""
    read, found, texts = set(code.co_names), dict[str, None](), set[str]()
    asked = set[str]()
    for one in dis.get_instructions(code):
        if one.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            found[one.argval] = None
    for value in code.co_consts:
        texts |= {value} if isinstance(value, str) else set()
        if isinstance(value, tuple):
            texts |= {item for item in value if isinstance(item, str)}
        if isinstance(value, types.CodeType):
            inner = names_of(value)
            read, asked = read | inner.read, asked | inner.asked
            found |= dict.fromkeys(inner.globals)
    texts = {text for text in texts if text.isidentifier()}
    if not _ASKING.isdisjoint(read):
        asked |= texts
    return _CodeNames(frozenset(read | texts), tuple(found), frozenset(asked))


def texts_of(code: types.CodeType) -> list[str]:
    """Return the strings in a code object that may be names of environment variables."""
    found = [value for value in code.co_consts if isinstance(value, str) and value.isidentifier()]
    return [*found, *(text for inner in _inner(code) for text in texts_of(inner))]


def location_of_change(codes: Iterable[types.CodeType], name: str) -> Location:
    """Return the first line that assigns or deletes `name`; without one, the first line that reads `name`."""
    named = [(one.opname not in _CHANGES, at) for one, at in _instructions(codes) if one.argval == name]
    if not named:
        return Location()
    _, at = min(named, key=itemgetter(0))
    return Location.at(*at)


def _instructions(codes: Iterable[types.CodeType]) -> Iterator[tuple[dis.Instruction, tuple[str, int]]]:
    for code in codes:
        line = code.co_firstlineno
        for one in dis.get_instructions(code):
            line = _line(one) or line
            yield one, (code.co_filename, line)
        yield from _instructions(_inner(code))


def _line(instruction: dis.Instruction) -> int | None:
    if sys.version_info >= (3, 11):
        return instruction.positions.lineno if instruction.positions else None
    return instruction.starts_line  # only of the first instruction of a line


def _inner(code: types.CodeType) -> list[types.CodeType]:
    return [value for value in code.co_consts if isinstance(value, types.CodeType)]
