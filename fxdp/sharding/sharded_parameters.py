"""Shard a model's parameters: `DTensor`s over one flat buffer per dtype, and placeholders for capture.

    flat f32     | fc1.weight rows | fc1.bias rows | fc2.weight rows | ..    in the model's order, padded
    parameters   DTensor Shard(0)    DTensor         DTensor                 views of flat, by model names

A bucket of adjacent parameters is gathered without packing. On one host the buffer is memory shared by all
ranks, in which shards that fill pages come first: the ranks of the host map these pages without a copy.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fxdp.errors import InputError, StateError
from fxdp.ir.graph.model_tensors import is_sharded, local_of, placeholder_for, sharding_of
from fxdp.ir.network.zero_copy_gathers import shares_memory
from fxdp.ir.ops.parameter_shards import fills_pages, largest_shard, shard_range
from fxdp.ranks.agreement import agree, broadcast_tensors, gather_objects, model_lines, sorted_buffers
from fxdp.ranks.process_mesh import ProcessMesh
from fxdp.sharding.initial_values import initialise
from fxdp.sharding.superseded import check_classes, supersede
from fxdp.torch_compat import (
    act_as_plain,
    dtensor_like,
    mesh_with_last,
    set_data_by,
    shard_axes,
    sharded_tensor,
    take_over,
)


def share_values(module: nn.Module, process_mesh: ProcessMesh, lines: Sequence[str] = ()) -> None:
    """Broadcast rank 0's values, except sharded parameters, which have these values; a collective call.

    Raises
    ------
    AgreementError : the ranks hold different models, or differ in `lines`.
    RankFailedError : another rank failed or died.
    """
    if process_mesh.mesh.world > 1:
        agree(process_mesh, [*model_lines(module), *lines], "models or options")
        buffers = [buffer for _, buffer in sorted_buffers(module)]
        tensors = [t.detach() for t in (*module.parameters(), *buffers) if not is_sharded(t)]
        broadcast_tensors(process_mesh, tensors)


def shard_parameters(module: nn.Module, process_mesh: ProcessMesh) -> None:
    """Replace the parameters of `module` by `DTensor`s with rank 0's values; each rank holds its shard.

    A collective call. Tied parameters stay tied; a parameter without dims is not sharded. An object that
    holds an old parameter, such as an optimizer, reaches the new parameter through the old one.

    Raises
    ------
    AgreementError : the ranks hold different models.
    InputError : parameters of classes with `__slots__`.
    RankFailedError : another rank failed or died.
    """
    if process_mesh.device_mesh is not None:
        check_classes(module)
    share_values(module, process_mesh)
    made = _sharded_parameters(module.parameters(), process_mesh)
    if made:
        _replace(module, made)
        supersede(made)
        _let_states_be_saved(module)


def materialise(module: nn.Module, process_mesh: ProcessMesh) -> set[str]:
    """Shard a model on the meta device, and draw initial values; return the names of tensors without values.

    A collective call.

    Raises
    ------
    AgreementError : the ranks hold different models.
    InputError : parameters of classes with `__slots__`.
    RankFailedError : another rank failed or died.
    """
    if process_mesh.device_mesh is not None:
        check_classes(module)
    agree(process_mesh, model_lines(module), "models")
    device = torch.device(process_mesh.mesh.device_type)
    rows = _sharded_parameters(module.parameters(), process_mesh, device)
    made: dict[Tensor, Tensor] = dict(rows.items())
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor not in made:
            value = torch.zeros(tensor.shape, dtype=tensor.dtype, device=device)
            if isinstance(tensor, nn.Parameter):
                made[tensor] = parameter = nn.Parameter(value, tensor.requires_grad)
                take_over(parameter, tensor)
            else:
                made[tensor] = value
    own = torch.get_rng_state()
    first = torch.frombuffer(
        bytearray(gather_objects(process_mesh, own.numpy().tobytes())[0]), dtype=torch.uint8
    )
    torch.set_rng_state(first)
    unset = set(initialise(module, made, _keep))
    if not torch.equal(own, first):  # ranks with different seeds: only the model is rank 0's
        torch.set_rng_state(own)
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    names = {name for name, tensor in named if tensor in unset}
    _replace(module, made)
    supersede(rows)
    _let_states_be_saved(module)
    return names


def _keep(made: Tensor, full: Tensor) -> None:
    local_of(made).detach().copy_(_own_shard_of(made, full) if isinstance(made, DTensor) else full)


def _let_states_be_saved(module: nn.Module) -> None:
    """Make `state_dict()` of the model and of each submodule return tensors that can be copied and pickled.

    Also make `load_state_dict()` accept full tensors, and `parameter.data = value` write the shard.
    """
    for each in module.modules():
        each.register_state_dict_post_hook(_as_saved)  # type: ignore[no-untyped-call]
        each.register_load_state_dict_pre_hook(_shards)  # type: ignore[no-untyped-call]
        each.register_load_state_dict_post_hook(_let_data_be_set)  # type: ignore[no-untyped-call]
        _let_data_be_set(each)


def _let_data_be_set(module: nn.Module, *_: Any) -> None:
    # after each load, because assign=True creates new parameters
    own: dict[str, Any] = module._parameters
    for parameter in own.values():
        if isinstance(parameter, DTensor):
            set_data_by(_write, parameter)


def _as_saved(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    for name, value in state.items():
        # a shard detached by torch keeps its offset in the buffer, but not the memory before
        if isinstance(value, DTensor) and not isinstance(value, nn.Parameter) and value.storage_offset():
            state[name] = dtensor_like(value, local_of(value))


def _sharded_parameters(
    parameters: Iterable[nn.Parameter], process_mesh: ProcessMesh, device: torch.device | None = None
) -> dict[nn.Parameter, Tensor]:
    """Return a `DTensor` for each parameter with dims; all shards of one dtype are in one buffer.

    Parameters on the meta device have no values yet; their shards are allocated on `device`.
    """
    if process_mesh.device_mesh is None:
        return {}
    mesh, device_mesh = process_mesh.mesh, mesh_with_last(process_mesh.device_mesh, "pp")
    act_as_plain(device_mesh)
    names, sharded_along = device_mesh.mesh_dim_names or (), {mesh.shard_axis or mesh.axes[0], "pp"}
    axes = tuple(i for i, name in enumerate(names) if name in sharded_along)
    alike: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
    for parameter in parameters:
        if parameter.dim() > 0:
            alike.setdefault((parameter.dtype, device or parameter.device), []).append(parameter)
    made: dict[nn.Parameter, Tensor] = {}
    for (dtype, where), members in alike.items():
        shown = shares_memory(mesh) and where.type == "cpu"
        if shown:
            members.sort(key=lambda p: not fills_pages(p.shape, p.itemsize, mesh.size))
        each = [largest_shard(len(p), mesh.sharding) * prod(p.shape[1:]) for p in members]
        # one element more than needed: `with_padding` recognizes memory that stays, as opposed to a cast's,
        # by that
        flat = _zeros(sum(each) + 1, dtype, where, process_mesh if shown else None)
        for parameter, room in zip(members, torch.split(flat[:-1], each), strict=True):
            first, last = shard_range(len(parameter), mesh.sharding)
            rows = parameter.detach()[first:last]
            local = room[: rows.numel()].view(rows.shape)
            if not rows.is_meta:
                local.copy_(rows)
            made[parameter] = sharded = sharded_tensor(local, parameter, device_mesh, axes)
            take_over(sharded, parameter)
            if parameter.grad is not None:
                own = parameter.grad[first:last].clone()
                sharded.grad = sharded_tensor(own, parameter, device_mesh, axes).detach()
    return made


def _zeros(count: int, dtype: torch.dtype, device: torch.device, seen_by: ProcessMesh | None) -> Tensor:
    comms = None if seen_by is None else seen_by.comms
    memory = None if comms is None else comms.transport.shard_memory(count, dtype)
    return torch.zeros(count, dtype=dtype, device=device) if memory is None else memory


def _replace(module: nn.Module, made: Mapping[Any, Tensor]) -> None:
    """Replace parameters and buffers."""
    for owner in module.modules():
        registries: tuple[dict[str, Any], ...] = (owner._parameters, owner._buffers)
        for registry in registries:
            for name, tensor in registry.items():
                if tensor is not None and tensor in made:
                    registry[name] = made[tensor]


@contextlib.contextmanager
def full_placeholders(module: nn.Module) -> Iterator[None]:
    """Give the model parameters with full shapes and without values inside the block, for capture alone."""
    sharded = [p for p in module.parameters() if is_sharded(p)]
    placeholders = {parameter: placeholder_for(parameter) for parameter in sharded}
    _replace(module, placeholders)
    try:
        yield
    finally:
        _replace(module, {placeholder: parameter for parameter, placeholder in placeholders.items()})


def _shards(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Replace full tensors by this rank's shards in a state that is being loaded into `module`."""
    if not prefix:  # the module on which load_state_dict was called comes first
        _check_shapes(module, state)
    own: dict[str, Any] = module._parameters
    for name, parameter in own.items():
        value = state.get(prefix + name)
        if isinstance(parameter, DTensor) and isinstance(value, Tensor):
            state[prefix + name] = _shard_like(parameter, value)


