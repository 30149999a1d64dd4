from __future__ import annotations

from typing import cast

import pytest

from fxdp.ranks.comms import processors
from fxdp.ranks.comms.channel import Channel


class _Others:
    """A control channel to ranks that say these words."""

    def __init__(self, *words: str) -> None:
        self.words = [word.encode() for word in words]

    def exchange(self, own: bytes) -> list[bytes]:
        return [own, *self.words]


def alike(*words: str) -> bool:
    return processors.are_alike(cast("Channel", _Others(*words)), "cpu")


def test_ranks_that_say_the_same_are_alike() -> None:
    own = processors.processor("cpu")
    assert alike(repr(own), repr(own))
    assert not alike(repr(own), repr(own | {"processor": "another"}))


def test_a_rank_with_other_threads_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    own = processors.processor("cpu")
    monkeypatch.setattr("torch.get_num_threads", lambda: 97)
    assert processors.processor("cpu") == own | {"threads": "97"}
    assert not alike(repr(own))


def test_where_linux_tells_no_processor_the_platform_does(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(processors, "_CPUINFO", tmp_path / "none")
    assert processors.platform.machine() in processors.processor("cpu")["processor"]
    (tmp_path / "cpuinfo").write_text("processor : 0\nmodel name : Quick 9000\n")
    monkeypatch.setattr(processors, "_CPUINFO", tmp_path / "cpuinfo")
    assert "Quick 9000" in processors.processor("cpu")["processor"]
