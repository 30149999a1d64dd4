"""Convert plans to JSON with a format version, and read them back."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any

from fxdp.errors import FxdpError, InputError, a_kind
from fxdp.ir.graph.metadata import Location
from fxdp.pipeline.schedule import csv
from fxdp.pipeline.schedule.schedule import Schedule
from fxdp.reports.rows import CoverageRow

FORMAT, VERSION = "fxdp-plan", 1


def plain(value: Any) -> Any:
    """Convert rows, including nested rows, to values that JSON can hold."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {name: plain(one) for name, one in value.items()}
    return [plain(one) for one in value] if isinstance(value, (tuple, list)) else value


def read(kind: Any, value: Any) -> Any:
    """Convert a plain value back to the given type; the inverse of `plain`."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is tuple:
        return tuple(read(arguments[0], one) for one in value)
    if origin in (types.UnionType, typing.Union):
        return None if value is None else read(arguments[0], value)
    if not dataclasses.is_dataclass(kind):
        return value
    hints = typing.get_type_hints(kind)
    return kind(**{name: read(hints[name], one) for name, one in value.items()})  # type: ignore[operator]


def read_coverage(rows: list[dict[str, Any]]) -> tuple[CoverageRow, ...]:
    """Read the rows of a coverage report, where the fields of `location` are beside the row's own."""
    names = [field.name for field in dataclasses.fields(Location)]
    return tuple(
        CoverageRow(
            location=Location(**{name: row[name] for name in names}),
            **{name: value for name, value in row.items() if name not in names},
        )
        for row in rows
    )


def read_schedule(name: str, lines: list[str]) -> Schedule | None:
    """Read a schedule from lines such as `rank 0: 0F0 0B0`."""
    if not lines:
        return None
    return csv.parse("\n".join(line.partition(": ")[2].replace(" ", ",") for line in lines), name)


def checked(text: str, needed: tuple[str, ...]) -> dict[str, Any]:
    """Parse a JSON text and check that it is a plan of this version.

    Raises
    ------
    InputError : the text is not a plan, or a plan of a different version; the message says why.
    """
    expected = "expected the text that plan.to_json() or fxdp plan --json gives"
    given: object = text
    if not isinstance(given, (str, bytes)):
        raise InputError(f"from_json: got {a_kind(given)}, {expected}")
    try:
        found = json.loads(text)
    except ValueError as error:
        raise InputError(f"from_json: this is no JSON: {error}; {expected}") from error
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise InputError(f"from_json: got {_seen(found)}, {expected}")
    if found.get("version") != VERSION:
        raise InputError(
            f"from_json: the plan has version {found.get('version')!r}, made by fxdp {found.get('fxdp')} on "
            f"torch {found.get('torch')}; this fxdp reads version {VERSION}. Write it anew with this fxdp"
        )
    missing = [name for name in needed if name not in found]
    if missing:
        raise InputError(f"from_json: the plan has no {', '.join(missing)}; it is incomplete")
    return found


def _seen(found: object) -> str:
    """Describe JSON that is not a plan, to help to recognize the file."""
    if not isinstance(found, dict):
        return a_kind(found)
    if "format" in found:
        return f"JSON of format {found['format']!r}"
    return f"JSON with the keys {', '.join(list(found)[:4])}" if found else "JSON without keys"


@contextlib.contextmanager
def read_as_written(found: Mapping[str, Any]) -> Iterator[None]:
    """Turn errors inside the block into an error about a plan with unexpected rows.

    Raises
    ------
    InputError : the rows differ from the rows that `to_json` writes, as in a file edited by hand.
    """
    try:
        yield
    except FxdpError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InputError(
            f"from_json: the plan, made by fxdp {found.get('fxdp')} on torch {found.get('torch')}, has rows "
            f"that nobody writes so: {type(error).__name__}: {error}. Write it anew with this fxdp"
        ) from error
