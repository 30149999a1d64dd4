"""BatchNorm by moments in the forward (`fxdp.ir.ops.moments`) and by two sums over the batch in the backward.

The two sums of the backward are exactly the gradients of bias and weight, so that one reduction serves the
parameters' gradients and the gradient of the input.

With `Pipeline(batch_stats="microbatch")` outputs and gradients do not depend on other parts of the batch
(`fxdp.ir.ops.standardize`); only the running statistics use the moments of the global batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fxdp.capture.cross_sample.table import OpCall, count, decomposes, sum_type
from fxdp.ir.ops.moments import MOMENTS_OP
from fxdp.ir.ops.standardize import STANDARDIZE_BACKWARD_OP, STANDARDIZE_OP
from fxdp.torch_compat import aten

_NORMED = ("out", "mean", "invstd")
_RUNNING = ("running_mean", "running_var")

_RESULTS: dict[Any, tuple[str, ...]] = {
    aten.native_batch_norm.default: _NORMED,
    aten.miopen_batch_norm.default: _NORMED,
    aten.cudnn_batch_norm.default: (*_NORMED, "reserve"),
    aten._native_batch_norm_legit.default: _NORMED,
    aten._native_batch_norm_legit.no_stats: _NORMED,
    aten._native_batch_norm_legit_functional.default: (*_NORMED, *_RUNNING),
    aten._batch_norm_with_update.default: (*_NORMED, "reserve"),
    aten._batch_norm_with_update_functional.default: (*_NORMED, "reserve", *_RUNNING),
}
"""Names of the results of each op; an op that takes but does not return running statistics mutates them."""


@dataclass(frozen=True)
class _Normed:
    """The results of a training-mode BatchNorm."""

    out: torch.Tensor
    mean: torch.Tensor
    invstd: torch.Tensor
    running_mean: torch.Tensor | None
    running_var: torch.Tensor | None

    @property
    def reserve(self) -> torch.Tensor:
        """Return an empty reserve buffer, which only cuDNN's own backward reads."""
        return torch.empty([0], dtype=torch.uint8, device=self.out.device)


@decomposes(*_RESULTS)
def _forward(call: OpCall) -> Any:
    if not call.get("training", default=True) or not call.holds_batch("input"):
        return NotImplemented
    done, results = _normalize(call), _RESULTS[call.op]
    for name in _RUNNING:
        if name not in results and getattr(done, name) is not None:
            call[name].copy_(getattr(done, name))
    return tuple(getattr(done, name) for name in results)


def _normalize(call: OpCall) -> _Normed:
    """Compute a training-mode BatchNorm, and the new running statistics."""
    x, weight, bias, eps = call["input"], call["weight"], call["bias"], call.get("eps", "epsilon")
    dims = [dim for dim in range(x.dim()) if dim != 1]
    wide = x.to(sum_type(x.dtype))
    n = count(x, dims)
    statistics = MOMENTS_OP(wide, dims)
    mean, squares = statistics[1], statistics[2]
    invstd = torch.rsqrt(squares / n + eps)
    if call.batch.own_statistics:
        out = STANDARDIZE_OP(wide, dims, eps)
    else:
        out = (wide - _channels(mean, x)) * _channels(invstd, x)
    if weight is not None:
        out = out * _channels(weight.to(wide.dtype), x)
    if bias is not None:
        out = out + _channels(bias.to(wide.dtype), x)
    means, variances = call.get("running_mean"), call.get("running_var")
    momentum = call.get("momentum", "exponential_average_factor")
    return _Normed(
        out.to(x.dtype),
        mean,
        invstd,
        None if means is None else _moved(means, mean, momentum),
        # as in torch, the running variance is unbiased, and the variance that normalizes is biased
        None if variances is None else _moved(variances, squares / (n - 1), momentum),
    )


def _channels(values: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Reshape one value per channel for broadcasting with `x`."""
    return values.view([1, values.shape[0]] + [1] * (x.dim() - 2)) if x.dim() != 2 else values


def _moved(running: torch.Tensor, new: torch.Tensor, momentum: float) -> torch.Tensor:
    """Return the running average after one more batch."""
    return (new * momentum + running * (1 - momentum)).to(running.dtype)


@decomposes(
    aten.native_batch_norm_backward.default,
    aten.batch_norm_backward.default,
    aten.cudnn_batch_norm_backward.default,
    aten.miopen_batch_norm_backward.default,
)
def _backward(call: OpCall) -> Any:
    """Return the gradients of input, weight and bias."""
    if not call.holds_batch("input"):
        return NotImplemented
    # backwards of cuDNN and MIOpen have neither argument: training only, and gradients of all three operands
    training = call.get("train", "update", default=True)
    mask = call.get("output_mask", default=(True, True, True))
    if training and call.batch.own_statistics:
        return _gradients_of_parts(call, mask)
    return _gradients(call, training, mask)


def _gradients(call: OpCall, training: bool, mask: Sequence[bool]) -> tuple[Any, Any, Any]:
    """Return the gradients from two sums, which are also the gradients of weight and bias."""
    grad, x, weight = call.get("grad_out", "grad_output"), call["input"], call["weight"]
    if training:
        mean, invstd = call["save_mean"], call.get("save_invstd", "save_var")
    else:
        mean = call["running_mean"]
        invstd = torch.rsqrt(call["running_var"] + call.get("eps", "epsilon"))
    dims = [dim for dim in range(x.dim()) if dim != 1]
    wide = sum_type(x.dtype)
    grad_wide, invstd = grad.to(wide), invstd.to(wide)
    normed = (x.to(wide) - _channels(mean.to(wide), x)) * _channels(invstd, x)
    grad_bias = grad_wide.sum(dims)
    grad_weight = (grad_wide * normed).sum(dims)
    inner = grad_wide
    if training:
        n = count(x, dims)
        inner = grad_wide - _channels(grad_bias / n, x) - normed * _channels(grad_weight / n, x)
    scale = invstd if weight is None else invstd * weight.to(wide)
    kind = x.dtype if weight is None else weight.dtype
    return (
        (inner * _channels(scale, x)).to(x.dtype) if mask[0] else None,
        grad_weight.to(kind) if mask[1] else None,
        grad_bias.to(kind) if mask[2] else None,
    )


def _gradients_of_parts(call: OpCall, mask: Sequence[bool]) -> tuple[Any, Any, Any]:
    """Return the gradients if each part of the batch is normalized by statistics of the part."""
    grad, x, weight = call.get("grad_out", "grad_output"), call["input"], call["weight"]
    eps = call.get("eps", "epsilon")
    dims = [dim for dim in range(x.dim()) if dim != 1]
    wide = x.to(sum_type(x.dtype))
    grad_wide = grad.to(wide.dtype)
    inner = grad_wide if weight is None else grad_wide * _channels(weight.to(wide.dtype), x)
    kind = x.dtype if weight is None else weight.dtype
    return (
        STANDARDIZE_BACKWARD_OP(inner, wide, dims, eps).to(x.dtype) if mask[0] else None,
        (grad_wide * STANDARDIZE_OP(wide, dims, eps)).sum(dims).to(kind) if mask[1] else None,
        grad_wide.sum(dims).to(kind) if mask[2] else None,
    )
