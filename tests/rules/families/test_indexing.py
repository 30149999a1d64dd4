"""Embedding, gather, scatter, advanced indexing and searches on virtual ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fxdp.ir.types.placements import Dim
from tests.rules.harness import T, check, shown

aten = torch.ops.aten


def rows(*shape: Any, below: Dim = 3, **options: Any) -> T:
    return T(*shape, dtype=torch.int64, low=0, high=below, **options)


def own(*shape: Any, iota: int = 0) -> T:
    return T(*shape, dtype=torch.int64, iota=iota)


def distinct(*shape: Any) -> T:
    """Positions that differ along dim 0, so that writes do not collide."""
    return T(
        *shape,
        dtype=torch.int64,
        fill=lambda size, _: torch.arange(size[0]).view(-1, *[1] * (len(size) - 1)).expand(size),
    )


CASES: list[tuple[Any, tuple[Any, ...], set[str]]] = [
    (aten.embedding.default, (T(5, 2), rows("B", 3)), {"R, S(0) -> S(0)", "P(sum), R -> P(sum)"}),
    (aten.embedding.default, (T(5, 2), rows(3, "2*B"), 1), {"R, S(1) -> S(1)", "R, S(1, 2) -> S(1, 2)"}),
    (
        aten.embedding_dense_backward.default,
        (T("B", 3, 2), rows("B", 3), 5, 1, False),
        {"S(0), S(0) -> P(sum)"},
    ),
    (aten.embedding_dense_backward.default, (T(9, 2), rows(9), 3, -1, False), {"P(sum), R -> P(sum)"}),
    (aten.gather.default, (T("B", 4), 1, rows("B", 2)), {"S(0), S(0) -> S(0)", "P(sum), R -> P(sum)"}),
    (aten.gather.default, (T(4, 3), 0, rows("B", 2)), {"R, S(0) -> S(0)"}),
    (aten.gather.default, (T("B", 3), 0, own("B", 2)), {"S(0), S(0) -> S(0)"}),
    (aten.scatter.src, (T("B", 3), 1, rows("B", 1), T("B", 1)), {"S(0), S(0), S(0) -> S(0)"}),
    (aten.scatter.src, (T("B", 3), 0, own("B", 2), T("B", 2)), {"S(0), S(0), S(0) -> S(0)"}),
    (aten.scatter.value, (T("B", 3), 1, rows("B", 1), 1.0), {"S(0), S(0) -> S(0)"}),
    (aten.scatter_add.default, (T("B", 3), 1, rows("B", 4), T("B", 4)), {"S(0), S(0), S(0) -> S(0)"}),
    (
        aten.scatter_add.default,
        (T(3, 2), 0, rows("B", 2), T("B", 2)),
        {"P(sum), S(0), S(0) -> P(sum)", "P(sum), R, P(sum) -> P(sum)"},
    ),
    (aten.index_select.default, (T("B", 4), 1, rows(2)), {"S(0), R -> S(0)", "P(sum), R -> P(sum)"}),
    (aten.index_select.default, (T(2, 4), 1, rows("B")), {"R, S(0) -> S(1)"}),
    (aten.index_select.default, (T(2, "B"), 1, own("B")), {"S(1), S(0) -> S(1)"}),
    (aten.index_add.default, (T("B", 3), 1, rows(4), T("B", 4)), {"S(0), R, S(0) -> S(0)"}),
    (
        aten.index_add.default,
        (T(2, 3), 1, rows("B"), T(2, "B")),
        {"P(sum), S(0), S(1) -> P(sum)", "P(sum), R, P(sum) -> P(sum)"},
    ),
    (aten.index_add.default, (T("B", 3), 0, own("B"), T("B", 3)), {"S(0), S(0), S(0) -> S(0)"}),
    (aten.index_copy.default, (T("B", 3), 1, distinct(2), T("B", 2)), {"S(0), R, S(0) -> S(0)"}),
    (aten.index_copy.default, (T("B", 3), 0, own("B"), T("B", 3)), {"S(0), S(0), S(0) -> S(0)"}),
    (aten.index_reduce.default, (T("B", 3), 1, rows(4), T("B", 4), "amax"), {"S(0), R, S(0) -> S(0)"}),
    (aten.index_fill.int_Scalar, (T("B", 3), 1, rows(2), 7.0), {"S(0), R -> S(0)"}),
    (aten.index_fill.int_Scalar, (T("B", 3), 0, own("B"), 7.0), {"S(0), S(0) -> S(0)"}),
    (aten.index_fill.int_Tensor, (T(2, "B"), 0, rows(1, below=2), T()), {"S(1), R, R -> S(1)"}),
    (aten.take.default, (T(2, 3), rows("B", 2)), {"R, S(0) -> S(0)", "P(sum), R -> P(sum)"}),
    (aten.put.default, (T(2, 3), rows("B", 2), T("B", 2), True), {"P(sum), S(0), S(0) -> P(sum)"}),
    (aten.index.Tensor, (T(4, 3), [rows("B", 2)]), {"R, S(0) -> S(0)", "P(sum), R -> P(sum)"}),
    (aten.index.Tensor, (T("B", 4), [None, rows(2)]), {"S(0), R -> S(0)"}),
    (aten.index.Tensor, (T(3, "B", 4), [rows(2), None, rows(2, 1)]), {"S(1), R, R -> S(2)"}),
    (aten.index.Tensor, (T(5, 3, "B", 4), [None, rows(2), None, rows(1)]), {"S(2), R, R -> S(2)"}),
    (
        aten.index.Tensor,
        (T(5, 3, 4, "B"), [None, rows("B", 1), rows(2)]),
        {"R, S(0), R -> S(1)", "S(3), R, R -> S(3)"},
    ),
    (
        aten.index.Tensor,
        (T("B", 4), [own("B"), rows("B")]),
        {"S(0), S(0), S(0) -> S(0)", "R, S(0), S(0) -> S(0)"},
    ),
    (
        aten.index.Tensor,
        (T("B", 4, 3), [own("B", 1, 1), rows(2, 3)]),
        {"S(0), S(0), R -> S(0)"},
    ),
    (
        aten.index.Tensor,
        (T("B", "B"), [own("B"), own("B")]),
        {"S(0), S(0), S(0) -> S(0)", "S(1), S(0), S(0) -> S(0)"},
    ),
    (aten.index.Tensor, (T(4, 2, "B"), [rows(3, 1), None, own(3, "B", iota=1)]), {"S(2), R, S(1) -> S(1)"}),
    (aten._unsafe_index.Tensor, (T("B", 4), [None, rows(2)]), {"S(0), R -> S(0)"}),
    (aten.index_put.default, (T("B", 4), [None, distinct(2)], T("B", 2)), {"S(0), R, S(0) -> S(0)"}),
    (aten.index_put.default, (T("B", 4), [None, distinct(2)], T(2)), {"S(0), R, R -> S(0)"}),
    (
        aten.index_put.default,
        (T(3, 2), [rows("B")], T("B", 2), True),
        {"P(sum), S(0), S(0) -> P(sum)", "P(sum), R, P(sum) -> P(sum)"},
    ),
    (aten.index_put.default, (T(3, 2), [rows("B")], T(2), True), {"P(sum), S(0), R -> P(sum)"}),
    (
        aten.index_put.default,
        (T("B", 4, 3), [own("B", 1), distinct(2)], T("B", 2, 3)),
        {"S(0), S(0), R, S(0) -> S(0)"},
    ),
    (
        aten.index_put.default,
        (T("B", 4), [own("B"), rows("B")], T("B"), True),
        {"S(0), S(0), S(0), S(0) -> S(0)", "P(sum), S(0), S(0), S(0) -> P(sum)"},
    ),
    (aten.index_put.default, (T("B", 4), [T("B", 4, dtype=torch.bool)], T()), {"S(0), S(0), R -> S(0)"}),
    (
        aten.index_put.default,
        (T(2, "B", 4), [None, T("B", dtype=torch.bool)], T(1, 1)),
        {"S(1), S(0), R -> S(1)"},
    ),
    (aten._unsafe_index_put.default, (T(3), [rows("B")], T("B"), True), {"P(sum), S(0), S(0) -> P(sum)"}),
    (aten.bucketize.Tensor, (T("B", 3), T(4, fill=lambda *_: torch.arange(4.0))), {"S(0), R -> S(0)"}),
    (aten.searchsorted.Tensor, (T(4, fill=lambda *_: torch.arange(4.0)), T("B", 3)), {"R, S(0) -> S(0)"}),
    (aten.isin.Tensor_Tensor, (rows("B", 2, below=9), rows(4, below=9)), {"S(0), R -> S(0)"}),
    (aten.histc.default, (T("B", 3), 5, -1.0, 1.0), {"S(0) -> P(sum)"}),
]


@pytest.mark.parametrize(("target", "args", "expected"), CASES, ids=shown)
def test_positions(target: Any, args: tuple[Any, ...], expected: set[str]) -> None:
    assert check(target, *args) >= expected


def test_scatter_reduce_sums_into_a_partial_result() -> None:
    found = check(aten.scatter_reduce.two, T(3), 0, rows("B"), T("B"), "sum")
    assert "P(sum), S(0), S(0) -> P(sum)" in found
    assert check(aten.scatter_reduce.two, T(3), 0, rows("B"), T("B"), "amax") == frozenset()
    assert (
        check(aten.scatter_reduce.two, T(3), 0, rows("B"), T("B"), "sum", include_self=False) == frozenset()
    )
    found = check(aten.scatter_reduce.two, T("B", 3), 1, rows("B", 4), T("B", 4), "amax", include_self=False)
    assert "S(0), S(0), S(0) -> S(0)" in found


def test_scatter_with_a_reduction() -> None:
    found = check(aten.scatter.reduce, T("B", 3), 1, rows("B", 4), T("B", 4), reduce="add")
    assert "S(0), S(0), S(0) -> S(0)" in found
    found = check(aten.scatter.value_reduce, T("B", 3), 1, rows("B", 2), 2.0, reduce="multiply")
    assert "S(0), S(0) -> S(0)" in found


def test_rows_divided_by_their_frequency_need_all_indices() -> None:
    target = aten.embedding_dense_backward.default
    assert check(target, T("B", 2), rows("B"), 5, -1, True) == {"P(sum), R -> P(sum)"}


def test_a_sum_is_not_moved_past_an_op_that_makes_it_larger() -> None:
    target = aten.embedding_dense_backward.default
    assert check(target, T(2, 2), rows(2), 50, -1, False) == frozenset()


def test_sizes_that_differ_stay_whole() -> None:
    assert check(aten.gather.default, T("2*B", 4), 1, rows("B", 2)) == {"P(sum), R -> P(sum)"}
    assert check(aten.scatter.value, T("2*B", 3), 1, rows("B", 1), 1.0) == frozenset()


def test_masks_have_no_fixed_size() -> None:
    target = aten.index_put.default
    assert check(target, T("B", 4), [T("B", dtype=torch.bool)], T(4)) == frozenset()


def test_search_in_each_row() -> None:
    table = T("B", 4, fill=lambda size, _: torch.arange(4.0).expand(size))
    assert check(aten.searchsorted.Tensor, table, T("B", 3)) == {"S(0), S(0) -> S(0)"}
    order = T("B", 4, dtype=torch.int64, fill=lambda size, _: torch.arange(4).expand(size))
    assert check(aten.searchsorted.Tensor, table, T("B", 3), sorter=order) == {"S(0), S(0), S(0) -> S(0)"}


def test_bounds_from_the_data_need_all_of_it() -> None:
    assert check(aten.histc.default, T("B", 3), 5) == frozenset()
    assert check(aten.histogram.bin_ct, T("B"), 5) == frozenset()


def test_histogram_over_a_given_range() -> None:
    assert check(aten.histogram.bin_ct, T("B", 3), 5, range=[-1.0, 1.0]) == {"S(0) -> P(sum), R"}
    weighted = check(aten.histogram.bin_ct, T("B"), 5, range=[-1.0, 1.0], weight=T("B"))
    assert weighted == {"S(0), S(0) -> P(sum), R"}
    assert check(aten.histogram.bin_ct, T("B"), 5, range=[-1.0, 1.0], density=True) == frozenset()


def test_the_position_dim_of_size_b_only() -> None:
    """`arange(B)` into a dim of size `2*B` does not read the rank's own rows."""
    assert check(aten.index.Tensor, T("2*B", 4), [own("B")]) == {"R, S(0) -> S(0)", "P(sum), R -> P(sum)"}
