"""What the doctor finds in an environment."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fxdp.cli.doctor import found
from fxdp.version import __version__


def test_versions_are_those_installed() -> None:
    rows = {row.name: row.text for row in found.versions().rows}
    assert rows["fxdp"] == __version__
    assert rows["torch"] == f"{torch.__version__}, proven"
    assert {"CUDA", "Python", "C++", "numpy", "sympy", "networkx"} <= rows.keys()


def test_a_compiler_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/nonexistent/g++")
    rows = {row.name: row.text for row in found.versions().rows}
    assert rows["C++"] == (
        'no /nonexistent/g++: install g++, or set CXX; without one backend="eager" is used'
    )


def test_settings_that_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FXDP_TIMEOUT_S", "77")
    assert ("FXDP_TIMEOUT_S", "77") in [(row.name, row.text) for row in found.settings().rows]


def test_shortcuts_that_are_off_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FXDP_SHORTCUTS", "-lazy_codegen")
    section = found.shortcuts()
    assert {row.name: row.text for row in section.rows}["lazy_codegen"].startswith("off: ")
    assert section.title.startswith("shortcuts: ")


def test_caches_and_their_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "kept"
    monkeypatch.setenv("FXDP_CACHE_DIR", str(folder))
    monkeypatch.setenv("FXDP_CACHE_MB", "3")
    monkeypatch.delenv("FXDP_CACHE", raising=False)

    def own() -> str:
        return next(row.text for row in found.caches().rows if row.name == "fxdp")

    assert own() == f"{folder}: not made yet of at most 3 MiB"
    folder.mkdir()
    (folder / "entry").write_bytes(b"x" * 2048)
    assert own() == f"{folder}: 2.0 KiB of at most 3 MiB"
    monkeypatch.setenv("FXDP_CACHE", "0")
    assert own() == "off"


def test_plans_of_global_tensors_are_counted() -> None:
    row = next(row for row in found.caches().rows if row.name == "global tensors")
    assert row.text.endswith("for all batch sizes; at most 8,192 and 4,096, in memory")


def test_a_cache_that_cannot_be_used_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FXDP_CACHE", "1")
    monkeypatch.setenv("FXDP_CACHE_DIR", str(tmp_path / "kept"))
    damaged = ["an entry of the cache is ignored: ValueError: damaged"] * 3
    assert [row.text for row in found.caches(damaged).rows][1:-2] == damaged[:1]
    (tmp_path / "kept").touch()
    own, inductor, _ = found.caches(["the cache of captures is not used: it is a file"]).rows
    assert own.text.endswith("a file, not a folder: nothing is kept")
    assert inductor.name == "Inductor"
