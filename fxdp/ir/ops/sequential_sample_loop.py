"""A loop over samples as one op: a rank runs the iterations of its own samples.

    iterations(rows, shared, code, result)         stack([turn(x[i], ..., w, ...) for i in range(batch)])
    iterations_backward(grad, rows, shared, code, wanted)    the gradients of those rows and shared values

`code` is Python code of one iteration, in plain ops. Values in it may have sizes that depend on the sample's
data (`torch.where(mask)[0]`), which no op over all samples can have; the result has equal size for each
sample.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import compress
from math import inf, nan
from typing import Any, TypeAlias

import torch
from torch import Tensor

from fxdp.errors import InputError
from fxdp.ir.ops.library import library, opaque
from fxdp.torch_compat import autograd_inside

_Tensors: TypeAlias = Sequence[Tensor]

NAMES: dict[str, Any] = {"torch": torch, "device": torch.device, "inf": inf, "nan": nan}
"""The names that the code of an iteration may use."""


@lru_cache(maxsize=256)
def _iteration(code: str) -> Callable[..., Any]:
    names: dict[str, Any] = dict(NAMES)
    exec(compile(code, "<a turn of a loop over the samples>", "exec"), names)
    iteration: Callable[..., Any] = names["iteration"]
    return iteration


def described(dtype: torch.dtype, sizes: Sequence[int]) -> str:
    """Describe the result of an iteration as text: `float64[3, 4]`."""
    return f"{str(dtype).removeprefix('torch.')}{list(sizes)}"


def _described(result: str) -> tuple[torch.dtype, list[int]]:
    name, _, sizes = result.rstrip("]").partition("[")
    return getattr(torch, name), [int(size) for size in sizes.split(",") if size]


def _iterations(rows: _Tensors, shared: _Tensors, code: str, result: str) -> Tensor:
    """Return the stacked results of all iterations; empty without samples."""
    dtype, sizes = _described(result)
    made = rows[0].new_empty([len(rows[0]), *sizes], dtype=dtype)
    iteration = _iteration(code)
    for place in range(len(made)):
        value = iteration(*(each[place] for each in rows), *shared)
        if isinstance(value, Tensor) and list(value.shape) != sizes:  # otherwise a size, which is a number
            raise InputError(
                f"turn {place} of a loop over the samples gives a value of shape {list(value.shape)}, where "
                f"that of the sample with which it was captured had {sizes}; expected one for all: pad it"
            )
        made[place] = value
    return made


def _iterations_backward(
    grad: Tensor, rows: _Tensors, shared: _Tensors, code: str, wanted: Sequence[bool]
) -> list[Tensor]:
    """Return the wanted gradients; each iteration runs again and is differentiated by torch."""
    iteration, count = _iteration(code), len(rows)
    made = [torch.zeros_like(each, memory_format=torch.contiguous_format) for each in (*rows, *shared)]
    for place in range(len(grad)):
        given = [*(each[place] for each in rows), *shared]
        into = [*(each[place] for each in made[:count]), *made[count:]]
        with autograd_inside():
            leaves = [x.detach().requires_grad_(w) for x, w in zip(given, wanted, strict=True)]
            value, of = iteration(*leaves), list(compress(leaves, wanted))
            found: Sequence[Tensor | None] = ()
            if value.requires_grad:
                found = torch.autograd.grad(value, of, grad[place], allow_unused=True)
        for total, part in zip(compress(into, wanted), found, strict=False):
            if part is not None:
                total += part
    return list(compress(made, wanted))


LOOP_OP = opaque(
    "iterations(Tensor[] rows, Tensor[] shared, str code, str result) -> Tensor",
    _iterations,
    lambda rows, shared, code, result: rows[0].new_empty(
        [rows[0].shape[0], *_described(result)[1]], dtype=_described(result)[0]
    ),
)
"""Runs a loop over samples; iteration `i` reads row `i` of each tensor in `rows`."""

LOOP_BACKWARD_OP = opaque(
    "iterations_backward(Tensor grad, Tensor[] rows, Tensor[] shared, str code, bool[] wanted) -> Tensor[]",
    _iterations_backward,
    lambda grad, rows, shared, code, wanted: [
        torch.empty_like(each, memory_format=torch.contiguous_format)
        for each in compress((*rows, *shared), wanted)
    ],
)
"""Returns the gradients of the `wanted` rows and shared values; shared ones are summed over the samples."""


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    rows, shared, ctx.code, _ = inputs
    ctx.rows = len(rows)
    ctx.save_for_backward(*rows, *shared)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    kept, count = ctx.saved_tensors, ctx.rows
    wanted = [bool(needs) for part in ctx.needs_input_grad[:2] for needs in part]
    found = iter(LOOP_BACKWARD_OP(grad, kept[:count], kept[count:], ctx.code, wanted))
    grads = [next(found) if each else None for each in wanted]
    return grads[:count], grads[count:], None, None


torch.library.register_autograd("fxdp::iterations", _differentiate, setup_context=_keep, lib=library)


def _differentiate_twice(ctx: Any, *grads: Any) -> Any:
    raise RuntimeError("a loop over the samples that stayed a loop has a first derivative only")


torch.library.register_autograd("fxdp::iterations_backward", _differentiate_twice, lib=library)
