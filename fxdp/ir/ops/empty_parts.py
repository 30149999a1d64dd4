"""Ops that a rank runs in place of torch's that fail, or are wrong, on a local batch without samples.

MKL fails on an empty Fourier transform, eager `pixel_unshuffle` keeps an empty input's shape, attention
between no rows and the backward of BatchNorm in evaluation divide by zero, which ends the process, and summed
margin losses of no samples are uninitialized memory. The ops of the `fxdp` library have the same schemas and
compute the same as torch, also on empty parts: as a composition of plain ops where there is one, which a
compiler can fuse, else after a check of the size.

The variance of no elements is right, but torch warns (since 2.15 as Python does, which ends a rank that runs
with `-W error`): `UNWARNED` has functions without this warning.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fxdp.ir.ops.layouts import with_rows
from fxdp.ir.ops.library import aten, library
from fxdp.torch_compat import GoneOp, OpOverload, there

_LOCAL: dict[OpOverload, OpOverload] = {}


def local_op(target: OpOverload) -> OpOverload:
    """Return the op that computes the same as `target`, also on empty parts."""
    return _LOCAL[target]


def _define(target: OpOverload | GoneOp, function: Callable[..., Any], dispatch_key: str) -> str:
    if isinstance(target, GoneOp):
        return ""
    name = target._schema.name.removeprefix("aten::").removeprefix("_")
    # without arguments by keyword alone, which a rewritten call has no place for
    schema = str(target._schema).removeprefix(target._schema.name).replace("*, ", "")
    library.define(name + schema)  # type: ignore[no-untyped-call]
    library.impl(name, function, dispatch_key)  # type: ignore[no-untyped-call]
    _LOCAL[target] = getattr(torch.ops.fxdp, name).default
    return f"fxdp::{name}"


def _asking_first(target: OpOverload, shape: Callable[..., torch.Tensor]) -> None:
    def run(self: torch.Tensor, *args: object) -> torch.Tensor:
        result: torch.Tensor = shape(self, *args) if self.numel() == 0 else target(self, *args)
        return result

    if name := _define(target, run, "CompositeExplicitAutograd"):
        torch.library.register_fake(name, shape, lib=library)


def _r2c_shape(self: torch.Tensor, dim: Sequence[int], normalization: int, onesided: bool) -> torch.Tensor:
    shape = list(self.shape)
    if onesided:
        shape[dim[-1]] = shape[dim[-1]] // 2 + 1
    return self.new_empty(shape, dtype=torch.promote_types(self.dtype, torch.complex32))


def _c2r_shape(
    self: torch.Tensor, dim: Sequence[int], normalization: int, last_dim_size: int
) -> torch.Tensor:
    shape = list(self.shape)
    shape[dim[-1]] = last_dim_size
    return self.new_empty(shape, dtype=self.dtype.to_real())


def _pixel_unshuffle(self: torch.Tensor, downscale_factor: int) -> torch.Tensor:
    r = downscale_factor
    *lead, channels, height, width = self.shape
    cells = self.view(*lead, channels, height // r, r, width // r, r)
    n = len(lead)
    moved = cells.permute(*range(n), n, n + 2, n + 4, n + 1, n + 3)
    return moved.reshape(*lead, channels * r * r, height // r, width // r)


def _batch_norm_backward(
    grad_out: torch.Tensor,
    input: torch.Tensor,
    weight: torch.Tensor | None,
    running_mean: torch.Tensor,
    running_var: torch.Tensor,
    save_mean: torch.Tensor | None,
    save_invstd: torch.Tensor | None,
    train: bool,
    eps: float,
    output_mask: Sequence[bool],
) -> tuple[torch.Tensor | None, ...]:
    """Differentiate `y = (x - mean) * invstd * weight + bias` with constant statistics (`train=False`)."""
    exact = torch.promote_types(input.dtype, torch.float32)
    channels = [1, -1] + [1] * (input.dim() - 2)
    others = [0, *range(2, input.dim())]
    grad, x = grad_out.to(exact), input.to(exact)
    invstd = torch.rsqrt(running_var.to(exact) + eps)
    scale = invstd if weight is None else invstd * weight.to(exact)
    centred = x - running_mean.to(exact).view(channels)
    kept = input.dtype if weight is None else weight.dtype
    return (
        (grad * scale.view(channels)).to(input.dtype) if output_mask[0] else None,
        ((centred * grad).sum(others) * invstd).to(kept) if output_mask[1] else None,
        grad.sum(others).to(kept) if output_mask[2] else None,
    )


def _multi_margin_loss(
    self: torch.Tensor,
    target: torch.Tensor,
    p: float,
    margin: float,
    weight: torch.Tensor | None,
    reduction: int,
) -> torch.Tensor:
    """Return the summed loss; all further reductions are right in torch."""
    losses: torch.Tensor = aten.multi_margin_loss.default(self, target, p, margin, weight, 0)
    return losses.sum()


def _multilabel_margin_loss(
    self: torch.Tensor, target: torch.Tensor, reduction: int
) -> tuple[torch.Tensor, torch.Tensor]:
    losses, is_target = aten.multilabel_margin_loss_forward.default(self, target, 0)
    return losses.sum(), is_target


_define(aten.multi_margin_loss.default, _multi_margin_loss, "CompositeImplicitAutograd")
_define(aten.multilabel_margin_loss_forward.default, _multilabel_margin_loss, "CompositeImplicitAutograd")
_define(aten.pixel_unshuffle.default, _pixel_unshuffle, "CompositeImplicitAutograd")
_define(aten.native_batch_norm_backward.default, _batch_norm_backward, "CompositeImplicitAutograd")
_asking_first(aten._fft_c2c.default, lambda self, dim, normalization, forward: torch.empty_like(self))
_asking_first(aten._fft_r2c.default, _r2c_shape)
_asking_first(aten._fft_c2r.default, _c2r_shape)


def _attention(target: OpOverload | GoneOp, of_none: Callable[..., Any]) -> None:
    """Define attention `[samples, heads, rows, features]` that computes nothing between no rows."""
    if isinstance(target, GoneOp):
        return
    arguments = target._schema.arguments
    names, by_position = [a.name for a in arguments], sum(not a.kwarg_only for a in arguments)

    def attend(*args: Any) -> Any:
        by_name = zip(names[by_position:], args[by_position:], strict=False)
        return target(*args[:by_position], **dict(by_name))

    in_rows = [name in ("grad_out", "query", "key", "value", "out") for name in names]

    def run(*args: Any) -> Any:
        if not args[0].shape[2]:
            return of_none(*args)
        return attend(*(with_rows(x) if laid else x for x, laid in zip(args, in_rows, strict=False)))

    torch.library.register_fake(_define(target, run, "CompositeExplicitAutograd"), attend, lib=library)


_attention(
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    lambda query, key, value, *_: (
        query.new_empty(*query.shape[:3], value.shape[3]),
        torch.empty(query.shape[:3], dtype=torch.promote_types(query.dtype, torch.float32)),
    ),
)
_attention(
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
    lambda grad_out, *operands: tuple(map(torch.empty_like, operands[:3])),
)


def _unwarned(op: OpOverload) -> Callable[..., Any]:
    def run(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.numel() > 0:
            return op(self, *args, **kwargs)
        with warnings.catch_warnings():  # the user's batch has samples: on one device nothing warns
            warnings.filterwarnings("ignore", r".*degrees of freedom is <= 0", UserWarning)
            return op(self, *args, **kwargs)

    run.__name__ = str(op).replace(".", "_")
    return run


UNWARNED: Mapping[Any, Callable[..., Any]] = {
    op: _unwarned(op)
    for packet in (aten.var, aten.std, aten.var_mean, aten.std_mean)
    for op in there((packet.correction, packet.dim))
}
"""Functions that compute a variance of a possibly empty part without torch's warning, by op."""
