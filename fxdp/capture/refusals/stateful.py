"""Refuse Python attributes that a model's forward changes, if the changes affect results.

A graph cannot change attributes. `self.last = attention` only exposes a value; computations with the value
outside of the model are not checked here. `self.steps += 1`, or a hidden state kept for the next call, would
keep the value of the first call.
"""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fxdp.capture.captured import SideEffect
from fxdp.capture.locations import is_own_file
from fxdp.capture.patches.module_state import keep_all, unchanged
from fxdp.capture.patches.outside_state import ExternalState
from fxdp.capture.patches.side_effects import words_of
from fxdp.capture.refusals.changed_decisions import Decisions
from fxdp.capture.snapshot import ABSENT, ValueSnapshot
from fxdp.errors import CaptureError
from fxdp.ir.graph.draws import kept_random_state, reseed
from fxdp.ir.graph.metadata import Location
from fxdp.ir.graph.model_tensors import is_placeholder_parameter
from fxdp.skip.tracker import SkipTracker, use_skip_tracker

_log = logging.getLogger("fxdp")

_MOST_LINES = 16
"""Largest number of deciding lines for which the inverted decision is tried."""
_CLOSE = 1e-6
"""Relative tolerance: results of two calls that differ by less count as rounding differences."""


def check_memory(
    module: nn.Module,
    changed: Sequence[ChangedAttribute],
    outside: ExternalState,
    run: Callable[[nn.Module], Any],
) -> None:
    """Raise if later calls of a model give results that differ from the first because of `changed`.

    Raises
    ------
    CaptureError : results differ; all changed attributes and places are named, with the lines.
    """
    if not changed and not outside.changed:
        return
    at = outside.read.location_of_change
    found = [(str(one), at(one.key), True) for one in changed]
    found += [(p.name, at(p.label), place not in outside.words) for place, p in outside.changed.items()]
    if how := _Twin(module, changed, outside, run).remembers():
        listed = ", ".join(f"{name} at {line}" for name, line, _ in found)
        raise CaptureError(
            f"the model keeps values from one call to the next in Python ({listed}): with the same inputs, "
            f"parameters and buffers {how}. A graph cannot change them. Register them as buffers, which the "
            "forward may change, pass them as inputs and return them, or change them outside of the forward"
        )
    lost = [(name, line) for name, line, is_lost in found if is_lost]
    is_own = any(not line.file or is_own_file(line.file) for _, line in lost)
    if lost:  # a package that notes its first call, as transformers does, is nothing that a user can change
        _log.log(
            logging.WARNING if is_own else logging.INFO,
            "the forward sets %s: compiled, these stay as they are. Return what is to be read, or call the "
            "model itself (compiled.module)",
            ", ".join(f"{name} at {line}" for name, line in lost),
        )


def warn_of_side_effects(effects: Sequence[SideEffect]) -> None:
    """Warn of what a forward does beside computing, with the lines."""
    if effects:
        _log.warning(
            "the forward %s: compiled, this happens while the model is captured, and not at each call. Do it "
            "outside of the forward, or call the model itself (compiled.module)",
            words_of(effects),
        )


class _Twin:
    """A copy of a model, to be called several times with the same tensors."""

    def __init__(
        self,
        module: nn.Module,
        changed: Sequence[ChangedAttribute],
        outside: ExternalState,
        run: Callable[[nn.Module], Any],
    ) -> None:
        self._module, self._changed, self._outside, self._run = module, changed, outside, run
        self._places = list(outside.changed.values())
        self._other = {f"{one.path}.{one.key}".lstrip(".") for one in changed}  # these may be new parameters
        placeholders = {id(p): _drawn_like(p) for p in module.parameters() if is_placeholder_parameter(p)}
        self._twin = copy_of(module, placeholders)
        self._trains = torch.is_grad_enabled() and not placeholders

    def remembers(self) -> str:
        """Return how later calls differ from the first; empty if equal, or if a call fails."""
        with self._as_before():
            first = self._results()
            if first is None:
                return ""
            for call in ("second", "third"):
                if not _all_same(first, self._results()):
                    return f"its {call} call gives other results than the first"
        return self._decides()

    def _decides(self) -> str:
        found = Decisions()
        before = self._results_with(found)
        if before is None:
            return ""
        for line in list(found.lines)[:_MOST_LINES]:
            other = self._results_with(Decisions(line))
            if other is not None and not _all_same(before, other):  # None: the inverted branch fails
                return f"it gives other results the other way at {Location.at(*line)}"
        return ""

    @contextlib.contextmanager
    def _as_before(self) -> Iterator[None]:
        with unchanged(self._twin), self._outside.put_back():
            yield

    def _results_with(self, decisions: Decisions) -> list[Any] | None:
        with self._as_before():
            for one in self._changed:
                own = vars(self._twin.get_submodule(one.path))
                if one.key in own:
                    own[one.key] = decisions.watched(own[one.key])
            for place in self._places:
                place.put(decisions.watched(place.value()))
            return self._results()

    def _results(self) -> list[Any] | None:
        """Return outputs, gradients and buffers of a call with the model's tensors; None if it fails."""
        with torch.no_grad():
            for name, parameter in self._module.named_parameters():
                if not is_placeholder_parameter(parameter) and name not in self._other:
                    self._twin.get_parameter(name).copy_(parameter)
            for name, buffer in self._module.named_buffers():
                if (made := self._twin.get_buffer(name)).shape == buffer.shape:  # another a call gave it
                    made.copy_(buffer)
        try:
            with aside(), torch.set_grad_enabled(self._trains):
                reseed(0)
                leaves = pytree.tree_leaves(self._run(self._twin))
                found = [*leaves, *self._gradients(leaves)]
        except Exception:  # any exception of the user's code; capture reports errors of its own
            return None
        return [x.detach() if isinstance(x, Tensor) else x for x in found] + [
            buffer.detach().clone() for buffer in self._twin.buffers()
        ]

    def _gradients(self, leaves: Sequence[Any]) -> Sequence[Tensor | None]:
        results = [x for x in leaves if isinstance(x, Tensor) and x.requires_grad]
        wanted = [p for p in self._twin.parameters() if p.requires_grad]
        if not results or not wanted:
            return ()
        return torch.autograd.grad(results, wanted, [*map(torch.ones_like, results)], allow_unused=True)


