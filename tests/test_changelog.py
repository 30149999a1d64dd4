"""`CHANGELOG.md` is one that users read: newest release on top, and the first release in at most 80 lines."""

from __future__ import annotations

import re
from pathlib import Path

from fxdp.version import __version__

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "CHANGELOG.md").read_text()
_KINDS = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security", "Known limits"}
"""Headings of a release: those of Keep a Changelog, and what users of a release must know."""


def _releases() -> dict[str, list[str]]:
    """The lines of each release, by its number, in the order of the file."""
    found = re.split(r"^## \[(.+?)\].*$", TEXT, flags=re.MULTILINE)
    return {name: text.strip().splitlines() for name, text in zip(found[1::2], found[2::2], strict=True)}


def test_the_newest_release_is_on_top() -> None:
    names = [name for name in _releases() if name != "Unreleased"]
    assert names == sorted(names, key=lambda name: tuple(map(int, name.split("."))), reverse=True)
    assert names[0] == __version__


def test_the_first_release_is_short() -> None:
    assert 20 < len(_releases()["0.1.0"]) < 80  # with its heading


def test_headings_are_those_of_keep_a_changelog() -> None:
    headings = re.findall(r"^### (.+)$", TEXT, re.MULTILINE)
    assert {"Added", "Security", "Known limits"} <= set(headings) <= _KINDS


def test_links_lead_to_files() -> None:
    linked = re.findall(r"\]\((?!https:)([^)#]+)", TEXT)
    assert linked
    assert [path for path in linked if not (ROOT / path).is_file()] == []
