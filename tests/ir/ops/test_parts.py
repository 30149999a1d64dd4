from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fxdp.ir.ops.parts import combine, join_parts, take_part
from fxdp.ir.types.placements import P, R, S

SPLITS = st.lists(st.integers(0, 4), min_size=1, max_size=5).filter(lambda sizes: sum(sizes) > 0)


def _split(value: Tensor, dim: int, outer: int, sizes: list[int]) -> list[Tensor]:
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [take_part(value, dim, outer, sum(sizes), a, n) for a, n in zip(starts, sizes, strict=True)]


@settings(deadline=None)
@given(SPLITS, st.integers(1, 3), st.integers(1, 3), st.integers(0, 2))
def test_parts_join_to_the_whole(sizes: list[int], outer: int, inner: int, dim: int) -> None:
    shape = [2, 3]
    shape.insert(dim, outer * sum(sizes) * inner)
    full = torch.arange(torch.Size(shape).numel()).view(shape)
    parts = _split(full, dim, outer, sizes)
    assert [p.shape[dim] for p in parts] == [outer * n * inner for n in sizes]
    assert torch.equal(join_parts(parts, dim, outer, sizes), full)
    assert torch.equal(combine(parts, S(dim, outer), sizes), full)


def test_a_part_holds_its_samples_for_each_outer_index() -> None:
    both = torch.tensor([0, 1, 2, 10, 11, 12])  # cat([x, 10 + x])
    assert take_part(both, 0, 2, 3, 0, 2).tolist() == [0, 1, 10, 11]
    assert take_part(both, 0, 2, 3, 2, 1).tolist() == [2, 12]


@pytest.mark.parametrize("outer", [1, 2])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_a_part_is_contiguous(dim: int, outer: int) -> None:
    """layer_norm's backward reads its statistics' memory as it lies, whatever the strides say."""
    assert take_part(torch.zeros(6, 6, 6), dim, outer, 3, 1, 1).is_contiguous()


def test_a_part_of_the_plain_batch_is_a_view() -> None:
    full = torch.zeros(6, 2)
    assert take_part(full, 0, 1, 3, 1, 1).untyped_storage().data_ptr() == full.untyped_storage().data_ptr()


def test_rows_without_elements() -> None:
    full = torch.zeros(2 * 3 * 2, 0)
    parts = _split(full, 0, 2, [2, 0, 1])
    assert join_parts(parts, 0, 2, [2, 0, 1]).shape == full.shape


def test_combine_sums_terms_and_trusts_replicas() -> None:
    values = [torch.tensor([1.0, 2.0]), torch.tensor([10.0, 20.0])]
    assert combine(values, P, [1, 1]).tolist() == [11.0, 22.0]
    assert combine(values, R, [1, 1]) is values[0]
    assert values[0].tolist() == [1.0, 2.0], "the terms are not changed"


@pytest.mark.parametrize("dtype", [torch.int64, torch.bfloat16])
def test_combine_keeps_the_dtype(dtype: torch.dtype) -> None:
    assert combine([torch.ones(2, dtype=dtype)] * 3, P, [1, 1, 1]).dtype == dtype
