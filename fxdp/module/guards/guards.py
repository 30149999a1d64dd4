"""`Guards`: all conditions under which a program serves a call; the class docstring lists them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from itertools import repeat
from operator import attrgetter, eq
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fxdp.capture.captured import Captured
from fxdp.capture.python_values import AttributeNumber
from fxdp.capture.refusals.input_layouts import is_contiguous
from fxdp.capture.snapshot import ABSENT
from fxdp.ir.graph.model_tensors import all_local, local_of
from fxdp.module.function_module import FunctionModule
from fxdp.module.guards.attribute_guards import AttributeGuards, Comparison, Key, Reading, all_hold
from fxdp.module.guards.surroundings import refuse_surroundings
from fxdp.torch_compat import is_surrounded


class GuardedState(NamedTuple):
    """Modes and modules as part of the key of a call's program, beside the inputs; equal on all ranks."""

    grad: bool
    autocast: torch.dtype | None
    default: torch.dtype
    """The dtype of tensors that the model makes."""
    training: bytes
    """Of each module."""
    trainable: bytes
    """Of each parameter."""
    generation: int
    """How often the model's tensors were replaced, which all ranks must do together."""
    attributes: Key
    """The model's Python attributes that are no longer what they were."""


class Guards:
    """Conditions of the programs of one model, beside the values of its tensors.

    guard                what is compared at each call                          if it differs
    surroundings         no tracer, transform of torch.func or                  the call is refused
                         DistributedDataParallel runs around it
    registries           the parameters, buffers and modules of each module:    all programs are made anew
                         their number, and that they are the same objects
    shards               the local tensors of DTensors are the same objects     all programs are made anew
    memory               addresses; where these differ dtypes, devices,         all programs are made anew
                         shapes and strides
    modes                whether gradients are on, the dtype of autocast and    another program
                         of new tensors
    training             of each module                                         another program
    requires_grad        of each parameter                                      another program
    attributes           of modules, and what their code reads elsewhere:       another program for other
                         globals, cells, classes, objects; what containers      values; a number becomes
                         among them hold                                        an input
    hooks, classes       of modules; hooks on all modules of the process        another program
    numbers              of the buffers that the model's code read as numbers   another program
    structure            of the inputs, and dtype, number of dims, device,      another program
                         requires_grad of each tensor (`calls/reader.py`)
    Python inputs        numbers, strings and objects (`values.py`)             another program; a number
                                                                                becomes an input
    sizes                batches and other dims (`programs.py`)                 another program, then one for
                                                                                any size
    input layouts        contiguous, where the model's code or one device's     the call is refused
                         random numbers depend on that

    Not guarded: inference mode and filters of warnings, as programs are compiled outside of these
    (`strategies.py`).

    While all guards hold, a call compares objects by identity, in C.
    """

    def __init__(
        self,
        module: nn.Module,
        device_type: str,
        loss_fn: Any = None,
        generation: int = 0,
        full_batch_draws: bool = False,
    ) -> None:
        """Set `full_batch_draws` if random numbers are drawn as on one device."""
        self._module, self._device_type, self._generation = module, device_type, generation
        self._casts = torch.amp.is_autocast_available(device_type)  # not on meta
        self._full_batch_draws = full_batch_draws
        self.tensors = TensorGuards(module, loss_fn)
        self._attributes = AttributeGuards(module, *([loss_fn] if isinstance(loss_fn, nn.Module) else []))
        self._training = Reading(partial(map, attrgetter("training"), tuple(module.modules())))
        self._trainable = Reading(partial(map, attrgetter("requires_grad"), tuple(module.parameters())))
        self._comparisons: list[Comparison] | None = None
        self._state: GuardedState | None = None

    def check_surroundings(self) -> None:
        """Refuse a call from inside of what transforms code, or of a `DistributedDataParallel`.

        Raises
        ------
        InputError : a `DistributedDataParallel` would reduce the model's gradients, too.
        StateError : a transform of torch.func or a tracer runs.
        """
        if is_surrounded():
            refuse_surroundings(self._module)

    def state(self) -> GuardedState:
        """Return the guarded modes and modules; the same object while all guards hold."""
        device, state = self._device_type, self._state
        autocast = None
        if self._casts and torch.is_autocast_enabled(device):
            autocast = torch.get_autocast_dtype(device)
        modes = torch.is_grad_enabled(), autocast, torch.get_default_dtype()
        if state is None or self._comparisons is None or not all_hold(self._comparisons):
            changed = self._changed()
            training, trainable = bytes(self._training.read()), bytes(self._trainable.read())
            state = self._state = GuardedState(*modes, training, trainable, self._generation, changed)
        elif state[:3] != modes:
            grad, autocast, default = modes
            state = self._state = state._replace(grad=grad, autocast=autocast, default=default)
        return state

    def _changed(self) -> Key:
        """Return the attributes that differ from the beginning, and renew the guards on modules."""
        # read before `changed`: if a thread changes a value in between, the guard fails at the next call
        reads = self._attributes.reads
        comparisons = [read.now() for read in (*reads, self._training, self._trainable)]
        changed = self._attributes.changed()
        # `changed` may have added places, for which there is no guard yet
        self._comparisons = comparisons if self._attributes.reads is reads else None
        return changed

    def strided(self, tensors: Iterable[Tensor]) -> bool:
        """Return whether random numbers depend on strides of inputs, and an input is not contiguous."""
        return self._full_batch_draws and not all(map(is_contiguous, tensors))

    def watch(self, captured: Captured) -> None:
        """Guard all that the code of a program may read from now on.

        Texts that the first call leaves in Python are written there.
        """
        buffers = {f"value of buffer {name}": self._module.get_buffer(name) for name in captured.numbers}
        values = {
            f"value of the tensor read at {value.location}": value.tensor for value in captured.read_values
        }
        self._attributes.watch({**buffers, **values})
        self._attributes.watch_read(captured.read, captured.written)
        self._comparisons = None
        for place, word in captured.words:
            place.put(word)

    def first(self, names: Iterable[str]) -> Mapping[str, tuple[str, Any]]:
        """Return the types and values that attributes had at the beginning."""
        return {name: self._attributes.first(name) for name in names}

    def number(self, name: str) -> AttributeNumber | None:
        """Return an attribute that is a number now; None if it is not on a module, or not a number."""
        return self._attributes.number(name)


