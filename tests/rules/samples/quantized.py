"""Fake quantization, products with packed or scaled weights, and entire transformer layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fxdp.rules.proof.samples import Sample as T
from tests.rules.samples.draw import Call, Draw, Maker, call

aten = torch.ops.aten
F32, F64 = torch.float32, torch.float64
_STEP: dict[str, Any] = {"low": 0.1, "high": 0.3}
_RANGE = (-8, 7)


def _zero(*shape: Any, dtype: torch.dtype = torch.int32) -> T:
    return T(*shape, dtype=dtype, fill=lambda size, _: torch.zeros(size))


def _scale(size: tuple[int, ...], generator: Tensor) -> Tensor:
    """A step that every float format holds."""
    return torch.full(size, 0.25)


def _per_channel(g: Draw, count: int = 1, zero: torch.dtype = F64, dtype: torch.dtype = F64) -> Call:
    dims, axis = g.one([("N4", 1), ("4N3", 0), ("aN4", 2)])
    x = [g.t(dims, dtype=dtype) for _ in range(count)]
    return call(*x, T(4, dtype=dtype, fill=_scale), _zero(4, dtype=zero), axis, *_RANGE)


def _per_tensor(g: Draw, count: int, shape: tuple[int, ...], *rest: Any) -> Call:
    dims = g.dims(1, 3)
    return call(*(g.t(dims) for _ in range(count)), T(*shape, fill=_scale), *rest, *_RANGE)


def _scaled(a: Tensor, b: Tensor, x: Tensor, y: Tensor, bias: Tensor | None = None, *_: Any) -> Tensor:
    total = (a * x) @ (b * y)
    return total if bias is None else total + bias


def _rounded(x: Tensor, scale: Tensor, zero: Tensor, low: int, high: int, axis: int | None = None) -> Any:
    """Scale and zero point as broadcast, the quantized value, and whether it is in range."""
    if axis is not None:
        shape = [-1 if d == axis % x.dim() else 1 for d in range(x.dim())]
        scale, zero = scale.view(shape), zero.view(shape)
    steps = (x / scale + zero).round()
    return scale, zero, steps.clamp(low, high), (steps >= low) & (steps <= high)


def _learnable(x: Tensor, scale: Tensor, zero: Tensor, *rest: int) -> Tensor:
    *axis, low, high = rest
    s, z, steps, _ = _rounded(x, scale, zero, low, high, *axis)
    return (steps - z) * s


def _learnable_backward(grad: Tensor, x: Tensor, scale: Tensor, zero: Tensor, *rest: int) -> Any:
    *axis, low, high = rest
    s, z, steps, kept = _rounded(x, scale, zero, low, high, *axis)
    to_scale = grad * torch.where(kept, (steps - z) - x / s, steps - z)
    to_zero = grad * torch.where(kept, 0.0, -s)
    over = [d for d in range(x.dim()) if not axis or d != axis[0] % x.dim()]
    return grad * kept, to_scale.sum(over).view(scale.shape), to_zero.sum(over).view(zero.shape)


def _grouped(a: Tensor, b: Tensor, offs: Tensor | None = None, *_: Any) -> Tensor:
    """One product per group, by masks."""
    if a.dim() == 3 and b.dim() == 3:
        return a @ b
    assert offs is not None
    size = {(2, 3): a.shape[0], (3, 2): b.shape[-1], (2, 2): a.shape[-1]}[a.dim(), b.dim()]
    group = torch.bucketize(torch.arange(size), offs, right=True)
    masks = torch.stack([group == i for i in range(len(offs))]).to(a.dtype)
    if a.dim() == 2 and b.dim() == 3:
        return torch.einsum("mk,gkn,gm->mn", a, b, masks)
    if a.dim() == 3:
        return torch.einsum("gmk,kn,gn->mn", a, b, masks)
    return torch.einsum("mk,kn,gk->gmn", a, b, masks)


def _packed(x: Tensor, weight: Tensor, *rest: Any) -> Tensor:
    return x @ weight.mT


def _encoder(x: Tensor, width: int, heads: int, *rest: Any) -> Tensor:
    """Not the layer itself, but as it: samples attend within themselves, by their masks."""
    mask = rest[15] if len(rest) > 15 else None
    scores = x @ x.mT
    if mask is not None:
        by_key = mask[:, None, :] if rest[16] == 1 else mask
        scores = scores.masked_fill(by_key, -1e9)
    return scores.softmax(-1) @ x


def _heads(q: Tensor, k: Tensor, v: Tensor, width: int, heads: int, *rest: Any) -> Any:
    weights = (q @ k.mT).softmax(-1)
    return weights @ v, weights


def _split(x: Tensor, bias: Tensor, heads: int) -> Any:
    n, t, width = x.shape
    parts = (x + bias).view(n, t, 3, heads, width // 3 // heads).permute(2, 0, 3, 1, 4)
    return parts[0], parts[1], parts[2]


STAND_INS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(
        ("_fake_quantize_learnable_per_tensor_affine", "_fake_quantize_learnable_per_channel_affine"),
        _learnable,
    ),
    **dict.fromkeys(
        (
            "_fake_quantize_learnable_per_tensor_affine_backward",
            "_fake_quantize_learnable_per_channel_affine_backward",
        ),
        _learnable_backward,
    ),
    "_scaled_mm": _scaled,
    "_grouped_mm": _grouped,
    "_weight_int8pack_mm": lambda x, w, scales: (x @ w.mT) * scales,
    "_weight_int4pack_mm": _packed,
    "_weight_int4pack_mm_for_cpu": _packed,
    "_dyn_quant_matmul_4bit": _packed,
    "_transformer_encoder_layer_fwd": _encoder,
    "_native_multi_head_attention": _heads,
    "_transform_bias_rescale_qkv": _split,
}


def _ends(*rows: int) -> T:
    return T(len(rows), dtype=torch.int32, fill=lambda *_: torch.tensor(rows))


def _groups(g: Draw) -> Call:
    last = T(2, dtype=torch.int32, fill=lambda *_: torch.tensor([2, 1000]))
    return g.one(
        [
            call(g.t("Nk"), g.t("2kn"), last),
            call(g.t("4N"), g.t("2Nn"), _ends(1, 4)),
            call(g.t("4k"), g.t("2kN"), _ends(1, 4)),
            call(g.t("Nmk"), g.t("Nkn")),
            call(g.t("2Nk"), g.t("k4"), _ends(3, 4)),
            call(g.t("N4"), g.t("4n"), _ends(1, 4)),
        ]
    )


def _scales(g: Draw) -> Call:
    a, b = g.one([("Nk", "kn"), ("mk", "kN")])
    scales = g.one([(T(), T()), (g.t(a[0] + "1"), g.t("1" + b[1])), (T(1, 1), T(1, 1))])
    return call(g.t(a), g.t(b), *scales, g.one([None, g.t(b[1])]))


def _layer(g: Draw) -> Call:
    dims = "N34"
    weights = [g.t("4")] * 4
    norms, feed = [g.t("4")] * 4, [g.t("4")] * 4
    mask, kind = g.one([(None, None), (g.mask("N3"), 1), (g.mask("33"), 0)])
    return call(g.t(dims), 4, 2, *weights, False, False, 1e-5, *norms, *feed, mask, kind)


SAMPLES: dict[str, Maker] = {
    "fake_quantize_per_tensor_affine_cachemask": lambda g: call(g.t(g.dims(1, 3)), 0.25, 0, *_RANGE),
    "fake_quantize_per_channel_affine_cachemask": lambda g: _per_channel(g, zero=torch.int32, dtype=F32),
    "_fake_quantize_per_tensor_affine_cachemask_tensor_qparams": lambda g: _per_tensor(
        g, 1, (1,), _zero(1), T(1, dtype=torch.int64, low=1, high=2)
    ),
    "_fake_quantize_learnable_per_tensor_affine": lambda g: _per_tensor(g, 1, (1,), _zero(1, dtype=F64)),
    "_fake_quantize_learnable_per_tensor_affine_backward": lambda g: _per_tensor(
        g, 2, (1,), _zero(1, dtype=F64)
    ),
    "_fake_quantize_learnable_per_channel_affine": _per_channel,
    "_fake_quantize_learnable_per_channel_affine_backward": lambda g: _per_channel(g, 2),
    "_weight_int8pack_mm": lambda g: call(g.t("Nk"), g.t("nk"), g.t("n", **_STEP)),
    **dict.fromkeys(
        ("_weight_int4pack_mm", "_weight_int4pack_mm_for_cpu"),
        lambda g: call(g.t("Nk"), g.t("nk"), 32, g.t("n")),
    ),
    "_dyn_quant_matmul_4bit": lambda g: call(g.t("N4"), g.t("n4"), 32, 4, 2),
    "_scaled_mm": _scales,
    "_grouped_mm": _groups,
    "_transformer_encoder_layer_fwd": _layer,
    "_native_multi_head_attention": lambda g: call(
        g.t("N34"), g.t("N54"), g.t("N54"), 4, 2, g.t("4"), g.t("4"), g.t("4"), g.t("4")
    ),
    "_transform_bias_rescale_qkv": lambda g: call(g.t("N3", 12), T(12), 2),
}
