"""Python attributes that a model's forward changes: a graph cannot, so they must not matter.

`self.last = attention` only shows a value; what is computed from it outside of the model is not seen here.
`self.steps += 1`, or a hidden state kept for the next call, would stay as the first call found it.
"""

from __future__ import annotations

import contextlib
import copy
import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fxdp.capture.inputs import Inputs, run_model
from fxdp.capture.mixed_precision import MixedPrecision
from fxdp.capture.patches.module_state import held_objects
from fxdp.errors import CaptureError
from fxdp.ir.draws import kept_random_state, reseed
from fxdp.ir.model_tensors import is_stand_in
from fxdp.skip.tracker import SkipTracker, use_skip_tracker

_log = logging.getLogger("fxdp")

_CLOSE = 1e-6
"""Two calls that differ by less only round differently."""


def check_memory(
    changed: tuple[str, ...],
    module: nn.Module,
    inputs: Inputs,
    loss_fn: Callable[..., Any] | None,
    precision: MixedPrecision | None = None,
) -> None:
    """Refuse a model whose second call gives other results than its first because of `changed` attributes.

    Raises
    ------
    CaptureError : it does; all attributes that changed are named.
    """
    if not changed:
        return
    listed = ", ".join(changed)
    if _remembers(module, inputs, loss_fn, precision):
        raise CaptureError(
            f"the model keeps values from one call to the next in Python attributes ({listed}): with the "
            "same inputs, parameters and buffers its second call gives other results than the first. A graph "
            "cannot change them. Register them as buffers, which the forward may change, or pass them as "
            "inputs and return them"
        )
    _log.warning(
        "the forward sets %s: compiled, these attributes stay as they are. Return what is to be read", listed
    )


def _remembers(
    module: nn.Module,
    inputs: Inputs,
    loss_fn: Callable[..., Any] | None,
    precision: MixedPrecision | None,
) -> bool:
    """Whether a second call with all the same tensors differs from the first."""
    twin = copy_of(module, {id(p): _drawn_like(p) for p in module.parameters() if is_stand_in(p)})
    first = _run(twin, inputs, loss_fn, precision)
    if first is None:
        return False
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if not is_stand_in(parameter):
                twin.get_parameter(name).copy_(parameter)
        for name, buffer in module.named_buffers():
            if (made := twin.get_buffer(name)).shape == buffer.shape:  # another shape the first call gave it
                made.copy_(buffer)
    second = _run(twin, inputs, loss_fn, precision)
    return second is None or len(first) != len(second) or not all(map(_same, first, second))


def _run(
    module: nn.Module,
    inputs: Inputs,
    loss_fn: Callable[..., Any] | None,
    precision: MixedPrecision | None,
) -> list[Any] | None:
    """The leaves of the model's output; None where the model raises an error."""
    args, kwargs = inputs.copies()
    try:
        with aside():
            reseed(0)
            return pytree.tree_leaves(run_model(module, args, kwargs, loss_fn, precision))
    except Exception:  # whatever the user's code raises; capture reports what it finds itself
        return None


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


def _drawn_like(parameter: nn.Parameter) -> nn.Parameter:
    """Values for a stand-in, which has none, in no more memory than a row takes: all rows are the same."""
    generator = torch.Generator().manual_seed(0)
    row = torch.rand(parameter.shape[1:], generator=generator).to(parameter) + 0.5
    return nn.Parameter(row.expand(parameter.shape), parameter.requires_grad)


def copy_of(module: nn.Module, replaced: Mapping[int, Any] | None = None) -> nn.Module:
    """A deep copy; tensors that were computed from parameters and left in attributes are copied as values.

    What is `replaced`, by id, has another value in it.

    `copy.deepcopy` refuses such tensors: the `weight` that `torch.nn.utils.weight_norm` computes anew before
    each forward, or what a forward kept, in lists and dicts, too.

    Raises
    ------
    CaptureError : something else that the module holds cannot be copied; with its attribute.
    """
    computed = {
        id(value): value.detach().clone()
        for child in module.modules()
        for value in pytree.tree_leaves(vars(child))
        if isinstance(value, Tensor) and not value.is_leaf
    }
    kept = {**computed, **(replaced or {})}
    try:
        return copy.deepcopy(module, dict(kept))
    except Exception as error:  # whatever the user's classes raise
        raise CaptureError(
            f"a copy of the model is needed, and copy.deepcopy refuses {_uncopied(module, kept)}: "
            f"{type(error).__name__}: {error}. Keep it outside of the model, or give its class a __deepcopy__"
        ) from error


def _uncopied(module: nn.Module, kept: Mapping[int, Any]) -> str:
    """The first attribute that cannot be copied by itself."""
    for path, child in module.named_modules():
        for key in own_attributes(child):
            try:
                copy.deepcopy(vars(child)[key], dict(kept))
            except Exception:
                return f"{key} of {path or 'the model'} ({type(child).__name__})"
    return f"the model ({type(module).__name__})"


@contextlib.contextmanager
def aside() -> Iterator[None]:
    """Around the run of a copy: random numbers, the autograd tape and skips stay as if nothing had run."""
    with kept_random_state(), torch.no_grad(), use_skip_tracker(SkipTracker()):
        yield


class Attributes:
    """The Python attributes of all modules, beside parameters and buffers, at one moment.

    A buffer that is registered or made in a forward is none yet: it counts as an attribute. So do those of
    objects that modules hold.
    """

    def __init__(self, module: nn.Module) -> None:
        self._found = {
            name: (type(child).__name__, own)
            for name, child in module.named_modules()
            if (own := _own(child))
        }
        for name, held in held_objects(module):
            own = {key: _content(value) for key, value in vars(held).items()}
            self._found[name] = (type(held).__name__, own)

    def changed(self, later: Attributes) -> tuple[str, ...]:
        """The attributes that differ at a later moment: `step of blocks.2 (Block)`."""
        return tuple(
            f"{key} of {path or 'the model'} ({kind})"
            for path, (kind, now) in later._found.items()
            for key, value in now.items()
            if not _unchanged(self._found.get(path, ("", {}))[1], key, value)
        )


def own_attributes(module: nn.Module) -> list[str]:
    """The user's attributes: not torch's, nor what is made of a parameter before each forward."""
    parameters = {name.rpartition("_")[0] for name in module._parameters}
    return [name for name in vars(module) if name not in _TORCHS and name not in parameters]


def _own(module: nn.Module) -> dict[str, Any]:
    made = {name: buffer is not None for name, buffer in module._buffers.items()}
    return made | {name: _content(vars(module)[name]) for name in own_attributes(module)}


_TORCHS = frozenset({*vars(nn.Module()), "_flat_weights", "_flat_weight_refs"})
"""The last two are lists that `nn.LSTM` and its kin make of their parameters, anew where these changed."""


def _content(value: Any) -> Any:
    """A container by what is in it now, anything else as itself."""
    if isinstance(value, (list, tuple, set, deque)):
        return list(value)
    return dict(value) if isinstance(value, dict) else value


def _unchanged(before: Mapping[str, Any], key: str, now: Any) -> bool:
    return key in before and _is(before[key], now)


def _is(old: Any, new: Any) -> bool:
    if isinstance(old, list) and isinstance(new, list):
        return len(old) == len(new) and all(map(_is, old, new))
    if isinstance(old, dict) and isinstance(new, dict):
        return old.keys() == new.keys() and all(_is(old[key], new[key]) for key in old)
    if isinstance(old, (int, float, str, torch.Size)) and type(old) is type(new):
        return bool(old == new)
    return old is new
