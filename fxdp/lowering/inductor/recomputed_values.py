"""Which values of a trace the partitioner must save, and which it must compute again: `recompute=`.

A backward reads copies of what the forward computes (`passes/recompute_modules.py`). Equal ops are one to the
partitioner, so without these marks it would take the copies for the forward's values, and save them:

    emitted   %h = gelu(%x)  computed     %x = mm(..)  saved      %h_1 = gelu(%x)  computed
    traced    erf, mul, add  recompute    mm           save       the same nodes as of %h

Of the several ops that one op becomes, the last one is saved.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from fxdp.ir.notes import note
from fxdp.torch_compat import handing_on

_POLICIES = {"computed": CheckpointPolicy.MUST_RECOMPUTE, "saved": CheckpointPolicy.MUST_SAVE}
_POLICY, _REGION = "recompute", "ac_graph_id"


def marked(node: fx.Node, number: int) -> AbstractContextManager[None]:
    """Around the run of an emitted node: what is traced inside has its mark; `number` is its own, above 0."""
    policy = _POLICIES.get(note(node).again)
    if policy is None:
        return nullcontext()
    # one region for all that is computed again: between two the partitioner would save what goes over
    region = 0 if policy is CheckpointPolicy.MUST_RECOMPUTE else number
    return handing_on({_POLICY: policy, _REGION: region})


def save_results_alone(joint: fx.GraphModule) -> None:
    """Of what one saved op was traced to, let the partitioner choose freely but for the last."""
    last: dict[int, fx.Node] = {}
    for node in joint.graph.nodes:
        if node.meta.get(_POLICY) is CheckpointPolicy.MUST_SAVE and node.meta.get(_REGION):
            before = last.get(node.meta[_REGION])
            if before is not None:
                del before.meta[_POLICY]
            last[node.meta[_REGION]] = node
