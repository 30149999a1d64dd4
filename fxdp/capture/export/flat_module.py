"""The module that is exported: flat tensors in, flat tensors out, the user's structure kept separately."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import sympy
import torch
from torch import nn
from torch.utils import _pytree as pytree

from fxdp.capture.captured import Check, LayoutRead, OutputLeaf, ReadValue, SideEffect
from fxdp.capture.export.skip_marks import SkipPoint
from fxdp.capture.export.skip_tracker import captured_skips
from fxdp.capture.inputs import Inputs, run_model
from fxdp.capture.leaves import register_containers
from fxdp.capture.locations import location_of_function
from fxdp.capture.mixed_precision import MixedPrecision
from fxdp.capture.patches.checkpoints import repeated_updates
from fxdp.capture.patches.module_state import Number, as_numbers, assigned_buffers
from fxdp.capture.patches.patch_tables import recording_effects
from fxdp.capture.patches.unbacked_hints import HintedNumber
from fxdp.capture.python_values import AttributeNumber, is_unread
from fxdp.capture.refusals.stateful import Attributes, ChangedAttribute
from fxdp.capture.row_lengths import global_starts
from fxdp.errors import CaptureError
from fxdp.ir.graph.metadata import Location


@dataclass
class _OutputRecord:
    """Facts recorded in one run of the program: structure and leaves of the output, effects of the code."""

    leaves: tuple[Any, ...] = ()
    spec: pytree.TreeSpec | None = None
    loss: int | None = None
    """Index of the tensor that the model itself returns as `loss`."""
    skips: tuple[SkipPoint, ...] = ()
    """The stashes and pops of skip connections, in order."""
    checks: tuple[Check, ...] = ()
    """The checks of data; the checked values follow the model's own tensors among the outputs."""
    other_guess: tuple[bool, ...] | None = None
    """Decisions for a retry after the code failed behind a guessed branch: the last guess inverted."""
    changed: tuple[ChangedAttribute, ...] = ()
    """Python attributes that the forward changed."""
    assigned: tuple[str, ...] = ()
    """Names of the program's buffers to which the forward assigns a new tensor."""
    read_values: tuple[ReadValue, ...] = ()
    """Tensors that the code read into Python by value."""
    layout_reads: tuple[LayoutRead, ...] = ()
    """Locations at which the code read memory layouts of tensors."""
    symbols: Mapping[str, str] = field(default_factory=dict)
    """Names of the dynamic scalar inputs, by their symbols."""
    touched: Sequence[str] = ()
    """Names of Python values that should not be read, but were."""
    seeded: tuple[tuple[str, Location], ...] = ()
    """Functions that seed torch's generators, with the locations of the calls."""
    beside: tuple[SideEffect, ...] = ()
    """What the code does beside computing."""
    sizes: Mapping[sympy.Basic, Location] = field(default_factory=dict)
    """The conditions on sizes that the code asks, in torch's symbols, with their lines."""


@dataclass
class _Cell:
    """Holder of the record, outside of the module's attributes, which export guards."""

    record: _OutputRecord = field(default_factory=_OutputRecord)


