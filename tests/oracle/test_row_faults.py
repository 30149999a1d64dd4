"""Wrong buckets of rows: `fxdp.verify` sees each, whatever the lifetime of what is gathered."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import fx

import fxdp
from fxdp.ir import conversions
from fxdp.ir.notes import note
from fxdp.passes import BucketRows
from tests import faults
from tests.captures import KNOWN, captured_once
from tests.exactness.test_sharded import Words, _batch


def _shifted(gm: fx.GraphModule, *, backward: bool) -> None:
    """The second value of a bucket is cut out one element too early."""
    slices = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.slice.Tensor)
    piece = next(n for n in slices if note(n).backward is backward and n.args[2] > 0)
    flat, dim, start, end = piece.args
    piece.args = (flat, dim, start - 1, end - 1)


def _of_a_whole_value(gm: fx.GraphModule) -> None:
    _shifted(gm, backward=False)


def _of_a_gradient(gm: fx.GraphModule) -> None:
    _shifted(gm, backward=True)


def _without_replicas(gm: fx.GraphModule) -> None:
    """Gradients are summed over the ranks that share rows, and not over those that hold equal ones."""
    node = gm.graph.find_nodes(op="call_function", target=conversions.sum_rows)[0]
    (done,) = node.users
    done.replace_all_uses_with(node.args[0])
    gm.graph.erase_node(done)
    gm.graph.erase_node(node)


@pytest.mark.parametrize("strategy", ["shard", "optimizer"])
@pytest.mark.parametrize("fault", [_of_a_whole_value, _of_a_gradient, _without_replicas])
def test_the_fault_is_seen(
    fault: Callable[[fx.GraphModule], None], strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults.after(BucketRows, fault)(monkeypatch)
    mesh = {"dp_replicate": 2, "dp_shard": 2}
    with captured_once(KNOWN.setdefault("tests.exactness.test_sharded", {})):
        report = fxdp.verify(Words(), _batch(0, 9), mesh=mesh, strategy=strategy, bucket_mb=0.0005)
    assert not report.ok
