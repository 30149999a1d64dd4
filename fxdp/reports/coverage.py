"""Report the parts of a program that do not split over the ranks: communicated batch values, replicated ops.

A program that splits perfectly has an empty report: it exchanges only gradients and a few sums. Ops that
relate samples to one another (a contrastive loss, a sort over the batch) need more communication, and so does
an op without a placement rule, at the cost of speed but never of exactness.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from fxdp.capture.locations import Origin
from fxdp.ir import redistributions
from fxdp.ir.graph.factors import SUFFICIENT_FACTORS
from fxdp.ir.graph.graph_text import target_text
from fxdp.ir.graph.metadata import has_no_rule, is_host_size, meta, tensor_operands
from fxdp.ir.graph.signature import Input
from fxdp.ir.types.placements import Replicate, Shard
from fxdp.ir.types.sizes import B, fixed_by_data, mentions_batch
from fxdp.ir.types.value_types import NodeType, tensor_types, type_bytes
from fxdp.reports.rows import CoverageRow, format_bytes
from fxdp.reports.sheet import Sheet, Shown
from fxdp.rules.registry import registry

_FULL = ", runs replicated"


@dataclass(frozen=True, slots=True, repr=False)
class Coverage(Shown):
    """The coverage report of a plan; empty (and false) if everything splits over the ranks."""

    rows: tuple[CoverageRow, ...] = ()

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[CoverageRow]:
        return iter(self.rows)

    @property
    def bytes(self) -> int:
        """Bytes of the values that are communicated in a step."""
        return sum(row.bytes for row in self.rows if not row.what.startswith("replicated"))

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain values for JSON."""
        return {"bytes": self.bytes, "rows": [row.as_dict() for row in self.rows]}

    def __str__(self) -> str:
        if not self.rows:
            return _ALL
        return "\n".join([f"{len(self.rows)} places do not split over the ranks:", *map(str, self.rows)])

    def __repr__(self) -> str:
        return f"Coverage({f'{len(self.rows)} places do not split over the ranks' if self.rows else _ALL})"

    def sheets(self) -> tuple[Sheet, ...]:
        """Return the report as one table."""
        rows = tuple(
            ("\n".join((row.op, row.how, row.phase)), format_bytes(row.bytes),
             "\n".join((str(row.location), row.cause, row.remedy)))
            for row in self.rows
        )  # fmt: skip
        columns = ("op", "#bytes", "where, why, and what to do")
        return (Sheet(_TITLE, columns, rows, "" if rows else _ALL),)


_TITLE = "what does not split over the ranks"
_ALL = "everything splits over the ranks: of other ranks' samples each needs sums alone"


def coverage(gm: fx.GraphModule, sizes: Mapping[str, int], origin: Origin | None = None) -> Coverage:
    """Report on an EXPLICIT program at the given sizes (`B` and further symbols).

    Sizes that depend on data count as large as the batch.
    """
    behind = origin or Origin()
    rows = (
        row if origin is None else replace(row, location=behind.of(row.location)) for row in _rows(gm, sizes)
    )
    return Coverage(tuple(_merged(rows)))


def _rows(gm: fx.GraphModule, sizes: Mapping[str, int]) -> list[CoverageRow]:
    """Return one row for each communicated value, and for each replicated op that reads no such value."""
    samples = _sample_values(gm)
    nodes = {node.name: node for node in gm.graph.nodes}
    rows: list[CoverageRow] = []
    roots: dict[fx.Node, int] = {}
    needs: dict[fx.Node | None, int] = {}
    for node in gm.graph.nodes:
        if node not in samples and not _reads_full(node, samples):
            continue
        before = next((roots[s] for s in node.all_input_nodes if s in roots), None)
        found, cause = redistributions.redistribution_of(node), meta(node).cause
        if meta(node).reason == SUFFICIENT_FACTORS or (cause is not None and cause.gradient):
            continue
        if found is not None and found.communicates:
            consumer = None if cause is None else nodes.get(cause.consumer)
            roots[node] = needs[consumer] = len(rows)
            rows.append(_row(found.words, node, consumer, sizes))
        elif node.target in redistributions.REDISTRIBUTIONS:
            roots.update({node: before} if before is not None else {})
        elif _reads_full(node, samples):
            roots[node] = _count(node, needs.get(node), before, rows, sizes)
    return rows


