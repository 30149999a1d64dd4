"""Ops that draw random numbers: only shapes, and what holds of any draw, can be compared."""

from __future__ import annotations

from typing import Any

import torch

from tests.rules.samples.draw import Call, Draw, Maker, call, sizes

_UNIT: dict[str, Any] = {"low": 0.1, "high": 0.9}


def _like(*rest: Any, **kwargs: Any) -> Maker:
    return lambda g: call(g.t(g.dims(1, 3), **_UNIT), *rest, random=True, **kwargs)


def _sized(*before: Any, **kwargs: Any) -> Maker:
    return lambda g: call(*before, sizes(g.t(g.dims(1, 3))), random=True, **kwargs)


def _pair(g: Draw, **first: Any) -> Call:
    dims = g.dims(1, 2)
    return call(g.t(dims, **first), g.t(g.broadcast(dims), **_UNIT), random=True)


def _scaled(args: tuple[Any, ...], kwargs: dict[str, Any], results: tuple[Any, ...]) -> None:
    value, mask = results
    torch.testing.assert_close(value, args[0] * mask / 0.75)


def _dropout(g: Draw) -> Call:
    return call(g.t(g.dims(1, 3)), 0.25, True, random=True, law=_scaled)


def _leaky(g: Draw) -> Call:
    dims = g.dims(1, 3)
    return call(g.t(dims), g.t(dims), 0.1, 0.3, True, random=True)


_GENERATED: dict[str, Any] = {"generator": None}

SAMPLES: dict[str, Maker] = {
    "native_dropout": _dropout,
    "rrelu_with_noise_functional": _leaky,
    **dict.fromkeys(("bernoulli", "poisson", "_standard_gamma"), _like()),
    "bernoulli.p": _like(0.5),
    "bernoulli.Tensor": _pair,
    "binomial": lambda g: (lambda d: call(g.t(d, low=3, high=4), g.t(d, **_UNIT), random=True))(g.dims(1, 2)),
    "normal.Tensor_float": _like(1.0),
    "normal.float_Tensor": lambda g: call(0.0, g.t(g.dims(1, 3), **_UNIT), random=True),
    "normal.Tensor_Tensor": _pair,
    "normal.float_float": _sized(0.0, 1.0),
    **dict.fromkeys(("rand_like", "randn_like"), _like()),
    **dict.fromkeys(("rand_like.generator", "randn_like.generator"), _like(**_GENERATED)),
    "randint_like": _like(5),
    "randint_like.Tensor": lambda g: call(
        g.t(g.dims(1, 3)), g.t("", dtype=torch.int64, low=5, high=6), random=True
    ),
    "randint_like.Tensor_generator": lambda g: call(
        g.t(g.dims(1, 3)), g.t("", dtype=torch.int64, low=5, high=6), random=True, **_GENERATED
    ),
    "_fused_dropout": lambda g: call(g.t(g.dims(1, 3)), 0.5, random=True),
    "randint_like.generator": _like(5, **_GENERATED),
    "randint_like.low_dtype": _like(2, 5),
    "randint_like.low_generator_dtype": _like(2, 5, **_GENERATED),
    **dict.fromkeys(
        ("uniform", "normal_functional", "exponential", "cauchy", "log_normal", "random"), _like()
    ),
    "geometric": _like(0.5),
    "random.to": _like(5),
    "random.from": _like(2, 5),
    **dict.fromkeys(("rand", "randn"), _sized()),
    **dict.fromkeys(("rand.generator", "randn.generator"), _sized(**_GENERATED)),
    "randint": _sized(5),
    "randint.generator": _sized(5, **_GENERATED),
    "randint.low": _sized(2, 5),
    "randint.low_generator": _sized(2, 5, **_GENERATED),
    "multinomial": lambda g: call(g.t(g.one(["N4", "N3"]), **_UNIT), 2, random=True),
    "_sample_dirichlet": lambda g: call(g.t("Na", **_UNIT), random=True),
    "randperm": lambda g: call(g.n("N"), random=True),
    "randperm.generator": lambda g: call(g.n("N"), random=True, **_GENERATED),
}
