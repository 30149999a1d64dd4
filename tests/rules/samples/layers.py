"""Layers on batches of samples: convolution, normalization, attention, losses."""

from __future__ import annotations

from typing import Any

import torch

from fxdp.rules.proof.samples import Sample as T
from tests.rules.samples.draw import Call, Draw, Maker, call

NONE, MEAN, SUM = 0, 1, 2
I64 = torch.int64
ALL = [True, True, True]
_POSITIVE: dict[str, Any] = {"low": 0.5, "high": 2.0}
_UNIT: dict[str, Any] = {"low": 0.1, "high": 0.9}


def _conv(g: Draw) -> tuple[str, str, str, str, tuple[Any, ...]]:
    """Dims of input, weight, bias and result, and stride .. groups."""
    n = g.one([1, 2, 3])
    length, small = "4" * n, "3" * n

    def rest(transposed: bool, groups: int) -> tuple[Any, ...]:
        return ([1] * n, [1] * n, [1] * n, transposed, [0] * n, groups)

    return g.one(
        [
            ("Nc" + length, "oc" + small, "o", "No" + length, rest(False, 1)),
            ("N4" + length, "62" + small, "6", "N6" + length, rest(False, 2)),
            ("Nc" + length, "co" + small, "o", "No" + length, rest(True, 1)),
        ]
    )


def _convolution(*extra: Any) -> Maker:
    def make(g: Draw) -> Call:
        x, weight, bias, _, rest = _conv(g)
        return call(g.t(x), g.t(weight), g.one([None, g.t(bias)]), *rest, *extra)

    return make


def _convolution_backward(g: Draw) -> Call:
    x, weight, bias, y, rest = _conv(g)
    mask = g.one([ALL, [True, True, False], [False, True, True]])
    return call(g.t(y), g.t(x), g.t(weight), [g.n(bias)], *rest, mask)


def _layer_norm(g: Draw) -> Call:
    lead, normal = g.dims(1, 2), g.one(["4", "34"])
    shape = [int(n) for n in normal]
    weights = g.one([(g.t(normal), g.t(normal)), (None, None)])
    return call(g.t(lead + normal), shape, *weights, 1e-5)


def _layer_norm_backward(g: Draw) -> Call:
    lead, normal = g.dims(1, 2), g.one(["4", "34"])
    x, ones = lead + normal, lead + "1" * len(normal)
    statistics = (g.t(ones), g.t(ones, **_POSITIVE))
    shape = [int(n) for n in normal]
    return call(
        g.t(x), g.t(x), shape, *statistics, g.t(normal), g.t(normal), g.one([ALL, [True, False, False]])
    )


def _rms_norm(g: Draw) -> Call:
    lead = g.dims(1, 2)
    return call(g.t(lead + "4"), [4], g.one([None, g.t("4")]), 1e-5)


def _group_norm(g: Draw) -> Call:
    weight = g.one([(None, None), (g.t("4"), g.t("4"))])
    return call(g.t("N433"), *weight, g.n("N"), 4, 9, 2, 1e-5)


def _group_norm_backward(g: Draw) -> Call:
    statistics = (g.t("N2"), g.t("N2", **_POSITIVE))
    return call(g.t("N49"), g.t("N49"), *statistics, g.t("4"), g.n("N"), 4, 9, 2, ALL)


def _batch_norm(*mode: Any) -> Maker:
    def make(g: Draw) -> Call:
        x = g.t(g.one(["N4", "N43", "a4N", "N433"]))
        affine = g.one([(None, None), (g.t("4"), g.t("4"))])
        return call(x, *affine, g.t("4"), g.t("4", **_POSITIVE), *mode, 0.1, 1e-5)

    return make


def _batch_norm_backward(g: Draw) -> Call:
    dims = g.one(["N4", "N43", "a4N"])
    running = (g.t("4"), g.t("4", **_POSITIVE))
    return call(g.t(dims), g.t(dims), g.t("4"), *running, T(0), T(0), False, 1e-5, ALL)


def _attention(g: Draw) -> tuple[list[T], T | None, bool]:
    """Query, key, value, a mask, whether it is causal."""
    if g.flag():
        return [g.t("N258"), g.t("N258"), g.t("N258")], None, g.flag()
    mask = g.one([None, g.t("53"), g.t("1153"), g.t("N153")])
    return [g.t("N258"), g.t("N238"), g.t("N238")], mask, False


