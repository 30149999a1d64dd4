"""What is kept is found again; what cannot be used is one line of the log, and nothing else."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from fxdp.disk import entries as module
from fxdp.disk.entries import Entries, key_of
from fxdp.errors import MeshError
from fxdp.settings import CacheSettings


def _of_settings() -> Entries:
    settings = CacheSettings.from_environment()
    return Entries.within(settings.folder, settings.megabytes)


@pytest.fixture
def entries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Entries:
    """Entries in a folder of the test's own."""
    monkeypatch.setenv("FXDP_CACHE", "1")
    monkeypatch.setenv("FXDP_CACHE_DIR", str(tmp_path / "kept"))
    module._say.cache_clear()
    return _of_settings()


def _lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]


def test_a_value_is_found_again(entries: Entries) -> None:
    key = key_of("a text", "and another")
    assert entries.find(key) is None
    entries.keep(key, {"a": (1, 2.5)})
    assert entries.find(key) == {"a": (1, 2.5)}
    assert entries.find(key_of("a text", "and another one")) is None


def test_keys_tell_lists_of_texts_and_versions_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {key_of("ab", "c"), key_of("a", "bc"), key_of("abc"), key_of("abc", "")}
    monkeypatch.setattr(module, "_versions", lambda: "another release")
    assert len(keys | {key_of("abc")}) == 5


@pytest.mark.parametrize("damage", [b"", b"something else", b"fxdp entry 1\n" + bytes(32) + b"changed"])
def test_a_damaged_entry_is_ignored_with_one_line(
    entries: Entries, caplog: pytest.LogCaptureFixture, damage: bytes
) -> None:
    assert entries.folder is not None
    entries.keep("key", 1)
    for _ in range(2):
        (entries.folder.path / "key").write_bytes(damage)
        assert entries.find("key") is None
    ignored = f"an entry of the cache in {entries.folder.path} is ignored: ValueError"
    assert _lines(caplog) == [f"{ignored}: damaged, or of another version"]
    entries.keep("key", 2)
    assert entries.find("key") == 2


@pytest.mark.parametrize("why", ["shared", "a file", "full"])
def test_a_folder_that_cannot_be_used_is_one_line(
    entries: Entries, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    assert entries.folder is not None
    path = entries.folder.path
    if why == "shared":
        path.mkdir()
        path.chmod(0o777)
    elif why == "a file":
        path.write_bytes(b"")
    else:
        monkeypatch.setattr("os.rename", _full)
    for _ in range(2):
        entries.keep("key", 1)
        assert entries.find("key") is None
    said = {"shared": "written by others", "a file": "is a file. Set FXDP_CACHE_DIR", "full": "No space left"}
    lines = _lines(caplog)
    assert any(said[why] in line for line in lines)
    assert all(line.startswith("the cache of captures is not used: ") for line in lines)
    assert len(lines) == 1


def test_one_rank_of_each_host_says_so(
    entries: Entries, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert entries.folder is not None
    entries.folder.path.write_bytes(b"")
    for rank in "10":
        monkeypatch.setenv("LOCAL_RANK", rank)
        module._say.cache_clear()
        caplog.clear()
        entries.keep("key", 1)
        assert len(_lines(caplog)) == (rank == "0")


def _full(*args: Any, **kwargs: Any) -> None:
    raise OSError(28, "No space left on device")


def test_what_cannot_be_pickled_is_not_kept(entries: Entries) -> None:
    entries.keep("key", lambda: None)
    assert entries.find("key") is None


def test_it_can_be_left_out(entries: Entries, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FXDP_CACHE", "0")
    without = _of_settings()
    without.keep("key", 1)
    assert without.find("key") is None
    assert not (tmp_path / "kept").exists()
    monkeypatch.setenv("FXDP_CACHE_MB", "much")
    with pytest.raises(MeshError, match="FXDP_CACHE_MB is 'much'; expected a number >= 0"):
        _of_settings()


def test_it_lies_beside_what_inductor_keeps(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FXDP_CACHE", "1")
    monkeypatch.delenv("FXDP_CACHE_DIR", raising=False)
    monkeypatch.delenv("FXDP_CACHE_MB", raising=False)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    found = _of_settings().folder
    assert found is not None
    assert (found.path, found.limit) == (tmp_path / "fxdp", 512 * 2**20)
