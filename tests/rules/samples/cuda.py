"""Ops that have no CPU kernel: each is verified through a function that computes the same on the CPU.

This, `cuda_attention` and `quantized` (their `STAND_INS`) are the visible list of rules that are checked
through a stand-in only: the ops themselves need CUDA, or do not compute in float64. A result that is an
opaque workspace stands for what it holds: numbers per sample.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fxdp.rules.proof.samples import Sample as T
from tests.rules.samples.draw import Call, Draw, Maker, call

aten = torch.ops.aten
_POSITIVE: dict[str, Any] = {"low": 0.5, "high": 2.0}


def _convolution(x: Tensor, w: Tensor, pad: Any, stride: Any, dilation: Any, groups: int, *_: Any) -> Tensor:
    return _mkldnn(x, w, None, pad, stride, dilation, groups)


def _mkldnn(x: Tensor, w: Tensor, bias: Any, padding: Any, stride: Any, dilation: Any, groups: int) -> Tensor:
    return aten.convolution.default(x, w, bias, stride, padding, dilation, False, [0] * len(stride), groups)


def _transposed(
    x: Tensor, weight: Tensor, padding: Any, out: Any, stride: Any, dilation: Any, groups: int, *_: Any
) -> Tensor:
    return aten.convolution.default(x, weight, None, stride, padding, dilation, True, out, groups)


def _relu(x: Tensor, w: Tensor, bias: Any, stride: Any, pad: Any, dilation: Any, groups: int) -> Tensor:
    return _mkldnn(x, w, bias, pad, stride, dilation, groups).relu()


def _add_relu(
    x: Tensor, w: Tensor, z: Tensor, alpha: Any, bias: Any, stride: Any, pad: Any, dilation: Any, groups: int
) -> Tensor:
    return (_mkldnn(x, w, bias, pad, stride, dilation, groups) + alpha * z).relu()


def _batch_norm(x: Tensor, w: Tensor, b: Any, mean: Any, var: Any, training: bool, *rest: float) -> Any:
    out = aten._native_batch_norm_legit_no_training.default(x, w, b, mean, var, *rest)
    return *out, torch.zeros(0, dtype=torch.uint8)


def _rms_backward(grad: Tensor, x: Tensor, shape: Any, rstd: Tensor, weight: Tensor | None, mask: Any) -> Any:
    normal = tuple(range(x.dim() - len(shape), x.dim()))
    scaled = grad if weight is None else grad * weight
    hat = x * rstd
    inner = rstd * (scaled - hat * (scaled * hat).mean(normal, keepdim=True))
    lead = tuple(range(x.dim() - len(shape)))
    return inner if mask[0] else None, (grad * hat).sum(lead) if mask[1] and weight is not None else None


def _grid(x: Tensor, grid: Tensor) -> Tensor:
    return aten.grid_sampler_2d.default(x, grid, 0, 0, True)


def _grid_backward(x: Tensor, grid: Tensor, grad: Tensor) -> Any:
    return aten.grid_sampler_2d_backward.default(grad, x, grid, 0, 0, True, [True, True])


def _affine_backward(grad: Tensor, n: int, c: int, h: int, w: int) -> Tensor:
    base = aten.affine_grid_generator.default(torch.eye(2, 3).double()[None], [1, c, h, w], True)
    points = torch.cat([base, torch.ones_like(base[..., :1])], -1).view(1, h * w, 3)
    return grad.view(n, h * w, 2).mT @ points.expand(n, -1, -1)


def _lstm(gates: Tensor, hidden: Tensor, cx: Tensor, b: Tensor | None = None, c: Tensor | None = None) -> Any:
    total = gates + hidden
    if b is not None and c is not None:
        total = total + b + c
    i, f, g, o = total.chunk(4, 1)
    cy = f.sigmoid() * cx + i.sigmoid() * g.tanh()
    return o.sigmoid() * cy.tanh(), cy, total


def _lstm_backward(grad_h: Any, grad_c: Any, cx: Tensor, cy: Tensor, workspace: Tensor, bias: bool) -> Any:
    i, f, g, o = workspace.chunk(4, 1)
    tanh = cy.tanh()
    through = (0 if grad_h is None else grad_h * o * (1 - tanh**2)) + (0 if grad_c is None else grad_c)
    out = torch.zeros_like(cy) if grad_h is None else grad_h * tanh
    to_i, to_f, to_g = through * g * i * (1 - i), through * cx * f * (1 - f), through * i * (1 - g**2)
    gates = torch.cat([to_i, to_f, to_g, out * o * (1 - o)], 1)
    return gates, through * f, gates.sum(0) if bias else None


def _gru(gates: Tensor, hidden: Tensor, hx: Tensor, b: Tensor | None = None, c: Tensor | None = None) -> Any:
    x, h = (gates, hidden) if b is None or c is None else (gates + b, hidden + c)
    (ir, iz, inew), (hr, hz, hn) = x.chunk(3, 1), h.chunk(3, 1)
    r, z = (ir + hr).sigmoid(), (iz + hz).sigmoid()
    n = (inew + r * hn).tanh()
    return n + z * (hx - n), torch.cat([r, z, n, hx, hn], 1)


def _gru_backward(grad: Tensor, workspace: Tensor, bias: bool) -> Any:
    r, z, n, hx, hn = workspace.chunk(5, 1)
    to_n = grad * (1 - z) * (1 - n**2)
    to_z, to_r = grad * (hx - n) * z * (1 - z), to_n * hn * r * (1 - r)
    gates, hidden = torch.cat([to_r, to_z, to_n], 1), torch.cat([to_r, to_z, to_n * r], 1)
    sums = (gates.sum(0), hidden.sum(0)) if bias else (None, None)
    return gates, hidden, grad * z, *sums


STAND_INS: dict[str, Callable[..., Any]] = {
    "cudnn_convolution": _convolution,
    "cudnn_convolution_transpose": _transposed,
    "cudnn_convolution_relu": _relu,
    "cudnn_convolution_add_relu": _add_relu,
    "mkldnn_convolution": _mkldnn,
    "cudnn_batch_norm": _batch_norm,
    "cudnn_affine_grid_generator": lambda theta, n, c, h, w: aten.affine_grid_generator.default(
        theta, [n, c, h, w], True
    ),
    "cudnn_affine_grid_generator_backward": _affine_backward,
    "_masked_scale": lambda x, mask, scale: x * mask * scale,
    "_fused_dropout": lambda x, p: (x, torch.ones_like(x, dtype=torch.uint8)),
    "cudnn_grid_sampler": _grid,
    "cudnn_grid_sampler_backward": _grid_backward,
    "_fused_rms_norm_backward": _rms_backward,
    "_thnn_fused_lstm_cell": _lstm,
    "_thnn_fused_lstm_cell_backward_impl": _lstm_backward,
    "_thnn_fused_gru_cell": _gru,
    "_thnn_fused_gru_cell_backward": _gru_backward,
    "mm.dtype": lambda a, b, dtype: aten.mm.default(a, b).to(dtype),
    "bmm.dtype": lambda a, b, dtype: aten.bmm.default(a, b).to(dtype),
    "addmm.dtype": lambda c, a, b, dtype, **k: aten.addmm.default(c, a, b, **k).to(dtype),
    "baddbmm.dtype": lambda c, a, b, dtype, **k: aten.baddbmm.default(c, a, b, **k).to(dtype),
}


def _plain(g: Draw) -> tuple[T, T]:
    return g.t("Nc44"), g.t("oc33")


def _lstm_state(g: Draw) -> Call:
    biases = g.one([(), (g.t("", 12), g.t("", 12))])
    return call(g.t("N", 12), g.t("N", 12), g.t("N3"), *biases)


def _gru_state(g: Draw) -> Call:
    biases = g.one([(), (g.t("9"), g.t("9"))])
    return call(g.t("N9"), g.t("N9"), g.t("N3"), *biases)


def _two_by_two(dims: str, *rest: Any) -> Maker:
    a, b = dims.split()
    return lambda g: call(g.t(a), g.t(b), torch.float64, *rest)


SAMPLES: dict[str, Maker] = {
    "cudnn_convolution": lambda g: call(*_plain(g), [1, 1], [1, 1], [1, 1], 1, False, False, False),
    "cudnn_convolution_transpose": lambda g: call(
        g.t("Nc44"), g.t("co33"), [1, 1], [0, 0], [1, 1], [1, 1], 1, False, False, False
    ),
    "cudnn_convolution_relu": lambda g: call(*_plain(g), g.t("o"), [1, 1], [1, 1], [1, 1], 1),
    "cudnn_convolution_add_relu": lambda g: call(
        *_plain(g), g.t("No44"), 0.5, g.t("o"), [1, 1], [1, 1], [1, 1], 1
    ),
    "mkldnn_convolution": lambda g: call(*_plain(g), g.one([None, g.t("o")]), [1, 1], [1, 1], [1, 1], 1),
    "cudnn_batch_norm": lambda g: call(
        g.t("N43"), g.t("4"), g.t("4"), g.t("4"), g.t("4", **_POSITIVE), False, 0.1, 1e-5
    ),
    "cudnn_affine_grid_generator": lambda g: call(g.t("N23"), g.n("N"), 1, 3, 4),
    "cudnn_affine_grid_generator_backward": lambda g: call(g.t("N342"), g.n("N"), 1, 3, 4),
    "cudnn_grid_sampler": lambda g: call(g.t("Nc44"), g.t("N332", low=-1.2, high=1.2)),
    "cudnn_grid_sampler_backward": lambda g: call(g.t("Nc44"), g.t("N332", low=-1.2, high=1.2), g.t("Nc33")),
    "_fused_rms_norm_backward": lambda g: call(
        g.t("aN4"), g.t("aN4"), [4], g.t("aN1", **_POSITIVE), g.one([None, g.t("4")]), [True, True]
    ),
    "_thnn_fused_lstm_cell": _lstm_state,
    "_thnn_fused_lstm_cell_backward_impl": lambda g: call(
        g.t("N3"), g.one([None, g.t("N3")]), g.t("N3"), g.t("N3"), g.t("N", 12), True
    ),
    "_thnn_fused_gru_cell": _gru_state,
    "_thnn_fused_gru_cell_backward": lambda g: call(g.t("N3"), g.t("N", 15), True),
    "mm.dtype": lambda g: _two_by_two(g.one(["Nk kn", "mN Nn"]))(g),
    "bmm.dtype": lambda g: _two_by_two(g.one(["Nmk Nkn", "amN aNn"]))(g),
    "addmm.dtype": lambda g: call(g.t("n"), g.t("Nk"), g.t("kn"), torch.float64, beta=0.5),
    "baddbmm.dtype": lambda g: call(g.t("Nmn"), g.t("Nmk"), g.t("Nkn"), torch.float64, alpha=2.0),
}