def _flash(g: Draw) -> Call:
    operands, mask, causal = _attention(g)
    return call(*operands, 0.0, causal, attn_mask=mask)


def _flash_backward(g: Draw) -> Call:
    operands, mask, causal = _attention(g)
    return call(g.t("N258"), *operands, g.t("N258"), g.t("N25"), 0.0, causal, attn_mask=mask)


def _sample_attention(g: Draw) -> tuple[T, tuple[Any, ...]]:
    """Operands `[1, heads, rows, features]`, and samples of one row, which no rank's part cuts."""
    numbers = T("B", dtype=I64, fill=lambda size, _: torch.arange(size[0]))
    return T(1, 2, "B", 4), (numbers, g.flag(), g.one([None, 0.5]))


def _sample_attention_forward(g: Draw) -> Call:
    rows, options = _sample_attention(g)
    return call(rows, rows, rows, *options)


def _sample_attention_backward(g: Draw) -> Call:
    rows, options = _sample_attention(g)
    return call(*[rows] * 5, T(1, 2, "B"), *options)


def _composite(g: Draw) -> Call:
    operands, mask, causal = _attention(g)
    return call(*operands, mask, 0.0, causal)


def _loss(*rest: Any) -> Maker:
    def make(g: Draw) -> Call:
        dims = g.dims(1, 3)
        return call(g.t(dims, **_UNIT), g.t(dims, **_UNIT), g.one([NONE, SUM]), *rest)

    return make


def _loss_backward(*rest: Any) -> Maker:
    def make(g: Draw) -> Call:
        dims = g.dims(1, 3)
        reduction = g.one([NONE, SUM])
        grad = g.t("" if reduction == SUM else dims)
        return call(grad, g.t(dims, **_UNIT), g.t(dims, **_UNIT), reduction, *rest)

    return make


def _cross_entropy(g: Draw, backward: bool) -> Call:
    dims = g.dims(1, 2)
    pair = (g.t(dims, **_UNIT), g.t(dims, **_UNIT))
    weight, reduction = g.one([None, g.t(g.broadcast(dims), **_UNIT)]), g.one([NONE, SUM])
    grad = [g.t("" if reduction == SUM else dims)] if backward else []
    return call(*grad, *pair, weight, reduction)


def _with_logits(g: Draw) -> Call:
    dims = g.dims(1, 2)
    weights = (g.one([None, g.t(g.broadcast(dims))]), g.one([None, g.t(dims[-1], **_UNIT)]))
    return call(g.t(dims), g.t(dims, **_UNIT), *weights, g.one([NONE, SUM]))


def _nll(planes: bool, backward: bool) -> Maker:
    space = "23" if planes else ""

    def make(g: Draw) -> Call:
        x, target = g.t("N4" + space), g.ints("N" + space, 4)
        weight, reduction = g.one([None, g.t("4", **_UNIT)]), g.one([NONE, SUM])
        ignore = g.one([-100, 1])
        if not backward:
            return call(x, target, weight, reduction, ignore)
        grad = g.t("" if reduction == SUM else "N" + space)
        return call(grad, x, target, weight, reduction, ignore, T())

    return make


def _margin(g: Draw, backward: bool) -> Call:
    reduction = g.one([NONE, SUM])
    grad = [g.t("" if reduction == SUM else "N")] if backward else []
    return call(*grad, g.t("N4"), g.ints("N", 4), 1, 1.0, g.one([None, g.t("4", **_UNIT)]), reduction)


def _multilabel(g: Draw, backward: bool) -> Call:
    reduction = g.one([NONE, SUM])
    x, target = g.t("N4"), g.t("N4", dtype=I64, low=-1, high=4)
    if not backward:
        return call(x, target, reduction)
    chosen = g.t("N4", fill=lambda size, _: torch.ones(size))
    return call(g.t("" if reduction == SUM else "N"), x, target, reduction, chosen)


def _ctc(backward: bool) -> Maker:
    def make(g: Draw) -> Call:
        x, length = g.t("5N4", low=-3.0, high=-0.1), g.ints("N", 3)
        frames = T(g.n("N"), dtype=I64, low=4, high=6)
        grad = [g.t("N")] if backward else []
        return call(*grad, x, T(g.n("N"), 2, dtype=I64, low=1, high=4), frames, length, 0, g.flag())

    return make


