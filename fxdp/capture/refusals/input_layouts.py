"""Inputs that lie in memory other than a program has them, where the model's code reads how they lie.

A program has its inputs in the order of their dims, wherever the caller's lie. Most models do not notice. One
that reads strides (`layout_reads`) is exported once more with the inputs as they are: if its code reads the
same as with those of the program, all is well; else the call is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxdp.capture.captured import Captured, LayoutRead
from fxdp.capture.export.flat_module import FlatModule
from fxdp.capture.inputs import flatten_inputs
from fxdp.capture.patches.deferred import deferring
from fxdp.capture.patches.module_state import numbers_of, unchanged
from fxdp.capture.patches.patch_tables import capture_patches
from fxdp.capture.sites import site_of_exception
from fxdp.errors import FxdpError, InputError
from fxdp.ir.memory_layout import UNCLEAR, Arrangement, arranged, arrangement, in_order
from fxdp.ir.notes import Site
from fxdp.torch_compat import compile_lock

_COPIES = (torch.ops.aten.contiguous.default, torch.ops.aten.clone.default)


def check_layouts(
    found: Captured,
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    loss_fn: Callable[..., Any] | None = None,
) -> None:
    """Refuse inputs in which a model's code reads other strides or offsets than in those of its program.

    Raises
    ------
    InputError : names the first line that reads something else, and the inputs.
    """
    inputs = flatten_inputs(module, args, kwargs)
    orders = _orders(inputs.tensors, found.orders)
    usual = [_usual(*pair) for pair in zip(inputs.tensors, orders, strict=True)]
    given = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in inputs.tensors]
    with compile_lock, unchanged(module), capture_patches(module, loss_fn):
        program = FlatModule(module, inputs, loss_fn, numbers_of(module, set(found.numbers), set()))
        expected = _exported(program, usual)
        try:
            own = _exported(program, given)
        except FxdpError:
            raise
        except Exception as error:  # as one device does: a view that these strides do not allow
            site, what = site_of_exception(error), str(error).splitlines()[0]
            raise _refusal(site, what, given, usual, inputs.paths) from error
    read = _difference(expected, own)
    if read is not None:
        what = f"{read.how} tells one device something else"
        raise _refusal(read.site, what, given, usual, inputs.paths)


def unusual(found: Captured, tensors: Sequence[Tensor]) -> tuple[Any, ...]:
    """How those inputs lie that a program which reads that has otherwise; empty if there are none.

    Sizes do not count, and where memory starts only if the model's code reads it.
    """
    if not found.layout_reads:
        return ()
    starts = any(read.offset for read in found.layout_reads)
    pairs = enumerate(zip(tensors, _orders(tensors, found.orders), strict=True))
    return tuple((i, _form(t)) for i, (t, order) in pairs if t.numel() and not _lies(t, order, starts))


def _orders(tensors: Sequence[Tensor], orders: Sequence[Arrangement]) -> Sequence[Arrangement]:
    return orders or [in_order(tensor.dim()) for tensor in tensors]


def _lies(tensor: Tensor, order: Arrangement, starts: bool) -> bool:
    """Whether a tensor fills its memory in this order; dims of size 1 have any stride."""
    wanted = arranged(tensor.shape, order, tensor.dtype, torch.device("meta")).stride()
    lies = zip(tensor.shape, tensor.stride(), wanted, strict=True)
    begins = tensor.storage_offset() == 0 or not starts
    return begins and all(n == 1 or have == want for n, have, want in lies)


def _form(tensor: Tensor) -> Any:
    """Order and gaps of a tensor, whether it starts later, and what is of size 1."""
    order = arrangement(tensor)
    if order == UNCLEAR:
        return tensor.shape, tensor.stride()
    gaps, step = [], 1
    for dim in reversed(order):
        if tensor.shape[dim] > 1:
            gaps.append(tensor.stride(dim) > step)
            step = tensor.stride(dim) * tensor.shape[dim]
    return order, tuple(gaps), tensor.storage_offset() > 0, tuple(n == 1 for n in tensor.shape)


def _usual(tensor: Tensor, order: Arrangement) -> Tensor:
    made = arranged(tensor.shape, order, tensor.dtype, tensor.device)
    return made.requires_grad_(tensor.requires_grad)


def _exported(
    program: FlatModule, tensors: Sequence[Tensor]
) -> tuple[tuple[LayoutRead, ...], list[tuple[Any, str]]]:
    """What the code reads, and the ops that it calls but for copies."""
    with deferring():
        exported = torch.export.export(program, tuple(tensors), strict=False)
    calls = [n for n in exported.graph.nodes if n.op == "call_function" and n.target not in _COPIES]
    texts = [str(fx.map_arg((n.args, n.kwargs), lambda _: "%")) for n in calls]
    return program.record.layout_reads, list(zip([n.target for n in calls], texts, strict=True))


def _difference(expected: Any, found: Any) -> LayoutRead | None:
    """The first read that tells something else; `is_contiguous` may, where only copies depend on it."""
    (usual, calls), (given, own_calls) = expected, found
    for one, other in zip_longest(usual, given):
        if one is None or other is None or one.site != other.site:
            return one or other  # type: ignore[no-any-return]
        if one.told != other.told and not (one.how == "is_contiguous" and calls == own_calls):
            return other  # type: ignore[no-any-return]
    return None


def _refusal(
    site: Site, what: str, given: Sequence[Tensor], usual: Sequence[Tensor], paths: Sequence[str]
) -> InputError:
    others = [
        (path, f"strides {list(a.stride())}, offset {a.storage_offset()} instead of {list(b.stride())}, 0")
        for path, a, b in zip(paths, given, usual, strict=True)
        if (a.stride(), a.storage_offset()) != (b.stride(), 0)
    ]
    shown = "; ".join(f"{path} ({how})" for path, how in others)
    copies = ", ".join(f"{path}.clone(memory_format=torch.contiguous_format)" for path, _ in others)
    return InputError(
        f"at {site}: the model's code reads how its inputs lie in memory, and these lie other than a program "
        f"has them: {shown}. There {what}. Pass {copies}"
    )
