"""Pointwise ops: operands that broadcast against each other, made from the op's schema."""

from __future__ import annotations

from typing import Any

import torch

from fxdp.rules.registry import registry
from fxdp.torch_compat import OpOverload
from tests.rules.samples.draw import Call, Draw, Maker, call

I64, C128 = torch.int64, torch.complex128

_INTEGERS = ("bitwise", "shift", "__xor__", "gcd", "lcm", "__and__", "__or__")
_COMPLEX = frozenset({"_conj", "conj", "real", "imag", "resolve_conj", "angle", "sgn", "_conj_copy"})
_UNIT: dict[str, Any] = {"low": 0.1, "high": 0.9}


def by_schema(target: OpOverload) -> Maker:
    """Operands for all required arguments; numbers where the op is tame (between 0.1 and 0.9)."""

    def make(g: Draw) -> Call:
        name = target._schema.name.removeprefix("aten::")
        options = _range(name)
        dims = g.dims(1, 3)
        shape = dims
        args: list[Any] = []
        for argument in target._schema.arguments:
            kind = str(argument.type)
            if argument.has_default_value() or argument.kwarg_only:
                break
            if kind == "Tensor":
                boolean = argument.name in ("condition", "mask")
                args.append(g.mask(shape) if boolean else g.t(shape, **options))
                shape = g.broadcast(dims)
            elif kind == "Optional[Tensor]":
                args.append(None)
            else:
                number = 2 if options.get("dtype") == I64 else 0.5
                args.append({"int": 2, "bool": False}.get(kind, number))
        return call(*args)

    return make


def _range(name: str) -> dict[str, Any]:
    if any(word in name for word in _INTEGERS):
        return {"dtype": I64, "low": 1, "high": 5}
    return {"dtype": C128} if name in _COMPLEX else dict(_UNIT)


def _one(g: Draw, **options: Any) -> Any:
    return g.t(g.dims(1, 3), **(options or _UNIT))


def _two(g: Draw, *rest: Any, **kwargs: Any) -> Call:
    dims = g.dims(1, 3)
    return call(g.t(dims, **_UNIT), g.t(g.broadcast(dims), **_UNIT), *rest, **kwargs)


def _same(g: Draw, count: int, *rest: Any) -> Call:
    dims = g.dims(1, 3)
    return call(*(g.t(dims, **_UNIT) for _ in range(count)), *rest)


def _masked(g: Draw, value: Any) -> Call:
    dims = g.dims(1, 3)
    return call(g.t(dims), g.mask(g.broadcast(dims)), g.t("") if value is None else value)


def _between(g: Draw) -> Call:
    dims = g.dims(1, 3)
    return call(g.t(dims), g.one([None, g.t(g.broadcast(dims))]), g.t(g.broadcast(dims)))


def _cast(g: Draw) -> Call:
    source, target = g.one([(I64, torch.float64), (torch.float64, I64), (I64, torch.bool), (I64, I64)])
    return call(g.t(g.dims(1, 3), dtype=source, low=0, high=5), dtype=target)


def _prelu(g: Draw, grad: bool) -> Call:
    dims = g.dims(2, 3)
    weight = g.t("1" + dims[1] + "1" * (len(dims) - 2))
    return call(*(g.t(dims) for _ in range(1 + grad)), weight)


BY_HAND: dict[str, Maker] = {
    "lift": lambda g: call(_one(g)),
    "lift_fresh": lambda g: call(_one(g)),
    "_lazy_clone": lambda g: call(_one(g)),
    "isreal": lambda g: call(_one(g)),
    "isin.Tensor_Scalar": lambda g: call(g.ints(g.dims(1, 3), 9), 3),
    "isin.Scalar_Tensor": lambda g: call(3, g.ints(g.dims(1, 2), 9)),
    "copy": lambda g: _two(g),
    "fill.Tensor": lambda g: call(_one(g), g.t("")),
    "_to_copy": _cast,
    "masked_fill.Tensor": lambda g: _masked(g, None),
    "masked_fill.Scalar": lambda g: _masked(g, g.one([0, 1.5])),
    "clamp": lambda g: call(_one(g), g.one([None, 0.2]), 0.7),
    "clip": lambda g: call(_one(g), 0.2),
    "clamp.Tensor": _between,
    "clip.Tensor": _between,
    "round.decimals": lambda g: call(_one(g), decimals=1),
    "div.Tensor_mode": lambda g: _two(g, rounding_mode=g.one(["floor", "trunc", None])),
    "div.Scalar_mode": lambda g: call(_one(g), 0.3, rounding_mode="trunc"),
    "polygamma": lambda g: call(1, _one(g, low=1, high=2)),
    "ldexp.Tensor": lambda g: _two(g),
    "special_zeta": lambda g: call(_one(g, low=2, high=3), g.t("", low=1, high=2)),
    "complex": lambda g: _two(g),
    "_masked_scale": lambda g: (lambda d: call(g.t(d), g.t(d, dtype=torch.uint8, high=2), 2.0))(g.dims(1, 3)),
    "_dirichlet_grad": lambda g: _same(g, 3),
    "native_dropout_backward": lambda g: (lambda d: call(g.t(d), g.mask(d), 2.0))(g.dims(1, 3)),
    "rrelu_with_noise_backward": lambda g: _same(g, 3, 0.1, 0.3, True, False),
    "_prelu_kernel": lambda g: _prelu(g, False),
    "_prelu_kernel_backward": lambda g: _prelu(g, True),
}


def samples() -> dict[str, Maker]:
    """Every op of the family."""
    found = {
        str(t).removeprefix("aten.").removesuffix(".default"): by_schema(t)
        for t in registry.targets()
        if registry[t].name == "pointwise"
    }
    return {**found, **BY_HAND}
