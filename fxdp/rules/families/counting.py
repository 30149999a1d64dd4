"""Rules for counts and searches: histograms, buckets, membership.

Laws: a histogram over given bounds counts every element separately, so counts of parts add up (bounds
computed from the data do not). A search looks each value up in a full sorted sequence, or in its own row.
"""

from __future__ import annotations

from collections.abc import Iterator

from fxdp.ir.ops.library import aten, existing
from fxdp.ir.types.placements import R
from fxdp.rules.labels import by_labels, letters
from fxdp.rules.registry import Alternative, Op, rule, runs_replicated


@rule("counting", aten.histc.default, kind="contracted")
def _histogram(op: Op) -> Iterator[Alternative]:
    """Yield shards for a histogram with `min < max`, for which the counts of any split add up."""
    (x,) = op.operands
    if op.arg("min") < op.arg("max"):
        yield from by_labels(op, [(x, letters(x.ndim))], ["_"])


@rule("counting", aten.histogram.bin_ct, kind="contracted")
def _weighted_histogram(op: Op) -> Iterator[Alternative]:
    """Yield shards for a histogram with a given range, whose (weighted) counts add up without `density`."""
    if op.arg("range") and not op.arg("density"):
        yield from by_labels(op, [(o, letters(o.ndim)) for o in op.operands], ["_", R])


@rule("counting", *existing("histogram.bins_tensor"), kind="contracted")
def _histogram_over_bins(op: Op) -> Iterator[Alternative]:
    """Yield shards for a histogram with given bins, whose (weighted) counts add up without `density`."""
    if not op.arg("density"):
        counted = [op.arg("self"), op.arg("weight")]
        yield from by_labels(op, [(o, letters(o.ndim)) for o in counted if o is not None], ["_", R])


@rule("counting", aten.bucketize.Tensor, aten.isin.Tensor_Tensor)
def _looked_up(op: Op) -> Iterator[Alternative]:
    """Yield shards for each value's bucket among full boundaries, or membership in a full set."""
    x = op.operands[0]
    names = letters(x.ndim)
    yield from by_labels(op, [(x, names)], names)


# one number, searched among all values
_OF_ONE = existing("bucketize.Scalar", "searchsorted.Scalar", "isin.Scalar_Tensor")
runs_replicated("search_of_one", "counting", *_OF_ONE)


@rule("counting", aten.searchsorted.Tensor)
def _searchsorted(op: Op) -> Iterator[Alternative]:
    """Yield shards for each value's place in one full sequence, or in its own row."""
    sequence, x = op.arg("sorted_sequence"), op.arg("self")
    names = letters(x.ndim)
    if sequence.ndim == 1:
        yield from by_labels(op, [(x, names)], names)
        return
    rows = names[:-1] + "_"
    inputs = [(sequence, rows), (op.arg("sorter"), rows), (x, names)]
    yield from by_labels(op, inputs, names)
