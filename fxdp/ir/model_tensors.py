"""The tensors of a model that programs read: one seam, so that only this file knows what a parameter is.

A parameter may be a `DTensor`, whose own memory is its local shard. Programs, the watch over replaced tensors
and the exchanges between ranks handle memory, so all of them ask `local_of`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, fx, nn
from torch.distributed.tensor import DTensor

from fxdp.ir.metadata import meta
from fxdp.ir.signature import Buffer, Constant, InputSpec, Parameter
from fxdp.torch_compat import gradient_like, local_shard, shard_axes, shards_of, users_attributes


def local_of(tensor: Tensor) -> Tensor:
    """What this rank holds of a parameter or buffer: the tensor itself, or a `DTensor`'s local shard.

    It is the same object at each call, until somebody replaces it. A shard is no leaf of autograd's graph:
    gradients belong to the `DTensor`.
    """
    return local_shard(tensor) if isinstance(tensor, DTensor) else tensor


def full_value(tensor: Tensor) -> Tensor:
    """All that the ranks hold of it, as one plain tensor; of a `DTensor` all ranks ask together."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def all_local(tensors: Sequence[Tensor]) -> list[Tensor]:
    """`local_of` of each; where all are sharded, as a model's parameters are, in a third of the time."""
    try:
        return shards_of(tensors)  # type: ignore[arg-type]
    except AttributeError:  # a plain tensor among them
        return [*map(local_of, tensors)]


def shard_like(parameter: DTensor, rows: Tensor) -> DTensor:
    """A sharded parameter's gradient of this rank's rows, which may be padded to those of the first rank."""
    own = local_of(parameter).shape[0]
    return gradient_like(parameter, rows if rows.shape[0] == own else rows[:own])


def sharding_of(parameter: DTensor) -> tuple[tuple[int, int], ...]:
    """How a sharded parameter's rows are sharded: over how many ranks, and to which of them, each time."""
    mesh = parameter.device_mesh
    return tuple((mesh.size(axis), mesh.get_local_rank(axis)) for axis in shard_axes(parameter))


def is_sharded(tensor: Tensor) -> bool:
    """Whether the ranks of a mesh may hold different parts of it."""
    return isinstance(tensor, DTensor)


def placeholder_for(parameter: nn.Parameter) -> nn.Parameter:
    """A plain parameter of a sharded one's full shape: zeros, which take no memory until read."""
    full = torch.zeros(parameter.shape, dtype=parameter.dtype, device=local_of(parameter).device)
    made = nn.Parameter(full, requires_grad=parameter.requires_grad)
    vars(made).update(users_attributes(parameter), fxdp_placeholder=True)
    return made


def is_placeholder_parameter(tensor: Tensor) -> bool:
    """Whether a parameter has the shape of a sharded one but not its values."""
    return getattr(tensor, "fxdp_placeholder", False)


def signature_values(
    graph: fx.Graph, module: nn.Module, constants: Mapping[str, Tensor]
) -> dict[InputSpec, Tensor]:
    """What this rank holds for the parameters, buffers and (captured) constants that a program reads.

    A constant that is not among `constants` is made for each step, and is left out.
    """
    values: dict[InputSpec, Tensor] = {}
    for node in graph.find_nodes(op="placeholder"):
        match meta(node).spec:
            case Parameter(name) as spec:
                values[spec] = local_of(module.get_parameter(name))
            case Buffer(name) as spec:
                values[spec] = local_of(module.get_buffer(name))
            case Constant(name) as spec if name in constants:
                values[spec] = constants[name]
    return values
