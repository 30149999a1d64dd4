"""Pooling, resizing, padding, windows and grids."""

from __future__ import annotations

from typing import Any

import torch

from tests.rules.samples.draw import Call, Draw, Maker, call, sizes


def _indices(g: Draw, dims: str, n: int) -> Any:
    """Positions in a plane of size 4 per dim."""
    return g.ints(dims, 4**n)


def _pool(n: int, *rest: Any) -> Maker:
    return lambda g: call(g.t("Nc" + "4" * n), *rest)


def _pool_backward(n: int, indexed: bool = False, region_windows: bool = True) -> Maker:
    def make(g: Draw) -> Call:
        small, large = "Nc" + "2" * n, "Nc" + "4" * n
        args: list[Any] = [g.t(small), g.t(large)]
        if indexed:
            spans = [[2] * n, [2] * n, [0] * n, [1] * n, False] if region_windows else []
            return call(*args, *spans, _indices(g, small, n))
        return call(*args, *([[2] * n, [2] * n, [0] * n, False, True, None] if region_windows else []))

    return make


def _fractional(n: int) -> Maker:
    return lambda g: call(g.t("Nc" + "5" * n), [2] * n, [3] * n, g.t(f"Nc{n}", low=0, high=1))


def _fractional_backward(n: int) -> Maker:
    def make(g: Draw) -> Call:
        small, large = "Nc" + "3" * n, "Nc" + "4" * n
        return call(g.t(small), g.t(large), [2] * n, [3] * n, _indices(g, small, n))

    return make


def _unpool(n: int, *rest: Any) -> Maker:
    def make(g: Draw) -> Call:
        dims = "Nc" + "1" * (n - 1) + "2"
        where = g.t(dims, dtype=torch.int64, fill=lambda size, _: torch.arange(2).expand(size))
        return call(g.t(dims), where, [4] * n, *rest)

    return make


_SAMPLED: tuple[tuple[str, tuple[int, ...], bool], ...] = (
    ("upsample_nearest", (1, 2, 3), False),
    ("_upsample_nearest_exact", (1, 2, 3), False),
    ("upsample_linear", (1,), True),
    ("upsample_bilinear", (2,), True),
    ("upsample_bicubic", (2,), True),
    ("upsample_trilinear", (3,), True),
)


def _corners(g: Draw, has: bool) -> list[bool]:
    return [g.flag()] if has else []


def _upsample(n: int, corners: bool) -> Maker:
    return lambda g: call(g.t("Nc" + "4" * n), [g.one([3, 6])] * n, *_corners(g, corners))


def _upsample_vec(n: int, corners: bool) -> Maker:
    def make(g: Draw) -> Call:
        size, scale = g.one([([6] * n, None), (None, [2.0] * n)])
        return call(g.t("Nc" + "4" * n), size, *_corners(g, corners), scale)

    return make


def _upsample_backward(n: int, corners: bool) -> Maker:
    def make(g: Draw) -> Call:
        x = g.t("Nc" + "4" * n)
        return call(g.t("Nc" + "6" * n), [6] * n, sizes(x), *_corners(g, corners))

    return make


def _upsampling() -> dict[str, Maker]:
    found: dict[str, Maker] = {}
    for name, dims, corners in _SAMPLED:
        for n in dims:
            found[f"{name}{n}d"] = _upsample(n, corners)
            found[f"{name}{n}d.vec"] = _upsample_vec(n, corners)
            found[f"{name}{n}d_backward"] = _upsample_backward(n, corners)
    for name in ("_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa", "_upsample_lanczos2d_aa"):
        found[name] = _upsample(2, True)
        found[f"{name}_backward"] = _upsample_backward(2, True)
    return found


