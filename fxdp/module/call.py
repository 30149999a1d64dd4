"""What a call looks like: its tensors, and the key under which its program is kept."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec

from fxdp.capture import (
    Inputs,
    JointOptions,
    Request,
    flat_leaves,
    leaf_names,
    lies_in_order,
    resolve_batch_dims,
)
from fxdp.errors import InputError
from fxdp.module.recent import Recent
from fxdp.module.stable import stable_text
from fxdp.module.state import Key, ModelState
from fxdp.options import Options

_training = attrgetter("training")
_requires_grad = attrgetter("requires_grad")


@dataclass(frozen=True, slots=True)
class ProgramKey:
    """All that decides which program to capture for a call, but for sizes.

    Its ranks of tensors, modes and attributes are compared at each step, so it holds nothing slow to hash.
    """

    structure: TreeSpec
    values: tuple[tuple[str, Any], ...]
    """The Python values among the inputs, each with its type: True, 1 and 1.0 are different programs."""
    tensors: tuple[tuple[torch.dtype, int, bool, str], ...]
    """Of each tensor the dtype, the number of dims, whether it requires grad, the type of device."""
    grad: bool
    autocast: torch.dtype | None
    training: bytes
    """Of each module."""
    trainable: bytes
    """Of each parameter."""
    generation: int
    attributes: Key
    """The model's Python attributes that are no longer what they were."""

    def parts(self) -> tuple[Any, ...]:
        """What it holds, in order."""
        return (
            self.structure, self.values, self.tensors, self.grad, self.autocast, self.training,
            self.trainable, self.generation, self.attributes,
        )  # fmt: skip

    def differs_in_values_alone(self, other: ProgramKey) -> bool:
        """Whether the other is the key of a call that has other Python values among its inputs."""
        return self.values != other.values and replace(self, values=other.values) == other


