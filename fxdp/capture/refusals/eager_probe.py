"""Eager probe: find all lines of a model that no graph can hold, by running the model once eagerly.

A trace stops at the first such line. So a model that cannot be captured is run on the caller's inputs, while
all reads of tensor values are recorded, and one error can name all lines.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from fxdp import torch_compat
from fxdp.capture.inputs import Inputs, run_model
from fxdp.capture.locations import location_of_call
from fxdp.capture.mixed_precision import MixedPrecision
from fxdp.capture.patches.unbacked_hints import HintedNumber
from fxdp.capture.refusals.stateful import aside, copy_of
from fxdp.ir.graph.metadata import Location

_READS: dict[Any, str] = {
    Tensor.item: ".item()",
    Tensor.__bool__: "bool() or if",
    Tensor.__float__: "float()",
    Tensor.__int__: "int()",
    Tensor.__index__: "use as an index or size",
    Tensor.tolist: ".tolist()",
    Tensor.numpy: ".numpy()",
    torch.equal: "torch.equal",
    torch.allclose: "torch.allclose",
    torch.is_nonzero: "torch.is_nonzero",
}
_DRAWS = frozenset({torch.rand, torch.randn, torch.randint})
_DRAWN = "a random number"
"""Pseudo name for random numbers among the names of buffers."""


@dataclass(frozen=True, slots=True)
class Read:
    """One location that reads a tensor's value into Python: how, the tensor, and the line."""

    how: str
    tensor: str
    location: Location
    drawn: bool = False
    """True if the value is a random number, independent of the inputs."""

    def __str__(self) -> str:
        return f"{self.how} of {self.tensor} at {self.location}"


@dataclass
class _Listener(TorchFunctionMode):
    """Mode that records every read while a module runs."""

    path: list[str]
    sources: dict[int, tuple[Tensor, frozenset[str]]]
    """Buffers, random numbers, and values computed from only these, by `id`: tensor and source names."""
    found: dict[Read, None] = field(default_factory=dict)
    numbers: list[HintedNumber] = field(default_factory=list)
    """The integers that were read, except random ones."""
    read: set[str] = field(default_factory=set)
    """Names of the buffers that were read by value, also through values computed from buffers alone."""

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        how, place = _READS.get(func), None
        if how is not None and args and isinstance(args[0], Tensor):
            of = self._sources(args[0]) or frozenset()
            where = replace(location_of_call(), module=self.path[-1] if self.path else "")
            what = f"a tensor of shape {list(args[0].shape)}"
            self.found[Read(how, what, where, _DRAWN in of)] = None
            self.read |= of
            place = (where.file, where.line) if _is_integer(args[0]) and _DRAWN not in of else None
        # torch reads a size that is a tensor (`x.expand(n, 4)`) in C++, which no mode records
        for arg in args[1:]:
            if isinstance(arg, (tuple, list)) and all(map(_may_be_size, arg)):
                self.read |= self._sources(arg) or set()
        result = func(*args, **(kwargs or {}))
        if (mask := selecting_mask(func, args)) is not None:
            where = location_of_call()
            self.numbers.append(HintedNumber((where.file, where.line), int((mask != 0).sum())))
        if place is not None and type(result) in (int, list):
            self.numbers.append(HintedNumber(place, result))
        sources = frozenset({_DRAWN}) if func in _DRAWS else self._sources((args, kwargs))
        if isinstance(result, Tensor) and sources:
            self.sources[id(result)] = result, sources
        return result

    def _sources(self, values: Any) -> frozenset[str] | None:
        """Return the sources from which values are computed; None if any operand has an unknown source."""
        found: set[str] = set()
        for leaf in pytree.tree_leaves(values):
            if isinstance(leaf, Tensor):
                if id(leaf) not in self.sources:
                    return None
                found |= self.sources[id(leaf)][1]
        return frozenset(found)


@dataclass(frozen=True, slots=True)
class EagerProbe:
    """Result of one run: each location that reads a value, once, and whether the model ran to the end."""

    reads: tuple[Read, ...]
    runs: bool
    error: Exception | None = None
    """The exception that the model raised."""
    read: frozenset[str] = frozenset()
    """Names of the buffers that were read by value, alone or through values computed from buffers alone."""
    written: frozenset[str] = frozenset()
    """Names of the buffers that the model wrote or assigned."""
    numbers: tuple[HintedNumber, ...] = ()
    """The integers that the model read, in order."""


def eager_probe(
    module: nn.Module,
    inputs: Inputs,
    loss_fn: Callable[..., Any] | None,
    tensors: Sequence[Tensor] | None = None,
    precision: MixedPrecision | None = None,
) -> EagerProbe:
    """Run a copy of the module on copies of the inputs (or of `tensors` instead), as far as possible."""
    path: list[str] = []
    differentiates = torch.is_grad_enabled()  # the model may compute gradients itself
    try:
        with aside(), torch_compat.as_if_exporting():
            twin = copy_of(module)
            args, kwargs = inputs.copies(tensors)
            _name_modules(twin, path)
            before = _states(twin)
            sources = {id(b): (b, frozenset({name})) for name, b in twin.named_buffers()}
            listener = _Listener(path, sources)
            raised: Exception | None = None
            try:
                with listener, torch.set_grad_enabled(differentiates):
                    run_model(twin, args, kwargs, loss_fn, precision)
            except Exception as error:
                raised = error
            after = _states(twin)
    except Exception:  # the model cannot be copied
        return EagerProbe((), runs=False)
    written = frozenset(name for name, state in before.items() if not _same(state, after.get(name)))
    return EagerProbe(
        tuple(listener.found),
        raised is None,
        raised,
        frozenset(listener.read - {_DRAWN}),
        written,
        tuple(listener.numbers),
    )


_State: TypeAlias = "tuple[Tensor, int, Tensor]"


def _states(module: nn.Module) -> dict[str, _State]:
    """Return each buffer with version and a copy of the values: BatchNorm writes without a new version."""
    return {name: (b, b._version, b.clone()) for name, b in module.named_buffers()}


def _same(before: _State, after: _State | None) -> bool:
    if after is None or before[0] is not after[0] or before[1] != after[1]:
        return False
    return torch.equal(before[2], after[2])


def _name_modules(module: nn.Module, path: list[str]) -> None:
    """Keep the name of the running module at the end of `path`, by hooks."""

    def leave(*_: Any) -> None:
        path.pop()

    for name, child in module.named_modules():

        def enter(*_: Any, name: str = name) -> None:
            path.append(name)

        child.register_forward_pre_hook(enter)
        child.register_forward_hook(leave, always_call=True)


def _is_integer(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)


def _may_be_size(value: Any) -> bool:
    return isinstance(value, int) or (isinstance(value, Tensor) and value.numel() == 1)


_NONZERO = (Tensor.nonzero, torch.nonzero)


def selecting_mask(func: Any, args: Any) -> Tensor | None:
    """Return the mask by which a function selects: `x[mask]`, `mask.nonzero()`, `torch.where(mask)`."""
    if func is Tensor.__getitem__:
        return args[1] if isinstance(args[1], Tensor) and args[1].dtype == torch.bool else None
    one = len(args) == 1 and isinstance(args[0], Tensor)
    return args[0] if one and (func in _NONZERO or func is torch.where) else None
