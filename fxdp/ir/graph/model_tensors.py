"""The model's tensors that programs read: only this file knows the classes of parameters.

A parameter may be a `DTensor`, whose memory is its local shard. Programs, the guards on replaced tensors
and the exchanges between ranks handle memory, so all call `local_of`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, fx, nn
from torch.distributed.tensor import DTensor

from fxdp.ir.graph.metadata import meta
from fxdp.ir.graph.signature import Buffer, Constant, InputSpec, Parameter
from fxdp.torch_compat import gradient_like, local_shard, shard_axes, shards_of, users_attributes


def local_of(tensor: Tensor) -> Tensor:
    """Return this rank's local tensor of a parameter or buffer: of a `DTensor`, the local shard.

    Each call returns the same object, until it is replaced. A shard is no leaf of autograd's graph: gradients
    belong to the `DTensor`.
    """
    return local_shard(tensor) if isinstance(tensor, DTensor) else tensor


def full_value(tensor: Tensor) -> Tensor:
    """Return the full value as one plain tensor; for a `DTensor` this is a collective call."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def all_local(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return `local_of` of each tensor.

    This takes a third of the time if all are sharded, like a model's parameters.
    """
    try:
        return shards_of(tensors)  # type: ignore[arg-type]
    except AttributeError:  # one of them is a plain tensor
        return [*map(local_of, tensors)]


def shard_like(parameter: DTensor, rows: Tensor) -> DTensor:
    """Return a sharded parameter's gradient from this rank's rows, which may be padded."""
    own = local_of(parameter).shape[0]
    return gradient_like(parameter, rows if rows.shape[0] == own else rows[:own])


def sharding_of(parameter: DTensor) -> tuple[tuple[int, int], ...]:
    """Return the sharding of a parameter: (number of ranks, index of this rank) for each sharded axis."""
    mesh = parameter.device_mesh
    return tuple((mesh.size(axis), mesh.get_local_rank(axis)) for axis in shard_axes(parameter))


def is_sharded(tensor: Tensor) -> bool:
    """Return whether the ranks of a mesh may hold different parts of a tensor."""
    return isinstance(tensor, DTensor)


def placeholder_for(parameter: nn.Parameter) -> nn.Parameter:
    """Return a plain parameter of a sharded one's full shape: zeros, which take no memory until read."""
    full = torch.zeros(parameter.shape, dtype=parameter.dtype, device=local_of(parameter).device)
    made = nn.Parameter(full, requires_grad=parameter.requires_grad)
    vars(made).update(users_attributes(parameter), fxdp_placeholder=True)
    return made


def is_placeholder_parameter(tensor: Tensor) -> bool:
    """Return whether a parameter is a placeholder: the shape of a sharded one, without its values."""
    return getattr(tensor, "fxdp_placeholder", False)


def signature_values(
    graph: fx.Graph, module: nn.Module, constants: Mapping[str, Tensor]
) -> dict[InputSpec, Tensor]:
    """Return this rank's local tensors of the parameters, buffers and constants that a program reads.

    A constant missing from `constants` is computed for each step, and is left out.
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
