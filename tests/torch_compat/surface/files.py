"""The files: `2.11.json` holds all, each later one what is different from the release before it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fxdp.torch_compat.releases import PROVEN
from tests.torch_compat.surface.installed import Surface, is_public

FOLDER = Path(__file__).parent
TABLES = ("names", "ops", "texts", "settings")


def read(release: str) -> Surface:
    """What torch of a proven release has."""
    found: Surface = {table: {} for table in TABLES}
    for each in PROVEN[: PROVEN.index(release) + 1]:
        for table, entries in _content(each)["tables"].items():
            found[table] |= entries
    return {table: {path: form for path, form in found[table].items() if form} for table in TABLES}


def write(measured: Mapping[str, Any]) -> None:
    """Files of some releases, of each what `python -m tests.torch_compat.surface --print` printed there."""
    for before, release in zip((None, *PROVEN), PROVEN, strict=False):
        if release not in measured:
            continue
        tables, listed = measured[release]["tables"], set(measured[release]["listing"])
        content = {"torch": measured[release]["torch"], "tables": tables}
        if before is not None:
            content["tables"] = {table: _changes(read(before)[table], tables[table]) for table in TABLES}
        if before in measured:
            earlier = set(measured[before]["listing"])
            content |= {"came": sorted(listed - earlier), "went": sorted(earlier - listed)}
        elif before is not None:
            content |= {key: _content(release)[key] for key in ("came", "went")}
        text = json.dumps(content, indent=1, sort_keys=True)
        (FOLDER / f"{release}.json").write_text(text + "\n")


def absent(release: str, there: str, table: str, path: str) -> bool:
    """Whether torch of a release has not what the installed one, of the release `there`, has.

    A public name that no file holds was added to fxdp since: it is there unless it came or went in between.
    """
    if path in read(release)[table]:
        return False
    if not is_public(path) or (table == "names" and path.rpartition(".")[0] not in _owners()):
        return True
    first, last = sorted((PROVEN.index(release), PROVEN.index(there)))
    between = [_content(each) for each in PROVEN[first + 1 : last + 1]]
    return any(path in content[key] for content in between for key in ("came", "went"))


def differences(expected: Surface, found: Surface, tables: Sequence[str]) -> list[str]:
    """One line for each entry that differs, of those that both were asked for."""
    lines = []
    for table in tables:
        for path in sorted(expected[table].keys() & found[table].keys()):
            if expected[table][path] != found[table][path]:
                lines.append(f"{path}: {found[table][path]}, not {expected[table][path]}")
    return lines


def _owners() -> set[str]:
    return {path.rpartition(".")[0] for path in read(PROVEN[0])["names"]}


def _changes(before: Mapping[str, str], now: Mapping[str, str]) -> dict[str, str | None]:
    gone = dict.fromkeys(before.keys() - now.keys())
    return gone | {path: form for path, form in now.items() if before.get(path) != form}


def _content(release: str) -> Any:
    """`torch`, `tables` (null: gone since), and of all that fxdp might name what `came` and what `went`."""
    return json.loads((FOLDER / f"{release}.json").read_text())
