"""What a checkpoint holds, by name, and how it differs from what a model and its optimizer want.

    model.<name of a parameter or buffer>
    optimizer.state.<name of a parameter>.<what its optimizer keeps>
    optimizer.param_groups.<number>.<option>
    step

These are the names that `torch.distributed.checkpoint` gives to `get_model_state_dict` and
`get_optimizer_state_dict` in one dict, so it can read what is saved here, and this what it saved.
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

from fxdp.module.superseded import adopt_successors
from fxdp.torch_compat import flatten_state_dict

_STATE = "optimizer.state."
_GROUPS = "optimizer.param_groups."


def state_of(model: nn.Module, optimizer: Optimizer | None) -> dict[str, Any]:
    """Model and optimizer as they are; the tensors are their own."""
    state: dict[str, Any] = {"model": get_model_state_dict(model)}
    if optimizer is not None:
        adopt_successors(optimizer)
        fresh = not optimizer.state
        with _as_trained(optimizer):
            # torch makes an optimizer's state by a step that changes no parameter, but counts as one
            state["optimizer"] = get_optimizer_state_dict(model, optimizer)
        if fresh:
            optimizer.state.clear()
            state["optimizer"]["state"] = {}
    return state


def wanted_by(model: nn.Module, optimizer: Optimizer | None, metadata: Metadata) -> dict[str, Any]:
    """What to load: the model's own tensors, and an optimizer's state for parameters that have some there.

    Parameters that have not got a gradient yet have none.
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
    state["optimizer"] = made
    return state


def _to_load_into(optimizer: Optimizer) -> defaultdict[Any, Any]:
    """A copy of what it keeps; nothing, if a parameter has no state: torch makes all of it by a step.

    Those that make it when they are made themselves, as Adagrad in torch 2.11, could not step without.
    """
    trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    if not all(map(optimizer.state.get, trained)):
        return defaultdict(dict)
    kept = {p: tree_map_only(Tensor, Tensor.clone, own) for p, own in optimizer.state.items()}
    return defaultdict(dict, kept)


def differences(state: Mapping[str, Any], metadata: Metadata) -> list[str]:
    """All names that are missing, extra or of another shape in the checkpoint, a line for each."""
    wanted, _ = flatten_state_dict(dict(state))
    there = {k: m for k, m in metadata.state_dict_metadata.items() if k.partition(".")[0] in state}
    lines = []
    if _groups(wanted) != _groups(there):  # one line for the many options of groups
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
    """Let model and optimizer have what was loaded."""
    set_model_state_dict(model, state["model"])
    if optimizer is not None:
        # those without a gradient yet have no state, which torch calls not strict
        options = StateDictOptions(strict=False)
        with _as_trained(optimizer):
            set_optimizer_state_dict(model, optimizer, state["optimizer"], options=options)


def _groups(keys: Iterable[str]) -> int:
    return len({key.split(".")[2] for key in keys if key.startswith(_GROUPS)})


def _shape(value: Any) -> list[int] | None:
    return list(value.shape) if isinstance(value, Tensor) else None


def _spoken(shape: list[int] | None) -> str:
    return "no tensor" if shape is None else str(shape)


@contextmanager
def _as_trained(optimizer: Optimizer) -> Iterator[None]:
    """Inside, all parameters train, and none has a gradient.

    Where one has, torch makes no state, and later finds none. And it leaves out what is kept of those that
    are frozen now, which may have been trained before and may be again.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    gradients = [p.grad for p in parameters]
    frozen = [p for p in parameters if not p.requires_grad and (p.is_floating_point() or p.is_complex())]
    for parameter in parameters:
        parameter.grad = None
    for parameter in frozen:
        parameter.requires_grad_(True)
    try:
        with torch.enable_grad():
            yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
