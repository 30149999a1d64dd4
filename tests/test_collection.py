"""Collection is paused inside, and after it as it was before."""

from __future__ import annotations

import gc

import pytest

from fxdp.ir.collection import no_collection


@pytest.mark.parametrize("before", [True, False])
def test_collection_is_paused_and_resumed(before: bool) -> None:
    enabled = gc.isenabled()
    try:
        (gc.enable if before else gc.disable)()
        with no_collection():
            assert not gc.isenabled()
        assert gc.isenabled() == before
    finally:
        (gc.enable if enabled else gc.disable)()
