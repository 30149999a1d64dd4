"""How links find each other: by keys that stay short."""

from __future__ import annotations

import torch.distributed as dist

from fxdp.ranks.comms.opening import _prefix


def test_keys_are_as_long_for_many_ranks_as_for_few() -> None:
    store = dist.HashStore()
    few, many = _prefix(store, 0, [0, 1]), _prefix(store, 0, range(16_384))
    assert len(few) == len(many) < 40
    assert few != many
    assert _prefix(store, 0, [0, 1]) == few[:-1] + "2"
    assert _prefix(store, 1, [0, 1]) == few
