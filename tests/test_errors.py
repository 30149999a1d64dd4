"""Notes on errors, which Python 3.10 does not show."""

from __future__ import annotations

import traceback
from types import SimpleNamespace

import pytest

from fxdp import errors
from fxdp.errors import RankFailedError, add_note


@pytest.mark.parametrize("python", [(3, 10), (3, 11)])
def test_notes_are_lines_below_the_message(python: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors, "sys", SimpleNamespace(version_info=python))
    error = RankFailedError("one")
    for note in ("two", "three"):
        add_note(error, note)
    shown = str(error) if python == (3, 10) else "".join(traceback.format_exception_only(error))
    assert shown.rpartition(": ")[2].split() == ["one", "two", "three"]
    assert error.__notes__ == ["two", "three"]


@pytest.mark.parametrize("python", [(3, 10), (3, 11)])
def test_a_key_stays_the_key(python: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors, "sys", SimpleNamespace(version_info=python))
    error = KeyError("RANK")
    add_note(error, "two")
    assert error.args == ("RANK",)
    assert error.__notes__ == ["two"]
