"""Open files are counted before anything is opened."""

from __future__ import annotations

import resource

import pytest

from fxdp.errors import MeshError
from fxdp.ranks.comms import descriptors
from fxdp.ranks.comms.descriptors import as_limit, check_limit, needed


def test_a_low_limit_is_refused_with_what_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 4096))
    monkeypatch.setattr(descriptors.os, "listdir", lambda _: ["0"] * 40)
    check_limit(64, needed(64, 64, gloo=True, memory=True))
    wanted = needed(1024, 1024, gloo=True, memory=False)
    words = rf"joining 1024 ranks .* has 40 open and needs {wanted} more, and may have 1024; .*-n 4096`"
    with pytest.raises(MeshError, match=words):
        check_limit(1024, wanted)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    check_limit(1024, wanted)


def test_a_pipeline_takes_groups_of_all_ranks_too() -> None:
    one, other = needed(8, 8, gloo=True, memory=False), needed(8, 4, gloo=True, memory=False)
    assert other > one - 8
    assert needed(8, 8, gloo=False, memory=False) < one
    assert as_limit(OSError(2, "No such file"), 2) is None