def _own_statistics(args: tuple[Any, ...], _: Any, results: tuple[Any, ...]) -> None:
    """A part gets what eager's kernel gives for that part alone."""
    x, _, eps = args
    if x.numel():
        torch.testing.assert_close(results[0], torch.native_batch_norm(x, *[None] * 4, True, 0, eps)[0])


def _own_statistics_backward(args: tuple[Any, ...], _: Any, results: tuple[Any, ...]) -> None:
    grad, x, _, eps = args
    if x.numel():
        x = x.clone().requires_grad_()
        torch.native_batch_norm(x, *[None] * 4, True, 0, eps)[0].backward(grad)
        torch.testing.assert_close(results[0], x.grad)


_TURN = "def iteration(x, y, w): return x[x > 0].sum() * w.exp() + x * y * w"


SAMPLES: dict[str, Maker] = {
    "convolution": _convolution(),
    "_convolution": _convolution(False, False, True, True),
    "convolution_backward": _convolution_backward,
    "conv_tbc": lambda g: call(g.t("5Nc"), g.t("3co"), g.t("o")),
    "native_layer_norm": _layer_norm,
    "native_layer_norm_backward": _layer_norm_backward,
    "_fused_rms_norm": _rms_norm,
    "native_group_norm": _group_norm,
    "native_group_norm_backward": _group_norm_backward,
    **dict.fromkeys(("_native_batch_norm_legit_no_training", "_batch_norm_no_update"), _batch_norm()),
    **dict.fromkeys(
        ("native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_functional"),
        _batch_norm(False),
    ),
    "native_batch_norm_backward": _batch_norm_backward,
    "_native_batch_norm_legit.no_stats": lambda g: call(g.t("N43"), None, None, True, 0.1, 1e-5),
    "fxdp.ctc_loss": _ctc(False),
    "fxdp.ctc_loss_backward": _ctc(True),
    "fxdp.iterations": lambda g: call([g.t("N4"), g.t("N")], [g.t("4")], _TURN, "float64[4]"),
    "fxdp.iterations_backward": lambda g: call(
        g.t("N4"), [g.t("N4"), g.t("N")], [g.t("4")], _TURN, g.one([[True] * 3, [False, True, True]])
    ),
    "fxdp.moments": lambda g: call(g.t(g.one(["Na3", "aN3"])), g.one([[0, 2], [1], [0]])),
    "fxdp.standardize": lambda g: call(g.t("N4a"), [0, 2], 1e-5, random=True, law=_own_statistics),
    "fxdp.standardize_backward": lambda g: call(
        g.t("N4a"), g.t("N4a"), [0, 2], 1e-5, random=True, law=_own_statistics_backward
    ),
    "_weight_norm_interface": lambda g: call(g.t("43"), g.t("41"), 0),
    "_weight_norm_interface_backward": lambda g: call(
        g.t("43"), g.t("43"), g.t("41"), g.t("41", **_POSITIVE), 0
    ),
    "_scaled_dot_product_flash_attention_for_cpu": _flash,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _flash_backward,
    "fxdp.sample_attention": _sample_attention_forward,
    "fxdp.sample_attention_backward": _sample_attention_backward,
    **dict.fromkeys(("scaled_dot_product_attention", "_scaled_dot_product_attention_math"), _composite),
    **dict.fromkeys(("mse_loss", "soft_margin_loss"), _loss()),
    **dict.fromkeys(("smooth_l1_loss", "huber_loss"), _loss(0.5)),
    **dict.fromkeys(("mse_loss_backward", "soft_margin_loss_backward"), _loss_backward()),
    **dict.fromkeys(("smooth_l1_loss_backward", "huber_loss_backward"), _loss_backward(0.5)),
    "binary_cross_entropy": lambda g: _cross_entropy(g, False),
    "binary_cross_entropy_backward": lambda g: _cross_entropy(g, True),
    "binary_cross_entropy_with_logits": _with_logits,
    "nll_loss_forward": _nll(False, False),
    "nll_loss_backward": _nll(False, True),
    "nll_loss2d_forward": _nll(True, False),
    "nll_loss2d_backward": _nll(True, True),
    "multi_margin_loss": lambda g: _margin(g, False),
    "multi_margin_loss_backward": lambda g: _margin(g, True),
    "multilabel_margin_loss_forward": lambda g: _multilabel(g, False),
    "multilabel_margin_loss_backward": lambda g: _multilabel(g, True),
}