_Layout: TypeAlias = "tuple[torch.dtype, torch.device, torch.Size, tuple[int, ...]]"


class TensorGuards:
    """Guards on the parameters, buffers and modules of a model, and of a loss that is a module.

    Values may change in place: programs read them from the same tensors. But `model.bfloat16()` or
    `model.to(memory_format=...)` keeps the tensor objects and changes their dtype or strides.
    """

    def __init__(self, *roots: Any) -> None:
        registries = [row for root in roots if isinstance(root, nn.Module) for row in _registries(root)]
        found = [(f"{path}.{key}".lstrip("."), owner, key) for path, owner in registries for key in owner]
        self._registries = registries
        self._names = [name for name, _, _ in found]
        self._owners = [owner for _, owner, _ in found]
        self._keys = [key for _, _, key in found]
        self._values = [owner[key] for _, owner, key in found]
        self._kept = [value for value in self._values if _has_memory(value)]
        self._tensors = list(map(local_of, self._kept))
        self._layouts = list(map(_layout, self._tensors))
        self._functions = [root for root in roots if isinstance(root, FunctionModule)]
        self._objects = [read.now() for read in self._reads()]
        # a different layout needs different memory, and addresses are compared five times as fast
        self._addresses = Reading(partial(map, Tensor.data_ptr, self._tensors), eq)
        self._comparisons: tuple[Comparison, ...] | None = (
            None  # from the first check on: fakes have no address
        )

    def _reads(self) -> Iterator[Reading]:
        yield Reading(partial(map, len, [owner for _, owner in self._registries]), eq)
        yield Reading(partial(map, dict.get, self._owners, self._keys, repeat(ABSENT)))
        for function in self._functions:
            yield Reading(function.ids_now, eq)
        # a DTensor can stay the same object and get a different shard; a plain tensor is its own memory
        pairs = zip(self._kept, self._tensors, strict=True)
        if sharded := [value for value, tensor in pairs if value is not tensor]:
            yield Reading(partial(all_local, sharded))

    def unchanged(self) -> bool:
        """Return whether all are the same objects, of the same types and strides; called at each step."""
        if self._comparisons is not None and all_hold(self._comparisons):
            return True
        if not all_hold(self._objects) or list(map(_layout, self._tensors)) != self._layouts:
            return False
        self._comparisons = *self._objects, self._addresses.now()  # the same layout in new memory
        return True

    def changes(self) -> list[str]:
        """Return the names of tensors and modules that were added, replaced, converted or deleted."""
        before = zip(self._kept, self._tensors, self._layouts, strict=True)
        converted = {id(v) for v, t, layout in before if local_of(v) is not t or _layout(t) != layout}
        rows = list(zip(self._names, self._owners, self._keys, self._values, strict=True))
        known = {(id(owner), key) for _, owner, key, _ in rows}
        added = [
            f"{path}.{key}".lstrip(".")
            for path, owner in self._registries
            for key in owner
            if (id(owner), key) not in known
        ]
        return added + [
            name for name, owner, key, value in rows if owner.get(key) is not value or id(value) in converted
        ]

    def words(self) -> str:
        """Return the beginning of a sentence that names the changes."""
        names = self.changes()
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        were = "was" if len(names) == 1 else "were"
        return f"{', '.join(names[:3])}{more} of the model {were} replaced, added or converted"


def _has_memory(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout == torch.strided and not is_lazy(value)


def _layout(tensor: Tensor) -> _Layout:
    return tensor.dtype, tensor.device, tensor.shape, tensor.stride()


def _registries(module: nn.Module) -> Iterator[tuple[str, dict[str, Any]]]:
    for path, owner in module.named_modules():
        for registry in (owner._parameters, owner._buffers, owner._modules):
            yield path, registry
