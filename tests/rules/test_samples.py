"""Ops that treat samples apart (convolution, pooling, resampling, transforms) on virtual ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.rules.harness import T, check, shown

aten = torch.ops.aten
C = torch.complex128
ONE = {"S(0) -> S(0)"}
TWO = {"S(0), S(0) -> S(0)"}


def conv(n: int, *, transposed: bool = False, groups: int = 1) -> tuple[Any, ...]:
    return ([1] * n, [1] * n, [1] * n, transposed, [0] * n, groups)


def planes(n: int, *shape: Any) -> T:
    """Indices of a maximum in windows of size 2 over a plane of size 4 per dim."""
    return T(*shape, dtype=torch.int64, low=0, high=4**n)


def grid(*shape: Any) -> T:
    return T(*shape, low=-1.2, high=1.2)


CONVOLUTIONS: list[tuple[Any, tuple[Any, ...], set[str]]] = [
    (aten.convolution.default, (T("B", 2, 5), T(3, 2, 3), T(3), *conv(1)), {"S(0), R, R -> S(0)"}),
    (
        aten.convolution.default,
        (T("2*B", 2, 4, 4), T(2, 1, 3, 3), None, *conv(2, groups=2)),
        {"S(0, 2), R -> S(0, 2)"},
    ),
    (
        aten.convolution.default,
        (T("B", 2, 3, 3, 3), T(3, 2, 2, 2, 2), T(3), *conv(3)),
        {"S(0), R, R -> S(0)"},
    ),
    (
        aten.convolution.default,
        (T("B", 2, 4, 4), T(2, 3, 3, 3), T(3), *conv(2, transposed=True)),
        {"S(0), R, R -> S(0)"},
    ),
    (
        aten._convolution.default,
        (T("B", 2, 5), T(3, 2, 3), T(3), *conv(1), False, False, True, True),
        {"S(0), R, R -> S(0)"},
    ),
    (
        aten.convolution_backward.default,
        (T("B", 3, 5), T("B", 2, 5), T(3, 2, 3), [3], *conv(1), [True, True, True]),
        {"S(0), S(0), R -> S(0), P(sum), P(sum)"},
    ),
    (
        aten.convolution_backward.default,
        (T("B", 3, 4, 4), T("B", 2, 4, 4), T(3, 2, 3, 3), None, *conv(2), [False, True, False]),
        {"S(0), S(0), R -> -, P(sum), -"},
    ),
    (
        aten.convolution_backward.default,
        (T("B", 3, 4, 4), T("B", 2, 4, 4), T(2, 3, 3, 3), [3], *conv(2, transposed=True), [True, True, True]),
        {"S(0), S(0), R -> S(0), P(sum), P(sum)"},
    ),
    (
        aten.convolution_backward.default,
        (
            T("B", 2, 3, 3, 3),
            T("B", 2, 4, 4, 4),
            T(2, 1, 2, 2, 2),
            [2],
            [1] * 3,
            [0] * 3,
            [1] * 3,
            False,
            [0] * 3,
            2,
            [True, True, True],
        ),
        {"S(0), S(0), R -> S(0), P(sum), P(sum)"},
    ),
    (aten.conv_tbc.default, (T(5, "B", 2), T(3, 2, 4), T(4)), {"S(1), R, R -> S(1)"}),
]


@pytest.mark.parametrize(("target", "args", "expected"), CONVOLUTIONS, ids=shown)
def test_convolution(target: Any, args: tuple[Any, ...], expected: set[str]) -> None:
    assert check(target, *args) >= expected


POOLS: list[tuple[Any, tuple[Any, ...], set[str]]] = [
    (aten.avg_pool1d.default, (T("B", 2, 4), [2]), ONE),
    (aten.adaptive_avg_pool1d.default, (T("B", 2, 5), [2]), ONE),
    (aten.avg_pool2d.default, (T("B", 2, 4, 4), [2, 2]), ONE),
    (
        aten.avg_pool2d_backward.default,
        (T("B", 2, 2, 2), T("B", 2, 4, 4), [2, 2], [2, 2], [0, 0], False, True, None),
        TWO,
    ),
    (aten.avg_pool3d.default, (T("B", 2, 4, 4, 4), [2, 2, 2]), ONE),
    (
        aten.avg_pool3d_backward.default,
        (T("B", 1, 2, 2, 2), T("B", 1, 4, 4, 4), [2] * 3, [2] * 3, [0] * 3, False, True, None),
        TWO,
    ),
    (aten.max_pool2d_with_indices.default, (T("2*B", 2, 4, 4), [2, 2]), {"S(0, 2) -> S(0, 2), S(0, 2)"}),
    (
        aten.max_pool2d_with_indices_backward.default,
        (T("B", 2, 2, 2), T("B", 2, 4, 4), [2, 2], [2, 2], [0, 0], [1, 1], False, planes(2, "B", 2, 2, 2)),
        {"S(0), S(0), S(0) -> S(0)"},
    ),
    (aten.max_pool3d_with_indices.default, (T("B", 2, 4, 4, 4), [2, 2, 2]), {"S(0) -> S(0), S(0)"}),
    (
        aten.max_pool3d_with_indices_backward.default,
        (
            T("B", 1, 2, 2, 2),
            T("B", 1, 4, 4, 4),
            [2] * 3,
            [2] * 3,
            [0] * 3,
            [1] * 3,
            False,
            planes(3, "B", 1, 2, 2, 2),
        ),
        {"S(0), S(0), S(0) -> S(0)"},
    ),
    (aten._adaptive_avg_pool2d.default, (T("B", 2, 5, 4), [2, 2]), ONE),
    (aten._adaptive_avg_pool2d_backward.default, (T("B", 2, 2, 2), T("B", 2, 5, 4)), TWO),
    (aten._adaptive_avg_pool3d.default, (T("B", 2, 5, 4, 3), [2, 2, 2]), ONE),
    (aten._adaptive_avg_pool3d_backward.default, (T("B", 2, 2, 2, 2), T("B", 2, 5, 4, 3)), TWO),
    (aten.adaptive_max_pool2d.default, (T("B", 2, 5, 4), [2, 2]), {"S(0) -> S(0), S(0)"}),
    (
        aten.adaptive_max_pool2d_backward.default,
        (T("B", 2, 2, 2), T("B", 2, 4, 4), planes(2, "B", 2, 2, 2)),
        {"S(0), S(0), S(0) -> S(0)"},
    ),
    (aten.adaptive_max_pool3d.default, (T("B", 2, 5, 4, 3), [2, 2, 2]), {"S(0) -> S(0), S(0)"}),
    (
        aten.adaptive_max_pool3d_backward.default,
        (T("B", 2, 2, 2, 2), T("B", 2, 4, 4, 4), planes(3, "B", 2, 2, 2, 2)),
        {"S(0), S(0), S(0) -> S(0)"},
    ),
    (
        aten.fractional_max_pool2d.default,
        (T("B", 2, 5, 5), [2, 2], [3, 3], T("B", 2, 2, low=0, high=1)),
        {"S(0), S(0) -> S(0), S(0)"},
    ),
    (
        aten.fractional_max_pool2d_backward.default,
        (T("B", 2, 3, 3), T("B", 2, 4, 4), [2, 2], [3, 3], planes(2, "B", 2, 3, 3)),
        {"S(0), S(0), S(0) -> S(0)"},
    ),
    (
        aten.fractional_max_pool3d.default,
        (T("B", 2, 5, 5, 5), [2] * 3, [3] * 3, T("B", 2, 3, low=0, high=1)),
        {"S(0), S(0) -> S(0), S(0)"},
    ),
    (
        aten.fractional_max_pool3d_backward.default,
        (T("B", 2, 3, 3, 3), T("B", 2, 4, 4, 4), [2] * 3, [3] * 3, planes(3, "B", 2, 3, 3, 3)),
        {"S(0), S(0), S(0) -> S(0)"},
    ),
    (
        aten.max_unpool2d.default,
        (
            T("B", 1, 1, 2),
            T("B", 1, 1, 2, dtype=torch.int64, fill=lambda s, _: torch.arange(2).expand(s)),
            [4, 4],
        ),
        TWO,
    ),
    (
        aten.max_unpool3d.default,
        (
            T("B", 1, 1, 1, 2),
            T("B", 1, 1, 1, 2, dtype=torch.int64, fill=lambda s, _: torch.arange(2).expand(s)),
            [4] * 3,
            [2] * 3,
            [0] * 3,
        ),
        TWO,
    ),
]


@pytest.mark.parametrize(("target", "args", "expected"), POOLS, ids=shown)
def test_pooling(target: Any, args: tuple[Any, ...], expected: set[str]) -> None:
    assert check(target, *args) >= expected


RESAMPLINGS: list[tuple[Any, tuple[Any, ...], set[str]]] = [
    *(
        (getattr(aten, f"{name}{n}d").default, (T("B", 2, *[4] * n), [6] * n, *corners), ONE)
        for name, dims, corners in (
            ("upsample_nearest", (1, 2, 3), ()),
            ("_upsample_nearest_exact", (1, 2, 3), ()),
            ("upsample_linear", (1,), (False,)),
            ("upsample_bilinear", (2,), (True,)),
            ("upsample_bicubic", (2,), (False,)),
            ("upsample_trilinear", (3,), (False,)),
        )
        for n in dims
    ),
    *(
        (
            getattr(aten, f"{name}{n}d_backward").default,
            (T("B", 2, *[6] * n), [6] * n, ["B", 2, *[4] * n], *corners),
            ONE,
        )
        for name, dims, corners in (
            ("upsample_nearest", (1, 2, 3), ()),
            ("_upsample_nearest_exact", (1, 2, 3), ()),
            ("upsample_linear", (1,), (False,)),
            ("upsample_bilinear", (2,), (True,)),
            ("upsample_bicubic", (2,), (False,)),
            ("upsample_trilinear", (3,), (False,)),
        )
        for n in dims
    ),
    (aten._upsample_bilinear2d_aa.default, (T("B", 2, 4, 4), [3, 3], False), ONE),
    (aten._upsample_bilinear2d_aa_backward.default, (T("B", 2, 3, 3), [3, 3], ["B", 2, 4, 4], False), ONE),
    (aten._upsample_bicubic2d_aa.default, (T("B", 2, 4, 4), [3, 3], False), ONE),
    (aten._upsample_bicubic2d_aa_backward.default, (T("B", 2, 3, 3), [3, 3], ["B", 2, 4, 4], False), ONE),
    (aten.upsample_nearest2d.vec, (T("B", 2, 4, 4), None, [2.0, 2.0]), ONE),
    (aten.upsample_bilinear2d.vec, (T("B", 2, 4, 4), [6, 6], False, None), ONE),
    *(
        (getattr(aten, f"{kind}_pad{n}d").default, (T("B", 2, *[4] * n), [1, 2] * n), ONE)
        for kind in ("reflection", "replication")
        for n in (1, 2, 3)
    ),
    *(
        (
            getattr(aten, f"{kind}_pad{n}d_backward").default,
            (T("B", 2, *[7] * n), T("B", 2, *[4] * n), [1, 2] * n),
            TWO,
        )
        for kind in ("reflection", "replication")
        for n in (1, 2, 3)
    ),
    (aten.constant_pad_nd.default, (T("B", 3, 4), [1, 1, 0, 0]), {*ONE, "P(sum) -> P(sum)"}),
    (aten.constant_pad_nd.default, (T(2, "B", 4), [1, -1], 3.0), {"S(1) -> S(1)"}),
    (aten.pixel_shuffle.default, (T("B", 2, 4, 3, 3), 2), ONE),
    (aten.pixel_unshuffle.default, (T("B", 1, 4, 4), 2), ONE),
    (aten.channel_shuffle.default, (T("B", 4, 3, 3), 2), ONE),
    (aten.native_channel_shuffle.default, (T("B", 4, 3, 3), 2), ONE),
    (aten.im2col.default, (T("B", 2, 4, 4), [2, 2], [1, 1], [0, 0], [2, 2]), ONE),
    (aten.col2im.default, (T("B", 8, 4), [4, 4], [2, 2], [1, 1], [0, 0], [2, 2]), ONE),
    (aten.grid_sampler_2d.default, (T("B", 2, 4, 4), grid("B", 3, 3, 2), 0, 0, False), TWO),
    (
        aten.grid_sampler_2d_backward.default,
        (T("B", 2, 3, 3), T("B", 2, 4, 4), grid("B", 3, 3, 2), 0, 0, False, [True, True]),
        {"S(0), S(0), S(0) -> S(0), S(0)"},
    ),
    (aten.grid_sampler_3d.default, (T("B", 2, 4, 4, 4), grid("B", 3, 3, 3, 3), 0, 0, False), TWO),
    (
        aten.grid_sampler_3d_backward.default,
        (T("B", 2, 3, 3, 3), T("B", 2, 4, 4, 4), grid("B", 3, 3, 3, 3), 0, 0, False, [True, True]),
        {"S(0), S(0), S(0) -> S(0), S(0)"},
    ),
    (aten.affine_grid_generator.default, (T("B", 2, 3), ["B", 1, 3, 4], False), ONE),
]


@pytest.mark.parametrize(("target", "args", "expected"), RESAMPLINGS, ids=shown)
def test_resampling(target: Any, args: tuple[Any, ...], expected: set[str]) -> None:
    assert check(target, *args) >= expected


TRANSFORMS: list[tuple[Any, tuple[Any, ...], set[str]]] = [
    (aten._fft_c2c.default, (T("B", 4, 3, dtype=C), [1, 2], 0, True), {*ONE, "P(sum) -> P(sum)"}),
    (aten._fft_r2c.default, (T(4, "B"), [0], 0, True), {"S(1) -> S(1)"}),
    (aten._fft_c2r.default, (T("B", 3, dtype=C), [1], 0, 4), ONE),
]


@pytest.mark.parametrize(("target", "args", "expected"), TRANSFORMS, ids=shown)
def test_transform(target: Any, args: tuple[Any, ...], expected: set[str]) -> None:
    assert check(target, *args) >= expected


def test_a_transform_over_the_batch_needs_all_of_it() -> None:
    assert check(aten._fft_c2c.default, T("B", dtype=C), [0], 0, True) == {"P(sum) -> P(sum)"}


def test_padding_the_batch_needs_all_of_it() -> None:
    assert check(aten.constant_pad_nd.default, T("B", 2), [0, 0, 1, 0]) == {"P(sum) -> P(sum)"}


def test_one_sample_without_a_batch_dim_is_no_batch() -> None:
    """Channels could be split over ranks in part of these ops, but an empty plane is refused by torch."""
    assert check(aten.avg_pool2d.default, T("B", 4, 4), [2, 2]) == frozenset()
    assert check(aten.reflection_pad1d.default, T("B", 4), [1, 1]) == frozenset()
