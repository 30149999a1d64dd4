"""The contents of a checkpoint by name, and the differences from a model and an optimizer.

    model.<name of a parameter or buffer>
    optimizer.state.<name of a parameter>.<name of the state>
    optimizer.param_groups.<number>.<option>
    step

These names are the names that `torch.distributed.checkpoint` uses for `get_model_state_dict` and
`get_optimizer_state_dict` in one dict, so torch can read checkpoints of fxdp, and fxdp checkpoints of torch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from fxdp.sharding.superseded import adopt_successors
from fxdp.torch_compat import flatten_state_dict, without_step_hooks

_STATE = "optimizer.state."
_GROUPS = "optimizer.param_groups."


def state_of(model: nn.Module, optimizer: Optimizer | None) -> dict[str, Any]:
    """Return the current state of model and optimizer, without copies of the tensors."""
    state: dict[str, Any] = {"model": get_model_state_dict(model)}
    if optimizer is not None:
        adopt_successors(optimizer)
        fresh = not optimizer.state
        with _as_trained(optimizer):
            # torch creates an optimizer's state by a step that changes no parameter, but counts as a step
            state["optimizer"] = get_optimizer_state_dict(model, optimizer)
        if fresh:
            optimizer.state.clear()
            state["optimizer"]["state"] = {}
    return state


def wanted_by(model: nn.Module, optimizer: Optimizer | None, metadata: Metadata) -> dict[str, Any]:
    """Return the state to load into: the model's own tensors, and optimizer state present in the checkpoint.

    A parameter without a gradient so far has no optimizer state.
    """
    state: dict[str, Any] = {"model": get_model_state_dict(model)}
    if optimizer is None:
        return state
    adopt_successors(optimizer)
    before = optimizer.state
    optimizer.state = _to_load_into(optimizer)
    try:
        with _as_trained(optimizer):
            made = get_optimizer_state_dict(model, optimizer)
    finally:
        optimizer.state = before
    there = {key.rpartition(".")[0] for key in metadata.state_dict_metadata if key.startswith(_STATE)}
    values: Any = made["state"]
    made["state"] = {name: own for name, own in values.items() if _STATE + name in there}
    groups: Any = made["param_groups"]
    for number, group in enumerate(groups):
        _add_options(group, optimizer, f"{_GROUPS}{number}.", metadata)
    state["optimizer"] = made
    return state


def _add_options(group: dict[str, Any], optimizer: Optimizer, prefix: str, metadata: Metadata) -> None:
    """Make a group's options that are not the optimizer's own, as `initial_lr`, those of the checkpoint.

    A scheduler adds them. It may be made before or after loading, and may have been absent at saving.
    """
    entries = metadata.state_dict_metadata
    there = {key.removeprefix(prefix): key for key in entries if key.startswith(prefix)}
    for name in group.keys() - there.keys() - optimizer.defaults.keys() - {"params"}:
        del group[name]
    for name in there.keys() - group.keys() - optimizer.defaults.keys():
        found = entries[there[name]]
        group[name] = None
        if isinstance(found, TensorStorageMetadata):
            group[name] = torch.empty(found.size, dtype=found.properties.dtype)


def _to_load_into(optimizer: Optimizer) -> defaultdict[Any, Any]:
    """Return a copy of the optimizer's state; empty if a parameter has none, as torch then creates all.

    An optimizer that creates state in its constructor (Adagrad in torch 2.11) could not step without state.
    """
    trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    if not all(map(optimizer.state.get, trained)):
        return defaultdict(dict)
    kept = {p: tree_map_only(Tensor, Tensor.clone, own) for p, own in optimizer.state.items()}
    return defaultdict(dict, kept)


def differences(state: Mapping[str, Any], metadata: Metadata) -> list[str]:
    """Return one line for each name that is missing, extra or of a different shape in the checkpoint."""
    wanted = flatten_state_dict(dict(state))
    there = {k: m for k, m in metadata.state_dict_metadata.items() if k.partition(".")[0] in state}
    lines = []
    if _groups(wanted) != _groups(there):  # one line instead of one for each of the many options of groups
        lines = [f"{_groups(there)} groups of parameters of an optimizer, expected {_groups(wanted)}"]
        wanted, there = ({k: v for k, v in o.items() if not k.startswith(_GROUPS)} for o in (wanted, there))
    lines += [f"missing: {key}" for key in wanted if key not in there]
    lines += [f"extra: {key}" for key in there if key not in wanted]
    for key in wanted.keys() & there.keys():
        shape, found = _shape(wanted[key]), there[key]
        other = list(found.size) if isinstance(found, TensorStorageMetadata) else None
        if shape != other:
            lines.append(f"{key} is {_spoken(other)}, expected {_spoken(shape)}")
    return sorted(lines)


def take(model: nn.Module, optimizer: Optimizer | None, state: Mapping[str, Any]) -> None:
    """Load the state into model and optimizer."""
    set_model_state_dict(model, state["model"])
    if optimizer is not None:
        # parameters without a gradient so far have no state, which torch allows with strict=False only
        options = StateDictOptions(strict=False)
        before = [dict(group) for group in optimizer.param_groups]
        with _as_trained(optimizer):
            set_optimizer_state_dict(model, optimizer, state["optimizer"], options=options)
        for group, own in zip(optimizer.param_groups, before, strict=True):
            for name in own.keys() - group.keys():  # of a scheduler that the checkpoint does not know
                group[name] = own[name]


def _groups(keys: Iterable[str]) -> int:
    return len({key.split(".")[2] for key in keys if key.startswith(_GROUPS)})


def _shape(value: Any) -> list[int] | None:
    return list(value.shape) if isinstance(value, Tensor) else None


def _spoken(shape: list[int] | None) -> str:
    return "no tensor" if shape is None else str(shape)


@contextmanager
def _as_trained(optimizer: Optimizer) -> Iterator[None]:
    """Make all parameters trainable, and remove gradients and hooks of steps inside the block.

    If a parameter has a gradient, torch creates no state, and later finds none. Torch also omits the state of
    frozen parameters, which may have been trained before and may be trained again. A step by which torch
    creates state is no step of the user's.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    gradients = [p.grad for p in parameters]
    frozen = [p for p in parameters if not p.requires_grad and (p.is_floating_point() or p.is_complex())]
    for parameter in parameters:
        parameter.grad = None
    for parameter in frozen:
        parameter.requires_grad_(True)
    try:
        with torch.enable_grad(), without_step_hooks(optimizer):
            yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