def _all_same(first: Sequence[Any], second: Sequence[Any] | None) -> bool:
    return second is not None and len(first) == len(second) and all(map(_same, first, second))


def _same(a: Any, b: Any) -> bool:
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return type(a) is type(b) and (not isinstance(a, (int, float, str)) or a == b)
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not a.is_floating_point() and not a.is_complex():
        return torch.equal(a, b)
    finite = b[b.isfinite()]  # the mean of an empty local batch is nan
    largest = float(finite.abs().max()) if finite.numel() else 0.0
    return torch.allclose(a, b, _CLOSE, _CLOSE * largest, equal_nan=True)


def _drawn_like(parameter: nn.Parameter) -> nn.Parameter:
    """Return random values for a placeholder parameter; all rows share the memory of one row."""
    generator = torch.Generator().manual_seed(0)
    row = torch.rand(parameter.shape[1:], generator=generator).to(parameter) + 0.5
    return nn.Parameter(row.expand(parameter.shape), parameter.requires_grad)


def copy_of(module: nn.Module, replaced: Mapping[int, Any] | None = None) -> nn.Module:
    """Return a deep copy of a module, with computed tensors in attributes copied as values.

    `copy.deepcopy` refuses tensors computed from parameters, as the `weight` that
    `torch.nn.utils.weight_norm` computes before each forward, or values that a forward kept, also in lists
    and dicts. `replaced` maps the `id` of objects to the objects that take their place in the copy.

    Raises
    ------
    CaptureError : the module holds an object that cannot be copied; the error names the attribute.
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
    """Return the first attribute that cannot be copied, as text."""
    for path, child in module.named_modules():
        for key in own_attributes(child):
            try:
                copy.deepcopy(vars(child)[key], dict(kept))
            except Exception:
                return f"{key} of {path or 'the model'} ({type(child).__name__})"
    return f"the model ({type(module).__name__})"


@contextlib.contextmanager
def aside() -> Iterator[None]:
    """Run a copy inside the block without effects on random numbers, the autograd tape and skips."""
    with kept_random_state(), torch.no_grad(), use_skip_tracker(SkipTracker()):
        yield


@dataclass(frozen=True)
class ChangedAttribute:
    """An attribute of a module that the forward changed."""

    path: str
    key: str
    kind: str
    """Name of the module's class."""

    def __str__(self) -> str:
        return f"{self.key} of {self.path or 'the model'} ({self.kind})"


class Attributes:
    """Snapshot of the Python attributes of all modules, except values of parameters and buffers.

    A buffer that is registered or created in a forward counts as an attribute. So does a new parameter, and a
    parameter that replaces a previous one.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._found = {name: keep_all(_own(child)) for name, child in module.named_modules()}
        # by the dict's id: a trace wraps a module with two names anew at each access, around the same dict
        registries = [child._parameters for child in module.modules()]
        self._parameters = {id(registry): dict(registry) for registry in registries}

    def changed(self) -> tuple[ChangedAttribute, ...]:
        """Return the attributes that have changed since the snapshot."""
        return tuple(
            ChangedAttribute(path, key, type(child).__name__)
            for path, child in self._module.named_modules()
            for key, value in _own(child).items()
            if self._found.get(path, {}).get(key, _NEW).is_changed(value)
        ) + tuple(self._other_parameters())

    def _other_parameters(self) -> Iterator[ChangedAttribute]:
        for path, child in self._module.named_modules():
            before = self._parameters.get(id(child._parameters), {})
            for key, value in child._parameters.items():
                if value is not None and value is not before.get(key):
                    yield ChangedAttribute(path, key, type(child).__name__)


_NEW = ValueSnapshot(ABSENT)


def own_attributes(module: nn.Module) -> list[str]:
    """Return the user's attributes.

    Excluded are torch's, and values that are made of a parameter before each forward.
    """
    parameters = {name.rpartition("_")[0] for name in module._parameters}
    return [name for name in vars(module) if name not in _TORCHS and name not in parameters]


def _own(module: nn.Module) -> dict[str, Any]:
    made = {name: buffer is not None for name, buffer in module._buffers.items()}
    return made | {name: vars(module)[name] for name in own_attributes(module)}


_TORCHS = frozenset({*vars(nn.Module()), "_flat_weights", "_flat_weight_refs"})
"""Attributes that torch manages; the last two are lists that `nn.LSTM` makes of its parameters."""
