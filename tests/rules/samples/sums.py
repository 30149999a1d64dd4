"""Products, reductions, ops along a dim, counts and searches."""

from __future__ import annotations

from typing import Any

import torch

from fxdp.ir.types.placements import Dim
from fxdp.rules.proof.samples import Sample as T
from tests.rules.samples.draw import Call, Draw, Maker, call

F64, F32, C128, I64 = torch.float64, torch.float32, torch.complex128, torch.int64
INT8: dict[str, Any] = {"dtype": torch.int8, "low": -3, "high": 3}


def _any_label(g: Draw, labels: str) -> str:
    """One of the labels: that which is of batch size."""
    return g.one(sorted(set(labels)))


def _product(left: str, right: str, *rest: Any, **options: Any) -> Maker:
    def make(g: Draw) -> Call:
        batch = _any_label(g, left + right)
        a, b = (text.replace(batch, "N") for text in (left, right))
        return call(g.t(a, **options), g.t(b, **options), *rest)

    return make


def _biased(left: str, right: str, result: str) -> Maker:
    def make(g: Draw) -> Call:
        batch = _any_label(g, left + right)
        a, b, c = (text.replace(batch, "N") for text in (left, right, result))
        return call(g.t(g.broadcast(c)), g.t(a), g.t(b), beta=g.one([1.0, 0.5]), alpha=g.one([1.0, 2.0]))

    return make


def _linear(g: Draw) -> Call:
    lead = g.dims(1, 2)
    return call(g.t(lead + "k"), g.t("mk"), g.one([None, g.t("m")]))


def _trilinear(g: Draw) -> Call:
    return call(g.t("Na"), g.t("bac"), g.t("Nc"), [1, 3], [0], [1, 2], [2, 3])


def _distances(g: Draw) -> Call:
    p, mode = g.one([(1.0, None), (2.0, 1), (2.0, 2), (2.0, None)])
    a, b = g.one([("aN3", "ab3"), ("N3", "N3"), ("N2a", "Nba"), ("Na", "ba")])
    return call(g.t(a), g.t(b), p, mode)


def _distances_backward(g: Draw) -> Call:
    lead, other, m, n = g.one(
        [("", "", "N", "b"), ("", "", "a", "N"), ("N", "N", "a", "N"), ("N", "", "a", "N")]
    )
    far: dict[str, Any] = {"low": 1, "high": 2}
    pairs = lead + m + n
    return call(g.t(pairs), g.t(lead + m + "3"), g.t(other + n + "3"), g.one([1.0, 2.0]), g.t(pairs, **far))


def _reduced(*before: Any, dims: str = "list", keep: bool = True, dtype: torch.dtype = F64) -> Maker:
    """A reduction over `dims`: a list of them, one (int) or all ("")."""

    def make(g: Draw) -> Call:
        labels = g.dims(2, 3)
        over: list[Any] = []
        if dims == "list":
            over = [g.some(labels)]
        elif dims == "int":
            over = [g.dim(labels)]
        return call(g.t(labels, dtype=dtype), *before, *over, *([g.flag()] if keep and dims else []))

    return make


def _statistics(g: Draw) -> Call:
    labels = g.dims(2, 3)
    return call(g.t(labels), g.some(labels), correction=g.one([0, 1]), keepdim=g.flag())


def _along(*after: Any, low: int = 2) -> Maker:
    def make(g: Draw) -> Call:
        labels = g.dims(low, 3)
        return call(g.t(labels), g.dim(labels), *after)

    return make


def _glu(g: Draw, gradient: bool) -> Call:
    x = g.t("N4a")
    return call(g.t("N2a"), x, 1) if gradient else call(x, -2)


def _gradient_along(g: Draw) -> Call:
    labels = g.dims(2, 3)
    return call(g.t(labels), g.t(labels), g.dim(labels), F64)


def _flipped(*before: Any) -> Maker:
    def make(g: Draw) -> Call:
        labels = g.dims(2, 3)
        return call(g.t(labels), *before, g.some(labels))

    return make


def _roll(g: Draw) -> Call:
    return g.one([call(g.t("aNb"), [1, 2], [0, -1]), call(g.t("aN"), [1], [0]), call(g.t("aN"), [1])])


def _rot90(g: Draw) -> Call:
    labels = g.dims(3, 3)
    return call(g.t(labels), g.one([1, 2, 3]), g.one([[0, 1], [1, 2], [0, -1]]))


def _masked_softmax(g: Draw) -> Call:
    mask, kind = g.one([("N2aa", 2), ("aa", 0)])
    return call(g.t("N2aa"), g.mask(mask), 3, kind)


def _masked_softmax_backward(g: Draw) -> Call:
    return call(g.t("Nab"), g.t("Nab"), g.mask("Nab"), 2)


def ordered(*shape: Dim | str) -> T:
    """Sorted rows."""
    return T(*shape, fill=lambda size, _: torch.arange(float(size[-1])).expand(size))


def _searched(g: Draw) -> Call:
    return g.one(
        [call(ordered(4), _any(g)), call(ordered(g.n("N"), 4), g.t("Na")), call(ordered(5), g.t("N"))]
    )


def _any(g: Draw, low: int = 1, **options: Any) -> T:
    return g.t(g.dims(low, 3), **options)


def _selecting(g: Draw) -> Call:
    return g.one(
        [
            call(g.t("N"), 1, g.ints("N"), [g.n("N"), 3], False),
            call(g.t("1N"), 0, g.ints("1N"), [3, g.n("N")], True),
            call(g.t("Na"), 2, g.ints("Na"), [g.n("N"), g.n("a"), 3], False),
        ]
    )


