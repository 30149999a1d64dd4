"""Python attributes that a model's forward changes: a graph cannot, so they must not matter.

`self.last = attention` only shows a value; what is computed from it outside of the model is not seen here.
`self.steps += 1`, or a hidden state kept for the next call, would stay as the first call found it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fxdp.capture.export.flat_module import Inputs
from fxdp.capture.refusals.twins import twin_of
from fxdp.errors import CaptureError
from fxdp.skip.tracker import SkipTracker, use_skip_tracker

_log = logging.getLogger("fxdp")

_CLOSE = 1e-6
"""Two calls that differ by less only round differently."""


def check_memory(
    changed: tuple[str, ...], module: nn.Module, inputs: Inputs, loss_fn: Callable[..., Any] | None
) -> None:
    """Refuse a model whose second call gives other results than its first because of `changed` attributes.

    Raises
    ------
    CaptureError : it does; all attributes that changed are named.
    """
    if not changed:
        return
    listed = ", ".join(changed)
    if _remembers(module, inputs, loss_fn):
        raise CaptureError(
            f"the model keeps values from one call to the next in Python attributes ({listed}): with the "
            "same inputs, parameters and buffers its second call gives other results than the first. A graph "
            "cannot change them. Register them as buffers, which the forward may change, or pass them as "
            "inputs and return them"
        )
    _log.warning(
        "the forward sets %s: compiled, these attributes stay as they are. Return what is to be read", listed
    )


def _remembers(module: nn.Module, inputs: Inputs, loss_fn: Callable[..., Any] | None) -> bool:
    """Whether a second call with all the same tensors differs from the first."""
    twin = twin_of(module)
    first = _run(twin, inputs, loss_fn)
    if first is None:
        return False
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            twin.get_parameter(name).copy_(parameter)
        for name, buffer in module.named_buffers():
            twin.get_buffer(name).copy_(buffer)
    second = _run(twin, inputs, loss_fn)
    return second is None or not _alike(first, second)


def _run(module: nn.Module, inputs: Inputs, loss_fn: Callable[..., Any] | None) -> list[Any] | None:
    """The leaves of the model's output; None where the model raises an error."""
    args, kwargs = pytree.tree_map_only(Tensor, torch.clone, inputs.rebuild(inputs.tensors))
    try:
        with torch.random.fork_rng(), torch.no_grad(), use_skip_tracker(SkipTracker()):
            torch.manual_seed(0)
            if loss_fn is None:
                return pytree.tree_leaves(module(*args, **kwargs))
            target = kwargs.pop("target")
            return pytree.tree_leaves(loss_fn(module(*args, **kwargs), target))
    except Exception:  # whatever the user's code raises; capture reports what it finds itself
        return None


def _alike(first: list[Any], second: list[Any]) -> bool:
    return len(first) == len(second) and all(map(_same, first, second))


def _same(a: Any, b: Any) -> bool:
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return type(a) is type(b) and (not isinstance(a, (int, float, str)) or a == b)
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not a.is_floating_point() and not a.is_complex():
        return torch.equal(a, b)
    finite = b[b.isfinite()]  # the mean of an empty local batch is not
    largest = float(finite.abs().max()) if finite.numel() else 0.0
    return torch.allclose(a, b, _CLOSE, _CLOSE * largest, equal_nan=True)
