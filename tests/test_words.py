"""The field's words: those that CONTRIBUTING replaced are in no name and in nothing that people read."""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rooms import FXDP

ROOT = FXDP.parent
_TORCHS = {"__slots__", "slots", "get_proxy_slot", "saved_tensors_hooks", "segment_reduce"}
"""Names that Python or torch gave."""
_READ = ("dealt", "whole", "wholes", "conversion", "conversions")
"""Words that prose does not have either; of the others, some are English."""


def _replaced() -> dict[str, str]:
    """The table of CONTRIBUTING: words that are out, each with the field's own."""
    page = (ROOT / "CONTRIBUTING.md").read_text()
    text = page.partition("<!-- words -->")[2].partition("<!-- end of words -->")[0]
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| `")]
    return {word: new for old, new in rows for word in re.findall(r"`(\w+)`", old)}


def _files() -> Iterator[Path]:
    yield from sorted(FXDP.rglob("*.py"))
    yield from sorted((ROOT / "passes").rglob("*.py"))


def _tokens(file: Path) -> Iterator[tokenize.TokenInfo]:
    yield from tokenize.generate_tokens(io.StringIO(file.read_text()).readline)


def _parts(name: str) -> set[str]:
    """The words of a name: those of `SharedWindows` are `shared` and `windows`."""
    return {part.lower() for part in re.findall(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])", name)}


def test_the_table_is_read() -> None:
    assert {"dealt", "whole", "segment", "slot"} <= _replaced().keys()
    assert not _replaced().keys() & {word for new in _replaced().values() for word in _parts(new)}


@pytest.mark.parametrize("folder", sorted(path.name for path in FXDP.iterdir() if path.is_dir()))
def test_no_name_has_a_word_that_is_out(folder: str) -> None:
    out = _replaced().keys()
    found = {
        f"{file.relative_to(ROOT)}:{token.start[0]}: {token.string}"
        for file in _files()
        if file.is_relative_to(FXDP / folder) or (folder == "passes" and file.is_relative_to(ROOT / "passes"))
        for token in _tokens(file)
        if token.type == tokenize.NAME and token.string not in _TORCHS and _parts(token.string) & out
    }
    files = {str(file.relative_to(ROOT)) for file in _files() if _parts(file.stem) & out}
    assert not found | files


def test_nothing_that_people_read_has_them() -> None:
    word = re.compile(rf"\b({'|'.join(_READ)})\b", re.IGNORECASE)
    names = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")
    pages = [*(ROOT / name for name in names), *sorted((ROOT / "docs").glob("*.md"))]
    table = re.compile(r"<!-- words -->.*?<!-- end of words -->", re.DOTALL)
    found = [
        f"{page.relative_to(ROOT)}: {match.group()}"
        for page in pages
        for match in word.finditer(table.sub("", page.read_text()))
    ]
    kinds = (tokenize.STRING, tokenize.COMMENT)
    found += [
        f"{file.relative_to(ROOT)}:{token.start[0]}: {match.group()}"
        for file in _files()
        for token in _tokens(file)
        if token.type in kinds
        for match in word.finditer(token.string)
    ]
    assert not found
