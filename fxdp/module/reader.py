"""Reads the calls of one model: their tensors, sizes and kind, at each step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec

from fxdp.capture.batch_dims import resolve_batch_dims, rows_per_sample
from fxdp.capture.captured import Captured
from fxdp.capture.inputs import Inputs, check_plain_tensors, flat_leaves, leaf_names
from fxdp.capture.python_values import number_tensor, stable_text
from fxdp.capture.refusals.input_layouts import is_contiguous
from fxdp.capture.snapshot import spelled
from fxdp.errors import InputError, a_kind
from fxdp.ir.raw_bytes import number_of
from fxdp.module.cache import LRU
from fxdp.module.call import Call, ProgramKey
from fxdp.module.changes import Key, ModelGuards
from fxdp.module.values import Open, RecompileLog, Values, liftable, python_leaves

_training = attrgetter("training")
_requires_grad = attrgetter("requires_grad")


_Structure: TypeAlias = "tuple[tuple[str, ...], tuple[int | None, ...], tuple[int, ...]]"


class CallReader:
    """Reads calls of one model; batch dims are resolved once per structure.

    `generation` counts how often the model's tensors were replaced, which all ranks must do together;
    `full_batch_draws` says whether programs draw as one device, which depends on how inputs lie in memory.
    """

    def __init__(
        self,
        module: nn.Module,
        batch_dims: Any,
        device_type: str,
        generation: int = 0,
        loss_fn: Any = None,
        full_batch_draws: bool = False,
    ) -> None:
        self._module = module
        self._batch_dims = batch_dims
        self._device_type = device_type
        self._casts = torch.amp.is_autocast_available(device_type)  # not on meta
        self._generation = generation
        self._full_batch_draws = full_batch_draws
        self._modules = tuple(module.modules())
        self._parameters = tuple(module.parameters())
        self._loss_fn = loss_fn
        self._state = ModelGuards(module, *([loss_fn] if isinstance(loss_fn, nn.Module) else []))
        self._known: LRU[Any, _Structure] = LRU(1024)
        self._digests: LRU[Any, int] = LRU(1024)
        self._values: LRU[Any, Values] = LRU(1024)
        self._told = RecompileLog()

    def read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """The call's inputs.

        Raises
        ------
        InputError : batch sizes that differ, or an input on another device than the model.
        """
        leaves, spec = flat_leaves(args, kwargs)
        tensors = tuple(leaf for leaf in leaves if isinstance(leaf, Tensor))
        signature = tuple((t.dtype, t.ndim, t.requires_grad, t.device.type) for t in tensors)
        found = self._names_and_dims(args, kwargs, spec, signature)
        modes = self._modes()
        changed = modes[-1]
        values = self._values_of((spec, signature, *modes[:-1]))
        inputs = Inputs.of_leaves(leaves, spec, *found)
        batch = inputs.batch
        tokens: tuple[tuple[str, Any], ...] = ()
        if len(tensors) < len(leaves) or values.dynamic_inputs:
            inputs, tokens = self._with_values(inputs, values)
            changed = tuple(row for row in changed if row[0] not in {a.name for a in inputs.attributes})
            signature += tuple((t.dtype, 0, False, "cpu") for t in inputs.tensors[len(tensors) :])
        dims = tuple(
            tuple(t.shape) if d is None else (*t.shape[:d], *t.shape[d + 1 :])
            for t, d in zip(inputs.tensors, inputs.batch_dims, strict=True)
        )
        strided = self._full_batch_draws and not all(map(is_contiguous, tensors))
        kind = ProgramKey(spec, tokens, signature, *modes[:-1], changed)
        return Call(inputs, 1 if batch is None else batch, dims, kind, values, strided)

    def _values_of(self, kind: tuple[Any, ...]) -> Values:
        """What is known of the Python values of calls of one structure and mode."""
        found = self._values.get(kind)
        if found is None:
            found = self._values[kind] = Values()
        return found

    def _with_values(self, inputs: Inputs, values: Values) -> tuple[Inputs, tuple[tuple[str, Any], ...]]:
        """The inputs with numbers that are tensors, too, and the Python values as parts of a key."""
        dynamic_inputs, unread, tokens = [], [], []
        for i, (leaf, name) in enumerate(zip(inputs.leaves, inputs.names, strict=True)):
            if isinstance(leaf, Tensor):
                continue
            role = values.role(name, leaf)
            tokens.append((type(leaf).__name__, role) if role else _value(leaf, name))
            if role is Open.INPUT:
                dynamic_inputs.append(i)
            elif role is Open.UNREAD:
                unread.append(i)
        attributes = tuple(
            found for name in sorted(values.dynamic_inputs) if (found := self._state.number(name))
        )
        numbers = [*(inputs.leaves[i] for i in dynamic_inputs), *(a.value for a in attributes)]
        return replace(
            inputs,
            tensors=(*inputs.tensors, *map(number_tensor, numbers)),
            batch_dims=(*inputs.batch_dims, *[None] * len(numbers)),
            dynamic_inputs=tuple(dynamic_inputs),
            attributes=attributes,
            unread=tuple(unread),
        ), tuple(tokens)

    def make_dynamic(
        self, call: Call, others: Sequence[ProgramKey]
    ) -> tuple[ProgramKey | None, dict[str, float]]:
        """From now on have numbers as inputs that had other values in the last of these calls.

        Returns that call's kind and the values that they had.
        """
        own, rows = self._rows(call, others[-1:])
        before = rows[0] if rows else {}
        names = liftable(own, before, call.values)
        call.values.dynamic_inputs |= names
        return (others[-1] if names else None), {name: before[name][1] for name in names}

    def tell(self, call: Call, others: Sequence[ProgramKey]) -> None:
        """Say which values are compiled for again and again."""
        self._told.compiled(*self._rows(call, others))

    def _rows(self, call: Call, others: Sequence[ProgramKey]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """The types and values of the Python values and attributes in a call, and in others alike."""
        names = [name for name, _ in python_leaves(call.inputs.names, call.inputs.leaves)]
        kinds = (call.kind, *others)
        changed = {name for kind in kinds for name, _ in kind.attributes}
        first = {name: self._state.first(name) for name in changed}
        pairs = [(dict(zip(names, kind.values, strict=True)), dict(kind.attributes)) for kind in kinds]
        own, *rows = [values | first | attributes for values, attributes in pairs]
        own |= {a.name: (type(a.value).__name__, Open.INPUT) for a in call.inputs.attributes}
        return own, rows

    def watch(self, captured: Captured) -> None:
        """From now on all that the code of a program may read decides on the kind of a call, too.

        Words that its first call leaves in Python are put there.
        """
        buffers = {f"value of buffer {name}": self._module.get_buffer(name) for name in captured.numbers}
        values = {
            f"value of the tensor read at {value.location}": value.tensor for value in captured.read_values
        }
        self._state.watch({**buffers, **values})
        self._state.watch_read(captured.read, captured.written)
        for place, word in captured.words:
            place.put(word)

    def _modes(self) -> tuple[bool, torch.dtype | None, torch.dtype, bytes, bytes, int, Key]:
        device = self._device_type
        autocast = None
        if self._casts and torch.is_autocast_enabled(device):
            autocast = torch.get_autocast_dtype(device)
        training = bytes(map(_training, self._modules))
        trainable = bytes(map(_requires_grad, self._parameters))
        changed = self._state.changed()
        modes = torch.is_grad_enabled(), autocast, torch.get_default_dtype()
        return *modes, training, trainable, self._generation, changed

    def _names_and_dims(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], spec: TreeSpec, signature: tuple[Any, ...]
    ) -> _Structure:
        """Of a structure: the names of the leaves, batch dims of the tensors, and their rows per sample."""
        key = (spec, signature)
        found = self._known.get(key)
        if found is None:
            names = leaf_names(self._module, args, kwargs)
            check_plain_tensors(flat_leaves(args, kwargs)[0], names)
            self._check_devices(args, kwargs, names)
            dims = resolve_batch_dims(args, kwargs, self._batch_dims)
            rows = rows_per_sample(args, kwargs, self._batch_dims)
            found = self._known[key] = names, tuple(dims), rows
        return found

    def _check_devices(self, args: tuple[Any, ...], kwargs: dict[str, Any], names: Sequence[str]) -> None:
        device = self._device_type
        wrong = [
            f"{name} is on {leaf.device}"
            for name, leaf in zip(names, flat_leaves(args, kwargs)[0], strict=True)
            if isinstance(leaf, Tensor) and leaf.device.type != device
        ]
        if wrong:
            raise InputError(
                f"the model is on {device}, but {'; '.join(wrong)}. Move inputs with .to({device!r})"
            )

    def digest(self, value: ProgramKey | tuple[Any, ...]) -> int:
        """A number below 2**62 for a `kind` or `dims`, equal on all ranks for equal values."""
        found = self._digests.get(value)
        if found is None:
            parts = value.parts() if isinstance(value, ProgramKey) else value
            found = self._digests[value] = number_of(stable_text(parts).encode())
        return found


def _value(leaf: Any, name: str) -> tuple[str, Any]:
    """A Python leaf as part of a key."""
    if type(leaf) is list:  # of strings
        return "list", tuple(leaf)
    try:
        hash(leaf)
    except TypeError:
        raise InputError(
            f"the input {name} is {a_kind(leaf)}, which is neither a tensor, a container of tensors "
            "nor a hashable Python value; register it with torch.utils._pytree or pass plain values"
        ) from None
    return type(leaf).__name__, spelled(leaf)
