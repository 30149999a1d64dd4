"""Name the reason why an op needs samples of other ranks, and a remedy for the user."""

from __future__ import annotations

from torch import fx

from fxdp.ir import redistributions
from fxdp.ir.graph.metadata import has_no_rule, meta
from fxdp.ir.types.sizes import fixed_by_data
from fxdp.ir.types.value_types import tensor_types
from fxdp.rules.registry import registry

_RELATES = "relates samples to one another"
_INHERENT = "nothing, if that is meant"

_BY_FAMILY: dict[str, tuple[str, str]] = {
    "along-dim": (
        f"{_RELATES}: it works along the batch dim",
        f"{_INHERENT}; else name the dim within a sample that it should work along",
    ),
    "reduction": (
        f"{_RELATES}: its result over the batch is no sum, maximum or minimum of the ranks' results",
        f"{_INHERENT}; else reduce within each sample",
    ),
    "counting": (
        f"{_RELATES}: it counts or searches among all samples",
        f"{_INHERENT}; else count within each sample",
    ),
    "einsum": (
        "pairs every sample with every other, so one side must be entire",
        f"{_INHERENT}, as in a contrastive loss: the smaller side travels; else multiply per sample (bmm)",
    ),
    "view": (
        "lays samples out so that no rank's part is a range of one dim",
        "keep the batch a dim of its own, the outermost if you can: view(batch, -1, ...)",
    ),
    "slice": (
        "takes rows by their number in the batch, which lie on other ranks",
        f"{_INHERENT}, as for neighbours along the batch; else slice a dim within the sample",
    ),
    "diagonal": (
        "takes elements by their number in the batch",
        f"{_INHERENT}; else build the mask per sample",
    ),
    "indexing": (
        "may read any sample's row",
        "for each sample's own rows index with torch.arange(batch), or use gather along a dim of the sample",
    ),
    "random": (
        "draws numbers that all ranks must have in common",
        f"{_INHERENT}, as for a permutation of the batch; else draw per sample: torch.rand(batch, ...)",
    ),
    "join": (
        "joins or splits values along a dim that is split over the ranks",
        f"{_INHERENT}; else join along a dim within the sample",
    ),
    "linear algebra": (
        "decomposes a matrix that spans the samples",
        f"{_INHERENT}; else decompose one matrix per sample, with the batch as a leading dim",
    ),
}
_FIXED_SIZE = "keep the size fixed: torch.where or a product with the mask, and divide by the mask's sum"
_BY_FAMILY["size by value"] = ("makes a value whose size depends on all samples", _FIXED_SIZE)
_BY_FAMILY["order of values"] = (
    "gives a sample what depends on the samples before it",
    f"{_INHERENT}; else use an op that treats samples apart: gather, or where with a mask",
)
_BY_FAMILY["batch statistics"] = (
    "computes statistics of the global batch in one op",
    "use nn.BatchNorm or torch.var_mean, which fxdp takes apart into sums",
)
_BY_FAMILY["opaque state"] = (
    "hands a workspace to its backward that only it can read",
    "build the layer from cells (nn.LSTMCell), or disable the fused backend while compiling",
)
_BY_FAMILY["gathering"] = _BY_FAMILY["indexing"]
_BY_FAMILY["embedding"] = _BY_FAMILY["indexing"]

_UNKNOWN = (
    "has no placement rule, so every rank runs it on the global batch",
    "give the op a rule with fxdp.register_rule",
)
_DATA_SIZE = ("makes or reads a value whose size only the data decides", _FIXED_SIZE)
_RETURNED = (
    "is handed out full, or along another batch dim than it was computed along",
    "return values whose first dim is the batch",
)
_SCATTERED = (
    "is a sum of what all ranks contribute to each sample, as the gradient of a value that all of them read",
    "nothing by itself: it goes when what reads the samples of all ranks in the forward goes",
)
_OTHER = (f"{_RELATES} here", f"{_INHERENT}; `fxdp explain` shows the op's operands")


def cause_and_remedy(node: fx.Node, consumer: fx.Node | None) -> tuple[str, str]:
    """Return why `consumer` needs the full value of `node` (or why `node` runs replicated), and a remedy."""
    reader = node if consumer is None else consumer
    if node.target is redistributions.reduce_scatter:
        return _SCATTERED
    if reader.op == "output":
        return _RETURNED
    if has_no_rule(reader):
        return _UNKNOWN
    near = (reader, *reader.all_input_nodes)
    if any(fixed_by_data(size) for n in near for t in tensor_types(meta(n).type) for size in t.shape):
        return _DATA_SIZE
    rule = registry.get(reader.target)
    return _OTHER if rule is None else _BY_FAMILY.get(rule.family, _OTHER)