def _padding() -> dict[str, Maker]:
    found: dict[str, Maker] = {}
    for kind in ("reflection", "replication"):
        for n in (1, 2, 3):
            found[f"{kind}_pad{n}d"] = _pool(n, [1, 2] * n)
            found[f"{kind}_pad{n}d_backward"] = lambda g, n=n: call(  # type: ignore[misc]
                g.t("Nc" + "7" * n), g.t("Nc" + "4" * n), [1, 2] * n
            )
    return found


def _constant_pad(g: Draw) -> Call:
    pad = g.one([[1, 1], [1, 0, 0, 0], [0, 2, 0, 0], [0, 0, 1, 1]])
    return call(g.t(g.one(["N34", "aN4"])), pad, g.one([0, 1.5]))


def _grid(g: Draw, dims: str) -> Any:
    return g.t(dims, low=-1.2, high=1.2)


def _sampler(n: int, backward: bool) -> Maker:
    def make(g: Draw) -> Call:
        grad = [g.t("Nc" + "3" * n)] if backward else []
        grid = _grid(g, "N" + "3" * n + str(n))
        mode = (g.one([0, 1]), g.one([0, 1]), g.flag())
        return call(*grad, g.t("Nc" + "4" * n), grid, *mode, *([[True, True]] if backward else []))

    return make


SAMPLES: dict[str, Maker] = {
    "avg_pool1d": _pool(1, [2]),
    "adaptive_avg_pool1d": _pool(1, [3]),
    "avg_pool2d": _pool(2, [2, 2]),
    "avg_pool2d_backward": _pool_backward(2),
    "avg_pool3d": _pool(3, [2, 2, 2]),
    "avg_pool3d_backward": _pool_backward(3),
    "max_pool2d_with_indices": _pool(2, [2, 2]),
    "max_pool2d_with_indices_backward": _pool_backward(2, indexed=True),
    "max_pool3d_with_indices": _pool(3, [2, 2, 2]),
    "max_pool3d_with_indices_backward": _pool_backward(3, indexed=True),
    "_adaptive_avg_pool2d": _pool(2, [3, 2]),
    "_adaptive_avg_pool2d_backward": _pool_backward(2, region_windows=False),
    "_adaptive_avg_pool3d": _pool(3, [3, 2, 2]),
    "_adaptive_avg_pool3d_backward": _pool_backward(3, region_windows=False),
    "adaptive_max_pool2d": _pool(2, [3, 2]),
    "adaptive_max_pool2d_backward": _pool_backward(2, indexed=True, region_windows=False),
    "adaptive_max_pool3d": _pool(3, [3, 2, 2]),
    "adaptive_max_pool3d_backward": _pool_backward(3, indexed=True, region_windows=False),
    "fractional_max_pool2d": _fractional(2),
    "fractional_max_pool2d_backward": _fractional_backward(2),
    "fractional_max_pool3d": _fractional(3),
    "fractional_max_pool3d_backward": _fractional_backward(3),
    "max_unpool2d": _unpool(2),
    "max_unpool3d": _unpool(3, [2] * 3, [0] * 3),
    **_upsampling(),
    **_padding(),
    "constant_pad_nd": _constant_pad,
    "pixel_shuffle": lambda g: call(g.t(g.one(["N433", "aN433"])), 2),
    "pixel_unshuffle": lambda g: call(g.t(g.one(["N144", "aN144"])), 2),
    **dict.fromkeys(("channel_shuffle", "native_channel_shuffle"), lambda g: call(g.t("N433"), 2)),
    "im2col": lambda g: call(g.t("N244"), [2, 2], [1, 1], [0, 0], [2, 2]),
    "col2im": lambda g: call(g.t("N84"), [4, 4], [2, 2], [1, 1], [0, 0], [2, 2]),
    "grid_sampler_2d": _sampler(2, False),
    "grid_sampler_2d_backward": _sampler(2, True),
    "grid_sampler_3d": _sampler(3, False),
    "grid_sampler_3d_backward": _sampler(3, True),
    "affine_grid_generator": lambda g: call(g.t("N23"), [g.n("N"), 1, 3, 4], g.flag()),
}