SAMPLES: dict[str, Maker] = {
    "mm": _product("mk", "kn"),
    "_int_mm": _product("mk", "kn", **INT8),
    "bmm": _product("bmk", "bkn"),
    "mv": _product("mk", "k"),
    "dot": _product("k", "k"),
    "vdot": _product("k", "k", dtype=C128),
    **dict.fromkeys(("ger", "outer"), _product("m", "n")),
    "addmm": _biased("mk", "kn", "mn"),
    "baddbmm": _biased("bmk", "bkn", "bmn"),
    "addbmm": _biased("bmk", "bkn", "mn"),
    "addmv": _biased("mk", "k", "m"),
    "addr": _biased("m", "n", "mn"),
    "_addmm_activation": lambda g: call(g.t("4"), g.t("Nk"), g.t("k4")),
    "linear": _linear,
    "_trilinear": _trilinear,
    "_cdist_forward": _distances,
    "_cdist_backward": _distances_backward,
    "_euclidean_dist": lambda g: call(g.t("N3"), g.t("a3")),
    "_pdist_forward": lambda g: call(g.t("N3"), 2.0),
    "_pdist_backward": lambda g: call(T(6), g.t("43"), 2.0, T(6, low=1, high=2)),
    "sum": _reduced(dims=""),
    "mean": _reduced(dims=""),
    **dict.fromkeys(("sum.dim_IntList", "mean.dim", "nansum", "amax", "amin"), _reduced()),
    "count_nonzero": lambda g: call(_any(g, dtype=I64, high=2)),
    "count_nonzero.dim_IntList": _reduced(keep=False, dtype=torch.bool),
    **dict.fromkeys(("linalg_vector_norm", "linalg__powsum"), _reduced(3)),
    **dict.fromkeys(("max.dim", "min.dim", "median.dim", "nanmedian.dim", "mode"), _reduced(dims="int")),
    **dict.fromkeys(("argmax", "argmin"), _reduced(dims="int")),
    "prod.dim_int": _reduced(dims="int"),
    **dict.fromkeys(("max", "min", "median", "nanmedian", "prod", "any", "all"), _reduced(dims="")),
    **dict.fromkeys(("any.dim", "all.dim"), _reduced(dims="int", dtype=torch.bool)),
    **dict.fromkeys(("any.dims", "all.dims"), _reduced(dtype=torch.bool)),
    "aminmax": lambda g: call(g.t("aN"), dim=g.dim("aN"), keepdim=g.flag()),
    "_aminmax.dim": _reduced(dims="int"),
    "_aminmax": _reduced(dims=""),
    "kthvalue": _reduced(2, dims="int"),
    "logsumexp": _reduced(),
    "norm.Scalar": _reduced(2, dims=""),
    "norm.ScalarOpt_dtype": lambda g: call(_any(g), 2, dtype=F64),
    "norm.ScalarOpt_dim_dtype": lambda g: (lambda d: call(g.t(d), 2, g.some(d), g.flag(), dtype=F64))("aN"),
    "norm.ScalarOpt_dim": _reduced(2),
    **dict.fromkeys(
        ("var.correction", "std.correction", "var_mean.correction", "std_mean.correction"), _statistics
    ),
    "var.dim": lambda g: call(g.t("Nab"), g.some("Nab"), g.flag(), g.flag()),
    "value_selecting_reduction_backward": _selecting,
    "trace": lambda g: call(g.t("Na")),
    "_assert_tensor_metadata": lambda g: call(_any(g), dtype=F64),
    "allclose": lambda g: call(g.t("N"), g.t("N")),
    "equal": lambda g: call(g.t("N"), g.t("N")),
    **dict.fromkeys(("_is_any_true", "_is_all_true"), lambda g: call(g.mask(g.dims(1, 2)))),
    "dist": lambda g: call(g.t("Na"), g.t("Na")),
    "hash_tensor": lambda g: call(g.t("Na"), [1]),
    **dict.fromkeys(("_softmax", "_log_softmax"), _along(False)),
    **dict.fromkeys(("_safe_softmax", "cumprod", "cumsum", "cummax", "cummin"), _along()),
    **dict.fromkeys(("logcumsumexp", "_logcumsumexp", "sort"), _along()),
    "sort.stable": lambda g: call(g.t("aN"), stable=True, dim=g.dim("aN")),
    "topk": lambda g: call(g.t("aN"), 2, g.dim("aN")),
    "glu": lambda g: _glu(g, False),
    "glu_backward": lambda g: _glu(g, True),
    **dict.fromkeys(("_softmax_backward_data", "_log_softmax_backward_data"), _gradient_along),
    "_masked_softmax": _masked_softmax,
    "_masked_softmax_backward": _masked_softmax_backward,
    "flip": _flipped(),
    "roll": _roll,
    "rot90": _rot90,
    "renorm": lambda g: (lambda d: call(g.t(d), 2, g.dim(d), 0.5))(g.dims(2, 3)),
    "histc": lambda g: call(_any(g), 5, *g.one([(-1.0, 1.0), ()])),
    "histogram.bin_ct": lambda g: call(g.t("N"), 5, range=[-1.0, 1.0], weight=g.one([None, g.t("N")])),
    "histogram.bins_tensor": lambda g: call(g.t("N"), ordered(5), weight=g.one([None, g.t("N")])),
    "bincount": lambda g: call(
        g.t("N", dtype=I64, fill=lambda n, _: torch.arange(*n)), g.one([None, g.t("N")])
    ),
    "bucketize.Tensor": lambda g: call(_any(g), ordered(4)),
    "searchsorted.Tensor": _searched,
    "bucketize.Scalar": lambda g: call(1.5, ordered("B")),
    "searchsorted.Scalar": lambda g: call(ordered("B"), 1.5),
    "isin.Tensor_Tensor": lambda g: call(g.ints(g.dims(1, 3), 9), g.ints("4", 9)),
}
