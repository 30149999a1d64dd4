"""Fused attention on CUDA, verified through attention as plain math: see `cuda`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fxdp.rules.proof.samples import Sample as T
from tests.rules.samples.draw import Call, Draw, Maker, call

aten = torch.ops.aten


def _gradients(function: Callable[..., Tensor], grad: Tensor, *inputs: Tensor | None) -> list[Tensor | None]:
    """Gradients of a function in those inputs that are tensors."""
    leaves = [None if x is None else x.detach().requires_grad_() for x in inputs]
    with torch.enable_grad():
        result = function(*leaves)
    wanted = [leaf for leaf in leaves if leaf is not None]
    found = iter(torch.autograd.grad(result, wanted, grad))
    return [None if leaf is None else next(found) for leaf in leaves]


def _attend(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, causal: bool) -> Tensor:
    return aten._scaled_dot_product_attention_math.default(query, key, value, bias, 0.0, causal)[0]


def _logsumexp(query: Tensor, key: Tensor) -> Tensor:
    return (query @ key.mT / query.shape[-1] ** 0.5).logsumexp(-1)


def _seed() -> Tensor:
    return torch.zeros((), dtype=torch.int64)


def _flash(q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0, causal: bool = False) -> Any:
    out = _attend(q, k, v, None, causal)
    return out, _logsumexp(q, k), None, None, None, None, _seed().expand(2).clone(), _seed(), torch.zeros(0)


def _efficient(q: Tensor, k: Tensor, v: Tensor, bias: Any, lse: bool) -> Any:
    return _attend(q, k, v, bias, False), _logsumexp(q, k), _seed(), _seed()


def _cudnn(q: Tensor, k: Tensor, v: Tensor, bias: Any, lse: bool) -> Any:
    out = _attend(q, k, v, bias, False)
    return out, _logsumexp(q, k).unsqueeze(-1), None, None, None, None, _seed(), _seed(), None


def _overrideable(q: Tensor, k: Tensor, v: Tensor, bias: Any = None) -> Any:
    return _attend(q, k, v, bias, False), _logsumexp(q, k), None, None, None, None, _seed(), _seed(), None


def _flash_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Any:
    causal = rest[7]
    return _gradients(lambda *qkv: _attend(*qkv, None, causal), grad, q, k, v)


def _efficient_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Any, *rest: Any) -> Any:
    found = _gradients(lambda q, k, v, b: _attend(q, k, v, b, False), grad, q, k, v, bias)
    return found


def _cudnn_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Any, lse: Any, *rest: Any) -> Any:
    bias = rest[2]
    return _gradients(lambda q, k, v: _attend(q, k, v, bias, False), grad, q, k, v)


def _attend_by_position(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool) -> Tensor:
    return _attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), bias, causal).transpose(1, 2)


def _by_position(function: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Any:
    out, *others = function(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), *rest)
    return out.transpose(1, 2), *others


def _by_position_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Any, causal: bool) -> Any:
    return _gradients(lambda *args: _attend_by_position(*args, causal), grad, q, k, v, bias)


STAND_INS: dict[str, Callable[..., Any]] = {
    "_scaled_dot_product_flash_attention": _flash,
    "_scaled_dot_product_flash_attention_backward": _flash_backward,
    "_scaled_dot_product_efficient_attention": _efficient,
    "_scaled_dot_product_efficient_attention_backward": _efficient_backward,
    "_scaled_dot_product_cudnn_attention": _cudnn,
    "_scaled_dot_product_cudnn_attention_backward": _cudnn_backward,
    "_scaled_dot_product_fused_attention_overrideable": _overrideable,
    "_scaled_dot_product_fused_attention_overrideable_backward": lambda grad, q, k, v, bias, mask, *rest: (
        _efficient_backward(grad, q, k, v, bias)
    ),
    "_flash_attention_forward": lambda q, k, v, a, b, m, n, dropout, causal, debug: (
        *_by_position(_flash, q, k, v, dropout, causal)[:2],
        _seed(),
        _seed(),
        torch.zeros(0),
    ),
    "_flash_attention_backward": lambda grad, q, k, v, out, lse, a, b, m, n, dropout, causal, *rest: (
        _by_position_backward(grad, q, k, v, None, causal)[:3]
    ),
    "_efficient_attention_forward": lambda q, k, v, bias, *rest: (
        _attend_by_position(q, k, v, bias, False),
        _logsumexp(q.transpose(1, 2), k.transpose(1, 2)),
        _seed(),
        _seed(),
        5,
        5,
    ),
    "_efficient_attention_backward": lambda grad, q, k, v, bias, *rest: _by_position_backward(
        grad, q, k, v, bias, False
    ),
}


def _qkv(g: Draw) -> tuple[T, T, T]:
    return g.t("N258"), g.t("N258"), g.t("N258")


def _bias(g: Draw) -> T | None:
    return g.one([None, g.t("1255"), g.t("N155")])


def _flash_backward_call(g: Draw) -> Call:
    state = (
        g.t("N258"),
        g.t("N25"),
        None,
        None,
        5,
        5,
        0.0,
        g.flag(),
        T(2, dtype=torch.int64),
        T(dtype=torch.int64),
    )
    return call(g.t("N258"), *_qkv(g), *state)


def _efficient_backward_call(g: Draw) -> Call:
    seeds = (T(dtype=torch.int64), T(dtype=torch.int64))
    return call(g.t("N258"), *_qkv(g), _bias(g), g.t("N258"), g.t("N25"), *seeds, 0.0, [True] * 4)


def _cudnn_backward_call(g: Draw) -> Call:
    seeds = (T(dtype=torch.int64), T(dtype=torch.int64))
    return call(
        g.t("N258"), *_qkv(g), g.t("N258"), g.t("N251"), *seeds, _bias(g), None, None, 5, 5, 0.0, False
    )


def _overrideable_backward_call(g: Draw) -> Call:
    state = (
        g.t("N258"),
        g.t("N25"),
        None,
        None,
        5,
        5,
        0.0,
        False,
        T(dtype=torch.int64),
        T(dtype=torch.int64),
    )
    return call(g.t("N258"), *_qkv(g), g.t("1255"), [True] * 4, *state)


SAMPLES: dict[str, Maker] = {
    "_scaled_dot_product_flash_attention": lambda g: call(*_qkv(g), 0.0, g.flag()),
    "_scaled_dot_product_flash_attention_backward": _flash_backward_call,
    "_scaled_dot_product_efficient_attention": lambda g: call(*_qkv(g), _bias(g), True),
    "_scaled_dot_product_efficient_attention_backward": _efficient_backward_call,
    "_scaled_dot_product_cudnn_attention": lambda g: call(*_qkv(g), _bias(g), True),
    "_scaled_dot_product_cudnn_attention_backward": _cudnn_backward_call,
    "_scaled_dot_product_fused_attention_overrideable": lambda g: call(*_qkv(g), _bias(g)),
    "_scaled_dot_product_fused_attention_overrideable_backward": _overrideable_backward_call,
    "_flash_attention_forward": lambda g: call(
        g.t("N528"), g.t("N528"), g.t("N528"), None, None, 5, 5, 0.0, g.flag(), False
    ),
    "_flash_attention_backward": lambda g: call(
        *(g.t("N528") for _ in range(5)),
        g.t("N25"),
        None,
        None,
        5,
        5,
        0.0,
        g.flag(),
        T(2, dtype=torch.int64),
        T(dtype=torch.int64),
    ),
    "_efficient_attention_forward": lambda g: call(
        g.t("N528"), g.t("N528"), g.t("N528"), _bias(g), None, None, None, None, 0.0, 0, True
    ),
    "_efficient_attention_backward": lambda g: call(
        *(g.t("N528") for _ in range(4)),
        _bias(g),
        g.t("N528"),
        None,
        None,
        5,
        5,
        g.t("N25"),
        0.0,
        T(dtype=torch.int64),
        T(dtype=torch.int64),
        0,
        True,
    ),
}
