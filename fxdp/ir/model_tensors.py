"""The tensors of a model that programs read: one seam, so that only this file knows what a parameter is.

A parameter may be a `DTensor`, whose own memory is its local shard. Programs, the watch over replaced tensors
and the exchanges between ranks deal with memory, so all of them ask `held`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, fx, nn
from torch.distributed.tensor import DTensor

from fxdp.ir.notes import note
from fxdp.ir.slots import Buffer, Constant, Parameter, Slot
from fxdp.torch_compat import gradient_like, local_shard, shard_axes, shards_of, users_attributes


def held(tensor: Tensor) -> Tensor:
    """What this rank holds of a parameter or buffer: the tensor itself, or a `DTensor`'s local shard.

    It is the same object at each call, until somebody replaces it. A shard is no leaf of autograd's graph:
    gradients belong to the `DTensor`.
    """
    return local_shard(tensor) if isinstance(tensor, DTensor) else tensor


def whole_of(tensor: Tensor) -> Tensor:
    """All that the ranks hold of it, as one plain tensor; of a `DTensor` all ranks ask together."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def all_held(tensors: Sequence[Tensor]) -> list[Tensor]:
    """`held` of each; where all are sharded, as a model's parameters are, in a third of the time."""
    try:
        return shards_of(tensors)  # type: ignore[arg-type]
    except AttributeError:  # a plain tensor among them
        return [*map(held, tensors)]


def rows_like(parameter: DTensor, rows: Tensor) -> DTensor:
    """A sharded parameter's gradient of this rank's rows, which may be padded to those of the first rank."""
    own = held(parameter).shape[0]
    return gradient_like(parameter, rows if rows.shape[0] == own else rows[:own])


def dealing_of(parameter: DTensor) -> tuple[tuple[int, int], ...]:
    """How a sharded parameter's rows are dealt out: over how many ranks, and to which of them, each time."""
    mesh = parameter.device_mesh
    return tuple((mesh.size(axis), mesh.get_local_rank(axis)) for axis in shard_axes(parameter))


def is_sharded(tensor: Tensor) -> bool:
    """Whether the ranks of a mesh may hold different parts of it."""
    return isinstance(tensor, DTensor)


def stand_in_for(parameter: nn.Parameter) -> nn.Parameter:
    """A plain parameter of a sharded one's whole shape: zeros, which take no memory until read."""
    whole = torch.zeros(parameter.shape, dtype=parameter.dtype, device=held(parameter).device)
    made = nn.Parameter(whole, requires_grad=parameter.requires_grad)
    vars(made).update(users_attributes(parameter), fxdp_stand_in=True)
    return made


def is_stand_in(tensor: Tensor) -> bool:
    """Whether a parameter has the shape of a sharded one but not its values."""
    return getattr(tensor, "fxdp_stand_in", False)


def slot_values(graph: fx.Graph, module: nn.Module, constants: Mapping[str, Tensor]) -> dict[Slot, Tensor]:
    """What this rank holds for the parameters, buffers and (captured) constants that a program reads.

    A constant that is not among `constants` is made for each step, and is left out.
    """
    values: dict[Slot, Tensor] = {}
    for node in graph.find_nodes(op="placeholder"):
        match note(node).slot:
            case Parameter(name) as slot:
                values[slot] = held(module.get_parameter(name))
            case Buffer(name) as slot:
                values[slot] = held(module.get_buffer(name))
            case Constant(name) as slot if name in constants:
                values[slot] = constants[name]
    return values