class FlatModule(nn.Module):
    """`loss_fn(module(*args, **kwargs), target)` as a function of the flat tensor inputs."""

    def __init__(
        self,
        module: nn.Module,
        inputs: Inputs,
        loss_fn: Callable[..., Any] | None,
        numbers: Mapping[str, Number] | None = None,
        precision: MixedPrecision | None = None,
        branches: tuple[bool, ...] | None = (),
        told: Mapping[int, Sequence[HintedNumber]] | None = None,
    ) -> None:
        super().__init__()
        self.module = module
        self.loss_fn = loss_fn
        self.precision = precision
        self.inputs = inputs
        """The inputs for which the module was made."""
        self.numbers = numbers or {}
        """The buffers that count as Python numbers."""
        self.branches = branches
        """Decisions at flags of the batch; None refuses branches on the batch."""
        self.told = told or {}
        """Numbers that eager runs read from data, by batch size; hints for the code at that size."""
        self.watches_draws = False
        """Whether each draw in Python is looked at, after a run that drew."""
        self._cell = _Cell()

    @property
    def record(self) -> _OutputRecord:
        """Return the record of the latest run."""
        return self._cell.record

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Run the user's code and flatten the output."""
        touched: list[str] = []
        numbers = self.inputs.numbers(tensors)
        names = zip(map(str, numbers), self.inputs.number_names, strict=True)
        self._cell.record = _OutputRecord(symbols=dict(names), touched=touched)  # for error handlers
        args, kwargs = self.inputs.rebuild(tensors, numbers, touched)
        attributes = self.inputs.attributes
        with contextlib.ExitStack() as stack:
            stack.enter_context(global_starts(self.inputs.starts_in(args, kwargs)))
            stack.enter_context(_set_attributes(attributes, numbers[len(numbers) - len(attributes) :]))
            tracker = stack.enter_context(captured_skips(self.module))
            effects = stack.enter_context(
                recording_effects(
                    self.module,
                    tensors,
                    self.branches,
                    self._told(tensors),
                    watches_draws=self.watches_draws,
                )
            )
            assigned = stack.enter_context(assigned_buffers(self.module))
            stack.enter_context(as_numbers(self.module, self.numbers))
            before = Attributes(self.module)
            try:
                with repeated_updates(self.module):
                    results = self._run(args, kwargs)
            except Exception:
                self._cell.record = replace(self._cell.record, other_guess=effects.asked.other_guess())
                raise
            effects.settle()
            changed = before.changed()
        self._cell.record = replace(
            self._cell.record,
            skips=tuple(tracker.points),
            checks=tuple(Check(i, *answer) for i, answer in enumerate(effects.asked.answers, len(results))),
            changed=(*changed, *map(self._made, assigned.made)),
            assigned=tuple(f"module.{name}" for name in assigned.written),
            read_values=tuple(effects.reads.values.values()),
            layout_reads=tuple(effects.reads.layouts),
            seeded=tuple(effects.seeded),
            beside=tuple(effects.beside),
            sizes=effects.sizes.asked,
        )
        return (*results, *effects.asked.tensors)

    def _made(self, buffer: str) -> ChangedAttribute:
        path, _, key = buffer.rpartition(".")
        return ChangedAttribute(path, key, type(self.module.get_submodule(path)).__name__)

    def _told(self, tensors: Sequence[torch.Tensor]) -> Sequence[HintedNumber]:
        pairs = zip(tensors, self.inputs.batch_dims, strict=True)
        batch = next((tensor.shape[dim] for tensor, dim in pairs if dim is not None), None)
        return self.told.get(batch, ()) if isinstance(batch, int) else ()

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[torch.Tensor, ...]:
        output = run_model(self.module, args, kwargs, self.loss_fn, self.precision)
        if self.loss_fn is not None:
            _check_loss(output, self.loss_fn)
        return self._flatten(output)

    def _flatten(self, output: Any) -> tuple[torch.Tensor, ...]:
        output = pytree.tree_map_only(torch.Size, tuple, output)
        register_containers(output)
        leaves, spec = pytree.tree_flatten(output)
        tensors: list[torch.Tensor] = []
        kept: list[Any] = []
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                kept.append(OutputLeaf(len(tensors)))
                tensors.append(leaf)
            else:
                if is_unread(leaf):
                    str(leaf)  # raises: a returned value is read by the caller
                kept.append(leaf)
        if not tensors:
            raise CaptureError(
                f"{type(self.module).__name__} returned no tensor (got {type(output).__name__}): there is "
                "nothing to compute. Return at least one tensor"
            )
        named = _named_loss(output)
        loss = next((i for i, tensor in enumerate(tensors) if tensor is named), None)
        self._cell.record = replace(self._cell.record, leaves=tuple(kept), spec=spec, loss=loss)
        return tuple(tensors)


def _named_loss(output: Any) -> Any:
    """Return the entry `loss` of a dict, or the attribute of an object such as transformers' outputs."""
    return output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)


def _check_loss(loss: Any, loss_fn: Callable[..., Any]) -> None:
    """Raise if a loss function does not return a scalar floating-point tensor."""
    if isinstance(loss, torch.Tensor) and loss.dim() == 0 and loss.is_floating_point():
        return
    if isinstance(loss, torch.Tensor):
        got = f"a tensor of shape {list(loss.shape)}, {loss.dtype}"
    elif isinstance(loss, (torch.SymFloat, torch.SymInt)):
        got = "the number in a tensor (.item(), float() or int()), which has no gradient: leave that out"
    else:
        got = repr(loss)
    location = location_of_function(loss_fn)
    raise CaptureError(
        f"loss_fn{'' if location is None else f' at {location}'} must return a scalar floating-point tensor, "
        f"but it returned {got}. Reduce it, for instance with .mean() or .sum()"
    )


@contextlib.contextmanager
def _set_attributes(attributes: Sequence[AttributeNumber], numbers: Sequence[Any]) -> Iterator[None]:
    """Set these numbers as attributes of the modules inside the block."""
    before = [(a, a.owner[a.key]) for a in attributes]
    try:
        for attribute, number in zip(attributes, numbers, strict=True):
            attribute.owner[attribute.key] = number
        yield
    finally:
        for attribute, value in before:
            attribute.owner[attribute.key] = value
