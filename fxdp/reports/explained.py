"""Answer `plan.explain`: find the nodes, parameters and collectives that a text names, with their reasons."""

from __future__ import annotations

import difflib
import os
import re
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from fxdp.errors import InputError, a_kind
from fxdp.ir.graph.metadata import Location
from fxdp.ir.graph.regions import is_within
from fxdp.reports.places import place, shortened
from fxdp.reports.plan_data.collective import Collective, Need
from fxdp.reports.plan_data.details import Details
from fxdp.reports.plan_data.parameter_table import ParameterRow
from fxdp.reports.rows import Explanation, flat_dict
from fxdp.reports.sheet import Sheet, Shown

_LINE = re.compile(r"(?P<file>.+):(?P<line>\d+)")


@dataclass(frozen=True, repr=False)
class Explained(Shown):
    """The part of a plan that concerns one subject.

    Attributes
    ----------
    subject : the text that was asked for.
    nodes : the matching nodes of `plan.graph`, in order, each with the rule that placed the node.
    collectives : the collectives that carry a matching value.
    parameters : the parameters named by the subject.
    """

    subject: str
    nodes: tuple[Explanation, ...] = ()
    collectives: tuple[Collective, ...] = ()
    parameters: tuple[ParameterRow, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.nodes or self.collectives or self.parameters)

    def __repr__(self) -> str:
        pairs = ((self.nodes, "node"), (self.collectives, "collective"), (self.parameters, "parameter"))
        counts = ", ".join(f"{len(found)} {word}{'s' * (len(found) != 1)}" for found, word in pairs)
        return f"Explained({self.subject!r}: {counts})"

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def lines(self, width: int = 80) -> list[str]:
        """Wrap the text to `width` columns, with nodes grouped by line; file names are never broken."""
        shown = [part for one in (*self.parameters, *self.collectives) for part in str(one).splitlines()]
        lines = [part for line in shown for part in _wrapped(line, width)]
        last: tuple[str, int] | None = None
        for row in self.nodes:
            where = place(row.location)
            if (row.location.file, row.location.line) != last:
                lines.append(f"{where}  {shortened(row.location.code, width - len(where) - 2)}".rstrip())
            last = (row.location.file, row.location.line)
            module = f", in {row.location.module}" if row.location.module else ""
            lines += _wrapped(f"  {row.text}", width) + _wrapped(f"      {row.why}{module}", width)
        return lines

    def as_dict(self) -> dict[str, Any]:
        """Return the answer as plain values for JSON."""
        return {
            "subject": self.subject,
            "nodes": [row.as_dict() for row in self.nodes],
            "collectives": [asdict(row) for row in self.collectives],
            "parameters": [flat_dict(row) for row in self.parameters],
        }

    def sheets(self) -> tuple[Sheet, ...]:
        """Return the answer as tables."""
        found = [Sheet(f"why {self.subject}")]
        if self.parameters:
            rows = tuple((p.name, str(p).partition("\n    ")[2]) for p in self.parameters)
            found.append(Sheet("parameters", ("parameter", "how it lies"), rows))
        if self.collectives:
            why = tuple((c.name, c.kind, str(c).replace("\n    ", "\n")) for c in self.collectives)
            found.append(Sheet("collectives", ("name", "kind", "why, where and when"), why))
        if self.nodes:
            cells = tuple((place(n.location), n.text, n.why) for n in self.nodes)
            found.append(Sheet("nodes", ("at", "node", "why"), cells))
        return tuple(found)


def _wrapped(line: str, width: int) -> list[str]:
    """Wrap a line; continuation lines are indented by four more columns."""
    indent = " " * (len(line) - len(line.lstrip()) + 4)
    return textwrap.wrap(
        line, width, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False
    )


def explained(details: Details, subject: str) -> Explained:
    """Find the part of a plan named by `models.py:12`, parameter, node, collective, module or any words.

    Raises
    ------
    InputError : `subject` is not text, or names no part of the plan; the message lists similar names.
    """
    asked: object = subject
    if not isinstance(asked, str):
        raise InputError(f'explain: got {a_kind(asked)}, expected text, as "models.py:12" or "fc.weight"')
    found = _by_line(details, subject) or _by_name(details, subject.lstrip("%"))
    found = found or _by_words(details, [subject]) or _by_words(details, subject.split())
    if not found:
        near = difflib.get_close_matches(subject.lstrip("%"), _names(details), 5, 0.5)
        known = f"; near it are {', '.join(near)}" if near else ""
        raise InputError(
            f"explain {subject!r}: no line, parameter, node, collective or module of the plan is called so"
            f"{known}. Expected a line as in models.py:12, a name, or words of a node's line in plan.text"
        )
    return found


def _by_line(details: Details, subject: str) -> Explained | None:
    match = _LINE.fullmatch(subject)
    if match is None:
        return None

    def there(location: Location) -> bool:
        tail = os.sep + match["file"].lstrip("./")
        return location.line == int(match["line"]) and (os.sep + location.file).endswith(tail)

    return _where(details, subject, there)


def _where(details: Details, subject: str, there: Any) -> Explained | None:
    found = Explained(
        subject,
        tuple(row for row in details.explanations if there(row.location)),
        _carrying(details.collectives, lambda need: there(need.location)),
    )
    return found if found else None


def _by_name(details: Details, name: str) -> Explained | None:
    rows = {row.name: row for row in details.explanations}
    parameters = tuple(row for row in details.parameters if row.name == name)
    if parameters:
        travels = _carrying(details.collectives, lambda need: need.text in (name, f"gradient of {name}"))
        values = {need.value for row in travels for need in row.needs if need.text == f"gradient of {name}"}
        given = f"param({name})"
        return Explained(
            name,
            tuple(row for row in details.explanations if given in row.text or row.name in values),
            travels,
            parameters,
        )
    collectives = tuple(row for row in details.collectives if name in (row.name, row.key))
    if collectives or name in rows:
        names = {need.value for row in collectives for need in row.needs} | {name}
        travels = collectives or _carrying(
            details.collectives, lambda need: name in (need.value, need.redistribution, need.consumer)
        )
        return Explained(name, tuple(rows[n] for n in rows if n in names), travels)
    return _where(details, name, lambda location: is_within(location.module, name))


def _carrying(rows: Iterable[Collective], wanted: Callable[[Need], bool]) -> tuple[Collective, ...]:
    """Return the collectives that carry a wanted value, with this value first, as its causes are shown."""
    found = (row for row in rows if any(map(wanted, row.needs)))
    return tuple(replace(row, needs=tuple(sorted(row.needs, key=lambda n: not wanted(n)))) for row in found)


def _by_words(details: Details, words: Sequence[str]) -> Explained | None:
    nodes = tuple(row for row in details.explanations if row.matches(words))
    return Explained(" ".join(words), nodes) if nodes else None


def _names(details: Details) -> list[str]:
    """Return all names that `explained` accepts."""
    locations = [row.location for row in details.explanations]
    found = [row.name for row in details.parameters] + [row.key for row in details.collectives]
    found += [row.name for row in details.explanations] + [
        location.module for location in locations if location.module
    ]
    return list(
        dict.fromkeys([*found, *(f"{os.path.basename(s.file)}:{s.line}" for s in locations if s.file)])
    )
