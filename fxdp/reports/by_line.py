"""Group the messages of a step by the line of the user's code that needs them.

    model.py:7  x = self.fc(x)
      backward  all_reduce  x12      1.5 KiB  gradient of layers.*.fc.weight

Layers that run the same line share one row.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from fxdp.ir.graph.metadata import Location
from fxdp.reports.places import place
from fxdp.reports.plan_data.collective import Collective

_NUMBER = re.compile(r"(?<![\w*])\d+(?=\.)|(?<=\.)\d+(?=\.|$|\b)")
"""The number of a layer in a dotted name."""

_OF_MANY_LINES = {
    "send_parameters_": Location(
        code="before the stages run: rows of parameters for the ranks that read them"
    ),
    "send_gradients_": Location(code="at the end of the step: gradients for the ranks that hold their rows"),
    "send_results_": Location(
        code="at the end of the step: results and gradients for the other pipeline ranks"
    ),
}
"""Locations for pipeline messages with values of many lines, by prefix of the message's name."""


@dataclass(frozen=True, slots=True)
class _LineExchange:
    """The values of one kind that are communicated for one line, merged over all layers that run the line."""

    phase: str
    kind: str
    text: str
    modules: str
    bytes: int
    count: int
    collectives: tuple[str, ...]
    """Keys of the collectives that carry these values."""


@dataclass(frozen=True, slots=True)
class CommunicatingLine:
    """A line of the user's code with all values that are communicated for this line."""

    location: Location
    exchanges: tuple[_LineExchange, ...]

    @property
    def title(self) -> str:
        """The place of the line as `models.py:12`, or a description if there is no line."""
        return place(self.location) if self.location.file else self.location.code


def _folded(name: str) -> str:
    """Replace layer numbers in a dotted name by stars: `h.3.attn.weight` becomes `h.*.attn.weight`."""
    return _NUMBER.sub("*", name)


def _starred(names: Sequence[str]) -> str:
    """Merge names that differ only in numbers: `h.0.0.weight` and `h.1.0.weight` give `h.*.0.weight`."""
    parts = [_NUMBER.split(name) for name in names]
    numbers = zip(*(_NUMBER.findall(name) for name in names), strict=True)
    stars = [*(found[0] if len(set(found)) == 1 else "*" for found in numbers), ""]
    return "".join(text + star for text, star in zip(parts[0], stars, strict=True))


@dataclass(frozen=True, slots=True)
class _Value:
    """One communicated value, with the line and the purpose of the communication."""

    location: Location
    phase: str
    kind: str
    text: str
    bytes: int
    collective: str
    count: int = 1


def _values(rows: Iterable[Collective]) -> Iterator[_Value]:
    for row in rows:
        if row.kind == "send":
            location = next((s for name, s in _OF_MANY_LINES.items() if row.name.startswith(name)), None)
            count = f"{len(row.needs)} value{'s' if len(row.needs) > 1 else ''}"
            text = row.text if location is None else f"{row.text} ({count})"
            yield _Value(location or row.location, row.phase, row.kind, text, row.bytes, row.key, row.count)
            continue
        for need in row.needs:
            text = need.text.replace(f" in `{need.location.code}`", "")
            yield _Value(need.location, row.phase, row.kind, text, need.bytes, row.key)


def lines_of(rows: Iterable[Collective], *, fold: bool = True) -> tuple[CommunicatingLine, ...]:
    """Return the lines that communicate, in the order of the step; without `fold`, one exchange per value."""
    groups: dict[tuple[str, int, str], dict[object, list[_Value]]] = {}
    for i, value in enumerate(_values(rows)):
        alike = (value.phase, value.kind, _folded(value.text), _folded(value.location.module))
        key = alike if fold else (*alike, i)
        where = value.location.file, value.location.line, "" if value.location.file else value.location.code
        groups.setdefault(where, {}).setdefault(key, []).append(value)
    return tuple(
        CommunicatingLine(next(iter(alike.values()))[0].location, tuple(map(_exchange, alike.values())))
        for alike in groups.values()
    )


def _exchange(values: list[_Value]) -> _LineExchange:
    first = values[0]
    many = len({(value.text, value.location.module) for value in values}) > 1
    text, module = first.text, first.location.module
    return _LineExchange(
        first.phase,
        first.kind,
        _starred([value.text for value in values]) if many else text,
        _starred([value.location.module for value in values]) if many else module,
        sum(value.bytes for value in values),
        sum(value.count for value in values),
        tuple(dict.fromkeys(value.collective for value in values)),
    )