def _count(
    node: fx.Node, own: int | None, before: int | None, rows: list[CoverageRow], sizes: Mapping[str, int]
) -> int:
    """Count a replicated op in the row of the op's own input, in an earlier op's row, or in a new row."""
    if own is not None:
        rows[own] = replace(rows[own], what=f"{rows[own].what.removesuffix(_FULL)}{_FULL}")
        return own
    if before is not None:
        rows[before] = replace(rows[before], followers=rows[before].followers + 1)
        return before
    rows.append(_row("replicated", node, node, sizes))
    return len(rows) - 1


def _sample_values(gm: fx.GraphModule) -> frozenset[fx.Node]:
    """Return the nodes that hold data of every sample: batch-sized values that depend on sharded inputs."""
    found: set[fx.Node] = set()
    for node in gm.graph.nodes:
        known = meta(node)
        given = isinstance(known.spec, Input) and isinstance(known.placement, Shard)
        if given or (any(s in found for s in node.all_input_nodes) and _varies(known.type)):
            found.add(node)
    return frozenset(found)


def _varies(type_: NodeType) -> bool:
    """Return whether a size depends on the batch or on data."""
    sizes = [n for one in tensor_types(type_) for n in one.shape]
    return any(mentions_batch(n) or fixed_by_data(n) for n in sizes)


def _reads_full(node: fx.Node, samples: frozenset[fx.Node]) -> bool:
    """Return whether every rank runs the op on all samples: operands and result are replicated."""
    known = meta(node)
    if node.op != "call_function" or node.target in redistributions.REDISTRIBUTIONS or is_host_size(node):
        return False
    if not all(isinstance(p, Replicate) or p is None for p in known.placements):
        return False
    if not known.operands:  # a `getitem`
        return any(source in samples for source in node.all_input_nodes)
    read = zip(tensor_operands(node), known.operands, strict=True)
    return any(source in samples and isinstance(wanted, Replicate) for source, wanted in read)


def _row(what: str, node: fx.Node, consumer: fx.Node | None, sizes: Mapping[str, int]) -> CoverageRow:
    cause, remedy = _cause_and_remedy(node, consumer)
    reader = node if consumer is None else consumer
    location = meta(node).location if reader.op == "output" else meta(reader).location
    op = "the result" if reader.op == "output" else meta(reader).decomposed_from or target_text(reader.target)
    phase = "backward" if meta(reader if reader.op != "output" else node).backward else "forward"
    size = type_bytes(meta(node).type, sizes, unknown=sizes[B.name])
    return CoverageRow(what, op, cause, remedy, size, location, phase)


def _merged(rows: Iterable[CoverageRow]) -> Iterable[CoverageRow]:
    """Merge rows of the same op at the same line."""
    found: dict[Any, CoverageRow] = {}
    for row in rows:
        key = (row.what, row.op, row.location, row.phase, row.cause)
        old = found.get(key)
        found[key] = (
            row
            if old is None
            else replace(
                old, bytes=old.bytes + row.bytes, count=old.count + 1, followers=old.followers + row.followers
            )
        )
    return found.values()


def replicated_ops(gm: fx.GraphModule) -> tuple[str, ...]:
    """Return the ops without a rule as `aten.foo at file:line`; they read full values on every rank."""
    unknown = [node for node in gm.graph.nodes if has_no_rule(node)]
    return tuple(f"{target_text(node.target)} at {meta(node).location}" for node in unknown)


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


def _cause_and_remedy(node: fx.Node, consumer: fx.Node | None) -> tuple[str, str]:
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
