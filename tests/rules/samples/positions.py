"""Reads and writes at positions: tables, gather and scatter, advanced indexing."""

from __future__ import annotations

from typing import Any

import torch

from fxdp.ir.types.placements import Dim
from fxdp.rules.proof.samples import Sample as T
from tests.rules.samples.draw import Call, Draw, Maker, call

I64 = torch.int64


def own(*shape: Dim | str, iota: int = 0) -> T:
    """Each sample's own row."""
    return T(*shape, dtype=I64, iota=iota)


def distinct(*shape: Dim | str) -> T:
    """Positions that differ along dim 0, so that writes do not collide."""
    return T(
        *shape,
        dtype=I64,
        fill=lambda size, _: torch.arange(size[0]).view(-1, *[1] * (len(size) - 1)).expand(size),
    )


def _gather(g: Draw) -> Call:
    return g.one(
        [
            call(g.t("N4"), 1, g.ints("Na")),
            call(g.t("4a"), 0, g.ints("Na")),
            call(g.t("B"), 0, own("B")),
            call(T("B", 3), 0, own("B", 2)),
            call(T("2*B", 3), 0, own("2*B", 2)),
            call(g.t("aN4"), -1, g.ints("aN2")),
        ]
    )


def _scatter(*rest: Any, source: bool = True, **kwargs: Any) -> Maker:
    def make(g: Draw) -> Call:
        target, dim, index, value = g.one(
            [
                (g.t("N4"), 1, g.ints("N1"), g.t("N1")),
                (T("B", 3), 0, own("B", 2), T("B", 2)),
                (g.t("aN4"), 2, g.ints("aN1"), g.t("aN1")),
            ]
        )
        return call(target, dim, index, *([value] if source else []), *rest, **kwargs)

    return make


def _adding(*rest: Any, **kwargs: Any) -> Maker:
    def make(g: Draw) -> Call:
        target, dim, index, value = g.one(
            [
                (g.t("N3"), 1, g.ints("N4"), g.t("N4")),
                (g.t("3a"), 0, g.ints("Na"), g.t("Na")),
                (T("B", 3), 0, own("B", 2), T("B", 2)),
            ]
        )
        return call(target, dim, index, value, *rest, **kwargs)

    return make


def _index_select(g: Draw) -> Call:
    return g.one(
        [
            call(g.t("N4"), 1, g.ints("a")),
            call(g.t("a4"), 1, g.ints("N")),
            call(g.t("a", "B"), 1, own("B")),
            call(g.t("a", "2*B"), 1, own("2*B")),
        ]
    )


def _index_write(*rest: Any, add: bool = False, value: bool = True) -> Maker:
    def make(g: Draw) -> Call:
        forms = [
            (g.t("N3"), 1, distinct(2), g.t("N2")),
            (T("B", 3), 0, own("B"), T("B", 3)),
            (T("3*B", 3), 0, own("3*B"), T("3*B", 3)),
        ]
        if add:
            forms.append((g.t("a3"), 1, g.ints("N"), g.t("aN")))
        target, dim, index, source = g.one(forms)
        return call(target, dim, index, *([source] if value else []), *rest)

    return make


def _index(g: Draw) -> Call:
    return g.one(
        [
            call(g.t("4a"), [g.ints("Nb")]),
            call(g.t("N4"), [None, g.ints("a")]),
            call(T(3, "B", 4), [g.ints("2"), None, g.ints("21")]),
            call(T(5, 3, 4, "B"), [None, T("B", 1, dtype=I64, low=0, high=3), g.ints("2")]),
            call(T("B", 4), [own("B"), T("B", dtype=I64, low=0, high=3)]),
            call(T("2*B", 4), [own("2*B"), T("2*B", dtype=I64, low=0, high=3)]),
            call(T("B", "B"), [own("B"), own("B")]),
            call(T(4, 2, "B"), [g.ints("31"), None, own(3, "B", iota=1)]),
        ]
    )


def _index_by_masks_too(g: Draw) -> Call:
    return g.one(
        [
            _index(g),
            call(T("B", 3, 2), [first_of("B", 3)]),
            call(T(4, "B"), [None, each("B")]),
            call(T("B", 2), [None, T(2, dtype=torch.bool, fill=_all)]),
        ]
    )


def _index_put(g: Draw) -> Call:
    rows = T("B", dtype=I64, low=0, high=3)
    return g.one(
        [
            call(g.t("N4"), [None, distinct(2)], g.t("N2")),
            call(T("B", 3, 2), [first_of("B", 3)], T("B", 2), g.one([True, False])),
            call(T(4, "B"), [None, each("B")], T(4, "B")),
            call(g.t("34"), [g.ints("N")], g.t("N4"), True),
            call(g.t("34"), [g.ints("N")], g.t("4"), True),
            call(T("B", 4, 3), [own("B", 1), distinct(2)], T("B", 2, 3)),
            call(T("B", 4), [own("B"), rows], T("B"), True),
            call(g.t("aN4"), [None, g.mask("N")], T(1, 1)),
        ]
    )


def _masked_index(g: Draw, put: bool) -> Call:
    x, rows = g.t("N4"), T(2, dtype=I64, low=0, high=4)
    return call(x, g.mask("N2"), [None, rows], g.t("N2")) if put else call(x, g.mask("N2"), [None, rows], 0.0)


def _embedding_backward(g: Draw) -> Call:
    labels, rows = (
        g.dims(1, 2),
        g.one([3, 5]),
    )  # with a row beyond the last one torch writes beyond its memory
    return call(g.t(labels + "c"), g.ints(labels, rows), rows, g.one([-1, 1]), g.one([False, False, True]))


