"""Wrong buckets of rows: `fxdp.verify` sees each, whatever the lifetime of what is gathered."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import fx
from torch.distributed.fsdp import MixedPrecisionPolicy

import fxdp
from fxdp.errors import VerifierError
from fxdp.ir import redistributions
from fxdp.ir.graph.metadata import meta
from fxdp.ir.types.placements import ParamShard, R
from fxdp.passes import BucketParameters, PlaceParameters, SchedulePrefetch
from tests import faults
from tests.captures import KNOWN, captured_once
from tests.exactness.test_sharded import Words, _batch


def _shifted(gm: fx.GraphModule, *, backward: bool) -> None:
    """The second value of a bucket is cut out one element too early."""
    slices = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.slice.Tensor)
    piece = next(n for n in slices if meta(n).backward is backward and n.args[2] > 0)
    flat, dim, start, end = piece.args
    piece.args = (flat, dim, start - 1, end - 1)


def _of_a_whole_value(gm: fx.GraphModule) -> None:
    _shifted(gm, backward=False)


def _of_a_gradient(gm: fx.GraphModule) -> None:
    _shifted(gm, backward=True)


def _without_replicas(gm: fx.GraphModule) -> None:
    """Gradients are summed over the ranks that share rows, and not over those that hold equal ones."""
    node = gm.graph.find_nodes(op="call_function", target=redistributions.all_reduce_shards)[0]
    (done,) = node.users
    done.replace_all_uses_with(node.args[0])
    gm.graph.erase_node(done)
    gm.graph.erase_node(node)


@pytest.mark.parametrize("strategy", ["shard", "optimizer"])
@pytest.mark.parametrize("fault", [_of_a_whole_value, _of_a_gradient, _without_replicas])
def test_the_fault_is_seen(
    fault: Callable[[fx.GraphModule], None], strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults.after(BucketParameters, fault)(monkeypatch)
    mesh = {"dp_replicate": 2, "dp_shard": 2}
    with captured_once(KNOWN.setdefault("tests.exactness.test_sharded", {})):
        report = fxdp.verify(
            Words(), _batch(0, 9), mesh=mesh, strategy=strategy, communication={"bucket_cap_mb": 0.0005}
        )
    assert not report.ok


def _without_order(gm: fx.GraphModule) -> None:
    """A gather may start before the one that it follows."""
    start = _gather(gm, backward=False)
    start.args = (
        *start.args[:2],
        tuple(n for n in start.args[2] if n.target is not redistributions.all_gather_shards),
    )


def _without_tangent(gm: fx.GraphModule) -> None:
    """A gather of the backward may be taken for the forward's."""
    start = _gather(gm, backward=True)
    start.args = (*start.args[:2], ())


def _gather(gm: fx.GraphModule, *, backward: bool) -> fx.Node:
    """The first of a backward; the second of a forward."""
    starts = gm.graph.find_nodes(op="call_function", target=redistributions.all_gather_shards)
    return [n for n in starts if meta(n).backward is backward][not backward]


def _before_the_cast(gm: fx.GraphModule) -> None:
    """A parameter is complete when it is cast, so twice the bytes are gathered."""
    for cast in gm.graph.find_nodes(op="call_function", target=torch.ops.aten._to_copy.default):
        if isinstance(meta(cast).placement, ParamShard):
            meta(cast).placement, meta(cast).operands = R, (R,)


@pytest.mark.parametrize(
    ("step", "fault", "words"),
    [
        (SchedulePrefetch, _without_order, "may start before %all_gather_shards"),
        (SchedulePrefetch, _without_tangent, "of the backward, but depends on no tangent"),
        (PlaceParameters, _before_the_cast, r"as torch.float32, which is read as torch.bfloat16 alone"),
    ],
)
def test_what_gives_the_same_numbers_is_seen_by_the_verifier(
    step: type, fault: Callable[[fx.GraphModule], None], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Order and bytes: on virtual ranks, which run one after another, both programs give the same."""
    faults.after(step, fault)(monkeypatch)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    with pytest.raises(VerifierError, match=words):
        fxdp.plan(
            Words(),
            _batch(0, 8),
            mesh={"dp": 2},
            strategy="shard",
            communication={"bucket_cap_mb": 0.0001},
            mp_policy=policy,
        )
