"""A library that was built before is loaded by its source; one that is gone or is for others is built."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fxdp.startup.artifacts import cached_libraries
from fxdp.startup.artifacts.cached_libraries import cached_library


class _Cache:
    """In the place of Inductor's cache of extension modules: what it built and what it loaded."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.done: list[str] = []

    def load_async(self, source: str, submit_fn: Any) -> Callable[[], Any]:
        def load() -> Any:
            path = self.folder / f"{source}.so"
            path.touch()
            self.done.append(f"build {source}")
            return SimpleNamespace(__file__=str(path), key=source)

        return load

    def _load_library(self, path: str, key: str) -> Any:
        if not Path(path).read_text():
            self.done.append(f"load {key}")
            return SimpleNamespace(__file__=path, key=key)
        raise ImportError(path)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> _Cache:
    monkeypatch.setenv("FXDP_CACHE", "1")
    monkeypatch.setenv("FXDP_CACHE_DIR", str(tmp_path / "kept"))
    monkeypatch.setattr(cached_libraries, "library_environment", lambda: "avx2")
    return _Cache(tmp_path)


def _ask(cache: _Cache, *sources: str) -> list[str]:
    cache.done.clear()
    for source in sources:
        assert cached_library(cache, source, lambda: None)().key == source
    return [*cache.done]


def test_what_was_built_is_loaded(cache: _Cache) -> None:
    assert _ask(cache, "one", "two") == ["build one", "build two"]
    assert _ask(cache, "two", "one") == ["load two", "load one"]


def test_what_is_gone_or_damaged_is_built_again(cache: _Cache) -> None:
    _ask(cache, "one", "two")
    (cache.folder / "one.so").unlink()
    (cache.folder / "two.so").write_text("damaged")
    assert _ask(cache, "one", "two") == ["build one", "build two"]


def test_for_other_instructions_it_is_built_again(cache: _Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    _ask(cache, "one")
    monkeypatch.setattr(cached_libraries, "library_environment", lambda: "avx512")
    assert _ask(cache, "one") == ["build one"]
    monkeypatch.setattr(cached_libraries, "library_environment", lambda: None)
    assert _ask(cache, "one", "one") == ["build one", "build one"]