@dataclass(frozen=True, slots=True)
class Call:
    """One call's inputs, flattened.

    `kind` is all that decides which program to capture, but for sizes. `dims` are the sizes of all dims but
    the batch. `strided` says whether an input lies other than contiguous, where a program may depend on that.
    """

    inputs: Inputs
    batch: int
    dims: tuple[tuple[int, ...], ...]
    kind: ProgramKey
    strided: bool = False

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors among the inputs."""
        return self.inputs.tensors

    @property
    def batch_dims(self) -> tuple[int | None, ...]:
        """The batch dim of each tensor."""
        return self.inputs.batch_dims


class CallReader:
    """Reads calls of one model; batch dims are resolved once per structure.

    `generation` counts how often the model's tensors were replaced, which all ranks must do together;
    `whole_draws` says whether programs draw as one device, which depends on how inputs lie in memory.
    """

    def __init__(
        self,
        module: nn.Module,
        batch_dims: Any,
        device_type: str,
        generation: int = 0,
        loss_fn: Any = None,
        whole_draws: bool = False,
    ) -> None:
        self._module = module
        self._batch_dims = batch_dims
        self._device_type = device_type
        self._casts = torch.amp.is_autocast_available(device_type)  # not on meta
        self._generation = generation
        self._whole_draws = whole_draws
        self._modules = tuple(module.modules())
        self._parameters = tuple(module.parameters())
        self._state = ModelState(module, *([loss_fn] if isinstance(loss_fn, nn.Module) else []))
        self._known: Recent[Any, tuple[tuple[str, ...], tuple[int | None, ...]]] = Recent(1024)
        self._digests: Recent[Any, int] = Recent(1024)

    def read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """The call's inputs.

        Raises
        ------
        InputError : batch sizes that differ, or an input on another device than the model.
        """
        leaves, spec = flat_leaves(args, kwargs)
        tensors = tuple(leaf for leaf in leaves if isinstance(leaf, Tensor))
        signature = tuple((t.dtype, t.ndim, t.requires_grad, t.device.type) for t in tensors)
        names, batch_dims = self._names_and_dims(args, kwargs, spec, signature)
        inputs = Inputs(tuple(leaves), spec, tensors, names, batch_dims)
        named = zip(leaves, names, strict=True)
        values = tuple(_value(leaf, name) for leaf, name in named if not isinstance(leaf, Tensor))
        batch = inputs.batch
        dims = tuple(
            tuple(t.shape) if d is None else (*t.shape[:d], *t.shape[d + 1 :])
            for t, d in zip(tensors, batch_dims, strict=True)
        )
        strided = self._whole_draws and not all(map(lies_in_order, tensors))
        kind = ProgramKey(spec, values, signature, *self._modes())
        return Call(inputs, 1 if batch is None else batch, dims, kind, strided)

    def watch(self, buffers: Iterable[str]) -> None:
        """From now on the values of these buffers decide on the kind of a call, too."""
        self._state.watch(buffers)

    def _modes(self) -> tuple[bool, torch.dtype | None, bytes, bytes, int, Key]:
        device = self._device_type
        autocast = None
        if self._casts and torch.is_autocast_enabled(device):
            autocast = torch.get_autocast_dtype(device)
        training = bytes(map(_training, self._modules))
        trainable = bytes(map(_requires_grad, self._parameters))
        changed = self._state.changed()
        return torch.is_grad_enabled(), autocast, training, trainable, self._generation, changed

    def _names_and_dims(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], spec: TreeSpec, signature: tuple[Any, ...]
    ) -> tuple[tuple[str, ...], tuple[int | None, ...]]:
        """Of a structure: the names of the leaves, and the batch dims of the tensors."""
        key = (spec, signature)
        found = self._known.get(key)
        if found is None:
            names = leaf_names(self._module, args, kwargs)
            self._check_devices(args, kwargs, names)
            dims = resolve_batch_dims(args, kwargs, self._batch_dims)
            found = self._known[key] = names, tuple(dims)
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
            raw = hashlib.sha256(stable_text(parts).encode()).digest()
            found = self._digests[value] = int.from_bytes(raw[:8], "little") >> 2
        return found


def request_of(
    module: nn.Module,
    inputs: Inputs,
    options: Options,
    *,
    cut: bool = False,
    couple: bool = True,
    dynamic: bool = False,
    hint: int | None = None,
) -> Request:
    """What is captured for a call; of a program that is `cut` the loss alone can be differentiated."""
    joint = JointOptions("loss" if cut else "all", couple, options.own_statistics)
    return Request(module, inputs, options.loss_fn, joint, dynamic, hint, options.single_device_rng)


def call_lines(call: Call) -> list[str]:
    """What decides which program serves a call, for `agree`."""
    kind = call.kind
    lines = [
        f"structure {stable_text(kind.structure)}",
        *(f"value {type_} {stable_text(value)}" for type_, value in kind.values),
    ]
    for name, (dtype, _, needs_grad, _), dims in zip(call.inputs.paths, kind.tensors, call.dims, strict=True):
        lines.append(f"tensor {name} {dtype} dims {list(dims)} requires_grad={needs_grad}")
    modes = f"grad={kind.grad} autocast={kind.autocast} training={any(kind.training)}"
    modes += f" times that tensors were replaced={kind.generation}"
    attributes = [f"attribute {name} {stable_text(value)}" for name, value in kind.attributes]
    flags = [f"modules {kind.training.hex()}", f"trainable {kind.trainable.hex()}"]
    return [*lines, modes, *flags, *attributes]


def changing_values(call: Call, others: Sequence[ProgramKey]) -> list[str]:
    """Where the call's Python values differ from those of other kinds of the same structure."""
    pairs = zip(call.inputs.names, call.inputs.leaves, strict=True)
    names = [name for name, leaf in pairs if not isinstance(leaf, Tensor)]
    return [
        f"{name} ({own[0]})"
        for i, (name, own) in enumerate(zip(names, call.kind.values, strict=True))
        if any(kind.values[i] != own for kind in others)
    ]


def check_arguments(args: Any, kwargs: Any) -> None:
    """Refuse an example call that is not given as positional and keyword arguments.

    Raises
    ------
    InputError : `args` is a bare tensor or anything else that is no tuple or list; `kwargs` is no mapping.
    """
    if not isinstance(args, (tuple, list)):
        raise InputError(
            f"args is {_described(args)}, expected a tuple of the model's positional arguments: write (x,) "
            "for one of them"
        )
    if not isinstance(kwargs, Mapping):
        raise InputError(
            f"kwargs is {_described(kwargs)}, expected a dict of the model's keyword arguments: write "
            '{"target": y}'
        )


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"a {type(value).__name__}"


def _value(leaf: Any, name: str) -> tuple[str, Any]:
    """A Python leaf as part of a key."""
    try:
        hash(leaf)
    except TypeError:
        raise InputError(
            f"the input {name} is a {type(leaf).__name__}, which is neither a tensor, a container of tensors "
            "nor a hashable Python value; register it with torch.utils._pytree or pass plain values"
        ) from None
    return type(leaf).__name__, leaf