def _all(size: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    return torch.ones(size)


def each(*shape: Dim | str, dtype: torch.dtype = torch.bool) -> T:
    """A mask that selects each sample, or a length of 1 for each."""
    return T(*shape, dtype=dtype, fill=_all, selects=True)


def first_of(*shape: Dim | str) -> T:
    """A mask that selects one element of each sample."""
    first = torch.arange(100).eq(1)
    return T(*shape, dtype=torch.bool, fill=lambda size, _: first[: size[1]].expand(size), selects=True)


def starts(*shape: Dim | str, each: int) -> T:
    """Bags of `each` rows."""
    return T(*shape, dtype=I64, fill=lambda size, _: torch.arange(size[0]) * each)


def _bags(g: Draw) -> Call:
    """Bags of two; only their table is linear."""
    mode = g.one([0, 1, 2])
    return call(g.t("5c"), T("2*B", dtype=I64, low=0, high=5), starts("B", each=2), False, mode)


def _bag_state() -> tuple[T, T, T]:
    """Indices, the bag of each, and the bags' sizes."""
    bag_of = T("2*B", dtype=I64, fill=lambda size, _: torch.arange(size[0]) // 2)
    return T("2*B", dtype=I64, low=0, high=5), bag_of, T("B", dtype=I64, low=2, high=3)


def _bags_backward(g: Draw) -> Call:
    indices, bag_of, bag_size = _bag_state()
    weights = g.one([None, T("2*B")])
    mode = 0 if weights is not None else g.one([0, 1])
    return call(T("B", 3), indices, bag_of, bag_size, T(0, dtype=I64), 5, False, mode, weights)


def _bags_whole_backward(g: Draw) -> Call:
    indices, bag_of, bag_size = _bag_state()
    maximum = T(0, dtype=I64)
    return call(T("B", 3), indices, starts("B", each=2), bag_of, bag_size, maximum, 5, False, 0, False, None)


def _bag_weights_backward(g: Draw) -> Call:
    indices, bag_of, _ = _bag_state()
    return call(T("B", 3), T(5, 3), indices, starts("B", each=2), bag_of, 0)


def _segments(g: Draw) -> tuple[T, dict[str, Any]]:
    """Rows, and one for each segment: of samples, a rank's part ends where a segment does."""
    lengths = T("B", dtype=I64, counts=True, fill=lambda size, _: torch.ones(size))
    return T("B", 3), {"lengths": lengths, "axis": 0, "initial": g.one([0, 2])}


def _segment_reduce(g: Draw) -> Call:
    rows, options = _segments(g)
    return call(rows, g.one(["sum", "mean", "max"]), **options)


def _segment_reduce_backward(g: Draw) -> Call:
    rows, options = _segments(g)
    return call(T("B", 3), T("B", 3), rows, g.one(["sum", "mean"]), **options)


SAMPLES: dict[str, Maker] = {
    "segment_reduce": _segment_reduce,
    "_segment_reduce_backward": _segment_reduce_backward,
    **dict.fromkeys(("_embedding_bag", "_embedding_bag_forward_only"), _bags),
    "_embedding_bag_dense_backward": _bags_backward,
    "_embedding_bag_backward": _bags_whole_backward,
    "_embedding_bag_per_sample_weights_backward": _bag_weights_backward,
    "masked_scatter": lambda g: call(g.t("N3"), g.mask("N3"), T(100)),
    "masked_scatter_backward": lambda g: call(T("B", 3), T("B", 3, dtype=torch.bool, fill=_all), ["3*B"]),
    "nonzero": lambda g: call(g.one([each("B"), each(1, "B"), first_of("B", 3)])),
    "nonzero_static": lambda g: call(g.t("N3"), size=4),
    "masked_select": lambda g: g.one([call(g.t("N3"), first_of("B", 3)), call(T("B", 3), first_of("B", 3))]),
    **dict.fromkeys(("_unique", "_unique2", "unique_consecutive"), lambda g: call(distinct("B"))),
    **dict.fromkeys(("unique_dim", "unique_dim_consecutive"), lambda g: call(distinct("B", 2), 0)),
    "repeat_interleave.Tensor": lambda g: call(each("B", dtype=I64)),
    "embedding": lambda g: call(g.t("5c"), g.ints(g.dims(1, 3), 5), g.one([-1, 1])),
    "embedding_dense_backward": _embedding_backward,
    "fxdp.sparse_rows": lambda g: call(T("B", 3), T("B", dtype=I64, low=0, high=5), 5, g.one([-1, 1])),
    "embedding_renorm": lambda g: call(g.t("5c"), g.ints("N", 5), 0.5, 2.0),
    "gather": _gather,
    "scatter.src": _scatter(),
    "scatter.value": _scatter(1.5, source=False),
    "scatter.reduce": _scatter(reduce="add"),
    "scatter.value_reduce": _scatter(2.0, source=False, reduce="multiply"),
    "scatter_add": _adding(),
    "scatter_reduce.two": lambda g: _adding(g.one(["sum", "amax", "prod"]), include_self=g.flag())(g),
    "index_select": _index_select,
    "index_add": _index_write(add=True),
    "index_copy": _index_write(),
    "index_reduce": _index_write("amax"),
    "index_fill.int_Scalar": _index_write(7.0, value=False),
    "index_fill.int_Tensor": lambda g: _index_write(g.t(""), value=False)(g),
    "take": lambda g: call(g.t("a3"), g.ints("Nb")),
    "put": lambda g: call(g.t("a3"), g.ints("Nb"), g.t("Nb"), True),
    "index.Tensor": _index_by_masks_too,
    "_unsafe_index.Tensor": _index,
    **dict.fromkeys(("index_put", "_unsafe_index_put"), _index_put),
    "_unsafe_masked_index": lambda g: _masked_index(g, False),
    "_unsafe_masked_index_put_accumulate": lambda g: _masked_index(g, True),
}
