"""What a call looks like: its tensors, and the key under which its program is kept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec

from fxdp.capture.inputs import Inputs
from fxdp.capture.joint.raw_joint import JointOptions
from fxdp.capture.python_values import stable_text
from fxdp.capture.request import Request
from fxdp.errors import InputError, a_kind
from fxdp.module.changes import Key
from fxdp.module.values import Values, python_leaves
from fxdp.options import Options


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
    default: torch.dtype
    """Of tensors that the model makes."""
    training: bytes
    """Of each module."""
    trainable: bytes
    """Of each parameter."""
    generation: int
    attributes: Key
    """The model's Python attributes that are no longer what they were."""

    def parts(self) -> tuple[Any, ...]:
        """What it holds, in order."""
        return tuple(getattr(self, field.name) for field in fields(self))

    def differs_in_values_alone(self, other: ProgramKey) -> bool:
        """Whether the other is the key of a call with other Python values among its inputs or attributes."""
        return self != other and replace(self, values=other.values, attributes=other.attributes) == other


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
    values: Values = field(default_factory=Values)
    """What is known of the Python values of such calls; all calls alike share it."""
    strided: bool = False

    @property
    def numbers(self) -> tuple[tuple[str, Any], ...]:
        """The numbers that are inputs, by what errors call them."""
        inputs = self.inputs
        return tuple((inputs.names[i], inputs.leaves[i]) for i in inputs.dynamic_inputs) + tuple(
            (attribute.name, attribute.value) for attribute in inputs.attributes
        )

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors among the inputs."""
        return self.inputs.tensors

    @property
    def batch_dims(self) -> tuple[int | None, ...]:
        """The batch dim of each tensor."""
        return self.inputs.batch_dims


def request_of(
    module: nn.Module,
    inputs: Inputs,
    options: Options,
    *,
    cut: bool = False,
    couple: bool = True,
    dynamic: bool = False,
    hint: int | None = None,
    branches: tuple[bool, ...] = (),
) -> Request:
    """What is captured for a call; of a program that is `cut` the loss alone can be differentiated.

    A step of stages and micro-batches cannot be run again once a flag turns out to be another.
    """
    joint = JointOptions("loss" if cut else "all", couple, options.own_statistics)
    loss_fn = None if _wants_output(module, inputs) else options.loss_fn
    draws, precision = options.single_device_rng, options.precision
    taken = None if cut else branches
    return Request(module, inputs, loss_fn, joint, dynamic, hint, draws, precision, taken)


def _wants_output(module: nn.Module, inputs: Inputs) -> bool:
    """Whether the model's own output is asked for: in evaluation, by a call without a target."""
    return not module.training and "target" not in inputs.rebuild(inputs.tensors)[1]


def call_lines(call: Call) -> list[str]:
    """What decides which program serves a call, for `agree`."""
    kind = call.kind
    names = [name for name, _ in python_leaves(call.inputs.names, call.inputs.leaves)]
    pairs = zip(names, kind.values, strict=True)
    lines = [
        f"structure {stable_text(kind.structure)}",
        *(f"value {name} {type_} {stable_text(value)}" for name, (type_, value) in pairs),
        *(f"value {name} {type(value).__name__} {value!r}" for name, value in call.numbers),
    ]
    for name, (dtype, _, needs_grad, _), dims in zip(call.inputs.paths, kind.tensors, call.dims, strict=True):
        lines.append(f"tensor {name} {dtype} dims {list(dims)} requires_grad={needs_grad}")
    modes = f"grad={kind.grad} autocast={kind.autocast} training={any(kind.training)}"
    modes += f" default dtype={kind.default} times that tensors were replaced={kind.generation}"
    attributes = [f"attribute {name} {stable_text(value)}" for name, value in kind.attributes]
    flags = [f"modules {kind.training.hex()}", f"trainable {kind.trainable.hex()}"]
    return [*lines, modes, *flags, *attributes]


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
    return a_kind(value)