def _check_shapes(module: nn.Module, state: Mapping[str, Any]) -> None:
    """Raise if tensors do not fit sharded parameters, listing all, before anything is loaded."""
    given = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    wrong = [
        f"{name} {[*given[name].shape]}, expected {[*parameter.shape]}"
        for name, parameter in module.named_parameters(remove_duplicate=False)
        if is_sharded(parameter) and name in given and given[name].shape != parameter.shape
    ]
    if wrong:
        raise InputError("the state dict has tensors of other shapes:\n  " + "\n  ".join(wrong))


def _write(parameter: DTensor, value: Tensor) -> None:
    """Write a value into the shard, as `parameter.data = value` requires."""
    if (value.shape, value.dtype) != (parameter.shape, parameter.dtype):
        raise StateError(
            f"`.data = {value.dtype}{list(value.shape)}` for a sharded parameter of "
            f"{parameter.dtype}{list(parameter.shape)}; expected its own shape and dtype"
        )
    with torch.no_grad():
        parameter.copy_(_shard_like(parameter, value))


def _shard_like(parameter: DTensor, full: Tensor) -> Tensor:
    """Return this rank's shard of a value, sharded like the parameter; a `DTensor` is returned unchanged."""
    if isinstance(full, DTensor):
        return full
    rows = _own_shard_of(parameter, full).to(local_of(parameter))
    return sharded_tensor(rows, parameter, parameter.device_mesh, shard_axes(parameter)).detach()


def _own_shard_of(parameter: DTensor, full: Tensor) -> Tensor:
    first, last = shard_range(len(full), sharding_of(parameter))
    return full[first:last]
