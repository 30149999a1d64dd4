"""The inputs of a call, and the key under which the call's program is cached."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec

from fxdp.capture.inputs import Inputs
from fxdp.capture.joint.raw_joint import JointOptions
from fxdp.capture.leaves import flat_leaves
from fxdp.capture.python_values import stable_text
from fxdp.capture.request import Request
from fxdp.capture.sample_cuts import SampleCuts
from fxdp.errors import InputError, a_kind
from fxdp.module.guards.attribute_guards import Key
from fxdp.module.guards.values import Values
from fxdp.options import Options


@dataclass(frozen=True, slots=True)
class ProgramKey:
    """Everything except sizes that decides which program to capture for a call.

    The tensor ranks, modes and attributes in the key are compared at each step, so the key holds only values
    that hash quickly.
    """

    structure: TreeSpec
    values: tuple[tuple[str, Any], ...]
    """The Python values among the inputs with their types: True, 1 and 1.0 need different programs."""
    tensors: tuple[tuple[torch.dtype, int, bool, str], ...]
    """For each tensor: dtype, number of dims, whether the tensor requires grad, device type."""
    grad: bool
    autocast: torch.dtype | None
    default: torch.dtype
    """The default dtype, of tensors that the model creates."""
    training: bytes
    """The training flag of each module."""
    trainable: bytes
    """The `requires_grad` flag of each parameter."""
    generation: int
    attributes: Key
    """The model's Python attributes with changed values."""
    by_keys: bool = False
    """Whether the batch is ragged by the keys of its inputs, without `batch_dims`."""

    def parts(self) -> tuple[Any, ...]:
        """Return the parts of the key, in order."""
        return tuple(getattr(self, field.name) for field in fields(self))

    def differs_in_values_alone(self, other: ProgramKey) -> bool:
        """Return whether the keys differ only in Python values among inputs or attributes."""
        return self != other and replace(self, values=other.values, attributes=other.attributes) == other


@dataclass(frozen=True, slots=True)
class Call:
    """The inputs of one call, flattened.

    `kind` is everything except sizes that decides which program to capture. `dims` are the sizes of all dims
    except the batch dim. `strided` says whether an input is not contiguous, if a program may depend on the
    strides.
    """

    inputs: Inputs
    batch: int
    dims: tuple[tuple[int, ...], ...]
    kind: ProgramKey
    values: Values = field(default_factory=Values)
    """Knowledge about the Python values of such calls, shared by all calls with equal keys."""
    strided: bool = False
    further: tuple[int, ...] = ()
    """This rank's sizes of the further axes of a ragged batch, in order."""
    cuts: SampleCuts | None = None
    """Where the micro-batches or blocks of a ragged batch end."""
    is_news: bool = False
    """Whether only this rank knows yet that such calls are ragged."""

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
    """Return the capture request for a call; in a `cut` program only the loss can be differentiated.

    A step of stages and micro-batches cannot be run again after a flag differs from the program's branch.
    """
    joint = JointOptions("loss" if cut else "all", couple, options.own_statistics)
    wants_output = not module.training and "target" not in inputs.given[1]  # in evaluation, without target
    loss_fn = None if wants_output else options.loss_fn
    draws, precision = options.single_device_rng, options.precision
    taken = None if cut else branches
    strict = options.strict
    return Request(module, inputs, loss_fn, joint, dynamic, hint, draws, precision, taken, strict=strict)


def call_lines(call: Call) -> list[str]:
    """Describe everything that decides which program serves a call, for `agree`."""
    kind = call.kind
    pairs = zip(call.inputs.python_leaves, kind.values, strict=True)
    lines = [
        f"structure {stable_text(kind.structure)}",
        *(f"value {name} {type_} {stable_text(value)}" for (name, _), (type_, value) in pairs),
        *(f"value {name} {type(value).__name__} {value!r}" for name, value in call.inputs.scalars),
    ]
    for name, (dtype, _, needs_grad, _), dims in zip(call.inputs.paths, kind.tensors, call.dims, strict=True):
        lines.append(f"tensor {name} {dtype} dims {list(dims)} requires_grad={needs_grad}")
    modes = f"grad={kind.grad} autocast={kind.autocast} training={any(kind.training)}"
    modes += f" default dtype={kind.default} times that tensors were replaced={kind.generation}"
    attributes = [f"attribute {name} {stable_text(value)}" for name, value in kind.attributes]
    flags = [f"modules {kind.training.hex()}", f"trainable {kind.trainable.hex()}"]
    return [*lines, modes, *flags, *attributes]


def check_arguments(args: Any, kwargs: Any) -> None:
    """Raise if an example call is not given as positional and keyword arguments.

    Raises
    ------
    InputError : `args` is not a tuple or list (a bare tensor, for example), or `kwargs` is not a mapping.
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


def with_recognised(options: Options, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Options:
    """Return the options of one device's batch, with `batch_dims` where its keys tell what no size does."""
    from fxdp.eager.ragged.recognised import recognised_dims, tells_of_rows

    if options.batch_dims is not None or not tells_of_rows(args, kwargs):
        return options
    return replace(options, batch_dims=recognised_dims(args, kwargs, lambda own: [own]))


def kind_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[TreeSpec, tuple[Any, ...]]:
    """Return the nesting of inputs and the signature of their tensors."""
    leaves, spec = flat_leaves(args, kwargs)
    tensors = (leaf for leaf in leaves if isinstance(leaf, Tensor))
    return spec, tuple((t.dtype, t.ndim, t.requires_grad, t.device.type) for t in tensors)
